"""Where a rank is in its program, written down where others can read it when the rank is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..ir.operator import Operator
from ..native.shared import SharedWorld

_TEXT, _STEP = 0, 1


class Progress:
    """What a rank that is a process leaves behind: the operator that it is at, as `show` words it, and the number of the run."""

    def __init__(self, world: SharedWorld, rank: int, show: Callable[[Operator], str]):
        self._world, self._show = world, show
        self._cells = world.trail(rank)

    def begin(self, step: int) -> None:
        """A run begins."""
        self._cells[_STEP] = step

    def text_id(self, op: Operator) -> int:
        """What stands for an operator."""
        return self._world.at(self._show(op))

    def run_calls(self, calls: Iterable[Callable[[], Any]], text_id: Sequence[int]) -> None:
        """Make the calls, each behind what stands for its operator, or behind 0."""
        cells = self._cells
        for call, text in zip(calls, text_id, strict=True):
            cells[_TEXT] = text
            call()
        cells[_TEXT] = 0
