"""batch_norm in C against its definition in float64, and the same bits for any number of threads."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import TensorType, opdef

SHAPES = [((5, 3, 2, 4), "NCHW"), ((3, 7, 9, 11), "NCHW"), ((4, 65, 1, 1), "NCHW"), ((33, 5, 17), "NCHW"), ((2, 3, 40, 41), "NCHW")]
SHAPES += [((6, 3), "NCHW"), ((700, 33), "NCHW")]
SHAPES += [((5, 2, 4, 3), "NHWC"), ((4, 9, 11, 16), "NHWC"), ((3, 30, 30, 2), "NHWC"), ((1, 1), "NCHW")]


def axes(x, layout):
    """The axes that a channel runs over, and weights seen so that they meet the channels."""
    last = layout == "NHWC" or x.ndim == 2
    over = tuple(k for k in range(x.ndim) if k != (x.ndim - 1 if last else 1))
    return over, (lambda w: w if last else w.reshape(-1, *[1] * (x.ndim - 2)))


def operands(shape, layout, dtype="float32", offset=0.0):
    rng = np.random.default_rng(0)
    c = shape[-1] if layout == "NHWC" or len(shape) == 2 else shape[1]
    x = (rng.standard_normal(shape) + offset).astype(dtype)
    return [x, *((rng.random(c) + 0.5).astype(dtype) for _ in range(4))]


def forward(x, scale, bias, mean, var, attrs):
    x, scale, bias, mean, var = (a.astype(float) for a in (x, scale, bias, mean, var))
    over, seen = axes(x, attrs["data_layout"])
    keep, given = attrs["momentum"], attrs["is_test"] or attrs["use_global_stats"]
    m, v = (mean, var) if given else (x.mean(over), x.var(over))
    inv = 1 / np.sqrt(v + attrs["epsilon"])
    outs = (mean, var) if given else (mean * keep + m * (1 - keep), var * keep + v * (1 - keep))
    return (x - seen(m)) * seen(scale * inv) + seen(bias), *outs, m, inv


def backward(x, scale, mean, inv, g, attrs):
    x, scale, mean, inv, g = (a.astype(float) for a in (x, scale, mean, inv, g))
    over, seen = axes(x, attrs["data_layout"])
    hat = (x - seen(mean)) * seen(inv)
    dbias, dscale = g.sum(over), (g * hat).sum(over)
    if attrs["use_global_stats"]:
        return g * seen(scale * inv), dscale, dbias
    return (g - seen(g.mean(over)) - hat * seen((g * hat).mean(over))) * seen(scale * inv), dscale, dbias


def run(name, ins, attrs, inplace=False):
    op = opdef(name)
    types = op.infer(*(TensorType(a.dtype.name, a.shape) for a in ins), **attrs)
    outs = [np.full(t.shape, np.nan, t.dtype) for t in types]
    ins = [a.copy() for a in ins]
    if inplace:
        outs[1], outs[2] = ins[3], ins[4]
    scratch = [np.full(t.shape, np.nan, t.dtype) for t in op.native.scratch([TensorType(a.dtype.name, a.shape) for a in ins], types, attrs)]
    assert op.native.calls(ins, outs, attrs, dry=True) is not None
    native.compile(op.native.calls(ins, outs, attrs, scratch=scratch))()
    return outs


def close(got, want, size=1.0):
    """Within some 40 roundings of numbers of this size."""
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max(initial=0) <= 40 * size * np.finfo(a.dtype).eps * max(1.0, np.abs(b).max(initial=0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, layout", SHAPES)
def test_forward_equals_its_definition(shape, layout, dtype):
    ins = operands(shape, layout, dtype)
    for told in ({}, {"is_test": True}, {"use_global_stats": True, "epsilon": 1e-3}, {"momentum": 0.5}):
        attrs = opdef("batch_norm").complete_attrs({"data_layout": layout, **told})
        got, inplace = run("batch_norm", ins, attrs), run("batch_norm", ins, attrs, inplace=True)
        if np.prod(shape) > shape[-1]:
            close(got, forward(*ins, attrs))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(got, inplace, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, layout", SHAPES[:-1])
def test_backward_equals_its_definition(shape, layout, dtype):
    x, scale, *_ = operands(shape, layout, dtype)
    over, _ = axes(x, layout)
    g = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    for told in ({}, {"use_global_stats": True}):
        attrs = opdef("batch_norm_grad").complete_attrs({"data_layout": layout, **told})
        ins = [x, scale, x.mean(over), 1 / np.sqrt(x.var(over) + x.dtype.type(1e-5)), g]
        got, want = run("batch_norm_grad", ins, attrs), backward(*ins, attrs)
        close(got, want, size=(x.size / scale.size) ** 0.5)


@pytest.mark.parametrize("shape, layout", [((8, 4, 30, 30), "NCHW"), ((8, 30, 30, 4), "NHWC"), ((4000, 3), "NCHW")])
def test_a_mean_far_from_zero_costs_no_digits_of_the_variance(shape, layout):
    """A difference of E[x^2] and E[x]^2 would have no digit left: 1e4^2 is 1e8 times the variance."""
    ins = operands(shape, layout, offset=1e4)
    attrs = opdef("batch_norm").complete_attrs({"data_layout": layout})
    saved = run("batch_norm", ins, attrs)[4]
    over, _ = axes(ins[0], layout)
    np.testing.assert_allclose(saved, 1 / np.sqrt(ins[0].astype(float).var(over) + 1e-5), rtol=1e-6)


@pytest.mark.parametrize("shape, layout", [((8, 40, 12, 12), "NCHW"), ((8, 12, 12, 40), "NHWC"), ((8, 200, 4, 4), "NCHW")])
def test_threads_do_not_change_bits(shape, layout):
    ins = operands(shape, layout)
    attrs, grad_attrs = (opdef(n).complete_attrs({"data_layout": layout}) for n in ("batch_norm", "batch_norm_grad"))
    results = []
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        y, _, _, mean, inv = outs = run("batch_norm", ins, attrs)
        results.append([a.tobytes() for a in (*outs, *run("batch_norm_grad", [ins[0], ins[1], mean, inv, y], grad_attrs))])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_nan_and_infinity_stay_in_their_channel(layout):
    ins = operands((4, 6, 6, 6), layout)
    over, _ = axes(ins[0], layout)
    channels = np.moveaxis(ins[0], -1 if layout == "NHWC" else 1, 0)
    channels[1].flat[0], channels[4].flat[3] = np.nan, np.inf
    y = run("batch_norm", ins, opdef("batch_norm").complete_attrs({"data_layout": layout}))[0]
    assert np.isnan(y).all(over).tolist() == np.isnan(y).any(over).tolist() == [False, True, False, False, True, False]


def test_outputs_may_be_left_away():
    ins, attrs = operands((4, 3, 5, 5), "NCHW"), opdef("batch_norm").complete_attrs({})
    y = np.empty_like(ins[0])
    native.compile(opdef("batch_norm").native.calls(ins, [y, None, None, None, None], attrs))()
    assert y.tobytes() == run("batch_norm", ins, attrs)[0].tobytes()


def test_what_is_not_covered_is_left_to_numpy():
    op, attrs = opdef("batch_norm"), opdef("batch_norm").complete_attrs({})
    ins = operands((4, 3, 5, 5), "NCHW")
    outs = [np.zeros_like(ins[0]), *(np.zeros_like(w) for w in ins[1:])]
    assert op.native.calls(ins, outs, attrs) is not None
    assert op.native.calls([ins[0].astype("float16"), *ins[1:]], outs, attrs) is None
    assert op.native.calls([ins[0][:, :, ::-1], *ins[1:]], outs, attrs) is None
    assert op.native.calls([ins[0][:0], *ins[1:]], [outs[0][:0], *outs[1:]], attrs) is None
