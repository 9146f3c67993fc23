"""The rendezvous: ranks of a job connect to one of them, and both sides prove that they know the key of the job.

The rank that accepts sends a greeting with a nonce; the other one answers with a hello, which has its proof and a nonce; the first one
proves itself too, or sends why it refuses. Before the proof of the other side, a rank reads nothing but these messages, which are short.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..ir.errors import ExecutionError
from . import launch_environment
from .launch_environment import Launched
from .process_spawner import Channel
from .threads.python_locks import some

AGAIN = 0.05  # seconds between two attempts to connect to a rank, which may start later
NONCE = 32  # bytes
_MAGIC = b"fluidx 1"
GREETING = len(_MAGIC) + NONCE
_HELLO = struct.Struct(f"<2i{NONCE}s32s")  # the fields of a _Hello
_LONGEST = 1 << 16  # bytes of a message from who has not yet proved itself


_NOBODY: Mapping[socket.socket, Callable[[], bool]] = {}


class RankMeeting(NamedTuple):
    """Ranks of a job that connect to one of them. `purpose` and `host` separate the meetings of a job: a proof is valid in one of them
    only."""

    there: Launched
    key: str
    host: int = 0  # the rank to which the others connect
    purpose: str = ""

    def proof(self, nonce: bytes, rank: int) -> bytes:
        """A proof that a rank knows the key, without the key itself."""
        said = f"{self.purpose}\0{self.host}\0".encode() + nonce + rank.to_bytes(4, "little")
        return hmac.digest(self.key.encode(), said, "sha256")


class _Hello(NamedTuple):
    """The first message of a rank. `proof` shows that it knows the key of the job."""

    rank: int
    world_size: int
    nonce: bytes  # with which the other side must prove itself
    proof: bytes


class _Caller(NamedTuple):
    """A connection: the nonce for its proof, and the bytes received so far."""

    sock: socket.socket
    nonce: bytes
    said: bytearray


class Arrivals:
    """The ranks that have come to a meeting: their channels, and those that were refused, with the reason."""

    def __init__(self, meeting: RankMeeting, wanted: Collection[int]):
        self.meeting, self.wanted = meeting, frozenset(wanted)
        self.peers = dict[int, Channel]()
        self.refused = dict[int, str]()
        self._told = set[int]()  # ranks that got the message to all

    @property
    def missing(self) -> list[int]:
        return sorted(self.wanted - set(self.peers))

    def accept(
        self, door: socket.socket, deadline: float, trusted: Callable[[socket.socket], bool] = lambda sock: True,
        others: Mapping[socket.socket, Callable[[], bool]] = _NOBODY,
    ) -> bool:  # fmt: skip
        """Accept connections until all wanted ranks have come, or the deadline has passed: False. `trusted` may refuse a connection.
        `others` are connections with what to call for a message on them: it returns whether more may follow, or raises."""
        for caller, hello in _hellos(door, deadline, trusted, others) if self.missing else ():
            self._judge(caller, hello)
            if not self.missing:
                break
        return not self.missing

    def send_all(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send all ranks what they have come for. Raises ExecutionError if one has ended; then `refuse_all` tells those that are left."""
        for rank, peer in self.peers.items():
            try:
                peer.send(message, fds)
            except OSError:
                raise ExecutionError(ended(rank)) from None
            self._told.add(rank)

    def refuse_all(self, text: str) -> None:
        """Send an error text to all ranks that have not got what they have come for."""
        for rank, peer in self.peers.items():
            if rank not in self._told:
                with suppress(OSError):  # the rank has ended
                    peer.send({"no": text})

    def close(self) -> None:
        """Close the channels of all ranks that have come."""
        for peer in self.peers.values():
            peer.close()

    def not_come(self, timeout: float) -> str:
        text = not_come(self.missing, self.meeting.there, timeout)
        refused = [f"; rank {rank} was refused: {self.refused[rank]}" for rank in self.missing if rank in self.refused]
        return text + "".join(refused)

    def _judge(self, caller: _Caller, hello: _Hello) -> None:
        """Accept a rank of the job: send it this rank's own proof. Another one gets an error text, and junk nothing."""
        caller.sock.settimeout(AGAIN)  # an answer is short enough for the socket's buffer
        if not 0 <= hello.rank < hello.world_size:
            caller.sock.close()  # not a message of a rank
            return
        why, channel = self._why_not(caller, hello), Channel(caller.sock)
        with suppress(OSError):
            if why is None:
                channel.send({"proof": self.meeting.proof(hello.nonce, self.meeting.host).hex()})
                self.peers[hello.rank] = channel
                return
            self.refused[hello.rank] = why
            channel.send({"no": why})
        channel.close()

    def _why_not(self, caller: _Caller, hello: _Hello) -> str | None:
        there, host = self.meeting.there, self.meeting.host
        if not hmac.compare_digest(hello.proof, self.meeting.proof(caller.nonce, hello.rank)):
            return f"the {launch_environment.JOB_KEY} of this process is not that of rank {host}; all ranks of a job must have the same"
        if hello.world_size != there.world_size:
            return f"this process was launched as one of {hello.world_size} ranks, and rank {host} as one of {there.world_size}"
        if hello.rank == host or hello.rank in self.peers:
            return f"two processes were launched as rank {hello.rank}; this is the second one"
        return None if hello.rank in self.wanted else f"rank {hello.rank} is not one of the ranks that connect to rank {host}"


def not_come(ranks: list[int], there: Launched, timeout: float) -> str:
    return f"{some(ranks)} did not connect within {timeout:g} s (launched by {there.by}); set FLUIDX_TIMEOUT to wait longer"


def prove(sock: socket.socket, meeting: RankMeeting, where: str) -> Channel:
    """The channel to the rank to which the others connect, after both sides have proved themselves. `where` names the socket.

    Raises ExecutionError, also if that rank refuses this one.
    """
    channel, nonce, there = Channel(sock), secrets.token_bytes(NONCE), meeting.there
    try:
        greeting = channel.exactly(GREETING)
        if not greeting.startswith(_MAGIC):
            raise ExecutionError(f"{where} belongs to another program, and not to rank {meeting.host} of a job of fluidx")
        proof = meeting.proof(greeting[len(_MAGIC) :], there.rank)
        sock.sendall(_HELLO.pack(there.rank, there.world_size, nonce, proof))
    except TimeoutError:
        raise ExecutionError(f"{where} does not answer as rank {meeting.host} of a job of fluidx does") from None
    except (OSError, EOFError):
        raise ExecutionError(ended(meeting.host)) from None
    said, _ = answer(channel, meeting.host, most=_LONGEST)
    if said.get("proof") != meeting.proof(nonce, meeting.host).hex():
        raise ExecutionError(f"{where} belongs to a process that does not know the {launch_environment.JOB_KEY} of this job")
    return channel


def answer(channel: Channel, host: int, files: int = 0, most: int | None = None) -> tuple[Mapping[str, Any], list[int]]:
    """The next message of the rank to which the others connect, of at most `most` bytes, and its files.

    Raises ExecutionError if that rank refuses, has ended, or sends something else.
    """
    try:
        said, fds = channel.receive(files, most)
    except TimeoutError:
        raise ExecutionError(
            f"rank {host} has not answered in time: it may wait for other ranks; set FLUIDX_TIMEOUT to wait longer"
        ) from None
    except (OSError, EOFError):
        raise ExecutionError(ended(host)) from None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise ExecutionError(f"what listens as rank {host} sends messages that are not those of a job of fluidx")
    if "no" in said:
        raise ExecutionError(str(said["no"]))
    return said, fds


def ended(host: int) -> str:
    return f"rank {host} ended before all ranks had connected"


def _hellos(
    door: socket.socket, deadline: float, trusted: Callable[[socket.socket], bool], others: Mapping[socket.socket, Callable[[], bool]]
) -> Iterator[tuple[_Caller, _Hello]]:
    """The connections that sent a complete first message, until the deadline. A silent connection does not block others."""
    with selectors.DefaultSelector() as callers:
        door.setblocking(False)
        callers.register(door, selectors.EVENT_READ)
        for sock, heard in others.items():
            callers.register(sock, selectors.EVENT_READ, heard)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in callers.select(left):
                    caller: Any = key.data
                    if callable(caller):
                        if not caller():
                            callers.unregister(key.fileobj)
                        continue
                    if caller is None:
                        with suppress(OSError):  # it was closed again
                            came = _asked(door.accept()[0], trusted)
                            if came is not None:
                                callers.register(came.sock, selectors.EVENT_READ, came)
                        continue
                    try:
                        received = caller.sock.recv(_HELLO.size - len(caller.said))
                    except OSError:
                        received = b""
                    caller.said.extend(received)
                    if received and len(caller.said) < _HELLO.size:
                        continue
                    callers.unregister(caller.sock)
                    if received:
                        yield caller, _Hello(*_HELLO.unpack(caller.said))
                    else:
                        caller.sock.close()
        finally:  # an incomplete message is not from a rank
            for key in list(callers.get_map().values()):
                if isinstance(key.data, _Caller):
                    key.data.sock.close()


def _asked(sock: socket.socket, trusted: Callable[[socket.socket], bool]) -> _Caller | None:
    """A new connection, to which a nonce was sent; None if it is not trusted."""
    if not trusted(sock):
        sock.close()
        return None
    sock.setblocking(False)
    nonce = secrets.token_bytes(NONCE)
    sock.sendall(_MAGIC + nonce)
    return _Caller(sock, nonce, bytearray())
