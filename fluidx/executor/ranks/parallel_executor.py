"""ParallelExecutor: run the programs of all ranks together, with global feeds and fetches as on one device."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ... import config
from ...comm.flight_recorder import STARTUP
from ...ir.dtypes import dtype_name
from ...ir.errors import ExecutionError, FeedError, RankError, explains_arguments, nearest
from ...ir.types import TensorType
from .. import launched_alone
from ..feeds import check_feed, check_fetch, check_sizes, fetch_names, joined_feed, read_feed
from ..places import MpiPlace, Place, as_places, default_places
from ..plan.overlap import least_hidden
from ..run import observers
from ..scope import Scope
from .fetches import GlobalFetch
from .group_choice import group_for
from .rank_group import CLOSED, GroupSetup, RankGroup
from .rank_programs import RankPrograms
from .rank_state import RankState
from .run_cache import PreparedRun, are_arrays, kind_of
from .split_and_join import UNEVEN

_MAX_PLANS = 16
_FLUID = (
    "use_cuda", "loss_name", "main_program", "share_vars_from", "exec_strategy", "build_strategy", "num_trainers", "trainer_id", "scope",
)  # fmt: skip
fluid_form: Any = None  # handles a call with fluid's arguments; fluidx.compiler sets it


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

    def __new__(cls, programs: Any = None, places: Sequence[Place] | None = None, *args: Any, **kwargs: Any) -> ParallelExecutor:
        if cls is ParallelExecutor and fluid_form is not None:
            if isinstance(programs, bool):
                return fluid_form(programs, places, *args, **kwargs)
            if programs is None and not kwargs.keys().isdisjoint(_FLUID):
                return fluid_form(**kwargs)
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
        self.group = group_for(places, programs)
        taken = self.group.take_programs(programs)
        places = _checked_places(places, taken.world_size, scopes, self.group)
        if verify and hasattr(programs, "verify"):
            programs.verify()
        if uneven not in UNEVEN:
            raise ExecutionError(f"unknown policy uneven={uneven!r}; {nearest(uneven, UNEVEN, 'there are')}")
        self._readers = programs.source.main.readers if hasattr(programs, "source") else []
        seconds = config.timeout() if timeout is None else float(timeout)
        self.programs: RankPrograms = self.group.open(GroupSetup(taken, places, uneven, seconds, scopes))
        self.world_size, self.uneven = taken.world_size, uneven
        self.places, self.timeout, self.scopes = self.group.places, self.group.timeout, self.group.scopes
        self._ready: OrderedDict[tuple, PreparedRun] = OrderedDict()
        self._lock, self._main = self.group.lock, self.programs.mains[0]
        self._closed = False
        self._process = os.getpid()

    @property
    def device_count(self) -> int:
        """The number of ranks, under fluid's name."""
        return self.world_size

    @property
    def pool(self) -> Any:
        """The processes of the ranks, if the places are `process_places`: `pool.processes[1].pid` is the process id of rank 1."""
        return self.group.pool

    # -- running ------------------------------------------------------------------------------------------------------------

    def run_startup(self) -> None:
        """Run every rank's startup program: it initialises the state, and broadcasts replicated values from one rank."""
        self._check_process()
        with self._lock:
            self._check_open()
            self.group.reset()
            for s in self.scopes:
                s.steps.clear()
            self.group.begin(STARTUP)
            self.group.start()

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
            programs, group = self.programs, self.group
            if feed.__class__ is not dict:
                feed = joined_feed(programs.descs, feed)
            if (failed := group.failure) is not None:
                raise _failed_before(failed)
            step = self.scopes[0].steps.get(self._main, 0)
            group.begin(step)
            names, watched = fetch_names(fetch_list, programs.descs), observers.settings()
            given, ready = self._prepared(names, feed, return_merged, watched.unfused)
            feeds = programs.splitter.split(programs.descs, given, ready.feed_split)
            values, lent = group.step(ready.step, feeds, step, watched)
            for s, m in zip(self.scopes, programs.mains, strict=True):
                s.steps[m] = step + 1
            parts = [[g.part(r, fetched) for r, fetched in enumerate(values)] for g in ready.global_fetches]
            if not return_merged:
                if observers.listeners:
                    observers.notify_listeners(self._main.name, step, names, list(map(self._global, ready.global_fetches, parts)))
                return [[p.copy() if lent and p is not None else p for p in of] for of in parts]
            merge = programs.splitter.merge
            merged = [merge(g.name, of, g.placement, g.shape, g.terms) for g, of in zip(ready.global_fetches, parts, strict=True)]
            if observers.listeners:
                observers.notify_listeners(self._main.name, step, names, merged)
            return [m.copy() if lent and any(m is p for p in of) else m for m, of in zip(merged, parts, strict=True)]

    def _global(self, g: GlobalFetch, parts: Sequence[Any]) -> Any:
        """The global value of a fetch, from the ranks' parts; None if there is none."""
        try:
            return self.programs.splitter.merge(g.name, parts, g.placement, g.shape, g.terms)
        except FeedError:
            return None

    def _prepared(self, names: list[str], feed: Any, merged: bool, apart: bool) -> tuple[Mapping[str, np.ndarray], PreparedRun]:
        """The feed as arrays of the declared dtypes, and the prepared run. Raises FeedError for a feed or fetch that does not fit."""
        programs, descs = self.programs, self.programs.descs
        if not are_arrays(feed):
            feed = check_feed(self._main, feed, descs)
        kind, now = kind_of(names, feed, merged, apart), self.group.versions()
        ready = self._ready.get(kind)
        known = ready is not None and ready.versions == now
        if self.group.script.agree_run(kind, known, None if self.feeds_own_rows else feed) and ready is not None:
            return feed, ready
        check_fetch(self._main, names, descs)
        given = check_feed(self._main, feed, descs)
        check_sizes(descs, given)
        kind, ready = kind_of(names, given, merged, apart), None
        for k in [k for k, r in self._ready.items() if k == kind or r.versions[0] != now[0]]:
            del self._ready[k]
        feed_split = programs.splitter.plan_split(descs, given, self.uneven)
        owners = programs.owners.owners(names, merged)
        whole = programs.splitter.even_sizes(given, feed_split)
        types = {n: TensorType(dtype_name(a.dtype), a.shape) for n, a in whole.items()}
        step = self.group.prepare(types, owners.ranks, not apart, None if apart else least_hidden(self.world_size))
        global_fetches = programs.owners.global_fetches(names, owners, step.fetch_types)
        ready = self._ready[kind] = PreparedRun(feed_split, step, global_fetches, self.group.versions())
        if len(self._ready) > _MAX_PLANS:
            self._ready.popitem(last=False)
        return given, ready

    def _check_process(self) -> None:
        """Raise ExecutionError in a forked process: it has no threads of the ranks. Called before the lock is taken, because another thread
        may have held the lock at the fork."""
        if os.getpid() != self._process and self.group.bound_to_process:
            raise ExecutionError(
                f"the ranks of this executor {self.group.ranks_are} process {self._process}, and this is a fork of it, process "
                f"{os.getpid()}; make a ParallelExecutor in each process, after the fork"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutionError(CLOSED)

    def close(self) -> None:
        """Stop the ranks and drop all prepared runs."""
        with self._lock:
            self.group.close()
            self._ready.clear()
            self._closed = True

    def __enter__(self) -> ParallelExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _checked_places(places: Any, n: int, scopes: Sequence[Scope] | None, group: RankGroup) -> list[Place]:
    """The places of `n` ranks. Raises ExecutionError if there are more or fewer places or scopes."""
    launched_alone.note_executor(n)
    found = default_places(n) if places is None else as_places(places, n)
    if group.script.spans_processes and len(found) == len(group.own):  # each process has given those of its own ranks
        found *= n // len(found)
    ranks = f"the program was transpiled for {n} rank{'s' if n > 1 else ''}"
    if len(found) != n:
        how = f"; mpirun starts that many: fluidx run -n {n} --backend mpi" if any(isinstance(p, MpiPlace) for p in found) else ""
        raise ExecutionError(f"{ranks}, {len(found)} place{' was' if len(found) == 1 else 's were'} given{how}")
    if scopes is not None and len(scopes) != n:
        raise ExecutionError(f"{ranks}, {len(scopes)} scopes were given")
    return found


def _failed_before(error: BaseException) -> RankError:
    """The error of a run after a failed one."""
    why, said = "a rank failed in an earlier run", f" ({error})"
    if isinstance(error, KeyboardInterrupt):
        why, said = "an earlier run was interrupted", ""
    return RankError(f"{why}, so the ranks may differ; call run_startup(), then load a checkpoint if there is one{said}")
