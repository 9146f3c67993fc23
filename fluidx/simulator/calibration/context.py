"""The bytes of a process of a rank beside the arrays of its plan: the interpreter with what it has loaded, as the system shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...executor.places import process_places
from ...executor.ranks.parallel_executor import ParallelExecutor
from ...ir.errors import ExecutionError
from .programs import small_network
from .steps import started_job


def context_bytes(otherwise: float) -> float:
    """The resident bytes of a rank's process that trains a network of next to no bytes; `otherwise` where ranks cannot be processes, or
    the system does not say."""
    program = small_network()
    try:
        ranks, feed = started_job(program, process_places(2))
    except ExecutionError:
        return otherwise
    try:
        for _ in range(3):
            ranks.run(program.fetch, feed)
        found = [resident_bytes(Path(f"/proc/{pid}/status"), ("VmRSS",)) for pid in process_ids(ranks)]
    except OSError:
        return otherwise
    finally:
        ranks.close()
    return max(found) or otherwise


def process_ids(ranks: ParallelExecutor) -> Sequence[int]:
    """The processes of an executor on `process_places`."""
    return [p.pid for p in ranks.pool.processes]


def resident_bytes(status: Path, keys: Sequence[str]) -> int:
    """The sum of some lines of a process's status, which are in KiB."""
    lines = (line.partition(":") for line in status.read_text(encoding="utf-8").splitlines())
    return sum(1024 * int(value.split()[0]) for key, _, value in lines if key in keys)
