"""ProcessExecutor: the ParallelExecutor whose ranks are processes of this host. It splits feeds and joins fetches; the processes run the
programs."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ... import native
from ...comm.base import CommError, CommTimeout
from ...comm.process_spawner import Channel
from ...ir.dtypes import dtype_name, np_dtype
from ...ir.errors import ExecutionError, FluidxError, RankError
from ...ir.program import ProgramPair
from ...ir.types import TensorType
from ...native import shared
from ..error_text import where
from ..places import ProcessPlace
from ..run import observers
from ..run.call_descriptions import RemotePlan
from ..scope import Scope
from .affinity import cores_of
from .background_writer import SharedCopy
from .parallel_executor import ParallelExecutor
from .process_pool import ProcessPool
from .remote_errors import operator_of, rebuilt
from .run_cache import PreparedRun
from .thread_workers import Outcome, diagnose, first_failure, root_cause

_TAKING = "while it received a value"


class _ProcessPlan(NamedTuple):
    """A bound plan in a rank's process: its number there, and its feeds and fetches in shared memory."""

    number: int
    fetch_types: Sequence[TensorType]
    feeds: Sequence[tuple[str, np.ndarray]]
    fetches: Sequence[np.ndarray]


class _ProcessScope(Scope):
    """The variables of a rank, as arrays in memory that its process shares."""

    def __init__(self, executor: ProcessExecutor, rank: int):
        super().__init__()
        self._executor, self._rank = weakref.ref(executor), rank

    def bind(self, name: str, array: Any) -> None:
        """Allocate a variable in its rank's process, and copy the value there."""
        executor = self._executor()
        if executor is None:
            raise ExecutionError(f"variable {name!r} belongs to an executor that is closed")
        executor._bind_in_process(self._rank, name, np.asarray(array))


class ProcessExecutor(ParallelExecutor):
    """A ParallelExecutor whose places are `process_places`."""

    _ranks_are = "are processes that belong to"
    _bound_to_process = True
    pool: ProcessPool
    _given_owner: ProcessExecutor | None = None
    _failure: BaseException | None = None  # the failure of the processes

    def _open(self, scopes: Sequence[Scope] | None) -> None:
        if not all(isinstance(p, ProcessPlace) for p in self.places):
            raise ExecutionError(f"places must be all process_places or none, got {self.places}")
        if reason := native.why_not() or shared.why_not():
            raise ExecutionError(f"process_places needs the C kernels and shared memory: {reason}; cpu_places(n) runs ranks as threads")
        self._others: weakref.WeakSet[ProcessExecutor] = weakref.WeakSet()
        if scopes is not None:
            self._join(self._owner_of(scopes))
            return
        self._cores = cores_of(self.world_size)
        self._numbers = count()
        self._number = next(self._numbers)
        self.scopes = [_ProcessScope(self, r) for r in range(self.world_size)]
        self._begin()

    # -- several executors that share processes and variables ------------------------------------------------------------------

    def _owner_of(self, scopes: Sequence[Scope]) -> ProcessExecutor:
        """The executor that started the processes of these scopes."""
        host = next((s._executor() for s in scopes if isinstance(s, _ProcessScope)), None)
        if host is None or list(scopes) != list(host.scopes):
            raise ExecutionError(
                "ranks that are processes have their own variables: pass scopes=exe.scopes of another executor on process_places, or "
                "set values with set_state"
            )
        return host

    def _join(self, host: ProcessExecutor) -> None:
        self._given_owner, self._lock, self.timeout, self.scopes = host, host._lock, host.timeout, host.scopes
        with self._lock:
            if host.pool.ended:
                raise ExecutionError("the processes of these scopes have ended; call run_startup() of their executor first")
            self.pool, self._number = host.pool, next(host._numbers)
            self._hand_programs()
            host._others.add(self)

    @property
    def _owner(self) -> ProcessExecutor:
        """The executor that started the processes."""
        return self if self._given_owner is None else self._given_owner

    def _sharers(self) -> list[ProcessExecutor]:
        return [self._owner, *self._owner._others]

    @property
    def _failed(self) -> BaseException | None:
        return self._owner._failure

    @_failed.setter
    def _failed(self, error: BaseException | None) -> None:
        self._owner._failure = error

    def _begin(self) -> None:
        """Start the processes and send them their programs."""
        host = self._owner
        pool = ProcessPool(self.world_size, self.timeout, host._cores)
        host._stop = weakref.finalize(host, pool.end)
        for scope in self.scopes:
            scope.arrays = {}
        for one in self._sharers():
            one.pool = pool
            one._ready.clear()
            one._hand_programs()

    def _hand_programs(self) -> None:
        pairs = [ProgramPair(m, s) for m, s in zip(self._mains, self._startups, strict=True)]
        for rank, (pair, place) in enumerate(zip(pairs, self.places, strict=True)):
            assert isinstance(place, ProcessPlace)
            for digest, constant in pair.constants().items():
                self._put(rank, digest, constant.values)
            said = {"do": "programs", "of": self._number, "text": str(pair), "imports": place.imports}
            self._ask({rank: said}, "while it received its programs")

    def _reset(self) -> None:
        if self.pool.ended:
            self._begin()

    def _end(self) -> None:
        self._owner._others.discard(self)
        if all(one is self or one._closed for one in self._sharers()):
            self._owner._stop()

    # -- running ---------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for rank, (main, startup) in enumerate(zip(self._mains, self._startups, strict=True)):
            self._check_unchanged(rank, main)
            self._check_unchanged(rank, startup)
        self._update_scopes(
            self._ask({r: {"do": "start", "of": self._number} for r in range(self.world_size)}, "in the startup program", meet=True)
        )

    def _expect_step(self) -> None:
        """If the number of threads has changed, give each rank its new share."""
        if (threads := native.num_threads()) != self.pool.threads:
            self._ask({r: {"do": "share", "threads": threads} for r in range(self.world_size)}, "while its threads were set")
            self.pool.threads = threads

    def _bound(self, whole: Mapping[str, np.ndarray], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> list[Any]:
        for rank, main in enumerate(self._mains):
            self._check_unchanged(rank, main)
        number, keep = next(self._owner._numbers), [ready.bounds[0].number for one in self._sharers() for ready in one._ready.values()]
        feeds = {n: (dtype_name(a.dtype), a.shape) for n, a in whole.items()}
        common = {"do": "ready", "of": self._number, "number": number, "keep": keep, "feeds": feeds, "fuse": fuse, "overlap": overlap}
        found = self._ask({r: {**common, "fetches": names} for r, names in enumerate(fetches)}, "while it planned the main program")
        self._update_scopes(found)
        return [
            _ProcessPlan(
                number, [TensorType(d, tuple(shape)) for d, shape in f["types"]], [(n, self._array(address)) for n, address in f["feeds"]],
                [self._array(address) for address in f["fetches"]],
            )
            for f in (found[r] for r in range(self.world_size))
        ]  # fmt: skip

    def _launcher(self, bounds: Sequence[Any]) -> None:
        return None

    def _values(
        self, ready: PreparedRun, feeds: Sequence[Mapping[str, np.ndarray]], step: int, watched: observers.ObserverSettings
    ) -> tuple[list[list[Any]], bool]:
        bounds: Sequence[Any] = ready.bounds
        for bound, fed in zip(bounds, feeds, strict=True):
            for name, place in bound.feeds:
                np.copyto(place, fed[name])
        timed = observers.any_wants(self._mains)
        said = {"do": "run", "step": step, "asked": tuple(watched), "timed": timed}
        times = self._ask({r: {**said, "number": b.number} for r, b in enumerate(bounds)}, f"in step {step}", meet=True)
        if timed:
            self._show(ready, times, step)
        return [list(bound.fetches) for bound in bounds], True

    def _show(self, ready: PreparedRun, times: Mapping[int, observers.Times], step: int) -> None:
        """Report a run to profilers."""
        if not ready.remote_plans:
            found = self._ask(
                {r: {"do": "describe", "number": b.number} for r, b in enumerate(ready.bounds)}, "while it described its plan"
            )
            ready.remote_plans[:] = [RemotePlan(found[r], main, r, self.world_size) for r, main in enumerate(self._mains)]
        for rank, sight in enumerate(ready.remote_plans):
            sight.ctx.step = step
            observers.report_times(sight, rank, times[rank])

    # -- arrays in the ranks' processes -------------------------------------------------------------------------------------

    def _array(self, address: Sequence[Any]) -> np.ndarray:
        at, dtype, shape = address
        return self.pool.memory.array(at, shape, np_dtype(dtype))

    def _put(self, rank: int, name: str, value: np.ndarray) -> None:
        """Copy an array into memory that a rank allocates for it."""
        address = self._ask({rank: {"do": "reserve", "name": name, "layout": [dtype_name(value.dtype), value.shape]}}, _TAKING)[rank]
        self._array(address)[...] = value

    def _bind_in_process(self, rank: int, name: str, value: np.ndarray) -> None:
        if self._failed is not None:
            raise RankError(f"a rank failed in an earlier run; call run_startup() first ({self._failed})")
        if self.pool.ended:
            raise ExecutionError("this executor is closed; make a new one")
        self._put(rank, name, value)
        self._update_scopes(self._ask({rank: {"do": "bind", "name": name}}, _TAKING))

    def _update_scopes(self, found: Mapping[int, Any]) -> None:
        """Take the new addresses of the ranks' variables into the scopes."""
        for rank, said in found.items():
            if said["state"] is not None:
                self.scopes[rank].arrays = {n: self._array(address) for n, address in said["state"]}
                self.scopes[rank].version = said["version"]

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> dict[int, SharedCopy]:
        """A thread in each rank's process that does `role`, "module:function", with what variables hold now, or with copies of that. None
        where the processes have ended."""
        self._check_process()
        with self._lock:
            if self.pool.ended:
                return {}
            said = {r: {"do": "background", "function": function, "names": list(of), "copies": copies} for r, of in names.items()}
            with ExitStack() as ours, ExitStack() as theirs:
                ends = {r: socket.socketpair() for r in names}
                for here, there in ends.values():
                    ours.enter_context(here)
                    theirs.enter_context(there)
                found = self._ask(said, "while it was asked for its variables", files={r: there.fileno() for r, (_, there) in ends.items()})
                ours.pop_all()
            values = {r: {n: self._array(address) for n, address in of} for r, of in found.items()}
            return {
                r: SharedCopy(self.pool.processes[r], Channel(here), values[r], self.timeout, self._mains[r])
                for r, (here, _) in ends.items()
            }

    # -- asking ----------------------------------------------------------------------------------------------------------------

    def _ask(self, messages: Mapping[int, Any], at: str, meet: bool = False, files: Mapping[int, int] | None = None) -> dict[int, Any]:
        """Send a message, and perhaps a file, to each rank; their answers. `at`: what the ranks do meanwhile, for errors. `meet`: may ranks
        wait for one another?"""
        try:
            answers = self.pool.ask(messages, files or {})
        except BaseException as e:  # Ctrl-C
            self._failed = e
            self.pool.end()
            raise
        outcomes = {r: Outcome(a.get("done"), a["error"] if "error" in a else self._error(r, a)) for r, a in answers.items()}
        if len(outcomes) < len(messages) or any(o.error is not None for o in outcomes.values()):
            self._lose(outcomes, at, meet)
        return {r: o.value for r, o in outcomes.items()}

    def _error(self, rank: int, answer: Mapping[str, Any]) -> Exception | None:
        return rebuilt(answer["fault"], self._mains[rank]) if "fault" in answer else None

    def _lose(self, outcomes: dict[int, Outcome], at: str, meet: bool) -> NoReturn:
        rank, error = first_failure(outcomes)
        if isinstance(error, FluidxError) and not isinstance(error, ExecutionError):
            if meet:  # the other ranks were aborted
                self._failed = error
                self.pool.end()
            raise error
        rank, text = diagnose(rank, error, outcomes, lambda r: None)
        if isinstance(root_cause(error), CommTimeout):  # the rank that timed out may have waited for a stopped one
            rank = next((r for r, p in enumerate(self.pool.processes) if p.stopped()), rank)
        late = isinstance(root_cause(error), CommTimeout)
        scene = self._scene(rank, outcomes, late and isinstance(error, ExecutionError))
        halted = late and self.pool.processes[rank].stopped()
        text = f"rank {rank} is stopped, as by SIGSTOP{scene}\n  {text}" if halted else text + scene
        text += f"\n  {at}" + self.pool.scene(rank)
        self._failed = error
        self.pool.end()
        raise RankError(text, rank) from error

    def _scene(self, rank: int, outcomes: Mapping[int, Outcome], late: bool) -> str:
        """Text about a rank that did not report an operator itself: its current operator, and the operator in which another rank waited for
        it. With `late` the timeout of that other rank names it already."""
        error = outcomes[rank].error if rank in outcomes else None
        op, text = getattr(error, "operator", None), ""
        if op is None:
            op = operator_of(self._mains[rank], self.pool.said(rank)) or operator_of(self._startups[rank], self.pool.said(rank))
            text = where(op)
        if late or (op is not None and op.attrs.get("group") is not None):
            return text
        for other, outcome in sorted(outcomes.items()):
            waits = getattr(outcome.error, "operator", None)
            if other != rank and waits is not None and isinstance(root_cause(outcome.error), CommError):  # type: ignore[arg-type]
                return f"{text}\n  rank {other} waited{where(waits)}"
        return text
