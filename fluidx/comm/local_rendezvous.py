"""The rendezvous of ranks on one host: a socket of the first of them, which gives the others the shared memory."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence

from .. import config
from ..ir.errors import ExecutionError
from ..native.shared import Memory
from . import flight_recorder, launch_environment
from .launch_environment import Launched
from .process_spawner import Channel
from .rendezvous import AGAIN, Arrivals, RankMeeting, answer, not_come, prove

_PEER = struct.Struct("3i")  # pid, uid, gid
_PURPOSE = "memory"  # of these meetings


def meet(there: Launched, ranks: Sequence[int], timeout: float) -> tuple[dict[int, Channel], Memory]:
    """Connect the `ranks` of this host, of which this is one: channels to the others, or to the first one, and their memory."""
    return _gather_ranks(there, timeout, ranks) if there.rank == ranks[0] else _reach_first(there, timeout, ranks[0])


def name_of(there: Launched, first: int = 0) -> bytes:
    """The name of the socket. It is not visible in a file system, and hosts that share this machine's network have others."""
    return f"\0fluidx-{os.getuid()}-{there.job}{f'-{first}' if first else ''}".encode()


def _gather_ranks(there: Launched, timeout: float, ranks: Sequence[int] | None = None) -> tuple[dict[int, Channel], Memory]:
    """On the first rank: allocate the shared memory, and send it to the other ranks when all have connected."""
    members = range(there.world_size) if ranks is None else ranks
    try:
        memory = Memory.make(there.world_size)
    except OSError as e:
        raise ExecutionError(f"cannot allocate memory for {len(members)} ranks on one host: {e}") from e
    keep = memory.world(timeout)
    arrivals = Arrivals(RankMeeting(there, config.job_key(), members[0], _PURPOSE), members[1:])
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.bind(name_of(there, members[0]))
        except OSError:
            raise ExecutionError(
                f"another job uses the same socket (launched by {there.by}); give each job its own {launch_environment.JOB}"
            ) from None
        door.listen(there.world_size)
        try:
            if not arrivals.accept(door, time.monotonic() + timeout, _mine):
                raise ExecutionError(arrivals.not_come(timeout))
            for peer in arrivals.peers.values():
                peer.sock.settimeout(timeout)
            arrivals.send_all({"start": memory.start}, [memory.fd])
        except ExecutionError as e:
            arrivals.refuse_all(str(e))
            raise
    _look_in(memory)
    del keep  # every rank has joined its own view of the world
    return arrivals.peers, memory


def _reach_first(there: Launched, timeout: float, first: int = 0) -> tuple[dict[int, Channel], Memory]:
    deadline, sock = time.monotonic() + timeout, socket.socket(socket.AF_UNIX)
    while sock.connect_ex(name_of(there, first)):
        if time.monotonic() > deadline:
            raise ExecutionError(not_come([first], there, timeout))
        time.sleep(AGAIN)
    if not _mine(sock):
        raise ExecutionError(f"the socket of rank {first} belongs to another user")
    sock.settimeout(timeout + 1.0)  # longer than the first rank's timeout, so that it names the missing ranks first
    channel = prove(sock, RankMeeting(there, config.job_key(), first, _PURPOSE), f"the socket of rank {first}")
    said, fds = answer(channel, first, files=1)
    sock.settimeout(None)
    memory = Memory(fds[0], said["start"], there.world_size)
    _look_in(memory)
    return {first: channel}, memory


def _look_in(memory: Memory) -> None:
    """Give the memory to the readers of its flight recorder, and close its file."""
    for read in flight_recorder.readers:
        read(memory)
    memory.close()


def _mine(sock: socket.socket) -> bool:
    """Does the process at the other end belong to this user?"""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid == os.getuid()
