"""Start a rank under MPI: connect the ranks to a world, and end them together. mpi4py is imported when it is needed.

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
from ..hosts.multi_host import HostsWorld
from ..hosts.polled_world import FAREWELL
from ..least_versions import too_old
from ..processes import ProcessWorld
from .world import MpiWorld

_TRIES = 8  # attempts to map the memory at one address in all processes
_TRANSPORTS = "OMPI_MCA_btl"  # the variable that selects Open MPI's transports


@cache
def why_not() -> str:
    """The reason why MPI is not available, or too old; "" if it can be used."""
    try:
        with _alone() if launch_environment.found() is None else nullcontext():
            import mpi4py
            from mpi4py import MPI
    except (ImportError, RuntimeError) as e:  # RuntimeError: there is no MPI library to load
        return f"{str(e).splitlines()[0]}; {install('mpi')}"
    library = MPI.Get_library_version().split(",")[0].strip("\0\n ")
    return too_old("mpi4py", mpi4py.__version__) or too_old("MPI", MPI.Get_version(), library)


@contextmanager
def _alone() -> Iterator[None]:
    """A context in which a process that was not launched loads MPI without shared-memory transport: Open MPI would create a file in
    /dev/shm that this process never uses, and leave it behind."""
    if _TRANSPORTS in os.environ:
        yield
        return
    os.environ[_TRANSPORTS] = "self"
    try:
        yield
    finally:
        del os.environ[_TRANSPORTS]  # processes that this one starts may be launched ranks


def world_size() -> int:
    """The number of ranks that mpirun started; 1 if it did not start this process."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def connect(timeout: float, among: Any = None, share: bool = True, hosts: int = 1) -> tuple[ProcessWorld | HostsWorld | MpiWorld, int]:
    """The world of all ranks that mpirun started, or of those in mpi4py's communicator `among`; and the number of ranks on this host. All
    of them must call it.

    Ranks of one host share memory if `share` is true and if they can. A process allocates its arrays in the latest shared memory. Raises
    CommError if MPI is missing. `hosts`: tests let the ranks of one host act as several hosts.
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
    """Make an uncaught error in this process end all ranks. Otherwise MPI would wait for all ranks at its end, without a deadline."""
    from mpi4py import MPI

    before, me = sys.excepthook, os.getpid()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == me:
            world.abort(error)
            told = ""
            if was_stopped(error):
                time.sleep(FAREWELL)  # the rank that failed reports why, and ends this process too
            elif isinstance(world, ProcessWorld):
                told = flight_recorder.last_collectives(flight_recorder.flight_records(world.shared, world.world_size))
            print(flight_recorder.end_line(world.rank, world.world_size, f"failed{told}"), file=sys.stderr)
        before(kind, error, trace)
        if os.getpid() == me:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = uncaught
    if not isinstance(world, ProcessWorld):
        atexit.register(world.close)


def _memory(close: Any, ranks: int, timeout: float) -> shared.Memory | None:
    """Memory that the ranks of one host share, with a world for all ranks in it; None if one of them cannot map it."""
    able = not (native.why_not() or shared.why_not())
    failed: list[shared.Memory] = []  # kept mapped, so that the next attempt uses another address
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
        except OSError:  # for example in another container of this host
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
    """Map the memory that another process has open."""
    fd = os.open(f"/proc/{pid}/fd/{of}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return shared.Memory(fd, start, ranks)
    except BaseException:
        os.close(fd)
        raise
