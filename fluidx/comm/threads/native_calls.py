"""Collective calls in C: each is a call in a block of calls, and a rank that waits in it does not hold the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import native
from ...native.world import MeetWords, NativeWorld
from ..base import Ranks
from ..contribution import NOTHING, Contribution, work
from .communicator import ThreadCommunicator

_MOST_BLOCKS = 128
_ADDED = np.dtype(np.float32), np.dtype(np.float64)  # the dtypes of reductions in C


class NativeCommunicator(ThreadCommunicator):
    """One rank's communicator with collective calls in C. `calls` has the same methods, which only return the C calls.

    In a collective call, either all ranks do the work in C, or all do it in NumPy between two barriers. This follows from the call and the
    dtype, which must be equal on all ranks.
    """

    def __init__(self, world: Any, shared: NativeWorld, rank: int):
        super().__init__(world, rank)
        self.calls = Calls(world, shared, rank)
        self._shared = shared
        self._blocks: dict[tuple, Callable[[], None]] = {}

    def _collective(self, ranks: Ranks, slot: Contribution) -> None:
        given, slot = slot, self._reachable(slot)
        working = _in_c(slot)
        meet = self._block_of(ranks, slot, working)
        if not working:
            self._show(ranks, slot)
        meet()
        if not working:
            mine = ranks.index(self.rank)
            work(self._shown(ranks, slot), mine, mine + 1, self._block)
            meet()
        self._give_back(given, slot)

    def _give_back(self, given: Contribution, slot: Contribution) -> None:
        """Copy results into the given arrays, if they were computed in copies."""
        if slot is not given:
            for place, made in zip(_results(given), _results(slot), strict=True):
                if place is not made:
                    np.copyto(place, made)

    def _reachable(self, slot: Contribution) -> Contribution:
        """The contribution with arrays that C kernels and all ranks can access: itself, or one with copies."""
        if slot.gives is not None or in_one_piece(slot.x, slot.out):
            return slot
        return Contribution(slot.what, np.ascontiguousarray(slot.x), np.array(slot.out, order="C"), slot.op, slot.root)

    def _show(self, ranks: Ranks, slot: Contribution) -> None:
        """Publish this rank's contribution to the members of a group."""
        self.world.board(ranks)[self.rank] = slot

    def _shown(self, ranks: Ranks, slot: Contribution) -> list[Contribution]:
        """The contributions of all members to this call."""
        board = self.world.board(ranks)
        return [board[r] for r in ranks]

    def _block_of(self, ranks: Ranks, slot: Contribution, working: bool) -> Callable[[], None]:
        """The collective call as a function."""
        return self._compiled((ranks, *layouts(slot)), lambda: self._shared.meet(ranks, self.rank, _brought(slot, ranks), working))

    def _compiled(self, key: tuple, make: Callable[[], native.NativeCall]) -> Callable[[], None]:
        """The compiled call, cached. Its words depend only on the key, so it also serves other arrays at the same addresses."""
        block = self._blocks.get(key)
        if block is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            call = make()
            block = self._blocks[key] = native.compile([call._replace(keeps=call.keeps[:2])])
        return block

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        given = recvs
        sends = [(self._sent(x), peer) for x, peer in sends]
        recvs = [(out if in_one_piece(out) else np.empty(out.shape, out.dtype), peer) for out, peer in recvs]
        native.compile([self._shared.exchange(self.rank, sends, recvs)])()
        for (out, _), (made, _) in zip(given, recvs, strict=True):
            if made is not out:
                np.copyto(out, made)

    def _sent(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x)


class Calls(ThreadCommunicator):
    """The methods of a communicator; they return the C calls, or None if the work needs NumPy."""

    def __init__(self, world: Any, shared: NativeWorld, rank: int):
        super().__init__(world, rank)
        self._shared = shared

    def _collective(self, ranks: Ranks, slot: Contribution) -> list[native.NativeCall] | None:
        if not _in_c(slot) or not self._can_reach(slot):
            return None
        return [self._shared.meet(ranks, self.rank, _brought(slot, ranks))]

    def _can_reach(self, slot: Contribution) -> bool:
        """Can C access the arrays without copies?"""
        return slot.gives is not None or in_one_piece(slot.x, slot.out)

    def reach(self, beside: bool, at: int) -> list[native.NativeCall]:
        return [self._shared.reach(self.rank, beside, at)]

    def follow(self, beside: bool, at: int) -> list[native.NativeCall]:
        return [self._shared.follow(self.rank, beside, at)]

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> list[native.NativeCall] | None:
        if not in_one_piece(*(a for a, _ in (*sends, *recvs))):
            return None
        return [self._shared.exchange(self.rank, sends, recvs)]


def _in_c(slot: Contribution) -> bool:
    """Is the work done in C? The answer is equal on all ranks of a valid call."""
    return not slot.op or slot.dtype in _ADDED


def in_one_piece(*arrays: np.ndarray) -> bool:
    return all(a.flags.c_contiguous for a in arrays)


def _results(slot: Contribution) -> Sequence[np.ndarray]:
    """The arrays that a call writes."""
    return [slot.out] if slot.out is not NOTHING or slot.takes is None else slot.takes


def among(what: Contribution | str, ranks: Ranks) -> str:
    """A text for a collective call of a group."""
    return f"{what} among ranks {', '.join(map(str, ranks))}"


def _brought(slot: Contribution, ranks: Ranks) -> MeetWords:
    parts = slot.gives is not None
    gives, takes = (slot.gives, slot.takes) if parts else ([slot.x], [slot.out])
    told = among(slot, ranks)
    return MeetWords(slot.what, slot.op, slot.root, str(slot), slot.call, told, slot.kept, slot.size, gives, takes, parts)


def layouts(slot: Contribution) -> tuple:
    """A key of a call: its name, options, and the addresses and layouts of its arrays."""
    arrays = (slot.x, slot.out) if slot.gives is None else (*slot.gives, None, *slot.takes)
    return slot.what, slot.op, slot.root, slot.dtype, *map(_layout, arrays)


def _layout(a: np.ndarray | None) -> Any:
    return None if a is None else (a.__array_interface__["data"][0], a.dtype, a.shape, a.strides)
