"""Run a function of a communicator on ranks that mpirun has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..comm.mpi import mpirun
from ..comm.process_spawner import Channel
from ..comm.processes import ProcessWorld
from ..ir.errors import install
from .processes import reply, values

_GRACE = 10.0  # seconds that mpirun may take to end
_PATIENCE = 60.0  # seconds that mpirun may take to start all processes


def why_not() -> str:
    """Why no job of MPI can be started here, or an empty text.

    This does not load MPI: a process that has loaded it and ends by `os._exit`, as workers of parallel tests do, leaves a file in /dev/shm.
    """
    return mpirun.why_not() if find_spec("mpi4py") else f"mpi4py is not installed; {install('mpi')}"


class MpiProcesses:
    """`n` processes that one mpirun has started, until `close`. Worlds of some of them are made one after the other.

    `prefix` is a command that runs mpirun.
    """

    def __init__(self, n: int, prefix: Sequence[str] = (), hosts: str | None = None, environ: Mapping[str, str] = os.environ):
        self.worlds = 0
        self.all_answered = True  # every request was answered, so the processes can end together, as MPI wants
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
            path = str(Path(folder) / "door")
            door.bind(path)
            door.listen(n)
            door.settimeout(_PATIENCE)
            args, environ = mpirun.command(n, [sys.executable, "-m", __name__, path], hosts, environ)
            self.process = subprocess.Popen([*prefix, *args], env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
            try:
                channels = [Channel(door.accept()[0]) for _ in range(n)]
                self.channels = [c for _, c in sorted((c.receive()[0], c) for c in channels)]
            except BaseException:
                self.process.kill()
                self.process.wait()
                raise

    def ranks(self, n: int, timeout: float, share: bool = False, hosts: int = 1) -> MpiRanks:
        """A new world of the first `n` processes. They `share` memory; with `hosts`, they act as several hosts and share it per host."""
        self.worlds += 1
        return MpiRanks(self, self.channels[:n], {"n": n, "timeout": timeout, "share": share, "hosts": hosts, "world": self.worlds})

    def close(self) -> None:
        for c in self.channels:
            if self.all_answered:
                c.send(None)
            c.close()
        try:  # mpirun cleans up after its ranks if it may end by itself
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


class MpiRanks:
    """The ranks of one world. After a failure they accept no more calls."""

    def __init__(self, job: MpiProcesses, channels: Sequence[Channel], given: Any):
        self.job, self.channels, self.given = job, channels, given

    def each(self, function: str, args: Sequence[Any] = ()) -> list[Any]:
        """Call a function on each rank, as `fluidx.testing.processes.ProcessRanks.each` does."""
        for c in self.channels:
            c.send([self.given, function, list(args)])
        before, self.job.all_answered = self.job.all_answered, False
        replies = [c.receive()[0] for c in self.channels]
        self.job.all_answered = before and all("value" in r for r in replies)
        return values(replies)


_worlds: dict[int, Any] = {}  # kept for the life of the process: arrays in their memory may live longer than a world


def _answer(path: str) -> None:
    """The main loop of one process: answer calls until the channel sends None. `path` is the socket to connect to."""
    from mpi4py import MPI

    from ..comm.mpi.start import connect

    everyone, worlds = MPI.COMM_WORLD, _worlds
    door = socket.socket(socket.AF_UNIX)
    door.connect(path)
    channel = Channel(door)
    channel.send(everyone.rank)
    while True:
        call, _ = channel.receive()
        if call is None:
            for world, _ in worlds.values():
                if not isinstance(world, ProcessWorld):
                    world.close()
            return
        given, function, args = call
        number, n = given["world"], given["n"]
        if number not in worlds:
            among = everyone.Create_group(everyone.group.Incl(range(n)), number % 1000)
            world, _ = connect(given["timeout"], among, given["share"], given["hosts"])
            worlds[number] = world, world.communicator(everyone.rank)
        world, comm = worlds[number]
        channel.send(reply(world, comm, function, args))


if __name__ == "__main__":
    try:
        _answer(sys.argv[1])
    except EOFError:  # some rank has failed; MPI would wait for the others for ever
        os._exit(0)
