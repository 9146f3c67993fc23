"""LaunchedRank: this process as a rank of a launched script. It connects to the other ranks and exchanges data with them."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from .. import config, native
from ..ir.errors import ExecutionError, RankError
from ..native.shared import take, why_not
from . import flight_recorder, launch_environment, local_rendezvous
from .base import CommError, LaunchedWorld, Ranks, was_stopped
from .contribution import Contribution
from .flight_recorder import FlightRecord
from .launch_environment import Launched
from .mpi import start as mpi
from .process_spawner import Channel, die_with
from .processes import ProcessWorld
from .tcp import start as tcp

Trails = Callable[[], list[FlightRecord | None]]


class _InternalCall(Contribution):
    """A collective call of the executors, which is not an operator of the programs."""

    kept = False

    @property
    def call(self) -> str:
        return "compare_calls" if self.what == "all_gather" else "wait_for_all"

    def __str__(self) -> str:
        return self.call


class LaunchedRank:
    """A rank of a launched script. `tell(message)` sends a message to the launcher, if it listens."""

    def __init__(self, there: Launched, world: LaunchedWorld, tell: Callable[[Any], None] | None = None):
        self.launched, self.world, self.tell = there, world, tell or (lambda message: None)
        self.rank, self.world_size = there.rank, there.world_size
        self.comm: Any = world.communicator(there.rank)
        self.memory = world.memory  # shared by all ranks; None if some ranks are on other hosts
        self.everyone: Ranks = tuple(range(there.world_size))
        # kept alive because other ranks read them until the next collective call, even after the executor is deleted
        self.published: Sequence[np.ndarray] = ()
        self._numbers: dict[int, tuple[np.ndarray, list[np.ndarray], Callable[[], None]]] = {}  # by the count of numbers
        self.meet = self._repeated(_InternalCall("barrier"))  # a barrier of all ranks

    def gather(self, said: Any) -> list[Any]:
        """Gather JSON data from all ranks, in rank order."""
        text = json.dumps(said).encode()
        data = self.allocate(len(text))
        data[:] = np.frombuffer(text, np.uint8)
        texts = [self.allocate(int(n)) for (n,) in self.gather_numbers([data.size])]
        self._show(data, texts)
        return [json.loads(text.tobytes()) for text in texts]

    def gather_numbers(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """Gather equally many numbers from all ranks. The result is overwritten by the next call with this count."""
        if (found := self._numbers.get(len(numbers))) is None:
            mine, *parts = (self.allocate(8 * len(numbers)).view(np.int64) for _ in range(1 + self.world_size))
            found = self._numbers[len(numbers)] = mine, parts, self._repeated(self._shown(mine, parts))
        mine, parts, meet = found
        mine[:] = numbers
        meet()
        return parts

    def _show(self, x: np.ndarray, parts: list[np.ndarray]) -> None:
        self.comm._collective(self.everyone, self._shown(x, parts))

    def _shown(self, x: np.ndarray, parts: list[np.ndarray]) -> _InternalCall:
        return _InternalCall("all_gather", x, gives=[x] * self.world_size, takes=parts)

    def _repeated(self, word: _InternalCall) -> Callable[[], None]:
        """A collective call of all ranks as a function for repeated use. It is compiled once, because every run begins and ends with
        one."""
        calls = None if self.comm.calls is None else self.comm.calls._collective(self.everyone, word)
        return partial(self.comm._collective, self.everyone, word) if calls is None else native.compile(calls)

    def allocate(self, nbytes: int) -> np.ndarray:
        """`nbytes` zero bytes, in shared memory if there is any."""
        return np.zeros(nbytes, np.uint8) if self.world.shared is None else take(nbytes)

    def view_at(self, at: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array for the contents of another rank's array at an address: a view of shared memory, or a new array that `exchange`
        fills."""
        return np.empty(tuple(shape), dtype) if self.memory is None else self.memory.array(at, shape, dtype)

    def exchange(self, own: Sequence[np.ndarray], sights: Sequence[Sequence[np.ndarray]]) -> None:
        """Exchange the published arrays: `own` are this rank's, `sights` the views of all ranks' arrays. In shared memory it is only a
        barrier."""
        if self.memory is not None:
            self.meet()
            return
        parts = [self.allocate(sum(a.nbytes for a in (own if r == self.rank else of))) for r, of in enumerate(sights)]
        for a, there in _stretches(own, parts[self.rank]):
            there[:] = a
        self._show(parts[self.rank], parts)
        for r, of in enumerate(sights):
            if r != self.rank:
                for a, there in _stretches(of, parts[r]):
                    a[:] = there


def _stretches(arrays: Sequence[np.ndarray], whole: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The bytes of each array, and their part of the joined bytes."""
    at = 0
    for a in arrays:
        yield a.reshape(-1).view(np.uint8), whole[at : at + a.nbytes]
        at += a.nbytes


_current: LaunchedRank | None = None
_guard = threading.Lock()


def enter(member: LaunchedRank) -> None:
    """Make this process a rank."""
    global _current
    _current = member


def entered() -> LaunchedRank | None:
    """This process as a rank; None if it has not joined yet."""
    return _current


def member() -> LaunchedRank | None:
    """This process as a rank; None if it was not launched as one of several. The first call connects the ranks, if the launcher did not.

    Raises ExecutionError if the ranks cannot connect.
    """
    with _guard:
        if _current is None:
            there = launch_environment.found()
            if there is None or there.world_size == 1:
                return None
            if (joined := _join(there)) is not None:
                enter(joined)
        return _current


def by_mpi() -> LaunchedRank | None:
    """This process as one of the ranks that mpirun started; None if it is the only one. All ranks must call it.

    Raises ExecutionError if they cannot connect.
    """
    with _guard:
        if _current is None and (joined := _join_mpi(launch_environment.found())) is not None:
            enter(joined)
        return _current


def _join_mpi(there: Launched | None) -> LaunchedRank | None:
    if reason := mpi.why_not():
        raise ExecutionError(f"MPI is not available: {reason}")
    by, ranks = "mpirun" if there is None else there.by, mpi.world_size()
    if there is not None and there.world_size != ranks:
        raise ExecutionError(
            f"{by} launched {there.world_size} ranks, and MPI knows {ranks}: start them with the mpirun of the MPI library that mpi4py "
            "loads, as `fluidx run --backend mpi` does"
        )
    if ranks == 1:
        return None
    _end_with(there)
    world, here = mpi.connect(config.timeout())
    if world.rank == 0:
        print(f"fluidx: {ranks} ranks, launched by {by}, over MPI", file=sys.stderr)
    mpi.end_together(world)
    return _fair(LaunchedRank(Launched(by, world.rank, world.world_size, here, "" if there is None else there.job), world))


def _end_with(there: Launched | None) -> None:
    """Make this process end with its parent, mpirun or mpirun's daemon on this host: these do not end their ranks when they are killed."""
    if there is not None and there.by in launch_environment.OF_MPI:
        die_with(os.getppid())


def _join(there: Launched) -> LaunchedRank | None:
    if there.here != there.world_size and there.address:
        return _join_tcp(there)
    if there.here != there.world_size and there.by in launch_environment.OF_MPI:
        return _join_mpi(there)
    if there.here != there.world_size:
        raise ExecutionError(
            f"{there.by} launched {there.world_size} ranks, {there.here} of them on this host; ranks on several hosts need the address of "
            f"rank 0, {launch_environment.ADDRESS}=host:port, to connect by TCP, or MPI: start them with mpirun, or fluidx run --backend "
            "mpi. On one host, start them all there"
        )
    if reason := native.why_not() or why_not():
        raise ExecutionError(f"ranks that are processes need the C kernels and shared memory: {reason}")
    _end_with(there)
    timeout, gone = config.timeout(), list[int]()
    if there.rank == 0:
        print(f"fluidx: {there.world_size} ranks, launched by {there.by}", file=sys.stderr)
    peers, memory = local_rendezvous.meet(there, range(there.world_size), timeout)
    world = ProcessWorld(memory, there.rank, timeout)
    _look_after(there, world.abort, partial(_goodbye, peers), gone, lambda: flight_recorder.flight_records(world.shared, there.world_size))
    _watch_peers(world, peers, gone)
    return _fair(LaunchedRank(there, world))


def _join_tcp(there: Launched) -> LaunchedRank:
    """This process as a rank on one of several hosts that are connected by TCP."""
    if there.rank == 0:
        print(f"fluidx: {there.world_size} ranks, launched by {there.by}, over TCP", file=sys.stderr)
    _end_with(there)
    rank = tcp.connect(there, config.timeout())
    names = rank.joined.names

    def end() -> None:
        try:
            rank.world.close()
        finally:
            rank.failures.goodbye()

    _look_after(there, rank.world.abort, end, rank.gone, rank.trails, rank.reports, lambda r: names[r])
    return _fair(LaunchedRank(there, rank.world))


def _fair(member: LaunchedRank) -> LaunchedRank:
    """Set the number of threads to the rank's share of its host's cores. The launcher may have restricted the rank to some cores."""
    hosts, cores = zip(*member.gather([socket.gethostname(), native.which_cores()]), strict=True)
    beside = [cores[r] for r, host in enumerate(hosts) if host == hosts[member.rank]]
    native.set_num_threads(share_of(cores[member.rank], beside))
    return member


def share_of(mine: Sequence[int], all_of: Sequence[Sequence[int]]) -> int:
    """The number of threads for a rank that runs on the cores `mine`. `all_of` are the cores of each rank on the host, this rank included.

    >>> share_of([0, 1, 2, 3], [[0, 1, 2, 3], [4, 5, 6, 7]]), share_of([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1, 2, 3]])
    (4, 2)
    """
    ranks = Counter(core for cores in all_of for core in cores)
    return max(1, int(sum(Fraction(1, ranks[core]) for core in mine)))


def _look_after(
    there: Launched, abort: Callable[[BaseException], None], end: Callable[[], None], gone: Sequence[int], trails: Trails,
    reports: Callable[[int], bool] = lambda rank: True, host: Callable[[int], str | None] = lambda rank: None,
) -> None:  # fmt: skip
    """Report the end of other ranks, because no launcher of fluidx watches these ranks, and this rank's own failure. `gone` are ranks whose
    processes have ended; does this rank `reports` the end of a rank? `end` says goodbye to the others, at the end of this process."""
    before, me = sys.excepthook, os.getpid()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == me:
            if not was_stopped(error):
                abort(RuntimeError(f"rank {there.rank}: {type(error).__name__}: {error}"))
            found = trails()
            told = flight_recorder.last_collectives(found)
            if gone:  # that rank cannot report it itself
                if reports(gone[0]):
                    told = f"ended in the middle of the script{flight_recorder.position(found[gone[0]])}{told}"
                    print(flight_recorder.end_line(gone[0], there.world_size, told, host(gone[0])), file=sys.stderr)
            elif not was_stopped(error):
                print(flight_recorder.end_line(there.rank, there.world_size, f"failed{told}"), file=sys.stderr)
            if was_stopped(error) and isinstance(error, (RankError, CommError)):  # this rank's traceback does not show the cause
                print(f"fluidx: {error}", file=sys.stderr)
                return
        before(kind, error, trace)

    def at_exit() -> None:
        if os.getpid() == me:  # and not in a fork
            end()

    sys.excepthook = uncaught
    atexit.register(at_exit)


def _goodbye(peers: Mapping[int, Channel]) -> None:
    for peer in peers.values():
        with suppress(OSError):
            peer.send("bye")


def _watch_peers(world: ProcessWorld, peers: Mapping[int, Channel], gone: list[int]) -> None:
    """Detect the end of other ranks of this host by closed sockets."""
    for rank, peer in peers.items():
        peer.sock.settimeout(None)
        threading.Thread(target=_watch, args=(world, rank, peer, gone), name=f"fluidx-peer-{rank}", daemon=True).start()


def _watch(world: ProcessWorld, rank: int, peer: Channel, gone: list[int]) -> None:
    try:
        peer.receive()
    except (EOFError, OSError):
        gone.append(rank)
        world.abort(CommError(f"rank {rank}: its process has ended", rank=rank))
