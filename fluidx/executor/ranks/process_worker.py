"""The process of one rank: it receives its programs as text, and runs them on request.

Feeds, fetches and state are passed through memory that the processes share; messages contain addresses.
"""

from __future__ import annotations

import os
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
from ...ir.dtypes import np_dtype
from ...ir.mapped_file import MappedFile
from ...ir.parser import parse_pair
from ...ir.program import ProgramPair
from ...ir.types import TensorType
from ...native import shared
from ..plan import allocation
from ..progress import Progress
from ..run import observers
from ..run.call_descriptions import describe_plan
from .affinity import keep_to
from .local_rank import LocalRank
from .published_rank import ArrayAddress, PublishedPlan, PublishedRank, address_of
from .remote_errors import ErrorRecord, shown


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
            fault = ErrorRecord.of(e, served.local.running())
            if served.others_wait:
                world.abort(e)
            answer = {"fault": fault}
        sys.stdout.flush()
        channel.send(answer)


class _RankMessages:
    """The messages, as methods; the return value is the answer."""

    def __init__(self, world: ProcessWorld, rank: int):
        self.world = world
        progress = Progress(world.shared, rank, shown)
        self.local = LocalRank(rank, world.world_size, world.communicator(rank), progress=progress)
        self.rank, self.scope = PublishedRank(self.local, world, world.memory), self.local.scope
        self.pairs: dict[int, ProgramPair] = {}
        self.reported = -1  # the scope version that was reported last
        self.incoming: dict[str, np.ndarray] = {}
        self.files: list[MappedFile] = []
        self.plans: dict[int, PublishedPlan] = {}
        self.others_wait = False  # may other ranks wait for this one?

    def share(self, threads: int) -> None:
        """Use this rank's share of so many threads."""
        native.set_num_threads(max(1, threads // self.world.world_size))

    def reserve(self, name: str, layout: Sequence[Any]) -> ArrayAddress:
        """Allocate an array that the caller will fill."""
        self.incoming[name] = allocation.zeros(tuple(layout[1]), np_dtype(layout[0]))
        return address_of(self.incoming[name])

    def map_file(self, fd: int) -> None:
        """Take the next file that has constants of the programs."""
        self.files.append(MappedFile.of(fd))
        os.close(fd)

    def programs(self, of: int, text: str, imports: Sequence[str], in_files: Mapping[str, Any]) -> None:
        """Store the programs of executor number `of`."""
        for module in imports:
            import_module(module)
        arrays = {**self.incoming, **{d: self.files[k].array(at, shape, np_dtype(t)) for d, (k, at, t, shape) in in_files.items()}}
        constants = {digest: Array.trusted(array, digest) for digest, array in arrays.items()}
        self.incoming.clear()
        self.files.clear()
        self.pairs[of] = parse_pair(text, constants)

    def bind(self, name: str) -> Any:
        """Make the received array the storage of a variable."""
        self.scope.bind(name, self.incoming.pop(name))
        return self._state()

    def start(self, of: int) -> Any:
        """Run the startup program."""
        self.others_wait = True
        self.local.begin(STARTUP)
        self.local.start(self.pairs[of].startup)
        self.others_wait = False
        return self._state()

    def ready(
        self, of: int, number: int, keep: Sequence[int], feeds: Mapping[str, Any], fetches: Sequence[str], fuse: bool, overlap: int | None
    ) -> dict[str, Any]:
        """Plan and bind the main program for feeds of these types; drop other bound plans, except those in `keep`."""
        self.plans = {k: p for k, p in self.plans.items() if k in keep}
        types = {n: TensorType(dtype, tuple(shape)) for n, (dtype, shape) in feeds.items()}
        made = self.plans[number] = self.rank.bind(self.pairs[of].main, types, fetches, fuse, overlap)
        return {**made.said(), "feeds": [(n, address_of(a)) for n, a in made.bound.feeds], **self._state()}

    def describe(self, number: int) -> dict[str, Any]:
        """The description of a bound plan, for profilers."""
        return describe_plan(self.plans[number].bound)

    def run(self, number: int, step: int, asked: Sequence[bool], timed: bool) -> observers.Times | None:
        """Run one step; the feeds are in place. Returns the step times if they are wanted."""
        plan = self.plans[number]
        times: observers.Times | None = [] if timed else None
        self.local.begin(step)
        if plan.bound.overlapped is not None:
            self.world.begin()
        self.others_wait = True
        self.rank.walk(plan.bound, step, observers.ObserverSettings(*asked), times)
        self.others_wait = False
        self.rank.publish(plan)
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

    def _state(self) -> dict[str, Any]:
        """The addresses of the variables, if they have changed."""
        if self.scope.version == self.reported:
            return {"state": None}
        state = [(n, address_of(self.rank.visible(n))) for n in list(self.scope.arrays)]
        self.reported = self.scope.version
        return {"state": state, "version": self.reported}


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
