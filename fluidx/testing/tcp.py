"""Run a function of a communicator on ranks that are connected by TCP, on hosts that are played."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..comm.launch_environment import Launched
from ..comm.process_spawner import Channel
from .mpi import MpiRanks
from .processes import reply

_PATIENCE = 60.0  # seconds for all processes to start


class TcpProcesses:
    """`n` processes, until `close`. Worlds of some of them are made one after the other.

    `enter` has for each process the words before the command that runs it, such as those that enter the network of a host, and `address` is
    that of the first one.
    """

    def __init__(self, n: int, enter: Sequence[Sequence[str]] | None = None, address: str = "127.0.0.1"):
        self.worlds, self.address, self.all_answered = 0, address, True
        environ = {**os.environ, "FLUIDX_JOB_KEY": secrets.token_hex(16), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
            path = str(Path(folder) / "door")
            door.bind(path)
            door.listen(n)
            door.settimeout(_PATIENCE)
            words = [[*(enter[k] if enter else ()), sys.executable, "-m", __name__, path, str(k)] for k in range(n)]
            own = [{"FLUIDX_RANK": str(k), "FLUIDX_WORLD_SIZE": str(n)} for k in range(n)]
            self.processes = [subprocess.Popen(one, env=environ | said) for one, said in zip(words, own, strict=True)]
            try:
                channels = [Channel(door.accept()[0]) for _ in range(n)]
                self.channels = [c for _, c in sorted((c.receive()[0], c) for c in channels)]
            except BaseException:
                self._end()
                raise

    def ranks(self, n: int, timeout: float, here: int = 1) -> MpiRanks:
        """A new world of the first `n` processes, `here` of them on each host."""
        self.worlds += 1
        given = {"n": n, "timeout": timeout, "here": here, "world": self.worlds, "address": f"{self.address}:{free_port()}"}
        return MpiRanks(self, self.channels[:n], given)  # type: ignore[arg-type]

    def close(self) -> None:
        for c in self.channels:
            c.close()
        self._end()

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


_worlds: dict[int, Any] = {}  # kept for the life of the process: arrays in their memory may live longer than a world


def _answer(path: str, rank: int) -> None:
    """The main loop of one process: answer calls until the channel is closed. `path` is the socket to connect to."""
    from ..comm.tcp.start import connect

    door = socket.socket(socket.AF_UNIX)
    door.connect(path)
    channel = Channel(door)
    channel.send(rank)
    while True:
        (given, function, args), _ = channel.receive()
        number = given["world"]
        if number not in _worlds:
            there = Launched("a test", rank, given["n"], given["here"], f"{os.environ['FLUIDX_JOB_KEY']}-{number}", given["address"])
            world = connect(there, given["timeout"]).world
            _worlds[number] = world, world.communicator(rank)
        world, comm = _worlds[number]
        channel.send(reply(world, comm, function, args))


if __name__ == "__main__":
    try:
        _answer(sys.argv[1], int(sys.argv[2]))
    except EOFError:
        os._exit(0)
