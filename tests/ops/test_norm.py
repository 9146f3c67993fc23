"""Normalizations against float64 formulas and numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import Partial, ProgramError, Shard, TensorType
from fluidx.ir.placement import Placed, PlaceError
from fluidx.ops import norm

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 against float64


def run(op, *arrays, **attrs):
    attrs = op.complete_attrs(attrs)
    types = op.infer(*(None if a is None else TensorType(a.dtype.name, a.shape) for a in arrays), **attrs)
    types = types if isinstance(types, tuple) else (types,)
    outs = tuple(None if t is None else np.full(t.shape, np.nan, t.dtype) for t in types)
    if op.bind:
        call = op.bind(np, arrays, outs, attrs, None)
        call(), call()
    else:
        op.kernel(np, *arrays, out=outs if len(outs) > 1 else outs[0], **attrs)
    return outs if len(outs) > 1 else outs[0]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


def numeric(f, x, g, step=1e-5):
    """The gradient of sum(f(x) * g) by central differences in float64."""
    x = x.astype(float)
    d = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        d[i] = ((f(up) - f(down)) * g).sum() / (2 * step)
    return d


def batch_norm(x, scale, bias, eps=1e-5):
    x = x.astype(float)
    axes = (0, *range(2, x.ndim))
    shape = (1, -1) + (1,) * (x.ndim - 2)
    hat = (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + eps)
    return hat * scale.reshape(shape) + bias.reshape(shape)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2), st.booleans(), st.integers(0, 20))
def test_batch_norm_and_its_gradients_equal_the_formula(n, c, spatial, last, seed):
    rng = np.random.default_rng(seed)
    shape = (n, c, *rng.integers(1, 4, spatial))
    x, g, scale, bias = normal(rng, *shape) * 3 + 2, normal(rng, *shape), normal(rng, c), normal(rng, c)
    layout = "NHWC" if last and spatial else "NCHW"

    def to(a):
        return np.ascontiguousarray(np.moveaxis(a, 1, -1)) if layout == "NHWC" else a

    mean, var = np.zeros(c, "float32"), np.ones(c, "float32")
    y, mean_out, var_out, saved, inv = run(norm.BatchNorm, to(x), scale, bias, mean, var, momentum=0.75, data_layout=layout, epsilon=1e-2)
    np.testing.assert_allclose(y, to(batch_norm(x, scale, bias, 1e-2)), **CLOSE)
    axes = (0, *range(2, x.ndim))
    np.testing.assert_allclose(saved, x.mean(axis=axes), **CLOSE)
    np.testing.assert_allclose(mean_out, 0.25 * x.mean(axis=axes), **CLOSE)
    np.testing.assert_allclose(var_out, 0.75 + 0.25 * x.var(axis=axes), **CLOSE)
    dx, dscale, dbias = run(norm.BatchNormGrad, to(x), scale, saved, inv, to(g), data_layout=layout)
    np.testing.assert_allclose(dx, to(numeric(lambda v: batch_norm(v, scale, bias, 1e-2), x, g)), rtol=5e-3, atol=5e-4)
    np.testing.assert_allclose(dscale, numeric(lambda v: batch_norm(x, v, bias, 1e-2), scale, g), rtol=5e-3, atol=5e-4)
    np.testing.assert_allclose(dbias, g.sum(axis=axes), **CLOSE)


def test_batch_statistics_worked_by_hand():
    x = np.array([[1, 10], [3, 30]], "float32")
    ones, zeros = np.ones(2, "float32"), np.zeros(2, "float32")
    y, mean, var, _, inv = run(norm.BatchNorm, x, ones, zeros, zeros, ones, epsilon=0.0, momentum=0.5)
    assert y.tolist() == [[-1, -1], [1, 1]] and inv.tolist() == [1, np.float32(0.1)]
    assert mean.tolist() == [1, 10] and var.tolist() == [1, 50.5]


def test_running_statistics_may_be_written_in_place_and_rest_at_test_time():
    x = np.array([[1], [3]], "float32")
    mean, var, one = np.array([4], "float32"), np.array([1], "float32"), np.ones(1, "float32")
    y, saved, inv = np.empty_like(x), np.empty(1, "float32"), np.empty(1, "float32")
    attrs = {**norm.BatchNorm.attrs, "momentum": 0.5, "epsilon": 0.0}
    norm.BatchNorm.kernel(np, x, one, one, mean, var, out=(y, mean, var, saved, inv), **attrs)
    assert (mean[0], var[0], saved[0]) == (3, 1, 2) and y.tolist() == [[0], [2]]
    norm.BatchNorm.kernel(np, x, one, one, mean, var, out=(y, mean, var, saved, inv), **{**attrs, "is_test": True})
    assert (mean[0], var[0], saved[0]) == (3, 1, 3) and y.tolist() == [[-1], [1]]


def test_channels_in_many_blocks_give_what_one_block_gives(monkeypatch):
    rng = np.random.default_rng(0)
    x, g, weights = normal(rng, 4, 6, 3, 3), normal(rng, 4, 6, 3, 3), [normal(rng, 6) for _ in range(4)]
    weights[3] = np.abs(weights[3])

    def both():
        outs = run(norm.BatchNorm, x, *weights)
        return *outs, *run(norm.BatchNormGrad, x, weights[0], outs[3], outs[4], g)

    whole = both()
    monkeypatch.setattr(norm, "row_blocks", lambda rows, size, *rest: [slice(k, k + 1) for k in range(rows)])
    for a, b in zip(whole, both()):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def layer_norm(x, scale, bias, eps):
    x = x.astype(float)
    hat = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + eps)
    return hat * (1 if scale is None else scale) + (0 if bias is None else bias)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(2, 40), st.booleans(), st.booleans(), st.integers(0, 20))
def test_layer_norm_and_its_gradients_equal_the_formula(rows, columns, scaled, biased, seed):
    rng = np.random.default_rng(seed)
    x, g = normal(rng, rows, columns) * 2 + 5, normal(rng, rows, columns)
    scale, bias = normal(rng, columns) if scaled else None, normal(rng, columns) if biased else None
    y, mean, var = run(norm.LayerNorm, x, scale, bias, epsilon=1e-2)
    np.testing.assert_allclose(y, layer_norm(x, scale, bias, 1e-2), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mean, x.mean(axis=1), **CLOSE)
    np.testing.assert_allclose(var, x.var(axis=1), **CLOSE)
    dx, dscale, dbias = run(norm.LayerNormGrad, x, scale, bias, mean, var, g, epsilon=1e-2)
    np.testing.assert_allclose(dx, numeric(lambda v: layer_norm(v, scale, bias, 1e-2), x, g), rtol=5e-3, atol=5e-4)
    if scaled:
        np.testing.assert_allclose(dscale, numeric(lambda v: layer_norm(x, v, bias, 1e-2), scale, g), rtol=5e-3, atol=5e-4)
    if biased:
        np.testing.assert_allclose(dbias, g.sum(axis=0), **CLOSE)


def test_layer_norm_over_several_axes_is_over_their_product():
    x = normal(np.random.default_rng(0), 2, 3, 4)
    whole = run(norm.LayerNorm, x, None, None)[0]
    assert (whole.reshape(2, 12) == run(norm.LayerNorm, x.reshape(2, 12), None, None)[0]).all()


def test_group_norm_with_one_channel_per_group_is_instance_norm():
    rng = np.random.default_rng(0)
    x, scale, bias = normal(rng, 2, 3, 4, 2), normal(rng, 3), normal(rng, 3)
    y, mean, var = run(norm.GroupNorm, x, scale, bias, groups=3)
    z, saved, inv = run(norm.InstanceNorm, x, scale, bias)
    assert (y == z).all() and (mean.reshape(-1) == saved).all()
    np.testing.assert_allclose(inv, 1 / np.sqrt(var.reshape(-1) + 1e-5), rtol=1e-6)
    np.testing.assert_allclose((y[1, 2] - bias[2]) / scale[2], (x[1, 2] - x[1, 2].mean()) / np.sqrt(x[1, 2].var() + 1e-5), **CLOSE)


def test_norm_gives_length_one():
    y, length = run(norm.Norm, np.array([[3, 4], [0, 0]], "float32"), axis=1)
    assert length[0, 0] == 5
    np.testing.assert_allclose(y, [[0.6, 0.8], [0, 0]], rtol=1e-6)


def test_lrn_worked_by_hand():
    x = np.array([1, 2, 3], "float32").reshape(1, 3, 1, 1)
    y, mid = run(norm.Lrn, x, n=3, k=1.0, alpha=1.0, beta=1.0)
    assert mid.reshape(-1).tolist() == [6, 15, 14]
    np.testing.assert_allclose(y.reshape(-1), [1 / 6, 2 / 15, 3 / 14], rtol=1e-6)


def placed(name, shape, *placement):
    return Placed(name, TensorType("float32", shape), placement)


def test_split_rows_give_local_statistics_in_training_and_none_at_test_time():
    rows = Shard(0, "dp")
    args = [placed("x", (8, 3), rows), *(placed(n, (3,)) for n in ("scale", "bias", "mean", "var"))]
    local = (Partial("avg", "dp"),)
    assert norm.BatchNorm.place(*args, **norm.BatchNorm.attrs) == ((rows,), local, local, local, local)
    assert norm.BatchNorm.place(*args, **{**norm.BatchNorm.attrs, "is_test": True}) == ((rows,), (), (), (), ())
    with pytest.raises(PlaceError, match="%x is shard.1. over dp"):
        norm.BatchNorm.place(placed("x", (8, 3), Shard(1, "dp")), *args[1:], **norm.BatchNorm.attrs)


@pytest.mark.parametrize(
    "op, shapes, attrs, message",
    [
        (norm.BatchNorm, [(2, 3, 4), (4,), (3,), (3,), (3,)], {}, r"Scale must have shape \[3\] for X f32.2,3,4., got f32.4."),
        (norm.BatchNorm, [(3,), (3,), (3,), (3,), (3,)], {}, "needs X with at least 2 axes"),
        (norm.LayerNorm, [(2, 3), None, (2,)], {}, r"Bias must have shape \[3\]"),
        (norm.LayerNorm, [(2, 3), None, None], {"begin_norm_axis": 2}, "begin_norm_axis must be between 1 and 1"),
        (norm.GroupNorm, [(2, 3, 4), None, None], {"groups": 2}, "groups 2 must divide the 3 channels"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, shapes, attrs, message):
    with pytest.raises(ProgramError, match=message):
        op.infer(*(s and TensorType("float32", s) for s in shapes), **op.complete_attrs(attrs))
