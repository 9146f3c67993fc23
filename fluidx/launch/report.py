"""What is said of a job that failed: which rank, why, where it was, and how far all of them had come."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..comm import flight_recorder
from ..comm.flight_recorder import FlightRecord


class Failure(NamedTuple):
    """Why a rank did not come to the end of its script. `how` tells causes from consequences."""

    rank: int
    how: str  # failed, lost: by itself; waited: too long for another; left: nobody knows why; stopped: because of another; interrupted
    text: str
    trace: str = ""
    status: int = 1
    at: int | None = None  # the rank that is to blame
    op: str = ""  # the operator of a group in which it waited


def of_status(rank: int, status: int | None, ended: bool) -> Failure:
    """What a status of a rank's process other than 0 says, if `ended` of one whose script came to its end; None: there was none."""
    if status is None:
        return Failure(rank, "lost", "its process ended in the middle of the script")
    if status < 0:
        how = f"its process was killed by signal {-status} ({signal.Signals(-status).name})"
        return Failure(rank, "lost", how, status=128 - status)
    how = f"its script exited with status {status}" if ended else f"its process exited with status {status} in the middle of the script"
    return Failure(rank, "lost", how, status=max(status, 1))


class JobReport(NamedTuple):
    """What is known of the ranks of a job when it has ended."""

    trails: Sequence[FlightRecord | None]
    places: Mapping[int, tuple[int, str | None]]  # of each rank the process, and the name of its host unless it is this one
    failures: Mapping[int, Failure]
    ended: Mapping[int, int]  # statuses of scripts that came to their end
    halted: Collection[int] = ()  # whose processes somebody had stopped
    tails: Mapping[int, Sequence[str]] = {}  # what each wrote last, where nobody saw it


def cause(failures: Mapping[int, Failure]) -> Failure:
    """The first failure of the kind that says most."""
    for kind in (("failed", "lost"), ("waited",), ("left",), ("interrupted",)):
        for failure in failures.values():
            if failure.how in kind:
                return failure
    return next(iter(failures.values()))


def lost(failures: Mapping[int, Failure]) -> set[int]:
    """The ranks that failed by themselves, or did not arrive."""
    first = cause(failures)
    return {f.rank for f in failures.values() if f.how in ("failed", "lost")} or {first.rank if first.at is None else first.at}


def report(seen: JobReport) -> str:
    """The report, without a line break at its end."""
    first = cause(seen.failures)
    blamed = first.rank if first.at is None else first.at
    lines = [first.text if first.text.startswith("rank ") else f"rank {first.rank}: {first.text}"]
    if blamed != first.rank:
        last_calls = flight_recorder.whereabouts(seen.trails[blamed])
        lines[0] = f"rank {blamed} did not arrive{_whereabouts(seen, blamed)}{last_calls}\n  {lines[0]}"
    elif "\n  in " not in lines[0]:  # it says nothing of it itself
        lines[0] += flight_recorder.whereabouts(seen.trails[blamed])
    if "group=" not in lines[0] and (waits := _waits(seen, blamed)):
        lines[0] += f"\n  rank {waits[0]} waited{waits[1]}"
    lines[0] += flight_recorder.host(*seen.places.get(blamed, ("unknown", None)))
    if first.trace:
        lines.append(f"  traceback of rank {first.rank}:\n{first.trace.rstrip()}")
    if tail := seen.tails.get(blamed):
        lines.append(f"  last output of rank {blamed}:\n" + "\n".join(f"    {line}" for line in tail))
    return "\n".join(lines) + flight_recorder.told(seen.trails, lambda r: _whereabouts(seen, r))


def _waits(seen: JobReport, blamed: int) -> tuple[int, str] | None:
    """A rank that waited for others, and lines that show its operator: by its own words, or by the trail that it left."""
    told = [(f.rank, f.op) for f in seen.failures.values()]
    left = [(rank, trail.op) for rank, trail in enumerate(seen.trails) if trail is not None and trail.inside and rank != blamed]
    return next(((rank, op) for rank, op in told + left if op), None)


def _whereabouts(seen: JobReport, rank: int) -> str:
    failure = seen.failures.get(rank)
    if rank in seen.halted:
        return ": its process was stopped, as by SIGSTOP"
    if failure is None:
        return ": its script had ended" if rank in seen.ended else ": it reported nothing until it was ended"
    return {"stopped": ": stopped", "waited": ": waited too long", "interrupted": ": interrupted"}.get(failure.how, "")
