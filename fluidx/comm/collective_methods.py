"""CollectiveMethods: the collectives of a communicator, each as one call of `_collective` with a Contribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import Ranks
from .contribution import BLOCK, Contribution


class CollectiveMethods(ABC):
    """The methods of comm.base.Communicator that threads, processes and messages share. `world.paces` counts the progress of threads."""

    asynchronous = False
    calls: Any = None

    def __init__(self, world: Any, rank: int):
        self.world, self.rank, self.world_size = world, rank, world.world_size
        self._scratch: np.ndarray | None = None

    @abstractmethod
    def _collective(self, ranks: Ranks, slot: Contribution) -> Any:
        """Carry out a collective call with this rank's contribution."""

    def ring(self, number: int) -> Any:
        return self

    def abort(self, reason: BaseException) -> None:
        self.world.abort(reason)

    def reach(self, beside: bool, at: int) -> Any:
        self.world.paces[self.rank].reach(beside, at)

    def follow(self, beside: bool, at: int) -> Any:
        self.world.paces[self.rank].follow(beside, at)

    def init_group(self, ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("nccl_init"))

    def barrier(self, ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("barrier"))

    def broadcast(self, x: np.ndarray, out: np.ndarray, root: int, ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("broadcast", x, out, root=root))

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str, ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("all_reduce", x, out, op))

    def reduce(self, x: np.ndarray, out: np.ndarray, op: str, root: int, ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("reduce", x, out, op, root))

    def all_gather(self, x: np.ndarray, parts: Sequence[np.ndarray], ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("all_gather", x, gives=[x] * len(ranks), takes=parts))

    def reduce_scatter(self, parts: Sequence[np.ndarray], out: np.ndarray, op: str, ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("reduce_scatter", parts, out, op, gives=parts, takes=[out] * len(ranks)))

    def all_to_all(self, sends: Sequence[np.ndarray], recvs: Sequence[np.ndarray], ranks: Ranks) -> Any:
        return self._collective(ranks, Contribution("all_to_all", sends, gives=sends, takes=recvs))

    def scatter(self, parts: Sequence[np.ndarray], out: np.ndarray, root: int, ranks: Ranks) -> Any:
        gives = parts if ranks[root] == self.rank else _for(ranks, out)
        return self._collective(ranks, Contribution("scatter", gives, root=root, gives=gives, takes=_for(ranks, out, root)))

    def gather(self, x: np.ndarray, parts: Sequence[np.ndarray], root: int, ranks: Ranks) -> Any:
        takes = parts if ranks[root] == self.rank else _for(ranks, x)
        return self._collective(ranks, Contribution("gather", x, root=root, gives=_for(ranks, x, root), takes=takes))

    def _block(self, dtype: np.dtype) -> np.ndarray:
        """Scratch of BLOCK elements for reductions."""
        if self._scratch is None or self._scratch.dtype != dtype:
            self._scratch = np.empty(BLOCK, dtype)
        return self._scratch


def _for(ranks: Ranks, a: np.ndarray, root: int = -1) -> list[np.ndarray]:
    """An array for each rank of a group: `a` for the root, an array without elements for every other one."""
    nothing = a.reshape(-1)[:0]
    return [a if k == root else nothing for k in range(len(ranks))]
