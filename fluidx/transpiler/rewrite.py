"""What passes share: the base class, and a writer that builds the new program while the old one stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ..ir.builder import Builder
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
    notes: list[str] = None  # type: ignore[assignment]
    skipped: list[str] = None  # type: ignore[assignment]
    layout: dict[str, list[tuple[str, int, int, int]]] = None  # type: ignore[assignment]
    roots: list[Any] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.notes, self.skipped, self.layout, self.roots = [], [], {}, []

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
    def __init__(self, writer: Writer, role: Role, owner: str, near: Operator | None):
        super().__init__(writer.block, role, owner)
        self.near = near

    def emit(self, op_type: str, *args: Any, **kwargs: Any) -> Any:
        result = super().emit(op_type, *args, **kwargs)
        if self.near is not None:
            object.__setattr__(self.block.oplist[-1], "site", self.near.site)
        return result


def each_op(program: Program, visit: Callable[[Writer, Operator], None]) -> Writer:
    """Run `visit(writer, op)` over block 0; what it keeps or builds becomes the new operator list."""
    writer = Writer(program)
    for op in writer.old:
        visit(writer, op)
    return writer
