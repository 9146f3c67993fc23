"""Every update op on the vector machine has the bits of its NumPy formula, in place and not, on one thread and two."""

import numpy as np
import pytest

import fluidx
from fluidx import native
from fluidx.ir.opdef import OPS
from fluidx.ops.update.base import SCALARS, Update
from tests.each import each

UPDATES = {name: op for name, op in sorted(OPS.items()) if isinstance(op, type) and issubclass(op, Update)}
CASES = [(name, i) for name, op in UPDATES.items() for i, _ in enumerate(op.samples())]


def arguments(op, sample, n):
    """The sample's inputs; with `n` the tensors are as long as that, of the same signs and sizes."""
    rng = np.random.default_rng(0)
    ins = [None if a is None else np.asarray(a).copy() for a in sample.args]
    if n is None:
        return ins
    return [a if a is None or s.name in SCALARS else rng.choice(a.ravel(), n) for a, s in zip(ins, op.in_slots, strict=True)]


def results(op, ins, attrs, how, inplace):
    """The outputs of one step; in place, inputs that the op updates are the outputs."""
    ins = [None if a is None else a.copy() for a in ins]
    names = [s.name for s in op.in_slots]
    source = {out: name for name, out in op.storage.inplace}
    types = op.infer(*(None if a is None else fluidx.ir.TensorType(a.dtype.name, a.shape) for a in ins), **attrs)
    outs = []
    for s, t in zip(op.out_slots, types if isinstance(types, tuple) else (types,), strict=True):
        own = ins[names.index(source[s.name])] if s.name in source else None
        outs.append(own if inplace and own is not None else np.full(t.shape, np.nan, t.dtype))
    how(op, ins, outs, attrs)
    return outs


def by_numpy(op, ins, outs, attrs):
    op.native.bind(ins, outs, attrs, None)()


def by_native(op, ins, outs, attrs):
    calls = op.native.calls(ins, outs, attrs)
    assert calls is not None
    native.compile(calls)()


@pytest.mark.parametrize("threads", [1, 2])
@each("n", [None, 1025, 40_000])
@each("name, case", CASES)
def test_a_step_has_the_bits_of_numpy(name, case, n, threads):
    op, sample = UPDATES[name], list(UPDATES[name].samples())[case]
    attrs = {**op.attrs, **sample.attrs}
    ins = arguments(op, sample, n)
    native.set_num_threads(threads)
    if attrs.get("lr_power", -0.5) != -0.5:
        assert op.native.calls(ins, [np.empty_like(ins[0]) for _ in op.out_slots], attrs) is None  # a power
        return
    for inplace in (False, True):
        expected = results(op, ins, attrs, by_numpy, inplace)
        for e, got in zip(expected, results(op, ins, attrs, by_native, inplace), strict=True):
            assert e.dtype == got.dtype and e.tobytes() == got.tobytes()


def test_other_dtypes_are_left_to_numpy():
    op = UPDATES["sgd"]
    p, g, lr = np.ones(4, "int32"), np.ones(4, "int32"), np.ones(1, "float32")
    assert op.native.calls([p, g, lr], [p], {}) is None
