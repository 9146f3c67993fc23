"""The flight recorder: texts that name a rank's host, its current operator and the collective that it completed last."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..native.shared import Memory
from ..native.world import NativeWorld

STARTUP = -1  # stands for the startup program, instead of the number of a run

readers: list[Callable[[Memory], None]] = []  # called with the memory of this host's flight recorder, while its file is open


class FlightRecord(NamedTuple):
    """The progress of a rank, as JSON data."""

    done: str  # the last collective that it completed, or ""
    inside: str  # the collective that it is in, or ""
    op: str  # lines that show its current operator, or ""
    step: int  # the number of its run

    @staticmethod
    def of(world: NativeWorld, rank: int) -> FlightRecord:
        op, step = world.whereabouts(rank)
        return FlightRecord(world.latest(rank, done=True), world.latest(rank) if world.inside(rank) else "", op, step)

    def __str__(self) -> str:
        done = self.done or "none"
        return f"{done}; then it was in {self.inside}" if self.inside else done


def flight_records(world: NativeWorld, ranks: int) -> list[FlightRecord | None]:
    """The flight records of all ranks that share memory."""
    return [FlightRecord.of(world, rank) for rank in range(ranks)]


def failure_context(process: int, world: NativeWorld | None, ranks: int) -> str:
    """Lines that name the host and process of a rank, and, if known, the last completed collective of every rank."""
    return host_line(process) + (last_collectives(flight_records(world, ranks)) if world is not None else "")


def host_line(process: int | str, name: str | None = None) -> str:
    """A line that names a process and its host (default: this host)."""
    return f"\n  on host {name or socket.gethostname()}, process {process}"


def end_line(rank: int, ranks: int, how: str, name: str | None = None) -> str:
    """The first line of a report about the end of a rank that no launcher watched, on a host (default: this one)."""
    return f"fluidx: rank {rank} of {ranks}, on host {name or socket.gethostname()}, {how}"


def position(trail: FlightRecord | None) -> str:
    """Lines that show the recorded operator of a rank, and its run."""
    if trail is None:
        return ""
    run = "the startup program" if trail.step == STARTUP else f"step {trail.step}"
    if trail.op:
        return f"{trail.op}\n  in {run}"
    return f"\n  after {run}" if trail.done else ""


def last_collectives(trails: Sequence[FlightRecord | None], beside: Callable[[int], str] = lambda rank: "") -> str:
    """Lines with the last collective of every rank; `beside(rank)` is appended to each. "" if nothing is known of any rank."""
    if not any(trails):
        return ""
    lines = [f"\n    rank {r}: {trail or 'not known'}{beside(r)}" for r, trail in enumerate(trails)]
    return "\n  the last collective that each rank completed:" + "".join(lines)
