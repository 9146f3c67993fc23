"""Where ranks are, in words: on which host, and, by the recorder of those that share memory, which collective each completed last."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..native.shared import Memory
from ..native.world import NativeWorld

STARTUP = -1  # in the place of the number of a run

readers: list[Callable[[Memory], None]] = []  # are given the memory in which the ranks of this host leave word, while it can be passed on


class FlightRecord(NamedTuple):
    """How far a rank has come. It passes through JSON."""

    done: str  # the latest collective that it completed, or an empty text
    inside: str  # what it has come to and is not behind, or an empty text
    op: str  # lines that show the operator that it left word of, or none
    step: int  # the number of its run

    @staticmethod
    def of(world: NativeWorld, rank: int) -> FlightRecord:
        op, step = world.whereabouts(rank)
        return FlightRecord(world.latest(rank, done=True), world.latest(rank) if world.inside(rank) else "", op, step)

    def __str__(self) -> str:
        done = self.done or "none"
        return f"{done}; then it was in {self.inside}" if self.inside else done


def trails(world: NativeWorld, ranks: int) -> list[FlightRecord | None]:
    """Those of all ranks that share memory."""
    return [FlightRecord.of(world, rank) for rank in range(ranks)]


def scene(process: int, world: NativeWorld | None, ranks: int) -> str:
    """Lines that say where the process of a rank is, and what every rank completed last, where that is known."""
    return host(process) + (told(trails(world, ranks)) if world is not None else "")


def host(process: int | str, name: str | None = None) -> str:
    """A line that says so of a process; of one of this host if it has no other name."""
    return f"\n  on host {name or socket.gethostname()}, process {process}"


def end_of(rank: int, ranks: int, how: str) -> str:
    """A line that begins what is said of the end of a rank on this host, which nobody watched."""
    return f"fluidx: rank {rank} of {ranks}, on host {socket.gethostname()}, {how}"


def whereabouts(trail: FlightRecord | None) -> str:
    """Lines that show the operator that a rank left word of, and the run."""
    if trail is None:
        return ""
    run = "the startup program" if trail.step == STARTUP else f"step {trail.step}"
    if trail.op:
        return f"{trail.op}\n  in {run}"
    return f"\n  after {run}" if trail.done else ""


def told(trails: Sequence[FlightRecord | None], beside: Callable[[int], str] = lambda rank: "") -> str:
    """Lines that say it of every rank, each with what is told of it `beside`; none where nothing is known of any."""
    if not any(trails):
        return ""
    lines = [f"\n    rank {r}: {trail or 'not known'}{beside(r)}" for r, trail in enumerate(trails)]
    return "\n  the last collective that each rank completed:" + "".join(lines)
