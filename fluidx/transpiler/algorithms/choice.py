"""algorithm="auto": the cheapest by the alpha-beta model."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from ...ir.parts import bounds
from ...ops.comm.collective import owned_by
from . import Algorithm, able, algorithm

ALPHA = 15e-6  # seconds for a message between hosts, however small
BETA = 1 / 10e9  # seconds for a byte: a link of 10 GB/s
CANDIDATES = ("recursive_doubling", "halving_doubling", "ring", "tree")  # the first of equals
_UNITS = 1 << 20


def seconds(name: str, carries: str, n: int, nbytes: int, rooted: bool = False) -> float:
    """The time of a collective by the model: in each round the busiest rank pays ALPHA for every message and BETA for every byte.

    `rooted`: one rank owns all of the value. The model ranks algorithms; it leaves the additions out, and what else is on the links.

    >>> [f"{seconds(a, 'all_reduce', 8, 2**20) * 1e6:.0f} us" for a in ("ring", "recursive_doubling")]
    ['394 us', '360 us']
    """
    messages, share = _work(algorithm(name), carries, n, rooted)
    return messages * ALPHA + share * nbytes * BETA


def cheapest(carries: str, n: int, nbytes: int, rooted: bool = False) -> str:
    """The name of the cheapest algorithm; "" where none does that among n ranks.

    >>> [cheapest("all_reduce", 8, size) for size in (1000, 10**7)]
    ['recursive_doubling', 'halving_doubling']
    """
    found = [name for name in CANDIDATES if able(name, carries, n)]
    return min(found, key=lambda name: seconds(name, carries, n, nbytes, rooted), default="")


@lru_cache(maxsize=1024)
def _work(of: Algorithm, carries: str, n: int, rooted: bool) -> tuple[int, float]:
    """(messages, share of the value) that the busiest rank sends or receives, added up over the rounds."""
    cut = of.cut if carries == "all_reduce" else (lambda n, size: owned_by(0, n, size)) if rooted else _even
    marks = [*cut(n * n if carries == "exchange" else n, _UNITS), _UNITS]  # what lies behind the value is next to nothing
    messages, moved = 0, 0
    for r in getattr(of, carries)(n):
        count: Counter[tuple[str, int]] = Counter()
        size: Counter[tuple[str, int]] = Counter()
        for t in r:
            elements = marks[t.stop] - marks[t.start]
            for end in (("from", t.source), ("to", t.target)):
                count[end] += elements > 0
                size[end] += elements
        messages += max(count.values(), default=0)
        moved += max(size.values(), default=0)
    return messages, moved / _UNITS


def _even(n: int, size: int) -> list[int]:
    return bounds(size, n)
