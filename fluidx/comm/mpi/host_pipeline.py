"""What is large on its way between hosts, where it adds up in rank order.

The members of a group are on hosts that follow one another in it. The first host adds what its ranks have and hands that to the second,
which adds what its own have, and so on: the last one has the sum, in the order of the ranks, and hands it back from host to host. Arrays
are cut into pieces, so that all hosts are at work, and each link carries every piece once each way. A value that one rank has and others
want travels in the same way: it is the sum of one term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..contribution import Contribution, add_up, settle, wide
from .handshake import MessageWorld, Posted
from .message_collectives import put

_PIECE = 512 * 1024  # bytes, added and on their way at a time: they stay in the second-level cache
_AHEAD = 2  # pieces that are received before they are wanted
_LAG = 3  # pieces that are added before the sum of one is waited for
_RING = 4  # pieces of one kind that are in use at a time


class PipelineItem(NamedTuple):
    """A sum, or one value, and who wants it. Arrays are those of this host, flat and in one piece."""

    size: int
    dtype: np.dtype
    terms: list[np.ndarray]
    counts: tuple[int, ...]  # of the terms that each host has
    places: list[np.ndarray]
    chain: list[int]  # the hosts that add, in order
    route: list[int]  # the last of them, which has the sum, and those that want it, in the order in which it comes to them


class Way(NamedTuple):
    """How pieces travel: what sends them, by which tag and the one behind it, between which ranks by host, and which host this is."""

    world: MessageWorld
    tag: int
    peers: Sequence[int]
    here: int
    what: str
    room: Callable[[int, int, np.dtype], np.ndarray]


def items_of(slot: Contribution, homes: Sequence[int], here: int, seen: Sequence[Sequence[Sequence[np.ndarray]]]) -> Iterator[PipelineItem]:
    """What a collective carries: `homes` are the hosts of the members, numbered in their order, and `seen` the arrays that those of the
    host `here` give and take."""
    own, n = [k for k, home in enumerate(homes) if home == here], homes[-1] + 1
    everyone, all_of = range(n), tuple(homes.count(h) for h in range(n))
    given, taken = ([[a.reshape(-1) for a in arrays] for arrays in side] for side in zip(*seen, strict=True))
    match slot.what:
        case "all_reduce" | "reduce":
            readers = everyone if slot.root < 0 else (homes[slot.root],)
            places = [taken[j][0] for j, k in enumerate(own) if slot.root in (-1, k)]
            yield _item([g[0] for g in given], all_of, places, readers, given[0][0])
        case "reduce_scatter":
            for k, home in enumerate(homes):
                yield _item([g[k] for g in given], all_of, [taken[own.index(k)][0]] if k in own else [], (home,), given[0][k])
        case "broadcast":
            source = [given[own.index(slot.root)][0]] if slot.root in own else []
            yield _item(source, _one(homes[slot.root], n), [t[0] for t in taken], everyone, taken[0][0])
        case "all_gather":
            for k, home in enumerate(homes):
                source = [given[own.index(k)][0]] if k in own else []
                yield _item(source, _one(home, n), [t[k] for t in taken], everyone, taken[0][k])


def carry(items: Iterable[PipelineItem], op: str, way: Way, share: int, shares: int) -> None:
    """Do one share of what is to be done."""
    pieces = [piece for k, piece in enumerate(_pieces(items, shares)) if k % shares == share]
    if not pieces:
        return
    work, n = _Work(pieces, op, way), len(pieces)
    for t in range(n + _AHEAD + _LAG):
        if t < n:
            work.expect(t)
        if 0 <= (p := t - _AHEAD) < n:
            work.add(p)
        if 0 <= (p := t - _AHEAD - _LAG) < n:
            work.pass_on(p)
    work.end()


class _Work:
    """The pieces of one share on their way through this host."""

    def __init__(self, pieces: list[tuple[PipelineItem, slice]], op: str, way: Way):
        self.pieces, self.op, self.way = pieces, op, way
        most = max((min(item.size, at.stop) - at.start) * wide(item.dtype).itemsize for item, at in pieces)
        self.rows = way.room(2 * _RING, -(-most // 64) * 64, np.dtype(np.uint8))
        self.coming, self.sums = dict[int, Posted](), dict[int, Posted]()
        self.sent: list[Posted] = [[] for _ in range(_RING)]  # from the rows, where pieces are added
        self.leaving: Posted = []

    def expect(self, p: int) -> None:
        """What the hosts before this one have added is to be received."""
        item, at = self.pieces[p]
        if self.way.here in item.chain[1:]:
            before = item.chain[item.chain.index(self.way.here) - 1]
            self.coming[p] = self.way.world.receive(self._row(p, item, at), self.way.peers[before], self.way.tag)

    def add(self, p: int) -> None:
        """Add what this host has and send it on, or the sum, if that is it; else the sum is to be received."""
        item, at = self.pieces[p]
        here, last = self.way.here, item.route[0]
        if here in item.chain:
            total = self._added(p)
            if here == last:
                total = self._settled(item, total)
                for place in item.places:
                    put(place[at], total)
            on = item.route[1:2] if here == last else [item.chain[item.chain.index(here) + 1]]
            for host in on:
                self.sent[p % _RING] += self.way.world.send(total, self.way.peers[host], self.way.tag)
        if here in item.route[1:]:
            before = item.route[item.route.index(here) - 1]
            tag = self.way.tag + (before != last)
            self.sums[p] = self.way.world.receive(item.places[0][at], self.way.peers[before], tag)

    def pass_on(self, p: int) -> None:
        """Put the sum where this host's ranks want it, and send it on."""
        if p not in self.sums:
            return
        item, at = self.pieces[p]
        self.way.world.finish(self.sums.pop(p), self.way.what)
        total = item.places[0][at]
        for place in item.places[1:]:
            put(place[at], total)
        k = item.route.index(self.way.here) + 1
        for host in item.route[k : k + 1]:
            self.leaving += self.way.world.send(total, self.way.peers[host], self.way.tag + 1)

    def end(self) -> None:
        self.way.world.finish([*self.leaving, *(one for sent in self.sent for one in sent)], self.way.what)

    def _added(self, p: int) -> np.ndarray:
        item, at = self.pieces[p]
        terms, k = [term[at] for term in item.terms], p % _RING
        if sum(item.counts) == 1:
            return terms[0]
        if p in self.coming:
            self.way.world.finish(self.coming.pop(p), self.way.what)
            terms.insert(0, self._row(p, item, at))
        self.way.world.finish(self.sent[k], self.way.what)  # the row of four pieces ago
        self.sent[k] = []
        total = self._row(p, item, at, _RING)
        add_up(terms, self.op, total)
        return total

    def _settled(self, item: PipelineItem, total: np.ndarray) -> np.ndarray:
        n = sum(item.counts)
        if n > 1:
            settle(total, self.op, n)
        return total if total.dtype == item.dtype else total.astype(item.dtype)

    def _row(self, p: int, item: PipelineItem, at: slice, first: int = 0) -> np.ndarray:
        """Room for a piece as it is added up in: one is received there, or added."""
        dtype = wide(item.dtype)
        nbytes = (min(item.size, at.stop) - at.start) * dtype.itemsize
        return self.rows[first + p % _RING, :nbytes].view(dtype)


def _pieces(items: Iterable[PipelineItem], shares: int) -> Iterator[tuple[PipelineItem, slice]]:
    for item in items:
        step = max(1, min(_PIECE // wide(item.dtype).itemsize, -(-item.size // shares)))
        for at in range(0, item.size, step):
            yield item, slice(at, at + step)


def _item(
    terms: list[np.ndarray], counts: tuple[int, ...], places: list[np.ndarray], readers: Sequence[int], like: np.ndarray
) -> PipelineItem:
    chain, n = [h for h, count in enumerate(counts) if count], len(counts)
    route = [chain[-1], *(h for h in ((chain[-1] - k) % n for k in range(1, n)) if h in readers)]
    return PipelineItem(like.size, like.dtype, terms, counts, places, chain, route)


def _one(home: int, hosts: int) -> tuple[int, ...]:
    """The value is from one host."""
    return tuple(int(h == home) for h in range(hosts))
