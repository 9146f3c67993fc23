"""LaunchedGroup: ranks of a script that a launcher started as several processes, which all run the script and make the same calls.

Fetched values and state are in memory that the processes share, so each process joins them by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ... import config
from ...comm.launched_rank import LaunchedRank
from ...comm.multi_rank_world import world_of
from ...ir.errors import ExecutionError, RankError
from ...ir.types import TensorType
from ..error_text import where
from ..places import CUDAPlace, Place, using
from ..plan import allocation
from ..progress import Progress
from ..run import observers
from ..run.call_descriptions import RemotePlan, describe_plan
from ..scope import Scope
from .affinity import cores_of, keep_to
from .launched_programs import LaunchedPrograms
from .launched_script import LaunchedScript
from .local_rank import LocalRank
from .published_rank import PublishedPlan, PublishedRank, address_of, array_at, types_of
from .rank_group import CLOSED, Feeds, Fetched, GroupSetup
from .rank_programs import RankPrograms
from .thread_workers import RankThreads, stop

if TYPE_CHECKING:
    from ...comm.nccl import LaunchedNcclWorld
    from .background_writer import SharedCopy


class _RemoteScope(Scope):
    """The variables of another process's rank, as it published them last. Only its own process sets them."""

    def set(self, name: str, value: Any) -> None:
        pass


class LaunchedStep:
    """The bound plans of this process's ranks, and the types and arrays of what every rank fetches."""

    def __init__(self, plans: list[PublishedPlan], own: range, said: Sequence[Mapping[str, Any]], view: Callable[..., np.ndarray]):
        self.plans, self.overlapped = plans, any(plan.bound.overlapped is not None for plan in plans)
        self.fetch_types = [types_of(one["types"]) for one in said]
        self.fetches = [
            plans[r - own.start].places if r in own else [array_at(view, at) for at in one["fetches"]] for r, one in enumerate(said)
        ]
        self.descriptions: list[RemotePlan] = []  # of the plans' calls, filled when a profiler attaches


class LaunchedGroup:
    """A RankGroup of the ranks of a launched script. This process is `member`; it holds `each` of them."""

    ranks_are = "are processes, one of which is"
    pool = None
    _closed = False
    _gpus: LaunchedNcclWorld | None = None  # of several ranks in this process

    def __init__(self, member: LaunchedRank, places: Sequence[Place] | None, each: int = 1):
        self.member, self.script, self.lock = member, LaunchedScript(member, each), threading.RLock()
        self.timeout, self.own, self.world_size = member.world.timeout, self.script.own, member.world_size * each
        self._on_gpu = config.device() == "cuda" if places is None else any(isinstance(p, CUDAPlace) for p in places)
        allocation.new_bytes = member.allocate  # memory that the other ranks see

    def take_programs(self, given: Any) -> RankPrograms:
        self._given = LaunchedPrograms(self.script, given)
        return self._given.taken()

    def open(self, setup: GroupSetup) -> RankPrograms:
        member, n, own = self.member, len(setup.places), self.own
        if n != self.world_size:
            raise ExecutionError(
                f"the program was transpiled for {n} rank{'s' * (n > 1)}, and this script was launched as {member.world_size} by "
                f"{member.launched.by}; transpile it with trainers=fx.world_size(), or launch {n}"
            )
        cores = cores_of(n)[own.start : own.stop]
        self._programs = programs = self._given.compared(setup.programs, setup.uneven, "cuda" if self._on_gpu else "cpu")
        self.scopes = [_RemoteScope() if r not in own else Scope() if setup.scopes is None else setup.scopes[r] for r in range(n)]
        self._world = world_of(member, len(own))
        self.places, comms = self._connected(setup.places)
        shared, self._ranks = self._world.shared, list[PublishedRank]()
        for r, (comm, meet) in zip(own, comms, strict=True):
            progress = None if shared is None else Progress(shared, r, where)
            local = LocalRank(r, n, comm, self.places[r], self.scopes[r], partial(programs.plan, r), progress, meet)
            self._ranks.append(PublishedRank(local, self._world, member.memory))
        if len(own) == 1:
            keep_to(cores[0])
            cores = [None]
        self._threads = RankThreads([self.places[r] for r in own], self._world, self.timeout, cores)
        weakref.finalize(self, stop, self._threads.workers)
        self.script.ranks, self.script.main_of, self.script.observed = [r.local for r in self._ranks], programs.main_of, self._observed
        return programs

    def _connected(self, places: list[Place]) -> tuple[list[Place], list[tuple[Any, Callable[[], None]]]]:
        """The places of all ranks, and for each rank of this process its communicator and the barrier of all ranks on the CPU."""
        if len(self.own) == 1:
            if not self._on_gpu:
                return places, [(self.member.comm, self.member.meet)]
            from .gpu_devices import gpu_of

            place, comm = gpu_of(self.member)
            return [place] * len(places), [(comm, self.member.meet)]
        hosts = [self._world.communicator(r) for r in self.own]
        meets = [partial(host.barrier, tuple(range(self.world_size))) for host in hosts]
        if not self._on_gpu:
            return places, list(zip(hosts, meets, strict=True))
        from .gpu_devices import several_of

        self._gpus = several_of(self.member, hosts, [p.device for r in self.own if isinstance(p := places[r], CUDAPlace)])
        return places, [(self._gpus.communicator(r), meet) for r, meet in zip(self.own, meets, strict=True)]

    @property
    def bound_to_process(self) -> bool:
        return self.member.world_size > 1

    @property
    def failure(self) -> BaseException | None:
        return self.script.failure

    def _observed(self) -> bool:
        """Does a profiler want to observe a run?"""
        return bool(observers.watchers) and observers.any_wants([self._programs.main_of(r) for r in range(self.world_size)])

    # -- running ---------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        if (lost := self.script.failure) is not None:
            raise RankError(f"a rank failed, which ends all launched ranks; start the job again, or use --restarts ({lost})")

    def begin(self, step: int) -> None:
        self.script.begun = step
        for rank in self._ranks:
            rank.local.begin(step)

    def _each(self, job: Callable[[int, PublishedRank], Any]) -> None:
        """Do a job on each of this process's ranks, which it is told with its number here. An error fails the job of all ranks."""
        self._threads.results([lambda k: job(k, self._ranks[k])], self._world, self._fail)

    def _fail(self, error: BaseException, k: int | None, *outcomes: object) -> NoReturn:
        self.script.fail(error, k or 0)

    def _connect(self) -> None:
        if self._ranks[0].local.comm.asynchronous and self._programs.may_send:
            self._each(lambda k, rank: rank.local.comm.init_group(tuple(range(self.world_size))))

    def start(self) -> None:
        self.script.agree(("run the startup program",))
        self._connect()
        self._each(lambda k, rank: rank.local.start(self._programs.startups[rank.local.rank]))

    def versions(self) -> tuple[int, ...]:
        return (0, *[s.version for s in self.scopes])

    def prepare(self, feeds: Mapping[str, TensorType], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> LaunchedStep:
        self._connect()
        made: list[PublishedPlan] = []

        def make() -> Any:
            for r, rank in zip(self.own, self._ranks, strict=True):
                with using(rank.local.place):
                    made.append(rank.bind(self._programs.mains[r], feeds, fetches[r], fuse, overlap))
            return [plan.said() for plan in made]

        said = [one for of in self.script.together(make) for one in of]
        return LaunchedStep(made, self.own, said, self.member.view_at)

    def step(self, step: LaunchedStep, feeds: Feeds, number: int, watched: observers.ObserverSettings) -> tuple[Fetched, bool]:
        plans, times = step.plans, list[observers.Times | None]([] if self.script.profiled else None for _ in step.plans)
        for r, plan in zip(self.own, plans, strict=True):
            plan.bound.take(feeds[r])
        if step.overlapped:
            self._world.begin()
        self._each(lambda k, rank: rank.walk(plans[k].bound, number, watched, times[k]))
        if self.script.profiled:
            self._show(step, times, number)
        self._each(lambda k, rank: rank.publish(plans[k]))
        if any(step.fetches):
            own = [a for plan in plans for a in plan.places]
            self.script.collective(lambda: self.member.exchange(own, step.fetches))
            self.member.published = own
        return step.fetches, True

    def _show(self, step: LaunchedStep, times: Sequence[Any], number: int) -> None:
        """Report a run of all ranks to profilers, in the time of rank 0's clock."""
        own = [None if step.descriptions else describe_plan(plan.bound) for plan in step.plans]
        pairs = list(zip(times, own, strict=True))
        all_said = [one for of in self.script.collective(lambda: self.member.gather(pairs)) for one in of]
        if not step.descriptions:
            main_of, n = self._programs.main_of, self.world_size
            step.descriptions += [RemotePlan(said, main_of(r), r, n) for r, (_, said) in enumerate(all_said)]
        for rank, (plan, (seen, _), late) in enumerate(zip(step.descriptions, all_said, self._clocks, strict=True)):
            plan.ctx.step = number
            observers.report_times(plan, rank, [(i, start - late, stop - late) for i, start, stop in seen])

    @cached_property
    def _clocks(self) -> list[int]:
        """The offset of each rank's clock to that of rank 0, in ns. For several hosts, clocks are read after a barrier, which ends on all
        ranks within the time of one message."""
        if self.member.memory is not None:
            return [0] * self.world_size
        self.script.collective(self.member.meet)
        shown = self.script.gather(observers.clock())
        return [now - shown[0] for now in shown]

    def close(self) -> None:
        self._closed = True
        for rank in self._ranks:
            rank.local.current = None
        stop(self._threads.workers)
        if len(self.own) > 1:
            if self._gpus is not None:
                from .gpu_devices import release

                release(self._gpus)
                self._gpus = None
            self._world.close()

    # -- state -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def published(self, names: Sequence[str]) -> Iterator[None]:
        if self._closed:
            raise ExecutionError(CLOSED)
        self.script.agree((f"read {', '.join(map(repr, names[:4]))}", *names[4:]))
        seen: list[dict[str, np.ndarray]] = []

        def show() -> Any:
            seen.extend({name: rank.visible(name) for name in names if name in rank.local.scope.arrays} for rank in self._ranks)
            return [{name: address_of(a) for name, a in arrays.items()} for arrays in seen]

        said = [one for of in self.script.together(show) for one in of]
        remote = {
            r: {name: array_at(self.member.view_at, address) for name, address in one.items()}
            for r, one in enumerate(said)
            if r not in self.own
        }
        for r, arrays in remote.items():
            self.scopes[r].arrays = arrays
        mine = [a for arrays in seen for a in arrays.values()]
        views = [list(remote.get(r, {}).values()) for r in range(self.world_size)]
        self.script.collective(lambda: self.member.exchange(mine, views))
        try:
            yield
        finally:
            for r in remote:
                self.scopes[r].arrays = {}
            self.script.collective(self.member.meet)

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> dict[int, SharedCopy]:
        return {}
