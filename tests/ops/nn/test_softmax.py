"""softmax and log_softmax against float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import ProgramError, TensorType
from fluidx.ops.nn.softmax import LogSoftmax, LogSoftmaxGrad, Softmax, SoftmaxGrad


def run(op, *arrays, axis=-1):
    found = np.full_like(arrays[0], np.nan)
    op.kernel(np, *arrays, out=found, axis=axis)
    return found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(0, 2), st.integers(0, 50))
def test_all_four_equal_their_formulas(shape, axis, seed):
    axis %= len(shape)
    rng = np.random.default_rng(seed)
    x, g = (rng.standard_normal(shape).astype("float32") * 5 for _ in range(2))
    wide = x.astype(float)
    e = np.exp(wide - wide.max(axis=axis, keepdims=True))
    y = e / e.sum(axis=axis, keepdims=True)
    close = {"rtol": 1e-5, "atol": 1e-5}  # float32 against float64
    np.testing.assert_allclose(run(Softmax, x, axis=axis), y, **close)
    np.testing.assert_allclose(run(LogSoftmax, x, axis=axis), np.log(y), **close)
    y32, g64 = y.astype("float32"), g.astype(float)
    want = y * (g64 - (g64 * y).sum(axis=axis, keepdims=True))
    np.testing.assert_allclose(run(SoftmaxGrad, y32, g, axis=axis), want, rtol=1e-4, atol=1e-5)
    want = g64 - y * g64.sum(axis=axis, keepdims=True)
    np.testing.assert_allclose(run(LogSoftmaxGrad, np.log(y32), g, axis=axis), want, rtol=1e-3, atol=1e-4)


def test_equal_logits_get_exactly_equal_shares():
    assert (run(Softmax, np.full((3, 4), 1000, "float32")) == 0.25).all()


def test_minus_infinity_masks_a_class_and_nan_stays():
    x = np.array([[0, -np.inf, 0], [np.nan, 1, 2]], "float32")
    y = run(Softmax, x)
    assert y[0].tolist() == [0.5, 0, 0.5] and np.isnan(y[1]).all()


def test_the_least_number_is_a_logit():
    """Rows of nothing else have equal shares, and beside it -infinity has none."""
    least = np.finfo("float32").min
    x = np.array([[least, least], [least, -np.inf], [least, 0]], "float32")
    assert run(Softmax, x).tolist() == [[0.5, 0.5], [1, 0], [0, 1]]
    assert run(LogSoftmax, x)[1:].tolist() == [[0, -np.inf], [least, 0]]


def test_results_may_overwrite_their_input():
    x = np.random.default_rng(0).standard_normal((5, 33)).astype("float32")
    for op in (Softmax, LogSoftmax):
        want, y = run(op, x), x.copy()
        op.kernel(np, y, out=y, axis=-1)
        assert (y == want).all()


def test_the_axis_must_exist():
    with pytest.raises(ProgramError, match="op softmax: axis 2 is out of range; expected -2 to 1 for 2 axes"):
        Softmax.infer(TensorType("float32", (3, 4)), axis=2)
