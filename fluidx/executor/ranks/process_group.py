"""ProcessGroup: ranks that are processes of this host, which this process starts. It sends them their programs as text, and messages."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from typing import Any, NoReturn

import numpy as np

from ... import native
from ...comm.base import CommTimeout
from ...comm.flight_recorder import STARTUP
from ...comm.process_spawner import Channel
from ...ir.constants import Array
from ...ir.dtypes import dtype_name
from ...ir.errors import ExecutionError, FluidxError, RankError
from ...ir.mapped_file import MappedFile
from ...ir.types import TensorType
from ...native import shared
from ..places import ProcessPlace
from ..run import observers
from ..run.call_descriptions import RemotePlan
from ..scope import Scope
from .affinity import cores_of
from .background_writer import SharedCopy
from .process_pool import ProcessPool
from .published_rank import array_at, types_of
from .rank_group import CLOSED, NOTHING, Feeds, Fetched, GroupSetup, OneProcess, activity
from .rank_programs import RankPrograms, rank_programs
from .remote_errors import rebuilt, waiting_text
from .thread_workers import Outcome, diagnose, first_failure, root_cause

_TAKING = "while it received a value"


class _RankProcesses:
    """The processes of all ranks and their variables, which the groups of several executors may share. `programs` are those of the first
    group."""

    def __init__(self, programs: RankPrograms, timeout: float):
        self.programs, self.timeout, self.cores = programs, timeout, cores_of(programs.world_size)
        self.lock = threading.RLock()
        self.failure: BaseException | None = None
        self.numbers = count()  # of the groups' programs and of bound plans
        self.groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self.scopes: list[Scope] = [_ProcessScope(self, r) for r in programs.own]
        self.starts = 0
        self.begin()

    def begin(self) -> None:
        """Start the processes."""
        self.pool = ProcessPool(self.programs.world_size, self.timeout, self.cores)
        self.end: Any = weakref.finalize(self, self.pool.end)
        self.starts += 1
        for scope in self.scopes:
            scope.arrays = {}

    def array(self, address: Sequence[Any]) -> np.ndarray:
        """The array at an address in the processes' memory."""
        return array_at(self.pool.memory.array, address)

    def put(self, programs: RankPrograms, rank: int, name: str, value: np.ndarray) -> None:
        """Copy an array into memory that a rank allocates for it."""
        said = {"do": "reserve", "name": name, "layout": [dtype_name(value.dtype), value.shape]}
        self.array(self.ask(programs, {rank: said}, _TAKING)[rank])[...] = value

    def bind(self, rank: int, name: str, value: np.ndarray) -> None:
        """Make a variable of a rank, or replace its array."""
        if self.failure is not None:
            raise RankError(f"a rank failed in an earlier run; call run_startup() first ({self.failure})")
        if self.pool.ended:
            raise ExecutionError(CLOSED)
        self.put(self.programs, rank, name, value)
        self.update(self.ask(self.programs, {rank: {"do": "bind", "name": name}}, _TAKING))

    def update(self, answers: Mapping[int, Any]) -> None:
        """Take the new addresses of the ranks' variables into the scopes."""
        for rank, said in answers.items():
            if said["state"] is not None:
                self.scopes[rank].arrays = {n: self.array(address) for n, address in said["state"]}
                self.scopes[rank].version = said["version"]

    # -- asking ----------------------------------------------------------------------------------------------------------------

    def ask(
        self, programs: RankPrograms, messages: Mapping[int, Any], at: str, meet: bool = False, files: Mapping[int, int] | None = None
    ) -> dict[int, Any]:
        """Send a message, and perhaps a file, to each rank; their answers. `at`: what the ranks do meanwhile, for errors. `meet`: may ranks
        wait for one another?"""
        try:
            answers = self.pool.ask(messages, files or {})
        except BaseException as e:  # Ctrl-C
            self._fail(e)
            raise
        outcomes = {
            r: Outcome(a.get("done"), rebuilt(a["fault"], programs.mains[r]) if "fault" in a else a.get("error"))
            for r, a in answers.items()
        }
        if len(outcomes) < len(messages) or any(o.error is not None for o in outcomes.values()):
            self._lose(programs, outcomes, at, meet)
        return {r: o.value for r, o in outcomes.items()}

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.pool.end()

    def _lose(self, programs: RankPrograms, outcomes: dict[int, Outcome], at: str, meet: bool) -> NoReturn:
        rank, error = first_failure(outcomes)
        if isinstance(error, FluidxError) and not isinstance(error, ExecutionError):
            if meet:  # the other ranks were aborted
                self._fail(error)
            raise error
        rank, text = diagnose(rank, error, outcomes, lambda r: None)
        late = isinstance(root_cause(error), CommTimeout)
        if late:  # the rank that timed out may have waited for a stopped one
            rank = next((r for r, p in enumerate(self.pool.processes) if p.stopped()), rank)
        named = late and isinstance(error, ExecutionError)  # the timeout of another rank names the operator already
        scene = waiting_text(rank, programs.pair(rank), self.pool.said(rank), outcomes, named)
        halted = late and self.pool.processes[rank].stopped()
        text = f"rank {rank} is stopped, as by SIGSTOP{scene}\n  {text}" if halted else text + scene
        text += f"\n  {at}" + self.pool.scene(rank)
        self._fail(error)
        raise RankError(text, rank) from error


class _ProcessScope(Scope):
    """The variables of a rank, as arrays in memory that its process shares."""

    def __init__(self, processes: _RankProcesses, rank: int):
        super().__init__()
        self.processes, self._rank = weakref.ref(processes), rank

    def bind(self, name: str, array: Any) -> None:
        """Allocate a variable in its rank's process, and copy the value there."""
        processes = self.processes()
        if processes is None:
            raise ExecutionError(f"variable {name!r} belongs to an executor that is closed")
        processes.bind(self._rank, name, np.asarray(array))


class ProcessStep:
    """A bound plan in each rank's process, by its number there, with its feeds and fetches in shared memory."""

    def __init__(self, number: int, answers: Sequence[Mapping[str, Any]], processes: _RankProcesses):
        self.number = number
        self.fetch_types = [types_of(said["types"]) for said in answers]
        self.feeds = [[(n, processes.array(address)) for n, address in said["feeds"]] for said in answers]
        self.fetches = [[processes.array(address) for address in said["fetches"]] for said in answers]
        self.descriptions: list[RemotePlan] = []  # of the plans' calls, filled when a profiler attaches


class ProcessGroup:
    """A RankGroup of processes that this process starts."""

    ranks_are = "are processes that belong to"
    bound_to_process = True
    script = OneProcess()

    def take_programs(self, given: Any) -> RankPrograms:
        pairs = rank_programs(given)
        return RankPrograms(pairs, range(len(pairs)))

    def open(self, setup: GroupSetup) -> RankPrograms:
        self._programs, self.places, n = setup.programs, setup.places, len(setup.places)
        if not all(isinstance(p, ProcessPlace) for p in self.places):
            raise ExecutionError(f"places must be all process_places or none, got {self.places}")
        if reason := native.why_not() or shared.why_not():
            raise ExecutionError(f"process_places needs the C kernels and shared memory: {reason}; cpu_places(n) runs ranks as threads")
        self.own, self._steps = range(n), weakref.WeakSet[ProcessStep]()
        if setup.scopes is None:
            self._processes = _RankProcesses(self._programs, setup.timeout)
        else:
            self._processes = _of_scopes(setup.scopes)
        with self.lock:
            if self.pool.ended:
                raise ExecutionError("the processes of these scopes have ended; call run_startup() of their executor first")
            self._number = next(self._processes.numbers)
            self._hand_programs()
            self._processes.groups.add(self)
        return self._programs

    # -- what executors share with the same processes --------------------------------------------------------------------------

    @property
    def pool(self) -> ProcessPool:
        return self._processes.pool

    @property
    def lock(self) -> threading.RLock:
        return self._processes.lock

    @property
    def scopes(self) -> list[Scope]:
        return self._processes.scopes

    @property
    def timeout(self) -> float:
        return self._processes.timeout

    @property
    def failure(self) -> BaseException | None:
        return self._processes.failure

    def _hand_programs(self) -> None:
        for rank, place in enumerate(self.places):
            assert isinstance(place, ProcessPlace)
            pair = self._programs.pair(rank)
            in_files = self._hand_constants(rank, pair.constants())
            said = {"do": "programs", "of": self._number, "text": str(pair), "imports": place.imports, "in_files": in_files}
            self._ask({rank: said}, "while it received its programs")

    def _hand_constants(self, rank: int, constants: Mapping[str, Array]) -> dict[str, Any]:
        """Copy constants into memory of a rank, and open the files of those that are in files for it. Returns the places of the latter:
        digest -> number of the file, offset, dtype and shape."""
        numbers: dict[MappedFile, int] = {}
        places: dict[str, Any] = {}
        for digest, constant in constants.items():
            place = constant.in_file
            if place is None:
                self._processes.put(self._programs, rank, digest, constant.values)
                continue
            if place.file not in numbers:
                numbers[place.file] = len(numbers)
                self._ask({rank: {"do": "map_file"}}, "while it opened a file of weights", files={rank: place.file.fd})
            t = constant.type
            places[digest] = numbers[place.file], place.offset, t.dtype, t.shape
        return places

    def reset(self) -> None:
        self._processes.failure = None
        if self.pool.ended:
            self._processes.begin()
            for group in self._processes.groups:
                group._hand_programs()

    def close(self) -> None:
        self._processes.groups.discard(self)
        if not self._processes.groups:
            self._processes.end()

    # -- running ---------------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """If the number of threads has changed, give each rank its new share."""
        if (threads := native.num_threads()) != self.pool.threads:
            self._ask({r: {"do": "share", "threads": threads} for r in self.own}, "while its threads were set")
            self.pool.threads = threads

    def start(self) -> None:
        for rank, (main, startup) in enumerate(zip(self._programs.mains, self._programs.startups, strict=True)):
            self._programs.check_unchanged(rank, main)
            self._programs.check_unchanged(rank, startup)
        said = {r: {"do": "start", "of": self._number} for r in self.own}
        self._processes.update(self._ask(said, f"in {activity(STARTUP)}", meet=True))

    def versions(self) -> tuple[int, ...]:
        return (self._processes.starts, *[s.version for s in self.scopes])

    def prepare(self, feeds: Mapping[str, TensorType], fetches: Sequence[list[str]], fuse: bool, overlap: int | None) -> ProcessStep:
        for rank, main in enumerate(self._programs.mains):
            self._programs.check_unchanged(rank, main)
        number, keep = next(self._processes.numbers), [step.number for group in self._processes.groups for step in group._steps]
        types = {n: (t.dtype, t.shape) for n, t in feeds.items()}
        common = {"do": "ready", "of": self._number, "number": number, "keep": keep, "feeds": types, "fuse": fuse, "overlap": overlap}
        found = self._ask({r: {**common, "fetches": names} for r, names in enumerate(fetches)}, "while it planned the main program")
        self._processes.update(found)
        step = ProcessStep(number, [found[r] for r in self.own], self._processes)
        self._steps.add(step)
        return step

    def step(self, step: ProcessStep, feeds: Feeds, number: int, watched: observers.ObserverSettings) -> tuple[Fetched, bool]:
        for places, fed in zip(step.feeds, feeds, strict=True):
            for name, place in places:
                np.copyto(place, fed[name])
        timed = observers.any_wants(self._programs.mains)
        said = {"do": "run", "number": step.number, "step": number, "asked": tuple(watched), "timed": timed}
        times = self._ask(dict.fromkeys(self.own, said), f"in {activity(number)}", meet=True)
        if timed:
            self._show(step, times, number)
        return [list(of) for of in step.fetches], True

    def _show(self, step: ProcessStep, times: Mapping[int, observers.Times], number: int) -> None:
        """Report a run to profilers."""
        if not step.descriptions:
            found = self._ask({r: {"do": "describe", "number": step.number} for r in self.own}, "while it described its plan")
            mains = self._programs.mains
            step.descriptions += [RemotePlan(found[r], main, r, len(mains)) for r, main in enumerate(mains)]
        for rank, plan in enumerate(step.descriptions):
            plan.ctx.step = number
            observers.report_times(plan, rank, times[rank])

    def published(self, names: Sequence[str]) -> AbstractContextManager[None]:
        return NOTHING

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> dict[int, SharedCopy]:
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
        values = {r: {n: self._processes.array(address) for n, address in of} for r, of in found.items()}
        return {
            r: SharedCopy(self.pool.processes[r], Channel(here), values[r], self.timeout, self._programs.mains[r])
            for r, (here, _) in ends.items()
        }

    def _ask(self, messages: Mapping[int, Any], at: str, meet: bool = False, files: Mapping[int, int] | None = None) -> dict[int, Any]:
        return self._processes.ask(self._programs, messages, at, meet, files)


def _of_scopes(scopes: Sequence[Scope]) -> _RankProcesses:
    """The processes that have the variables of these scopes."""
    found = next((s.processes() for s in scopes if isinstance(s, _ProcessScope)), None)
    if found is None or list(scopes) != found.scopes:
        raise ExecutionError(
            "ranks that are processes have their own variables: pass scopes=exe.scopes of another executor on process_places, or "
            "set values with set_state"
        )
    return found
