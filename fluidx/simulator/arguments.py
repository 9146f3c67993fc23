"""The arguments of a prediction: errors for those that mean nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any

from ..ir.errors import ExecutionError, FeedError, nearest
from ..transpiler.transpiler import DistributeTranspiler


def check_transpiled(t: Any) -> None:
    """Refuse what has no rank programs."""
    if not isinstance(t, DistributeTranspiler):
        raise ExecutionError(
            f"simulate takes a transpiled program, got {t!r}: give fx.DistributeTranspiler('zero1').transpile(program=main, "
            "startup_program=startup, trainers=8)"
        )


def check_slow(slow: Any, n: int) -> None:
    """Refuse ranks that are not there, and factors that are none.

    >>> check_slow({9: 1.2}, 4)
    Traceback (most recent call last):
    fluidx.ir.errors.ExecutionError: slow={9: 1.2}: there is no rank 9; the ranks are 0 to 3
    """
    if not isinstance(slow, Mapping):
        raise ExecutionError(f"slow is {{rank: factor}}, such as {{3: 1.2}}, got {slow!r}")
    for rank, factor in slow.items():
        if not _whole(rank, 0) or rank >= n:
            raise ExecutionError(f"slow={dict(slow)!r}: there is no rank {rank!r}; the ranks are 0 to {n - 1}")
        if not isinstance(factor, (int, float)) or not 0 < factor < inf:
            raise ExecutionError(f"slow={dict(slow)!r}: the factor of rank {rank} must be above 0 and finite, such as 1.2, got {factor!r}")


def check_sizes(t: DistributeTranspiler, batch: Any, feed: Any, iterations: Any) -> None:
    """Refuse a batch, shapes of feeds and a number of iterations that no run has."""
    data = [n for n, d in t.main.global_block().descs.items() if d.is_data]
    if feed is not None and not isinstance(feed, Mapping):
        raise FeedError(f"feed gives shapes by name, such as {{'image': (64, 784)}}, got {feed!r}")
    for name, shape in (feed or {}).items():
        if name not in data:
            raise FeedError(f"a shape is given for {name!r}, which {t.main.label()} is not fed; {nearest(name, data, 'it is fed')}")
        if not isinstance(shape, Sequence) or isinstance(shape, str) or not all(_whole(size, 0) for size in shape):
            raise FeedError(f"the shape of feed {name!r} must be sizes of at least 0, such as (64, 784), got {shape!r}")
    if batch is not None and not _whole(batch, 1):
        raise FeedError(f"batch must be the number of rows of a step, at least 1, got {batch!r}")
    if iterations is not None and not _whole(iterations, 1):
        raise ExecutionError(f"iterations must be how often a loop runs, at least 1, got {iterations!r}")


def check_rank(rank: Any, n: int) -> int:
    """A rank of n, or an error."""
    if not _whole(rank, 0) or rank >= n:
        raise ExecutionError(f"there is no rank {rank!r}; the ranks are 0 to {n - 1}")
    return rank


def _whole(given: Any, least: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= least


def check_exact(exact: Any) -> None:
    """Refuse what is no number of ranks.

    >>> check_exact("a")
    Traceback (most recent call last):
    fluidx.ir.errors.ExecutionError: exact must be a number of ranks, 0 or more, such as 64, got 'a'
    """
    if not _whole(exact, 0):
        raise ExecutionError(f"exact must be a number of ranks, 0 or more, such as 64, got {exact!r}")


def check_what_if(factors: Mapping[str, Any]) -> None:
    """Refuse factors on a machine that mean nothing.

    >>> check_what_if({"network": 0})
    Traceback (most recent call last):
    fluidx.ir.errors.ExecutionError: what_if: network must be a factor above 0 and finite, such as 2 for twice as much, got 0
    """
    for name, factor in factors.items():
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and isfinite(factor)
        if not (number and (factor > 0 or (name == "latency" and factor == 0))):
            least = "of 0 or more" if name == "latency" else "above 0"
            raise ExecutionError(f"what_if: {name} must be a factor {least} and finite, such as 2 for twice as much, got {factor!r}")


def check_most(name: str, given: Any) -> int:
    """How many of something are shown, or an error."""
    if not _whole(given, 1):
        raise ExecutionError(f"{name} must be an integer of at least 1, got {given!r}")
    return given


def check_fetch(t: DistributeTranspiler, fetch: Any) -> None:
    """Refuse what is no list of variables of the program."""
    if fetch is None:
        return
    if isinstance(fetch, str) or not isinstance(fetch, Sequence) or not all(isinstance(n, str) for n in fetch):
        raise FeedError(f"fetch is a list of names of variables, got {fetch!r}")
    known = t.main.global_block().descs
    for name in fetch:
        if name not in known:
            raise FeedError(f"fetch names {name!r}, which {t.main.label()} does not have; {nearest(name, known, 'it has')}")
