"""Where ranks are, in words: on which host, and, by the recorder of those that share memory, which collective each completed last."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ..native.world import World

STARTUP = -1  # in the place of the number of a run


def scene(process: int, world: World | None, ranks: int) -> str:
    """Lines that say where the process of a rank is, and what every rank completed last, where that is known."""
    return host(process) + (told(world, ranks) if world is not None else "")


def host(process: int | str) -> str:
    """A line that says so of a process."""
    return f"\n  on host {socket.gethostname()}, process {process}"


def end_of(rank: int, ranks: int, how: str) -> str:
    """A line that begins what is said of the end of a rank on this host, which nobody watched."""
    return f"fluidx: rank {rank} of {ranks}, on host {socket.gethostname()}, {how}"


def whereabouts(world: World, rank: int) -> str:
    """Lines that show the operator that a rank left word of, and the run."""
    op, step = world.whereabouts(rank)
    run = "the startup program" if step == STARTUP else f"step {step}"
    if op:
        return f"{op}\n  in {run}"
    return f"\n  behind {run}" if world.latest(rank, done=True) else ""


def told(world: World, ranks: int, beside: Callable[[int], str] = lambda rank: "") -> str:
    """Lines that say it of every rank, each with what is told of it `beside`."""
    lines = [f"\n    rank {r}: {_of(world, r)}{beside(r)}" for r in range(ranks)]
    return "\n  the last collective that each rank completed:" + "".join(lines)


def _of(world: World, rank: int) -> str:
    done, came = world.latest(rank, done=True) or "none", world.latest(rank)
    return f"{done}; then it was in {came}" if world.inside(rank) else done
