"""RunContext: the run count, rank, groups and communicator, which kernels read besides their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..comm.base import Communicator, Ranks
from ..ir.time_axes import seats


class RunContext:
    """One rank's context. The executor sets `step`, the run count, before each run.

    Random numbers depend on `key`. Outside of loops it is the run count; each iteration of a loop has its own key. It is stored in `cell`,
    an array of one uint64, because C kernels read it there.
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
        self.stashes: dict[str, Any] = {}  # values saved by loop iterations, by name; several plans may write and read them

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
        """(this rank's index, the size) of a group or a time axis. A single rank has index 0 of 1 in every group."""
        if group in self.turns:
            return self.turns[group]
        if self.world_size == 1:
            return 0, 1
        ranks = self.groups[group]
        return ranks.index(self.rank), len(ranks)

    def coords(self) -> dict[str, tuple[int, int]]:
        """(index, size) for every group of this rank, and for every time axis."""
        return self.turns | {g: (ranks.index(self.rank), len(ranks)) for g, ranks in self.groups.items() if self.rank in ranks}
