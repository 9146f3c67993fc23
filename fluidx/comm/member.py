"""This process as a rank of a launched script: the world that it shares with the others, and how it came there."""

from __future__ import annotations

import atexit
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .. import config, native
from ..ir.errors import ExecutionError
from ..native.shared import Memory, take, why_not
from . import launched, mpi
from .base import CommError, Ranks
from .launched import Launched
from .mpi import MpiWorld
from .nursery import Channel, die_with
from .processes import ProcessWorld
from .slots import Slot

_AGAIN = 0.05  # seconds between two tries to reach rank 0, which may not be there yet
_PEER = struct.Struct("3i")  # pid, uid, gid


class _Word(Slot):
    """Something that ranks tell one another beside what their programs say."""

    kept = False

    @property
    def call(self) -> str:
        return "announcing what comes next" if self.what == "all_gather" else "waiting for all"

    def __str__(self) -> str:
        return self.call


class Member:
    """A rank among the others. What `tell` is given goes to whoever launched it, if somebody listens."""

    def __init__(self, there: Launched, world: ProcessWorld | MpiWorld, tell: Callable[[Any], None] | None = None):
        self.launched, self.world, self.tell = there, world, tell or (lambda message: None)
        self.rank, self.world_size = there.rank, there.world_size
        self.comm: Any = world.communicator(there.rank)
        self.memory = world.memory  # that all ranks share, or None where some are on other hosts
        self.everyone: Ranks = tuple(range(there.world_size))
        self.lent: Sequence[np.ndarray] = ()  # others read these until all meet again, also when the executor that made them is gone

    def gather(self, said: Any) -> list[Any]:
        """What all ranks say, in rank order. It passes through JSON."""
        text = json.dumps(said).encode()
        data = self.room(len(text))
        data[:] = np.frombuffer(text, np.uint8)
        texts = [self.room(int(n)) for (n,) in self.gathered([data.size])]
        self._show(data, texts)
        return [json.loads(text.tobytes()) for text in texts]

    def gathered(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """The numbers of all ranks, which bring equally many."""
        mine, *parts = (self.room(8 * len(numbers)).view(np.int64) for _ in range(1 + self.world_size))
        mine[:] = numbers
        self._show(mine, parts)
        return parts

    def _show(self, x: np.ndarray, parts: list[np.ndarray]) -> None:
        self.comm._meet(self.everyone, _Word("all_gather", x, gives=[x] * self.world_size, takes=parts))

    def room(self, nbytes: int) -> np.ndarray:
        """So many zero bytes, where the others see them if any do."""
        return np.zeros(nbytes, np.uint8) if self.memory is None else take(nbytes)

    def shows(self, a: np.ndarray) -> bool:
        """Can an array that lies here be told of as it is?"""
        return a.flags.c_contiguous and (self.memory is None or self.memory.holds(a))

    def sight(self, at: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Where this rank sees an array of another one, which lies at an address there, when that has brought it (`bring`)."""
        return np.empty(tuple(shape), dtype) if self.memory is None else self.memory.array(at, shape, dtype)

    def bring(self, own: Sequence[np.ndarray], sights: Sequence[Sequence[np.ndarray]]) -> None:
        """Have what every rank tells of where the others see it: `own` is what this one does. In shared memory it is there."""
        if self.memory is not None:
            self.meet()
            return
        parts = [self.room(sum(a.nbytes for a in (own if r == self.rank else of))) for r, of in enumerate(sights)]
        for a, there in _stretches(own, parts[self.rank]):
            there[:] = a
        self.comm.all_gather(parts[self.rank], parts, self.everyone)
        for r, of in enumerate(sights):
            if r != self.rank:
                for a, there in _stretches(of, parts[r]):
                    a[:] = there

    def meet(self) -> None:
        """Wait for all others."""
        self.comm._meet(self.everyone, _Word("barrier"))


def _stretches(arrays: Sequence[np.ndarray], whole: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The bytes of each array, and their place in the bytes of all."""
    at = 0
    for a in arrays:
        yield a.reshape(-1).view(np.uint8), whole[at : at + a.nbytes]
        at += a.nbytes


_current: Member | None = None
_guard = threading.Lock()


def enter(member: Member) -> None:
    """Let this process be a rank."""
    global _current
    _current = member


def member() -> Member | None:
    """This process as a rank, which waits for the others where they are to meet by themselves; None where it was not launched as one of
    several.

    Raises ExecutionError where the ranks cannot meet.
    """
    with _guard:
        if _current is None:
            there = launched.found()
            if there is None or there.world_size == 1:
                return None
            if (joined := _join(there)) is not None:
                enter(joined)
        return _current


def by_mpi() -> Member | None:
    """This process as one of the ranks that mpirun started, each of which makes this call; None where it is the only one.

    Raises ExecutionError where they cannot meet.
    """
    with _guard:
        if _current is None and (joined := _join_mpi(launched.found())) is not None:
            enter(joined)
        return _current


def _join_mpi(there: Launched | None) -> Member | None:
    if reason := mpi.why_not():
        raise ExecutionError(f"ranks that are MPI processes need MPI: {reason}")
    by, ranks = "mpirun" if there is None else there.by, mpi.world_size()
    if there is not None and there.world_size != ranks:
        raise ExecutionError(
            f"{by} launched {there.world_size} ranks, and MPI knows of {ranks}: start them with the mpirun of the MPI library that mpi4py "
            "loads, which `fluidx run --backend mpi` finds"
        )
    if ranks == 1:
        return None
    _end_with(there)
    world, here = mpi.meet(config.timeout())
    if world.rank == 0:
        print(f"fluidx: {ranks} ranks, launched by {by}, meet over MPI", file=sys.stderr)
    native.set_num_threads(max(1, native.cores() // here))
    mpi.end_together(world)
    return Member(Launched(by, world.rank, world.world_size, here, "" if there is None else there.job), world)


def _end_with(there: Launched | None) -> None:
    """Have this process end with mpirun, or with what that started on this host: they end their ranks only where they are not killed."""
    if there is not None and there.by in launched.OF_MPI:
        die_with(os.getppid())


def _join(there: Launched) -> Member | None:
    if there.here != there.world_size and there.by in launched.OF_MPI:
        return _join_mpi(there)
    if there.here != there.world_size:
        raise ExecutionError(
            f"{there.by} launched {there.world_size} ranks, {there.here} of them on this host; ranks on several hosts meet over MPI: "
            "start them with mpirun, or fluidx run --backend mpi. On one host, start them all there"
        )
    if reason := native.why_not() or why_not():
        raise ExecutionError(f"ranks that are processes need the C kernels and shared memory: {reason}")
    _end_with(there)
    timeout = config.timeout()
    first = there.rank == 0
    if first:
        print(f"fluidx: {there.world_size} ranks, launched by {there.by}", file=sys.stderr)
    peers, memory = _gather_ranks(there, timeout) if first else _reach_first(there, timeout)
    world = ProcessWorld(memory, there.rank, timeout)
    native.set_num_threads(max(1, native.cores() // there.world_size))
    _look_after(there, world, peers)
    return Member(there, world)


# -- ranks that somebody else started meet at a socket of rank 0 ------------------------------------------------------------


def _name(there: Launched) -> bytes:
    return f"\0fluidx-{os.getuid()}-{there.job}".encode()


def _gather_ranks(there: Launched, timeout: float) -> tuple[dict[int, Channel], Memory]:
    """Rank 0 makes the memory and hands it to the others when all have come."""
    memory, peers = Memory.make(there.world_size), dict[int, Channel]()
    keep = memory.world(timeout)
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.bind(_name(there))
        except OSError:
            raise ExecutionError(
                f"another job's rank 0 waits where this one's ranks would meet (by {there.by}); give each job its own {launched.JOB}"
            ) from None
        door.listen(there.world_size)
        while missing := sorted(set(range(1, there.world_size)) - set(peers)):
            door.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                came, _ = door.accept()
            except TimeoutError:
                who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
                raise ExecutionError(
                    f"{who} not come within {timeout:g} s, as launched by {there.by}; FLUIDX_TIMEOUT gives them more time"
                ) from None
            _welcome(there, Channel(came), peers, timeout)
    for peer in peers.values():
        peer.send({"start": memory.start}, [memory.fd])
    memory.close()
    del keep  # every rank has joined its own view of the world
    return peers, memory


def _welcome(there: Launched, peer: Channel, peers: dict[int, Channel], timeout: float) -> None:
    if not _mine(peer.sock):
        peer.close()
        return
    peer.sock.settimeout(timeout)
    try:
        said, _ = peer.receive()
    except (OSError, EOFError):  # it gave up
        return
    if said["world_size"] != there.world_size or said["rank"] in (0, *peers):
        peer.send({"no": f"rank {said['rank']} of {said['world_size']} came to {there.world_size} ranks that have it, or another number"})
        return
    peers[said["rank"]] = peer


def _reach_first(there: Launched, timeout: float) -> tuple[dict[int, Channel], Memory]:
    deadline, sock = time.monotonic() + timeout, socket.socket(socket.AF_UNIX)
    while sock.connect_ex(_name(there)):
        if time.monotonic() > deadline:
            raise ExecutionError(f"rank 0 has not come within {timeout:g} s, as launched by {there.by}; FLUIDX_TIMEOUT gives it more time")
        time.sleep(_AGAIN)
    if not _mine(sock):
        raise ExecutionError("what listens where rank 0 should belongs to another user")
    first = Channel(sock)
    first.send({"rank": there.rank, "world_size": there.world_size})
    sock.settimeout(timeout + 1.0)  # rank 0 says first who is missing
    try:
        said, fds = first.receive(files=1)
    except (OSError, EOFError):
        raise ExecutionError("rank 0 gave up waiting for all ranks; its own message says for whom") from None
    if "no" in said:
        raise ExecutionError(said["no"])
    sock.settimeout(None)
    memory = Memory(fds[0], said["start"], there.world_size)
    memory.close()
    return {0: first}, memory


def _mine(sock: socket.socket) -> bool:
    """Is the process at the other end this user's?"""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid == os.getuid()


def _look_after(there: Launched, world: ProcessWorld, peers: dict[int, Channel]) -> None:
    """Nobody launched these ranks who would tell them that one has ended: they see it where the sockets between them close."""
    before, me = sys.excepthook, os.getpid()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == me:
            world.abort(error)
        before(kind, error, trace)

    def goodbye() -> None:
        if os.getpid() == me:
            for peer in peers.values():
                try:
                    peer.send("bye")
                except OSError:
                    pass

    sys.excepthook = uncaught
    atexit.register(goodbye)
    for rank, peer in peers.items():
        peer.sock.settimeout(None)
        threading.Thread(target=_watch, args=(world, rank, peer), name=f"fluidx-peer-{rank}", daemon=True).start()


def _watch(world: ProcessWorld, rank: int, peer: Channel) -> None:
    try:
        peer.receive()
    except (EOFError, OSError):
        world.abort(CommError(f"rank {rank}: its process has ended", rank=rank))
