"""Every op that computes and has C kernels is given 16-bit floats in place of float32, one operand or result after the other: the kernels
compute the same, or there are none; none writes beyond a result."""

from itertools import islice

import numpy as np
import pytest

from fluidx import native
from fluidx.executor.context import RunContext
from fluidx.ir import Effect, TensorType, all_ops, np_dtype, opdef
from fluidx.ops.kernels import native_calls
from fluidx.testing.reference import run_op, type_of

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")

GUARD = 4096  # bytes behind each result
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 1e-4}
NAMES = [d.name for d in all_ops() if d.__module__.startswith("fluidx.ops.") and d.native.calls is not None and d.widens("cpu", ())]


def each(f, *values):
    """`f` of single values in parallel structures of lists; None stays."""
    if isinstance(values[0], list):
        return [each(f, *v) for v in zip(*values, strict=True)]
    return None if values[0] is None else f(*values)


def flat(values):
    for v in values:
        yield from flat(v) if isinstance(v, list) else [] if v is None else [v]


def guarded(t: TensorType):
    """Memory for a result, and the bytes behind it."""
    dtype = np_dtype(t.dtype)
    memory = np.full(int(np.prod(t.shape)) * dtype.itemsize + GUARD, 0x5A, "uint8")
    return memory[:-GUARD].view(dtype).reshape(t.shape), memory[-GUARD:]


def near(found, want, unit, label):
    a, b = np.asarray(found, "float64"), np.asarray(want, "float64")
    sure = np.isfinite(b) & (np.abs(b) < 6e4)
    off = np.abs(a - b)[sure]
    most = np.abs(b[sure]).max(initial=0)
    assert (off <= unit * np.abs(b[sure]) + unit * most / 4 + 1e-6).all(), f"{label}: off by {off.max()}"


def check(d, args, attrs, half, chosen):
    """Operand or result number `chosen` is `half`, or all are."""
    types = d.infer(*map(type_of, args), **attrs)
    outs = list(types) if isinstance(types, tuple) else [types]
    is_chosen = [chosen in (k, "all") for k in range(len(args) + len(outs))]

    def narrow(a, k):
        return each(lambda v: v.astype(half) if is_chosen[k] and v.dtype == np.float32 else v, a)

    ins = [narrow(a, k) for k, a in enumerate(args)]
    made = [
        each(lambda t, k=k: guarded(t.with_dtype(half.name) if is_chosen[k] and t.dtype == "float32" else t), t)
        for k, t in enumerate(outs, len(args))
    ]
    results = [each(lambda r: r[0], m) for m in made]
    if not any(a.dtype == half for a in flat([*ins, *results])):
        return
    extra = {"ctx": RunContext()} if d.native_takes_ctx else {}
    calls = native_calls(d, ins, results, attrs, **extra)
    if not calls:
        return
    native.compile(calls)()
    label = f"{d.name} with {chosen} of {[*args, *outs]} in {half}"
    assert all((behind == 0x5A).all() for _, behind in flat(made)), f"{label}: written beyond a result"
    wide = [each(lambda v: v.astype("float32") if v.dtype == half else v, a) for a in ins]
    unit = max(UNIT[half.name] if a.dtype == half or d.native.rounds else UNIT["float32"] for a in flat(results))
    for found, want in zip(flat(results), flat(run_op(d, wide, attrs)), strict=True):
        if d.effect is Effect.PURE:
            near(found, want, unit, label)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_take_16_bits_or_decline_them(name):
    d = opdef(name)
    for s in islice(d.samples(), 2):
        attrs = d.complete_attrs(s.attrs)
        for half in (np_dtype("float16"), np_dtype("bfloat16")):
            for chosen in ("all", *range(len(d.in_slots) + len(d.out_slots))):
                check(d, list(s.args), attrs, half, chosen)
