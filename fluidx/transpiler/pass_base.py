"""The contract of passes: programs in, programs out, what a pass requires and ensures, and reasons for what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ..ir.errors import TranspileError
from ..ir.operator import Operator
from ..ir.program import Program, ProgramPair
from .cluster import Cluster, Mesh, Served
from .program_rewriter import Writer, each_op


@dataclass(frozen=True)
class Skip:
    """What a rule returns to keep an operator and say why."""

    reason: str


def skip(reason: str) -> Skip:
    """Keep the operator; `explain()` of the transpile lists the reason."""
    return Skip(reason)


@dataclass
class Job:
    """What passes share beside the programs: the ranks, the log that `explain()` prints, lines or what prints as one, and what they were
    asked for and had no use for, of which a transpile warns."""

    mesh: Cluster | Mesh | Served
    log: list[Any] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)
    unused: list[str] = field(default_factory=list)

    def say(self, op: Operator, said: str) -> None:
        """Log what is to be said of what an operator makes, if anything."""
        if said:
            self.log.append(f"%{op.output_arg_names[0]}: {said}")

    def axes(self, program: Program) -> dict[str, int]:
        """What a program's values are cut over, outer before inner: the axes of ranks, and inside of them those of time."""
        return {**self.mesh.axes, **program.turns}


@dataclass(frozen=True)
class Pass:
    """A rewrite of main and startup. Options are dataclass fields; `repr` is the recipe.

    A subclass gives `rule(b, op)`, asked for every operator of main: None keeps it, `skip(reason)` keeps it and says why, anything else
    says that what was built with `b` stands in its place. Or it gives `run(pair, job)`, which returns new programs and leaves the given
    ones as they are; `pair.main.copy()` shares the immutable operators.
    """

    requires: ClassVar[tuple[str, ...]] = ()  # facts that passes before this one must have ensured
    ensures: ClassVar[tuple[str, ...]] = ()

    def rule(self, b: Any, op: Operator) -> Any:
        return None

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        def visit(writer: Writer, op: Operator) -> None:
            found = self.rule(writer.builder(near=op), op)
            if found is None or isinstance(found, Skip):
                writer.keep(op)
                if isinstance(found, Skip):
                    job.log.append(f"{type(self).__name__} kept {op.to_string()}: {found.reason}")

        return ProgramPair(each_op(pair.main, visit), pair.startup)

    def __repr__(self) -> str:
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
        return f"{type(self).__name__}({shown})"


def run_passes(
    passes: Iterable[tuple[str, Pass]], pair: ProgramPair, job: Job, after: Callable[[str, Pass, ProgramPair, ProgramPair], None]
) -> ProgramPair:
    """Run passes in order. `after(step, pass, before, result)` is called behind each. Raises TranspileError for a pass whose requirements
    no earlier one ensured, or that changed what it was given."""
    for step, one in passes:
        missing = [f for f in one.requires if f not in job.facts]
        if missing:
            raise TranspileError(
                f"pass {one!r} requires programs that are {' and '.join(missing)}; a pass that ensures it must come before"
            )
        before = _marks(pair)
        result = one.run(pair, job)
        if not isinstance(result, ProgramPair):
            raise TranspileError(f"pass {one!r} must return a ProgramPair, got {type(result).__name__}")
        if _marks(pair) != before:
            raise TranspileError(f"pass {one!r} changed the program it was given; it must return new ones: pair.main.copy()")
        job.facts.update(one.ensures)
        after(step, one, pair, result)
        pair = result
    return pair


def _marks(pair: ProgramPair) -> list[list[Any]]:
    """What a pass may not change in the programs that it was given. Lists of the same immutable objects compare fast."""
    return [made for p in (pair.main, pair.startup) for b in p.blocks for made in (list(b.oplist), list(b.descs.values()))]
