"""Activations and other functions of one tensor, one row each; their kernels and gradients follow from the expressions."""

from __future__ import annotations

import math
from functools import partial

from ..expr import (
    abs,
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atanh,
    ceil,
    cos,
    cosh,
    erf,
    exp,
    floor,
    isinf,
    log,
    log1p,
    max,
    min,
    round,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sinh,
    softplus,
    sqrt,
    tan,
    tanh,
    where,
)
from .declare import elementwise

POSITIVE = (0.2, 3.0)

activation = partial(elementwise, mixed="any")  # the result is never much larger than X: if X fits in 16 bits, the result does

activation("relu", lambda x: max(x, 0), dtypes="number", kinks=(0,), doc="max(X, 0). The gradient at 0 is 0.")
activation("relu6", lambda x, *, threshold: min(max(x, 0), threshold), attrs={"threshold": 6.0}, kinks=(0, 2), domain=(-4, 8),
    variants=({}, {"threshold": 2.0}), doc="min(max(X, 0), threshold).")  # fmt: skip
activation("leaky_relu", lambda x, *, alpha: where(x > 0, x, alpha * x), attrs={"alpha": 0.02}, kinks=(0,),
    variants=({}, {"alpha": 0.3}, {"alpha": 1.5}, {"alpha": 0.0}), doc="X where X is positive, else alpha * X.")  # fmt: skip
activation("elu", lambda x, *, alpha: where(x > 0, x, alpha * (exp(min(x, 0)) - 1)), attrs={"alpha": 1.0}, kinks=(0,),
    slope=lambda x, *, alpha: where(x > 0, 1, alpha * exp(min(x, 0))),
    variants=({}, {"alpha": 0.5}), doc="X where X is positive, else alpha * (exp(X) - 1).")  # fmt: skip
activation("selu", lambda x, *, scale, alpha: scale * where(x > 0, x, alpha * (exp(min(x, 0)) - 1)), kinks=(0,),
    slope=lambda x, *, scale, alpha: scale * where(x > 0, 1, alpha * exp(min(x, 0))),
    attrs={"scale": 1.0507009873554805, "alpha": 1.6732632423543772}, variants=({}, {"scale": 1.5, "alpha": 0.5}),
    doc="scale * X where X is positive, else scale * alpha * (exp(X) - 1).\n\nThe defaults keep mean 0 and variance 1 (Klambauer et al., "
    "Self-Normalizing Neural Networks, 2017).")  # fmt: skip
activation("sigmoid", lambda x: sigmoid(x), doc="1 / (1 + exp(-X)).")
activation("logsigmoid", lambda x: -softplus(-x), doc="log(sigmoid(X)), without overflow.")
activation("tanh", lambda x: tanh(x), doc="Hyperbolic tangent.")
activation("tanh_shrink", lambda x: x - tanh(x), doc="X - tanh(X).")
activation("softplus", lambda x: softplus(x), doc="log(1 + exp(X)), without overflow.")
activation("softsign", lambda x: where(isinf(x), sign(x), x / (1 + abs(x))), slope=lambda x: 1 / ((1 + abs(x)) * (1 + abs(x))),
    doc="X / (1 + |X|).")  # fmt: skip
activation("softshrink", lambda x, *, alpha: where(x > alpha, x - alpha, where(x >= -alpha, 0, x + alpha)), attrs={"alpha": 0.5},
    kinks=(-0.5, 0.5), doc="X moved towards 0 by alpha; 0 where |X| <= alpha.")  # fmt: skip
activation("hard_shrink", lambda x, *, threshold: where(abs(x) <= threshold, 0, x), attrs={"threshold": 0.5}, kinks=(-0.5, 0.5),
    doc="X where |X| > threshold, else 0.")  # fmt: skip
activation("hard_sigmoid", lambda x, *, slope, offset: min(max(slope * x + offset, 0), 1), attrs={"slope": 0.2, "offset": 0.5},
    kinks=(-2.5, 2.5, -1.25, 1.25), variants=({}, {"slope": 0.4}),
    doc="slope * X + offset, clipped to [0, 1].")  # fmt: skip


# Where another factor is 0, X is clipped to this bound: inf * 0 is NaN. In a slope, products with a factor of 0 are clipped on both sides.
_FLAT = 1000.0  # exp(-X) is 0 in every dtype


def _clipped(x, limit=_FLAT):
    return min(max(x, -limit), limit)


def _swish(x, *, beta):
    limit = -_FLAT / beta
    return where(beta > 0, max(x, limit), where(beta < 0, min(x, limit), x)) * sigmoid(beta * x)


def _swish_slope(x, *, beta):
    s = sigmoid(beta * x)
    return s + _clipped(beta * x) * (s * (1 - s))


def _gelu(x, *, approximate):
    inner = where(approximate, tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * (x * x)))), erf(math.sqrt(0.5) * x))
    return 0.5 * max(x, -_FLAT) * (1 + inner)


def _gelu_slope(x, *, approximate):
    h, k = _clipped(x), math.sqrt(2 / math.pi)
    t = tanh(k * (h + 0.044715 * (h * (h * h))))
    by_tanh = 0.5 * (1 + t) + 0.5 * k * h * ((1 - t * t) * (1 + 3 * 0.044715 * (h * h)))
    return where(approximate, by_tanh, 0.5 * (1 + erf(math.sqrt(0.5) * x)) + 0.5 * k * h * exp(-0.5 * (h * h)))


def _mish_slope(x):
    t = tanh(softplus(x))
    return t + _clipped(x) * ((1 - t * t) * sigmoid(x))


activation("hard_swish", lambda x, *, threshold, scale, offset: max(x, -offset) * (min(max(x + offset, 0), threshold) / scale),
    attrs={"threshold": 6.0, "scale": 6.0, "offset": 3.0}, domain=(-5, 5), kinks=(-3, 3),
    doc="X * min(max(X + offset, 0), threshold) / scale.")  # fmt: skip
activation("swish", _swish, slope=_swish_slope, attrs={"beta": 1.0}, variants=({}, {"beta": 1.7}, {"beta": -0.5}, {"beta": 0.0}),
    doc="X * sigmoid(beta * X).")  # fmt: skip
activation("gelu", _gelu, slope=_gelu_slope, attrs={"approximate": False}, variants=({}, {"approximate": True}),
    doc="X times the normal distribution function of X; `approximate` uses tanh.\n\nHendrycks and Gimpel, Gaussian Error Linear "
        "Units, 2016.")  # fmt: skip
activation("mish", lambda x: max(x, -_FLAT) * tanh(softplus(x)), slope=_mish_slope, doc="X * tanh(softplus(X)).")
activation("brelu", lambda x, *, t_min, t_max: min(max(x, t_min), t_max), attrs={"t_min": 0.0, "t_max": 24.0}, kinks=(0, -1, 1),
    variants=({}, {"t_min": -1.0, "t_max": 1.0}), doc="X clipped to [t_min, t_max].")  # fmt: skip
activation("stanh", lambda x, *, scale_a, scale_b: scale_b * tanh(scale_a * x), attrs={"scale_a": 0.67, "scale_b": 1.7159},
    variants=({}, {"scale_a": 0.5}), doc="scale_b * tanh(scale_a * X).")  # fmt: skip
activation("thresholded_relu", lambda x, *, threshold: where(x <= threshold, 0, x), attrs={"threshold": 1.0}, kinks=(1, 0.5),
    variants=({}, {"threshold": 0.5}), doc="X where X is above the threshold, else 0.")  # fmt: skip

elementwise("exp", lambda x: exp(x), doc="e to the power of X.")
elementwise("log", lambda x: log(x), domain=POSITIVE, doc="Natural logarithm.")
elementwise("log1p", lambda x: log1p(x), domain=POSITIVE, doc="log(1 + X), accurate near 0.")
elementwise("sqrt", lambda x: sqrt(x), domain=POSITIVE, doc="Square root.")
elementwise("rsqrt", lambda x: rsqrt(x), domain=POSITIVE, doc="1 / sqrt(X).")
elementwise("square", lambda x: x * x, dtypes="number", doc="X * X.")
elementwise("reciprocal", lambda x: 1 / x, domain=POSITIVE, doc="1 / X.")
activation("abs", lambda x: abs(x), dtypes="number", kinks=(0,), doc="Absolute value. The gradient at 0 is 0.")
elementwise("sin", lambda x: sin(x), doc="Sine of radians.")
elementwise("cos", lambda x: cos(x), doc="Cosine of radians.")
elementwise("tan", lambda x: tan(x), domain=(-1.4, 1.4), doc="Tangent of radians.")
elementwise("sinh", lambda x: sinh(x), doc="Hyperbolic sine.")
elementwise("cosh", lambda x: cosh(x), doc="Hyperbolic cosine.")
elementwise("asin", lambda x: asin(x), domain=(-0.9, 0.9), doc="The angle in radians whose sine is X.")
elementwise("acos", lambda x: acos(x), domain=(-0.9, 0.9), doc="The angle in radians whose cosine is X.")
elementwise("atan", lambda x: atan(x), doc="The angle in radians whose tangent is X.")
elementwise("asinh", lambda x: asinh(x), doc="The number whose hyperbolic sine is X.")
elementwise("acosh", lambda x: acosh(x), domain=(1.2, 4.0), doc="The number, not negative, whose hyperbolic cosine is X.")
elementwise("atanh", lambda x: atanh(x), domain=(-0.9, 0.9), doc="The number whose hyperbolic tangent is X.")
elementwise("erf", lambda x: erf(x), doc="The error function, to 5e-7 in float32 and 1e-15 in float64.")
activation("sign", lambda x: sign(x), dtypes="number", kinks=(0,), doc="-1, 0 or 1: the sign of X. The gradient is 0.")

STEPS = tuple(k / 2 for k in range(-6, 7))
elementwise("floor", lambda x: floor(x), kinks=STEPS, doc="X rounded down. The gradient is 0.")
elementwise("ceil", lambda x: ceil(x), kinks=STEPS, doc="X rounded up. The gradient is 0.")


def _round(x, *, ties_to_even):
    whole = floor(abs(x))
    return where(ties_to_even, round(x), sign(x) * where(abs(x) - whole >= 0.5, whole + 1, whole))


elementwise("round", _round, attrs={"ties_to_even": False}, kinks=STEPS, variants=({}, {"ties_to_even": True}),
    doc="The nearest integer, halves away from zero, or with `ties_to_even` to the even one. The gradient is 0.")  # fmt: skip
