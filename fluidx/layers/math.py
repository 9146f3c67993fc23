"""Arithmetic layers: elementwise operators, reductions, scaling and clipping, and every activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._checks import number, one_of, whole, wholes, wrong
from ..initializer import Constant
from ..ir import Variable
from ..ops.operators import of_dtype
from .helper import LayerWriter

# -- two operands -------------------------------------------------------------------------------------------------------


def _binary(op_type: str, x: Variable, y: Variable, axis: int, act: str | None, name: str | None) -> Variable:
    helper = LayerWriter(op_type, name)
    x, y = helper.variable(x, "x"), helper.variable(y, "y")
    axis = whole(helper.label, "axis", axis, -1)
    return helper.activate(helper.op(of_dtype(op_type, x.dtype), x, y, axis=axis), act)


def elementwise_add(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """x + y, broadcast.

    With axis=-1 the shapes are aligned at their last axes. Otherwise y's first axis is aligned with x's axis `axis`, and y is repeated
    along the other axes: x[2,3,4,5] and y[3,4] with axis=1.

    Raises ProgramError when the shapes do not fit.

    Shapes: [n, 3, 4] and [4] give [n, 3, 4], and so do [n, 3, 4] and [3] with axis=1.

    Types: x, y and the result have one dtype, of floats or integers.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.elementwise_add(fx.data("x", [-1, 3, 4], "float32"), fx.data("y", [3], "float32"), axis=1)
    <Variable elementwise_add_0.tmp_0: f32[-1,3,4]>
    """
    return _binary("elementwise_add", x, y, axis, act, name)


def elementwise_sub(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """x - y; `axis` as in elementwise_add.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.elementwise_sub(fx.data("x", [-1, 3], "float32"), fx.data("y", [3], "float32"))
    <Variable elementwise_sub_0.tmp_0: f32[-1,3]>
    """
    return _binary("elementwise_sub", x, y, axis, act, name)


def elementwise_mul(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """x * y, element by element; `axis` as in elementwise_add.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.elementwise_mul(fx.data("x", [-1, 3], "float32"), fx.data("y", [3], "float32"))
    <Variable elementwise_mul_0.tmp_0: f32[-1,3]>
    """
    return _binary("elementwise_mul", x, y, axis, act, name)


def elementwise_div(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """x / y; `axis` as in elementwise_add.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.elementwise_div(fx.data("x", [-1, 3], "float32"), fx.data("y", [3], "float32"))
    <Variable elementwise_div_0.tmp_0: f32[-1,3]>
    """
    return _binary("elementwise_div", x, y, axis, act, name)


def elementwise_max(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """The larger of x and y, element by element; `axis` as in elementwise_add."""
    return _binary("elementwise_max", x, y, axis, act, name)


def elementwise_min(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """The smaller of x and y, element by element; `axis` as in elementwise_add."""
    return _binary("elementwise_min", x, y, axis, act, name)


def elementwise_pow(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """x to the power of y; `axis` as in elementwise_add."""
    return _binary("elementwise_pow", x, y, axis, act, name)


def elementwise_mod(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """The remainder of x / y; `axis` as in elementwise_add. Of integers it has the sign of x, of floats that of y. Source: fluid 1.8."""
    return _binary("elementwise_mod", x, y, axis, act, name)


def elementwise_floordiv(x: Variable, y: Variable, axis: int = -1, act: str | None = None, name: str | None = None) -> Variable:
    """x / y rounded down, of integers towards zero; `axis` as in elementwise_add. Source: fluid 1.8."""
    return _binary("elementwise_floordiv", x, y, axis, act, name)


# -- sums, scaling, clipping -----------------------------------------------------------------------------------------------


def scale(
    x: Variable,
    scale: float | Variable = 1.0,
    bias: float = 0.0,
    bias_after_scale: bool = True,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """x * scale + bias, or (x + bias) * scale with bias_after_scale=False. The shape and dtype are x's.

    `scale` may be a Variable of one element.

    Types: x is of floats or integers; the result has its dtype.

    Raises ProgramError for bool.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.scale(fx.data("x", [-1, 3], "float32"), 2.0, bias=1.0)
    <Variable scale_0.tmp_0: f32[-1,3]>
    """
    helper = LayerWriter("scale", name)
    x = helper.variable(x, "x")
    bias = number(helper.label, "bias", bias)
    if not isinstance(scale, Variable):
        factor = number(helper.label, "scale", scale)
        y = helper.op("scale", x, scale=factor, bias=bias, bias_after_scale=bool(bias_after_scale))
        return helper.activate(y, act)
    helper.variable(scale, "scale")
    if bias and not bias_after_scale:
        x = helper.op("scale", x, scale=1.0, bias=bias)
    y = helper.op("elementwise_mul", x, scale)
    if bias and bias_after_scale:
        y = helper.op("scale", y, scale=1.0, bias=bias)
    return helper.activate(y, act)


def mean(x: Variable, name: str | None = None) -> Variable:
    """The mean of all elements of x, as a [1] variable.

    Types: x is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError for integers; cast them first.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.mean(fx.data("x", [-1, 3], "float32"))
    <Variable mean_0.tmp_0: f32[1]>
    """
    helper = LayerWriter("mean", name)
    return helper.op("mean", helper.variable(x, "x"))


def sums(input: Variable | Sequence[Variable], out: Variable | None = None) -> Variable:
    """The sum of several variables of one shape; `out`, when given, receives it."""
    helper = LayerWriter("sum")
    xs = helper.variables(input, "input")
    return helper.op("sum", xs, out={} if out is None else {"Out": out})


def sum(x: Variable | Sequence[Variable]) -> Variable:
    """The sum of several variables of one shape (not over axes: that is reduce_sum)."""
    return sums(x)


def _reduce(op_type: str, input: Variable, dim: Any, keep_dim: bool, name: str | None) -> Variable:
    helper = LayerWriter(op_type, name)
    x = helper.variable(input, "input")
    dims = () if dim is None else wholes(helper.label, "dim", dim, None) if isinstance(dim, (list, tuple, np.ndarray)) else (dim,)
    axes = tuple(helper.axis(x, d, "dim") for d in dims)
    if len(set(axes)) != len(axes):
        raise wrong(f"{helper.label}: dim {list(dims)} names an axis twice")
    return helper.op(op_type, x, dim=axes, keep_dim=bool(keep_dim))


def reduce_sum(input: Variable, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Variable:
    """The sum over the axes `dim` (an integer or a list; None is all, giving a [1] variable); `keep_dim` leaves them with size 1.

    Shapes: [n, 3, 4] gives [n, 4] with dim=1, and [n, 1, 4] with keep_dim=True.

    Types: input is of floats or integers; the result has its dtype.

    Raises ProgramError if input has no axis `dim`, or if an axis occurs twice.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.reduce_sum(fx.data("x", [-1, 3, 4], "float32"), dim=[1, 2], keep_dim=True)
    <Variable reduce_sum_0.tmp_0: f32[-1,1,1]>
    """
    return _reduce("reduce_sum", input, dim, keep_dim, name)


def reduce_mean(input: Variable, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Variable:
    """The mean over the axes `dim`; arguments as in reduce_sum.

    Types: input is of floats; the result has its dtype.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.reduce_mean(fx.data("x", [-1, 3, 4], "float32"), dim=1)
    <Variable reduce_mean_0.tmp_0: f32[-1,4]>
    """
    return _reduce("reduce_mean", input, dim, keep_dim, name)


def reduce_max(input: Variable, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Variable:
    """The largest element over the axes `dim`; arguments as in reduce_sum.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.reduce_max(fx.data("x", [-1, 3, 4], "float32"), dim=-1)
    <Variable reduce_max_0.tmp_0: f32[-1,3]>
    """
    return _reduce("reduce_max", input, dim, keep_dim, name)


def reduce_min(input: Variable, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Variable:
    """The smallest element over the axes `dim`; arguments as in reduce_sum."""
    return _reduce("reduce_min", input, dim, keep_dim, name)


def reduce_prod(input: Variable, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Variable:
    """The product over the axes `dim`; arguments as in reduce_sum."""
    return _reduce("reduce_prod", input, dim, keep_dim, name)


def reduce_all(input: Variable, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Variable:
    """Whether all elements of a bool variable are true over the axes `dim`; arguments as in reduce_sum."""
    return _reduce("reduce_all", input, dim, keep_dim, name)


def reduce_any(input: Variable, dim: Any = None, keep_dim: bool = False, name: str | None = None) -> Variable:
    """Whether any element of a bool variable is true over the axes `dim`; arguments as in reduce_sum."""
    return _reduce("reduce_any", input, dim, keep_dim, name)


def clip(x: Variable, min: float, max: float, name: str | None = None) -> Variable:
    """x with each element clipped to [min, max].

    Shapes: the result has x's shape.

    Types: x is of floats or integers; the result has its dtype.

    Raises ProgramError when `min` is above `max`.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.clip(fx.data("x", [-1, 3], "float32"), -1.0, 1.0)
    <Variable clip_0.tmp_0: f32[-1,3]>
    """
    helper = LayerWriter("clip", name)
    low, high = number(helper.label, "min", min), number(helper.label, "max", max)
    if low > high:
        raise wrong(f"{helper.label}: min is {low}, above max, which is {high}")
    return helper.op("clip", helper.variable(x, "x"), min=low, max=high)


def clip_by_norm(x: Variable, max_norm: float, name: str | None = None) -> Variable:
    """x, scaled down to an L2 norm of `max_norm` when its norm is larger."""
    helper = LayerWriter("clip_by_norm", name)
    limit = number(helper.label, "max_norm", max_norm)
    if limit <= 0:
        raise wrong(f"{helper.label}: max_norm must be above 0, got {limit}")
    x = helper.variable(x, "x")
    norm = helper.op("sqrt", helper.op("squared_l2_norm", x))
    bound = helper.op("fill_constant", shape=(1,), dtype=norm.dtype, value=limit)
    factor = helper.op("elementwise_div", bound, helper.op("elementwise_max", norm, bound))
    return helper.op("elementwise_mul", x, factor if norm.dtype == x.dtype else helper.op("cast", factor, dtype=x.dtype))


def cumsum(x: Variable, axis: int | None = None, exclusive: bool | None = None, reverse: bool | None = None) -> Variable:
    """Running sums along `axis` (by default the last). `exclusive` leaves out the element itself, `reverse` runs from the end."""
    helper = LayerWriter("cumsum")
    x = helper.variable(x, "x")
    axis = helper.axis(x, -1 if axis is None else axis)
    return helper.op("cumsum", x, axis=axis, exclusive=bool(exclusive), reverse=bool(reverse))


def increment(x: Variable, value: float = 1.0, in_place: bool = True) -> Variable:
    """x + value, for a variable of one element; written into x itself unless in_place=False."""
    helper = LayerWriter("increment")
    x = helper.variable(x, "x")
    return helper.op("increment", x, out={"Out": x} if in_place else {}, step=number(helper.label, "value", value))


def replica_mean(x: Variable, name: str | None = None) -> Variable:
    """The mean of x over ranks that train separately (`strategies.replicas`), on every rank. On one device, and if all ranks have the same
    x, it is x itself."""
    helper = LayerWriter("replica_mean", name)
    return helper.op("replica_mean", helper.variable(x, "x"))


# -- activations ------------------------------------------------------------------------------------------------------------

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


def isfinite(x: Variable) -> Variable:
    """A [1] bool: whether no element of x is NaN or infinite."""
    helper = LayerWriter("isfinite")
    return helper.op("reduce_all", helper.op("isfinite", helper.variable(x, "x")), dim=())


def has_nan(x: Variable) -> Variable:
    """A [1] bool: whether some element of x is NaN."""
    helper = LayerWriter("isnan")
    return helper.op("reduce_any", helper.op("isnan", helper.variable(x, "x")), dim=())


def has_inf(x: Variable) -> Variable:
    """A [1] bool: whether some element of x is infinite."""
    helper = LayerWriter("isinf")
    return helper.op("reduce_any", helper.op("isinf", helper.variable(x, "x")), dim=())


__all__ = [
    *_UNARY, "brelu", "clip", "clip_by_norm", "cumsum", "elementwise_add", "elementwise_div", "elementwise_floordiv", "elementwise_max",
    "elementwise_min", "elementwise_mod", "elementwise_mul", "elementwise_pow", "elementwise_sub", "elu", "gelu", "hard_shrink",
    "hard_sigmoid", "hard_swish", "has_inf", "has_nan", "increment", "isfinite", "leaky_relu", "mean", "pow", "prelu", "reduce_all",
    "reduce_any", "reduce_max", "reduce_mean", "reduce_min", "reduce_prod", "reduce_sum", "relu6", "replica_mean",
    "scale", "selu", "soft_relu", "softshrink", "stanh", "sum", "sums", "swish", "thresholded_relu",
]  # fmt: skip
