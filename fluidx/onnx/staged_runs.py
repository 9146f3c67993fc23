"""A model's program for feeds of one kind, run in stages: what the host computes in between is fed to the next one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..executor import Executor
from ..executor.scope import Scope
from ..ir import Program, Variable, flow
from ..rewrite.live import live_ops
from .importer import Check, HostCall
from .values import ABSENT, Later, each, leaves

Known = dict[Any, Any]  # values of a run, by the name of a variable or by a Later


class _RunStage(NamedTuple):
    """A run of the program for `fetch`, if that is anything, of `feed`. Then `checks` have to recur, and `call` is made."""

    feed: tuple[str, ...]
    fetch: tuple[str, ...]
    checks: Sequence[Check]
    call: HostCall | None


class StagedPlan:
    """A program, and what the host does in a run of it. `given` are the names of variables that are fed."""

    def __init__(
        self, executor: Executor, main: Program, scope: Scope, trail: Sequence[Check | HostCall], outputs: list[Any], given: Collection[str]
    ):
        self.main, self.scope, self.outputs = main, scope, outputs
        self._executor = executor
        self.stages = tuple(_stages(main, trail, outputs, given))
        self._runs = 0
        fetch = self.stages[0].fetch
        self._whole = not trail and list(fetch) == [v.name if isinstance(v, Variable) else None for v in outputs]

    def run(self, known: Known) -> list[Any] | None:
        """The outputs; None where a value that the program was written for is another one now."""
        if self._whole:  # one run gives the outputs as they are
            (stage,) = self.stages
            return self._executor.run(self.main, {name: known[name] for name in stage.feed}, stage.fetch, scope=self.scope)
        step, self._runs = self._runs, self._runs + 1
        for feed, fetch, checks, call in self.stages:
            if fetch:
                self.scope.steps[self.main] = step  # what is drawn at random is that of one run in all stages
                found = self._executor.run(self.main, {name: known[name] for name in feed}, fetch, scope=self.scope)
                known.update(zip(fetch, found, strict=True))
            if not all(_same(_now(of, known), was) for of, was in checks):
                return None
            if call is not None and not _entered(call, known):
                return None
        return [each(_now(v, known), _handed_out) for v in self.outputs]


def _entered(call: HostCall, known: Known) -> bool:
    """Make a call, and enter its results among what is known; False where one has another shape than the program was written for."""
    for result, value in zip(call.results, call.work([_now(v, known) for v in call.operands])):
        if not isinstance(result, Variable):
            known[result] = value
        elif value.shape == result.shape:
            known[result.name] = value
        else:
            return False
    return True


def _now(value: Any, known: Known) -> Any:
    return each(value, lambda v: known[v.name] if isinstance(v, Variable) else known[v] if isinstance(v, Later) else v)


def _handed_out(value: Any) -> Any:
    return None if value is ABSENT else np.array(value) if isinstance(value, np.ndarray) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return type(a) is type(b) and bool(a == b)


# -- stages -------------------------------------------------------------------------------------------------------------------------


def _stages(main: Program, trail: Sequence[Check | HostCall], outputs: list[Any], given: Collection[str]) -> Iterator[_RunStage]:
    """What a stage computes, and a later one reads, is computed once: it is fetched, and fed there."""
    groups: list[tuple[list[Check], HostCall | None]] = [*_groups(trail), ([], None)]
    wanted = [_names([c.of for c in checks] if call is None else call.operands) for checks, call in groups[:-1]] + [_names(outputs)]
    known = set(given)
    for k, (checks, call) in enumerate(groups):
        fetch = [n for n in wanted[k] if n not in known]
        feed: tuple[str, ...] = ()
        if fetch:
            ops = live_ops(main, known, fetch)
            after = [n for names in wanted[k + 1 :] for n in names]
            fetch += [n for n in _handed_on(main, ops, known, after) if n not in fetch]
            feed = tuple(sorted(known.intersection(n for op in ops for n in flow.reads(main, op))))
        yield _RunStage(feed, tuple(fetch), checks, call)
        known.update(fetch, () if call is None else _names(call.results))


def read_by_host(trail: Sequence[Check | HostCall], outputs: list[Any]) -> set[str]:
    """The names of variables of which the host has to have the values."""
    return set(_names([outputs, *(one.of if isinstance(one, Check) else one.operands for one in trail)]))


def _groups(trail: Sequence[Check | HostCall]) -> Iterator[tuple[list[Check], HostCall | None]]:
    checks: list[Check] = []
    for one in trail:
        if isinstance(one, Check):
            checks.append(one)
            continue
        if checks:
            yield checks, None
        checks = []
        yield [], one
    if checks:
        yield checks, None


def _handed_on(main: Program, ops: Sequence[Any], known: Collection[str], after: Sequence[str]) -> list[str]:
    """What `ops` make of other values that is needed for the names `after` as well."""
    made = dict.fromkeys(n for op in ops if op.input_arg_names for n in op.output_arg_names)
    ours = set(map(id, ops))
    read = {n for op in live_ops(main, known, after) if id(op) not in ours for n in flow.reads(main, op)}
    return [n for n in made if n in read or n in after]


def _names(values: Any) -> list[str]:
    return list(dict.fromkeys(v.name for v in leaves(values) if isinstance(v, Variable)))
