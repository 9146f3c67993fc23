"""The report of a failed job: which rank failed, why, its operator, and the last collective of every rank."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..comm import flight_recorder
from ..comm.flight_recorder import FlightRecord


class Failure(NamedTuple):
    """Why a rank did not reach the end of its script. `how` separates causes from consequences."""

    rank: int
    # failed, lost: by itself; waited: timed out waiting for another; left: unknown; stopped: because of another; interrupted
    how: str
    text: str
    trace: str = ""
    status: int = 1
    at: int | None = None  # the rank that caused it
    op: str = ""  # the collective in which it waited


def of_status(rank: int, status: int | None, ended: bool) -> Failure:
    """The failure for a rank's exit status other than 0 (None: unknown). `ended`: did its script reach the end?"""
    if status is None:
        return Failure(rank, "lost", "its process ended in the middle of the script")
    if status < 0:
        how = f"its process was killed by signal {-status} ({signal.Signals(-status).name})"
        return Failure(rank, "lost", how, status=128 - status)
    how = f"its script exited with status {status}" if ended else f"its process exited with status {status} in the middle of the script"
    return Failure(rank, "lost", how, status=max(status, 1))


class JobReport(NamedTuple):
    """The known facts about the ranks of a job that has ended."""

    trails: Sequence[FlightRecord | None]
    places: Mapping[int, tuple[int, str | None]]  # by rank: the process, and the name of its host (None: this host)
    failures: Mapping[int, Failure]
    ended: Mapping[int, int]  # exit statuses of scripts that reached their end
    halted: Collection[int] = ()  # ranks whose processes were stopped
    tails: Mapping[int, Sequence[str]] = {}  # the last output of ranks that was not shown


def cause(failures: Mapping[int, Failure]) -> Failure:
    """The first failure of the most significant kind."""
    for kind in (("failed", "lost"), ("waited",), ("left",), ("interrupted",)):
        for failure in failures.values():
            if failure.how in kind:
                return failure
    return next(iter(failures.values()))


def lost(failures: Mapping[int, Failure]) -> set[int]:
    """The ranks that caused the failure, or did not arrive."""
    first = cause(failures)
    return {f.rank for f in failures.values() if f.how in ("failed", "lost")} or {first.rank if first.at is None else first.at}


def report(seen: JobReport) -> str:
    """The report, without a line break at its end."""
    first = cause(seen.failures)
    blamed = first.rank if first.at is None else first.at
    lines = [first.text if first.text.startswith("rank ") else f"rank {first.rank}: {first.text}"]
    if blamed != first.rank:
        last_calls = flight_recorder.position(seen.trails[blamed])
        lines[0] = f"rank {blamed} did not arrive{_whereabouts(seen, blamed)}{last_calls}\n  {lines[0]}"
    elif "\n  in " not in lines[0]:  # the text does not name the operator itself
        lines[0] += flight_recorder.position(seen.trails[blamed])
    if "group=" not in lines[0] and (waits := _waits(seen, blamed)):
        lines[0] += f"\n  rank {waits[0]} waited{waits[1]}"
    lines[0] += flight_recorder.host_line(*seen.places.get(blamed, ("unknown", None)))
    if first.trace:
        lines.append(f"  traceback of rank {first.rank}:\n{first.trace.rstrip()}")
    if tail := seen.tails.get(blamed):
        lines.append(f"  last output of rank {blamed}:\n" + "\n".join(f"    {line}" for line in tail))
    return "\n".join(lines) + flight_recorder.last_collectives(seen.trails, lambda r: _whereabouts(seen, r))


def _waits(seen: JobReport, blamed: int) -> tuple[int, str] | None:
    """A rank that waited for others, with lines that show its operator: from its own report, or from its flight record."""
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
