"""Algorithms: how a collective is carried out by sends and receives. Each is data, a schedule; transpiler/hops.py writes it out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ...ir.errors import TranspileError, nearest
from .double_binary_tree import DoubleBinaryTree
from .recursive import HalvingDoubling, RecursiveDoubling
from .ring import Ring
from .schedule import Algorithm, Refused, Rounds, Transfer
from .star import Direct, Star
from .tree import Tree
from .two_level import TwoLevel

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a for a in (Star(), Direct(), Tree(), DoubleBinaryTree(), Ring(), RecursiveDoubling(), HalvingDoubling())
}


class Schedule(NamedTuple):
    """Rounds of transfers; `of[k]` are those of rank k, in each round what it sends and what it receives."""

    rounds: Rounds
    of: tuple[tuple[tuple[Sequence[Transfer], Sequence[Transfer]], ...], ...]


def algorithm(name: str, hosts: int = 1) -> Algorithm:
    """An algorithm by its name; "direct/ring" is the first inside of `hosts` hosts and the second between them."""
    inside, slash, between = str(name).partition("/")
    if slash:
        return TwoLevel(algorithm(inside), algorithm(between), hosts)
    if name not in ALGORITHMS:
        raise TranspileError(f"unknown algorithm {name!r}; {nearest(str(name), ALGORITHMS, 'there are')}")
    return ALGORITHMS[name]


@lru_cache(maxsize=256)
def schedule(name: str, carries: str, n: int, hosts: int = 1) -> Schedule:
    """What `carries` ("all_reduce", "reduce" or "spread") is among n ranks. Raises Refused where the algorithm does not do that.

    >>> [[(t.source, t.target) for t in r] for r in schedule("ring", "all_reduce", 2).rounds]
    [[(1, 0), (0, 1)], [(0, 1), (1, 0)]]
    """
    rounds = getattr(algorithm(name, hosts), carries)(n)
    of: list[list[tuple[list[Transfer], list[Transfer]]]] = [[([], []) for _ in rounds] for _ in range(n)]
    for k, transfers in enumerate(rounds):
        for t in transfers:
            of[t.source][k][0].append(t)
            of[t.target][k][1].append(t)
    return Schedule(rounds, tuple(map(tuple, of)))


__all__ = ["ALGORITHMS", "Algorithm", "Refused", "Schedule", "Transfer", "algorithm", "schedule"]
