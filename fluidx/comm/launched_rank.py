"""This process as a rank of a launched script: the world that it shares with the others, and how it came there."""

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

_AGAIN = 0.05  # seconds between two tries to reach rank 0, which may not be there yet
_PEER = struct.Struct("3i")  # pid, uid, gid
_NONCE = 32  # bytes
_HELLO = struct.Struct(f"<2i{_NONCE}s32s")  # the fields of a _Hello


class _Word(Contribution):
    """Something that ranks tell one another beside what their programs say."""

    kept = False

    @property
    def call(self) -> str:
        return "compare_calls" if self.what == "all_gather" else "wait_for_all"

    def __str__(self) -> str:
        return self.call


class Member:
    """A rank among the others. What `tell` is given goes to whoever launched it, if somebody listens."""

    def __init__(self, there: Launched, world: ProcessWorld | HostsWorld | MpiWorld, tell: Callable[[Any], None] | None = None):
        self.launched, self.world, self.tell = there, world, tell or (lambda message: None)
        self.rank, self.world_size = there.rank, there.world_size
        self.comm: Any = world.communicator(there.rank)
        self.memory = world.memory  # that all ranks share, or None where some are on other hosts
        self.everyone: Ranks = tuple(range(there.world_size))
        self.lent: Sequence[np.ndarray] = ()  # others read these until all meet again, also when the executor that made them is gone
        self._numbers: dict[int, tuple[np.ndarray, list[np.ndarray], Callable[[], None]]] = {}  # by how many each brings
        self.meet = self._repeated(_Word("barrier"))  # wait for all others

    def gather(self, said: Any) -> list[Any]:
        """What all ranks say, in rank order. It passes through JSON."""
        text = json.dumps(said).encode()
        data = self.room(len(text))
        data[:] = np.frombuffer(text, np.uint8)
        texts = [self.room(int(n)) for (n,) in self.gathered([data.size])]
        self._show(data, texts)
        return [json.loads(text.tobytes()) for text in texts]

    def gathered(self, numbers: Sequence[int]) -> list[np.ndarray]:
        """The numbers of all ranks, which bring equally many; they stand there until the next so many are brought."""
        if (found := self._numbers.get(len(numbers))) is None:
            mine, *parts = (self.room(8 * len(numbers)).view(np.int64) for _ in range(1 + self.world_size))
            found = self._numbers[len(numbers)] = mine, parts, self._repeated(self._shown(mine, parts))
        mine, parts, meet = found
        mine[:] = numbers
        meet()
        return parts

    def _show(self, x: np.ndarray, parts: list[np.ndarray]) -> None:
        self.comm._meet(self.everyone, self._shown(x, parts))

    def _shown(self, x: np.ndarray, parts: list[np.ndarray]) -> _Word:
        return _Word("all_gather", x, gives=[x] * self.world_size, takes=parts)

    def _repeated(self, word: _Word) -> Callable[[], None]:
        """A meeting of all, to be called as often as they meet so: every run begins and ends with one, and what can be is made once."""
        calls = None if self.comm.calls is None else self.comm.calls._meet(self.everyone, word)
        return partial(self.comm._meet, self.everyone, word) if calls is None else native.compile(calls)

    def room(self, nbytes: int) -> np.ndarray:
        """So many zero bytes, where those of the others see them that share memory with this rank."""
        return np.zeros(nbytes, np.uint8) if isinstance(self.world, MpiWorld) else take(nbytes)

    def shows(self, a: Any) -> bool:
        """Can an array that lies here be told of as it is? Not one of a GPU."""
        return type(a) is np.ndarray and a.flags.c_contiguous and (self.memory is None or self.memory.holds(a))

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
        self._show(parts[self.rank], parts)
        for r, of in enumerate(sights):
            if r != self.rank:
                for a, there in _stretches(of, parts[r]):
                    a[:] = there


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


def entered() -> Member | None:
    """This process as a rank, if it is one already."""
    return _current


def member() -> Member | None:
    """This process as a rank, which waits for the others where they are to meet by themselves; None where it was not launched as one of
    several.

    Raises ExecutionError where the ranks cannot meet.
    """
    with _guard:
        if _current is None:
            there = launch_environment.found()
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
        if _current is None and (joined := _join_mpi(launch_environment.found())) is not None:
            enter(joined)
        return _current


def _join_mpi(there: Launched | None) -> Member | None:
    if reason := mpi.why_not():
        raise ExecutionError(f"MPI is not available: {reason}")
    by, ranks = "mpirun" if there is None else there.by, mpi.world_size()
    if there is not None and there.world_size != ranks:
        raise ExecutionError(
            f"{by} launched {there.world_size} ranks, and MPI knows of {ranks}: start them with the mpirun of the MPI library that mpi4py "
            "loads, as `fluidx run --backend mpi` does"
        )
    if ranks == 1:
        return None
    _end_with(there)
    world, here = mpi.connect(config.timeout())
    if world.rank == 0:
        print(f"fluidx: {ranks} ranks, launched by {by}, over MPI", file=sys.stderr)
    mpi.end_together(world)
    return _fair(Member(Launched(by, world.rank, world.world_size, here, "" if there is None else there.job), world))


def _end_with(there: Launched | None) -> None:
    """Have this process end with mpirun, or with what that started on this host: they end their ranks only where they are not killed."""
    if there is not None and there.by in launch_environment.OF_MPI:
        die_with(os.getppid())


def _join(there: Launched) -> Member | None:
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
    return _fair(Member(there, world))


def _fair(member: Member) -> Member:
    """Let the rank have as many threads as its share of the cores of its host, of which its launcher may have left it some only."""
    hosts, cores = zip(*member.gather([socket.gethostname(), native.which_cores()]), strict=True)
    beside = [cores[r] for r, host in enumerate(hosts) if host == hosts[member.rank]]
    native.set_num_threads(share_of(cores[member.rank], beside))
    return member


def share_of(mine: Sequence[int], all_of: Sequence[Sequence[int]]) -> int:
    """How many threads a rank may have that runs on these cores, where ranks, and it among them, run on those of `all_of`.

    >>> share_of([0, 1, 2, 3], [[0, 1, 2, 3], [4, 5, 6, 7]]), share_of([0, 1, 2, 3], [[0, 1, 2, 3], [0, 1, 2, 3]])
    (4, 2)
    """
    ranks = Counter(core for cores in all_of for core in cores)
    return max(1, int(sum(Fraction(1, ranks[core]) for core in mine)))


# -- ranks that somebody else started meet at a socket of rank 0 ------------------------------------------------------------


def _name(there: Launched) -> bytes:
    return f"\0fluidx-{os.getuid()}-{there.job}".encode()


def _gather_ranks(there: Launched, timeout: float) -> tuple[dict[int, Channel], Memory]:
    """Rank 0 makes the memory and hands it to the others when all have come."""
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
                with suppress(OSError):  # it gave up
                    peer.send({"no": text})
            raise ExecutionError(text)
    for rank, peer in peers.items():
        peer.sock.settimeout(timeout)
        peer.send({"start": memory.start, "proof": answers[rank].hex()}, [memory.fd])
    memory.close()
    del keep  # every rank has joined its own view of the world
    return peers, memory


class _Hello(NamedTuple):
    """What a rank says first; `proof` shows that it knows the key of the job."""

    rank: int
    world_size: int
    nonce: bytes  # that rank 0 is to prove itself by
    proof: bytes


class _Caller(NamedTuple):
    """Somebody who has come to the door of rank 0: what is asked of it, and what it has said so far."""

    sock: socket.socket
    nonce: bytes
    said: bytearray


def _hellos(door: socket.socket, deadline: float) -> Iterator[tuple[_Caller, _Hello]]:
    """Those who come and say as much as a rank does, until the deadline. Who says nothing keeps nobody waiting."""
    with selectors.DefaultSelector() as callers:
        door.setblocking(False)
        callers.register(door, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in callers.select(left):
                    caller: _Caller | None = key.data
                    if caller is None:
                        with suppress(OSError):  # it has gone again
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
        finally:  # who has not said enough by then is no rank
            for key in list(callers.get_map().values()):
                if key.data is not None:
                    key.data.sock.close()


def _asked(sock: socket.socket) -> _Caller | None:
    """Somebody who came, asked for a proof; None for another user's process."""
    if not _mine(sock):
        sock.close()
        return None
    sock.setblocking(False)
    nonce = secrets.token_bytes(_NONCE)
    sock.sendall(nonce)
    return _Caller(sock, nonce, bytearray())


def _judged(there: Launched, key: str, caller: _Caller, hello: _Hello, peers: Mapping[int, Channel]) -> bytes | None:
    """Rank 0's own proof for a rank that is one of the job; None for others, which are told why if they are ranks at all."""
    caller.sock.settimeout(_AGAIN)  # an answer is few bytes: it needs no reader
    why = None
    if not 0 <= hello.rank < hello.world_size:
        caller.sock.close()  # no rank says that
        return None
    if not hmac.compare_digest(hello.proof, _proof(key, caller.nonce, hello.rank)):
        why = f"the {launch_environment.JOB_KEY} of this process is not that of rank 0; all ranks of a job are given the same"
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
    """What shows that a rank knows the key, and does not give it away."""
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
    sock.settimeout(timeout + 1.0)  # rank 0 says first who is missing
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
    """Is the process at the other end this user's?"""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid == os.getuid()


def _look_after(there: Launched, world: ProcessWorld, peers: dict[int, Channel]) -> None:
    """Nobody launched these ranks who would tell them that one has ended: they see it where the sockets between them close."""
    before, me, gone = sys.excepthook, os.getpid(), list[int]()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == me:
            world.abort(RuntimeError(f"rank {there.rank}: {type(error).__name__}: {error}"))
            trails = flight_recorder.trails(world.shared, there.world_size)
            told = flight_recorder.told(trails)
            if gone:  # it cannot say so itself
                told = f"ended in the middle of the script{flight_recorder.whereabouts(trails[gone[0]])}{told}"
                print(flight_recorder.end_of(gone[0], there.world_size, told), file=sys.stderr)
            elif not was_stopped(error):
                print(flight_recorder.end_of(there.rank, there.world_size, f"failed{told}"), file=sys.stderr)
            if was_stopped(error) and isinstance(error, (RankError, CommError)):  # where this rank was says nothing of why
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
