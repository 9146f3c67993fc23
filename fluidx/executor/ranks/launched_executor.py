"""LaunchedExecutor: the ParallelExecutor of ranks that a launcher started. Every process runs the same script and is one rank.

All ranks must make the same calls. Each call begins with a collective call that compares what the ranks are about to do. Fetched values and
state are in memory that the processes share, so each rank joins them by itself.
"""

from __future__ import annotations

import atexit
import hashlib
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from ... import config
from ..._version import __version__
from ...comm.flight_recorder import STARTUP
from ...comm.launched_rank import LaunchedRank
from ...ir.constants import Array
from ...ir.dtypes import np_dtype
from ...ir.errors import ExecutionError, FeedError, RankError
from ...ir.parser import parse_pair
from ...ir.program import Program, ProgramPair
from ...ir.types import TensorType
from ...ir.var import Var
from .. import launched_alone
from ..error_text import describe_error, where
from ..places import RankGpu, using
from ..plan import allocation
from ..plan.allocation import fetched
from ..progress import Progress
from ..run import observers
from ..run.bound_plan import BoundPlan
from ..run.call_descriptions import RemotePlan, describe_plan
from ..scope import Scope
from .affinity import cores_of, keep_to
from .agreement import describe_call, difference, digest_of, feeds_differ, grouped, listed, parts, sums_of
from .common_owners import CommonDeclarations, CommonOwners, PairForAllRanks
from .fetches import ValueOwners
from .parallel_executor import ParallelExecutor
from .process_worker import address_of, both
from .rank_programs import rank_programs
from .remote_errors import ErrorRecord, rebuilt
from .run_cache import PreparedRun
from .thread_workers import Job, root_cause

_NO_SUMS: Mapping[str, int] = {}


class _RemoteFetches(NamedTuple):
    """The fetches of another rank, as arrays in shared memory."""

    fetch_types: Sequence[TensorType]
    fetches: Sequence[np.ndarray]


class _RemoteScope(Scope):
    """The variables of another rank, as it published them last. Only its own process sets them."""

    def set(self, name: str, value: Any) -> None:
        pass


class BackgroundSave(Protocol):
    """A checkpoint that background threads of the ranks write."""

    def written(self) -> bool:
        """Has this rank's thread finished writing?"""

    def finish(self) -> None:
        """Wait for all ranks' threads and complete the checkpoint together. Errors with the files are stored for a later query."""


class LaunchedExecutor(ParallelExecutor):
    """A ParallelExecutor without places, in a script that was launched as several ranks."""

    _member: LaunchedRank
    _copies: weakref.WeakKeyDictionary[BoundPlan, list[np.ndarray]]  # this rank's fetches, in shared memory
    _lost: BaseException | None = None  # the failure after which no collective call is possible
    _profiled = False  # does a profiler observe the run that begins?
    _runs = 0
    _compared: PairForAllRanks | None = None  # the programs for all ranks, if the rank programs are known to follow from them
    _common: PairForAllRanks | None = None  # the same, if they stand for the programs of other ranks
    _loading = False  # are variables set without a collective call for each?
    _save: BackgroundSave | None = None  # the checkpoint that is written in the background
    _ranks_are = "are processes, one of which is"
    spans_processes = True

    @classmethod
    def of(cls, member: LaunchedRank) -> LaunchedExecutor:
        """A new executor, not yet initialised, for this process as a rank."""
        made = object.__new__(cls)
        launched_alone.note_joined()
        made._member, made._copies = member, weakref.WeakKeyDictionary()
        return made

    def __init__(self, programs: Any = None, places: Any = None, *args: Any, **kwargs: Any):
        self._on_gpu = config.device() == "cuda" if places is None else any(isinstance(p, RankGpu) for p in places)
        allocation.new_bytes = self._member.allocate  # memory that the other ranks see
        if isinstance(programs, ProgramPair):
            programs = self._pairs_of_all(programs)
        self._given = programs
        super().__init__(programs, places, *args, **kwargs)

    def _open(self, scopes: Sequence[Scope] | None) -> None:
        member, n = self._member, self.world_size
        if n != member.world_size:
            raise ExecutionError(
                f"the program was transpiled for {n} rank{'s' * (n > 1)}, and this script was launched as {member.world_size} by "
                f"{member.launched.by}; transpile it with trainers=fx.world_size(), or launch {n}"
            )
        self.rank, self.world, self.timeout = member.rank, member.world, member.world.timeout
        self.is_first = self.rank == 0
        self._progress = None if (shared := getattr(self.world, "shared", None)) is None else Progress(shared, self.rank, where)
        keep_to(cores_of(n)[self.rank])
        self._modules, self._comms = [np] * n, [member.comm] * n
        own = Scope() if scopes is None else scopes[self.rank]
        self.scopes = [own if r == self.rank else _RemoteScope() for r in range(n)]
        self._compare_programs()
        if self._on_gpu:
            from .gpu_devices import gpu_of

            place, module, comm = gpu_of(member)
            self.places, self._modules, self._comms = [place] * n, [module] * n, [comm] * n

    def _reset(self) -> None:
        if self._lost is not None:
            raise RankError(f"a rank failed, which ends all launched ranks; start the job again, or use --restarts ({self._lost})")

    def _begin_run(self, step: int) -> None:
        if self._progress is not None:
            self._progress.begin(step)

    # -- collective calls ------------------------------------------------------------------------------------------------------

    def _agree(self, what: tuple, ready: bool = True, sums: Mapping[str, int] = _NO_SUMS) -> bool:
        """Check that all ranks make the call `what`; returns whether all are `ready`. After it, no rank still reads results of the call
        before.
        Raises ExecutionError if a rank makes another call, FeedError if checksums of feeds differ."""
        mine, written = digest_of(what), self._save is not None and self._save.written()
        all_of = self._collective(lambda: self._member.gather_numbers([mine, ready, written, self._observed(), sum(sums.values())]))
        if any(one[0] != mine for one in all_of):
            said = self._collective(lambda: self._member.gather(describe_call(what)))
            error = ExecutionError(
                "the ranks make different calls: "
                + "; ".join(f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {words}" for words, ranks in grouped(said))
                + "\n  all ranks must make the same calls: do not run, save or load only where fx.rank() has some value"
            )
            self._fail_job(error)
        if any(one[4] != all_of[0][4] for one in all_of):
            raise FeedError(feeds_differ(self._collective(lambda: self._member.gather(sums))))
        if all(one[2] for one in all_of):
            self.finish_save()
        self._profiled = any(one[3] for one in all_of)
        return all(bool(one[1]) for one in all_of)

    def _collective(self, meet: Callable[[], Any]) -> Any:
        try:
            return meet()
        except BaseException as e:
            self._fail_job(e)

    def _together(self, make: Callable[[], Any], whose: str = "") -> list[Any]:
        """The results of `make()` on every rank (JSON data). The first error is raised on all ranks; on the others `whose` is added to
        it."""
        error, said = None, {}
        try:
            said = {"done": make()}
        except Exception as e:
            error, fault = e, ErrorRecord.of(e, None)
            fault["own"][1] += whose
            said = {"fault": fault}
        all_said = self._collective(lambda: self._member.gather(said))
        for rank, one in enumerate(all_said):
            if "fault" in one:
                raise error if error is not None else rebuilt(one["fault"], self._main_of(rank))
        return [one["done"] for one in all_said]

    def _fail_job(self, error: BaseException) -> NoReturn:
        """Fail the job: report this rank's error, or the error of another rank that ended this one."""
        rank, text = getattr(root_cause(error), "rank", None), describe_error(error)
        if not isinstance(error, Exception) and (own := self._current[self.rank]) is not None:
            text += where(own.compute.running())
        text = (text if text.startswith("rank ") else f"rank {self.rank}: {text}") + (f"\n  in {self._activity}" if self._activity else "")
        self._failed = self._lost = error
        self._comms[self.rank].abort(RuntimeError(text))
        if not isinstance(error, Exception):  # Ctrl-C
            raise error
        raise RankError(text, self.rank if rank is None else rank) from error

    def _on_all_ranks(self, *jobs: Job) -> list[Any]:
        """Run this rank's part of a job."""
        values: list[Any] = [None] * self.world_size
        try:
            if len(jobs) == 1:
                with using(self.places[self.rank]):
                    values[self.rank] = jobs[0](self.rank)
            else:
                both(lambda: jobs[0](self.rank), lambda: jobs[1](self.rank), self.world)
        except BaseException as e:
            self._fail_job(e)
        return values

    # -- programs --------------------------------------------------------------------------------------------------------------

    def _pairs_of_all(self, pair: ProgramPair) -> list[ProgramPair]:
        """The programs of all ranks, exchanged among ranks that each have only their own."""
        constants = {digest: allocation.copied(c.values) for digest, c in pair.constants().items()}
        if pair.main.rank not in (None, self._member.rank):
            raise ExecutionError(
                f"{pair.main.label()} is the program of rank {pair.main.rank}, but this process is rank {self._member.rank}"
            )
        said = self._member.gather([str(pair), {digest: address_of(a) for digest, a in constants.items()}])
        there = [
            constants if r == self._member.rank else {d: self._array(address) for d, address in addresses.items()}
            for r, (_, addresses) in enumerate(said)
        ]
        self._member.exchange(list(constants.values()), [list(of.values()) for of in there])
        return [
            pair if r == self._member.rank else parse_pair(text, {digest: Array(a) for digest, a in there[r].items()})
            for r, (text, _) in enumerate(said)
        ]

    def _pairs(self, programs: Any) -> list[ProgramPair]:
        """The programs of every rank. Where the rank programs follow from the programs for all ranks, these stand for those of the other
        ranks, which are made only if a message or a profiler needs them."""
        n, rank = self._member.world_size, self._member.rank
        if getattr(programs, "world_size", 0) != n or not hasattr(programs, "common_programs"):
            return rank_programs(programs)
        self._compared = common = programs.common_programs(rank)
        if common is None or not common.stand_for_ranks:
            return rank_programs(programs)
        self._common = common
        return [common.rank_pair(r) if r == rank else common.pair for r in range(n)]

    def _declared(self) -> tuple[Mapping[str, Var], ValueOwners]:
        if self._common is None:
            return super()._declared()
        descs = CommonDeclarations(self._common, self._member.world_size)
        return descs, CommonOwners(self._common, self._mains, descs, self.splitter)

    def _main_of(self, rank: int) -> Program:
        """The main program of a rank."""
        return self._mains[rank] if self._common is None else self._common.rank_pair(rank).main

    def _observed(self) -> bool:
        """Does a profiler want to observe a run?"""
        return bool(observers.watchers) and observers.any_wants([self._main_of(r) for r in range(self.world_size)])

    def _may_send(self) -> bool:
        return super()._may_send() if self._common is None else self._common.may_send

    def _compare_programs(self) -> None:
        """Raise ExecutionError if ranks have different programs, options or versions of fluidx. The programs of each rank are compared only
        if those for all ranks differ, or if a rank has programs that may not follow from them."""
        self._agree(("make an executor",))
        digest = "" if self._compared is None else self._compared.digest
        device = "cuda" if self._on_gpu else "cpu"
        said = self._collective(lambda: self._member.gather([__version__, digest, self.uneven, device]))
        for k, what in ((0, "fluidx"), (2, "uneven="), (3, "FLUIDX_DEVICE")):
            if len(found := grouped([one[k] for one in said])) > 1:
                self._refuse("; ".join(f"{what} {which} on rank{'s' * (len(ranks) > 1)} {listed(ranks)}" for which, ranks in found))
        if digest and all(one[1] == digest for one in said):
            return
        if self._common is not None:
            self._common = None
            self._take_programs(rank_programs(self._given))
        self._compare_each()

    def _compare_each(self) -> None:
        """Raise ExecutionError if ranks have different programs for some rank."""
        pairs = [ProgramPair(m, s) for m, s in zip(self._mains, self._startups, strict=True)]
        digests = [hashlib.sha256(str(pair).encode()).hexdigest() for pair in pairs]
        said = self._collective(lambda: self._member.gather(digests))
        other = next((r for r in range(self.world_size) if len({one[r] for one in said}) > 1), None)
        if other is None:
            return
        said = self._collective(lambda: self._member.gather(parts(pairs[other])))
        self._refuse(difference(other, said))

    def _refuse(self, text: str) -> NoReturn:
        """Raise ExecutionError. All ranks find the same difference, so all raise."""
        raise ExecutionError(f"the ranks do not run the same program: {text}")

    # -- runs --------------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._begin_run(STARTUP)
        self._agree(("run the startup program",))
        super()._start()

    def _compile(self, *args: Any, **how: Any) -> BoundPlan:
        bound = super()._compile(*args, **how)
        if self._progress is not None:
            bound.record_progress(self._progress)
        return bound

    def _known(self, kind: tuple, feed: Mapping[str, np.ndarray]) -> PreparedRun | None:
        found = super()._known(kind, feed)
        self._begin_run(self.scopes[0].steps.get(self._mains[0], 0))
        self._runs += 1
        # checksums of feeds cost time: runs 1, 2, 4, 8, ... compare them, which finds different seeds or orders sooner or later
        sums = sums_of(feed) if self._runs & (self._runs - 1) == 0 and not self.feeds_own_rows else {}
        return found if self._agree(("run", *kind), found is not None, sums) else None

    def _bound(self, whole: Mapping[str, np.ndarray], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> list[Any]:
        made: list[BoundPlan] = []

        def make() -> Any:
            with using(self.places[self.rank]):
                own = self._compile(self.rank, self._mains[self.rank], whole, fetches[self.rank], fuse, overlap)
            made.append(own)
            # fetches must be in shared memory, or are copied there
            self._copies[own] = [a if self._member.is_shared(a) else allocation.zeros(a.shape, a.dtype) for a in own.fetches]
            return [(t.dtype, list(t.shape)) for t in own.fetch_types], [address_of(a) for a in self._copies[own]]

        return [
            made[0]
            if r == self.rank
            else _RemoteFetches([TensorType(d, tuple(shape)) for d, shape in types], [self._array(at) for at in addresses])
            for r, (types, addresses) in enumerate(self._together(make))
        ]

    def _launcher(self, bounds: Sequence[Any]) -> None:
        return None

    def _finish(self, rank: int) -> None:
        if self._on_gpu:  # this call names a rank that does not reach the end of the run; NCCL does not
            self._member.meet()
        super()._finish(rank)

    def _values(
        self, ready: PreparedRun, feeds: Sequence[Mapping[str, np.ndarray]], step: int, watched: observers.ObserverSettings
    ) -> tuple[list[list[Any]], bool]:
        bound = self._current[self.rank] = ready.bounds[self.rank]
        bound.ctx.step = step
        times: observers.Times | None = [] if self._profiled else None
        after = observers.after_step(bound, watched, self.rank, times)

        def walk(rank: int) -> None:
            bound.walk(after)
            self._finish(rank)

        def publish(rank: int) -> None:
            for a, place in zip(bound.fetches, self._copies[bound], strict=True):
                if type(a) is not np.ndarray:
                    fetched(a, place)
                elif place is not a:
                    np.copyto(place, a)

        bound.take(feeds[self.rank])
        if bound.overlapped is None:
            self._on_all_ranks(walk)
        else:
            self.world.begin()
            self._on_all_ranks(walk, lambda rank: bound.run_overlapped(after))
        if times is not None:
            self._show(ready, times, step)
        self._on_all_ranks(publish)
        values = [self._copies[bound] if r == self.rank else list(b.fetches) for r, b in enumerate(ready.bounds)]
        if ready.global_fetches:
            self._collective(lambda: self._member.exchange(values[self.rank], values))
            self._member.published = values[self.rank]
        return values, True

    def _show(self, ready: PreparedRun, times: observers.Times, step: int) -> None:
        """Report a run of all ranks to profilers, in the time of rank 0's clock."""
        own = None if ready.remote_plans else describe_plan(ready.bounds[self.rank])
        all_said = self._collective(lambda: self._member.gather([times, own]))
        if not ready.remote_plans:
            ready.remote_plans[:] = [RemotePlan(said, self._main_of(r), r, self.world_size) for r, (_, said) in enumerate(all_said)]
        for rank, (sight, (seen, _), late) in enumerate(zip(ready.remote_plans, all_said, self._clocks, strict=True)):
            sight.ctx.step = step
            observers.report_times(sight, rank, [(i, start - late, stop - late) for i, start, stop in seen])

    @cached_property
    def _clocks(self) -> list[int]:
        """The offset of each rank's clock to that of rank 0, in ns. For several hosts, clocks are read after a barrier, which ends on all
        ranks within the time of one message."""
        if self._member.memory is not None:
            return [0] * self.world_size
        self._collective(self._member.meet)
        shown = self._collective(lambda: self._member.gather(observers.clock()))
        return [now - shown[0] for now in shown]

    def _array(self, address: Sequence[Any]) -> np.ndarray:
        at, dtype, shape = address
        return self._member.view_at(at, shape, np_dtype(dtype))

    def _end(self) -> None:
        pass

    # -- state -------------------------------------------------------------------------------------------------------------------

    def state(self, name: str) -> np.ndarray:
        """The global value of a persistable variable, joined from the ranks' local values. All ranks must call it."""
        with self._published([name]):
            return super().state(name)

    def set_state(self, name: str, value: Any) -> None:
        """Set the global value of a persistable variable: this rank takes its part. All ranks must call it with the same value."""
        if not self._loading:
            self._agree((f"set {name!r}",))
        super().set_state(name, value)

    def gather_each(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """The results of `make()` on each rank, in rank order. All ranks must call it. The first error is raised on all ranks; the others
        name its rank and host."""
        self.finish_save()
        self._agree((what,))
        return self._together(make, f" (rank {self.rank}, on host {socket.gethostname()})")

    def finish_later(self, save: BackgroundSave) -> None:
        """Call `save.finish()` when a later collective call finds it written on all ranks, or when the script ends. All ranks must call
        this."""
        self.finish_save()
        self._save = save
        atexit.register(self._finish_at_exit)

    def finish_save(self) -> None:
        """Finish the background save now, on all ranks."""
        save, self._save = self._save, None
        if save is not None:
            atexit.unregister(self._finish_at_exit)
            save.finish()

    def _finish_at_exit(self) -> None:
        with suppress(ExecutionError):  # another rank may have ended, which is reported elsewhere
            self._agree(("end the script",))
            self.finish_save()

    def _local_ranks(self) -> Sequence[int]:
        return (self._member.rank,)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context, entered by all ranks together, in which variables are set without a collective call for each."""
        self.finish_save()
        self._agree(("load a checkpoint",))
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    @contextmanager
    def _published(self, names: Sequence[str]) -> Iterator[None]:
        """A context in which every rank can read the others' values of these variables, and none changes them."""
        self._check_open()
        self._agree((f"read {', '.join(map(repr, names[:4]))}", *names[4:]))
        own, seen = self.scopes[self.rank], dict[str, np.ndarray]()

        def show() -> dict[str, Any]:
            seen.update({name: self._visible(name) for name in names if name in own.arrays})
            return {name: address_of(a) for name, a in seen.items()}

        there = self._together(show)
        told = [seen if r == self.rank else {name: self._array(address) for name, address in said.items()} for r, said in enumerate(there)]
        for scope, arrays in zip(self.scopes, told, strict=True):
            if scope is not own:
                scope.arrays = arrays
        self._collective(lambda: self._member.exchange(list(seen.values()), [list(arrays.values()) for arrays in told]))
        try:
            yield
        finally:
            for scope in self.scopes:
                if scope is not own:
                    scope.arrays = {}
            self._collective(self._member.meet)

    def _visible(self, name: str) -> np.ndarray:
        """A variable of this rank in shared memory: moved there, or copied from a GPU."""
        own = self.scopes[self.rank]
        a = own.arrays[name]
        if type(a) is not np.ndarray:
            return fetched(a, allocation.zeros(a.shape, a.dtype))
        if not self._member.is_shared(a):
            own.bind(name, allocation.copied(a))
        return own.arrays[name]
