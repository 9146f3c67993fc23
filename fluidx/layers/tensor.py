"""Layers that make, move and reshape tensors: data, constants, reshape, concat, slice, gather and their kin."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from .._checks import number, unsupported, whole, wholes, wrong
from ..initializer import Constant, Initializer, derive_seed
from ..ir import Parameter, ProgramError, Variable, as_dtype, default_main_program, default_startup_program, unique_name
from ..ir.constants import elements
from ..ir.types import Dim
from ..param_attr import ParamAttr
from .helper import LayerWriter

Sizes = Sequence[int | Variable] | Variable  # numbers, or sizes that the program computes

# -- declaring -----------------------------------------------------------------------------------------------------------


def data(
    name: str,
    shape: Sequence[int | str | None],
    append_batch_size: bool = True,
    dtype: Any = "float32",
    lod_level: int = 0,
    type: Any = None,
    stop_gradient: bool = True,
) -> Variable:
    """Declare an input that is fed at run time. A batch axis of -1 is added before `shape` unless append_batch_size=False.

    As in fluid, no axis is added to a shape with an open axis, -1 or a name. `lod_level` above 0 raises ProgramError, and `type` has no
    effect. `fluidx.data` uses the shape as it is.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.layers.data("image", [1, 28, 28])
    <Variable image: f32[-1,1,28,28]>
    """
    sizes = _sizes("layers.data", shape)
    if append_batch_size and -1 not in sizes:
        sizes = [-1, *sizes]
    return _declare_data("layers.data", name, sizes, dtype, lod_level, stop_gradient)


def fluid_data(
    name: str, shape: Sequence[int | str | None] | None = None, dtype: Any = "float32", lod_level: int = 0, *, type: Any = None
) -> Variable:
    """Declare an input that is fed at run time. None, -1 or a name in `shape` is an axis whose size the feed decides.

    A name stands for one size: feeds must have the same size along all axes of that name. This is `fluidx.data`.

    `type`, a type or its text, replaces shape and dtype: "seq<f32[n,4]>" is fed with a list of arrays, "opt<f32[4]>" with an array or None,
    "map<i64,f32[]>" with a dict, "str[n]" with an array of objects, "f32[*]" with an array of any rank.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.data("label", [None, 1], "int64")
    <Variable label: i64[-1,1]>
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.layers.relu(fx.data("x", ["batch", "seq", 4], "float32"))
    <Variable relu_0.tmp_0: f32[batch,seq,4]>
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.data("parts", type="seq<f32[n,4]>")
    <Variable parts: seq<f32[n,4]>>
    """
    if (shape is None) is (type is None):
        raise wrong(f"data: give a shape or a type, got shape={shape!r} and type={type!r}")
    return _declare_data("data", name, [] if shape is None else _sizes("data", shape), dtype, lod_level, True, type)


def _sizes(owner: str, shape: Any) -> list[int]:
    """The sizes of a declaration: numbers, and -1 or a name for sizes that the feed determines."""
    try:
        given = [-1 if d is None else Dim(d) if isinstance(d, str) else d for d in _list(owner, "shape", shape)]
    except ProgramError as e:
        raise wrong(f"{owner}: {e}") from None
    return [d if isinstance(d, Dim) else whole(owner, f"shape[{k}]", d) for k, d in enumerate(given)]


def _declare_data(owner: str, name: str, shape: list[int], dtype: Any, lod_level: int, stop_gradient: bool, type_: Any = None) -> Variable:
    if not isinstance(name, str) or not name:
        raise wrong(f"{owner}: name must be a non-empty string, got {name!r}")
    if lod_level:
        raise wrong(f"{owner}: lod_level={lod_level} is not supported; pad the sequences to one length")
    block = default_main_program().global_block()
    if (old := block.descs.get(name)) is not None and not old.is_data:
        raise wrong(f"{owner}: {name!r} is already declared in {block.program.label()} as another kind of variable; choose another name")
    try:
        return block.create_var(name, shape, dtype, stop_gradient=stop_gradient, is_data=True, type=type_)
    except ProgramError as e:
        raise wrong(f"{owner}: {e}") from None


def _list(owner: str, name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise wrong(f"{owner}: {name} must be a list of integers, got {builtins.type(value).__name__}: {value!r}")
    return value


def create_tensor(dtype: Any, name: str | None = None, persistable: bool = False) -> Variable:
    """An empty [1] variable, to be written by `assign` and the like."""
    block = default_main_program().current_block()
    return block.create_var(name or unique_name.generate("create_tensor"), (1,), dtype, persistable=persistable)


def create_parameter(
    shape: Sequence[int],
    dtype: Any,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Initializer | None = None,
) -> Parameter:
    """A parameter of the given shape, initialized by `default_initializer` (Xavier, or 0 for a bias) unless `attr` says otherwise.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.layers.create_parameter([3, 4], "float32", name="w")
    <Parameter w: f32[3,4], persistable>
    """
    helper = LayerWriter("create_parameter", name)
    attr = ParamAttr.of(attr)
    if attr is None:
        raise wrong(f"{helper.label}: attr=False leaves no parameter")
    if name is not None and attr.name is None:
        attr = attr.named(name)
    param = helper.parameter(attr, wholes(helper.label, "shape", shape, least=0), dtype, is_bias, default_initializer)
    if param is None:
        raise AssertionError("a parameter attribute was given")
    return param


def create_global_var(
    shape: Sequence[int], value: float, dtype: Any, persistable: bool = False, force_cpu: bool = False, name: str | None = None
) -> Variable:
    """A variable that startup fills with `value` and that optimizers do not train; `force_cpu` has no effect."""
    name = name or unique_name.generate("global_var")
    shape = wholes("layers.create_global_var", "shape", shape, least=0)
    value = number("layers.create_global_var", "value", value)
    try:
        var = default_main_program().global_block().create_var(name, shape, dtype, persistable=persistable, stop_gradient=True)
        startup = default_startup_program().global_block()
        seen = startup.has_var(name)
        twin = startup.create_var(name, shape, dtype, persistable=persistable, stop_gradient=True)
    except ProgramError as e:
        raise wrong(f"layers.create_global_var: {e}") from None
    if not seen:
        Constant(value)(twin, startup)
    return var


# -- constants and random values ----------------------------------------------------------------------------------------------


def fill_constant(
    shape: Sizes, dtype: Any, value: Any, force_cpu: bool = False, out: Variable | None = None, name: str | None = None
) -> Variable:
    """A tensor filled with `value`; `out`, when given, receives it. `force_cpu` has no effect.

    Sizes are integers, or computed: a vector, or a list that contains Variables.

    Raises ProgramError if `value` is not a number.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.fill_constant([2, 3], "float32", 0.5)
    <Variable fill_constant_0.tmp_0: f32[2,3]>
    """
    helper = LayerWriter("fill_constant", name)
    if isinstance(value, (bool, str)):  # fluid writes some numbers as text
        with suppress(ValueError):
            value = float(value)
    value = number(helper.label, "value", value)
    if (computed := helper.sizes(shape, "shape")) is not None:
        y = helper.op("fill_by", computed, out={} if out is None else {"Out": out}, dtype=as_dtype(dtype), value=value)
        y.stop_gradient = True
        return y
    dims = wholes(helper.label, "shape", shape, least=0)
    y = helper.op("fill_constant", out={} if out is None else {"Out": out}, shape=dims, dtype=as_dtype(dtype), value=value)
    y.stop_gradient = True
    return y


def fill_constant_batch_size_like(
    input: Variable,
    shape: Sequence[int],
    dtype: Any,
    value: float,
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    force_cpu: bool = False,
) -> Variable:
    """`shape` filled with `value`, its axis `output_dim_idx` as long as input's axis `input_dim_idx`."""
    helper = LayerWriter("fill_constant_batch_size_like")
    x = helper.variable(input, "input")
    return helper.op(
        "fill_constant_batch_size_like",
        x,
        shape=wholes(helper.label, "shape", shape),
        dtype=as_dtype(dtype),
        value=number(helper.label, "value", value),
        input_dim_idx=helper.axis(x, input_dim_idx, "input_dim_idx"),
        output_dim_idx=whole(helper.label, "output_dim_idx", output_dim_idx, 0),
    )


def _random_like(
    op_type: str, input: Variable, shape: Sequence[int], dtype: Any, input_dim_idx: int, output_dim_idx: int, seed: int, **attrs: float
) -> Variable:
    helper = LayerWriter(op_type)
    x, result = helper.variable(input, "input"), helper.fresh()
    numbers: dict[str, Any] = {k: number(helper.label, k, v) for k, v in attrs.items()}
    seed = whole(helper.label, "seed", seed or 0, 0) or derive_seed(helper.main, result)
    return helper.op(
        op_type, x, out={"Out": result}, shape=wholes(helper.label, "shape", shape), dtype=as_dtype(dtype), seed=seed, per_run=True,
        input_dim_idx=helper.axis(x, input_dim_idx, "input_dim_idx"),
        output_dim_idx=whole(helper.label, "output_dim_idx", output_dim_idx, 0), **numbers,
    )  # fmt: skip


def uniform_random_batch_size_like(
    input: Variable,
    shape: Sequence[int],
    dtype: Any = "float32",
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    min: float = -1.0,
    max: float = 1.0,
    seed: int = 0,
) -> Variable:
    """`uniform_random` of `shape`, its axis `output_dim_idx` as long as input's axis `input_dim_idx`.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.layers.uniform_random_batch_size_like(fx.data("x", [None, 3], "float32"), [-1, 7]).shape
    (-1, 7)
    """
    indices = input_dim_idx, output_dim_idx
    return _random_like("uniform_random_batch_size_like", input, shape, dtype, *indices, seed, min=min, max=max)


def gaussian_random_batch_size_like(
    input: Variable,
    shape: Sequence[int],
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    seed: int = 0,
    dtype: Any = "float32",
) -> Variable:
    """`gaussian_random` of `shape`, its axis `output_dim_idx` as long as input's axis `input_dim_idx`."""
    indices = input_dim_idx, output_dim_idx
    return _random_like("gaussian_random_batch_size_like", input, shape, dtype, *indices, seed, mean=mean, std=std)


def sequence_mask(x: Variable, maxlen: Any = None, dtype: Any = "int64", name: str | None = None) -> Variable:
    """1 for steps below the lengths in x, 0 for later ones: x [...] gives the mask [..., maxlen], of `dtype`.

    `maxlen` is a number, a Variable with one number, or None for the longest length in x. Ranks need a number, because they need known
    sizes.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     mask = fx.layers.sequence_mask(fx.data("lengths", [None], "int64"), maxlen=3)
    >>> fx.Executor().run(main, feed={"lengths": np.array([1, 3, 0])}, fetch_list=[mask])[0].tolist()
    [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    """
    helper = LayerWriter("sequence_mask", name)
    x = helper.variable(x, "x")
    if maxlen is None:
        maxlen = helper.op("reduce_max", x, dim=(), keep_dim=False)
    steps = range(0, maxlen if isinstance(maxlen, Variable) else whole(helper.label, "maxlen", maxlen, 1), 1, x.dtype)
    return cast(helper.op("less_than", steps, helper.op("unsqueeze", x, axes=(x.ndim,))), dtype)


def ones(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Variable:
    """A tensor of ones."""
    return fill_constant(shape, dtype, 1.0)


def zeros(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Variable:
    """A tensor of zeros."""
    return fill_constant(shape, dtype, 0.0)


def zeros_like(x: Variable, out: Variable | None = None) -> Variable:
    """Zeros of x's shape and dtype."""
    helper = LayerWriter("zeros_like")
    return helper.op("fill_zeros_like", helper.variable(x, "x"), out={} if out is None else {"Out": out})


def ones_like(x: Variable, out: Variable | None = None) -> Variable:
    """Ones of x's shape and dtype."""
    helper = LayerWriter("ones_like")
    return helper.op("fill_any_like", helper.variable(x, "x"), out={} if out is None else {"Out": out}, value=1.0)


def assign(input: Any, output: Variable | None = None) -> Variable:
    """A copy of a Variable, or the values of an array; `output`, when given, receives it.

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


def _random(op_type: str, shape: Sequence[int], dtype: Any, seed: int, name: str | None, **attrs: float) -> Variable:
    helper = LayerWriter(op_type, name)
    dims = wholes(helper.label, "shape", shape, least=0)
    numbers: dict[str, Any] = {k: number(helper.label, k, v) for k, v in attrs.items()}
    result = helper.fresh()
    seed = whole(helper.label, "seed", seed or 0, 0) or derive_seed(helper.main, result)
    return helper.op(op_type, out={"Out": result}, shape=dims, dtype=as_dtype(dtype), seed=seed, per_run=True, **numbers)


def uniform_random(
    shape: Sequence[int], dtype: Any = "float32", min: float = -1.0, max: float = 1.0, seed: int = 0, name: str | None = None
) -> Variable:
    """Values uniform over [min, max), drawn again in each run.

    For seed 0, the seed is derived from the program's random_seed and the variable's name.
    """
    return _random("uniform_random", shape, dtype, seed, name, min=min, max=max)


def gaussian_random(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, seed: int = 0, dtype: Any = "float32", name: str | None = None
) -> Variable:
    """Normally distributed values, drawn again in each run; `seed` as in uniform_random."""
    return _random("gaussian_random", shape, dtype, seed, name, mean=mean, std=std)


def range(start: Any, end: Any, step: Any, dtype: Any) -> Variable:
    """start, start + step, ... up to but not including end. The three are numbers, or Variables with one number.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     x = fx.data("x", [-1], "float32")
    ...     chosen = fx.layers.range(0, fx.layers.size(fx.layers.masked_select(x, x > 0.0)), 1, "int64")
    >>> fx.Executor().run(main, feed={"x": np.float32([3, -1, 2])}, fetch_list=[chosen])[0].tolist()
    [0, 1]
    """
    helper = LayerWriter("range")
    if any(isinstance(v, Variable) for v in (start, end, step)):
        given = [v if isinstance(v, Variable) else fill_constant([1], dtype, v) for v in (start, end, step)]
        return helper.op("range_between", *(cast(helper.variable(v, "a bound"), dtype) for v in given))
    numbers: dict[str, Any] = {n: number(helper.label, n, v) for n, v in (("start", start), ("end", end), ("step", step))}
    return helper.op("range", dtype=as_dtype(dtype), **numbers)


def linspace(start: Any, stop: Any, num: int, dtype: Any = "float32") -> Variable:
    """`num` values evenly spaced from start to stop, both included."""
    helper = LayerWriter("linspace")
    first, last = number(helper.label, "start", start), number(helper.label, "stop", stop)
    return helper.op("linspace", start=first, stop=last, num=whole(helper.label, "num", num, 1), dtype=as_dtype(dtype))


def eye(num_rows: int, num_columns: int | None = None, batch_shape: Sequence[int] | None = None, dtype: Any = "float32") -> Variable:
    """The identity matrix, repeated over `batch_shape` when that is given."""
    helper = LayerWriter("eye")
    rows = whole(helper.label, "num_rows", num_rows, 0)
    columns = rows if num_columns is None else whole(helper.label, "num_columns", num_columns, 0)
    y = helper.op("eye", num_rows=rows, num_columns=columns, dtype=as_dtype(dtype))
    if batch_shape:
        batch = wholes(helper.label, "batch_shape", batch_shape, least=1)
        y = expand(unsqueeze(y, list(builtins.range(len(batch)))), [*batch, 1, 1])
    return y


def diag(diagonal: Variable | np.ndarray) -> Variable:
    """The square matrix with the given vector on its diagonal."""
    helper = LayerWriter("diag")
    vector = assign(diagonal) if isinstance(diagonal, np.ndarray) else helper.variable(diagonal, "diagonal")
    helper.rank(vector, "diagonal", 1)
    return helper.op("diag", vector)


# -- shape ----------------------------------------------------------------------------------------------------------------------


def cast(x: Variable, dtype: Any) -> Variable:
    """x converted to another dtype.

    Shapes: the result has x's shape.

    Raises ProgramError if `dtype` is not a dtype.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.cast(fx.data("x", [-1, 3], "int64"), "float32")
    <Variable cast_0.tmp_0: f32[-1,3]>
    """
    helper = LayerWriter("cast")
    return helper.op("cast", helper.variable(x, "x"), dtype=as_dtype(dtype))


def concat(input: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Variables joined along an axis; the other sizes must agree.

    Shapes: [n, 3] and [n, 5] give [n, 8] along axis 1.

    Types: the variables and the result have one dtype.

    Raises ProgramError when dtypes or other sizes differ.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.concat([fx.data("x", [-1, 3], "float32"), fx.data("y", [-1, 5], "float32")], axis=1)
    <Variable concat_0.tmp_0: f32[-1,8]>
    """
    helper = LayerWriter("concat", name)
    xs = helper.variables(input, "input")
    return helper.op("concat", xs, axis=helper.axis(xs[0], axis))


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


def stack(x: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Variables of one shape stacked along a new axis.

    Shapes: k variables [n, 3] give [k, n, 3], or [n, k, 3] with axis=1.

    Types: the variables and the result have one dtype.

    Raises ProgramError when shapes or dtypes differ.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.stack([fx.data("x", [-1, 3], "float32"), fx.data("y", [-1, 3], "float32")], axis=1)
    <Variable stack_0.tmp_0: f32[-1,2,3]>
    """
    helper = LayerWriter("stack", name)
    xs = helper.variables(x, "x")
    return helper.op("stack", xs, axis=helper.axis(xs[0], axis, extra=1))


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


def transpose(x: Variable, perm: Sequence[int], name: str | None = None) -> Variable:
    """x with its axes in the order `perm`.

    Shapes: axis i of the result is x's axis `perm[i]`.

    Types: x is of any dtype; the result has the same.

    Raises ProgramError if `perm` does not contain each axis once.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.transpose(fx.data("x", [-1, 3, 28, 32], "float32"), [0, 2, 3, 1])
    <Variable transpose_0.tmp_0: f32[-1,28,32,3]>
    """
    helper = LayerWriter("transpose", name)
    x = helper.variable(x, "x")
    axes = tuple(helper.axis(x, a, "perm") for a in wholes(helper.label, "perm", perm))
    if sorted(axes) != list(builtins.range(x.ndim)):
        raise wrong(f"{helper.label}: perm {list(perm)} is not an order of the {x.ndim} axes of variable {x.name!r}")
    return helper.op("transpose", x, axis=axes)


def _axes(helper: LayerWriter, x: Variable, axes: Any, extra: int = 0) -> tuple[int, ...]:
    items = wholes(helper.label, "axes", axes, None if isinstance(axes, (list, tuple, np.ndarray)) else 1)
    out = tuple(helper.axis(x, a, "axes", extra and len(items)) for a in items)
    if len(set(out)) != len(out):
        raise wrong(f"{helper.label}: axes {list(items)} names an axis twice")
    return out


def squeeze(input: Variable, axes: Sequence[int], name: str | None = None) -> Variable:
    """input without the given axes, which have size 1; if no axes are given, without all axes of size 1.

    Shapes: [n, 1, 3] gives [n, 3] with axes [1].

    Types: input is of any dtype; the result has the same.

    Raises ProgramError if a given axis has another size.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.squeeze(fx.data("x", [-1, 1, 3], "float32"), [1])
    <Variable squeeze_0.tmp_0: f32[-1,3]>
    """
    helper = LayerWriter("squeeze", name)
    x = helper.variable(input, "input")
    return helper.op("squeeze", x, axes=_axes(helper, x, axes))


def unsqueeze(input: Variable, axes: int | Sequence[int], name: str | None = None) -> Variable:
    """input with new axes of size 1 at the given positions of the result.

    Shapes: [n, 3] gives [n, 1, 3] with axes [1].

    Types: input is of any dtype; the result has the same.

    Raises ProgramError when the result has no such axis.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.unsqueeze(fx.data("x", [-1, 3], "float32"), [1])
    <Variable unsqueeze_0.tmp_0: f32[-1,1,3]>
    """
    helper = LayerWriter("unsqueeze", name)
    x = helper.variable(input, "input")
    return helper.op("unsqueeze", x, axes=_axes(helper, x, axes, extra=1))


def flatten(x: Variable, axis: int = 1, name: str | None = None) -> Variable:
    """x as a matrix: the axes before `axis` become its rows, the others its columns.

    Shapes: [n, 3, 4] gives [n, 12].

    Types: x is of any dtype; the result has the same.

    Raises ProgramError when x has no such axis.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.flatten(fx.data("x", [-1, 3, 4], "float32"))
    <Variable flatten_0.tmp_0: f32[-1,12]>
    """
    helper = LayerWriter("flatten", name)
    x = helper.variable(x, "x")
    axis = whole(helper.label, "axis", axis)
    if not 0 <= axis <= x.ndim:
        raise wrong(f"{helper.label}: axis is {axis}; variable {x.name!r} with shape {list(x.shape)} allows 0 to {x.ndim}")
    return helper.op("flatten", x, axis=axis)


def _slice_args(helper: LayerWriter, x: Variable, axes: Any, **lists: Any) -> dict[str, Any]:
    out = {"axes": _axes(helper, x, axes)}
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
        return helper.op("slice_by", x, *known, axes=_axes(helper, x, axes))
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


def expand_as(x: Variable, target_tensor: Variable, name: str | None = None) -> Variable:
    """x repeated to the shape of `target_tensor`, whose sizes are multiples of x's."""
    helper = LayerWriter("expand_as", name)
    return helper.op("expand_as", helper.variable(x, "x"), helper.variable(target_tensor, "target_tensor"))


def reverse(x: Variable, axis: int | Sequence[int]) -> Variable:
    """x with its elements reversed along the given axes."""
    helper = LayerWriter("reverse")
    x = helper.variable(x, "x")
    return helper.op("reverse", x, axis=_axes(helper, x, axis))


def flip(x: Variable, dims: int | Sequence[int]) -> Variable:
    """x with its elements reversed along the given axes."""
    return reverse(x, dims)


def tril(input: Variable, diagonal: int = 0, name: str | None = None) -> Variable:
    """The lower triangle of the last two axes, zero above `diagonal`."""
    helper = LayerWriter("tril", name)
    x = helper.variable(input, "input")
    return helper.op("tril_triu", x, diagonal=whole(helper.label, "diagonal", diagonal), lower=True)


def triu(input: Variable, diagonal: int = 0, name: str | None = None) -> Variable:
    """The upper triangle of the last two axes, zero below `diagonal`."""
    helper = LayerWriter("triu", name)
    x = helper.variable(input, "input")
    return helper.op("tril_triu", x, diagonal=whole(helper.label, "diagonal", diagonal), lower=False)


def shape(input: Variable) -> Variable:
    """The shape of input as an int32 vector; open axes have their size at run time.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.shape(fx.data("x", [-1, 3], "float32"))
    <Variable shape_0.tmp_0: i32[2]>
    """
    helper = LayerWriter("shape")
    return helper.op("shape", helper.variable(input, "input"))


def rank(input: Variable) -> Variable:
    """The number of axes of input, as an int32 [1]."""
    helper = LayerWriter("rank")
    return assign(np.array([helper.variable(input, "input").ndim], "int32"))


def size(input: Variable) -> Variable:
    """The number of elements of input, as an int64 [1]."""
    helper = LayerWriter("size")
    return helper.op("reduce_prod", helper.op("shape", helper.variable(input, "input"), dtype="int64"), dim=())


# -- picking, ordering -----------------------------------------------------------------------------------------------------------


def gather(input: Variable, index: Variable, overwrite: bool = True) -> Variable:
    """The rows of input at the integers in `index`, [n] or [n, 1]. `overwrite` has no effect: gradients of repeated rows are added.

    Shapes: input [rows, ...] and n indices give [n, ...].

    Types: index is int64 or int32; the result has input's dtype.

    Raises ProgramError for an index of another dtype, and ExecutionError in a run with an index that is not a row.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.gather(fx.data("x", [100, 8], "float32"), fx.data("index", [-1], "int64"))
    <Variable gather_0.tmp_0: f32[-1,8]>
    """
    helper = LayerWriter("gather")
    return helper.op("gather", helper.variable(input, "input"), helper.variable(index, "index"))


def gather_nd(input: Variable, index: Variable, name: str | None = None) -> Variable:
    """The elements or slices of input at the positions in the last axis of `index`."""
    helper = LayerWriter("gather_nd", name)
    return helper.op("gather_nd", helper.variable(input, "input"), helper.variable(index, "index"))


def scatter(input: Variable, index: Variable, updates: Variable, name: str | None = None, overwrite: bool = True) -> Variable:
    """input with the rows at `index` replaced by those of `updates`; overwrite=False sets them to 0 and adds the updates."""
    helper = LayerWriter("scatter", name)
    args = helper.variable(input, "input"), helper.variable(index, "index"), helper.variable(updates, "updates")
    return helper.op("scatter", *args, overwrite=bool(overwrite))


def where(condition: Variable, x: Variable | None = None, y: Variable | None = None, name: str | None = None) -> Variable:
    """x where `condition` (bool) is true, y elsewhere. With only the condition, the int64 positions of true elements, one row for each.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     at = fx.layers.where(fx.data("go", [-1, 2], "bool"))
    >>> fx.Executor().run(main, feed={"go": np.array([[True, False], [False, True]])}, fetch_list=[at])[0].tolist()
    [[0, 0], [1, 1]]
    """
    helper = LayerWriter("where", name)
    if x is None and y is None:
        return helper.op("where_index", helper.variable(condition, "condition"))
    if x is None or y is None:
        raise wrong(f"{helper.label}: give both x and y, or neither of them for the positions of true elements")
    return helper.op("where", helper.variable(condition, "condition"), helper.variable(x, "x"), helper.variable(y, "y"))


def _arg(op_type: str, x: Variable, axis: int) -> Variable:
    helper = LayerWriter(op_type)
    x = helper.variable(x, "x")
    return helper.op(op_type, x, axis=helper.axis(x, axis))


def argmax(x: Variable, axis: int = 0) -> Variable:
    """The index of the largest element along an axis, as int64; the first of equal ones.

    Shapes: [n, c] gives [n] with axis=1.

    Raises ProgramError when x has no such axis.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.argmax(fx.data("x", [-1, 10], "float32"), axis=1)
    <Variable arg_max_0.tmp_0: i64[-1]>
    """
    return _arg("arg_max", x, axis)


def argmin(x: Variable, axis: int = 0) -> Variable:
    """The index of the smallest element along an axis, as int64; the first of equal ones."""
    return _arg("arg_min", x, axis)


def argsort(input: Variable, axis: int = -1, descending: bool = False, name: str | None = None) -> tuple[Variable, Variable]:
    """The elements sorted along an axis, and their int64 indices in input."""
    helper = LayerWriter("argsort", name)
    x = helper.variable(input, "input")
    return helper.op("argsort", x, axis=helper.axis(x, axis), descending=bool(descending))


def topk(input: Variable, k: Any, name: str | None = None) -> tuple[Variable, Variable]:
    """The k largest elements of the last axis, largest first, and their int64 indices.

    k may be a Variable with one number; a run raises ExecutionError if it is negative or above the number of elements.

    Shapes: [..., c] gives two of [..., k].

    Types: the elements have input's dtype, the indices are int64.

    Raises ProgramError when k is above the size of the last axis.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.topk(fx.data("x", [-1, 10], "float32"), 5)
    (<Variable top_k_0.tmp_0: f32[-1,5]>, <Variable top_k_0.tmp_1: i64[-1,5]>)
    """
    helper = LayerWriter("top_k", name)
    x = helper.variable(input, "input")
    if (computed := helper.sizes([k], "k")) is not None:
        return helper.op("top_k_by", x, computed)
    k = whole(helper.label, "k", k, 1)
    if x.ndim and 0 <= x.shape[-1] < k:
        raise wrong(f"{helper.label}: k is {k}, the last axis of variable {x.name!r} has {x.shape[-1]} elements")
    return helper.op("top_k", x, k=k)


__all__ = [
    "argmax", "argmin", "argsort", "assign", "cast", "concat", "create_global_var", "create_parameter", "create_tensor", "data", "diag",
    "expand", "expand_as", "eye", "fill_constant", "fill_constant_batch_size_like", "flatten", "flip", "gather", "gather_nd",
    "gaussian_random", "gaussian_random_batch_size_like", "linspace", "ones", "ones_like", "range", "rank", "reshape", "reverse",
    "scatter", "sequence_mask", "shape", "size", "slice", "split", "squeeze", "stack", "strided_slice", "topk", "transpose", "tril",
    "triu", "uniform_random", "uniform_random_batch_size_like", "unsqueeze", "unstack", "where", "zeros", "zeros_like",
]  # fmt: skip
