"""HostLeader: the first rank of each host exchanges types with the leaders of other hosts for all its ranks, and reduces small arrays."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from ..base import Ranks
from ..contribution import Block, Contribution, reduce_into
from ..disagreement import other_count, other_type
from .handshake import type_of
from .host_pipeline import PipelineItem, items_of
from .message_collectives import MessageCommunicator

_TYPE = 48  # bytes for the text of a type
_NO_BYTES = np.empty(0, np.uint8)

Seen = Sequence[Sequence[Sequence[np.ndarray]]]  # for each rank of this host: its inputs and its outputs
Refuse = Callable[[str, int], NoReturn]


class HostGroup(NamedTuple):
    """A group's members by host, and the index of this host."""

    ranks: Ranks
    hosts: tuple[Ranks, ...]
    here: int

    @property
    def own(self) -> Ranks:
        return self.hosts[self.here]

    @property
    def homes(self) -> list[int]:
        return [h for h, host in enumerate(self.hosts) for _ in host]


class HostLeader:
    """Serves repeated collectives of a group with the same arrays. For each pair of ranks on two hosts, the leaders exchange the type of
    the array between them; if arrays are `little`, also the arrays themselves. `sums` are the reductions of these."""

    def __init__(self, far: MessageCommunicator, group: HostGroup, slot: Contribution, seen: Seen, little: bool):
        self.far, self.group, self.what, self.seen = far, group, slot.what, seen
        self.leaders, self.head, self.op = tuple(host[0] for host in group.hosts), Contribution(slot.call), slot.op or "sum"
        given, taken = _types(group, slot, seen, far.refuse)
        items = list(items_of(slot, group.homes, group.here, seen)) if little else []
        self.wanted = [types.tobytes() for types in taken]
        self.told = [_behind(types, items, group.here) for types in given]
        self.heard = [_behind(types, items, h) for h, types in enumerate(taken)]
        self.own = list[tuple[np.ndarray, np.ndarray]]()  # (its place in the message, a term)
        for told, types in zip(self.told, given, strict=True):
            for item, rows in zip(items, _terms(told[types.size :], items, group.here), strict=True):
                self.own += zip(rows, item.terms)
        heard = [_terms(self.heard[h][types.size :], items, h) for h, types in enumerate(taken)]
        self.sums = [([row for host in heard for row in host[k]], item.places) for k, item in enumerate(items) if item.size and item.places]

    def trade(self, block: Block) -> None:
        for place, term in self.own:
            place[:] = term
        self.far.trade(self.leaders, self.head, self.told, self.heard)
        for h, want in enumerate(self.wanted):
            if self.heard[h][: len(want)].tobytes() != want:
                self._misfit(h)
        for terms, places in self.sums:
            reduce_into(terms, places, self.op, block)

    def _misfit(self, host: int) -> NoReturn:
        """Raise CommError: it names the rank whose array has another type than expected."""
        pairs = [(source, rank) for source in self.group.hosts[host] for rank in self.group.own]
        wants, haves = (np.frombuffer(side, f"S{_TYPE}", len(pairs)) for side in (self.wanted[host], self.heard[host].tobytes()))
        k = int(np.argmax(wants != haves))
        (source, rank), want, have = pairs[k], wants[k].decode(errors="replace"), haves[k].decode(errors="replace")
        self.far.refuse(other_type(rank, want, source, self.what, have), source)


def _types(group: HostGroup, slot: Contribution, seen: Seen, refuse: Refuse) -> list[list[np.ndarray]]:
    """For each host, the types of arrays from this host's ranks to its ranks, and back: as texts, one for each pair of ranks."""
    if slot.gives is None:
        return [[_NO_BYTES] * len(group.hosts)] * 2
    n, homes = len(group.ranks), group.homes
    for rank, (gives, takes) in zip(group.own, seen, strict=True):
        if not len(gives) == len(takes) == n:
            refuse(other_count(rank, len(gives), slot.what, len(takes), n), rank)
    members = [[k for k in range(n) if homes[k] == h] for h in range(len(group.hosts))]
    given = [_texts([gives[k] for gives, _ in seen for k in others]) for others in members]
    return [given, [_texts([takes[k] for k in others for _, takes in seen]) for others in members]]


def _texts(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.frombuffer(b"".join(_text(type_of(a).encode()) for a in arrays), np.uint8)


def _text(said: bytes) -> bytes:
    """A text in _TYPE bytes. A long text is cut, with a checksum, so that all of it is compared."""
    if len(said) > _TYPE:
        said = said[: _TYPE - 9] + b"~%08x" % zlib.crc32(said)
    return said.ljust(_TYPE, b"\0")


def _nbytes(item: PipelineItem, host: int) -> int:
    """The bytes of a host's terms."""
    return item.counts[host] * item.size * item.dtype.itemsize


def _behind(types: np.ndarray, items: Sequence[PipelineItem], host: int) -> np.ndarray:
    """A message: the types, then space for the terms of a host."""
    return np.concatenate([types, np.zeros(sum(_nbytes(item, host) for item in items), np.uint8)])


def _terms(room: np.ndarray, items: Sequence[PipelineItem], host: int) -> list[list[np.ndarray]]:
    """The places of a host's terms in a message, by item."""
    at, found = 0, []
    for item in items:
        nbytes = _nbytes(item, host)
        found.append([row.view(item.dtype) for row in room[at : at + nbytes].reshape(item.counts[host], -1)] if nbytes else [])
        at += nbytes
    return found
