"""Algorithms: how sends and receives carry out a collective. Each is a schedule of rounds; lowering/write_algorithm.py emits the
operators."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ...ir.errors import TranspileError, nearest
from ...verify.recipe import prove_rounds, shifted_rounds_hold, two_level_rounds_hold
from ...verify.refusal import Refusal
from .double_binary_tree import DoubleBinaryTree
from .hierarchical import Hierarchical
from .rails import Rails
from .recursive import HalvingDoubling, RecursiveDoubling
from .ring import Ring
from .schedule import Algorithm, PatternRound, Refused, Rounds, Shifted, Transfer, backwards, times_sent
from .sequence import SEQUENCED, CollectiveSequence, Grid, SequenceStage, Slicing
from .servers import PushPull
from .star import Direct, Star
from .symbolic_check import check_algorithm, check_rounds, check_sequence
from .tree import Tree
from .two_level import InsideHosts, Level, TwoLevel

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a for a in (Star(), Direct(), Tree(), DoubleBinaryTree(), Ring(), RecursiveDoubling(), HalvingDoubling())
}
SEQUENCES: dict[str, CollectiveSequence] = {s.name: s for s in (Hierarchical(), Rails())}
BUILT_IN = {**ALGORITHMS, **SEQUENCES}
_CHECKED_AT_USE = 64  # ranks; with more ranks there are millions of transfers, and the proof of the programs checks them


class RankRound(NamedTuple):
    """The transfers that a rank sends and receives in a round."""

    round: int
    gives: list[Transfer]
    takes: list[Transfer]


def algorithm(name: str, hosts: int = 1) -> Algorithm:
    """An algorithm by its name; "direct/ring" uses direct inside each of `hosts` hosts and ring between them."""
    inside, slash, between = str(name).partition("/")
    if slash:
        return TwoLevel(algorithm(inside), algorithm(between), hosts)
    if name not in ALGORITHMS:
        raise TranspileError(f"unknown algorithm {name!r}; {nearest(str(name), ALGORITHMS, 'there are')}")
    return ALGORITHMS[name]


def register(new: Any) -> Any:
    """Register a recipe, an Algorithm (rounds of messages) or a CollectiveSequence, under its name; it replaces an earlier recipe of the
    user's with that name. The recipe is first checked symbolically for 1 to 9 ranks, in every division into hosts and devices; rounds are
    checked again when they are used, for up to 64 ranks.

    >>> class Reversed(Ring):
    ...     name = "reversed_ring"
    ...     def spread(self, n):
    ...         return backwards(self.reduce(n))
    >>> _ = register(Reversed())
    >>> len(schedule("reversed_ring", "all_reduce", 4)), ALGORITHMS.pop("reversed_ring").name
    (6, 'reversed_ring')
    """
    if not isinstance(new, (Algorithm, CollectiveSequence)):
        classes = "transpiler.algorithms.Algorithm or CollectiveSequence"
        raise TranspileError(f"register takes an instance of a subclass of {classes}, got {new!r}")
    name = new.name
    if not isinstance(name, str) or not name or name == "auto" or "/" in name:
        raise TranspileError(f'{new!r}: the name of an algorithm is a word without "/" that is not "auto", got {name!r}')
    if BUILT_IN.get(name, new) is not new:
        raise TranspileError(f"{name!r} is one of fluidx's own algorithms; give {new!r} another name")
    if isinstance(new, Algorithm):
        check_algorithm(new)
        ALGORITHMS[name] = new
        SEQUENCES.pop(name, None)
    else:
        check_sequence(new, known=ALGORITHMS)
        SEQUENCES[name] = new
        ALGORITHMS.pop(name, None)
    return new


def schedule(name: str, carries: str, n: int, hosts: int = 1) -> Rounds:
    """The rounds of an algorithm for a method ("all_reduce", "reduce", "spread", ...) and n ranks. Raises Refused if the algorithm cannot
    do it.

    >>> [[(t.source, t.target) for t in r] for r in schedule("ring", "all_reduce", 2)]
    [[(1, 0), (0, 1)], [(0, 1), (1, 0)]]
    """
    return _schedule(algorithm(name, hosts), carries, n)


@lru_cache(maxsize=256)  # the key is the algorithm, because another one may be registered under the same name
def _schedule(of: Algorithm, carries: str, n: int) -> Rounds:
    if n <= _CHECKED_AT_USE and not _is_built_in(of):
        return check_rounds(of, carries, n)
    return getattr(of, carries)(n)


def _is_built_in(of: Algorithm) -> bool:
    if isinstance(of, TwoLevel):
        return _is_built_in(of.inside) and _is_built_in(of.between)
    return BUILT_IN.get(of.name) is of


def able(name: str, carries: str, n: int, hosts: int = 1) -> bool:
    """Can an algorithm carry out this method among n ranks?"""
    try:
        schedule(name, carries, n, hosts)
    except Refused:
        return False
    return True


def parts(name: str, carries: str, n: int, hosts: int, filled: tuple[int, ...], rank: int) -> tuple[RankRound, ...]:
    """A rank's rounds, with only the transfers of the blocks in `filled`: the other blocks are empty.

    >>> [[(p.round, len(p.gives), len(p.takes)) for p in parts("ring", "reduce", 3, 1, (0,), rank)] for rank in range(3)]
    [[(1, 0, 1)], [(0, 1, 0)], [(0, 0, 1), (1, 1, 0)]]
    """
    return _parts(algorithm(name, hosts), carries, n, filled, rank)


@lru_cache(maxsize=4096)
def _parts(of: Algorithm, carries: str, n: int, filled: tuple[int, ...], rank: int) -> tuple[RankRound, ...]:
    by_block = _by_block(of, carries, n, rank)
    found: dict[int, RankRound] = {}
    for k, _, t in sorted({x for b in filled for x in by_block.get(b, ())}):
        mine = found.setdefault(k, RankRound(k, [], []))
        (mine.gives if rank == t.source else mine.takes).append(t)
    return tuple(found.values())


def check_rounds_of(name: str, carries: str, n: int, hosts: int, filled: tuple[int, ...]) -> Refusal | None:
    """The reason why the rounds of an algorithm among n ranks do not carry out a collective on the blocks `filled`; None if they do."""
    return _proof(algorithm(name, hosts), carries, n, filled)


@lru_cache(maxsize=1024)
def _proof(of: Algorithm, carries: str, n: int, filled: tuple[int, ...]) -> Refusal | None:
    return None if _holds_by_pattern(of, carries, n) else prove_rounds(carries, n, _schedule(of, carries, n), filled)


@lru_cache(maxsize=256)
def _holds_by_pattern(of: Algorithm, carries: str, n: int) -> bool:
    """Do the rounds hold for all blocks, and so for any of them, by what they are made from: shifted transfers, or rounds inside hosts and
    between them?"""
    rounds = _schedule(of, carries, n)
    if isinstance(of, TwoLevel):
        hosts, g = of.hosts, n // of.hosts
        levels = [(isinstance(r, InsideHosts), r.first) for r in rounds if isinstance(r, Level) and (r.hosts, r.g) == (hosts, g)]
        return hosts * g == n and len(levels) == len(rounds) and two_level_rounds_hold(carries, hosts, g, levels)
    return _are_shifted(of, carries, n) and shifted_rounds_hold(carries, n, [r.firsts for r in rounds])  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _are_shifted(of: Algorithm, carries: str, n: int) -> bool:
    return all(isinstance(r, Shifted) and r.n == n for r in _schedule(of, carries, n))


def count_messages(
    name: str, carries: str, n: int, hosts: int, filled: tuple[int, ...], messages: Callable[[Transfer], Sequence[Any]]
) -> int:
    """How many messages all ranks send for a collective, counting the transfers of the blocks in `filled`."""
    times, with_block = _times_sent(algorithm(name, hosts), carries, n)
    found = {x for b in filled for x in with_block.get(b, ())}
    return sum(times[x] * len(messages(Transfer(0, 1, *x, False))) for x in found)


@lru_cache(maxsize=64)
def _times_sent(of: Algorithm, carries: str, n: int) -> tuple[Mapping[tuple[int, int], int], Mapping[int, Sequence[tuple[int, int]]]]:
    """How many transfers an algorithm has for each range of blocks, and the ranges that have a block."""
    rounds = _schedule(of, carries, n)
    times: Counter[tuple[int, int]] = Counter()
    if _are_shifted(of, carries, n):  # every block is sent equally often
        each = sum(len(r.firsts) for r in rounds if isinstance(r, Shifted))
        times.update({(b, b + 1): each for b in range(n)} if each else {})
    else:
        for r in rounds:
            times.update(times_sent(r))
    with_block: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for x in times:
        for b in range(*x):
            with_block[b].append(x)
    return times, with_block


class PlacedTransfer(NamedTuple):
    """A transfer with the number of its round and its index in the round."""

    round: int
    place: int
    transfer: Transfer


@lru_cache(maxsize=1024)
def _by_block(of: Algorithm, carries: str, n: int, rank: int) -> dict[int, list[PlacedTransfer]]:
    """The transfers of a rank for each block: most values have few blocks that are not empty."""
    out: dict[int, list[PlacedTransfer]] = defaultdict(list)
    for found in _of_rank(of, carries, n, rank):
        for b in range(found.transfer.start, found.transfer.stop):
            out[b].append(found)
    return out


def _of_rank(of: Algorithm, carries: str, n: int, rank: int) -> Iterable[PlacedTransfer]:
    """The transfers that a rank sends or receives."""
    rounds = _schedule(of, carries, n)
    if all(isinstance(r, PatternRound) for r in rounds):
        return [PlacedTransfer(k, i, t) for k, r in enumerate(rounds) for i, t in r.of_rank(rank)]  # type: ignore[attr-defined]
    return _by_rank(of, carries, n).get(rank, ())


@lru_cache(maxsize=64)
def _by_rank(of: Algorithm, carries: str, n: int) -> dict[int, list[PlacedTransfer]]:
    """The transfers that each rank sends or receives."""
    out: dict[int, list[PlacedTransfer]] = defaultdict(list)
    for k, r in enumerate(_schedule(of, carries, n)):
        for i, t in enumerate(r):
            for rank in (t.source, t.target):
                out[rank].append(PlacedTransfer(k, i, t))
    return out


__all__ = [
    "ALGORITHMS", "SEQUENCED", "SEQUENCES", "Algorithm", "CollectiveSequence", "Grid", "PushPull", "RankRound", "Refused", "SequenceStage",
    "Shifted", "Slicing", "Transfer", "able", "algorithm", "backwards", "check_rounds", "count_messages", "parts", "register", "schedule",
]  # fmt: skip
