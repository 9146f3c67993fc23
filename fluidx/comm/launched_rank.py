"""LaunchedRank: this process as a rank of a launched script. It connects to the other ranks and exchanges data with them."""

from __future__ import annotations

import atexit
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from .. import config, native
from ..ir.errors import ExecutionError, RankError
from ..native.shared import Memory, take, why_not
from . import flight_recorder, launch_environment
from .base import CommError, Ranks, was_stopped
from .contribution import Contribution
from .launch_environment import Launched
from .mpi import start as mpi
from .mpi.multi_host import HostsWorld
from .mpi.world import MpiWorld
from .process_spawner import Channel, die_with
from .processes import ProcessWorld
from .threads.python_locks import some

_AGAIN = 0.05  # seconds between two attempts to connect to rank 0, which may start later
_PEER = struct.Struct("3i")  # pid, uid, gid
_NONCE = 32  # bytes
_HELLO = struct.Struct(f"<2i{_NONCE}s32s")  # the fields of a _Hello


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

    def __init__(self, there: Launched, world: ProcessWorld | HostsWorld | MpiWorld, tell: Callable[[Any], None] | None = None):
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
        return np.zeros(nbytes, np.uint8) if isinstance(self.world, MpiWorld) else take(nbytes)

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
    if there.here != there.world_size and there.by in launch_environment.OF_MPI:
        return _join_mpi(there)
    if there.here != there.world_size:
        raise ExecutionError(
            f"{there.by} launched {there.world_size} ranks, {there.here} of them on this host; ranks on several hosts need MPI: "
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
    _look_after(there, world, peers)
    return _fair(LaunchedRank(there, world))


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


# -- ranks of other launchers connect to a socket of rank 0 -----------------------------------------------------------------


def _name(there: Launched) -> bytes:
    return f"\0fluidx-{os.getuid()}-{there.job}".encode()


def _gather_ranks(there: Launched, timeout: float) -> tuple[dict[int, Channel], Memory]:
    """On rank 0: allocate the shared memory, and send it to the other ranks when all have connected."""
    try:
        memory, peers = Memory.make(there.world_size), dict[int, Channel]()
    except OSError as e:
        raise ExecutionError(f"cannot allocate memory for {there.world_size} ranks on one host: {e}") from e
    keep = memory.world(timeout)
    key = config.job_key()
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.bind(_name(there))
        except OSError:
            raise ExecutionError(
                f"another job uses the same socket (launched by {there.by}); give each job its own {launch_environment.JOB}"
            ) from None
        door.listen(there.world_size)
        answers = dict[int, bytes]()
        for came, hello in _hellos(door, time.monotonic() + timeout):
            answer = _judged(there, key, came, hello, peers)
            if answer is not None:
                peers[hello.rank], answers[hello.rank] = Channel(came.sock), answer
            if len(peers) == there.world_size - 1:
                break
        else:
            text = _not_come(sorted(set(range(1, there.world_size)) - set(peers)), there, timeout)
            for peer in peers.values():
                with suppress(OSError):  # the rank has ended
                    peer.send({"no": text})
            raise ExecutionError(text)
    for rank, peer in peers.items():
        peer.sock.settimeout(timeout)
        peer.send({"start": memory.start, "proof": answers[rank].hex()}, [memory.fd])
    memory.close()
    del keep  # every rank has joined its own view of the world
    return peers, memory


class _Hello(NamedTuple):
    """The first message of a rank. `proof` shows that it knows the key of the job."""

    rank: int
    world_size: int
    nonce: bytes  # with which rank 0 must prove itself
    proof: bytes


class _Caller(NamedTuple):
    """A connection to rank 0: the nonce for its proof, and the bytes received so far."""

    sock: socket.socket
    nonce: bytes
    said: bytearray


def _hellos(door: socket.socket, deadline: float) -> Iterator[tuple[_Caller, _Hello]]:
    """The connections that sent a complete first message, until the deadline. A silent connection does not block others."""
    with selectors.DefaultSelector() as callers:
        door.setblocking(False)
        callers.register(door, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in callers.select(left):
                    caller: _Caller | None = key.data
                    if caller is None:
                        with suppress(OSError):  # it was closed again
                            came = _asked(door.accept()[0])
                            if came is not None:
                                callers.register(came.sock, selectors.EVENT_READ, came)
                        continue
                    try:
                        some = caller.sock.recv(_HELLO.size - len(caller.said))
                    except OSError:
                        some = b""
                    caller.said.extend(some)
                    if some and len(caller.said) < _HELLO.size:
                        continue
                    callers.unregister(caller.sock)
                    if some:
                        yield caller, _Hello(*_HELLO.unpack(caller.said))
                    else:
                        caller.sock.close()
        finally:  # an incomplete message is not from a rank
            for key in list(callers.get_map().values()):
                if key.data is not None:
                    key.data.sock.close()


def _asked(sock: socket.socket) -> _Caller | None:
    """A new connection, to which a nonce was sent; None if the process belongs to another user."""
    if not _mine(sock):
        sock.close()
        return None
    sock.setblocking(False)
    nonce = secrets.token_bytes(_NONCE)
    sock.sendall(nonce)
    return _Caller(sock, nonce, bytearray())


def _judged(there: Launched, key: str, caller: _Caller, hello: _Hello, peers: Mapping[int, Channel]) -> bytes | None:
    """Rank 0's own proof, if the caller is a rank of the job; else None. A caller that is a rank of another job gets an error text."""
    caller.sock.settimeout(_AGAIN)  # an answer is short enough for the socket's buffer
    why = None
    if not 0 <= hello.rank < hello.world_size:
        caller.sock.close()  # not a message of a rank
        return None
    if not hmac.compare_digest(hello.proof, _proof(key, caller.nonce, hello.rank)):
        why = f"the {launch_environment.JOB_KEY} of this process is not that of rank 0; all ranks of a job must have the same"
    elif hello.world_size != there.world_size:
        why = f"this process was launched as one of {hello.world_size} ranks, and rank 0 as one of {there.world_size}"
    elif hello.rank in (0, *peers):
        why = f"two processes were launched as rank {hello.rank}; this is the second one"
    if why is None:
        return _proof(key, hello.nonce, 0)
    with suppress(OSError):
        Channel(caller.sock).send({"no": why})
    caller.sock.close()
    return None


def _proof(key: str, nonce: bytes, rank: int) -> bytes:
    """A proof that a rank knows the key, without the key itself."""
    return hmac.digest(key.encode(), nonce + rank.to_bytes(4, "little"), "sha256")


def _not_come(ranks: Sequence[int], there: Launched, timeout: float) -> str:
    return f"{some(ranks)} did not connect within {timeout:g} s (launched by {there.by}); set FLUIDX_TIMEOUT to wait longer"


def _reach_first(there: Launched, timeout: float) -> tuple[dict[int, Channel], Memory]:
    deadline, sock = time.monotonic() + timeout, socket.socket(socket.AF_UNIX)
    while sock.connect_ex(_name(there)):
        if time.monotonic() > deadline:
            raise ExecutionError(_not_come([0], there, timeout))
        time.sleep(_AGAIN)
    if not _mine(sock):
        raise ExecutionError("the socket of rank 0 belongs to another user")
    first, key, nonce = Channel(sock), config.job_key(), secrets.token_bytes(_NONCE)
    sock.settimeout(timeout + 1.0)  # longer than rank 0's timeout, so that rank 0 names the missing ranks first
    try:
        proof = _proof(key, first.exactly(_NONCE), there.rank)
        sock.sendall(_HELLO.pack(there.rank, there.world_size, nonce, proof))
        said, fds = first.receive(files=1)
    except (OSError, EOFError):
        raise ExecutionError("rank 0 ended before all ranks had connected") from None
    if "no" in said:
        raise ExecutionError(said["no"])
    if said.get("proof") != _proof(key, nonce, 0).hex():
        raise ExecutionError(f"the socket of rank 0 belongs to a process that does not know the {launch_environment.JOB_KEY} of this job")
    sock.settimeout(None)
    memory = Memory(fds[0], said["start"], there.world_size)
    memory.close()
    return {0: first}, memory


def _mine(sock: socket.socket) -> bool:
    """Does the process at the other end belong to this user?"""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid == os.getuid()


def _look_after(there: Launched, world: ProcessWorld, peers: dict[int, Channel]) -> None:
    """Detect the end of other ranks by closed sockets, because no launcher of fluidx watches these ranks; report this rank's own
    failure."""
    before, me, gone = sys.excepthook, os.getpid(), list[int]()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == me:
            world.abort(RuntimeError(f"rank {there.rank}: {type(error).__name__}: {error}"))
            trails = flight_recorder.flight_records(world.shared, there.world_size)
            told = flight_recorder.last_collectives(trails)
            if gone:  # that rank cannot report it itself
                told = f"ended in the middle of the script{flight_recorder.position(trails[gone[0]])}{told}"
                print(flight_recorder.end_line(gone[0], there.world_size, told), file=sys.stderr)
            elif not was_stopped(error):
                print(flight_recorder.end_line(there.rank, there.world_size, f"failed{told}"), file=sys.stderr)
            if was_stopped(error) and isinstance(error, (RankError, CommError)):  # this rank's traceback does not show the cause
                print(f"fluidx: {error}", file=sys.stderr)
                return
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
        threading.Thread(target=_watch, args=(world, rank, peer, gone), name=f"fluidx-peer-{rank}", daemon=True).start()


def _watch(world: ProcessWorld, rank: int, peer: Channel, gone: list[int]) -> None:
    try:
        peer.receive()
    except (EOFError, OSError):
        gone.append(rank)
        world.abort(CommError(f"rank {rank}: its process has ended", rank=rank))
