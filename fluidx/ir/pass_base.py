"""Passes: the one class of all that make a new program of a program, or of main and startup together.

A pass states what it requires of programs and what it ensures, and `run` holds it to that. Passes that stand in texts
(`zero1,join_attention`) are `named`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, overload

from .conversions import Conversions
from .errors import TranspileError
from .flow import leaves
from .operator import Operator
from .program import Program, ProgramPair
from .program_rewriter import Writer, each_op

ONE_DEVICE = "for one device"  # the fact that holds of programs until a pass prepares them for ranks
PASSES: dict[str, type[Pass]] = {}  # those that texts name without a module, by their names in texts
_WAYS = ("rule", "rewrite", "rewrite_pair")

P = TypeVar("P", bound="Pass")


@dataclass(frozen=True)
class Skip:
    """What a rule returns to keep an operator and say why."""

    reason: str


def skip(reason: str) -> Skip:
    """Keep the operator; `explain()` of the transpile lists the reason."""
    return Skip(reason)


@dataclass
class Job:
    """What passes know beside the programs, and what they report.

    `mesh` are the ranks, None where there is one device. `fetch` are the names that will be fetched, None where nobody said; `fed` those of
    fed values that are not declared as data. `log` are the lines that `explain()` prints, or objects that print as one. `facts` hold of the
    programs: what earlier passes ensured. `unused` says what was asked for and has no effect; a transpile warns of it. `step` is the name
    of the step at work, `ended` which step ended a fact.
    """

    mesh: Any = None
    fetch: tuple[str, ...] | None = None
    fed: frozenset[str] = frozenset()
    log: list[Any] = field(default_factory=list)
    facts: set[str] = field(default_factory=lambda: {ONE_DEVICE})
    unused: list[str] = field(default_factory=list)
    step: str = ""
    ended: dict[str, str] = field(default_factory=dict)

    def say(self, op: Operator, said: str) -> None:
        """Log what is to be said of what an operator makes, if anything."""
        if said:
            self.log.append(f"%{op.output_arg_names[0]}: {said}")

    def axes(self, program: Program) -> dict[str, int]:
        """What a program's values are cut over, outer before inner: the axes of ranks, and inside of them those of time."""
        return {**({} if self.mesh is None else self.mesh.axes), **program.turns}

    def fetched(self, program: Program) -> tuple[str, ...]:
        """The names that will be fetched: where nobody said, what no operator of the program reads that the first pass to ask is given."""
        if self.fetch is None:
            self.fetch = tuple(leaves(program))
        return self.fetch


@dataclass(frozen=True)
class Pass:
    """A rewrite of a program. Options are dataclass fields; `repr` is the recipe.

    A subclass overrides one of three methods. `rule(b, op)` is asked for every operator: None keeps it, `skip(reason)` keeps it and says
    why, anything else says that what was built with `b` stands in its place. `rewrite(program, job)` returns a new program, and
    `rewrite_pair(pair, job)` a new main and a new startup program. Given programs stay as they are: `program.copy()` shares the immutable
    operators. Fetched and persistable variables keep their names.

    `requires` are facts that must hold of the programs, `ensures` those that hold after the pass, `ends` those that hold no more. A pass
    that requires `ONE_DEVICE` makes the program that the ranks are proved against, so that it may change values.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.run is not Pass.run:
            raise TypeError(
                f"{cls.__name__}.run: `run` of a pass checks it, and stays; override rewrite(program, job), or rewrite_pair(pair, job)"
            )
        for kind in ("requires", "ensures", "ends"):
            facts = getattr(cls, kind)
            if not isinstance(facts, tuple) or not all(isinstance(fact, str) for fact in facts):
                raise TypeError(f"{cls.__name__}.{kind}: facts are a tuple of texts, such as (ONE_DEVICE,), got {facts!r}")
        if len(given := [way for way in _WAYS if getattr(cls, way) is not getattr(Pass, way)]) > 1:
            raise TypeError(f"{cls.__name__} overrides {' and '.join(given)}: a pass overrides one of {', '.join(_WAYS)}")

    def rule(self, b: Any, op: Operator) -> Any:
        """What stands for one operator."""
        return None

    def rewrite(self, program: Program, job: Job) -> Program:
        """The new program of one program; of a pair, it is main that is rewritten."""

        def visit(writer: Writer, op: Operator) -> None:
            found = self.rule(writer.builder(near=op), op)
            if found is None or isinstance(found, Skip):
                writer.keep(op)
                if isinstance(found, Skip):
                    job.log.append(f"{type(self).__name__} kept {op.to_string()}: {found.reason}")

        return each_op(program, visit)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        """The new main and startup programs."""
        return ProgramPair(self.rewrite(pair.main, job), pair.startup)

    def conversions(self) -> Conversions | None:
        """What a proof compares the program behind the pass by, where the pass does no more than convert values in front of their readers
        and behind their writers; None for any other pass."""
        return None

    @overload
    def run(self, unit: Program, job: Job | None = None) -> Program: ...

    @overload
    def run(self, unit: ProgramPair, job: Job | None = None) -> ProgramPair: ...

    def run(self, unit: Program | ProgramPair, job: Job | None = None) -> Program | ProgramPair:
        """The result for a program, or for a pair. Raises TranspileError where a fact is missing that the pass requires, for a pass that
        changes what it is given, and for one that writes a startup program and is given none."""
        job = Job() if job is None else job
        self._check_facts(job)
        before = _marks(unit)
        result = self.rewrite_pair(unit, job) if isinstance(unit, ProgramPair) else self._of_program(unit, job)
        kind = ProgramPair if isinstance(unit, ProgramPair) else Program
        if not isinstance(result, kind):
            raise TranspileError(f"pass {self!r} must return a {kind.__name__}, got {type(result).__name__}")
        if odd := [p for p in _programs(result) if not isinstance(p, Program)]:
            raise TranspileError(f"pass {self!r} must return a Program, got {type(odd[0]).__name__}")
        if _marks(unit) != before:
            copied = "pair.main.copy()" if kind is ProgramPair else "program.copy()"
            raise TranspileError(f"pass {self!r} changed the program it was given; it must return new ones: {copied}")
        job.facts.difference_update(self.ends)
        job.facts.update(self.ensures)
        job.ended.update(dict.fromkeys(self.ends, job.step or type(self).__name__))
        return result

    def _of_program(self, program: Program, job: Job) -> Any:
        if type(self).rewrite_pair is Pass.rewrite_pair:
            return self.rewrite(program, job)
        result = self.rewrite_pair(ProgramPair(program, Program(f"{program.name}_startup")), job)
        if isinstance(result, ProgramPair) and any(b.oplist for b in result.startup.blocks):
            raise TranspileError(f"pass {self!r} writes a startup program too; give it a ProgramPair(main, startup)")
        return result.main if isinstance(result, ProgramPair) else result

    def _check_facts(self, job: Job) -> None:
        missing = [fact for fact in self.requires if fact not in job.facts]
        if not missing:
            return
        step = next((job.ended[fact] for fact in missing if job.ended.get(fact)), "")
        instead = f"put it before step {step!r}: .before({step!r}, {self!r})" if step else "a pass that ensures it must come before"
        raise TranspileError(f"pass {self!r} requires programs that are {' and '.join(missing)}; {instead}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed_fields(self))})"


def changed_fields(one: Pass) -> list[Field]:
    """The options that are not as they are by default."""

    def default(f: Field) -> Any:
        return f.default if f.default_factory is MISSING else f.default_factory()

    return [f for f in fields(one) if f.repr and getattr(one, f.name) != default(f)]


def pass_name(of: type[Pass]) -> str:
    """The name of a class of passes in texts: `JoinAttention` is `join_attention`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", of.__name__).lower()


def named(of: type[P]) -> type[P]:
    """Have texts name a class of passes (class decorator).

    >>> PASSES["fold_constants"].__name__
    'FoldConstants'
    """
    name = pass_name(of)
    other = PASSES.setdefault(name, of)
    if (other.__module__, other.__qualname__) != (of.__module__, of.__qualname__):
        raise TypeError(f"{of.__module__}.{of.__qualname__}: texts call {other.__module__}.{other.__qualname__} {name!r} already")
    return of


def run_passes(
    passes: Iterable[tuple[str, Pass]], pair: ProgramPair, job: Job, after: Callable[[str, Pass, ProgramPair, ProgramPair], None]
) -> ProgramPair:
    """Run passes in order. `after(step, pass, before, result)` is called behind each. Raises TranspileError as `Pass.run` does."""
    for job.step, one in passes:
        result = one.run(pair, job)
        after(job.step, one, pair, result)
        pair = result
    return pair


def _programs(unit: Program | ProgramPair) -> tuple[Program, ...]:
    return (unit.main, unit.startup) if isinstance(unit, ProgramPair) else (unit,)


def _marks(unit: Program | ProgramPair) -> list[list[Any]]:
    """What a pass may not change in the programs that it was given. Lists of the same immutable objects compare fast."""
    return [made for p in _programs(unit) for b in p.blocks for made in (list(b.oplist), list(b.descs.values()))]
