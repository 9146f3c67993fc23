"""MessageCommunicator: collectives by point-to-point messages, for ranks that share no memory.

A library's own collectives, such as MPI's, have no deadline, do not name missing ranks, and add in another order. Here every member sends
every other one a text of the call, which shows who is missing and whether calls are equal; small arrays are sent in the same message. A
large array is reduced by slices: one member gathers a slice from all, adds in rank order, as threads do, and sends the sum to all. It works
piece by piece, so that pieces are sent while others are added.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from ..base import Ranks
from ..collective_methods import CollectiveMethods
from ..contribution import Contribution, reduce_into
from ..disagreement import disagreement, other_call, other_count, other_message, other_type
from .handshake import HEAD, LITTLE, Handshake, MessageWorld, Posted, decoded, encoded, type_of

_SMALL = 4 * 1024  # elements up to which every rank sends everything to every rank: one exchange instead of two
_PIECE = 512 * 1024  # bytes of a slice that are added at a time: they stay in the second-level cache
_AHEAD = 3  # pieces in flight while one is added
_MOST_HANDSHAKES = 128
_TEXTS, _DATA = 0, 1  # tags of messages from peer to peer; groups have higher ones
_NOTHING = np.empty(0, np.uint8)

Arrays = Sequence[np.ndarray] | np.ndarray  # a list of arrays, or the rows of one


class MessageCommunicator(CollectiveMethods):
    """One rank's communicator in a world of messages; implements comm.base.Communicator.

    Groups need no set-up: members know each other by rank, and each group's messages have their own tags.
    """

    world: MessageWorld

    def __init__(self, world: MessageWorld, rank: int):
        super().__init__(world, rank)
        self._landing: np.ndarray = np.empty(0, np.uint8)
        self._tags: dict[Ranks, int] = {}
        self._handshakes: dict[tuple, Handshake] = {}

    # -- collectives --------------------------------------------------------------------------------------------------------

    def _collective(self, ranks: Ranks, slot: Contribution) -> None:
        """Carry out the collective of the contribution."""
        match slot.what:
            case "all_reduce" | "reduce":
                self._reduce(ranks, slot)
            case "reduce_scatter":
                self._reduce_parts(ranks, slot)
            case "broadcast":
                self._broadcast(ranks, slot)
            case _:
                self._meet(ranks, slot)

    def _reduce_parts(self, ranks: Ranks, slot: Contribution) -> None:
        parts, out, n = slot.gives, slot.out, len(ranks)
        if all(part.nbytes <= LITTLE for part in parts):
            terms = self.room(n, out.size, out.dtype).reshape(n, *out.shape)
            self.trade(ranks, slot, parts, terms)
            reduce_into(list(terms), [out], slot.op, self._block)
        else:
            self.trade(ranks, slot, [_NOTHING] * n, [_NOTHING] * n)
            total = _plain(out)
            self._add(ranks, slot, [_flat(part) for part in parts], total.reshape(-1))
            put(out, total)

    def _reduce(self, ranks: Ranks, slot: Contribution) -> None:
        n, mine, x = len(ranks), ranks.index(self.rank), _flat(slot.x)
        reads = slot.root in (-1, mine)
        out = _plain(slot.out).reshape(-1) if reads else np.empty_like(x)
        if x.size <= _SMALL:
            terms = self.room(n, x.size, x.dtype)
            self.trade(ranks, slot, [x if slot.root in (-1, k) else _NOTHING for k in range(n)], terms if reads else [_NOTHING] * n)
            if reads:
                reduce_into(list(terms), [out], slot.op, self._block)
        else:
            self._meet(ranks, slot)
            cuts = _cuts(x.size, n)
            readers = range(n) if slot.root < 0 else (slot.root,)
            self._add(ranks, slot, [x[cut] for cut in cuts], out[cuts[mine]], readers, [out[cut] for cut in cuts])
        if reads:
            put(slot.out, out.reshape(slot.out.shape))

    def _add(
        self,
        ranks: Ranks,
        slot: Contribution,
        gives: Sequence[np.ndarray],
        total: np.ndarray,
        readers: Sequence[int] = (),
        places: Sequence[np.ndarray] = (),
    ) -> None:
        """Reduce this rank's slice from all ranks into `total`, and send it to `readers`. Readers receive the other sums into `places`."""
        world, tag, n, mine, what = self.world, self.tag(ranks) + 1, len(ranks), ranks.index(self.rank), str(slot)
        step = max(1, _PIECE // total.itemsize)
        others = [(k, r) for k, r in enumerate(ranks) if k != mine]
        sent, coming, last = dict[int, Posted](), dict[int, Posted](), list[tuple[int, Any]]()
        landings = self.room(_AHEAD * n, min(step, total.size), total.dtype).reshape(_AHEAD, n, -1)
        count = max(-(-a.size // step) for a in gives)

        def begin(p: int) -> None:
            piece = slice(p * step, (p + 1) * step)
            size = total[piece].size
            coming[p], sent[p] = [], []
            for k, r in others:
                coming[p] += world.receive(landings[p % _AHEAD, k, :size], r, tag)
                sent[p] += world.send(gives[k][piece], r, tag)

        for p in range(min(_AHEAD, count)):
            begin(p)
        for p in range(count):
            piece = slice(p * step, (p + 1) * step)
            sums = total[piece]
            world.finish(coming.pop(p), what)
            terms = list(landings[p % _AHEAD, :, : sums.size])
            terms[mine] = gives[mine][piece]
            reduce_into(terms, [sums], slot.op, self._block)
            for k, r in others:
                if k in readers:
                    last += world.send(sums, r, tag)
            world.finish(sent.pop(p), what)  # a later piece may reuse its buffer
            for k, r in others:
                if mine in readers:
                    last += world.receive(places[k][piece], r, tag)
            if p + _AHEAD < count:
                begin(p + _AHEAD)
        world.finish(last, what)

    def _broadcast(self, ranks: Ranks, slot: Contribution) -> None:
        """The root sends a slice to every other rank, and these send their slices to each other."""
        root, n, mine = slot.root, len(ranks), ranks.index(self.rank)
        source, place = _flat(slot.x), _flat(slot.out)
        whole = source.size <= _SMALL
        cuts = [slice(0, source.size)] * n if whole else _cuts(source.size, n - 1)
        if not whole:
            cuts.insert(root, slice(0, 0))  # the root needs no slice
        if mine == root:
            self.trade(ranks, slot, [source[cut] for cut in cuts], [_NOTHING] * n)
            place[...] = source
        else:
            part = place[cuts[mine]]
            self.trade(ranks, slot, [_NOTHING] * n, [part if k == root else _NOTHING for k in range(n)])
            if not whole:
                gives, takes = [part if k != root else _NOTHING for k in range(n)], [place[cut] for cut in cuts]
                self._end(*self._begin(ranks, gives, takes), slot)
        put(slot.out, place)

    def room(self, count: int, size: int, dtype: np.dtype) -> np.ndarray:
        """A buffer for `count` arrays, valid until the next call."""
        nbytes = count * size * dtype.itemsize
        if self._landing.size < nbytes:
            self._landing = np.empty(nbytes, np.uint8)
        return self._landing[:nbytes].view(dtype).reshape(count, size)

    # -- a group's messages -------------------------------------------------------------------------------------------------

    def _meet(self, ranks: Ranks, slot: Contribution) -> None:
        """A collective call: check that all contributions fit together, and exchange the parts."""
        none = [_NOTHING] * len(ranks)
        self.trade(ranks, slot, none if slot.gives is None else slot.gives, none if slot.takes is None else slot.takes)

    def trade(self, ranks: Ranks, slot: Contribution, gives: Arrays, takes: Arrays) -> None:
        """Check that all contributions fit together; send `gives[k]` to rank k and receive `takes[k]` from it."""
        world = self.world
        world.check()
        talk = self._handshake(ranks, slot, gives)
        for k, _ in talk.others:
            if 0 < (nbytes := gives[k].nbytes) <= LITTLE:
                talk.said[k][HEAD : HEAD + nbytes] = _bytes(gives[k])
        world.start(talk.posted)
        much = self._begin(ranks, [_unless_little(a) for a in gives], [_unless_little(a) for a in takes])
        world.finish(talk.posted, talk.text)
        for k, r in talk.others:
            self._checkhead(slot, talk, k, r)
        for k, _ in talk.others:
            if 0 < (nbytes := takes[k].nbytes) <= LITTLE:
                takes[k][...] = talk.heard[k][HEAD : HEAD + nbytes].view(takes[k].dtype).reshape(takes[k].shape)
        self._end(*much, slot)
        mine = ranks.index(self.rank)
        if gives[mine].size and takes[mine].size:
            put(takes[mine], gives[mine])

    def _handshake(self, ranks: Ranks, slot: Contribution, gives: Arrays) -> Handshake:
        arrays = (slot.x,) if slot.gives is None else (*slot.gives, None, *slot.takes)
        types = ((a.dtype, a.shape) if a is not None else None for a in arrays)
        key = ranks, type(slot), slot.what, slot.op, slot.root, *types, *(a.nbytes for a in gives)
        talk = self._handshakes.get(key)
        if talk is None:
            self._check_parts(slot, ranks)
            if len(self._handshakes) >= _MOST_HANDSHAKES:
                for old in self._handshakes.values():
                    old.close()
                self._handshakes.clear()
            along = [a.nbytes if a.nbytes <= LITTLE else 0 for a in gives]
            talk = self._handshakes[key] = Handshake(self.world, self.rank, ranks, self.tag(ranks), slot, along)
        return talk

    def _begin(self, ranks: Ranks, gives: Arrays, takes: Arrays) -> tuple[Posted, list[tuple[np.ndarray, np.ndarray]]]:
        tag, posted, copies = self.tag(ranks) + 1, list[tuple[int, Any]](), []
        for r, place in zip(ranks, takes, strict=True):
            if r != self.rank and place.size:
                got = _plain(place)
                posted += self.world.receive(got, r, tag)
                copies.append((place, got))
        for r, x in zip(ranks, gives, strict=True):
            if r != self.rank and x.size:
                posted += self.world.send(np.ascontiguousarray(x), r, tag)
        return posted, copies

    def _end(self, posted: Posted, copies: list[tuple[np.ndarray, np.ndarray]], slot: Contribution) -> None:
        if posted:
            self.world.finish(posted, str(slot))
        for place, got in copies:
            put(place, got)

    def tag(self, ranks: Ranks) -> int:
        """The tag of a group's texts; the next two tags are for its data. Groups with equal tags do not conflict: messages between two
        ranks are in the order of their calls."""
        if ranks not in self._tags:
            self._tags[ranks] = 2 + 3 * (zlib.crc32(repr(ranks).encode()) % (self.world.tags // 3 - 2))
        return self._tags[ranks]

    def _check_parts(self, slot: Contribution, ranks: Ranks) -> None:
        if slot.gives is None:
            return
        given, taken, n = len(slot.gives), len(slot.takes), len(ranks)
        if not given == taken == n:
            self.refuse(other_count(self.rank, given, slot.what, taken, n), self.rank)
        k = ranks.index(self.rank)
        if type_of(slot.gives[k]) != type_of(slot.takes[k]):
            self._misfit(slot, k, self.rank, type_of(slot.gives[k]))

    def _checkhead(self, slot: Contribution, talk: Handshake, k: int, rank: int) -> None:
        wanted = talk.wanted[k]
        if talk.heard[k][: len(wanted)].tobytes() == wanted:
            return
        call, given, shown = decoded(talk.heard[k][:HEAD])
        if call != decoded(encoded(talk.call))[0]:
            self.refuse(other_call(self.rank, slot, rank, shown), rank)
        self._misfit(slot, k, rank, given)

    def _misfit(self, slot: Contribution, k: int, rank: int, given: str) -> NoReturn:
        self.refuse(other_type(self.rank, type_of(slot.takes[k]), rank, slot.what, given), rank)

    def refuse(self, why: str, rank: int) -> NoReturn:
        error = disagreement(why, rank)
        self.abort(error)
        raise error

    # -- point to point -------------------------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]]) -> None:
        world = self.world
        world.check()
        coming, leaving = [], []
        for out, peer in recvs:
            head, got = np.zeros(HEAD, np.uint8), _plain(out)
            coming.append((out, peer, head, world.receive(head, peer, _TEXTS), got, world.receive(got, peer, _DATA)))
        for x, peer in sends:
            world.post(encoded(type_of(x)), peer, _TEXTS)
            leaving.append((peer, world.post(np.ascontiguousarray(x), peer, _DATA)))
        for out, peer, head, told, got, posted in coming:
            world.finish(told, f"recv from rank {peer}")
            if (sent := decoded(head)[0]) != type_of(out):
                self.refuse(other_message(self.rank, type_of(out), peer, sent), peer)
            world.finish(posted, f"recv from rank {peer}")
            put(out, got)
        for peer, posted in leaving:
            world.finish(posted, f"send to rank {peer}")


def _cuts(size: int, n: int) -> list[slice]:
    return [slice(size * k // n, size * (k + 1) // n) for k in range(n)]


def _unless_little(a: np.ndarray) -> np.ndarray:
    return _NOTHING if a.nbytes <= LITTLE else a


def _bytes(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def _flat(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).reshape(-1)


def _plain(place: np.ndarray) -> np.ndarray:
    """The array itself if it is contiguous, else a temporary one."""
    return place if place.flags.c_contiguous else np.empty(place.shape, place.dtype)


def _at(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]


def put(place: np.ndarray, got: np.ndarray) -> None:
    """Copy `got` to `place`, unless it is the same memory."""
    there = place.flags.c_contiguous and got.flags.c_contiguous and _at(place) == _at(got)
    if not there and got is not place:
        np.copyto(place, got.reshape(place.shape))
