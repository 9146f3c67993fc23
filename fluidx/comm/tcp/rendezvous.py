"""How ranks on several hosts connect by TCP: all of them to rank 0, which tells them where the others listen; then each two of them.

Every connection begins with the proofs of `comm/rendezvous.py`: without the key of the job nobody takes part.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from ... import config, native
from ...ir.errors import ExecutionError
from ...native import shared
from .. import launch_environment
from ..base import Ranks
from ..launch_environment import Launched
from ..process_spawner import Channel
from ..rendezvous import AGAIN, Arrivals, RankMeeting, answer, ended, prove
from ..threads.python_locks import some
from . import failure_messages, interfaces
from .failure_messages import FailureMessages
from .link import TcpLink

_LATER = 1.0  # seconds: rank 0 names the missing ranks before others give up


class Joined(NamedTuple):
    """The connections of a rank, and the facts about all of them: for each rank its host's name and the ranks on its host."""

    links: dict[int, TcpLink]
    failures: FailureMessages
    names: Sequence[str]
    hosts: Sequence[Ranks]
    shares: bool  # can the ranks of each host share memory?


def join(there: Launched, timeout: float) -> Joined:
    """Connect this rank with all others. Raises ExecutionError, which says what to do."""
    if not sys.platform.startswith("linux"):
        raise ExecutionError(f"ranks on several hosts connect by TCP on Linux only, this is {sys.platform}; with MPI they run here too")
    key = config.job_key()
    if not key:
        raise ExecutionError(
            f"ranks on several hosts need a secret that all of them know (launched by {there.by}): set {launch_environment.JOB_KEY} to one "
            "text on all hosts, such as what `openssl rand -hex 16` prints; fluidx run makes one for its jobs"
        )
    deadline = time.monotonic() + timeout
    with ExitStack() as unless_joined:
        channels, table, door = (_gather if there.rank == 0 else _reach)(there, key, timeout, deadline, unless_joined)
        with door:
            links = _mesh(there, key, channels, table, door, deadline, timeout)
        unless_joined.pop_all()
    failures, shares = FailureMessages(there.rank, channels), all(row["shares"] for row in table)
    return Joined(links, failures, [row["name"] for row in table], hosts_of(table), shares)


def hosts_of(table: Sequence[Any]) -> list[Ranks]:
    """The ranks on the host of each rank: ranks of a host are numbered one after the other, and each says how many there are."""
    found: list[Ranks] = []
    while len(found) < len(table):
        first, here = len(found), table[len(found)]["here"]
        ranks = tuple(range(first, first + here))
        if any(r >= len(table) or table[r]["here"] != here for r in ranks):
            raise ExecutionError(
                f"rank {first} was launched as the first of {here} ranks on its host, and the next ranks were not: all say "
                f"{[row['here'] for row in table]} ranks; ranks of a host must have consecutive numbers, and the same "
                f"{launch_environment.LOCAL_WORLD_SIZE} (LOCAL_WORLD_SIZE)"
            )
        names = {r: table[r].get("name") for r in ranks}
        if len(set(names.values())) > 1:
            raise ExecutionError(
                f"{some(ranks)} were launched as the ranks of one host, and are on several: "
                + ", ".join(f"rank {r} on {name}" for r, name in names.items())
                + "; ranks of a host must have consecutive numbers"
            )
        found += [ranks] * here
    return found


# -- the first connection of each rank, to rank 0 ------------------------------------------------------------------------------

_Met = tuple[dict[int, Channel], list[Any], socket.socket]  # channels, what each rank says of itself, and where this rank listens


def _facts(there: Launched, at: Any) -> dict[str, Any]:
    able = not (native.why_not() or shared.why_not())
    return {"at": at, "here": there.here, "name": socket.gethostname(), "shares": able}


def _gather(there: Launched, key: str, timeout: float, deadline: float, unless_joined: ExitStack) -> _Met:
    """On rank 0: accept all others, and tell each of them what all have said."""
    door = unless_joined.enter_context(_listen_first(there))
    arrivals = Arrivals(RankMeeting(there, key), range(1, there.world_size))
    unless_joined.callback(arrivals.close)
    try:
        if not arrivals.accept(door, deadline):
            raise ExecutionError(arrivals.not_come(timeout))
        table = [_facts(there, None)]
        for rank in range(1, there.world_size):
            arrivals.peers[rank].sock.settimeout(max(AGAIN, deadline - time.monotonic()))
            try:
                table.append(arrivals.peers[rank].receive()[0])
            except (OSError, EOFError, ValueError):
                raise ExecutionError(ended(rank)) from None
        hosts_of(table)  # raises an error for all ranks
        arrivals.send_all({"table": table})
    except ExecutionError as e:
        arrivals.refuse_all(str(e))
        raise
    return arrivals.peers, table, door


def _listen_first(there: Launched) -> socket.socket:
    """The socket of rank 0: on the chosen interface, else on its address. If no other host reaches that, it is on all interfaces."""
    host, port = interfaces.parse(there.address)
    own = interfaces.chosen()
    if own is not None:
        _check_address(there, own)
    try:
        family, where = interfaces.resolve(own or host, port)[0]
        # a host may know its own name as an address of its loopback, and a service may have an address in front of the host's
        if own is None and (interfaces.is_loopback(where[0]) or not interfaces.can_bind(where[0])):
            family, where = socket.AF_INET, ("", port)
        door = _listening(family, where, there.world_size)
    except OSError as e:
        taken = "; another program listens there: choose another port" if e.errno == errno.EADDRINUSE else ""
        raise ExecutionError(f"rank 0 cannot listen at {there.address} (launched by {there.by}): {e.strerror}{taken}") from None
    if not where[0]:
        said = f"rank 0 listens at port {port} of all interfaces of host {socket.gethostname()}; FLUIDX_INTERFACE chooses one"
        print(f"fluidx: {said}", file=sys.stderr)
    return door


def _check_address(there: Launched, own: str) -> None:
    """Raise ExecutionError if the address to which other ranks connect is one of this host, and not the one on which rank 0 listens."""
    host, port = interfaces.parse(there.address)
    try:
        found = [where[0] for _, where in interfaces.resolve(host, port)]
        here = [address for address in found if interfaces.can_bind(address)]
    except OSError:  # a name that is not known here: another host may know it
        return
    # the name may be an address of the loopback on this host only, which matters to the ranks beside rank 0
    wrong = here if there.here > 1 else [address for address in here if not interfaces.is_loopback(address)]
    if wrong and own not in found:
        raise ExecutionError(
            f"rank 0 listens on {own} (FLUIDX_INTERFACE), and {there.address} is another address of its host, {wrong[0]}: set "
            f"{launch_environment.ADDRESS}={f'[{own}]' if ':' in own else own}:{port} on all hosts"
        )


def _listening(family: Any, where: tuple[Any, ...], ranks: int) -> socket.socket:
    door = socket.socket(family)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
        door.bind(where)
        door.listen(2 * ranks)
    except BaseException:
        door.close()
        raise
    return door


def _reach(there: Launched, key: str, timeout: float, deadline: float, unless_joined: ExitStack) -> _Met:
    """On another rank: connect to rank 0, say where this one listens, and hear of the others."""
    where = f"the socket of rank 0 at {there.address}"
    sock = unless_joined.enter_context(_connected(interfaces.parse(there.address), where, deadline, timeout, again=True))
    sock.settimeout(timeout + _LATER)
    channel = prove(sock, RankMeeting(there, key), where)
    mine = sock.getsockname()[0]
    if interfaces.is_loopback(mine) and interfaces.chosen() is None:
        mine = ""  # on the host of rank 0, whose name is an address of its loopback there: others reach this rank where they reach rank 0
    door = unless_joined.enter_context(_listening(sock.family, (mine, 0), there.world_size))
    try:
        channel.send(_facts(there, [mine, door.getsockname()[1]]))
        table: Any = answer(channel, 0)[0]["table"]
    except OSError:
        raise ExecutionError(ended(0)) from None
    table[0]["at"] = sock.getpeername()[:2]
    for row in table[1:]:
        row["at"][0] = row["at"][0] or table[0]["at"][0]
    return {0: channel}, table, door


def _connected(at: tuple[str, int], where: str, deadline: float, timeout: float, again: bool = False) -> socket.socket:
    """A connection; `again`: also to what does not listen yet."""
    own = interfaces.chosen()
    while True:
        try:
            return _connection(at, own, deadline)
        except OSError as e:
            if not again or time.monotonic() > deadline:
                name, by = socket.gethostname(), "" if own is None else f" (interface {own})"
                check = f"that rank 0 has started, {launch_environment.ADDRESS} (MASTER_ADDR), " if again else ""
                raise ExecutionError(
                    f"host {name}{by} cannot reach {where} within {timeout:g} s: {e.strerror or e}; check {check}FLUIDX_INTERFACE and "
                    "firewalls; FLUIDX_TIMEOUT gives it more time"
                ) from None
        time.sleep(AGAIN)


def _connection(at: tuple[str, int], own: str | None, deadline: float) -> socket.socket:
    """A connection to the first address of a host that answers. Raises OSError if none does."""
    found = OSError("the name has no address")
    for family, address in interfaces.resolve(*at):
        sock = socket.socket(family)
        try:
            if own is not None:
                sock.bind((own, 0))
            sock.settimeout(max(AGAIN, deadline - time.monotonic()))
            sock.connect(address)
            if sock.getsockname() == sock.getpeername():  # the system chose the port to which it connects, where nobody listens
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            return sock
        except OSError as e:
            sock.close()
            found = e
    raise found


# -- a connection between each two ranks ---------------------------------------------------------------------------------------


class _OtherFailed(ExecutionError):
    """Another rank says that one has failed or ended: `said`, as FailureMessages send it."""

    def __init__(self, said: Mapping[str, Any]):
        super().__init__(ended(said["rank"]) if said["gone"] else said["failed"])
        self.said = {"text": said["failed"], "rank": said["rank"], "gone": said["gone"]}


def _mesh(
    there: Launched, key: str, channels: dict[int, Channel], table: Sequence[Any], door: socket.socket, deadline: float, timeout: float
) -> dict[int, TcpLink]:
    """Connect to all ranks with lower numbers, and accept those with higher ones. If one of all ranks fails or ends, all raise its error:
    rank 0 hears of it on the first connections."""
    with ExitStack() as unless_connected:
        try:
            links = _links(there, key, channels, table, door, deadline, timeout, unless_connected)
        except ExecutionError as e:
            found = e if isinstance(e, _OtherFailed) else _reason(channels, 0.0 if there.rank == 0 else _LATER) or e
            failures = FailureMessages(there.rank, channels)
            if isinstance(found, _OtherFailed):
                failures.spread(**found.said)
            else:
                failures.spread(str(e))
            raise ExecutionError(str(found)) from None
        unless_connected.pop_all()
    return links


def _links(
    there: Launched, key: str, channels: dict[int, Channel], table: Sequence[Any], door: socket.socket, deadline: float, timeout: float,
    unless_connected: ExitStack,
) -> dict[int, TcpLink]:  # fmt: skip
    links = dict[int, TcpLink]()
    for rank in range(there.rank):
        where = f"the socket of rank {rank} at {':'.join(map(str, table[rank]['at']))}"
        sock = unless_connected.enter_context(_connected(tuple(table[rank]["at"]), where, deadline, timeout))
        sock.settimeout(max(AGAIN, deadline - time.monotonic()))
        links[rank] = TcpLink(rank, prove(sock, RankMeeting(there, key, rank, "messages"), where).sock)
    arrivals = Arrivals(RankMeeting(there, key, there.rank, "messages"), range(there.rank + 1, there.world_size))
    unless_connected.callback(arrivals.close)
    others = {channel.sock: partial(_heard, channels, rank) for rank, channel in channels.items()}
    if not arrivals.accept(door, deadline, others=others):
        raise ExecutionError(arrivals.not_come(timeout))
    return links | {rank: TcpLink(rank, channel.sock) for rank, channel in arrivals.peers.items()}


def _heard(channels: dict[int, Channel], rank: int) -> bool:
    """Read a message of a rank: False for a goodbye, after which it is not heard any more. Raises _OtherFailed."""
    said = failure_messages.read(rank, channels[rank])
    if said is not None:
        raise _OtherFailed(said)
    del channels[rank]
    return False


def _reason(channels: dict[int, Channel], seconds: float) -> _OtherFailed | None:
    """The failure of another rank, if one says so within some time."""
    ready, _, _ = select.select([channel.sock for channel in channels.values()], [], [], seconds)
    for rank, channel in list(channels.items()):
        try:
            if channel.sock in ready:
                _heard(channels, rank)
        except _OtherFailed as e:
            return e
    return None
