"""What passes share: the base class, and a writer that builds the new program while the old one stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from ..ir.builder import Builder
from ..ir.opdef import opdef
from ..ir.operator import Operator, Role
from ..ir.program import Program, ProgramPair, Var
from ..ir.types import Placement
from .cluster import Cluster


@dataclass(frozen=True)
class Pass:
    """A rewrite of main and startup together. Options are dataclass fields; `repr` is the recipe.

    `run` gets programs that it may append to: copies that share the immutable operators. `notes` lists what the pass changes
    on purpose (local batch-norm statistics, say), for verify() to report.
    """

    def run(self, job: Job) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"{type(self).__name__}({shown})"


@dataclass
class Job:
    """One transpile under way."""

    main: Program
    startup: Program
    cluster: Cluster
    loss: str = ""
    loss_op: str = ""  # how the ranks' losses combine: "avg" or "sum"; "" without gradients
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    layout: dict[str, list[tuple[str, int, int, int]]] = field(default_factory=dict)
    roots: list[Any] = field(default_factory=list)
    places: dict[Any, Any] = field(default_factory=dict)  # placement rules' results so far

    @property
    def pair(self) -> ProgramPair:
        return ProgramPair(self.main, self.startup)

    @property
    def world_size(self) -> int:
        return self.cluster.world_size


class Writer:
    """Rebuilds the operator list of block 0: take the old operators one by one, keep or replace them, insert new ones."""

    def __init__(self, program: Program):
        self.program = program
        self.block = program.global_block()
        self.old = self.block.oplist
        self.block.oplist = []

    def keep(self, op: Operator) -> None:
        self.block.oplist.append(op)

    def builder(self, role: Role = Role.DIST, owner: str = "", near: Operator | None = None) -> Builder:
        """A builder that appends here. `near` lends its call site to what is inserted on its behalf."""
        return _NearBuilder(self, role, owner, near)

    def declare(self, name: str, like: Var, placement: Placement = (), **changes: Any) -> Var:
        return self.block.declare(like.changed(name=name, placement=placement, **changes))


class _NearBuilder(Builder):
    """Builds on behalf of an operator, at its call site. An output that is declared already keeps its type: nothing is inferred
    then, which makes an insertion several times quicker; the verifier infers it later."""

    def __init__(self, writer: Writer, role: Role, owner: str, near: Operator | None):
        super().__init__(writer.block, role, owner)
        self.site = near.site if near is not None else None

    def emit(self, op_type: str, *args: Any, name: str | None = None, out: Mapping[str, Any] | None = None, **attrs: Any) -> Any:
        definition = opdef(op_type)
        target = name if out is None else out.get(definition.out_slots[0].name)
        if len(definition.out_slots) != 1 or target not in self.block.descs:
            result = super().emit(op_type, *args, name=name, out=out, **attrs)
            object.__setattr__(self.block.oplist[-1], "site", self.site)
            return result
        ins = {s.name: tuple(map(_name, a)) if s.many else (_name(a),) for s, a in zip(definition.in_slots, args) if a is not None}
        outs = {definition.out_slots[0].name: (target,)}
        full = _attrs(op_type, tuple(attrs.items()))
        self.block.oplist.append(Operator(op_type, ins, outs, full, self.role or Role.DIST, (), self.owner or "", self.site))
        return self.block.var(target)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else value.name


@lru_cache(maxsize=4096)
def _attrs(op_type: str, attrs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Complete attributes; operators of one kind share them."""
    return opdef(op_type).complete_attrs(dict(attrs))


def each_op(program: Program, visit: Callable[[Writer, Operator], None]) -> Writer:
    """Run `visit(writer, op)` over block 0; what it keeps or builds becomes the new operator list."""
    writer = Writer(program)
    for op in writer.old:
        visit(writer, op)
    return writer
