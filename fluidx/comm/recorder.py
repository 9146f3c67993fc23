"""The flight recorder of ranks that share memory, in words: which collective each of them completed last."""

from __future__ import annotations

from collections.abc import Callable

from ..native.world import World


def told(world: World, ranks: int, beside: Callable[[int], str] = lambda rank: "") -> str:
    """Lines that say it of every rank, each with what is told of it `beside`."""
    lines = [f"\n    rank {r}: {_of(world, r)}{beside(r)}" for r in range(ranks)]
    return "\n  the last collective that each rank completed:" + "".join(lines)


def _of(world: World, rank: int) -> str:
    done, came = world.latest(rank, done=True) or "none", world.latest(rank)
    return f"{done}; then it was in {came}" if world.inside(rank) else done
