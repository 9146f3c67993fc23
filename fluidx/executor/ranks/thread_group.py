"""ThreadGroup: ranks that are threads of this process, on CPUs or GPUs. One rank runs on the calling thread."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ...comm import flight_recorder
from ...comm.base import LocalWorld
from ...comm.flight_recorder import STARTUP
from ...comm.threads.world import ThreadWorld
from ...ir.errors import ExecutionError, FluidxError, RankError
from ...ir.types import TensorType
from ...native.world import Launch
from ..places import CUDAPlace, array_module, using
from ..plan.allocation import copied
from ..run import observers
from ..run.bound_plan import BoundPlan
from ..scope import Scope
from .affinity import kept_to
from .local_rank import LocalRank
from .rank_group import NOTHING, Feeds, Fetched, GroupSetup, OneProcess, activity
from .rank_programs import RankPrograms, rank_programs
from .thread_workers import GRACE, Job, Outcome, RankThreads, diagnose, first_failure, merged_outcome, stop

if TYPE_CHECKING:
    from .background_writer import SharedCopy

_INTERRUPTED = KeyboardInterrupt("the run was interrupted")


class ThreadStep:
    """The bound plan of each rank. `launch` runs all ranks in one C call, if all their calls are in C."""

    def __init__(self, bounds: list[BoundPlan], launch: Launch | None):
        self.bounds, self.launch = bounds, launch

    @property
    def fetch_types(self) -> list[Sequence[TensorType]]:
        return [b.fetch_types for b in self.bounds]


class ThreadGroup:
    """A RankGroup of threads."""

    ranks_are = "are threads of"
    script = OneProcess()
    pool = None

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failure: BaseException | None = None
        self._begun, self._worlds = STARTUP, 0  # what runs now, and how many worlds there were

    def take_programs(self, given: Any) -> RankPrograms:
        pairs = rank_programs(given)
        return RankPrograms(pairs, range(len(pairs)))

    def open(self, setup: GroupSetup) -> RankPrograms:
        self._programs, self.places, self.timeout = setup.programs, setup.places, setup.timeout
        self.world_size = n = len(self.places)
        self.own = range(n)
        self.world = self._new_world()
        self.scopes = [Scope() for _ in self.own] if setup.scopes is None else list(setup.scopes)
        self.ranks = [
            LocalRank(r, n, self.world.communicator(r), self.places[r], self.scopes[r], partial(self._programs.plan, r)) for r in self.own
        ]
        self.threads = RankThreads(self.places, self.world, self.timeout)
        self._stop: Any = weakref.finalize(self, stop, self.threads.workers)
        return self._programs

    def _new_world(self) -> LocalWorld:
        self._worlds += 1
        if not any(isinstance(p, CUDAPlace) for p in self.places):
            return ThreadWorld(self.world_size, self.timeout)
        if not all(isinstance(p, CUDAPlace) for p in self.places):
            raise ExecutionError(f"places must be all CPU or all CUDA, got {self.places}")
        for place in self.places:
            array_module(place)  # a GPU that is missing is named before what NCCL needs
        from ...comm.nccl import NcclWorld

        return NcclWorld([p.device for p in self.places if isinstance(p, CUDAPlace)], self.timeout)

    @property
    def bound_to_process(self) -> bool:
        return self.world_size > 1

    # -- running ------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.failure = None
        self.world.reset()

    def begin(self, step: int) -> None:
        self._begun = step
        if self.world.shared is not None:
            self.world.shared.expect()

    def start(self) -> None:
        self._connect()
        self.on_all_ranks(lambda r: self.ranks[r].start(self._programs.startups[r]))

    def _connect(self) -> None:
        """Connect all GPUs if any rank sends messages: messages use a communicator of all ranks, and some ranks may have no message that
        would create it."""
        if self.ranks[-1].comm.asynchronous and self._programs.may_send:
            self.on_all_ranks(lambda r: self.ranks[r].comm.init_group(tuple(self.own)))

    def versions(self) -> tuple[int, ...]:
        return (self._worlds, *[s.version for s in self.scopes])

    def prepare(self, feeds: Mapping[str, TensorType], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> ThreadStep:
        self._connect()
        mains = self._programs.mains
        bounds = self.on_all_ranks(lambda r: self.ranks[r].compile(mains[r], feeds, fetches[r], fuse, overlap))
        return ThreadStep(bounds, self.launcher(bounds))

    def launcher(self, bounds: Sequence[BoundPlan]) -> Launch | None:
        """A function that runs a step of all ranks in one C call; None if not all their calls are in C."""
        shared = self.world.shared
        blocks = [b.compute.block for b in bounds if b.compute.block is not None]
        beside = [b.overlapped.block if b.overlapped is not None else None for b in bounds]
        if shared is None or self.world_size == 1 or any(t.block is None for b in bounds for t in b.call_lists):
            return None
        if any(beside):
            self.threads.add_second_threads(self.world)
        return shared.launcher(blocks, [[a for _, a in b.feeds] for b in bounds], beside)

    def step(self, step: ThreadStep, feeds: Feeds, number: int, watched: observers.ObserverSettings) -> tuple[Fetched, bool]:
        for rank, bound in zip(self.ranks, step.bounds, strict=True):
            rank.current, bound.ctx.step = bound, number
        if step.launch is not None and not watched.unfused and not observers.watchers:
            return self._launch(step, feeds), True
        return self._run(step.bounds, feeds, watched), False

    def _run(self, bounds: Sequence[BoundPlan], feeds: Feeds, watched: observers.ObserverSettings) -> Fetched:
        """Run a step on the ranks' own threads: the fetched values by rank."""
        after = [observers.after_step(bound, watched, rank) for rank, bound in enumerate(bounds)]

        def job(r: int) -> list[Any]:
            values, rank = bounds[r].run(feeds[r], after[r]), self.ranks[r]
            rank.finish()
            return values if rank.xp is np else [rank.xp.asnumpy(v) for v in values]

        if all(bound.overlapped is None for bound in bounds):
            return self.on_all_ranks(job)
        self.world.begin()
        return self.on_all_ranks(job, lambda r: bounds[r].run_overlapped(after[r]))

    def _launch(self, step: ThreadStep, feeds: Feeds) -> Fetched:
        """Run a step in one C call: the fetches by rank, not copied. Rank 0 runs on this thread."""
        assert step.launch is not None
        given = tuple([np.ascontiguousarray(fed[n]) for bound, fed in zip(step.bounds, feeds, strict=True) for n, _ in bound.feeds])
        failed, self.failure = self.failure, _INTERRUPTED
        try:
            if (cores := self.threads.cores[0]) is None:
                errors = step.launch(given)
            else:
                with kept_to(cores):
                    errors = step.launch(given)
        except BaseException as e:  # Ctrl-C
            self.failure = e
            raise
        if errors is not None:
            n, outcomes = self.world_size, {}
            for r, bound in enumerate(step.bounds):
                threads = {
                    k: Outcome(None, e and t.explained(e)) for k, (t, e) in enumerate(zip(bound.call_lists, errors[r::n], strict=False))
                }
                outcomes[r] = merged_outcome(threads)
            rank, error = first_failure(outcomes)
            self._fail(error, rank, outcomes, [])
        self.failure = failed
        return [bound.fetches for bound in step.bounds]

    def on_all_ranks(self, *jobs: Job) -> list[Any]:
        """Run `job(rank)` on every rank at once, and a second job on second threads. The first failure stops all ranks and is raised."""
        failed, self.failure = self.failure, _INTERRUPTED if self.world_size > 1 else None
        values = self.threads.results(jobs, self.world, self._fail)
        self.failure = failed
        return values

    # -- failures -----------------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException, rank: int | None, outcomes: dict[int, Outcome], lost: list[int]) -> NoReturn:
        if self.world_size == 1:
            raise error
        if rank is None:  # Ctrl-C
            self.failure = error
            self._replace(lost)
            raise error
        if isinstance(error, FluidxError) and not isinstance(error, ExecutionError):
            self.reset()
            raise error  # a wrong feed or program: found before anything ran
        self.failure = error
        rank, text = diagnose(rank, error, outcomes, lambda r: self.ranks[r].running())
        scene = flight_recorder.failure_context(os.getpid(), self.world.shared, self.world_size)
        self._replace(lost)
        raise RankError(f"{text}\n  in {activity(self._begun)}{scene}", rank) from error

    def _replace(self, lost: Sequence[int]) -> None:
        """Give up stuck threads: make a new world and copies of the arrays, so that nothing uses what these threads may still write."""
        if not lost:
            return
        for r in lost:
            with using(self.places[r]):
                for name, a in list(self.scopes[r].arrays.items()):
                    self.scopes[r].bind(name, copied(a) if type(a) is np.ndarray else a.copy())
        self.world = self._new_world()
        for rank in self.ranks:
            rank.comm = self.world.communicator(rank.rank)
        self.threads.replace_threads(self.world)

    def published(self, names: Sequence[str]) -> AbstractContextManager[None]:
        return NOTHING

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> dict[int, SharedCopy]:
        return {}

    def close(self) -> None:
        workers = list(self.threads.workers)
        self._stop()
        for w in workers:
            w.thread.join(GRACE)
        self.world.close()
        for rank in self.ranks:
            rank.current = None
