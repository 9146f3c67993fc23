"""The progress record of a rank: its current operator, in shared memory, so that others can read it after the rank has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..ir.operator import Operator
from ..native.world import NativeWorld

_TEXT, _STEP = 0, 1


class Progress:
    """The progress record of a rank that is a process: the current operator, as text by `show`, and the number of the run."""

    def __init__(self, world: NativeWorld, rank: int, show: Callable[[Operator], str]):
        self._world, self._show = world, show
        self._cells = world.trail(rank)

    def begin(self, step: int) -> None:
        """Record that run number `step` begins."""
        self._cells[_STEP] = step

    def text_id(self, op: Operator) -> int:
        """The address of an operator's text in shared memory."""
        return self._world.at(self._show(op))

    def run_calls(self, calls: Iterable[Callable[[], Any]], text_id: Sequence[int]) -> None:
        """Make the calls. Before each, its operator's text (or 0) is recorded."""
        cells = self._cells
        for call, text in zip(calls, text_id, strict=True):
            cells[_TEXT] = text
            call()
        cells[_TEXT] = 0
