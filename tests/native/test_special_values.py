"""NaN and infinities through pooling and losses: C and NumPy kernels give what the formula in float64 gives."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import OPS
from fluidx.testing.reference import run_op
from tests.each import each

BODIES = ["any", "numpy"] + ([] if native.why_not() else ["native"])
NAN, INF = np.nan, np.inf


def both(name, args, want, **attrs):
    """Every body gives `want`."""
    for body in BODIES:
        (found,) = run_op(OPS[name], args, OPS[name].complete_attrs(attrs), body=body)
        np.testing.assert_array_equal(found, want, f"{name} {attrs}, body {body}")


@each("layout", ["NCHW", "NHWC"])
@each("stride", [2, 1])
def test_the_first_nan_of_a_window_takes_the_gradient(layout, stride):
    x = np.float32([[1, NAN, 3, 4], [NAN, 2, 9, 5]])
    g = np.float32([[7, -INF]] if stride == 2 else [[7, 0.5, -INF]])
    want = np.zeros((2, 4), "float32")
    want[0, 1] = 7 if stride == 2 else 7.5
    want[1, 2] = -INF
    y = np.float32([[NAN, 9]] if stride == 2 else [[NAN, NAN, 9]])
    args = [np.expand_dims(a, (0, 1) if layout == "NCHW" else (0, 3)) for a in (x, y, g)]
    both("pool2d_grad", args, want.reshape(args[0].shape), ksize=(2, 2), strides=(2, stride), data_format=layout)


@each("g", [1.0, -INF, INF, NAN])
def test_the_gradient_of_a_loss_keeps_infinite_and_nan_factors(g):
    soft, label = np.float32([[0.25, 0.5, 0.25], [NAN, NAN, NAN]]), np.array([[1], [0]])
    with np.errstate(invalid="ignore"):
        want = np.float32([[0.25 * g, -0.5 * g, 0.25 * g], [NAN, NAN, NAN]])
        both("softmax_with_cross_entropy_grad", [soft, label, np.full((2, 1), g, "float32")], want)


def test_the_cross_entropy_of_nan_is_nan():
    x, label = np.float32([[NAN, 1], [0, 1], [1, 0]]), np.array([[0], [0], [0]])
    both("cross_entropy", [x, label], np.float32([[NAN], [1e20], [0]]))
    both("cross_entropy", [x, np.float32([[1, 0], [0, 1], [1, 0]])], np.float32([[NAN], [0], [0]]), soft_label=True)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_whole_numbers_wrap_around_where_they_overflow(dtype):
    top = np.iinfo(dtype).max
    x = np.array([[top, top, 3], [top, 1, -2]], dtype)
    with np.errstate(over="ignore"):
        both("reduce_sum", [x], np.array([np.add.reduce(r, dtype=dtype) for r in x], dtype), dim=(1,))
        both("reduce_prod", [x], np.array([np.multiply.reduce(r, dtype=dtype) for r in x], dtype), dim=(1,))
