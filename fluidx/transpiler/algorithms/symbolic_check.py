"""The symbolic check of an algorithm: its rounds run on sets of terms in place of numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ...ir.errors import TranspileError
from .schedule import Algorithm, Refused, Rounds, Transfer

COLLECTIVES = {
    "reduce": "reduce_scatter and reduce",
    "spread": "all_gather and broadcast",
    "all_reduce": "all_reduce",
    "exchange": "all_to_all",
    "adaptive": "the adaptive sum",
}
_SIZE = 1 << 20  # elements of the value whose cut tells which blocks are empty


class Terms(NamedTuple):
    """The terms that a block is the sum of, as bits: those that are in it, and those that are in it more than once."""

    once: int
    more: int = 0


def check_algorithm(of: Algorithm, counts: Sequence[int] = range(1, 10)) -> None:
    """Check each collective that an algorithm makes, for each number of ranks. Raises TranspileError for the first that is wrong, and for
    an algorithm that makes none.

    >>> class Forgets(Algorithm):
    ...     name = "forgets"
    ...     def reduce(self, n):
    ...         return (tuple(Transfer(k, 0, 0, 1, True) for k in range(1, n)),)
    >>> check_algorithm(Forgets())
    Traceback (most recent call last):
    fluidx.ir.errors.TranspileError: algorithm forgets, reduce among 2 ranks: rank 1 ends with block 1 without the term of rank 0
      the method makes reduce_scatter and reduce; every term must reach the rank of its block once
    """
    why, made = None, False
    for carries in COLLECTIVES:
        for n in counts:
            try:
                check_rounds(of, carries, n)
                made = made or carries != "exchange" or type(of).exchange is not Algorithm.exchange
            except Refused as e:
                why = why or e
    if not made:
        raise TranspileError(f"algorithm {of.name} makes no collective: {why}")


def check_rounds(of: Algorithm, carries: str, n: int) -> Rounds:
    """The rounds of one collective among n ranks, checked. Raises TranspileError if they are wrong, Refused if there are none."""
    label = f"algorithm {of.name}, {carries} among {n} rank{'s' * (n > 1)}"
    try:
        rounds = getattr(of, carries)(n)
        filled = _filled_blocks(of, carries, n)
        _check_transfers(rounds, n, {"exchange": n * n, "adaptive": n + 1}.get(carries, n))
        if carries != "adaptive":  # its transfers combine values by a rule of their own, which the proof of programs knows
            by_block = _by_block(rounds)
            for block in filled:
                _check_block(carries, n, block, by_block.get(block, []))
    except Refused:
        raise
    except _Wrong as e:
        raise TranspileError(f"{label}: {e}\n  the method makes {COLLECTIVES[carries]}; {_ADVICE[carries]}") from None
    except Exception as e:
        raise TranspileError(
            f"{label}: the method ends in {type(e).__name__}: {e}\n"
            f"  {carries}(n) returns rounds for every n from 1, or raises Refused"
        ) from e
    return rounds


_ADVICE = {
    "reduce": "every term must reach the rank of its block once",
    "spread": "every block must go from its rank to all ranks",
    "all_reduce": "every term must reach every rank once",
    "exchange": "block k*n + j must go from rank k to rank j",
    "adaptive": "ranks and blocks must be those of the group",
}


class _Wrong(Exception):
    """What is wrong in rounds."""


def _filled_blocks(of: Algorithm, carries: str, n: int) -> Sequence[int]:
    """The blocks that may have elements: an all_reduce cuts the value itself, all other collectives have the cut of their operator."""
    if carries != "all_reduce":
        return range(n * n if carries == "exchange" else n)
    marks = list(of.cut(n, _SIZE))
    if len(marks) != n + 1 or marks[0] != 0 or marks[-1] != _SIZE or sorted(marks) != marks:
        raise _Wrong(f"cut({n}, {_SIZE}) must be {n + 1} rising numbers from 0 to {_SIZE}, got {marks}")
    return [k for k, (a, b) in enumerate(pairwise(marks)) if a < b]


def _check_transfers(rounds: Any, n: int, blocks: int) -> None:
    """Are these rounds of transfers among n ranks, of blocks that exist?"""
    if not isinstance(rounds, (tuple, list)) or not all(isinstance(r, (tuple, list)) for r in rounds):
        raise _Wrong(f"rounds are a tuple of tuples of Transfer, got {rounds!r:.80}")
    for k, r in enumerate(rounds):
        for t in r:
            if not isinstance(t, Transfer):
                raise _Wrong(f"round {k + 1} has {t!r:.80} where a Transfer is expected")
            for rank in (t.source, t.target):
                if not (isinstance(rank, int) and 0 <= rank < n):
                    raise _Wrong(f"round {k + 1} has rank {rank!r}, and ranks are 0 to {n - 1}: {t}")
            if t.source == t.target:
                raise _Wrong(f"in round {k + 1} rank {t.source} sends to itself: {t}")
            if not (isinstance(t.start, int) and isinstance(t.stop, int) and 0 <= t.start < t.stop <= blocks):
                raise _Wrong(f"round {k + 1} has blocks {t.start!r} to {t.stop!r} (exclusive), and blocks are 0 to {blocks - 1}: {t}")


def _by_block(rounds: Rounds) -> dict[int, list[tuple[int, list[Transfer]]]]:
    """For each block its rounds: (number, transfers)."""
    out: dict[int, list[tuple[int, list[Transfer]]]] = defaultdict(list)
    for k, r in enumerate(rounds):
        now: dict[int, list[Transfer]] = defaultdict(list)
        for t in r:
            for b in range(t.start, t.stop):
                now[b].append(t)
        for b, found in now.items():
            out[b].append((k, found))
    return out


def _check_block(carries: str, n: int, block: int, rounds: list[tuple[int, list[Transfer]]]) -> None:
    """Run the rounds of one block: blocks do not depend on each other."""
    owner, source, target = block, block, range(n)
    if carries == "exchange":
        source, owner = divmod(block, n)
    if carries in ("reduce", "exchange"):
        target = range(owner, owner + 1)
    summed = carries in ("reduce", "all_reduce")
    has = {k: Terms(1 << k) for k in range(n)} if summed else {source: Terms(1)}
    name = f"block {block}" if carries != "exchange" else f"block {block}, of rank {source} for rank {owner},"
    for k, now in rounds:
        sent = [has.get(t.source) for t in now]
        arrivals = Counter(t.target for t in now)
        for t, terms in zip(now, sent, strict=True):
            if terms is None:
                raise _Wrong(f"in round {k + 1} rank {t.source} sends {name} to rank {t.target} and does not have it")
            if not t.add and arrivals[t.target] > 1:
                raise _Wrong(f"in round {k + 1} rank {t.target} receives {name} {arrivals[t.target]} times, and not all to add")
            if t.add and t.target not in has:
                raise _Wrong(f"in round {k + 1} rank {t.target} adds {name} to a value that it does not have")
            has[t.target] = _sum(has[t.target], terms) if t.add else terms
    expected = Terms((1 << n) - 1 if summed else 1)
    for rank in target:
        found = has.get(rank)
        if found == expected:
            continue
        if found is None:
            raise _Wrong(f"rank {rank} ends without {name if carries == 'exchange' else f'{name} of rank {owner}'}")
        left, twice = next(_bits(expected.once & ~found.once), None), next(_bits(found.more), None)
        term = f"without the term of rank {left}" if left is not None else f"with the term of rank {twice} more than once"
        raise _Wrong(f"rank {rank} ends with {name} {term if summed else 'added to itself'}")


def _sum(a: Terms, b: Terms) -> Terms:
    return Terms(a.once | b.once, a.more | b.more | a.once & b.once)


def _bits(bits: int) -> Iterator[int]:
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1
