"""The class Pass: the base of all passes, which make a new program from a program, or a new pair from main and startup together.

A pass declares which facts it requires and ensures, and `run` checks them. The decorator `named` gives a pass a name in texts
(`zero1,join_attention`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar, overload

from .conversions import Conversions
from .errors import TranspileError, explains_arguments
from .flow import leaves
from .operator import Operator
from .program import Program, ProgramPair
from .program_rewriter import Writer, each_op

ONE_DEVICE = "for one device"  # the fact that holds until a pass prepares the programs for ranks
PASSES: dict[str, type[Pass]] = {}  # passes by the names that texts use without a module
_WAYS = ("rule", "rewrite", "rewrite_pair")

P = TypeVar("P", bound="Pass")


@dataclass(frozen=True)
class Skip:
    """Returned by a rule to keep an operator and give the reason."""

    reason: str


def skip(reason: str) -> Skip:
    """Keep the operator; `explain()` of the transpile lists the reason."""
    return Skip(reason)


@dataclass
class Job:
    """The inputs of passes beside the programs, and their reports.

    `mesh` has the ranks; None for one device. `fetch` are the names that will be fetched, None if not known; `fed` are names of fed values
    that are not declared as data. `log` has the lines of `explain()`, or objects that print as one. `facts` are the facts that earlier
    passes ensured. `unused` has sentences about requests without effect; a transpile warns with them. `step` is the name of the current
    step, `ended` says which step ended a fact, and `running` has the passes that override `run` and are in it.
    """

    mesh: Any = None
    fetch: tuple[str, ...] | None = None
    fed: frozenset[str] = frozenset()
    log: list[Any] = field(default_factory=list)
    facts: set[str] = field(default_factory=lambda: {ONE_DEVICE})
    unused: list[str] = field(default_factory=list)
    step: str = ""
    ended: dict[str, str] = field(default_factory=dict)
    running: list[Any] = field(default_factory=list)

    def say(self, op: Operator, said: str) -> None:
        """Log a line about an operator's result, unless the line is empty."""
        if said:
            self.log.append(f"%{op.output_arg_names[0]}: {said}")

    def axes(self, program: Program) -> dict[str, int]:
        """The axes that a program's values are cut over, outer before inner: first the axes of ranks, then the time axes."""
        return {**({} if self.mesh is None else self.mesh.axes), **program.turns}

    def fetched(self, program: Program) -> tuple[str, ...]:
        """The names that will be fetched. If they are not known: the results that no operator reads, in the program of the first pass that
        calls this."""
        if self.fetch is None:
            self.fetch = tuple(leaves(program))
        return self.fetch


@dataclass(frozen=True)
class Pass:
    """A rewrite of a program. Options are dataclass fields; `repr` is the call that makes the pass.

    A subclass overrides one of three methods. `rule(b, op)` is called for every operator: None keeps it, `skip(reason)` keeps it and gives
    the reason, and any other result replaces it by the operators that were built with `b`: at least one, because a pass that removes
    operators overrides `rewrite`. `rewrite(program, job)` returns a new program, and `rewrite_pair(pair, job)` a new main and a new startup
    program. The given programs must not be changed: `program.copy()` shares the immutable operators. Fetched and persistable variables
    keep their names.

    `requires` are facts that must hold before the pass, `ensures` those that hold after it, `ends` those that hold no more. A pass that
    requires `ONE_DEVICE` may change values: the ranks are proved against its result. No pass ensures `ONE_DEVICE` after it has ended.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    ensures: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    _own_run: ClassVar[Callable[..., Any] | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in vars(cls):  # passes from before `rewrite` and `rewrite_pair` override this one: theirs is checked as well
            cls._own_run = cls.run
            del cls.run
        for kind in ("requires", "ensures", "ends"):
            facts = getattr(cls, kind)
            if not isinstance(facts, tuple) or not all(isinstance(fact, str) for fact in facts):
                raise TypeError(f"{cls.__name__}.{kind}: facts are a tuple of texts, such as (ONE_DEVICE,), got {facts!r}")
        if len(given := [way for way in _WAYS if getattr(cls, way) is not getattr(Pass, way)]) > 1:
            raise TypeError(f"{cls.__name__} overrides {' and '.join(given)}: a pass overrides one of {', '.join(_WAYS)}")

    def rule(self, b: Any, op: Operator) -> Any:
        """The replacement of one operator: None, `skip(reason)`, or any other value (see the class)."""
        return None

    def rewrite(self, program: Program, job: Job) -> Program:
        """The new program for one program; for a pair, main is rewritten."""

        def visit(writer: Writer, op: Operator) -> None:
            written = len(writer.block.oplist)
            found = self.rule(writer.builder(near=op), op)
            if found is not None and not isinstance(found, Skip) and len(writer.block.oplist) == written:
                raise TranspileError(
                    f"pass {self!r}: rule returned {found!r:.80} and wrote no operator in place of {op.to_string()}; return None to "
                    "keep it, or what b wrote; a pass that removes operators overrides rewrite(program, job)"
                )
            if found is None or isinstance(found, Skip):
                writer.keep(op)
                if isinstance(found, Skip):
                    job.log.append(f"{type(self).__name__} kept {op.to_string()}: {found.reason}")

        return each_op(program, visit)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        """The new main and startup programs."""
        return ProgramPair(self.rewrite(pair.main, job), pair.startup)

    def conversions(self) -> Conversions | None:
        """The conversions of the pass, by which its result is proved, if it only converts values before their readers and after their
        writers; None for any other pass."""
        return None

    @overload
    def run(self, unit: Program, job: Job | None = None) -> Program: ...

    @overload
    def run(self, unit: ProgramPair, job: Job | None = None) -> ProgramPair: ...

    def run(self, unit: Program | ProgramPair, job: Job | None = None) -> Program | ProgramPair:
        """The result for a program, or for a pair. Raises TranspileError if a required fact is missing, if the pass changes a given
        program, or if it needs a startup program and gets none."""
        if not isinstance(unit, (Program, ProgramPair)):
            raise TranspileError(f"pass {self!r}: run takes a Program or a ProgramPair, got {type(unit).__name__}: {unit!r}")
        job = Job() if job is None else job
        self._check_facts(job)
        before = _marks(unit)
        result = self._result(unit, job)
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

    def _result(self, unit: Program | ProgramPair, job: Job) -> Any:
        if self._own_run is not None and self not in job.running:
            job.running.append(self)  # its super().run() comes back here, and goes on below
            try:
                return self._own_run(unit, job)
            finally:
                job.running.pop()
        return self.rewrite_pair(unit, job) if isinstance(unit, ProgramPair) else self._of_program(unit, job)

    def _of_program(self, program: Program, job: Job) -> Any:
        if type(self).rewrite_pair is Pass.rewrite_pair:
            return self.rewrite(program, job)
        result = self.rewrite_pair(ProgramPair(program, Program(f"{program.name}_startup")), job)
        if isinstance(result, ProgramPair) and any(b.oplist for b in result.startup.blocks):
            raise TranspileError(f"pass {self!r} writes a startup program too; give it a ProgramPair(main, startup)")
        return result.main if isinstance(result, ProgramPair) else result

    def _check_facts(self, job: Job) -> None:
        if ONE_DEVICE in self.ensures and ONE_DEVICE not in job.facts:
            by = job.ended.get(ONE_DEVICE, "an earlier pass")
            raise TranspileError(
                f"pass {self!r} ensures programs that are {ONE_DEVICE}, which step {by!r} ended: its programs are for ranks, and no pass "
                "makes them for one device again; leave ONE_DEVICE out of `ensures`"
            )
        missing = [fact for fact in self.requires if fact not in job.facts]
        if not missing:
            return
        step = next((job.ended[fact] for fact in missing if job.ended.get(fact)), "")
        instead = f"put it before step {step!r}: .before({step!r}, {self!r})" if step else "a pass that ensures it must come before"
        raise TranspileError(f"pass {self!r} requires programs that are {' and '.join(missing)}; {instead}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed_fields(self))})"


def changed_fields(one: Pass) -> list[Field]:
    """The options that differ from their defaults."""

    def default(f: Field) -> Any:
        return f.default if f.default_factory is MISSING else f.default_factory()

    return [f for f in fields(one) if f.repr and getattr(one, f.name) != default(f)]


def pass_name(of: type[Pass]) -> str:
    """The name of a class of passes in texts: `JoinAttention` is `join_attention`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", of.__name__).lower()


def named(of: type[P]) -> type[P]:
    """Class decorator that lets texts name a class of passes. A TypeError for wrong options lists its options.

    >>> PASSES["fold_constants"].__name__
    'FoldConstants'
    """
    name = pass_name(of)
    other = PASSES.setdefault(name, of)
    if (other.__module__, other.__qualname__) != (of.__module__, of.__qualname__):
        raise TypeError(f"{of.__module__}.{of.__qualname__}: texts call {other.__module__}.{other.__qualname__} {name!r} already")
    of.__init__ = explains_arguments(of.__init__)  # type: ignore[method-assign]
    return of


def run_passes(
    passes: Iterable[tuple[str, Pass]], pair: ProgramPair, job: Job, after: Callable[[str, Pass, ProgramPair, ProgramPair], None]
) -> ProgramPair:
    """Run passes in order; `after(step, pass, before, result)` is called after each. Raises TranspileError as `Pass.run` does."""
    for job.step, one in passes:
        result = one.run(pair, job)
        after(job.step, one, pair, result)
        pair = result
    return pair


def _programs(unit: Program | ProgramPair) -> tuple[Program, ...]:
    return (unit.main, unit.startup) if isinstance(unit, ProgramPair) else (unit,)


def _marks(unit: Program | ProgramPair) -> list[list[Any]]:
    """The parts of the given programs that a pass must not change, as lists; lists of the same immutable objects compare fast."""
    return [made for p in _programs(unit) for b in p.blocks for made in (list(b.oplist), list(b.descs.values()))]
