"""The agent on one of several hosts: `python -m fluidx.launch.host_agent`. It starts the ranks of its host, and ends them with the starter.

Its orders are lines of JSON on its standard input. When that is closed, because the starter or the connection has ended, it ends its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any, NoReturn

from ..comm.launch_environment import ADDRESS, LOCAL_WORLD_SIZE, RANK, WORLD_SIZE
from .agents_main import READY

_GRACE = 1.0  # seconds in which the other ranks stop by themselves after one has failed; and after they were asked to
_SOON = 1.0  # seconds for the last lines of a rank that has ended
_LOOK = 0.05


def main() -> NoReturn:
    orders: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    with socket.socket() as held:  # until rank 0 listens on it: bound, so that no other program gets the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        print(f"{READY.decode()}{held.getsockname()[1]}", flush=True)
        line = sys.stdin.buffer.readline()
        if not line:  # the starter has ended
            os._exit(1)
        ranks = [_start(orders, json.loads(line)["address"], rank) for rank in range(orders["first"], orders["first"] + orders["here"])]
        alone = threading.Event()
        threading.Thread(target=_wait_for_end, args=(alone,), daemon=True).start()
        shown = [_shown(pipe, out) for rank in ranks for pipe, out in ((rank.stdout, 1), (rank.stderr, 2))]
        status = _watch(ranks, alone)
        for thread in shown:
            thread.join(_SOON)
        os._exit(status)


def _wait_for_end(alone: threading.Event) -> None:
    sys.stdin.buffer.read()
    alone.set()


def _start(orders: dict[str, Any], address: str, rank: int) -> subprocess.Popen[bytes]:
    own = {RANK: rank, WORLD_SIZE: orders["ranks"], LOCAL_WORLD_SIZE: orders["here"], ADDRESS: address}
    environ = {**os.environ, **orders["environ"], **{name: str(value) for name, value in own.items()}}
    return subprocess.Popen(orders["args"], env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _shown(pipe: IO[bytes] | None, out: int) -> threading.Thread:
    """A thread that shows what a rank prints, line by line, so that lines of ranks are not mixed."""

    def show() -> None:
        for line in pipe or ():
            os.write(out, line)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    return thread


def _watch(ranks: list[subprocess.Popen[bytes]], alone: threading.Event) -> int:
    """Wait until all ranks have ended; the status of the first that failed. The others are then ended."""
    status, limits = 0, [(0.0, signal.SIGTERM), (_GRACE, signal.SIGKILL)]
    begun = None
    while any(rank.poll() is None for rank in ranks):
        if begun is None and (alone.is_set() or (status := next((s for rank in ranks if (s := rank.poll())), 0))):
            begun = time.monotonic() + (0.0 if alone.is_set() else _GRACE)  # they stop by themselves, and report
        if begun is not None and limits and time.monotonic() >= begun + limits[0][0]:
            _, number = limits.pop(0)
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(number)
        time.sleep(_LOOK)
    status = status or next((s for rank in ranks if (s := rank.poll())), 0)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    main()
