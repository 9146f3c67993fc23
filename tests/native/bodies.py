"""Helpers for tests of native bodies: an op on arrays by its C kernels, on one thread and two, whose bits must be the same."""

import numpy as np

from fluidx import native
from fluidx.ir import TensorType, np_dtype, opdef


def flat(values):
    for v in values:
        yield from v if isinstance(v, (list, tuple)) else [v]


def typed(a):
    return [typed(x) for x in a] if isinstance(a, list) else None if a is None else TensorType(a.dtype.name, a.shape)


def made(op, ins, attrs):
    """Arrays for the outputs, filled with what no kernel may leave behind."""
    types = op.infer(*map(typed, ins), **attrs)
    return [
        [np.full(x.shape, 77, np_dtype(x.dtype)) for x in t] if isinstance(t, list) else np.full(t.shape, 77, np_dtype(t.dtype))
        for t in (types if isinstance(types, tuple) else (types,))
    ]


def run(name, *ins, outs=None, told=None, **attrs):
    """The outputs of the op by native calls, or None where its native body does not cover the operands."""
    op = opdef(name)
    attrs, ins = op.complete_attrs(attrs), list(ins)
    results = []
    for threads in (1, 2):
        native.set_num_threads(threads)
        arrays = made(op, ins, attrs) if outs is None else [None if o is None else np.full_like(o, 77) for o in outs]
        dry = op.native.calls(ins, arrays, attrs, dry=True, **(told or {}))
        calls = op.native.calls(ins, arrays, attrs, **(told or {}))
        assert (dry is None) == (calls is None)
        if calls is None:
            return None
        native.compile(calls)()
        results.append(arrays)
    for a, b in zip(flat(results[0]), flat(results[1]), strict=True):
        assert a is None or a.tobytes() == b.tobytes(), "one thread and two give other bits"
    return results[0]


def one(name, *ins, **more):
    """The single output, which there is."""
    outs = run(name, *ins, **more)
    assert outs is not None and len(outs) == 1
    return outs[0]


def whole_numbers(shape, dtype="float32", seed=0, low=-4, high=5):
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


def normal(shape, dtype="float32", seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def close(got, exact, ulps=4, floor=1.0):
    """Within `ulps` units in the last place of the exact result, or of `floor` times its largest element where it is small."""
    eps = np.finfo(got.dtype).eps
    size = np.maximum(np.abs(exact), floor * np.abs(exact).max(initial=0) if floor else 0)
    worst = np.max(np.abs(got.astype("float64") - exact) / (eps * np.maximum(size, 1e-300)), initial=0)
    assert got.shape == exact.shape and worst <= ulps, f"{worst:.1f} units in the last place"
