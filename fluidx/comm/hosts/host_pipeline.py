"""A pipeline over hosts, for large arrays of a collective: it reduces in rank order.

The members of a group are ordered by host. The first host adds the terms of its ranks and sends the result to the second, which adds its
own, and so on. The last host has the sum, added in rank order, and sends it back from host to host. Arrays are cut into pieces, so that all
hosts work at the same time; each piece passes each link once in each direction. A value that only one rank has (broadcast, all_gather) uses
the same pipeline: it is a sum of one term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..contribution import Contribution, add_up, settle, wide
from .handshake import MessageWorld, Posted
from .message_collectives import put

_PIECE = 512 * 1024  # bytes that are added or sent at a time: they stay in the second-level cache
_AHEAD = 2  # a receive starts so many pieces before its addition
_LAG = 3  # so many pieces are added before the wait for a piece's sum
_RING = 4  # buffers of one kind in use at a time


class PipelineItem(NamedTuple):
    """A sum, or one value, with its receivers. Arrays are those of this host, flat and contiguous."""

    size: int
    dtype: np.dtype
    terms: list[np.ndarray]
    counts: tuple[int, ...]  # the number of terms on each host
    places: list[np.ndarray]
    chain: list[int]  # the hosts that add, in order
    route: list[int]  # the last of these hosts, which has the sum, then the receivers, in the order in which they get it


class PipelineRoute(NamedTuple):
    """The route of pieces: the message layer, the tags (`tag` and `tag` + 1), the sending rank of each host, and the index of this host."""

    world: MessageWorld
    tag: int
    peers: Sequence[int]
    here: int
    what: str
    room: Callable[[int, int, np.dtype], np.ndarray]


def items_of(slot: Contribution, homes: Sequence[int], here: int, seen: Sequence[Sequence[Sequence[np.ndarray]]]) -> Iterator[PipelineItem]:
    """The items of a collective. `homes`: the host of each member, numbered in order. `seen`: the input and output arrays of the members on
    host `here`."""
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


def carry(items: Iterable[PipelineItem], op: str, way: PipelineRoute, share: int, shares: int) -> None:
    """Run one share of the pipeline."""
    pieces = [piece for k, piece in enumerate(_pieces(items, shares)) if k % shares == share]
    if not pieces:
        return
    work, n = _PipelineShare(pieces, op, way), len(pieces)
    for t in range(n + _AHEAD + _LAG):
        if t < n:
            work.expect(t)
        if 0 <= (p := t - _AHEAD) < n:
            work.add(p)
        if 0 <= (p := t - _AHEAD - _LAG) < n:
            work.pass_on(p)
    work.end()


class _PipelineShare:
    """The pieces of one share on this host."""

    def __init__(self, pieces: list[tuple[PipelineItem, slice]], op: str, way: PipelineRoute):
        self.pieces, self.op, self.way = pieces, op, way
        most = max((min(item.size, at.stop) - at.start) * wide(item.dtype).itemsize for item, at in pieces)
        self.rows = way.room(2 * _RING, -(-most // 64) * 64, np.dtype(np.uint8))
        self.coming, self.sums = dict[int, Posted](), dict[int, Posted]()
        self.sent: list[Posted] = [[] for _ in range(_RING)]  # sends from the buffers in which pieces are added
        self.leaving: Posted = []

    def expect(self, p: int) -> None:
        """Start to receive the sum of the earlier hosts."""
        item, at = self.pieces[p]
        if self.way.here in item.chain[1:]:
            before = item.chain[item.chain.index(self.way.here) - 1]
            self.coming[p] = self.way.world.receive(self._row(p, item, at), self.way.peers[before], self.way.tag)

    def add(self, p: int) -> None:
        """Add this host's terms and send the result to the next host. The last host has the sum and sends it back; others start to receive
        it."""
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
        """Copy the sum to this host's receivers, and send it to the next host."""
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
        self.way.world.finish(self.sent[k], self.way.what)  # the piece that used this buffer last
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
        """A buffer for a piece in the dtype of the addition: pieces are received or added there."""
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
    """The counts of a value that one host has."""
    return tuple(int(h == home) for h in range(hosts))
