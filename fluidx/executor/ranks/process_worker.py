"""The process of one rank: it receives its programs as text, and runs them on request.

Feeds, fetches and state are passed through memory that the processes share; messages contain addresses.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ... import native
from ...comm.flight_recorder import STARTUP
from ...comm.process_spawner import GONE, Channel
from ...comm.processes import ProcessWorld
from ...ir.constants import Array
from ...ir.dtypes import dtype_name, np_dtype
from ...ir.parser import parse_pair
from ...ir.program import Program, ProgramPair
from ...ir.types import TensorType
from ...native import shared
from ..context import RunContext
from ..plan import allocation
from ..progress import Progress
from ..run import observers
from ..run.bind import prepare
from ..run.bound_plan import BoundPlan
from ..run.call_descriptions import describe_plan
from ..scope import Scope
from .affinity import keep_to
from .remote_errors import ErrorRecord, shown

ArrayAddress = tuple[int, str, list[int]]  # address in shared memory, dtype and shape


def serve(channel: Channel, fds: Sequence[int], given: Mapping[str, Any]) -> None:
    """Serve messages as a rank until the channel is closed."""
    rank = given["rank"]
    keep_to(frozenset(given["cores"]) or None)
    there = shared.Memory(fds[0], given["start"], given["ranks"])
    there.close()
    world = ProcessWorld(there, rank, given["timeout"])
    allocation.new_bytes = shared.take
    served = _RankMessages(world, rank)
    served.share(given["threads"])
    while True:
        message, files = channel.receive(files=1)
        try:
            answer: Any = {"done": getattr(served, message.pop("do"))(*files, **message)}
        except BaseException as e:  # after any error, the other ranks must not wait for this one
            fault = ErrorRecord.of(e, served.running())
            if served.others_wait:
                world.abort(e)
            answer = {"fault": fault}
        sys.stdout.flush()
        channel.send(answer)


class _RankMessages:
    """The messages, as methods; the return value is the answer."""

    def __init__(self, world: ProcessWorld, rank: int):
        self.world, self.rank = world, rank
        self.comm = world.communicator(rank)
        self.progress = Progress(world.shared, rank, shown)
        self.scope = Scope()
        self.pairs: dict[int, ProgramPair] = {}
        self.reported = -1  # the scope version that was reported last
        self.incoming: dict[str, np.ndarray] = {}
        self.bounds: dict[int, tuple[BoundPlan, list[tuple[np.ndarray, np.ndarray]]]] = {}
        self.current: BoundPlan | None = None
        self.others_wait = False  # may other ranks wait for this one?

    def running(self) -> Any:
        return self.current.compute.running() if self.current is not None else None

    def share(self, threads: int) -> None:
        """Use this rank's share of so many threads."""
        native.set_num_threads(max(1, threads // self.world.world_size))

    def reserve(self, name: str, layout: Sequence[Any]) -> ArrayAddress:
        """Allocate an array that the caller will fill."""
        self.incoming[name] = allocation.zeros(tuple(layout[1]), np_dtype(layout[0]))
        return address_of(self.incoming[name])

    def programs(self, of: int, text: str, imports: Sequence[str]) -> None:
        """Store the programs of executor number `of`."""
        for module in imports:
            import_module(module)
        constants = {digest: Array(there) for digest, there in self.incoming.items()}
        self.incoming.clear()
        self.pairs[of] = parse_pair(text, constants)

    def bind(self, name: str) -> Any:
        """Make the received array the storage of a variable."""
        self.scope.bind(name, self.incoming.pop(name))
        return self._state()

    def start(self, of: int) -> Any:
        """Run the startup program."""
        self.others_wait = True
        self.progress.begin(STARTUP)
        self.current = self._prepared(self.pairs[of].startup, {}, [], True, None)
        self.current.run({})
        self.others_wait = False
        return self._state()

    def ready(
        self, of: int, number: int, keep: Sequence[int], feeds: Mapping[str, Any], fetches: Sequence[str], fuse: bool, overlap: int | None
    ) -> dict[str, Any]:
        """Plan and bind the main program for feeds of these types; drop other bound plans, except those in `keep`."""
        self.bounds = {k: b for k, b in self.bounds.items() if k in keep}
        types = {n: TensorType(dtype, tuple(shape)) for n, (dtype, shape) in feeds.items()}
        bound = self._prepared(self.pairs[of].main, types, fetches, fuse, overlap)
        # a fetch is read in place if it is contiguous in shared memory, else from a copy
        places = [a if self.world.memory.holds(a) and a.flags.c_contiguous else allocation.zeros(a.shape, a.dtype) for a in bound.fetches]
        self.bounds[number] = bound, [(a, place) for a, place in zip(bound.fetches, places, strict=True) if a is not place]
        return {
            "types": [(t.dtype, list(t.shape)) for t in bound.fetch_types],
            "feeds": [(n, address_of(a)) for n, a in bound.feeds],
            "fetches": [address_of(a) for a in places],
            **self._state(),
        }

    def describe(self, number: int) -> dict[str, Any]:
        """The description of a bound plan, for profilers."""
        return describe_plan(self.bounds[number][0])

    def run(self, number: int, step: int, asked: Sequence[bool], timed: bool) -> observers.Times | None:
        """Run one step; the feeds are in place. Returns the step times if they are wanted."""
        bound, copies = self.bounds[number]
        self.current = bound
        bound.ctx.step = step
        self.progress.begin(step)
        times: observers.Times | None = [] if timed else None
        after = observers.after_step(bound, observers.ObserverSettings(*asked), self.rank, times)
        self.others_wait = True
        if bound.overlapped is None:
            bound.walk(after)
        else:
            self.world.begin()
            both(lambda: bound.walk(after), lambda: bound.run_overlapped(after), self.world)
        self.others_wait = False
        for a, place in copies:
            np.copyto(place, a)
        return times

    def background(self, fd: int, function: str, names: Sequence[str], copies: bool) -> list[tuple[str, ArrayAddress]]:
        """Start a thread that calls `function` ("module:function") with the current values of variables (or copies) and each message of a
        channel. Returns the addresses of the values."""
        values = {n: allocation.copied(a) if copies else a for n in names for a in [self.scope.arrays[n]]}
        module, _, name = function.partition(":")
        do = partial(getattr(import_module(module), name), values)
        threading.Thread(
            target=_serve_background, args=(Channel(socket.socket(fileno=fd)), do), name="fluidx-background", daemon=True
        ).start()
        return [(n, address_of(a)) for n, a in values.items()]

    def _prepared(
        self, program: Program, types: Mapping[str, TensorType], fetch: Sequence[str], fuse: bool, overlap: int | None
    ) -> BoundPlan:
        declared = program.global_block().descs
        groups = {g: program.group_ranks(g, self.rank) for g in program.groups}
        ctx = RunContext(self.rank, self.world.world_size, self.comm, groups, program.turns)
        bound = prepare(program, {n: t for n, t in types.items() if n in declared}, fetch, self.scope, ctx, np, fuse, overlap)
        bound.record_progress(self.progress)
        return bound

    def _state(self) -> dict[str, Any]:
        """The addresses of the variables, if they have changed."""
        if self.scope.version == self.reported:
            return {"state": None}
        for name, a in list(self.scope.arrays.items()):
            if not self.world.memory.holds(a):
                self.scope.bind(name, allocation.copied(a))
        self.reported = self.scope.version
        return {"state": [(n, address_of(a)) for n, a in self.scope.arrays.items()], "version": self.reported}


def _serve_background(channel: Channel, do: Callable[..., Any]) -> None:
    """Answer messages until the channel is closed. Until then the values stay in memory."""
    with suppress(*GONE), closing(channel):
        while True:
            message, _ = channel.receive()
            try:
                answer: Any = {"done": do(*message)}
            except BaseException as e:
                answer = {"fault": ErrorRecord.of(e, None)}
            channel.send(answer)


def address_of(a: np.ndarray) -> ArrayAddress:
    return native.address(a), dtype_name(a.dtype), list(a.shape)


def both(compute: Callable[[], None], beside: Callable[[], None], world: ProcessWorld) -> None:
    """Run two jobs on two threads. The first failure stops both and is raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:
            errors.append(e)
            world.abort(e)

    other = threading.Thread(target=guarded, args=(beside,), name="fluidx-beside")
    other.start()
    guarded(compute)
    other.join()
    if errors:
        raise errors[0]
