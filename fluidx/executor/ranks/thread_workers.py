"""RankThreads: the threads of ranks in one process. It runs a job on all of them, gathers the outcomes, and finds the rank that failed
first.

A rank has one thread, and a second one if communication overlaps with compute.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ... import native
from ...comm.base import CommAborted, CommError, CommTimeout, World
from ...ir.operator import Operator
from ...native.world import NativeWorld
from ..error_text import describe_error, where
from ..places import CUDAPlace, Place, array_module, using
from .affinity import Cores, cores_of, keep_to, kept_to

GRACE = 5.0  # seconds in which the other ranks must stop after one has failed

Job = Callable[[int], Any]


class Outcome(NamedTuple):
    """The result or the error of a job on one rank."""

    value: Any
    error: BaseException | None


# (the first error, its rank or None for one of the caller, the outcomes of the ranks that have ended, those that are stuck)
Failed = Callable[[BaseException, int | None, dict[int, Outcome], list[int]], NoReturn]


class _Order:
    """A job for each thread. Outcomes, by thread number, are stored here before they are announced, so that an interrupted caller loses
    none."""

    def __init__(self, jobs: Sequence[Job], world: World, ranks: int):
        self.jobs, self.world, self.ranks = jobs, world, ranks
        self.outcomes: dict[int, Outcome] = {}
        self.news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.cancelled = False

    def __len__(self) -> int:
        return self.ranks * len(self.jobs)

    def run(self, rank: int, beside: bool) -> None:
        number = rank + self.ranks * beside
        if number in self.outcomes:  # the order came twice: the caller was interrupted while handing it out
            return
        try:
            if self.cancelled:
                raise CommAborted("the run was interrupted before this rank started")
            native.share_cores(self.ranks)
            outcome = Outcome(self.jobs[beside](rank), None)
        except BaseException as e:  # after any error, the other ranks must not wait for this one
            self.world.abort(e)
            outcome = Outcome(None, e)
        self.outcomes[number] = outcome
        self.news.put(number)

    def by_rank(self) -> dict[int, Outcome]:
        """The outcomes of the ranks whose threads have all ended the job."""
        threads = {r: {n: o for n in range(r, len(self), self.ranks) if (o := self.outcomes.get(n))} for r in range(self.ranks)}
        return {r: merged_outcome(found) for r, found in threads.items() if len(found) == len(self.jobs)}


class _Worker:
    """A thread of one rank. It takes orders from its inbox; None ends it. If collectives are in C, it waits for orders in C, and runs that
    are launched from C do not enter Python."""

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
    """The threads of ranks of one executor. If they are all ranks of the world and it has calls in C, they wait for orders in C. One rank
    alone has no thread: it runs on the caller's."""

    def __init__(self, places: Sequence[Place], world: World, timeout: float, cores: Sequence[Cores | None] | None = None):
        self.places, self.timeout = list(places), timeout
        self.cores = cores_of(len(self.places)) if cores is None else cores
        self.workers: list[_Worker] = []  # the first threads of all ranks, then the second threads
        self.replace_threads(world)

    def results(self, jobs: Sequence[Job], world: World, fail: Failed) -> list[Any]:
        """What `jobs[0](rank)` returns, by rank, with all ranks at once, and `jobs[1](rank)` on second threads. The first failure stops all
        ranks and goes to `fail`, which raises."""
        if len(self.places) == 1:
            try:
                with using(self.places[0]), kept_to(self.cores[0]):
                    return [jobs[0](0)]
            except BaseException as e:
                fail(e, 0, {}, [])
        outcomes: dict[int, Outcome] = {}
        try:
            self.run(jobs, world, outcomes)
        except BaseException as e:  # Ctrl-C
            fail(e, None, outcomes, self._lost(outcomes))
        lost = self._lost(outcomes)
        if lost or any(o.error is not None for o in outcomes.values()):
            rank, error = first_failure(outcomes)
            fail(error, rank, outcomes, lost)
        return [outcomes[r].value for r in range(len(self.places))]

    def _lost(self, outcomes: Mapping[int, Outcome]) -> list[int]:
        return [r for r in range(len(self.places)) if r not in outcomes]

    def run(self, jobs: Sequence[Job], world: World, outcomes: dict[int, Outcome]) -> None:
        """Run `jobs[0](rank)` on the first thread of every rank and `jobs[1](rank)`, if given, on the second. Fills `outcomes`, except for
        ranks that are stuck after another one has failed.

        An exception in the caller, such as Ctrl-C, stops the ranks before it is raised again.
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
            self.hand_out(order)  # a thread that did not get the order yet must report an outcome
            self.collect(order, GRACE)
            raise
        finally:
            outcomes.update(order.by_rank())

    def hand_out(self, order: _Order) -> None:
        for w in self.workers:
            if w.beside < len(order.jobs):
                w.put(order)

    def collect(self, order: _Order, wait: float | None = None) -> None:
        """Wait for all outcomes. After a rank has failed, the others get `GRACE` seconds; a rank that is stuck then is given up."""
        deadline = None if wait is None else time.monotonic() + wait
        while len(order.outcomes) < len(order):
            try:
                number = order.news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if order.outcomes[number].error is not None and deadline is None:
                deadline = time.monotonic() + min(self.timeout, GRACE)

    def replace_threads(self, world: World) -> None:
        """Start new threads for a new world. Old threads end when they can."""
        stop(self.workers)
        if len(self.places) > 1:
            self.workers += self._made(world, False)

    def add_second_threads(self, world: World) -> None:
        """Start a second thread for every rank, if there is none yet."""
        if len(self.workers) == len(self.places):
            self.workers += self._made(world, True)

    def _made(self, world: World, beside: bool) -> list[_Worker]:
        shared, who = world.shared if len(self.places) == world.world_size else None, zip(self.places, self.cores, strict=True)
        return [_Worker(r, place, shared, beside, cores) for r, (place, cores) in enumerate(who)]


def stop(workers: list[_Worker]) -> None:
    """Make threads end after their current job."""
    for w in workers:
        w.put(None)
    workers.clear()


def merged_outcome(threads: Mapping[int, Outcome]) -> Outcome:
    """The outcome of a rank, from its threads: the value of the first thread, or the error of the thread that failed first."""
    wrong = any(o.error is not None for o in threads.values())
    return Outcome(threads[min(threads)].value, first_failure(threads)[1] if wrong else None)


def first_failure(outcomes: Mapping[int, Outcome]) -> tuple[int, BaseException]:
    """The rank (or thread) whose error caused the others, and this error."""
    errors = [(r, e) for r in sorted(outcomes) if (e := outcomes[r].error) is not None]
    causes = [(r, e) for r, e in errors if not isinstance(root_cause(e), CommAborted)] or errors
    # a timeout is a consequence if another rank has a different error
    causes = [(r, e) for r, e in causes if not isinstance(root_cause(e), CommTimeout)] or causes
    return causes[0]


def diagnose(
    rank: int, error: BaseException, outcomes: Mapping[int, Outcome], running: Callable[[int], Operator | None]
) -> tuple[int, str]:
    """The rank that caused a failure, and the error text. `running(rank)` is the current operator of a rank."""
    text, at = f"rank {rank}: {describe_error(error)}", root_cause(error)
    if not isinstance(error, Exception):  # not caused by the operator, but it was the current one
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
