"""`row`: a layer that only checks its arguments and emits one operator, made from a line of fluid's names and the op's declaration."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from .. import ops  # noqa: F401  the declarations
from .._checks import number, one_of, whole, wholes, wrong
from ..ir import Variable, as_dtype, nearest, opdef
from ..ops.operators import of_dtype
from .helper import LayerWriter

Check = Callable[[LayerWriter, str, Any, Any], Any]  # (writer, name of the argument, value, first operand) -> value of the attribute

_TYPES = {"name": "str | None", "act": "str | None", "out": "Variable | None", "cond": "Variable | None", "dtype": "Any"}
_EXAMPLE = "import fluidx as fx\n>>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():\n...     "


def row(
    signature: str,
    doc: str,
    op: str = "",
    *,
    kind: str = "",
    slots: Sequence[str] = (),
    unused: Sequence[str] = (),
    always: Mapping[str, Any] | None = None,
    result: int | None = None,
    stop_gradient: bool = False,
    write: Callable[..., Any] | None = None,
    **checks: Check | tuple[str, Check],
) -> Any:
    """The layer `signature`, which appends one operator `op`, by default that of the layer's name.

    An argument that is named as an attribute of the op becomes this attribute, checked by its declared type; None leaves out one whose
    default is None. `name`, `act`, and `out` or `cond` are as in every layer. The others are the op's inputs, in the order of its slots or
    of `slots`, but for those in `unused`. `checks` has for an argument another check, or (name of its attribute, check).

    An argument without a type is a Variable, or has the type of its default. In `doc`, an example that is one expression needs no program
    around it. `kind` is what names of variables begin with (the layer's name), `always` has attributes that no argument sets, `result` is
    the index of the only output that is returned, and with `stop_gradient` no gradient passes through it. Layers of a family that do more
    share a function `write(helper, **arguments)`, which gets all arguments but `name`.

    >>> relu = row("relu(x, name=None)", "max(x, 0).")
    >>> import inspect
    >>> inspect.signature(relu)
    <Signature (x: 'Variable', name: 'str | None' = None) -> 'Variable'>
    """
    name, _, arguments = signature.partition("(")
    form = _form(arguments)
    layer: Callable[..., Any]
    if write is not None:
        layer = _written_by(write, kind or name, form.names)
    else:
        layer = _Layer(name, form, op or name, kind or name, slots, unused, always or {}, result, stop_gradient, checks)
    caller = sys._getframe(1)
    made: dict[str, Any] = {}
    exec(form.code, caller.f_globals, made)  # a function of the row's module, so that its doctest is found there
    function = made["build"](layer)
    at = {"co_filename": caller.f_code.co_filename, "co_firstlineno": caller.f_lineno}  # a traceback shows the row
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name, **at)
    function.__name__ = function.__qualname__ = name
    text, mark, example = inspect.cleandoc(doc).partition(">>> ")
    function.__doc__ = text + mark + (_EXAMPLE if mark and not example.startswith("import ") else "") + example
    return function


class _Form(NamedTuple):
    """The arguments of a layer, the defaults as they are written, and the code that defines a function with them."""

    names: tuple[str, ...]
    defaults: Mapping[str, str]
    code: CodeType


@cache
def _form(arguments: str) -> _Form:
    """The form of "x, name=None)", what follows the name of a layer: with the types that it leaves out. Many layers have the same."""
    declared = ast.parse(f"def made({arguments}: pass").body[0]
    if not isinstance(declared, ast.FunctionDef):
        raise TypeError(f"a row begins with a signature such as relu(x, name=None), found ({arguments}")
    args = declared.args.args
    defaults = dict(zip([a.arg for a in args][len(args) - len(declared.args.defaults) :], declared.args.defaults))
    for argument in args:
        if argument.annotation is None:
            value = ast.literal_eval(defaults[argument.arg]) if argument.arg in defaults else None
            text = _TYPES.get(argument.arg) or ("Variable" if value is None else type(value).__name__)
            argument.annotation = ast.Name(text)
    names = tuple(a.arg for a in args)
    returns = ast.unparse(declared.returns) if declared.returns else "Variable"
    text = f"def build(layer):\n def made({ast.unparse(declared.args)}) -> {returns}: return layer({', '.join(names)})\n return made"
    return _Form(names, {n: ast.unparse(default) for n, default in defaults.items()}, compile(text, "<row>", "exec"))


def _written_by(write: Callable[..., Any], kind: str, names: Sequence[str]) -> Callable[..., Any]:
    """What a layer calls whose operators `write` appends."""

    def layer(*values: Any) -> Any:
        given = dict(zip(names, values))
        return write(LayerWriter(kind, given.pop("name", None)), **given)

    return layer


class _Layer:
    """What a row says: which arguments are operands, attributes and outputs, and how they are checked."""

    def __init__(
        self, name: str, form: _Form, op: str, kind: str, slots: Sequence[str], unused: Sequence[str], always: Mapping[str, Any],
        result: int | None, stop_gradient: bool, checks: Mapping[str, Check | tuple[str, Check]],
    ):  # fmt: skip
        self.op, self.kind, self.always, self.result, self.stop_gradient = op, kind, always, result, stop_gradient
        self.names = form.names
        definition = opdef(op)
        self.out = next((n for n in self.names if n in ("out", "cond") and n not in unused), None)
        self.has_name = "name" in self.names and "name" not in unused
        beside = {"name", "act", self.out, *unused}
        self.attrs: list[tuple[str, str, bool, Check]] = []
        operands: dict[str, Check | None] = {}
        for argument in self.names:
            if argument in beside:
                continue
            said = checks.get(argument)
            attr, check = said if isinstance(said, tuple) else (argument, said)
            if attr in definition.attrs:
                self.attrs.append((argument, attr, form.defaults.get(argument) == "None", check or _BY_TYPE[_type(definition, attr)]))
            else:
                operands[argument] = check
        order = list(slots) or list(operands)
        for argument in operands:
            if (default := form.defaults.get(argument, "None")) != "None":
                has = nearest(argument, definition.attrs, f"op {op} has")
                raise TypeError(f"row {name}: {argument}={default} is no attribute; {has}; an input has no default but None")
        if sorted(order) != sorted(operands) or len(order) > len(definition.in_slots) or any(c not in self.names for c in checks):
            takes = f"inputs {', '.join(definition.inputs)} and attributes {', '.join(definition.attrs)}"
            raise TypeError(f"row {name}: op {op} has {takes}; the row has inputs {', '.join(order)}, checks {', '.join(checks)}")
        slot_of = dict(zip(order, definition.in_slots))
        self.operands = [(n, slot_of[n].optional, slot_of[n].many) for n in operands]
        self.operand_checks = [(n, check) for n, check in operands.items() if check is not None]
        self.order = order

    def __call__(self, *values: Any) -> Any:
        given = dict(zip(self.names, values))
        helper = LayerWriter(self.kind, given["name"] if self.has_name else None)
        operands: dict[str, Any] = {}
        first: Any = None
        for argument, optional, many in self.operands:
            operands[argument] = value = given[argument]
            if value is None and optional:
                continue
            operands[argument] = value = helper.variables(value, argument) if many else helper.variable(value, argument)
            if first is None:
                first = value[0] if many else value
        for argument, check in self.operand_checks:
            check(helper, argument, operands[argument], first)
        attrs = dict(self.always)
        for argument, attr, may_lack, attr_check in self.attrs:
            if given[argument] is not None or not may_lack:
                attrs[attr] = attr_check(helper, argument, given[argument], first)
        out = {} if self.out is None or given[self.out] is None else {"Out": given[self.out]}
        op = self.op if first is None else of_dtype(self.op, first.dtype)  # fluid's elementwise_mod of integers is another op
        y = helper.op(op, *[operands[argument] for argument in self.order], out=out or None, **attrs)
        y = y if self.result is None else y[self.result]
        if self.stop_gradient:
            y.stop_gradient = True
        return helper.activate(y, given["act"]) if "act" in given else y


def _type(definition: Any, attr: str) -> Any:
    return "dtype" if attr == "dtype" else definition.attr_types[attr]


# -- checks of arguments ------------------------------------------------------------------------------------------------------------

_BY_TYPE: dict[Any, Check] = {
    "dtype": lambda helper, what, value, x: as_dtype(value),
    bool: lambda helper, what, value, x: bool(value),
    int: lambda helper, what, value, x: whole(helper.label, what, value),
    float: lambda helper, what, value, x: number(helper.label, what, value),
    tuple: lambda helper, what, value, x: wholes(helper.label, what, value),
}


def at_least(least: int) -> Check:
    """An integer that is not below `least`."""
    return lambda helper, what, value, x: whole(helper.label, what, value, least)


def above_zero(helper: LayerWriter, what: str, value: Any, x: Variable) -> float:
    """A number above 0."""
    if (found := number(helper.label, what, value)) <= 0:
        raise wrong(f"{helper.label}: {what} must be above 0, got {found}")
    return found


def among(*options: str) -> Check:
    """One of some words."""
    return lambda helper, what, value, x: one_of(helper.label, what, value, options)


def axis_of(helper: LayerWriter, what: str, value: Any, x: Variable, extra: int = 0) -> int:
    """An axis of the first operand, or with `extra` of a result that has as many more; counted from 0."""
    return helper.axis(x, value, what, extra)


def axis_as_given(helper: LayerWriter, what: str, value: Any, x: Variable) -> int:
    """An axis of the first operand; a negative one stays negative."""
    helper.axis(x, value, what)
    return value


def axes_of(helper: LayerWriter, what: str, value: Any, x: Variable, extra: int = 0) -> tuple[int, ...]:
    """Different axes of the first operand, or with `extra` of a result that has one more for each; one integer is one axis."""
    items = wholes(helper.label, "axes", value, None if isinstance(value, (list, tuple, np.ndarray)) else 1)
    out = tuple(helper.axis(x, a, "axes", extra and len(items)) for a in items)
    if len(set(out)) != len(out):
        raise wrong(f"{helper.label}: axes {list(items)} names an axis twice")
    return out


def ranked(*ndims: int) -> Check:
    """A Variable with one of these numbers of axes."""
    return lambda helper, what, value, x: helper.rank(value, what, *ndims)


def sized(count: int, least: int = 0) -> Check:
    """So many integers."""
    return lambda helper, what, value, x: wholes(helper.label, what, value, count, least)


def layout_of(helper: LayerWriter, what: str, value: Any, x: Variable) -> str:
    """NCHW or NHWC."""
    return helper.layout(value, what)
