"""What a running operator may know besides its inputs: the run count, its rank, its communicator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..comm.base import Communicator, Ranks


class RunContext:
    """One rank's context. The executor sets `step` before each run."""

    __slots__ = ("rank", "world_size", "comm", "groups", "step")

    def __init__(self, rank: int = 0, world_size: int = 1, comm: Communicator | None = None, groups: Mapping[str, Ranks] | None = None):
        self.rank = rank
        self.world_size = world_size
        self.comm: Any = comm
        self.groups = dict(groups or {})
        self.step = 0

    def group(self, name: str) -> Ranks:
        """The ranks of the group that this rank belongs to, in order."""
        return self.groups[name]
