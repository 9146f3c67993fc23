"""Activation layers, and other functions of each element by itself: relu, gelu, softplus, exp, pow and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._checks import number, one_of, wrong
from ..initializer import Constant
from ..ir import Variable
from .helper import LayerWriter
from .math import elementwise_pow

_UNARY = {
    "abs": "The absolute value of x.",
    "acos": "The angle in radians whose cosine is x.",
    "asin": "The angle in radians whose sine is x.",
    "atan": "The angle in radians whose tangent is x.",
    "ceil": "x rounded up.",
    "cos": "The cosine of x.",
    "cosh": "The hyperbolic cosine of x.",
    "erf": "The error function of x.",
    "exp": "e to the power of x.",
    "floor": "x rounded down.",
    "log": "The natural logarithm of x.",
    "logsigmoid": "log(1 / (1 + exp(-x))).",
    "reciprocal": "1 / x.",
    "relu": "max(x, 0).",
    "round": "x rounded to the nearest integer, halves away from zero.",
    "rsqrt": "1 / sqrt(x).",
    "sigmoid": "1 / (1 + exp(-x)).",
    "sign": "-1, 0 or 1, by the sign of x.",
    "sin": "The sine of x.",
    "sinh": "The hyperbolic sine of x.",
    "softplus": "log(1 + exp(x)).",
    "softsign": "x / (1 + |x|).",
    "sqrt": "The square root of x.",
    "square": "x * x.",
    "tan": "The tangent of x.",
    "tanh": "The hyperbolic tangent of x.",
    "tanh_shrink": "x - tanh(x).",
}


def _unary(op_type: str, doc: str) -> Callable[..., Variable]:
    def layer(x: Variable, name: str | None = None) -> Variable:
        helper = LayerWriter(op_type, name)
        return helper.op(op_type, helper.variable(x, "x"))

    layer.__name__ = layer.__qualname__ = op_type
    layer.__doc__ = f"{doc} The shape and dtype are x's."
    return layer


for _name, _doc in _UNARY.items():
    globals()[_name] = _unary(_name, _doc)


def _with_numbers(op_type: str, x: Variable, name: str | None, **attrs: float) -> Variable:
    """An activation whose attributes are numbers."""
    helper = LayerWriter(op_type, name)
    numbers: dict[str, Any] = {k: number(helper.label, k, v) for k, v in attrs.items()}
    return helper.op(op_type, helper.variable(x, "x"), **numbers)


def pow(x: Variable, factor: float | Variable = 1.0, name: str | None = None) -> Variable:
    """x to the power of `factor`, a number or a Variable of one element."""
    if isinstance(factor, Variable):
        return elementwise_pow(x, factor, name=name)
    return _with_numbers("pow", x, name, factor=factor)


def gelu(x: Variable, approximate: bool = False, name: str | None = None) -> Variable:
    """x times the normal distribution function of x; `approximate` uses the tanh formula.

    Shapes: the result has x's shape.

    Types: x is float16, bfloat16, float32 or float64, and so is the result.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.gelu(fx.data("x", [-1, 3], "float32"))
    <Variable gelu_0.tmp_0: f32[-1,3]>
    """
    helper = LayerWriter("gelu", name)
    return helper.op("gelu", helper.variable(x, "x"), approximate=bool(approximate))


def relu6(x: Variable, threshold: float = 6.0, name: str | None = None) -> Variable:
    """min(max(x, 0), threshold)."""
    return _with_numbers("relu6", x, name, threshold=threshold)


def leaky_relu(x: Variable, alpha: float = 0.02, name: str | None = None) -> Variable:
    """x where it is positive, alpha * x elsewhere.

    Shapes: the result has x's shape.

    Types: x is float16, bfloat16, float32 or float64, and so is the result.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.leaky_relu(fx.data("x", [-1, 3], "float32"), alpha=0.1)
    <Variable leaky_relu_0.tmp_0: f32[-1,3]>
    """
    return _with_numbers("leaky_relu", x, name, alpha=alpha)


def elu(x: Variable, alpha: float = 1.0, name: str | None = None) -> Variable:
    """x where it is positive, alpha * (exp(x) - 1) elsewhere."""
    return _with_numbers("elu", x, name, alpha=alpha)


def selu(x: Variable, scale: float | None = None, alpha: float | None = None, name: str | None = None) -> Variable:
    """scale * x where x is positive, scale * alpha * (exp(x) - 1) elsewhere; the defaults are those of Klambauer et al. (2017)."""
    given = {k: v for k, v in (("scale", scale), ("alpha", alpha)) if v is not None}
    return _with_numbers("selu", x, name, **given)


def swish(x: Variable, beta: float = 1.0, name: str | None = None) -> Variable:
    """x * sigmoid(beta * x)."""
    return _with_numbers("swish", x, name, beta=beta)


def hard_sigmoid(x: Variable, slope: float = 0.2, offset: float = 0.5, name: str | None = None) -> Variable:
    """slope * x + offset, kept within [0, 1]."""
    return _with_numbers("hard_sigmoid", x, name, slope=slope, offset=offset)


def hard_swish(x: Variable, threshold: float = 6.0, scale: float = 6.0, offset: float = 3.0, name: str | None = None) -> Variable:
    """x * min(max(x + offset, 0), threshold) / scale."""
    return _with_numbers("hard_swish", x, name, threshold=threshold, scale=scale, offset=offset)


def stanh(x: Variable, scale_a: float = 0.67, scale_b: float = 1.7159, name: str | None = None) -> Variable:
    """scale_b * tanh(scale_a * x)."""
    return _with_numbers("stanh", x, name, scale_a=scale_a, scale_b=scale_b)


def brelu(x: Variable, t_min: float = 0.0, t_max: float = 24.0, name: str | None = None) -> Variable:
    """x kept within [t_min, t_max]."""
    return _with_numbers("brelu", x, name, t_min=t_min, t_max=t_max)


def soft_relu(x: Variable, threshold: float = 40.0, name: str | None = None) -> Variable:
    """log(1 + exp(x)), with x kept within [-threshold, threshold]."""
    limit = number("layers.soft_relu", "threshold", threshold)
    helper = LayerWriter("soft_relu", name)
    return helper.op("softplus", helper.op("clip", helper.variable(x, "x"), min=-limit, max=limit))


def softshrink(x: Variable, alpha: float | None = None) -> Variable:
    """x moved towards 0 by alpha (0.5); 0 if it is closer than alpha."""
    return _with_numbers("softshrink", x, None, alpha=0.5 if alpha is None else alpha)


def hard_shrink(x: Variable, threshold: float | None = None) -> Variable:
    """x, and 0 where it is within [-threshold, threshold] (0.5)."""
    return _with_numbers("hard_shrink", x, None, threshold=0.5 if threshold is None else threshold)


def thresholded_relu(x: Variable, threshold: float | None = None) -> Variable:
    """x where it is above the threshold (1.0), 0 elsewhere."""
    return _with_numbers("thresholded_relu", x, None, threshold=1.0 if threshold is None else threshold)


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
    *_UNARY, "brelu", "elu", "gelu", "hard_shrink", "hard_sigmoid", "hard_swish", "leaky_relu", "pow", "prelu", "relu6", "selu",
    "soft_relu", "softshrink", "stanh", "swish", "thresholded_relu",
]  # fmt: skip
