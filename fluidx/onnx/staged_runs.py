"""Runs of an imported program in stages. The host computes between the stages, and feeds its results to the next one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ..executor import Executor
from ..executor.scope import Scope
from ..ir import Program, Variable, flow
from ..rewrite.live import live_ops
from .value_reader import Check, HostCall
from .values import ABSENT, RuntimeValue, leaves, map_leaves

HostSteps = Sequence[Check | HostCall]
Known = dict[Any, Any]  # values of a run, by name of a variable or by RuntimeValue


class _RunStage(NamedTuple):
    """One stage: run the program for `fetch`, if there is any, with `feed`; then compare the `checks` and make the `call`, for which
    `operands` finds the values, and whose `results` are names of variables with their shapes, or RuntimeValues with None."""

    feed: tuple[str, ...]
    fetch: tuple[str, ...]
    checks: Sequence[Check]
    call: HostCall | None
    operands: Sequence[Callable[[Known], Any]]
    results: Sequence[tuple[Any, tuple[int, ...] | None]]


class StagedPlan:
    """A program with its host calls, for feeds of one kind. `given` names the variables that are fed."""

    def __init__(
        self, executor: Executor, main: Program, scope: Scope, host_steps: HostSteps, outputs: Sequence[Any], given: Collection[str]
    ):
        self.main, self.scope, self.outputs = main, scope, outputs
        self._executor = executor
        self.stages = tuple(_stages(main, host_steps, outputs, given))
        self._runs = 0
        self._found = [_finder(v) for v in outputs]
        fetch = self.stages[0].fetch
        self._whole = not host_steps and list(fetch) == [v.name if isinstance(v, Variable) else None for v in outputs]

    def run(self, known: Known) -> list[Any] | None:
        """The outputs, or None if a value that the program was written for differs now."""
        if self._whole:  # one run gives all outputs
            (stage,) = self.stages
            return self._executor.run(self.main, {name: known[name] for name in stage.feed}, stage.fetch, scope=self.scope)
        step, self._runs = self._runs, self._runs + 1
        for feed, fetch, checks, call, operands, results in self.stages:
            if fetch:
                self.scope.steps[self.main] = step  # all stages draw the random numbers of one run
                found = self._executor.run(self.main, {name: known[name] for name in feed}, fetch, scope=self.scope)
                known.update(zip(fetch, found, strict=True))
            if checks and not all(_same(_finder(of)(known), expected) for of, expected in checks):
                return None
            for (name, shape), value in zip(results, call.work([find(known) for find in operands]) if call is not None else ()):
                if shape is not None and value.shape != shape:
                    return None
                known[name] = value
        return [_copied(find(known)) for find in self._found]


def _finder(value: Any) -> Callable[[Known], Any]:
    """A function that gives the value in a run: of a variable, of a RuntimeValue, or itself."""
    if isinstance(value, list):
        return lambda known: map_leaves(value, lambda v: _finder(v)(known))
    if isinstance(value, Variable):
        return itemgetter(value.name)
    return itemgetter(value) if isinstance(value, RuntimeValue) else lambda known: value


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(v) for v in value] if value and not isinstance(value[0], dict) else [*value]
    return None if value is ABSENT else np.array(value) if isinstance(value, np.ndarray) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return type(a) is type(b) and bool(a == b)


# -- stages -------------------------------------------------------------------------------------------------------------------------


def _stages(main: Program, host_steps: HostSteps, outputs: Sequence[Any], given: Collection[str]) -> Iterator[_RunStage]:
    """A value that one stage computes and a later one reads is computed once: the stage fetches it, and the later one is fed with it."""
    groups: list[tuple[list[Check], HostCall | None]] = [*_groups(host_steps), ([], None)]
    wanted = [_names([c.of for c in checks] if call is None else call.operands) for checks, call in groups[:-1]] + [_names([*outputs])]
    known = set(given)
    for k, (checks, call) in enumerate(groups):
        fetch = [n for n in wanted[k] if n not in known]
        feed: tuple[str, ...] = ()
        if fetch:
            ops = live_ops(main, known, fetch)
            after = [n for names in wanted[k + 1 :] for n in names]
            fetch += [n for n in _needed_later(main, ops, known, after) if n not in fetch]
            feed = tuple(sorted(known.intersection(n for op in ops for n in flow.reads(main, op))))
        operands, made = (call.operands, call.results) if call is not None else ([], [])
        results = [(v.name, v.shape) if isinstance(v, Variable) else (v, None) for v in made]
        yield _RunStage(feed, tuple(fetch), checks, call, [_finder(v) for v in operands], results)
        known.update(fetch, () if call is None else _names(call.results))


def read_by_host(host_steps: HostSteps, outputs: Sequence[Any]) -> set[str]:
    """Names of the variables whose values the host needs."""
    return set(_names([*outputs, *(one.of if isinstance(one, Check) else one.operands for one in host_steps)]))


def _groups(host_steps: HostSteps) -> Iterator[tuple[list[Check], HostCall | None]]:
    checks: list[Check] = []
    for one in host_steps:
        if isinstance(one, Check):
            checks.append(one)
            continue
        if checks:
            yield checks, None
        checks = []
        yield [], one
    if checks:
        yield checks, None


def _needed_later(main: Program, ops: Sequence[Any], known: Collection[str], after: Sequence[str]) -> list[str]:
    """Results of `ops` that later stages read too, to compute the names `after`. Results without inputs are cheap and are not listed."""
    made = dict.fromkeys(n for op in ops if op.input_arg_names for n in op.output_arg_names)
    ours = set(map(id, ops))
    read = {n for op in live_ops(main, known, after) if id(op) not in ours for n in flow.reads(main, op)}
    return [n for n in made if n in read or n in after]


def _names(values: Any) -> list[str]:
    return list(dict.fromkeys(v.name for v in leaves(values) if isinstance(v, Variable)))
