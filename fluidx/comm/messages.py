"""Collectives of messages between two ranks, for worlds whose ranks share no memory.

A library's own collectives, such as MPI's, have no deadline, do not say who is missing and add in an order of their own. Here every member
tells every other one what it brings, which shows who is there and whether they agree. What is large is reduced by slices: one member
gathers what all have of a slice, adds in rank order, as threads do, and hands the sum out.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from .base import CommError, Ranks
from .locks import Pace
from .slots import BLOCK, Slot, reduce_into

_SMALL = 4 * 1024  # elements up to which everyone is sent everything: one trade instead of two
_HEAD = 512  # bytes of a text that says what comes
_HEADS, _DATA = 0, 1  # tags of messages from peer to peer; groups have higher ones
_NOTHING = np.empty(0, np.uint8)

Posted = list[tuple[int, Any]]  # messages on their way: the other rank, and what the world knows them by


class MessageWorld(Protocol):
    """What sends the messages. Those between two ranks that have one tag arrive in order."""

    world_size: int
    tags: int  # the highest
    paces: list[Pace]

    def send(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Begin to send a contiguous array, which stays as it is until that has happened. Nothing is sent of an empty one."""

    def post(self, data: np.ndarray, to: int, tag: int) -> Posted:
        """Begin to send an array, a small one for good: it may change at once."""

    def receive(self, place: np.ndarray, source: int, tag: int) -> Posted: ...

    def finish(self, posted: Posted, what: str) -> None:
        """Wait until all that has happened. Raises CommTimeout, which names the other ranks, or CommAborted."""

    def check(self) -> None: ...

    def abort(self, reason: BaseException) -> None: ...


class MessageCommunicator:
    """One rank's communicator in a world of messages; implements comm.base.Communicator.

    Groups need no making: members know each other by rank, and a group's messages have tags of their own.
    """

    asynchronous = False
    calls: Any = None

    def __init__(self, world: MessageWorld, rank: int):
        self.world, self.rank, self.world_size = world, rank, world.world_size
        self._scratch: np.ndarray = np.empty(0)

    def abort(self, reason: BaseException) -> None:
        self.world.abort(reason)

    def reach(self, beside: bool, at: int) -> None:
        self.world.paces[self.rank].reach(beside, at)

    def follow(self, beside: bool, at: int) -> None:
        self.world.paces[self.rank].follow(beside, at)

    # -- collectives --------------------------------------------------------------------------------------------------------

    def init_group(self, ranks: Ranks) -> None:
        self._meet(ranks, Slot("nccl_init"))

    def barrier(self, ranks: Ranks) -> None:
        self._meet(ranks, Slot("barrier"))

    def all_gather(self, x: np.ndarray, parts: Sequence[np.ndarray], ranks: Ranks) -> None:
        self._meet(ranks, Slot("all_gather", x, gives=[x] * len(ranks), takes=parts))

    def all_to_all(self, sends: Sequence[np.ndarray], recvs: Sequence[np.ndarray], ranks: Ranks) -> None:
        self._meet(ranks, Slot("all_to_all", sends, gives=sends, takes=recvs))

    def reduce_scatter(self, parts: Sequence[np.ndarray], out: np.ndarray, op: str, ranks: Ranks) -> None:
        slot = Slot("reduce_scatter", parts, out, op, gives=parts, takes=[out] * len(ranks))
        terms = _beside(parts[ranks.index(self.rank)], ranks.index(self.rank), len(ranks))
        self._meet(ranks, slot, parts, terms)
        reduce_into(terms, [out], op, self._block)

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str, ranks: Ranks) -> None:
        self._reduce(ranks, Slot("all_reduce", x, out, op))

    def reduce(self, x: np.ndarray, out: np.ndarray, op: str, root: int, ranks: Ranks) -> None:
        self._reduce(ranks, Slot("reduce", x, out, op, root))

    def _reduce(self, ranks: Ranks, slot: Slot) -> None:
        n, mine = len(ranks), ranks.index(self.rank)
        readers = [k for k in range(n) if slot.root in (-1, k)]
        x, out = _flat(slot.x), _flat(slot.out)
        whole = x.size <= _SMALL
        cuts = _cuts(x.size, n) if not whole else [slice(0, x.size if k in readers else 0) for k in range(n)]
        terms = _beside(x[cuts[mine]], mine, n)
        self._meet(ranks, slot, [x[cut] for cut in cuts], terms)
        total = np.empty_like(terms[mine])
        reduce_into(terms, [total], slot.op, self._block)
        if not whole:
            reads = mine in readers
            self._trade(ranks, slot, [total if k in readers else _NOTHING for k in range(n)], [out[c] if reads else _NOTHING for c in cuts])
        elif mine in readers:
            out[...] = total
        if mine in readers:
            _put(slot.out, out)

    def broadcast(self, x: np.ndarray, out: np.ndarray, root: int, ranks: Ranks) -> None:
        """The root sends everyone a slice, which they send each other."""
        slot, n, mine = Slot("broadcast", x, out, root=root), len(ranks), ranks.index(self.rank)
        source, place = _flat(x), _flat(out)
        whole = source.size <= _SMALL
        cuts = [slice(0, source.size)] * n if whole else _cuts(source.size, n - 1)
        if not whole:
            cuts.insert(root, slice(0, 0))  # it has everything
        if mine == root:
            self._meet(ranks, slot, [source[cut] for cut in cuts], [_NOTHING] * n)
            place[...] = source
        else:
            part = place[cuts[mine]]
            self._meet(ranks, slot, [_NOTHING] * n, [part if k == root else _NOTHING for k in range(n)])
            if not whole:
                self._trade(ranks, slot, [part if k != root else _NOTHING for k in range(n)], [place[cut] for cut in cuts])
        _put(out, place)

    def _block(self, dtype: np.dtype) -> np.ndarray:
        if self._scratch.dtype != dtype or not self._scratch.size:
            self._scratch = np.empty(BLOCK, dtype)
        return self._scratch

    # -- a group's messages -------------------------------------------------------------------------------------------------

    def _meet(self, ranks: Ranks, slot: Slot, gives: Sequence[np.ndarray] = (), takes: Sequence[np.ndarray] = ()) -> None:
        """Come together, see that all bring what fits, and trade: what the slot has a part of for each, unless something is given."""
        gives, takes = gives or slot.gives or (), takes or slot.takes or ()
        world, tag = self.world, self._tag(ranks)
        world.check()
        mine = ranks.index(self.rank)
        self._check_parts(slot, len(ranks))
        told: Posted = []
        heads, coming = {}, list[tuple[int, Any]]()
        for k, r in enumerate(ranks):
            if k != mine:
                heads[k] = np.zeros(_HEAD, np.uint8)
                coming += world.receive(heads[k], r, tag)
                told += world.send(_head(slot.call, "" if slot.gives is None else _type(slot.gives[k]), str(slot)), r, tag)
        on_the_way = self._begin(ranks, gives, takes)
        world.finish(coming, str(slot))
        for k, r in enumerate(ranks):
            if k != mine:
                self._check_head(slot, k, r, *_told(heads[k]))
            elif slot.gives is not None and _type(slot.gives[k]) != _type(slot.takes[k]):
                self._misfit(slot, k, r, _type(slot.gives[k]))
        world.finish(told, str(slot))
        self._end(on_the_way, slot)

    def _trade(self, ranks: Ranks, slot: Slot, gives: Sequence[np.ndarray], takes: Sequence[np.ndarray]) -> None:
        """Give every member an array and take one from each."""
        self._end(self._begin(ranks, gives, takes), slot)

    def _begin(
        self, ranks: Ranks, gives: Sequence[np.ndarray], takes: Sequence[np.ndarray]
    ) -> tuple[Posted, list[tuple[np.ndarray, np.ndarray]]]:
        tag, posted, copies = self._tag(ranks) + 1, list[tuple[int, Any]](), []
        for r, place in zip(ranks, takes):
            if r != self.rank:
                got = _plain(place)
                posted += self.world.receive(got, r, tag)
                copies.append((place, got))
        for r, x, place in zip(ranks, gives, takes):
            if r != self.rank:
                posted += self.world.send(np.ascontiguousarray(x), r, tag)
            elif x.size and place.size:
                copies.append((place, x))
        return posted, copies

    def _end(self, begun: tuple[Posted, list[tuple[np.ndarray, np.ndarray]]], slot: Slot) -> None:
        posted, copies = begun
        self.world.finish(posted, str(slot))
        for place, got in copies:
            _put(place, got)

    def _tag(self, ranks: Ranks) -> int:
        """Of what a group's members tell each other; one higher is that of what they give. Groups that fall on the same get along: what
        two ranks send each other is in the order of their calls."""
        return 2 + 2 * (zlib.crc32(repr(ranks).encode()) % (self.world.tags // 2 - 2))

    def _check_parts(self, slot: Slot, n: int) -> None:
        if slot.gives is not None and not len(slot.gives) == len(slot.takes) == n:
            given, taken = len(slot.gives), len(slot.takes)
            self._refuse(f"rank {self.rank} brings {given} parts to {slot.what} and takes {taken}, among {n} ranks", self.rank)

    def _check_head(self, slot: Slot, k: int, rank: int, call: str, given: str, shown: str) -> None:
        if call != _told(_head(slot.call))[0]:
            self._refuse(f"rank {self.rank} is in {slot}, rank {rank} in {shown}", rank)
        if slot.takes is not None and given != _type(slot.takes[k]):
            self._misfit(slot, k, rank, given)

    def _misfit(self, slot: Slot, k: int, rank: int, given: str) -> NoReturn:
        self._refuse(f"rank {self.rank} expects {_type(slot.takes[k])} from rank {rank} in {slot.what}, which gives {given}", rank)

    def _refuse(self, why: str, rank: int) -> NoReturn:
        error = CommError(f"ranks disagree: {why}", rank=rank)
        self.abort(error)
        raise error

    # -- point to point -------------------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        world = self.world
        world.check()
        coming, leaving = [], []
        for out, peer in recvs:
            head, got = np.zeros(_HEAD, np.uint8), _plain(out)
            coming.append((out, peer, head, world.receive(head, peer, _HEADS), got, world.receive(got, peer, _DATA)))
        for x, peer in sends:
            world.post(_head(_type(x)), peer, _HEADS)
            leaving.append((peer, world.post(np.ascontiguousarray(x), peer, _DATA)))
        for out, peer, head, told, got, posted in coming:
            world.finish(told, f"recv from rank {peer}")
            if (sent := _told(head)[0]) != _type(out):
                self._refuse(f"rank {self.rank} expects {_type(out)} from rank {peer}, which sent {sent}", peer)
            world.finish(posted, f"recv from rank {peer}")
            _put(out, got)
        for peer, posted in leaving:
            world.finish(posted, f"send to rank {peer}")


def _head(*texts: str) -> np.ndarray:
    """Texts as a message, of which the last ones are cut where it would be too long."""
    return np.frombuffer("\0".join(texts).encode()[:_HEAD], np.uint8)


def _told(head: np.ndarray) -> list[str]:
    """The texts of a message, and empty ones behind them."""
    return (head.tobytes().decode(errors="replace").split("\0") + ["", ""])[:3]


def _type(a: np.ndarray) -> str:
    return f"{a.dtype}{list(a.shape)}"


def _cuts(size: int, n: int) -> list[slice]:
    return [slice(size * k // n, size * (k + 1) // n) for k in range(n)]


def _beside(own: np.ndarray, mine: int, n: int) -> list[np.ndarray]:
    """Places for what the others have of what I have."""
    return [own if k == mine else np.empty(own.shape, own.dtype) for k in range(n)]


def _flat(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).reshape(-1)


def _plain(place: np.ndarray) -> np.ndarray:
    """The place itself, if it is in one piece, or another one for a while."""
    return place if place.flags.c_contiguous else np.empty(place.shape, place.dtype)


def _put(place: np.ndarray, got: np.ndarray) -> None:
    """Copy what is not there already."""
    there = place.flags.c_contiguous and got.flags.c_contiguous and place.ctypes.data == got.ctypes.data
    if not there and got is not place:
        np.copyto(place, got.reshape(place.shape))
