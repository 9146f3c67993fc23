"""Layers that copy, convert, join, slice and reshape tensors."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .._checks import unsupported, whole, wholes, wrong
from ..ir import Variable, as_dtype
from ..ir.constants import elements
from .helper import LayerWriter, Sizes
from .layer_from_signature import axes_of, axis_of, row


def assign(input: Any, output: Variable | None = None) -> Variable:
    """A copy of a Variable, or the values of an array; `output`, when given, receives it.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.assign(np.arange(3, dtype="int32"))
    <Variable assign_0.tmp_0: i32[3]>
    """
    helper = LayerWriter("assign")
    out = {} if output is None else {"Out": output}
    if isinstance(input, Variable):
        return helper.op("assign", helper.variable(input, "input"), out=out)
    if not isinstance(input, (np.ndarray, np.generic, int, float, bool, list, tuple)):
        raise wrong(f"{helper.label}: input must be a Variable or an array, got {builtins.type(input).__name__}: {input!r}")
    array = np.asarray(input)
    if array.dtype == np.float64 and not isinstance(input, (np.ndarray, np.generic)):
        array = array.astype("float32")
    dtype = as_dtype(array.dtype)
    y = helper.op("assign_value", out=out, shape=array.shape, dtype=dtype, values=elements(array))
    y.stop_gradient = True
    return y


def split(input: Variable, num_or_sections: int | Sequence[int], dim: int = -1, name: str | None = None) -> list[Variable]:
    """input split along axis `dim` into a number of equal parts, or into parts of the given sizes (one may be -1).

    Shapes: [n, 6] gives three of [n, 2], or of [n, 1], [n, 2] and [n, 3] with the sizes [1, 2, 3].

    Types: input is of any dtype; the result has the same.

    Raises ProgramError when the number does not divide the axis, or the sizes do not add up to it.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.split(fx.data("x", [-1, 6], "float32"), [4, -1], dim=1)
    [<Variable split_0.tmp_0: f32[-1,4]>, <Variable split_0.tmp_1: f32[-1,2]>]
    """
    helper = LayerWriter("split", name)
    x = helper.variable(input, "input")
    axis = helper.axis(x, dim, "dim")
    size = x.shape[axis]
    if not isinstance(num_or_sections, (list, tuple)):
        n = whole(helper.label, "num_or_sections", num_or_sections, 1)
        if size >= 0 and size % n:
            raise wrong(f"{helper.label}: axis {axis} of variable {x.name!r} is {size}, which does not divide into {n} parts")
        return helper.op("split", x, n_out=n, axis=axis, num=n)
    sections = list(wholes(helper.label, "num_or_sections", num_or_sections, least=-1))
    if sections.count(-1) > 1 or not sections:
        raise wrong(f"{helper.label}: num_or_sections must hold sizes, at most one of them -1, got {sections}")
    if -1 in sections:
        rest = size - builtins.sum(s for s in sections if s >= 0)
        if size < 0 or rest < 0:
            raise wrong(f"{helper.label}: sections {sections} do not fit axis {axis} of variable {x.name!r}, which is {size}")
        sections[sections.index(-1)] = rest
    if size >= 0 and builtins.sum(sections) != size:
        raise wrong(f"{helper.label}: sections {sections} add up to {builtins.sum(sections)}; axis {axis} of variable {x.name!r} is {size}")
    return helper.op("split", x, n_out=len(sections), axis=axis, sections=tuple(sections))


def unstack(x: Variable, axis: int = 0, num: int | None = None) -> list[Variable]:
    """The slices of x along an axis, each without that axis."""
    helper = LayerWriter("unstack")
    x = helper.variable(x, "x")
    axis = helper.axis(x, axis)
    size = x.shape[axis] if num is None else whole(helper.label, "num", num, 1)
    if size < 0 or x.shape[axis] not in (-1, size):
        raise wrong(f"{helper.label}: axis {axis} of variable {x.name!r} with shape {list(x.shape)} does not give {num} slices")
    return helper.op("unstack", x, n_out=size, axis=axis, num=size)


def reshape(
    x: Variable, shape: Sizes, actual_shape: Any = None, act: str | None = None, inplace: bool = False, name: str | None = None
) -> Variable:
    """x with another shape and the same elements. One size may be -1 (the remaining elements); 0 copies x's size at that axis.

    `inplace` has no effect: the result always shares x's memory. A shape may be computed: a vector as `shape` or `actual_shape`, which
    takes precedence, or a list that contains Variables.

    Types: x is of any dtype; the result has the same.

    Raises ProgramError when the numbers of elements differ, or more than one size is -1.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.reshape(fx.data("x", [-1, 28, 28], "float32"), [0, 784])
    <Variable reshape_0.tmp_0: f32[-1,784]>
    """
    helper = LayerWriter("reshape", name)
    computed = helper.sizes(shape if actual_shape is None else actual_shape, "shape" if actual_shape is None else "actual_shape")
    if computed is not None:
        listed = [] if actual_shape is not None or isinstance(shape, Variable) else shape
        known = tuple(v if isinstance(v, int) and v > 0 else -1 for v in listed)
        return helper.activate(helper.op("reshape_by", helper.variable(x, "x"), computed, known=known), act)
    unsupported(helper.label, actual_shape=actual_shape)
    sizes = wholes(helper.label, "shape", shape, least=-1)
    if sizes.count(-1) > 1:
        raise wrong(f"{helper.label}: shape {list(sizes)} has more than one -1")
    return helper.activate(helper.op("reshape", helper.variable(x, "x"), shape=sizes), act)


def _slice_args(helper: LayerWriter, x: Variable, axes: Any, **lists: Any) -> dict[str, Any]:
    out = {"axes": axes_of(helper, "axes", axes, x)}
    for name, value in lists.items():
        if any(isinstance(v, Variable) for v in (value if isinstance(value, (list, tuple)) else [value])):
            raise wrong(f"{helper.label}: {name} must be integers known while the program is written, not Variables")
        out[name] = wholes(helper.label, name, value)
        if len(out[name]) != len(out["axes"]):
            raise wrong(f"{helper.label}: {len(out['axes'])} axes but {len(out[name])} {name} were given")
    return out


def slice(input: Variable, axes: Sequence[int], starts: Sizes, ends: Sizes) -> Variable:
    """The slice [start, end) of input along the given axes; negative bounds count from the end. Bounds may be Variables, in lists or as
    vectors.

    Shapes: a sliced axis has size end - start, but at most its size in input.

    Types: input is of any dtype; the result has the same.

    Raises ProgramError when input has no such axis, or the three lists differ in length.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.slice(fx.data("x", [-1, 8, 8], "float32"), axes=[1, 2], starts=[1, -3], ends=[5, 8])
    <Variable slice_0.tmp_0: f32[-1,4,3]>
    """
    helper = LayerWriter("slice")
    x = helper.variable(input, "input")
    computed = [helper.sizes(v, what) for what, v in (("starts", starts), ("ends", ends))]
    if any(v is not None for v in computed):
        known = [assign(np.array(wholes(helper.label, "bounds", v), "int64")) if c is None else c for c, v in zip(computed, (starts, ends))]
        return helper.op("slice_by", x, *known, axes=axes_of(helper, "axes", axes, x))
    return helper.op("slice", x, **_slice_args(helper, x, axes, starts=starts, ends=ends))


def strided_slice(input: Variable, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int], strides: Sequence[int]) -> Variable:
    """Elements start, start + stride, ... before end of input along the given axes; a negative stride goes backwards."""
    helper = LayerWriter("strided_slice")
    x = helper.variable(input, "input")
    attrs = _slice_args(helper, x, axes, starts=starts, ends=ends, strides=strides)
    if 0 in attrs["strides"]:
        raise wrong(f"{helper.label}: a stride must not be 0, got {list(attrs['strides'])}")
    return helper.op("strided_slice", x, **attrs)


def expand(x: Variable, expand_times: Sizes, name: str | None = None) -> Variable:
    """x repeated `expand_times[i]` times along each axis i. `expand_times` may be computed: a vector, or a list that contains Variables.

    Shapes: [2, 3] gives [4, 3] with [2, 1].

    Types: x is of any dtype; the result has the same.

    Raises ProgramError unless there is one number for each axis.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.expand(fx.data("x", [2, 3], "float32"), [2, 1])
    <Variable expand_0.tmp_0: f32[4,3]>
    """
    helper = LayerWriter("expand", name)
    x = helper.variable(x, "x")
    if (computed := helper.sizes(expand_times, "expand_times")) is not None:
        return helper.op("tile_by", x, computed)
    times = wholes(helper.label, "expand_times", expand_times, least=1)
    if len(times) != x.ndim:
        raise wrong(f"{helper.label}: expand_times has {len(times)} entries; variable {x.name!r} has {x.ndim} axes")
    return helper.op("expand", x, expand_times=times)


def rank(input: Variable) -> Variable:
    """The number of axes of input, as an int32 [1]."""
    helper = LayerWriter("rank")
    return assign(np.array([helper.variable(input, "input").ndim], "int32"))


def size(input: Variable) -> Variable:
    """The number of elements of input, as an int64 [1]."""
    helper = LayerWriter("size")
    return helper.op("reduce_prod", helper.op("shape", helper.variable(input, "input"), dtype="int64"), dim=())


def _permutation(helper: LayerWriter, what: str, value: Any, x: Variable) -> tuple[int, ...]:
    order = tuple(helper.axis(x, a, what) for a in wholes(helper.label, what, value))
    if sorted(order) != list(builtins.range(x.ndim)):
        raise wrong(f"{helper.label}: {what} {list(value)} is not an order of the {x.ndim} axes of variable {x.name!r}")
    return order


def _first_column(helper: LayerWriter, what: str, value: Any, x: Variable) -> int:
    at = whole(helper.label, what, value)
    if not 0 <= at <= x.ndim:
        raise wrong(f"{helper.label}: {what} is {at}; variable {x.name!r} with shape {list(x.shape)} allows 0 to {x.ndim}")
    return at


# fmt: off
expand_as = row("expand_as(x, target_tensor, name=None)", "x repeated to the shape of `target_tensor`, whose sizes are multiples of x's.")
reverse = row("reverse(x, axis: int | Sequence[int])", "x with its elements reversed along the given axes.", axis=axes_of)
flip = row(
    "flip(x, dims: int | Sequence[int])",
    "x with its elements reversed along the given axes.", "reverse", kind="reverse", dims=("axis", axes_of),
)
tril = row(
    "tril(input, diagonal=0, name=None)",
    "The lower triangle of the last two axes, zero above `diagonal`.", "tril_triu", always={"lower": True},
)
triu = row(
    "triu(input, diagonal=0, name=None)",
    "The upper triangle of the last two axes, zero below `diagonal`.", "tril_triu", always={"lower": False},
)

cast = row("cast(x, dtype)", """
    x converted to another dtype.

    Shapes: the result has x's shape.

    Raises ProgramError if `dtype` is not a dtype.

    >>> fx.layers.cast(fx.data("x", [-1, 3], "int64"), "float32")
    <Variable cast_0.tmp_0: f32[-1,3]>
    """)

concat = row("concat(input: Sequence[Variable], axis=0, name=None)", """
    Variables joined along an axis; the other sizes must agree.

    Shapes: [n, 3] and [n, 5] give [n, 8] along axis 1.

    Types: the variables and the result have one dtype.

    Raises ProgramError when dtypes or other sizes differ.

    >>> fx.layers.concat([fx.data("x", [-1, 3], "float32"), fx.data("y", [-1, 5], "float32")], axis=1)
    <Variable concat_0.tmp_0: f32[-1,8]>
    """, axis=axis_of)

stack = row("stack(x: Sequence[Variable], axis=0, name=None)", """
    Variables of one shape stacked along a new axis.

    Shapes: k variables [n, 3] give [k, n, 3], or [n, k, 3] with axis=1.

    Types: the variables and the result have one dtype.

    Raises ProgramError when shapes or dtypes differ.

    >>> fx.layers.stack([fx.data("x", [-1, 3], "float32"), fx.data("y", [-1, 3], "float32")], axis=1)
    <Variable stack_0.tmp_0: f32[-1,2,3]>
    """, axis=partial(axis_of, extra=1))

transpose = row("transpose(x, perm: Sequence[int], name=None)", """
    x with its axes in the order `perm`.

    Shapes: axis i of the result is x's axis `perm[i]`.

    Types: x is of any dtype; the result has the same.

    Raises ProgramError if `perm` does not contain each axis once.

    >>> fx.layers.transpose(fx.data("x", [-1, 3, 28, 32], "float32"), [0, 2, 3, 1])
    <Variable transpose_0.tmp_0: f32[-1,28,32,3]>
    """, perm=("axis", _permutation))

squeeze = row("squeeze(input, axes: Sequence[int], name=None)", """
    input without the given axes, which have size 1; if no axes are given, without all axes of size 1.

    Shapes: [n, 1, 3] gives [n, 3] with axes [1].

    Types: input is of any dtype; the result has the same.

    Raises ProgramError if a given axis has another size.

    >>> fx.layers.squeeze(fx.data("x", [-1, 1, 3], "float32"), [1])
    <Variable squeeze_0.tmp_0: f32[-1,3]>
    """, axes=axes_of)

unsqueeze = row("unsqueeze(input, axes: int | Sequence[int], name=None)", """
    input with new axes of size 1 at the given positions of the result.

    Shapes: [n, 3] gives [n, 1, 3] with axes [1].

    Types: input is of any dtype; the result has the same.

    Raises ProgramError when the result has no such axis.

    >>> fx.layers.unsqueeze(fx.data("x", [-1, 3], "float32"), [1])
    <Variable unsqueeze_0.tmp_0: f32[-1,1,3]>
    """, axes=partial(axes_of, extra=1))

flatten = row("flatten(x, axis=1, name=None)", """
    x as a matrix: the axes before `axis` become its rows, the others its columns.

    Shapes: [n, 3, 4] gives [n, 12].

    Types: x is of any dtype; the result has the same.

    Raises ProgramError when x has no such axis.

    >>> fx.layers.flatten(fx.data("x", [-1, 3, 4], "float32"))
    <Variable flatten_0.tmp_0: f32[-1,12]>
    """, axis=_first_column)

shape = row("shape(input)", """
    The shape of input as an int32 vector; open axes have their size at run time.

    >>> fx.layers.shape(fx.data("x", [-1, 3], "float32"))
    <Variable shape_0.tmp_0: i32[2]>
    """)
# fmt: on

__all__ = [
    "assign", "cast", "concat", "expand", "expand_as", "flatten", "flip", "rank", "reshape", "reverse", "shape", "size", "slice", "split",
    "squeeze", "stack", "strided_slice", "transpose", "tril", "triu", "unsqueeze", "unstack",
]  # fmt: skip
