"""Ranks as threads that meet in C: a collective is a call in a block of calls, and whoever waits there holds no interpreter lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import native
from ..native.world import Brought, World
from .base import Ranks
from .slots import Slot, work
from .threads import ThreadCommunicator, ThreadWorld

_MOST_BLOCKS = 128
_ADDED = np.dtype(np.float32), np.dtype(np.float64)  # what C reduces


class NativeCommunicator(ThreadCommunicator):
    """One rank's communicator in a world whose ranks meet in C. `calls` has the same methods, which give C calls and do nothing.

    All ranks of a meeting do the work in C, or all do it in NumPy between two meetings: which one follows from the call and the dtype,
    and ranks that differ in those disagree.
    """

    def __init__(self, world: ThreadWorld, shared: World, rank: int):
        super().__init__(world, rank)
        self.calls = _Calls(world, shared, rank)
        self._shared = shared
        self._blocks: dict[tuple, Callable[[], None]] = {}

    def _meet(self, ranks: Ranks, slot: Slot) -> None:
        given = slot
        if slot.gives is None and not _in_one_piece(slot.x, slot.out):
            slot = Slot(slot.what, np.ascontiguousarray(slot.x), np.array(slot.out, order="C"), slot.op, slot.root)
        working = _in_c(slot)
        meet = self._block_of(ranks, slot, working)
        if not working:
            board = self.world.board(ranks)
            board[self.rank] = slot
        meet()
        if not working:
            mine = ranks.index(self.rank)
            work([board[r] for r in ranks], mine, mine + 1, self._block)
            meet()
        if slot is not given:
            np.copyto(given.out, slot.out)

    def _block_of(self, ranks: Ranks, slot: Slot, working: bool) -> Callable[[], None]:
        """The meeting as a function. Its words hold no more than the key says, so it serves for other arrays in the same places."""
        arrays = (slot.x, slot.out) if slot.gives is None else (*slot.gives, None, *slot.takes)
        key = ranks, slot.what, slot.op, slot.root, slot.dtype, *map(_layout, arrays)
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            call = self._shared.meet(ranks, self.rank, _brought(slot), working)
            block = self._blocks[key] = native.compile([call._replace(keeps=call.keeps[:2])])
        return block

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        given = recvs
        sends = [(np.ascontiguousarray(x), peer) for x, peer in sends]
        recvs = [(out if _in_one_piece(out) else np.empty(out.shape, out.dtype), peer) for out, peer in recvs]
        native.compile([self._shared.exchange(self.rank, sends, recvs)])()
        for (out, _), (made, _) in zip(given, recvs, strict=True):
            if made is not out:
                np.copyto(out, made)


class _Calls(ThreadCommunicator):
    """The methods of a communicator, giving the C calls that do what they say; None where NumPy takes part."""

    def __init__(self, world: ThreadWorld, shared: World, rank: int):
        super().__init__(world, rank)
        self._shared = shared

    def _meet(self, ranks: Ranks, slot: Slot) -> list[native.Call] | None:
        if not _in_c(slot) or slot.gives is None and not _in_one_piece(slot.x, slot.out):
            return None
        return [self._shared.meet(ranks, self.rank, _brought(slot))]

    def reach(self, beside: bool, at: int) -> list[native.Call]:
        return [self._shared.reach(self.rank, beside, at)]

    def follow(self, beside: bool, at: int) -> list[native.Call]:
        return [self._shared.follow(self.rank, beside, at)]

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> list[native.Call] | None:
        if not _in_one_piece(*(a for a, _ in (*sends, *recvs))):
            return None
        return [self._shared.exchange(self.rank, sends, recvs)]


def _in_c(slot: Slot) -> bool:
    """Is the work done in C? All ranks answer the same, or disagree about the call."""
    return not slot.op or slot.dtype in _ADDED


def _in_one_piece(*arrays: np.ndarray) -> bool:
    return all(a.flags.c_contiguous for a in arrays)


def _brought(slot: Slot) -> Brought:
    parts = slot.gives is not None
    gives, takes = (slot.gives, slot.takes) if parts else ([slot.x], [slot.out])
    return Brought(slot.what, slot.op, slot.root, str(slot), slot.call, slot.size, gives, takes, parts)


def _layout(a: np.ndarray | None) -> Any:
    return None if a is None else (a.__array_interface__["data"][0], a.dtype, a.shape, a.strides)
