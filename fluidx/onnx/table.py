"""The table of ONNX operators, for import and export. The modules of `fluidx.onnx.ops` fill it.

`entry("Elu", "elu", alpha=1.0)` states that an ONNX operator is one operator of fluidx, with the same operands in the same order, and how
the attributes correspond. It serves both directions, or one `way`. An operator that needs code has functions, registered by decorators:

- `@imports("Relu")`: the function takes a `Node`, writes operators of a program with `n.b` and returns variables, the outputs of the node.
  If all operands are known, its program runs at once, and the outputs are known too.
- `@on_numpy("NonZero")`: the function runs on the host. The importer calls it if all operands are known, if a program cannot hold one of
  them, or if the operator has no function of the first kind. It computes with NumPy; control flow writes sub-graphs instead, sequences may
  hold variables, and random draws are never known. A `pure` function only computes with NumPy from the values of its operands, so a
  session can call it in each run.
- `@dynamic("NonZero", 0)`: the importer calls the function if one of these operands is computed by the program and nothing can run the
  program for its value. It writes operators whose result sizes depend on values, or that take sequences, optionals or strings.
- `@by_sizes("Range", 0, 1, 2)`: the importer calls the function if some of these operands are open sizes (symbolic_sizes.py) and the others
  are known. It writes operators whose result sizes are those of other values.
- `@exports("relu")`: the function takes an `Op`, emits nodes with `op.emit`, and returns the names of the values of the output slots: one
  name for the first slot, or a dict of slot to name or names.

An ONNX operator that is not in the table is imported by the function body of its schema. An elementwise operator of fluidx that is not in
the table is exported from its scalar expression.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ir.opdef import opdef

if TYPE_CHECKING:
    from .export_graph import Op
    from .node import Node

ImportFunction = Callable[[Any], Any]
Decorator = Callable[[ImportFunction], ImportFunction]
ExportFunction = Callable[["Op"], "str | Mapping[str, Any]"]
IMPORTERS: dict[tuple[str, str], ImportFunction] = {}
NUMPY_IMPORTERS: dict[tuple[str, str], ImportFunction] = {}
PURE: set[tuple[str, str]] = set()  # the pure ones of NUMPY_IMPORTERS
DYNAMIC_IMPORTERS: dict[tuple[str, str], tuple[tuple[int, ...], ImportFunction]] = {}
SIZE_IMPORTERS: dict[str, tuple[frozenset[int], ImportFunction]] = {}
FACTORS: set[tuple[str, str]] = set()  # arithmetic operators without weights: a single number that they read is a constant
STATISTICS: dict[tuple[str, str], Mapping[int, str]] = {}  # operator -> {operand that training updates: what it is, such as "mean"}
EXPORTERS: dict[str, ExportFunction] = {}

OPERATORS = f"{__package__}.ops"  # the package of the operators


def imports(*names: str, domain: str = "", factors: bool = False, statistics: Mapping[int, str] | None = None) -> Decorator:
    """Register a function that writes operators of a program.

    `factors`: the operators are arithmetic and have no weights. `statistics`: operands that are running statistics, with a word for each.
    """
    FACTORS.update((domain, name) for name in names if factors)
    STATISTICS.update(((domain, name), statistics) for name in names if statistics)
    return _register(IMPORTERS, names, domain)


def on_numpy(*names: str, domain: str = "", pure: bool = False) -> Decorator:
    """Register a function that runs on the host."""
    if pure:
        PURE.update((domain, name) for name in names)
    return _register(NUMPY_IMPORTERS, names, domain)


def dynamic(name: str, *operands: int, domain: str = "") -> Decorator:
    """Register a function that is called if one of these operands is computed and nothing can run the program for its value."""

    def register(f: ImportFunction) -> ImportFunction:
        assert (domain, name) not in DYNAMIC_IMPORTERS, name
        DYNAMIC_IMPORTERS[domain, name] = operands, f
        return f

    return register


def by_sizes(name: str, *operands: int) -> Decorator:
    """Register a function that is called if some of these operands are open sizes."""

    def register(f: ImportFunction) -> ImportFunction:
        assert name not in SIZE_IMPORTERS, name
        SIZE_IMPORTERS[name] = frozenset(operands), f
        return f

    return register


def _register(table: dict[tuple[str, str], ImportFunction], names: tuple[str, ...], domain: str) -> Decorator:
    def register(f: ImportFunction) -> ImportFunction:
        for name in names:
            assert (domain, name) not in table, name
            table[domain, name] = f
        return f

    return register


def exports(*types: str) -> Callable[[ExportFunction], ExportFunction]:
    """Register a function that exports operators of these types."""

    def register(f: ExportFunction) -> ExportFunction:
        for name in types:
            assert name not in EXPORTERS, name
            EXPORTERS[name] = f
        return f

    return register


# -- operators that both sides have ---------------------------------------------------------------------------------------------


class Attribute(NamedTuple):
    """The attribute of fluidx for one of ONNX: its name there, the default in ONNX, and its values by those of ONNX, if they differ."""

    name: str
    default: Any
    words: Mapping[Any, Any] = MappingProxyType({})

    def read(self, value: Any) -> Any:
        if self.words:
            return self.words[value]
        return bool(value) if isinstance(self.default, bool) else tuple(value) if isinstance(value, list) else value

    def written(self, value: Any) -> Any:
        """The value in ONNX; None if it is left out: older opsets lack some flags, and no node has an empty list."""
        if value == () or isinstance(self.default, bool) and value == self.default:
            return None
        if self.words:
            return next(theirs for theirs, ours in self.words.items() if ours == value)
        return int(value) if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class OneToOne:
    """An ONNX operator that is one operator of fluidx, with the same operands.

    `theirs` and `ours` are attributes of the ONNX operator and of fluidx's that must have these values. `operands`: slot -> a function that
    gives the ONNX operand.
    """

    onnx: str
    op: str
    domain: str
    attrs: Mapping[str, Attribute]
    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]
    operands: Mapping[str, Callable[[Op, str], str]]

    def read(self, n: Node, operands: Sequence[Any] | None = None) -> Any:
        """Write the operator of fluidx for a node, by default for the operands of the node."""
        given = {a.name: a.read(_one_of(n, name, a.default, [*a.words])) for name, a in self.attrs.items()}
        xs = n.xs() if operands is None else operands
        return n.b.emit(self.op, *([xs] if opdef(self.op).in_slots[0].many else xs), **self.ours, **given)

    def without(self, *names: str) -> OneToOne:
        """The same operator without these attributes of ONNX."""
        return replace(self, attrs={name: a for name, a in self.attrs.items() if name not in names})

    def write(self, op: Op) -> str | Mapping[str, Any]:
        """Write the node for an operator of fluidx."""
        return self.node(op, self.values(op))

    def node(self, op: Op, operands: Sequence[str], **more: Any) -> str | Mapping[str, Any]:
        """A node with these operands, the attributes of an operator, and more."""
        given = {name: v for name, a in self.attrs.items() if (v := a.written(op.attrs[a.name])) is not None}
        slots = [s.name for s in opdef(op.type).out_slots]
        said = {**self.theirs, **given, **({"domain": self.domain} if self.domain else {}), **more}
        made = op.emit_many(self.onnx, len(slots), *operands, **said)
        return made[0] if len(slots) == 1 else dict(zip(slots, made, strict=True))

    def values(self, op: Op) -> list[str]:
        """The ONNX operands of an operator. One that is left out is "", and left out at the end."""
        values: list[str] = []
        for slot in opdef(op.type).in_slots:
            change = self.operands.get(slot.name)
            values += [change(op, slot.name)] if change and op.has(slot.name) else op.many(slot.name) or [""]
        while values and not values[-1]:
            values.pop()
        return values


def _one_of(n: Node, name: str, default: Any, options: Sequence[Any]) -> Any:
    """An attribute of a node. Raises OnnxError if there are options and it is none of them."""
    value = n.attr(name, default)
    if options and value not in options:
        raise n.wrong(f"{name} must be one of {', '.join(map(str, options))}, found {value!r}")
    return value


ENTRIES: list[OneToOne] = []
IMPORT, EXPORT, BOTH = "import", "export", "both"  # the ways of an entry


def entry(
    onnx: str,
    op: str,
    *,
    way: str = BOTH,
    domain: str = "",
    factors: bool = False,
    computed: tuple[int, ...] = (),
    theirs: Mapping[str, Any] | None = None,
    ours: Mapping[str, Any] | None = None,
    operands: Mapping[str, Callable[[Op, str], str]] | None = None,
    read: Callable[[OneToOne, Node], Any] = OneToOne.read,
    write: Callable[[OneToOne, Op], Any] = OneToOne.write,
    **attrs: Any,
) -> OneToOne:
    """State that an ONNX operator and an operator of fluidx are the same: for import and export, or one way.

    A keyword is an attribute of ONNX with its default, or with what `Attribute` has if the names or the values differ. If `computed` lists
    operands, the operator is imported so only if one of them is computed, as with the decorator `dynamic`. Entries of one ONNX operator
    differ in `theirs`. `read` and `write` are an importer and an exporter that do more than write the operator and the node.

    >>> load_all()
    >>> [a.name for e in ENTRIES if e.onnx == "HardSigmoid" for a in e.attrs.values()]
    ['slope', 'offset']
    """
    known = {name: Attribute(*v) if isinstance(v, tuple) else Attribute(name, v) for name, v in attrs.items()}
    made = OneToOne(onnx, op, domain, known, theirs or {}, ours or {}, operands or {})
    ENTRIES.append(made)
    if way != IMPORT:
        exports(op)(partial(write, made))
    if way != EXPORT:
        kinds = _KINDS.setdefault((domain, onnx), [])
        kinds.append((made, read))
        if len(kinds) == 1:
            register = dynamic(onnx, *computed, domain=domain) if computed else imports(onnx, domain=domain, factors=factors)
            register(partial(_read_kind, kinds))
    return made


_KINDS: dict[tuple[str, str], list[tuple[OneToOne, Any]]] = {}  # ONNX operator -> its entries for import, with their importers


def _read_kind(kinds: list[tuple[OneToOne, Any]], n: Node) -> Any:
    """Write the operator of the entry whose attributes a node has."""
    for made, read in kinds:
        if all(n.attr(name, type(value)()) == value for name, value in made.theirs.items()):
            return read(made, n)
    for name, value in kinds[0][0].theirs.items():
        _one_of(n, name, type(value)(), [made.theirs[name] for made, _ in kinds if name in made.theirs])
    raise n.wrong(f"no operator of fluidx has all of its attributes {', '.join(kinds[0][0].theirs)}")


# -- functions ------------------------------------------------------------------------------------------------------------------


def imported() -> set[tuple[str, str]]:
    """(domain, name) of each ONNX operator in the table."""
    return {*IMPORTERS, *NUMPY_IMPORTERS, *DYNAMIC_IMPORTERS}


def is_own(f: ImportFunction) -> bool:
    """Is it a function of fluidx, not one that a user registered?"""
    return isinstance(f, partial) or f.__module__.startswith(OPERATORS)


@cache
def load_all() -> None:
    """Import every module of operators, once."""
    for module in iter_modules(import_module(OPERATORS).__path__):
        import_module(f"{OPERATORS}.{module.name}")
