"""Arithmetic layers: elementwise operators, reductions, scaling and clipping, and checks for NaN and infinity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .._checks import number, wholes, wrong
from ..ir import Variable
from .helper import LayerWriter
from .layer_from_signature import at_least, row

# fmt: off
# -- two operands -----------------------------------------------------------------------------------------------------------

_binary = partial(row, axis=at_least(-1))


elementwise_add = _binary("elementwise_add(x, y, axis=-1, act=None, name=None)", """
    x + y, broadcast.

    With axis=-1 the shapes are aligned at their last axes. Otherwise y's first axis is aligned with x's axis `axis`, and y is repeated
    along the other axes: x[2,3,4,5] and y[3,4] with axis=1.

    Raises ProgramError when the shapes do not fit.

    Shapes: [n, 3, 4] and [4] give [n, 3, 4], and so do [n, 3, 4] and [3] with axis=1.

    Types: x, y and the result have one dtype, of floats or integers.

    >>> fx.layers.elementwise_add(fx.data("x", [-1, 3, 4], "float32"), fx.data("y", [3], "float32"), axis=1)
    <Variable elementwise_add_0.tmp_0: f32[-1,3,4]>
    """)

elementwise_sub = _binary("elementwise_sub(x, y, axis=-1, act=None, name=None)", """
    x - y; `axis` as in elementwise_add.

    >>> fx.layers.elementwise_sub(fx.data("x", [-1, 3], "float32"), fx.data("y", [3], "float32"))
    <Variable elementwise_sub_0.tmp_0: f32[-1,3]>
    """)

elementwise_mul = _binary("elementwise_mul(x, y, axis=-1, act=None, name=None)", """
    x * y, element by element; `axis` as in elementwise_add.

    >>> fx.layers.elementwise_mul(fx.data("x", [-1, 3], "float32"), fx.data("y", [3], "float32"))
    <Variable elementwise_mul_0.tmp_0: f32[-1,3]>
    """)

elementwise_div = _binary("elementwise_div(x, y, axis=-1, act=None, name=None)", """
    x / y; `axis` as in elementwise_add.

    >>> fx.layers.elementwise_div(fx.data("x", [-1, 3], "float32"), fx.data("y", [3], "float32"))
    <Variable elementwise_div_0.tmp_0: f32[-1,3]>
    """)
elementwise_max = _binary(
    "elementwise_max(x, y, axis=-1, act=None, name=None)", "The larger of x and y, element by element; `axis` as in elementwise_add."
)
elementwise_min = _binary(
    "elementwise_min(x, y, axis=-1, act=None, name=None)", "The smaller of x and y, element by element; `axis` as in elementwise_add."
)
elementwise_pow = _binary("elementwise_pow(x, y, axis=-1, act=None, name=None)", "x to the power of y; `axis` as in elementwise_add.")
elementwise_mod = _binary(
    "elementwise_mod(x, y, axis=-1, act=None, name=None)",
    "The remainder of x / y; `axis` as in elementwise_add. Of integers it has the sign of x, of floats that of y. Source: fluid 1.8.",
)
elementwise_floordiv = _binary(
    "elementwise_floordiv(x, y, axis=-1, act=None, name=None)",
    "x / y rounded down, of integers towards zero; `axis` as in elementwise_add. Source: fluid 1.8.",
)
# fmt: on


# -- sums, scaling, clipping -----------------------------------------------------------------------------------------------


def _dims(helper: LayerWriter, what: str, dim: Any, x: Variable) -> tuple[int, ...]:
    """The axes of a reduction."""
    dims = wholes(helper.label, what, dim, None) if isinstance(dim, (list, tuple, np.ndarray)) else (dim,)
    axes = tuple(helper.axis(x, d, what) for d in dims)
    if len(set(axes)) != len(axes):
        raise wrong(f"{helper.label}: {what} {list(dims)} names an axis twice")
    return axes


_reduce = partial(row, dim=_dims)

# fmt: off

reduce_sum = _reduce("reduce_sum(input, dim: Any = None, keep_dim=False, name=None)", """
    The sum over the axes `dim` (an integer or a list; None is all, giving a [1] variable); `keep_dim` leaves them with size 1.

    Shapes: [n, 3, 4] gives [n, 4] with dim=1, and [n, 1, 4] with keep_dim=True.

    Types: input is of floats or integers; the result has its dtype.

    Raises ProgramError if input has no axis `dim`, or if an axis occurs twice.

    >>> fx.layers.reduce_sum(fx.data("x", [-1, 3, 4], "float32"), dim=[1, 2], keep_dim=True)
    <Variable reduce_sum_0.tmp_0: f32[-1,1,1]>
    """)

reduce_mean = _reduce("reduce_mean(input, dim: Any = None, keep_dim=False, name=None)", """
    The mean over the axes `dim`; arguments as in reduce_sum.

    Types: input is of floats; the result has its dtype.

    >>> fx.layers.reduce_mean(fx.data("x", [-1, 3, 4], "float32"), dim=1)
    <Variable reduce_mean_0.tmp_0: f32[-1,4]>
    """)

reduce_max = _reduce("reduce_max(input, dim: Any = None, keep_dim=False, name=None)", """
    The largest element over the axes `dim`; arguments as in reduce_sum.

    >>> fx.layers.reduce_max(fx.data("x", [-1, 3, 4], "float32"), dim=-1)
    <Variable reduce_max_0.tmp_0: f32[-1,3]>
    """)
reduce_min = _reduce(
    "reduce_min(input, dim: Any = None, keep_dim=False, name=None)", "The smallest element over the axes `dim`; arguments as in reduce_sum."
)
reduce_prod = _reduce(
    "reduce_prod(input, dim: Any = None, keep_dim=False, name=None)", "The product over the axes `dim`; arguments as in reduce_sum."
)
reduce_all = _reduce(
    "reduce_all(input, dim: Any = None, keep_dim=False, name=None)",
    "Whether all elements of a bool variable are true over the axes `dim`; arguments as in reduce_sum.",
)
reduce_any = _reduce(
    "reduce_any(input, dim: Any = None, keep_dim=False, name=None)",
    "Whether any element of a bool variable is true over the axes `dim`; arguments as in reduce_sum.",
)

mean = row("mean(x, name=None)", """
    The mean of all elements of x, as a [1] variable.

    Types: x is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError for integers; cast them first.

    >>> fx.layers.mean(fx.data("x", [-1, 3], "float32"))
    <Variable mean_0.tmp_0: f32[1]>
    """)
sums = row(
    "sums(input: Variable | Sequence[Variable], out=None)",
    "The sum of several variables of one shape; `out`, when given, receives it.", "sum", kind="sum",
)

replica_mean = row("replica_mean(x, name=None)", """
    The mean of x over ranks that train separately (`strategies.replicas`), on every rank. On one device, and if all ranks have the same
    x, it is x itself.
    """)
# fmt: on


def sum(x: Variable | Sequence[Variable]) -> Variable:
    """The sum of several variables of one shape (not over axes: that is reduce_sum)."""
    return sums(x)


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


# -- checks -----------------------------------------------------------------------------------------------------------------


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
    "clip", "clip_by_norm", "cumsum", "elementwise_add", "elementwise_div", "elementwise_floordiv", "elementwise_max", "elementwise_min",
    "elementwise_mod", "elementwise_mul", "elementwise_pow", "elementwise_sub", "has_inf", "has_nan", "increment", "isfinite", "mean",
    "reduce_all", "reduce_any", "reduce_max", "reduce_mean", "reduce_min", "reduce_prod", "reduce_sum", "replica_mean", "scale", "sum",
    "sums",
]  # fmt: skip
