"""layer_norm against float64 formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import ProgramError, TensorType
from fluidx.ops.nn.layer_norm import LayerNorm, LayerNormGrad
from fluidx.ops.nn.rms_norm import RMSNorm, RMSNormGrad
from fluidx.testing import numeric_grad

CLOSE = {"rtol": 2e-4, "atol": 2e-5}  # float32 against float64


def normal(rng, *shape):
    return rng.standard_normal(shape).astype("float32")


def slope(f, x, g):
    """The gradient of sum(f(x) * g) in float64."""
    return numeric_grad(lambda v: float((f(v) * g).sum()), x.astype(float))


def layer_norm(x, scale, bias, eps):
    x = x.astype(float)
    hat = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + eps)
    return hat * (1 if scale is None else scale) + (0 if bias is None else bias)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(2, 40), st.booleans(), st.booleans(), st.integers(0, 20))
def test_layer_norm_and_its_gradients_equal_the_formula(run_bound, rows, columns, scaled, biased, seed):
    rng = np.random.default_rng(seed)
    x, g = normal(rng, rows, columns) * 2 + 5, normal(rng, rows, columns)
    scale, bias = normal(rng, columns) if scaled else None, normal(rng, columns) if biased else None
    y, mean, var = run_bound(LayerNorm, x, scale, bias, epsilon=1e-2)
    np.testing.assert_allclose(y, layer_norm(x, scale, bias, 1e-2), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mean, x.mean(axis=1), **CLOSE)
    np.testing.assert_allclose(var, x.var(axis=1), **CLOSE)
    dx, dscale, dbias = run_bound(LayerNormGrad, x, scale, bias, mean, var, g, epsilon=1e-2)
    np.testing.assert_allclose(dx, slope(lambda v: layer_norm(v, scale, bias, 1e-2), x, g), rtol=5e-3, atol=5e-4)
    if scaled:
        np.testing.assert_allclose(dscale, slope(lambda v: layer_norm(x, v, bias, 1e-2), scale, g), rtol=5e-3, atol=5e-4)
    if biased:
        np.testing.assert_allclose(dbias, g.sum(axis=0), **CLOSE)


def test_layer_norm_over_several_axes_is_over_their_product(run_bound):
    x = normal(np.random.default_rng(0), 2, 3, 4)
    whole = run_bound(LayerNorm, x, None, None)[0]
    assert (whole.reshape(2, 12) == run_bound(LayerNorm, x.reshape(2, 12), None, None)[0]).all()


@pytest.mark.parametrize("shape", [(2, 4, 0), (2, 0, 4), (2, 3, 0, 0), (0, 3, 0)])
def test_empty_rows_with_weights_give_an_empty_result(run_bound, shape):
    x, none, stat = np.ones(shape, "float32"), np.ones(0, "float32"), np.ones(shape[0], "float32")
    assert run_bound(LayerNorm, x, none, none)[0].shape == run_bound(RMSNorm, x, none)[0].shape == shape
    assert [d.shape for d in run_bound(LayerNormGrad, x, none, none, stat, stat, x)] == [shape, (0,), (0,)]
    assert [d.shape for d in run_bound(RMSNormGrad, x, none, stat, x)] == [shape, (0,)]


@pytest.mark.parametrize(
    "op, shapes, attrs, message",
    [
        (LayerNorm, [(2, 3), None, (2,)], {}, r"Bias must have shape \[3\]"),
        (LayerNorm, [(2, 3), None, None], {"begin_norm_axis": 2}, "begin_norm_axis must be between 1 and 1"),
    ],
)
def test_operands_that_do_not_fit_are_refused(op, shapes, attrs, message):
    with pytest.raises(ProgramError, match=message):
        op.infer(*(s and TensorType("float32", s) for s in shapes), **op.complete_attrs(attrs))
