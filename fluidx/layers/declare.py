"""Layers that declare variables: inputs that are fed, parameters, and variables that startup fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import number, whole, wholes, wrong
from ..initializer import Constant, Initializer
from ..ir import Parameter, ProgramError, Variable, default_main_program, default_startup_program, unique_name
from ..ir.types import Dim
from ..param_attr import ParamAttr
from .helper import LayerWriter


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
        raise wrong(f"{owner}: {name} must be a list of integers, got {type(value).__name__}: {value!r}")
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


__all__ = ["create_global_var", "create_parameter", "create_tensor", "data"]
