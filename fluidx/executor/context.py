"""What a running operator may know besides its inputs: the run count, its rank, its communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..comm.base import Communicator, Ranks
from ..ir.time_axes import seats


class RunContext:
    """One rank's context. The executor sets `step`, the run count, before each run.

    Random numbers are drawn by `key`: the run count outside of loops, and a number of its own in each round of a loop. It lies in `cell`,
    an array of one uint64, where C kernels read it.
    """

    __slots__ = ("rank", "world_size", "comm", "groups", "turns", "cell", "_step", "stashes")

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        comm: Communicator | None = None,
        groups: Mapping[str, Ranks] | None = None,
        turns: Mapping[str, int] | None = None,
    ):
        self.rank = rank
        self.world_size = world_size
        self.comm: Any = comm
        self.groups = dict(groups or {})
        self.turns = seats(turns or {})
        self.cell = np.zeros(1, np.uint64)
        self._step = 0
        self.stashes: dict[str, Any] = {}  # what the run keeps of rounds of loops, by name: several plans may write and read it

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = self.key = step & 0xFFFFFFFFFFFFFFFF

    @property
    def key(self) -> int:
        return int(self.cell[0])

    @key.setter
    def key(self, key: int) -> None:
        self.cell[0] = key

    def group(self, name: str) -> Ranks:
        """The ranks of the group that this rank belongs to, in order."""
        return self.groups[name]

    def seat(self, group: str) -> tuple[int, int]:
        """(this rank's index in a group or turn, its size). A rank alone is all of any group."""
        if group in self.turns:
            return self.turns[group]
        if self.world_size == 1:
            return 0, 1
        ranks = self.groups[group]
        return ranks.index(self.rank), len(ranks)

    def coords(self) -> dict[str, tuple[int, int]]:
        """Where this rank stands in every group that it is in, and in every turn."""
        return self.turns | {g: (ranks.index(self.rank), len(ranks)) for g, ranks in self.groups.items() if self.rank in ranks}
