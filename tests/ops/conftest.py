"""`run_op("reshape", x, shape=(2, 3))` runs one operator on arrays as a plan does: type rule first, then its view or kernel."""

from types import SimpleNamespace

import numpy as np
import pytest

from fluidx.ir import TensorType, np_dtype, opdef
from fluidx.ops import kernels


@pytest.fixture(scope="session")
def run_bound():
    """`run_bound(op, *arrays, **attrs)` returns the outputs of the op's kernel. Those of its body for NumPy, run twice, must be equal up
    to the order of sums.
    """

    def run(op, *arrays, **attrs):
        attrs = op.complete_attrs(attrs)
        types = op.infer(*(None if a is None else TensorType(a.dtype.name, a.shape) for a in arrays), **attrs)
        many = isinstance(types, tuple)
        outs = [tuple(None if t is None else np.full(t.shape, 7, t.dtype) for t in (types if many else (types,))) for _ in range(2)]
        given, memory = kernels.wide(op, np, arrays, outs[0])
        op.kernel(np, *given, out=tuple(memory) if many else memory[0], **attrs)
        kernels.narrow(np, outs[0], memory)
        given, memory = kernels.wide(op, np, arrays, outs[1])
        call = kernels.bind(op, np, given, memory, attrs, None, name="numpy")
        call(), call()
        kernels.narrow(np, outs[1], memory)
        for a, b in zip(*outs, strict=True):
            if a is not None:  # where terms cancel, the difference has the rounding errors of the larger terms
                np.testing.assert_allclose(a, b, 1e-5, 1e-6 * max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0))))
        return outs[0] if many else outs[0][0]

    return run


def one_device(step=0):
    return SimpleNamespace(step=step, key=step, rank=0, world_size=1)


@pytest.fixture
def run_op():
    def run(name, *args, ctx=None, part=None, **attrs):
        definition = opdef(name)
        attrs = dict(definition.complete_attrs(attrs))
        slots = {s.name: a if isinstance(a, list) else [a] for s, a in zip(definition.in_slots, args) if a is not None}
        types = definition.infer_outputs({s: [TensorType(a.dtype.name, a.shape) for a in values] for s, values in slots.items()}, attrs)
        if definition.storage.view is not None:
            seen = definition.storage.view(args[0], **attrs)
            if seen is not None:
                return seen
        empty = [[np.empty(t.shape, np_dtype(t.dtype)) for t in (ts if isinstance(ts, list) else [ts])] for ts in types]
        outs = [e if s.many else e[0] for e, s in zip(empty, definition.out_slots)]
        if definition.takes_ctx:
            attrs["ctx"] = ctx or one_device()
        if part is not None:
            attrs["part"] = part
        given, memory = kernels.wide(definition, np, args, outs)
        definition.kernel(np, *given, out=memory[0] if len(outs) == 1 else tuple(memory), **attrs)
        kernels.narrow(np, outs, memory)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run
