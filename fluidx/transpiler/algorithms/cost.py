"""The cost model of collectives, by which algorithm="auto" chooses a recipe.

It is the alpha-beta model: in each message round, the busiest rank pays for every message and for every byte on the link. The model is for
comparing recipes; it ignores the time of additions and other traffic on the links.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ...ir.parts import bounds
from ...ops.comm.collective_base import owned_by
from ...ops.comm.volume import share
from ..cluster import NODE, RAIL, Link, Links
from . import SEQUENCES, Algorithm, CollectiveSequence, able, algorithm
from .schedule import Refused
from .sequence import Grid, SequenceStage, on_groups

CANDIDATES = ("recursive_doubling", "halving_doubling", "ring", "tree")  # of equal costs, the first wins
OVER_HOSTS = ("hierarchical", "rails")
METHODS = {"all_reduce": "all_reduce", "reduce": "reduce", "reduce_scatter": "reduce", "broadcast": "spread", "all_gather": "spread"}
_LINKS = Links()
_UNITS = 1 << 20


class Work(NamedTuple):
    """The work of all rounds together: the messages that the busiest rank sends or receives, their bytes, and the bytes that all ranks
    send. Bytes are fractions of the value's bytes."""

    messages: int
    busiest: float
    total: float


class Estimate(NamedTuple):
    """A recipe by name, "" for the communicator's own collective, and its time by the model, in seconds."""

    name: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name or 'communicator'} {self.seconds * 1e6:.3g} us"


def seconds(name: str, method: str, n: int, nbytes: float, rooted: bool = False, link: Link = _LINKS.between) -> float:
    """The time in seconds of a collective among n ranks with an algorithm. `rooted`: one rank owns the full value, or all parts of an
    exchange.

    >>> [f"{seconds(a, 'all_reduce', 8, 2**20) * 1e6:.0f} us" for a in ("ring", "recursive_doubling")]
    ['394 us', '360 us']
    """
    work = rounds_work(algorithm(name), method, n, rooted)
    return work.messages * link.message + work.busiest * nbytes * link.byte


def estimates(
    method: str, n: int, nbytes: float, rooted: bool = False, link: Link = _LINKS.between, own: Link | None = None
) -> list[Estimate]:
    """The algorithms that can do a collective among n ranks, the cheapest first. `own` is the cost of the communicator's own collective, if
    that is allowed: one call, in which a rank sends as few bytes as possible.

    >>> print(*estimates("reduce", 4, 1000, link=Link(1e-5, 1e-9), own=Link(2e-5, 1e-9))[:2], sep=", ")
    communicator 20.8 us, recursive_doubling 20.8 us
    """
    found = [Estimate(name, seconds(name, method, n, nbytes, rooted, link)) for name in CANDIDATES if able(name, method, n)]
    if own is not None:
        sent = share("spread" if rooted and method == "exchange" else method, n)  # by a root, if there is one
        found.insert(0, Estimate("", own.message + sent * nbytes * own.byte))
    return sorted(found, key=lambda e: e.seconds)


def cheapest(method: str, n: int, nbytes: float, rooted: bool = False) -> str:
    """The name of the cheapest algorithm between hosts; "" if no algorithm can do the collective among n ranks.

    >>> [cheapest("all_reduce", 8, size) for size in (1000, 10**7)]
    ['recursive_doubling', 'halving_doubling']
    """
    return next((e.name for e in estimates(method, n, nbytes, rooted)), "")


@lru_cache(maxsize=1024)
def rounds_work(of: Algorithm, method: str, n: int, rooted: bool = False) -> Work:
    """The work of an algorithm's rounds among n ranks.

    >>> rounds_work(algorithm("star"), "all_reduce", 4)
    Work(messages=6, busiest=6.0, total=6.0)
    """
    cut = of.cut if method == "all_reduce" else (lambda n, size: owned_by(0, n, size)) if rooted else _even
    if rooted and method == "exchange":  # rank 0 has a block for each rank
        marks = [*_even(n, _UNITS), *[_UNITS] * (n * n - n)]
    else:
        marks = [*cut(n * n if method == "exchange" else n, _UNITS), _UNITS]  # blocks after the value are almost empty
    messages, busiest, total = 0, 0, 0
    for r in getattr(of, method)(n):
        count: Counter[tuple[str, int]] = Counter()
        size: Counter[tuple[str, int]] = Counter()
        for t in r:
            elements = marks[t.stop] - marks[t.start]
            total += elements
            for end in (("from", t.source), ("to", t.target)):
                count[end] += elements > 0
                size[end] += elements
        messages += max(count.values(), default=0)
        busiest += max(size.values(), default=0)
    return Work(messages, busiest / _UNITS, total / _UNITS)


def _even(n: int, size: int) -> list[int]:
    return bounds(size, n)


# -- several hosts ------------------------------------------------------------------------------------------------------------------------


def over_hosts(collective: str, grid: Grid, nbytes: int, links: Links) -> list[Estimate]:
    """The recipes that can do a collective among all ranks of several hosts, the cheapest first: sequences, and the best algorithm that
    treats all links alike.

    >>> print(*over_hosts("all_reduce", Grid(hosts=2, devices=4), 10**6, Links()), sep=", ")
    hierarchical 63.4 us, rails 78.4 us, halving_doubling 265 us
    """
    n, rooted = grid.hosts * grid.devices, collective in ("reduce", "broadcast")
    found = []
    for name in OVER_HOSTS:
        try:
            found.append(Estimate(name, sequence_seconds(SEQUENCES[name], collective, grid, nbytes, links)))
        except Refused:
            continue
    found += estimates(METHODS[collective], n, nbytes, rooted, links.between)[:1]
    return sorted(found, key=lambda e: e.seconds)


def sequence_seconds(recipe: CollectiveSequence, collective: str, grid: Grid, nbytes: float, links: Links) -> float:
    """The time in seconds of a collective with a sequence. For slices, stages inside the hosts overlap with stages between them. Raises
    Refused if the recipe cannot carry it out."""
    slicing = recipe.slicing(grid.hosts)
    slices = 1 if slicing is None else max(1, -(-int(nbytes) // slicing.nbytes))
    inside, between, held = 0.0, 0.0, nbytes / slices
    for stage in on_groups(recipe.stages(collective, grid), grid):
        n = {NODE: grid.devices, RAIL: grid.hosts}.get(stage.group, grid.hosts * grid.devices)
        if stage.collective == "all_gather":
            held *= n
        took = _stage_seconds(stage, n, held, links)
        if stage.group == NODE:
            inside += took
        else:
            between += took
        if stage.collective == "reduce_scatter":
            held /= n
    at_once = slices if slicing is None else min(slices, slicing.in_flight)
    return inside + between + (slices - 1) * (max(inside, between) if at_once > 1 else inside + between)


def _stage_seconds(stage: SequenceStage, n: int, nbytes: float, links: Links) -> float:
    method, rooted = METHODS[stage.collective], stage.collective in ("reduce", "broadcast")
    inside = stage.group == NODE
    link, own = (links.inside, links.collective(n)) if inside else (links.between, None)
    if name := stage.algorithm.strip("/"):
        return seconds(name, method, n, nbytes, rooted, link)
    return next((e.seconds for e in estimates(method, n, nbytes, rooted, link, own) if not inside or not e.name), 0.0)
