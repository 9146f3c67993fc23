"""Start commands on hosts by ssh, without MPI: the same functions as `comm.mpi.mpirun`.

A starter on this host (`agents_main`) runs an agent on each host (`host_agent`), which starts the ranks there, and ends them with the
starter.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .. import config
from ..comm.mpi.mpirun import Hosts, hosts_of
from ..comm.tcp import interfaces

NAME = "ssh"


def command(
    ranks: int, args: Sequence[str], hosts: Path | Hosts | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """The command that runs `args` on so many ranks of the hosts, and its environment."""
    where = counts(ranks, hosts_of(hosts or []))
    return [sys.executable, "-m", "fluidx.launch.agents_main", json.dumps([where, list(args)])], dict(environ)


def trial(name: str) -> tuple[list[str], dict[str, str]]:
    """The command that tries to run something on a host, and its environment."""
    return [*([] if is_here(name) else [*shlex.split(config.ssh()), name]), "true"], dict(os.environ)


def is_here(name: str) -> bool:
    """Does a name or an address belong to this host?

    >>> is_here("localhost")
    True
    """
    try:
        return name in ("localhost", socket.gethostname()) or interfaces.can_bind(name)
    except OSError:  # the name is not known: ssh may have it in its configuration
        return False


def counts(ranks: int, hosts: Hosts) -> list[tuple[str, int]]:
    """The hosts that are used, with the number of ranks on each: slots in order; hosts without slots share what is left.

    >>> counts(5, [("a", 2), ("b", None), ("c", None)]), counts(2, [("a", 2), ("b", 2)])
    ([('a', 2), ('b', 2), ('c', 1)], [('a', 2)])
    >>> counts(4, [("a", 1)])
    Traceback (most recent call last):
    ValueError: 4 ranks do not fit on the hosts, which have 1 slots: a 1
    """
    left, free = ranks, sum(slots is None for _, slots in hosts)
    taken: list[tuple[str, int]] = []
    given = sum(min(slots or 0, ranks) for _, slots in hosts)
    shared = max(0, ranks - given)
    for name, slots in hosts:
        if slots is None:
            count = -(-shared // free)
            shared, free = shared - count, free - 1
        else:
            count = min(slots, left)
        left -= count
        taken.append((name, count))
    if left > 0:
        said = ", ".join(f"{name} {slots}" for name, slots in hosts)
        raise ValueError(f"{ranks} ranks do not fit on the hosts, which have {given} slots: {said}")
    return [(name, count) for name, count in taken if count]


def ended(status: int) -> int:
    """The exit status of a rank (negative for a signal), from that of the command."""
    return 128 - status if status > 128 else status
