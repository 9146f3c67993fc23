"""CallList: the calls that one thread makes in a run, in order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from ...ir.operator import Operator
from ...ops import kernels
from ..error_text import explain
from ..progress import Progress
from . import observers

Call = Callable[[], Any]

# instead of a step's number: a call that waits for the other thread or stream; a call that signals the progress of this one
WAITS, NOTES = -1, -2


class CallList:
    """The calls of one thread. `steps` are operators with their calls (without arguments). `numbers` has for each the number of its plan
    step, or WAITS or NOTES. A run makes fewer calls: neighbouring C kernels are joined to one call. Its first operator stands for all of
    them in an error.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Operator, Call]] = []
        self.numbers: list[int] = []
        self.block: Call | None = None  # all steps as one call into C, if that is possible
        self._calls: list[Call] = []
        self._ops: list[Operator] = []
        self._lengths: list[int] = []  # the number of steps in each call
        self._rest: Iterator[Call] = iter(())
        self._progress: Progress | None = None
        self._text_ids: Sequence[int] = ()  # for each call, the text in the progress record

    def add(self, op: Operator, call: Call, number: int) -> None:
        self.steps.append((op, call))
        self.numbers.append(number)

    def drop(self) -> None:
        """Remove the step that was added last."""
        self.steps.pop()
        self.numbers.pop()

    def groups(self) -> list[list[tuple[Operator, Call, int]]]:
        """The steps with their numbers; neighbouring C kernels are in one group, and so are neighbouring steps that are none."""
        steps = [(op, call, number) for (op, call), number in zip(self.steps, self.numbers, strict=True)]
        return [[*some] for _, some in groupby(steps, key=lambda step: isinstance(step[1], kernels.NativeStep))]

    def with_calls(self, calls: Sequence[Call]) -> CallList:
        """The same steps with other calls in place of the joined ones."""
        found = CallList()
        found.steps, found.numbers, found._ops, found._lengths, found._calls = self.steps, self.numbers, self._ops, self._lengths, [*calls]
        return found

    def join(self) -> None:
        """Join neighbouring C kernels to one call."""
        for group in self.groups():
            native = isinstance(group[0][1], kernels.NativeStep)
            ops, calls, _ = zip(*group, strict=True)
            self._calls += [kernels.joined(calls)] if native else calls
            self._ops += ops[:1] if native else ops
            self._lengths += [len(ops)] if native else [1] * len(ops)
            self.block = self._calls[0] if native and len(self.steps) == len(ops) else None

    def record_progress(self, progress: Progress) -> None:
        """Have runs write a progress record, for calls of one operator. Calls of several C kernels are not recorded."""
        self._progress = progress
        self._text_ids = [progress.text_id(op) if n == 1 else 0 for op, n in zip(self._ops, self._lengths, strict=True)]

    def run(self) -> None:
        self._rest = rest = iter(self._calls)
        try:
            with np.errstate(all="ignore"):  # overflow and 0/0 give values; FLUIDX_CHECK_NAN finds their source
                if self._progress is None:
                    for call in rest:
                        call()
                else:
                    self._progress.run_calls(rest, self._text_ids)
        except Exception as e:
            explain(self._failed(e), e)

    def run_watched(self, after: observers.After, first: int, finish: Call | None) -> None:
        """`run` with separate steps. After step i has ended (`finish` waits for it), `after(first + i, op, start, stop)` is called."""
        joined = self._calls, self._ops, self._text_ids
        clock = observers.clock
        for _, step in self.steps:
            if isinstance(step, kernels.NativeStep):
                step.ready()

        def watched(i: int, op: Operator, call: Call) -> None:
            start = clock()
            call()
            if finish is not None:
                finish()
            after(i, op, start, clock())

        self._calls = [
            call if number == NOTES else partial(watched, first + i, op, call)
            for i, ((op, call), number) in enumerate(zip(self.steps, self.numbers, strict=True))
        ]
        self._ops = [op for op, _ in self.steps]
        self._text_ids = [] if self._progress is None else [self._progress.text_id(op) for op in self._ops]
        try:
            self.run()
        finally:
            self._calls, self._ops, self._text_ids = joined

    def explained(self, error: Exception) -> Exception:
        """The error of the block as a run would raise it, with the operator."""
        try:
            explain(self._failed(error), error)
        except Exception as told:
            return told

    def running(self) -> Operator | None:
        """The current operator of the latest run; None before the first one."""
        at = len(self._calls) - operator.length_hint(self._rest) - 1
        return self._ops[at] if 0 <= at < len(self._ops) else None

    def _failed(self, error: Exception) -> Operator | None:
        """The operator that failed; in a call of several C kernels, the one whose kernel failed."""
        first, number = self.running(), getattr(error, "call", None)
        if number is None:
            return first
        at = next((k for k, (op, _) in enumerate(self.steps) if op is first), len(self.steps))
        for op, step in self.steps[at:]:
            if not isinstance(step, kernels.NativeStep):  # a step with copies by NumPy is not part of a joined call
                break
            number -= len(step.calls)
            if number < 0:
                return op
        return first
