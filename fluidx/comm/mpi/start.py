"""Start a rank under MPI, with mpi4py, which is loaded when it is used: connect the ranks to a world, and end them together.

Ranks of one host share memory (`comm/processes.py`). Between hosts, and where memory cannot be shared, ranks exchange MPI messages.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import TracebackType
from typing import Any

from ... import native
from ...ir.errors import install
from ...native import shared
from .. import flight_recorder, launch_environment
from ..base import CommError, was_stopped
from ..processes import ProcessWorld
from .multi_host import HostsWorld
from .world import FAREWELL, MpiWorld

_TRIES = 8  # attempts to map the memory at one address in all processes
_TRANSPORTS = "OMPI_MCA_btl"  # the variable that selects Open MPI's transports


@cache
def why_not() -> str:
    """Why there is no MPI here, or an empty text."""
    try:
        with _alone() if launch_environment.found() is None else nullcontext():
            from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as e:  # RuntimeError where there is no MPI library to load
        return f"{str(e).splitlines()[0]}; {install('mpi')}"
    return ""


@contextmanager
def _alone() -> Iterator[None]:
    """A time in which MPI may be loaded by a process that nobody launched: Open MPI would make a file in /dev/shm for messages that there
    are none of, and leave it behind."""
    if _TRANSPORTS in os.environ:
        yield
        return
    os.environ[_TRANSPORTS] = "self"
    try:
        yield
    finally:
        del os.environ[_TRANSPORTS]  # what this process starts is not alone


def world_size() -> int:
    """How many ranks mpirun started; 1 where it did not start this process."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def connect(timeout: float, among: Any = None, share: bool = True, hosts: int = 1) -> tuple[ProcessWorld | HostsWorld | MpiWorld, int]:
    """The world of all ranks that mpirun started, or of those in the communicator `among`, of mpi4py, and how many are on this host. Each
    of them makes this call.

    Those on one host share memory, if `share` and if they can; a process takes its arrays from the latest that it shares. Raises CommError
    where MPI is missing. Tests have the ranks of one host play so many `hosts`.
    """
    if reason := why_not():
        raise CommError(f"MPI is not available: {reason}")
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD if among is None else among
    close = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    if hosts > 1:
        close = close.Split(close.rank * hosts // close.size)
    here, homes = close.size, everyone.allgather(close.bcast(everyone.rank))
    memory = _memory(close, everyone.size, timeout) if share else None
    shared_by_all = all(everyone.allgather(memory is not None))
    close.Free()
    if memory is None or not shared_by_all:
        return MpiWorld(everyone, timeout), here
    world = ProcessWorld(memory, everyone.rank, timeout)
    return world if here == everyone.size else HostsWorld(world, MpiWorld(everyone, timeout), homes), here


def end_together(world: ProcessWorld | HostsWorld | MpiWorld) -> None:
    """Let an error that nothing in this process catches end all ranks. At its end MPI waits for all, without a deadline."""
    from mpi4py import MPI

    before, me = sys.excepthook, os.getpid()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == me:
            world.abort(error)
            told = ""
            if was_stopped(error):
                time.sleep(FAREWELL)  # whoever failed says why, and ends this process as well
            elif isinstance(world, ProcessWorld):
                told = flight_recorder.told(flight_recorder.trails(world.shared, world.world_size))
            print(flight_recorder.end_of(world.rank, world.world_size, f"failed{told}"), file=sys.stderr)
        before(kind, error, trace)
        if os.getpid() == me:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = uncaught
    if not isinstance(world, ProcessWorld):
        atexit.register(world.close)


def _memory(close: Any, ranks: int, timeout: float) -> shared.Memory | None:
    """Memory that the ranks of one host share, with a world in it of all, or None where one of them cannot."""
    able = not (native.why_not() or shared.why_not())
    failed: list[shared.Memory] = []  # each keeps the next from lying where one rank had no room
    while all(close.allgather(able)):
        made = _made(ranks, timeout) if close.rank == 0 else None
        where = close.bcast(made and (os.getpid(), made.fd, made.start))
        memory, able = made, where is not None and len(failed) < _TRIES
        try:
            if where is not None and made is None:
                pid, fd, start = where
                memory = _opened(pid, fd, start, ranks)
        except FileExistsError:
            pass
        except OSError:  # as from another container of this host
            able = False
        found = all(close.allgather(memory is not None))
        if memory is not None:
            for read in flight_recorder.readers if found else ():
                read(memory)
            memory.close()
        if found:
            return memory
        failed += [] if memory is None else [memory]
    return None


def _made(ranks: int, timeout: float) -> shared.Memory | None:
    try:
        memory = shared.Memory.make(ranks)
    except OSError:
        return None
    memory.world(timeout)
    return memory


def _opened(pid: int, of: int, start: int, ranks: int) -> shared.Memory:
    """The memory that another process has open."""
    fd = os.open(f"/proc/{pid}/fd/{of}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return shared.Memory(fd, start, ranks)
    except BaseException:
        os.close(fd)
        raise
