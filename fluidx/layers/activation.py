"""Activation layers, and other functions of each element by itself: relu, gelu, softplus, exp, pow and others."""

from __future__ import annotations

from typing import Any

from .._checks import number, one_of, wrong
from ..initializer import Constant
from ..ir import Variable
from .helper import LayerWriter
from .layer_from_signature import row
from .math import elementwise_pow

# fmt: off
abs = row("abs(x, name=None)", "The absolute value of x. The shape and dtype are x's.")
acos = row("acos(x, name=None)", "The angle in radians whose cosine is x. The shape and dtype are x's.")
asin = row("asin(x, name=None)", "The angle in radians whose sine is x. The shape and dtype are x's.")
atan = row("atan(x, name=None)", "The angle in radians whose tangent is x. The shape and dtype are x's.")
ceil = row("ceil(x, name=None)", "x rounded up. The shape and dtype are x's.")
cos = row("cos(x, name=None)", "The cosine of x. The shape and dtype are x's.")
cosh = row("cosh(x, name=None)", "The hyperbolic cosine of x. The shape and dtype are x's.")
erf = row("erf(x, name=None)", "The error function of x. The shape and dtype are x's.")
exp = row("exp(x, name=None)", "e to the power of x. The shape and dtype are x's.")
floor = row("floor(x, name=None)", "x rounded down. The shape and dtype are x's.")
log = row("log(x, name=None)", "The natural logarithm of x. The shape and dtype are x's.")
logsigmoid = row("logsigmoid(x, name=None)", "log(1 / (1 + exp(-x))). The shape and dtype are x's.")
reciprocal = row("reciprocal(x, name=None)", "1 / x. The shape and dtype are x's.")
relu = row("relu(x, name=None)", "max(x, 0). The shape and dtype are x's.")
round = row("round(x, name=None)", "x rounded to the nearest integer, halves away from zero. The shape and dtype are x's.")
rsqrt = row("rsqrt(x, name=None)", "1 / sqrt(x). The shape and dtype are x's.")
sigmoid = row("sigmoid(x, name=None)", "1 / (1 + exp(-x)). The shape and dtype are x's.")
sign = row("sign(x, name=None)", "-1, 0 or 1, by the sign of x. The shape and dtype are x's.")
sin = row("sin(x, name=None)", "The sine of x. The shape and dtype are x's.")
sinh = row("sinh(x, name=None)", "The hyperbolic sine of x. The shape and dtype are x's.")
softplus = row("softplus(x, name=None)", "log(1 + exp(x)). The shape and dtype are x's.")
softsign = row("softsign(x, name=None)", "x / (1 + |x|). The shape and dtype are x's.")
sqrt = row("sqrt(x, name=None)", "The square root of x. The shape and dtype are x's.")
square = row("square(x, name=None)", "x * x. The shape and dtype are x's.")
tan = row("tan(x, name=None)", "The tangent of x. The shape and dtype are x's.")
tanh = row("tanh(x, name=None)", "The hyperbolic tangent of x. The shape and dtype are x's.")
tanh_shrink = row("tanh_shrink(x, name=None)", "x - tanh(x). The shape and dtype are x's.")
brelu = row("brelu(x, t_min=0.0, t_max=24.0, name=None)", "x kept within [t_min, t_max].")
elu = row("elu(x, alpha=1.0, name=None)", "x where it is positive, alpha * (exp(x) - 1) elsewhere.")
hard_shrink = row("hard_shrink(x, threshold: float | None = None)", "x, and 0 where it is within [-threshold, threshold] (0.5).")
hard_sigmoid = row("hard_sigmoid(x, slope=0.2, offset=0.5, name=None)", "slope * x + offset, kept within [0, 1].")
hard_swish = row("hard_swish(x, threshold=6.0, scale=6.0, offset=3.0, name=None)", "x * min(max(x + offset, 0), threshold) / scale.")
relu6 = row("relu6(x, threshold=6.0, name=None)", "min(max(x, 0), threshold).")
selu = row(
    "selu(x, scale: float | None = None, alpha: float | None = None, name=None)",
    "scale * x where x is positive, scale * alpha * (exp(x) - 1) elsewhere; the defaults are those of Klambauer et al. (2017).",
)
softshrink = row("softshrink(x, alpha: float | None = None)", "x moved towards 0 by alpha (0.5); 0 if it is closer than alpha.")
stanh = row("stanh(x, scale_a=0.67, scale_b=1.7159, name=None)", "scale_b * tanh(scale_a * x).")
swish = row("swish(x, beta=1.0, name=None)", "x * sigmoid(beta * x).")
thresholded_relu = row("thresholded_relu(x, threshold: float | None = None)", "x where it is above the threshold (1.0), 0 elsewhere.")

gelu = row("gelu(x, approximate=False, name=None)", """x times the normal distribution function of x; `approximate` uses the tanh formula.

    Shapes: the result has x's shape.

    Types: x is float16, bfloat16, float32 or float64, and so is the result.

    >>> fx.layers.gelu(fx.data("x", [-1, 3], "float32"))
    <Variable gelu_0.tmp_0: f32[-1,3]>
    """)

leaky_relu = row("leaky_relu(x, alpha=0.02, name=None)", """x where it is positive, alpha * x elsewhere.

    Shapes: the result has x's shape.

    Types: x is float16, bfloat16, float32 or float64, and so is the result.

    >>> fx.layers.leaky_relu(fx.data("x", [-1, 3], "float32"), alpha=0.1)
    <Variable leaky_relu_0.tmp_0: f32[-1,3]>
    """)
# fmt: on


def pow(x: Variable, factor: float | Variable = 1.0, name: str | None = None) -> Variable:
    """x to the power of `factor`, a number or a Variable of one element."""
    if isinstance(factor, Variable):
        return elementwise_pow(x, factor, name=name)
    helper = LayerWriter("pow", name)
    return helper.op("pow", helper.variable(x, "x"), factor=number(helper.label, "factor", factor))


def soft_relu(x: Variable, threshold: float = 40.0, name: str | None = None) -> Variable:
    """log(1 + exp(x)), with x kept within [-threshold, threshold]."""
    limit = number("layers.soft_relu", "threshold", threshold)
    helper = LayerWriter("soft_relu", name)
    return helper.op("softplus", helper.op("clip", helper.variable(x, "x"), min=-limit, max=limit))


def prelu(x: Variable, mode: str, param_attr: Any = None, name: str | None = None) -> Variable:
    """x where it is positive, alpha * x elsewhere, with a trained alpha that starts at 0.25.

    `mode` "all" has one alpha, "channel" one for each size of axis 1, "element" one for each element of a sample.
    """
    helper = LayerWriter("prelu", name)
    x = helper.variable(x, "x")
    one_of(helper.label, "mode", mode, ("all", "channel", "element"))
    if mode != "all" and x.ndim < 2:
        raise wrong(f"{helper.label}: mode {mode!r} needs 2 axes or more; variable {x.name!r} has shape {list(x.shape)}")
    shape: tuple[int, ...] = (1,)
    if mode == "channel":
        shape = (helper.known(x, "x", 1),)
    elif mode == "element":
        shape = tuple(helper.known(x, "x", a) for a in range(1, x.ndim))
    alpha = helper.parameter(param_attr, shape, x.dtype, default=Constant(0.25))
    if alpha is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no alpha; use relu")
    positive = helper.op("relu", x)
    negative = helper.op("elementwise_sub", x, positive)
    return helper.op("elementwise_add", positive, helper.op("elementwise_mul", negative, alpha, axis=-1 if mode == "all" else 1))


__all__ = [
    "abs", "acos", "asin", "atan", "brelu", "ceil", "cos", "cosh", "elu", "erf", "exp", "floor", "gelu", "hard_shrink", "hard_sigmoid",
    "hard_swish", "leaky_relu", "log", "logsigmoid", "pow", "prelu", "reciprocal", "relu", "relu6", "round", "rsqrt", "selu", "sigmoid",
    "sign", "sin", "sinh", "soft_relu", "softplus", "softshrink", "softsign", "sqrt", "square", "stanh", "swish", "tan", "tanh",
    "tanh_shrink", "thresholded_relu",
]  # fmt: skip
