"""The threads of the ranks: hand one job to all, gather what became of it, and find the rank that is to blame.

A rank has one thread, and a second one beside it where communication runs beside what it computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ... import native
from ...comm.base import CommAborted, CommError, CommTimeout
from ...ir.operator import Operator
from ...native.world import NativeWorld
from ..error_text import describe_error, where
from ..places import CUDAPlace, Place, array_module
from .affinity import Cores, cores_of, keep_to

GRACE = 5.0  # seconds that the other ranks have to stop in when one has failed

Job = Callable[[int], Any]


class Outcome(NamedTuple):
    """What became of a job on one rank."""

    value: Any
    error: BaseException | None


class _Order:
    """A job for each thread. Outcomes, by the thread's number, are kept here before they are announced, so that an interrupted caller loses
    none."""

    def __init__(self, jobs: Sequence[Job], world: Any, ranks: int):
        self.jobs, self.world, self.ranks = jobs, world, ranks
        self.outcomes: dict[int, Outcome] = {}
        self.news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.cancelled = False

    def __len__(self) -> int:
        return self.ranks * len(self.jobs)

    def run(self, rank: int, beside: bool) -> None:
        number = rank + self.ranks * beside
        if number in self.outcomes:  # it came twice, because the caller was interrupted while handing it out
            return
        try:
            if self.cancelled:
                raise CommAborted("the run was interrupted before this rank began")
            native.share_cores(self.ranks)
            outcome = Outcome(self.jobs[beside](rank), None)
        except BaseException as e:  # whatever it is, the other ranks must not wait for this one
            self.world.abort(e)
            outcome = Outcome(None, e)
        self.outcomes[number] = outcome
        self.news.put(number)

    def by_rank(self) -> dict[int, Outcome]:
        """What became of the ranks of which no thread is missing."""
        threads = {r: {n: o for n in range(r, len(self), self.ranks) if (o := self.outcomes.get(n))} for r in range(self.ranks)}
        return {r: merged_outcome(found) for r, found in threads.items() if len(found) == len(self.jobs)}


class _Worker:
    """A thread of one rank: takes orders from its inbox, and None as the sign to end. Where ranks meet in C it waits there too, and what
    is launched on it meanwhile never comes to Python."""

    def __init__(self, rank: int, place: Place, shared: NativeWorld | None, beside: bool, cores: Cores | None):
        self.rank, self.place, self.shared, self.beside, self.cores = rank, place, shared, beside, cores
        self.inbox: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=f"fluidx-rank-{rank}{'-beside' * beside}", daemon=True)
        self.thread.start()

    def put(self, order: _Order | None) -> None:
        self.inbox.put(order)
        if self.shared is not None:
            self.shared.knock(self.rank, self.beside)

    def _take(self) -> _Order | None:
        while self.shared is not None:
            try:
                return self.inbox.get_nowait()
            except queue.Empty:
                self.shared.serve(self.rank, self.beside)
        return self.inbox.get()

    def _serve(self) -> None:
        keep_to(self.cores)
        if isinstance(self.place, CUDAPlace):
            array_module(self.place).cuda.Device(self.place.device).use()
        while (order := self._take()) is not None:
            order.run(self.rank, self.beside)
            del order  # an idle thread must not keep the executor alive


class RankThreads:
    """The threads of all ranks of one executor."""

    def __init__(self, places: Sequence[Place], world: Any, timeout: float):
        self.places, self.timeout = list(places), timeout
        self.cores = cores_of(len(self.places))
        self.workers: list[_Worker] = []  # of all ranks in their order, then those beside them
        self.replace_threads(world)

    def run(self, jobs: Sequence[Job], world: Any, outcomes: dict[int, Outcome]) -> None:
        """`jobs[0](rank)` on every rank at once, and `jobs[1](rank)`, if it is given, beside it; `outcomes` is filled, except for ranks
        that are stuck after another has failed.

        An exception in the caller, such as Ctrl-C, stops the ranks before it goes on.
        """
        if len(jobs) > 1:
            self.add_second_threads(world)
        order = _Order(jobs, world, len(self.places))
        try:
            self.hand_out(order)
            self.collect(order)
        except BaseException as e:
            order.cancelled = True
            world.abort(e)
            self.hand_out(order)  # a thread that did not get it yet shall say so
            self.collect(order, GRACE)
            raise
        finally:
            outcomes.update(order.by_rank())

    def hand_out(self, order: _Order) -> None:
        for w in self.workers:
            if w.beside < len(order.jobs):
                w.put(order)

    def collect(self, order: _Order, wait: float | None = None) -> None:
        """Wait for all outcomes. Once a rank has failed, the others get little time to notice: one that is stuck is left behind."""
        deadline = None if wait is None else time.monotonic() + wait
        while len(order.outcomes) < len(order):
            try:
                number = order.news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if order.outcomes[number].error is not None and deadline is None:
                deadline = time.monotonic() + min(self.timeout, GRACE)

    def replace_threads(self, world: Any) -> None:
        """New threads, for a world that nobody is stuck in; those of the old one end when they can."""
        stop(self.workers)
        self.workers += self._made(world, False)

    def add_second_threads(self, world: Any) -> None:
        """See that every rank has a second thread."""
        if len(self.workers) == len(self.places):
            self.workers += self._made(world, True)

    def _made(self, world: Any, beside: bool) -> list[_Worker]:
        shared = getattr(world, "shared", None)
        return [_Worker(r, p, shared, beside, cores) for r, (p, cores) in enumerate(zip(self.places, self.cores, strict=True))]


def stop(workers: list[_Worker]) -> None:
    """Tell threads to end."""
    for w in workers:
        w.put(None)
    workers.clear()


def merged_outcome(threads: Mapping[int, Outcome]) -> Outcome:
    """What became of a rank, of what became of its threads: the first gives the value, and one that failed of its own accord the error."""
    wrong = any(o.error is not None for o in threads.values())
    return Outcome(threads[min(threads)].value, first_failure(threads)[1] if wrong else None)


def first_failure(outcomes: Mapping[int, Outcome]) -> tuple[int, BaseException]:
    """The rank, or thread, that failed first of its own accord, and its error: the others failed because it did."""
    errors = [(r, e) for r in sorted(outcomes) if (e := outcomes[r].error) is not None]
    causes = [(r, e) for r, e in errors if not isinstance(root_cause(e), CommAborted)] or errors
    # a rank that only waited too long is a consequence when another one says what went wrong
    causes = [(r, e) for r, e in causes if not isinstance(root_cause(e), CommTimeout)] or causes
    return causes[0]


def diagnose(
    rank: int, error: BaseException, outcomes: Mapping[int, Outcome], running: Callable[[int], Operator | None]
) -> tuple[int, str]:
    """The rank to blame, and what to say of it. `running(rank)` is the operator that a rank has come to."""
    text, at = f"rank {rank}: {describe_error(error)}", root_cause(error)
    if not isinstance(error, Exception):  # not a failure of the operator, but it was there
        text += where(running(rank))
    if not isinstance(at, CommError) or at.rank is None:
        return rank, text
    if at.rank not in outcomes:
        text += f"\n  rank {at.rank} is stuck{where(running(at.rank))}"
    elif outcomes[at.rank].error is None:
        text += f"\n  rank {at.rank} reached the end of its program"
    return at.rank, text


def root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
