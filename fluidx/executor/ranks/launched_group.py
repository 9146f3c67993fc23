"""LaunchedGroup: ranks of a script that a launcher started as several processes, which all run the script and make the same calls.

Fetched values and state are in memory that the processes share, so each process joins them by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import config
from ...comm.launched_rank import LaunchedRank
from ...ir.errors import ExecutionError, RankError
from ...ir.types import TensorType
from ..error_text import where
from ..places import Place, RankGpu, using
from ..plan import allocation
from ..progress import Progress
from ..run import observers
from ..run.call_descriptions import RemotePlan, describe_plan
from ..scope import Scope
from .affinity import cores_of, keep_to
from .launched_peers import LaunchedPeers
from .launched_programs import LaunchedPrograms
from .local_rank import LocalRank
from .published_rank import PublishedPlan, PublishedRank, address_of, array_at, types_of
from .rank_group import CLOSED, Feeds, Fetched, GroupSetup
from .rank_programs import RankPrograms

if TYPE_CHECKING:
    from .background_writer import SharedCopy


class _RemoteScope(Scope):
    """The variables of another process's rank, as it published them last. Only its own process sets them."""

    def set(self, name: str, value: Any) -> None:
        pass


class LaunchedStep:
    """The bound plan of this process's rank, and the types and arrays of what every rank fetches."""

    def __init__(self, own: PublishedPlan, rank: int, said: Sequence[Mapping[str, Any]], view: Callable[..., np.ndarray]):
        self.own = own
        self.fetch_types = [types_of(one["types"]) for one in said]
        self.fetches = [own.places if r == rank else [array_at(view, at) for at in one["fetches"]] for r, one in enumerate(said)]
        self.descriptions: list[RemotePlan] = []  # of the plans' calls, filled when a profiler attaches


class LaunchedGroup:
    """A RankGroup of the ranks of a launched script. This process is `member`."""

    ranks_are = "are processes, one of which is"
    pool = None
    _closed = False

    def __init__(self, member: LaunchedRank, places: Sequence[Place] | None):
        self.member, self.peers, self.lock = member, LaunchedPeers(member), threading.RLock()
        self.timeout, self.own = member.world.timeout, (member.rank,)
        self._on_gpu = config.device() == "cuda" if places is None else any(isinstance(p, RankGpu) for p in places)
        allocation.new_bytes = member.allocate  # memory that the other ranks see

    def take_programs(self, given: Any) -> RankPrograms:
        self._given = LaunchedPrograms(self.peers, given)
        return self._given.taken()

    def open(self, setup: GroupSetup) -> RankPrograms:
        member, n, mine = self.member, len(setup.places), self.member.rank
        if n != member.world_size:
            raise ExecutionError(
                f"the program was transpiled for {n} rank{'s' * (n > 1)}, and this script was launched as {member.world_size} by "
                f"{member.launched.by}; transpile it with trainers=fx.world_size(), or launch {n}"
            )
        keep_to(cores_of(n)[mine])
        self._programs = self._given.compared(setup.programs, setup.uneven, "cuda" if self._on_gpu else "cpu")
        own = Scope() if setup.scopes is None else setup.scopes[mine]
        self.scopes = [own if r == mine else _RemoteScope() for r in range(n)]
        place, comm = setup.places[mine], member.comm
        if self._on_gpu:
            from .gpu_devices import gpu_of

            place, _, comm = gpu_of(member)
        self.places = [place] * n
        progress = None if member.world.shared is None else Progress(member.world.shared, mine, where)
        local = LocalRank(mine, n, comm, place, own, partial(self._programs.plan, mine), progress, member.meet)
        self._rank, self._local = PublishedRank(local, member.world, member.memory), local
        self.peers.ranks, self.peers.main_of, self.peers.observed = [local], self._programs.main_of, self._observed
        return self._programs

    @property
    def bound_to_process(self) -> bool:
        return self.member.world_size > 1

    @property
    def failure(self) -> BaseException | None:
        return self.peers.failure

    def _observed(self) -> bool:
        """Does a profiler want to observe a run?"""
        return bool(observers.watchers) and observers.any_wants([self._programs.main_of(r) for r in range(self.member.world_size)])

    # -- running ---------------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        if (lost := self.peers.failure) is not None:
            raise RankError(f"a rank failed, which ends all launched ranks; start the job again, or use --restarts ({lost})")

    def begin(self, step: int) -> None:
        self.peers.begun = step
        self._local.begin(step)

    def _here(self, job: Callable[[], Any]) -> Any:
        """Do a job on this process's rank; an error fails the job of all ranks."""
        try:
            with using(self._local.place):
                return job()
        except BaseException as e:
            self.peers.fail(e)

    def _connect(self) -> None:
        if self._local.comm.asynchronous and self._programs.may_send:
            self._here(lambda: self._local.comm.init_group(self.member.everyone))

    def start(self) -> None:
        self.peers.agree(("run the startup program",))
        self._connect()
        self._here(lambda: self._local.start(self._programs.startups[self.member.rank]))

    def versions(self) -> tuple[int, ...]:
        return (0, *[s.version for s in self.scopes])

    def prepare(self, feeds: Mapping[str, TensorType], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> LaunchedStep:
        self._connect()
        mine, made = self.member.rank, list[PublishedPlan]()

        def make() -> Any:
            with using(self._local.place):
                made.append(self._rank.bind(self._programs.mains[mine], feeds, fetches[mine], fuse, overlap))
            return made[0].said()

        said = self.peers.together(make)
        return LaunchedStep(made[0], mine, said, self.member.view_at)

    def step(self, step: LaunchedStep, feeds: Feeds, number: int, watched: observers.ObserverSettings) -> tuple[Fetched, bool]:
        own = step.own
        times: observers.Times | None = [] if self.peers.profiled else None
        own.bound.take(feeds[self.member.rank])
        self._here(lambda: self._rank.walk(own.bound, number, watched, times))
        if times is not None:
            self._show(step, times, number)
        self._here(lambda: self._rank.publish(own))
        if any(step.fetches):
            self.peers.collective(lambda: self.member.exchange(own.places, step.fetches))
            self.member.published = own.places
        return step.fetches, True

    def _show(self, step: LaunchedStep, times: observers.Times, number: int) -> None:
        """Report a run of all ranks to profilers, in the time of rank 0's clock."""
        own = None if step.descriptions else describe_plan(step.own.bound)
        all_said = self.peers.collective(lambda: self.member.gather([times, own]))
        if not step.descriptions:
            main_of, n = self._programs.main_of, self.member.world_size
            step.descriptions += [RemotePlan(said, main_of(r), r, n) for r, (_, said) in enumerate(all_said)]
        for rank, (plan, (seen, _), late) in enumerate(zip(step.descriptions, all_said, self._clocks, strict=True)):
            plan.ctx.step = number
            observers.report_times(plan, rank, [(i, start - late, stop - late) for i, start, stop in seen])

    @cached_property
    def _clocks(self) -> list[int]:
        """The offset of each rank's clock to that of rank 0, in ns. For several hosts, clocks are read after a barrier, which ends on all
        ranks within the time of one message."""
        if self.member.memory is not None:
            return [0] * self.member.world_size
        self.peers.collective(self.member.meet)
        shown = self.peers.collective(lambda: self.member.gather(observers.clock()))
        return [now - shown[0] for now in shown]

    def close(self) -> None:
        self._closed = True
        self._local.current = None

    # -- state -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def published(self, names: Sequence[str]) -> Iterator[None]:
        if self._closed:
            raise ExecutionError(CLOSED)
        self.peers.agree((f"read {', '.join(map(repr, names[:4]))}", *names[4:]))
        own, seen = self._local.scope, dict[str, np.ndarray]()

        def show() -> dict[str, Any]:
            seen.update({name: self._rank.visible(name) for name in names if name in own.arrays})
            return {name: address_of(a) for name, a in seen.items()}

        there = self.peers.together(show)
        found = [
            seen if r == self.member.rank else {name: array_at(self.member.view_at, address) for name, address in said.items()}
            for r, said in enumerate(there)
        ]
        for scope, arrays in zip(self.scopes, found, strict=True):
            if scope is not own:
                scope.arrays = arrays
        self.peers.collective(lambda: self.member.exchange(list(seen.values()), [list(arrays.values()) for arrays in found]))
        try:
            yield
        finally:
            for scope in self.scopes:
                if scope is not own:
                    scope.arrays = {}
            self.peers.collective(self.member.meet)

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> dict[int, SharedCopy]:
        return {}
