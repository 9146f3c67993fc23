"""Run a function of a communicator on ranks that are connected by TCP, on hosts that are played."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ..comm.launch_environment import Launched
from ..comm.process_spawner import Channel, start
from .mpi import MpiRanks
from .processes import reply


class TcpProcesses:
    """`n` processes, until `close`. Worlds of some of them are made one after the other."""

    def __init__(self, n: int):
        self.worlds, self.all_answered = 0, True
        job = {"FLUIDX_JOB_KEY": secrets.token_hex(16), "FLUIDX_WORLD_SIZE": str(n)}
        self.processes = [start(f"{__name__}:answer", {**job, "FLUIDX_RANK": str(k)}) for k in range(n)]
        self.channels = [p.channel for p in self.processes]

    def ranks(self, n: int, timeout: float, here: int = 1) -> MpiRanks:
        """A new world of the first `n` processes, `here` of them on each host."""
        self.worlds += 1
        given = {"n": n, "timeout": timeout, "here": here, "world": self.worlds, "address": f"127.0.0.1:{free_port()}"}
        return MpiRanks(self, self.channels[:n], given)  # type: ignore[arg-type]

    def close(self) -> None:
        for p in self.processes:
            p.end()


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


_worlds: dict[int, Any] = {}  # kept for the life of the process: arrays in their memory may live longer than a world


def answer(channel: Channel, fds: Sequence[int], environ: Mapping[str, str]) -> None:
    """The main loop of one process: a rank that answers calls. `environ` is added to its environment."""
    from ..comm.tcp.start import connect

    os.environ.update(environ)
    rank, key = int(environ["FLUIDX_RANK"]), environ["FLUIDX_JOB_KEY"]
    while True:
        (given, function, args), _ = channel.receive()
        number = given["world"]
        if number not in _worlds:
            there = Launched("a test", rank, given["n"], given["here"], f"{key}-{number}", given["address"])
            world = connect(there, given["timeout"]).world
            _worlds[number] = world, world.communicator(rank)
        world, comm = _worlds[number]
        channel.send(reply(world, comm, function, args))
