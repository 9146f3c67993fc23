"""Run a function of a communicator on several ranks that mpirun has started."""

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

_GRACE = 10.0  # seconds for it to end in
_PATIENCE = 60.0  # seconds for mpirun to start all


def why_not() -> str:
    """Why there can be no such job, or an empty text. MPI is not loaded to see that: a process that has, and ends by `os._exit`, as those
    do in which tests run side by side, leaves a file in /dev/shm."""
    return mpirun.why_not() if find_spec("mpi4py") else f"mpi4py is not installed; {install('mpi')}"


class MpiProcesses:
    """`n` processes that one mpirun has started, and worlds of some of them, until `close`. `prefix` is a command that runs mpirun."""

    def __init__(self, n: int, prefix: Sequence[str] = (), hosts: str | None = None, environ: Mapping[str, str] = os.environ):
        self.worlds = 0
        self.well = True  # all that was asked for has been answered: the processes can end as MPI wants them to, all together
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
        """A new world of the first `n` of the processes, which `share` memory, or play `hosts` on one and share that of theirs."""
        self.worlds += 1
        return MpiRanks(self, self.channels[:n], {"n": n, "timeout": timeout, "share": share, "hosts": hosts, "world": self.worlds})

    def close(self) -> None:
        for c in self.channels:
            if self.well:
                c.send(None)
            c.close()
        try:  # by itself it cleans up behind ranks that have left
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


class MpiRanks:
    """The ranks of one world. After a failure they take no more."""

    def __init__(self, job: MpiProcesses, channels: Sequence[Channel], given: Any):
        self.job, self.channels, self.given = job, channels, given

    def each(self, function: str, args: Sequence[Any] = ()) -> list[Any]:
        """As `fluidx.testing.processes.Ranks.each`."""
        for c in self.channels:
            c.send([self.given, function, list(args)])
        well, self.job.well = self.job.well, False
        replies = [c.receive()[0] for c in self.channels]
        self.job.well = well and all("value" in r for r in replies)
        return values(replies)


_worlds: dict[int, Any] = {}  # as long as the process: what lies in their memory may go later than they


def _answer(path: str) -> None:
    """What such a process does."""
    from mpi4py import MPI

    from ..comm.mpi.start import connect

    everyone, worlds = MPI.COMM_WORLD, _worlds
    door = socket.socket(socket.AF_UNIX)
    door.connect(path)
    channel = Channel(door)
    channel.send(everyone.rank)
    while True:
        said, _ = channel.receive()
        if said is None:
            for world, _ in worlds.values():
                if not isinstance(world, ProcessWorld):
                    world.close()
            return
        given, function, args = said
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
    except EOFError:  # something has failed; MPI would wait for ranks that are left behind
        os._exit(0)
