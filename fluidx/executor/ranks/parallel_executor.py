"""ParallelExecutor: run the programs of all ranks together, with global feeds and fetches as on one device."""

from __future__ import annotations

import os
import threading
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from ... import config
from ...comm import flight_recorder
from ...comm.threads.world import ThreadWorld
from ...ir.change_stamps import Stamp
from ...ir.errors import ExecutionError, FeedError, FluidxError, ProgramError, RankError, explains_arguments, nearest
from ...ir.opdef import Effect, opdef
from ...ir.operator import op_types
from ...ir.program import Program, ProgramPair
from ...ir.var import Var
from ...native.world import Launch, NativeWorld
from .. import launched_alone
from ..context import RunContext
from ..feeds import check_feed, check_fetch, check_sizes, feed_types, fetch_names, joined_feed, read_feed
from ..places import CUDAPlace, MpiPlace, Place, array_module, as_places, default_places, using
from ..plan.allocation import copied
from ..plan.overlap import least_hidden
from ..run import observers
from ..run.bind import bind
from ..run.bound_plan import BoundPlan
from ..scope import Scope
from .affinity import cores_of, kept_to
from .fetches import GlobalFetch, ValueOwners
from .rank_programs import rank_programs
from .run_cache import PreparedRun, are_arrays, kind_of
from .shared_plans import SharedPlans
from .split_and_join import UNEVEN, FeedSplitter
from .state import RankState
from .thread_workers import GRACE, Job, Outcome, RankThreads, diagnose, first_failure, merged_outcome, stop

_MAX_PLANS = 16
_FLUID = (
    "use_cuda", "loss_name", "main_program", "share_vars_from", "exec_strategy", "build_strategy", "num_trainers", "trainer_id", "scope",
)  # fmt: skip
new_executor: Any = None  # returns an executor for places, not initialised; executor_choice.py sets it
fluid_form: Any = None  # handles a call with fluid's arguments; fluidx.compiler sets it
_INTERRUPTED = KeyboardInterrupt("the run was interrupted")


class ParallelExecutor(RankState):
    """Runs N ranks on the given places, as threads of this process, or as processes where the places are `process_places`.

    `programs` is a DistributeTranspiler, or one ProgramPair (main, startup) for each rank, in order; these may come from text. Placements
    and communication are in the programs.

    `run` takes the global feed, splits it among the ranks, and returns global values: replicated ones once, sharded ones joined, partial
    ones reduced.

    `uneven`: what happens to a batch that does not divide by the ranks:

    - "weight": it is split anyway; some ranks get one row more, or none. The result is that of one device (default).
    - "pad": the last row is repeated until the batch divides; the repeated rows count in means.
    - "drop": the surplus rows at the end are left out.
    - "error": FeedError.

    Further arguments:

    - `scopes`: the ranks' variables, to share those of another executor (`exe.scopes`), such as one that trains and one that tests.
    - `timeout`: seconds that a rank waits for another before the run fails (default FLUIDX_TIMEOUT, 60).
    - `verify`: prove the rank programs of a transpiler right first (`transpiler.verify()`, done once). Raises VerifyError if they are not.

    Calls from several threads wait for one another. Raises RankError if a rank fails: the others stop at once, and the executor refuses
    further runs until `run_startup`.
    """

    feeds_own_rows = False  # does each launched rank feed only its own rows?
    _ranks_are = "are threads of"
    _activity = ""  # what runs now, for error texts
    _failed: BaseException | None = None
    _comms: Sequence[Any] = ()  # communicators of the ranks in this process

    def __new__(cls, programs: Any = None, places: Sequence[Place] | None = None, *args: Any, **kwargs: Any) -> ParallelExecutor:
        if cls is ParallelExecutor and fluid_form is not None:
            if isinstance(programs, bool):
                return fluid_form(programs, places, *args, **kwargs)
            if programs is None and not kwargs.keys().isdisjoint(_FLUID):
                return fluid_form(**kwargs)
        if cls is ParallelExecutor:
            return new_executor(places)
        return super().__new__(cls)

    def __init__(
        self,
        programs: Any = None,
        places: Sequence[Place] | None = None,
        uneven: str = "weight",
        timeout: float | None = None,
        scopes: Sequence[Scope] | None = None,
        verify: bool = True,
        **fluid: Any,
    ):
        if fluid:
            raise ExecutionError(
                f"ParallelExecutor has no argument {next(iter(fluid))!r}: instead of fluid's use_cuda, loss_name and main_program it takes "
                "the transpiler and the places, ParallelExecutor(t, places=fx.cuda_places())"
            )
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
            raise ExecutionError(f"ParallelExecutor: timeout must be a number of seconds, got {type(timeout).__name__}: {timeout!r}")
        pairs = self._pairs(programs)
        self.world_size = n = len(pairs)
        launched_alone.note_executor(n)
        places = default_places(n) if places is None else as_places(places, n)
        if len(places) != n:
            how = f"; mpirun starts that many: fluidx run -n {n} --backend mpi" if any(isinstance(p, MpiPlace) for p in places) else ""
            given = f"{len(places)} place{' was' if len(places) == 1 else 's were'} given"
            raise ExecutionError(f"the program was transpiled for {n} rank{'s' if n > 1 else ''}, {given}{how}")
        if scopes is not None and len(scopes) != n:
            raise ExecutionError(f"the program was transpiled for {n} rank{'s' if n > 1 else ''}, {len(scopes)} scopes were given")
        if verify and hasattr(programs, "verify"):
            programs.verify()
        if uneven not in UNEVEN:
            raise ExecutionError(f"unknown policy uneven={uneven!r}; {nearest(uneven, UNEVEN, 'there are')}")
        self._readers = programs.source.main.readers if hasattr(programs, "source") else []
        self._take_programs(pairs)
        self.places, self.uneven = places, uneven
        self.timeout = config.timeout() if timeout is None else float(timeout)
        self._ready: OrderedDict[tuple, PreparedRun] = OrderedDict()
        self._current: list[BoundPlan | None] = [None] * n  # the latest plan of each rank
        self._lock = threading.RLock()
        self._closed = False
        self._process = os.getpid()
        self._open(scopes)

    def _pairs(self, programs: Any) -> list[ProgramPair]:
        """The programs of every rank, in order."""
        return rank_programs(programs)

    def _take_programs(self, pairs: Sequence[ProgramPair]) -> None:
        self._mains, self._startups = [p.main for p in pairs], [p.startup for p in pairs]
        here = self._local_ranks()
        mains, startups = [self._mains[r] for r in here], [self._startups[r] for r in here]
        self._stamp = Stamp([*mains, *startups])
        self._plans = SharedPlans(self._stamp, mains, startups)
        self.splitter = FeedSplitter(self._mains)
        self._descs, self._owners = self._declared()

    def _declared(self) -> tuple[Mapping[str, Var], ValueOwners]:
        """The declarations of all ranks (a rank of another pipeline stage may not declare a variable), and the ranks that have values."""
        descs = ChainMap(*(m.global_block().descs for m in self._mains))
        return descs, ValueOwners(self._mains, descs, self.splitter)

    def _open(self, scopes: Sequence[Scope] | None) -> None:
        """Start the ranks."""
        self.scopes = list(scopes) if scopes is not None else [Scope() for _ in range(self.world_size)]
        self._modules = [array_module(p) for p in self.places]
        self._make_world()
        self._threads = RankThreads(self.places if self.world_size > 1 else [], self.world, self.timeout)
        self._callers_cores = cores_of(1)[0] if self.world_size == 1 else None  # of the caller's thread
        self._stop: Any = weakref.finalize(self, stop, self._threads.workers)

    def _make_world(self) -> None:
        if any(isinstance(p, CUDAPlace) for p in self.places):
            if not all(isinstance(p, CUDAPlace) for p in self.places):
                raise ExecutionError(f"places must be all CPU or all CUDA, got {self.places}")
            from ...comm.nccl import NcclWorld

            self.world: Any = NcclWorld([p.device for p in self.places if isinstance(p, CUDAPlace)], self.timeout)
        else:
            self.world = ThreadWorld(self.world_size, self.timeout)
        self._comms = [self.world.communicator(r) for r in range(self.world_size)]

    @property
    def _bound_to_process(self) -> bool:
        """Does the executor need threads of this process, which a fork does not have?"""
        return self.world_size > 1

    @property
    def device_count(self) -> int:
        """The number of ranks, under fluid's name."""
        return self.world_size

    # -- running ------------------------------------------------------------------------------------------------------------

    def run_startup(self) -> None:
        """Run every rank's startup program: it initialises the state, and broadcasts replicated values from one rank."""
        self._check_process()
        with self._lock:
            self._check_open()
            self._failed = None
            self._reset()
            for s in self.scopes:
                s.steps.clear()
            self._activity = "the startup program"
            self._start()

    def _reset(self) -> None:
        """Clear a failure."""
        self.world.reset()

    def _start(self) -> None:
        self._connect()

        def job(rank: int) -> None:
            bound = self._current[rank] = self._compile(rank, self._startups[rank], {}, [])
            bound.run({})
            self._finish(rank)

        self._on_all_ranks(job)

    @explains_arguments
    def run(
        self,
        fetch_list: Any = None,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        feed_dict: Mapping[str, Any] | None = None,
        return_numpy: bool = True,
        return_merged: bool = True,
    ) -> list[Any]:
        """One step of all ranks. Returns one global value for each fetch; with `return_merged=False` a list with one local value for each
        rank (None for a rank that does not hold it).

        A feed is split by the placement of its variable: along its batch if that is sharded; every rank gets the whole value if it is
        replicated. Raises FeedError, NotInitializedError or RankError, as `Executor.run` does for one device.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            feed = feed if feed is not None else feed_dict
            if self._readers:
                feed = read_feed(self._readers, feed, self.world_size)
            if feed.__class__ is not dict:
                feed = joined_feed(self._descs, feed)
            if self._failed is not None:
                why, said = "a rank failed in an earlier run", f" ({self._failed})"
                if isinstance(self._failed, KeyboardInterrupt):
                    why, said = "an earlier run was interrupted", ""
                raise RankError(f"{why}, so the ranks may differ; call run_startup(), then load a checkpoint if there is one{said}")
            self._expect_step()
            step = self.scopes[0].steps.get(self._mains[0], 0)
            self._activity = f"step {step}"
            names, watched = fetch_names(fetch_list, self._descs), observers.settings()
            given, ready = self._prepared(names, feed, return_merged, watched.unfused)
            feeds = self.splitter.split(self._descs, given, ready.feed_split)
            values, lent = self._values(ready, feeds, step, watched)
            for s, m in zip(self.scopes, self._mains, strict=True):
                s.steps[m] = step + 1
            parts = [[g.part(r, fetched) for r, fetched in enumerate(values)] for g in ready.global_fetches]
            if not return_merged:
                if observers.listeners:
                    observers.notify_listeners(self._mains[0].name, step, names, list(map(self._global, ready.global_fetches, parts)))
                return [[p.copy() if lent and p is not None else p for p in of] for of in parts]
            merged = [
                self.splitter.merge(g.name, of, g.placement, g.shape, g.terms) for g, of in zip(ready.global_fetches, parts, strict=True)
            ]
            if observers.listeners:
                observers.notify_listeners(self._mains[0].name, step, names, merged)
            return [m.copy() if lent and any(m is p for p in of) else m for m, of in zip(merged, parts, strict=True)]

    def _global(self, g: GlobalFetch, parts: Sequence[Any]) -> Any:
        """The global value of a fetch, from the ranks' parts; None if there is none."""
        try:
            return self.splitter.merge(g.name, parts, g.placement, g.shape, g.terms)
        except FeedError:
            return None

    def _expect_step(self) -> None:
        """Wake waiting threads: a step comes soon."""
        if (shared := getattr(self.world, "shared", None)) is not None:
            shared.expect()

    def _values(
        self, ready: PreparedRun, feeds: Sequence[Mapping[str, np.ndarray]], step: int, watched: observers.ObserverSettings
    ) -> tuple[list[list[Any]], bool]:
        """Run a step: the fetched values by rank, and whether they are in memory that the next step overwrites."""
        self._current[:] = ready.bounds
        for bound in ready.bounds:
            bound.ctx.step = step
        launched = ready.launch is not None and not watched.unfused and not observers.watchers
        return (self._launch(ready, feeds) if launched else self._step(ready, feeds, watched)), launched

    def _step(self, ready: PreparedRun, feeds: Sequence[Mapping[str, np.ndarray]], watched: observers.ObserverSettings) -> list[list[Any]]:
        """Run a step on the ranks' own threads: the fetched values by rank."""
        after = [observers.after_step(bound, watched, rank) for rank, bound in enumerate(ready.bounds)]

        def job(rank: int) -> list[Any]:
            values = ready.bounds[rank].run(feeds[rank], after[rank])
            self._finish(rank)
            xp = self._modules[rank]
            return values if xp is np else [xp.asnumpy(v) for v in values]

        if all(bound.overlapped is None for bound in ready.bounds):
            return self._on_all_ranks(job)
        self.world.begin()
        return self._on_all_ranks(job, lambda rank: ready.bounds[rank].run_overlapped(after[rank]))

    def _prepared(self, names: list[str], feed: Any, merged: bool, apart: bool) -> tuple[Mapping[str, np.ndarray], PreparedRun]:
        """The feed as arrays of the declared dtypes, and the prepared run. Raises FeedError for a feed or fetch that does not fit."""
        if not are_arrays(feed):
            feed = check_feed(self._mains[0], feed, self._descs)
        ready = self._known(kind_of(names, feed, merged, apart), feed)
        if ready is not None:
            return feed, ready
        check_fetch(self._mains[0], names, self._descs)
        given = check_feed(self._mains[0], feed, self._descs)
        check_sizes(self._descs, given)
        kind = kind_of(names, given, merged, apart)
        self._ready.pop(kind, None)
        feed_split = self.splitter.plan_split(self._descs, given, self.uneven)
        owners = self._owners.owners(names, merged)
        whole = self.splitter.even_sizes(given, feed_split)
        overlap = None if apart else least_hidden(self.world_size)
        self._connect()
        bounds = self._bound(whole, owners.ranks, not apart, overlap)
        global_fetches = self._owners.global_fetches(names, owners, [b.fetch_types for b in bounds])
        ready = PreparedRun(feed_split, bounds, self._launcher(bounds), global_fetches, self._versions(), [])
        self._ready[kind] = ready
        if len(self._ready) > _MAX_PLANS:
            self._ready.popitem(last=False)
        return given, ready

    def _connect(self) -> None:
        """Connect all GPUs if any rank sends messages: messages use a communicator of all ranks, and some ranks may have no message that
        would create it."""
        if self._comms and self._comms[-1].asynchronous and self._may_send():
            self._on_all_ranks(lambda rank: self._comms[rank].init_group(tuple(range(self.world_size))))

    def _may_send(self) -> bool:
        """May any rank send messages?"""
        return any(map(_sends, (*self._mains, *self._startups)))

    def _known(self, kind: tuple, feed: Mapping[str, np.ndarray]) -> PreparedRun | None:
        """The cached prepared run of this kind, if it is still valid."""
        ready = self._ready.get(kind)
        return ready if ready is not None and ready.versions == self._versions() else None

    def _bound(self, whole: Mapping[str, np.ndarray], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> list[Any]:
        """Plan and bind every rank's main program for feeds like these."""
        return self._on_all_ranks(lambda r: self._compile(r, self._mains[r], whole, fetches[r], fuse, overlap))

    def _versions(self) -> tuple[int, ...]:
        return tuple([s.version for s in self.scopes])

    def _launcher(self, bounds: Sequence[BoundPlan]) -> Launch | None:
        shared: NativeWorld | None = getattr(self.world, "shared", None)
        blocks = [b.compute.block for b in bounds if b.compute.block is not None]
        beside = [b.overlapped.block if b.overlapped is not None else None for b in bounds]
        if shared is None or self.world_size == 1 or any(t.block is None for b in bounds for t in b.call_lists):
            return None
        if any(beside):
            self._threads.add_second_threads(self.world)
        return shared.launcher(blocks, [[a for _, a in b.feeds] for b in bounds], beside)

    def _compile(
        self, rank: int, program: Program, feed: Mapping[str, np.ndarray], fetch: list[str], fuse: bool = True, overlap: int | None = None
    ) -> BoundPlan:
        self._check_unchanged(rank, program)
        groups = {g: program.group_ranks(g, rank) for g in program.groups}
        ctx = RunContext(rank, self.world_size, self._comms[rank], groups, program.turns)
        declared = program.global_block().descs  # a server rank declares no feed
        given = feed_types(program, {n: v for n, v in feed.items() if n in declared})
        scope, xp = self.scopes[rank], self._modules[rank]
        device = "cpu" if xp is np else "cuda"
        planned = self._plans.plan(program, given, fetch, scope.arrays, ctx, device, fuse=fuse, overlap=overlap)
        return bind(planned, scope, ctx, xp)

    def _check_unchanged(self, rank: int, program: Program) -> None:
        if change := self._stamp.changed(program):
            raise ProgramError(
                f"rank {rank}: {change}\n  the program was changed after this executor was made; "
                "transpile the changed source, or make a new executor"
            )

    def _finish(self, rank: int) -> None:
        """Wait, with a deadline, for the rank's queued GPU work."""
        if self._modules[rank] is not np:
            self._comms[rank].wait()

    # -- all ranks at once --------------------------------------------------------------------------------------------------

    def _on_all_ranks(self, *jobs: Job) -> list[Any]:
        """Run `job(rank)` on every rank at once, and a second job on second threads. The first failure stops all ranks and is raised."""
        if self.world_size == 1:
            with using(self.places[0]), kept_to(self._callers_cores):
                return [jobs[0](0)]
        outcomes: dict[int, Outcome] = {}
        failed, self._failed = self._failed, _INTERRUPTED
        try:
            self._threads.run(jobs, self.world, outcomes)
        except BaseException as e:  # Ctrl-C
            self._failed = e
            raise
        finally:
            lost = [r for r in range(self.world_size) if r not in outcomes]
            if self._failed is not _INTERRUPTED:
                self._replace(lost)
        if lost or any(o.error is not None for o in outcomes.values()):
            self._fail(outcomes, lost)
        self._failed = failed
        return [outcomes[r].value for r in range(self.world_size)]

    def _launch(self, ready: PreparedRun, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[list[Any]]:
        """Run a step in one C call: the fetches by rank, not copied. Rank 0 runs on this thread."""
        assert ready.launch is not None
        given = tuple([np.ascontiguousarray(fed[n]) for bound, fed in zip(ready.bounds, feeds, strict=True) for n, _ in bound.feeds])
        failed, self._failed = self._failed, _INTERRUPTED
        try:
            with kept_to(self._threads.cores[0]):
                errors = ready.launch(given)
        except BaseException as e:  # Ctrl-C
            self._failed = e
            raise
        if errors is not None:
            n, outcomes = self.world_size, {}
            for r, bound in enumerate(ready.bounds):
                threads = {
                    k: Outcome(None, e and t.explained(e)) for k, (t, e) in enumerate(zip(bound.call_lists, errors[r::n], strict=False))
                }
                outcomes[r] = merged_outcome(threads)
            self._fail(outcomes, [])
        self._failed = failed
        return [bound.fetches for bound in ready.bounds]

    def _fail(self, outcomes: dict[int, Outcome], lost: list[int]) -> NoReturn:
        rank, error = first_failure(outcomes)
        if isinstance(error, FluidxError) and not isinstance(error, ExecutionError):
            self._failed = None
            self.world.reset()
            raise error  # a wrong feed or program: found before anything ran
        self._failed = error
        rank, text = diagnose(rank, error, outcomes, lambda r: bound.compute.running() if (bound := self._current[r]) is not None else None)
        scene = flight_recorder.failure_context(os.getpid(), getattr(self.world, "shared", None), self.world_size)
        self._replace(lost)
        raise RankError(f"{text}\n  in {self._activity}{scene}", rank) from error

    def _replace(self, lost: Sequence[int]) -> None:
        """Give up stuck threads: make a new world and copies of the arrays, so that nothing uses what these threads may still write."""
        if not lost:
            return
        for r in lost:
            with using(self.places[r]):
                for name, a in list(self.scopes[r].arrays.items()):
                    self.scopes[r].bind(name, copied(a) if type(a) is np.ndarray else a.copy())
        self._ready.clear()
        self._make_world()
        self._threads.replace_threads(self.world)

    def _check_process(self) -> None:
        """Raise ExecutionError in a forked process: it has no threads of the ranks. Called before the lock is taken, because another thread
        may have held the lock at the fork."""
        if os.getpid() != self._process and self._bound_to_process:
            raise ExecutionError(
                f"the ranks of this executor {self._ranks_are} process {self._process}, and this is a fork of it, process {os.getpid()}; "
                "make a ParallelExecutor in each process, after the fork"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutionError("this executor is closed; make a new one")

    def close(self) -> None:
        """Stop the ranks and drop all prepared runs."""
        with self._lock:
            self._end()
            self._ready.clear()
            self._current = [None] * self.world_size
            self._closed = True

    def _end(self) -> None:
        workers = list(self._threads.workers)
        self._stop()
        for w in workers:
            w.thread.join(GRACE)
        if hasattr(self.world, "close"):
            self.world.close()

    def __enter__(self) -> ParallelExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _sends(program: Program) -> bool:
    return any(opdef(type_).effect is Effect.P2P for block in program.blocks for type_ in op_types(block.oplist))
