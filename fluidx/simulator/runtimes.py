"""Runtimes of other frameworks over the plan of data_parallel: when they send gradients, and how many together.

"ddp": gradients fill buckets of 25 MiB, the first one of 1 MiB, in the order in which they are ready; a full bucket is sent beside
backward, and the update waits for all. "horovod": every millisecond the gradients that are ready on all ranks are fused, up to 128 MB,
copied together, sent, and copied back.
Sources: Li et al., "PyTorch Distributed" (2020); Sergeev and Del Balso, "Horovod" (2018), and the defaults of its options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..executor.plan.records import Plan
from ..hardware.records import Hardware
from ..ir.errors import ExecutionError, nearest
from ..transpiler.strategies.base import Strategy
from .estimate import CostEstimate
from .schedule import Compute, Item, Meeting, Wait

RUNTIMES = ("static", "ddp", "horovod")
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes at which a bucket of DDP is full
CYCLE, FUSED = 1e-3, 128 << 20  # Horovod: seconds of a cycle, most bytes that are sent together


class CollectivePrices(Protocol):
    """What a collective costs."""

    def collective(self, method: str, members: Sequence[int], nbytes: int, groups: Sequence[Sequence[int]]) -> CostEstimate:
        """The seconds among `members`."""


def check_runtime(runtime: str, strategy: Strategy) -> None:
    """Raise ExecutionError for an unknown runtime, or a strategy that such a runtime does not run."""
    if runtime not in RUNTIMES:
        raise ExecutionError(f"unknown runtime {runtime!r}; {nearest(str(runtime), RUNTIMES, 'there are')}")
    if runtime != "static" and (strategy.name != "data_parallel" or dict(strategy.options).get("bucket_mb") != 0):
        raise ExecutionError(
            f"runtime={runtime!r} makes its own buckets of gradients, and runs data_parallel only; transpile with "
            f"strategies.data_parallel(bucket_mb=0), got {strategy!r}"
        )


def gradients(items: Sequence[Item]) -> list[int]:
    """The numbers of the meetings that add up gradients, in the order in which these are ready."""
    return [k for k, item in enumerate(items) if isinstance(item, Meeting) and item.nbytes]


def ready_times(items: Sequence[Item], slow: float = 1.0) -> list[float]:
    """When each gradient is ready, in seconds of compute.

    >>> sent = Meeting((1,), "dp", (0, 1), 0.5, 8)
    >>> ready_times([Compute((0,), (1.0,)), sent, Compute((2,), (2.0,)), sent])
    [1.0, 3.0]
    """
    now, found = 0.0, []
    for item in items:
        if isinstance(item, Compute) and not item.beside:
            now += item.total * slow
        elif isinstance(item, Meeting) and item.nbytes:
            found.append(now)
    return found


def ddp_buckets(nbytes: Sequence[int]) -> list[range]:
    """The gradients of each bucket, as ranges of their numbers. A bucket is full when it has as many bytes as it takes, or more.

    >>> ddp_buckets([1 << 20, 20 << 20, 20 << 20, 1 << 20])
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    found: list[range] = []
    start = held = 0
    for k, n in enumerate(nbytes):
        held += n
        if held >= (BUCKET if found else FIRST_BUCKET):
            found.append(range(start, k + 1))
            start, held = k + 1, 0
    return found + ([range(start, len(nbytes))] if start < len(nbytes) else [])


def horovod_cycles(ready: Sequence[float], nbytes: Sequence[int], seconds: Sequence[float]) -> list[tuple[range, float]]:
    """The gradients that Horovod sends together, as ranges, each with the time at which it starts. `seconds` are those that sending each
    gradient takes, with its copies; together they take the sum at most. A cycle begins a millisecond after the one before, or when that has
    ended.

    >>> horovod_cycles([0.0004, 0.0009, 0.0011], [8, 8, 8], [0.0001, 0.0001, 0.0001])
    [(range(0, 2), 0.001), (range(2, 3), 0.002)]
    """
    found: list[tuple[range, float]] = []
    start, now = 0, CYCLE
    while start < len(ready):
        stop, held = start, 0
        while stop < len(ready) and ready[stop] <= now and (stop == start or held + nbytes[stop] <= FUSED):
            held += nbytes[stop]
            stop += 1
        if stop > start:
            found.append((range(start, stop), now))
        now = max(now + CYCLE, now + sum(seconds[start:stop]))
        start = stop
    return found


class GradientRuntime:
    """How a runtime sends the gradients of a program: the same on all ranks. A gradient is ready when it is so on the last of them."""

    def __init__(self, runtime: str, machine: Hardware, prices: CollectivePrices):
        self.runtime, self.machine, self.prices = runtime, machine, prices
        self.sent: list[tuple[range, float]] = []  # gradients that are sent together, and when at the earliest

    def decide(self, ranks: Sequence[tuple[Sequence[Item], float]]) -> None:
        """Decide from the items of each class of ranks, with the factor on its compute."""
        items = ranks[0][0]
        numbers = gradients(items)
        meetings = [items[k] for k in numbers]
        nbytes = [m.nbytes for m in meetings]  # type: ignore[attr-defined]
        if self.runtime == "ddp":
            self.sent = [(some, 0.0) for some in ddp_buckets(nbytes)]
            return
        ready = [max(times) for times in zip(*(ready_times(given, slow) for given, slow in ranks), strict=True)]
        seconds = [m.seconds + 2 * self._copy(m.nbytes) for m in meetings]  # type: ignore[attr-defined]
        self.sent = horovod_cycles(ready, nbytes, seconds)

    def items(self, items: Sequence[Item], plan: Plan, slow: float = 1.0) -> list[Item]:
        """The items of a rank under this runtime."""
        numbers = gradients(items)
        last = {numbers[some[-1]]: (some, at) for some, at in self.sent}
        ready = dict(zip(numbers, ready_times(items, slow), strict=True))
        dropped = set(numbers)
        out: list[Item] = []
        number: dict[int, int] = {}
        free = 0.0
        for k, item in enumerate(items):
            if k in last:
                some, at = last[k]
                sent = self._together([items[numbers[j]] for j in some], plan)
                before, behind = self._around(sum(items[numbers[j]].nbytes for j in some))  # type: ignore[attr-defined]
                begins = max(free, ready[k])
                delay = max(0.0, at - begins) if self.runtime == "horovod" else 0.0
                out += self._beside(sent, delay + before)
                out.append(sent)
                out += self._beside(sent, behind)
                free = begins + delay + before + sent.seconds + behind
                if k == numbers[-1]:
                    out.append(Wait(sent.steps, item=len(out) - 1))
            elif k in dropped or (isinstance(item, Wait) and item.item in dropped):
                continue
            else:
                number[k] = len(out)
                out.append(replace(item, item=number[item.item]) if isinstance(item, Wait) else item)
        return out

    @staticmethod
    def _beside(sent: Meeting, seconds: float) -> list[Item]:
        return [Compute(sent.steps[:1], (seconds,), beside=True)] if seconds else []

    def _together(self, meetings: Sequence[Item], plan: Plan) -> Meeting:
        first = meetings[0]
        assert isinstance(first, Meeting)
        nbytes = sum(m.nbytes for m in meetings)  # type: ignore[attr-defined]
        steps = tuple([s for m in meetings for s in m.steps])
        seconds = self.prices.collective("all_reduce", first.members, nbytes, plan.program.groups[first.group]).seconds
        return replace(first, steps=steps, nbytes=nbytes, seconds=seconds, beside=True)

    def _copy(self, nbytes: int) -> float:
        device = self.machine.device
        return 2 * nbytes / (device.bandwidth.value * device.bandwidth_share.value)

    def _around(self, nbytes: int) -> tuple[float, float]:
        """Seconds before and behind sending: Horovod copies into its buffer and back."""
        return (self._copy(nbytes), self._copy(nbytes)) if self.runtime == "horovod" else (0.0, 0.0)


__all__ = ["RUNTIMES", "GradientRuntime", "check_runtime", "ddp_buckets", "gradients", "horovod_cycles", "ready_times"]
