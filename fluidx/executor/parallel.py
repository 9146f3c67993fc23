"""ParallelExecutor: run the rank programs of a transpile together, with one device's feed and fetch."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from .. import config
from ..comm.base import CommAborted, CommError, CommTimeout
from ..comm.threads import ThreadWorld
from ..ir.errors import ExecutionError, FeedError, FluidxError, RankError, nearest
from ..ir.program import Program
from ..ir.types import At, Placement, Shard
from .context import RunContext
from .executor import watcher, watching
from .feeds import UNEVEN, Rows, check_feed, check_fetch, cut, feed_types, fetch_names, merge, split_rows
from .place import CPUPlace, CUDAPlace, Place, array_module, using
from .plan import Plan, compile_plan, told_as, where
from .scope import Scope

_MAX_PLANS = 16
_GRACE = 5.0  # seconds that the other ranks have to stop in when one has failed


class Transpiled(Protocol):
    """What the executor needs of a DistributeTranspiler."""

    @property
    def world_size(self) -> int: ...
    @property
    def main(self) -> Program: ...
    @property
    def startup(self) -> Program: ...

    @property
    def layout(self) -> Mapping[str, list[tuple[str, int, int, int]]]: ...
    @property
    def row_gradients(self) -> frozenset[str]: ...
    def source_shape(self, name: str) -> tuple[int, ...]: ...
    def verify(self) -> Any: ...
    def get_trainer_program(self, rank: int) -> Program: ...
    def get_startup_program(self, rank: int) -> Program: ...


class ParallelExecutor:
    """Runs N ranks, one thread each, on the given places.

    `run` takes the global feed, deals its rows to the ranks, and returns global values: replicated ones once, sharded ones
    joined, partial ones reduced.

    uneven: what to do with a batch that does not divide by the ranks.
        "weight"  some ranks take a row more, gradients and means are weighted by rows: the result is one device's (default)
        "pad"     the last row is repeated until the batch divides; the repeated rows count in means
        "drop"    the surplus rows at the end are left out
        "error"   FeedError
    timeout: seconds a rank waits for another before the run fails (default FLUIDX_TIMEOUT, 60).
    verify: prove the rank programs right first (`transpiler.verify()`, made once); VerifyError when they are not.

    Raises RankError when a rank fails; the others stop at once and the executor refuses further runs until `run_startup`.
    """

    def __init__(
        self,
        transpiler: Transpiled | Any = None,
        places: Sequence[Place] | None = None,
        uneven: str = "weight",
        timeout: float | None = None,
        scopes: Sequence[Scope] | None = None,
        verify: bool = True,
        **fluid: Any,
    ):
        if fluid:
            raise ExecutionError(
                f"ParallelExecutor has no argument {next(iter(fluid))!r}: what fluid's use_cuda, loss_name and main_program said is in the "
                "transpiler and the places, ParallelExecutor(t, places=fx.cuda_places())"
            )
        if isinstance(transpiler, bool) or not hasattr(transpiler, "get_trainer_program"):
            raise ExecutionError(
                "ParallelExecutor takes the DistributeTranspiler that transpiled the program: "
                f"ParallelExecutor(t, places=fx.cpu_places(4)); got {type(transpiler).__name__}"
            )
        self.transpiler = transpiler
        self.world_size = n = transpiler.world_size
        places = list(places) if places is not None else [CPUPlace()] * n
        if len(places) != n:
            raise ExecutionError(f"the program was transpiled for {n} rank{'s' if n > 1 else ''}, {len(places)} places were given")
        if verify:
            transpiler.verify()
        if uneven not in UNEVEN:
            raise ExecutionError(f"unknown policy uneven={uneven!r}; {nearest(uneven, UNEVEN, 'there are')}")
        self.places, self.uneven = places, uneven
        self.scopes = list(scopes) if scopes is not None else [Scope() for _ in range(n)]
        self._modules = [array_module(p) for p in places]
        self.timeout = config.timeout() if timeout is None else float(timeout)
        self._make_world()
        self._programs = [transpiler.get_trainer_program(r) for r in range(n)]
        self._plans: OrderedDict[tuple, list[Plan]] = OrderedDict()
        self._current: list[Plan | None] = [None] * n  # what each rank ran last
        self._failed: BaseException | None = None
        self._workers = [_Worker(r, p) for r, p in enumerate(places)] if n > 1 else []
        self._stop = weakref.finalize(self, _stop, self._workers)
        self._closed = False

    def _make_world(self) -> None:
        if any(isinstance(p, CUDAPlace) for p in self.places):
            if not all(isinstance(p, CUDAPlace) for p in self.places):
                raise ExecutionError(f"places must be all CPU or all CUDA, got {self.places}")
            from ..comm.nccl import NcclWorld

            self.world: Any = NcclWorld([p.device for p in self.places if isinstance(p, CUDAPlace)], self.timeout)
        else:
            self.world = ThreadWorld(self.world_size, self.timeout)
        self._comms = [self.world.communicator(r) for r in range(self.world_size)]

    @property
    def device_count(self) -> int:
        return self.world_size

    # -- running ------------------------------------------------------------------------------------------------------------

    def run_startup(self) -> None:
        """Run every rank's startup program: initialise, then broadcast each variable from its owner."""
        self._check_open()
        self._failed = None
        self.world.reset()
        programs = [self.transpiler.get_startup_program(r) for r in range(self.world_size)]
        for s in self.scopes:
            s.steps.clear()

        def job(rank: int) -> None:
            plan = self._current[rank] = self._compile(rank, programs[rank], {}, [])
            plan.run({})
            self._finish(rank)

        self._everywhere(job)

    def run(
        self,
        fetch_list: Any = None,
        feed: Mapping[str, Any] | None = None,
        feed_dict: Mapping[str, Any] | None = None,
        return_numpy: bool = True,
        return_merged: bool = True,
    ) -> list[Any]:
        """One step of all ranks. Returns one global value per fetch, or with `return_merged=False` a list of one per rank.

        A feed is split on axis 0 where its variable was declared with an open batch axis, and given whole to every rank where
        it was not. Raises FeedError, NotInitializedError or RankError as `Executor.run` does for one device.
        """
        self._check_open()
        if self._failed is not None:
            raise RankError(
                "a rank failed in an earlier run, so the ranks may differ; call run_startup(), then load a checkpoint if there is one "
                f"({self._failed})"
            )
        names = fetch_names(fetch_list)
        check_fetch(self.transpiler.main, names)
        whole = check_feed(self.transpiler.main, feed if feed is not None else feed_dict)
        parts, feeds = self._deal(whole)
        fetches = [self._rank_fetches(r, names) for r in range(self.world_size)]
        plans = self._plans_for(feeds, names, fetches)
        step = self.scopes[0].steps.get(self.transpiler.main, 0)
        watch = watching()

        def job(rank: int) -> dict[str, Any]:
            plan = self._current[rank] = plans[rank]
            ctx = plan.ctx
            ctx.step = step
            if parts is not None:
                ctx.row_start, ctx.local_rows = parts[rank].start, parts[rank].count
                ctx.weight = parts[rank].weight
            values = plan.run_watched(feeds[rank], watcher(plan, rank)) if watch else plan.run(feeds[rank])
            self._finish(rank)
            xp = self._modules[rank]
            return dict(zip(fetches[rank], values if xp is np else [xp.asnumpy(v) for v in values], strict=True))

        results = self._everywhere(job)
        for s in self.scopes:
            s.steps[self.transpiler.main] = step + 1
        return [self._merged(n, results, parts) if return_merged else [r.get(n) for r in results] for n in names]

    def _deal(self, whole: dict[str, np.ndarray]) -> tuple[list[Rows] | None, list[dict[str, np.ndarray]]]:
        descs = self.transpiler.main.global_block().descs
        split = [n for n in whole if any(isinstance(p, Shard) for p in descs[n].placement)]
        sizes = {n: len(whole[n]) for n in split}
        if not split or self.world_size == 1:
            rows = next(iter(sizes.values()), 0)
            return [Rows(0, rows, rows, 1.0)] if rows else None, [whole for _ in range(self.world_size)]
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{n!r} has {k}" for n, k in sizes.items())
            raise FeedError(f"feeds that are split among the ranks must have the same number of rows: {listed}")
        parts = split_rows(next(iter(sizes.values())), self.world_size, self.uneven)
        return parts, [{n: cut(a, p) if n in split else a for n, a in whole.items()} for p in parts]

    def _placement(self, name: str) -> Placement:
        return self.transpiler.main.global_block().desc(name).placement

    def _rank_fetches(self, rank: int, names: list[str]) -> list[str]:
        """What this rank must fetch: a value that lives on one rank is fetched there only; a cut one chunk by chunk elsewhere."""
        out = []
        for n in names:
            if self._chunks(n):
                continue
            place = self._placement(n)
            if any(isinstance(p, At) and p.root != rank for p in place):
                continue
            out.append(n)
        return out

    def _chunks(self, name: str) -> list[tuple[str, int, int, int]]:
        """(chunk, owner rank, start, stop) of a state variable that the strategy cut up; empty when it did not."""
        return self.transpiler.layout.get(name, [])

    def _merged(self, name: str, results: list[dict[str, Any]], parts: list[Rows] | None) -> Any:
        if self._chunks(name):
            return self.state(name)
        place = self._placement(name)
        values = [r.get(name) for r in results]
        value = merge(name, values, place, parts)
        return value / value.dtype.type(self.world_size) if name in self.transpiler.row_gradients else value

    def state(self, name: str) -> np.ndarray:
        """The global value of a persistable variable, joined from its owners where the strategy cut it up."""
        chunks = self._chunks(name)
        if not chunks:
            place = self._placement(name)
            owner = next((p.root for p in place if isinstance(p, At)), 0)
            return self.scopes[owner].get(name)
        pieces = [self.scopes[owner].get(chunk).reshape(-1) for chunk, owner, _, _ in sorted(chunks, key=lambda c: c[2])]
        shape = self.transpiler.source_shape(name)
        return np.concatenate(pieces).reshape(shape)

    def set_state(self, name: str, value: Any) -> None:
        """Give a persistable variable a value on every rank that holds it (or a part of it)."""
        value = np.asarray(value)
        chunks = self._chunks(name)
        for chunk, owner, start, stop in chunks:
            scope = self.scopes[owner]
            scope.set(chunk, value.reshape(-1)[start:stop].reshape(np.shape(scope.arrays[chunk])))
        if not chunks:
            for scope in self.scopes:
                if name in scope.arrays or not self._placement(name):
                    scope.set(name, value)

    def _plans_for(self, feeds: list[dict[str, np.ndarray]], names: list[str], fetches: list[list[str]]) -> list[Plan]:
        key = (tuple(names), tuple(tuple(sorted((n, a.shape) for n, a in f.items())) for f in feeds), tuple(s.version for s in self.scopes))
        plans = self._plans.get(key)
        if plans is None:
            plans = self._everywhere(lambda r: self._compile(r, self._programs[r], feeds[r], fetches[r]))
            self._plans[(*key[:2], tuple(s.version for s in self.scopes))] = plans
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plans

    def _compile(self, rank: int, program: Program, feed: Mapping[str, np.ndarray], fetch: list[str]) -> Plan:
        groups = {g: program.group_ranks(g, rank) for g in program.groups}
        ctx = RunContext(rank, self.world_size, self._comms[rank], groups)
        return compile_plan(program, feed_types(feed), fetch, self.scopes[rank], ctx, self._modules[rank])

    def _finish(self, rank: int) -> None:
        """Wait, with a deadline, for what the rank has queued on its GPU."""
        if self._modules[rank] is not np:
            self._comms[rank].wait()

    def _everywhere(self, job: Callable[[int], Any]) -> list[Any]:
        """`job(rank)` on every rank at once; the first failure stops all and is raised."""
        if not self._workers:
            with using(self.places[0]):
                return [job(0)]
        results: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        for w in self._workers:
            w.inbox.put((job, results, self.world))
        outcomes: dict[int, _Outcome] = {}
        try:
            self._collect(results, outcomes)
        except BaseException as e:  # Ctrl-C: stop the ranks, leave nothing running
            self._failed = e
            self.world.abort(e)
            try:
                self._collect(results, outcomes, _GRACE)
            finally:
                self._replace([r for r in range(self.world_size) if r not in outcomes])
            raise
        if len(outcomes) < self.world_size or any(o.error is not None for o in outcomes.values()):
            self._fail(outcomes)
        return [outcomes[r].value for r in range(self.world_size)]

    def _collect(self, results: queue.SimpleQueue[_Outcome], outcomes: dict[int, _Outcome], wait: float | None = None) -> None:
        """Gather outcomes. Once a rank has failed, the others get little time to notice: one that is stuck is left behind."""
        deadline = None if wait is None else time.monotonic() + wait
        while len(outcomes) < self.world_size:
            try:
                o = results.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            outcomes[o.rank] = o
            if o.error is not None and deadline is None:
                deadline = time.monotonic() + min(self.timeout, _GRACE)

    def _fail(self, outcomes: dict[int, _Outcome]) -> NoReturn:
        lost = [r for r in range(self.world_size) if r not in outcomes]
        at = {r: plan.running() if (plan := self._current[r]) is not None else None for r in lost}
        self._replace(lost)
        errors = [(r, e) for r in sorted(outcomes) if (e := outcomes[r].error) is not None]
        causes = [(r, e) for r, e in errors if not isinstance(_root(e), CommAborted)] or errors
        # a rank that only waited too long is a consequence when another one says what went wrong
        causes = [(r, e) for r, e in causes if not isinstance(_root(e), CommTimeout)] or causes
        rank, error = causes[0]
        if isinstance(error, FluidxError) and not isinstance(error, ExecutionError):
            self.world.reset()
            raise error  # wrong feed or program: found before anything ran
        self._failed = error
        text, root = f"rank {rank}: {told_as(error)}", _root(error)
        plan = self._current[rank]
        if not isinstance(error, Exception) and plan is not None:  # not a failure of the operator, but it was there
            text += where(plan.running())
        if isinstance(root, CommError) and root.rank is not None:
            text += self._excuse(root.rank, outcomes, at)
            rank = root.rank
        raise RankError(text, rank) from error

    def _excuse(self, rank: int, outcomes: dict[int, _Outcome], at: Mapping[int, Any]) -> str:
        """What is known of a rank that the others waited for."""
        if rank not in outcomes:
            return f"\n  rank {rank} is stuck{where(at.get(rank))}"
        return f"\n  rank {rank} came to the end of its program" if outcomes[rank].error is None else ""

    def _replace(self, lost: Sequence[int]) -> None:
        """Leave stuck threads behind: whatever they still do, they do to a world and to arrays that nobody uses any more."""
        if not lost:
            return
        for r in lost:
            self._workers[r].inbox.put(None)
            self._workers[r] = _Worker(r, self.places[r])
            with using(self.places[r]):
                for name, a in list(self.scopes[r].arrays.items()):
                    self.scopes[r].bind(name, a.copy())
        self._plans.clear()
        self._make_world()

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutionError("this executor is closed; make a new one")

    def close(self) -> None:
        """Stop the rank threads and drop plans."""
        workers = list(self._workers)
        self._stop()
        for w in workers:
            w.thread.join(_GRACE)
        self._plans.clear()
        self._current = [None] * self.world_size
        self._closed = True
        if hasattr(self.world, "close"):
            self.world.close()

    def __enter__(self) -> ParallelExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


class _Outcome(NamedTuple):
    rank: int
    value: Any
    error: BaseException | None


class _Worker:
    """The thread of one rank: takes (job, results, world) from its inbox, and None as the sign to end."""

    def __init__(self, rank: int, place: Place):
        self.rank, self.place = rank, place
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=f"fluidx-rank-{rank}", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        if isinstance(self.place, CUDAPlace):
            array_module(self.place).cuda.Device(self.place.device).use()
        while (order := self.inbox.get()) is not None:
            job, results, world = order
            try:
                results.put(_Outcome(self.rank, job(self.rank), None))
            except BaseException as e:  # whatever it is, the other ranks must not wait for this one
                world.abort(e)
                results.put(_Outcome(self.rank, None, e))
            # an idle thread must not keep the executor alive
            del order, job, results, world


def _stop(workers: list[_Worker]) -> None:
    for w in workers:
        w.inbox.put(None)
    workers.clear()
