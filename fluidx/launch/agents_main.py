"""The starter of ranks on several hosts without MPI: `python -m fluidx.launch.agents_main`. It runs an agent on each host, by ssh.

The key of the job and the environment go to the agents by their standard input, and so by ssh's connection: no command line has them.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from .. import config
from .ssh_hosts import is_here

READY = b"fluidx agent "  # begins the line with which an agent says that it runs, and a free port of its host
_PASSED = ("FLUIDX_", "PYTHONPATH")  # the beginnings of names of variables that ranks get
_GRACE = 1.0  # seconds in which ranks of other hosts stop by themselves after one has failed
_ENDS = 4.0  # seconds for agents to end their ranks
_SOON = 1.0  # seconds for the last lines of an agent that has ended
_LOOK = 0.05


class _Agent:
    """An agent, seen from the starter. Its output is shown here."""

    def __init__(self, name: str, orders: dict[str, Any]):
        self.name, self.port, self.said = name, 0, threading.Event()
        words = [sys.executable, "-m", "fluidx.launch.host_agent"]
        if not is_here(name):
            path = shlex.quote(os.environ.get("PYTHONPATH", ""))
            there = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={path} exec {shlex.join(words)}"
            words = [*shlex.split(config.ssh()), name, there]
        try:
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as e:
            sys.exit(f"fluidx: cannot run {words[0]} to reach host {name}: {e.strerror}; install it, or set FLUIDX_SSH to another command")
        self.tell(orders)
        self.shown = threading.Thread(target=self._show, daemon=True)
        self.shown.start()

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:  # it has ended
            pass

    def let_go(self) -> None:
        """Close its input: it ends its ranks."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def _show(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not self.said.is_set() and line.startswith(READY):
                self.port = int(line[len(READY) :])
                self.said.set()
                continue
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        self.said.set()


def main() -> NoReturn:
    where, args = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    environ = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    ranks, first, agents = sum(count for _, count in where), 0, []
    try:
        for name, count in where:
            agents.append(_Agent(name, {"args": args, "environ": environ, "first": first, "here": count, "ranks": ranks}))
            first += count
        agents[0].said.wait()
        for agent in agents if agents[0].port else ():
            agent.tell({"address": _address(where[0][0], agents[0].port)})
        status = _watch(agents)
    finally:
        for agent in agents:
            agent.let_go()
        _end(agents)
    sys.stdout.flush()
    os._exit(128 - status if status < 0 else status)


def _address(name: str, port: int) -> str:
    """Where rank 0 listens, as all hosts know it."""
    name = socket.gethostname() if name == "localhost" else name
    return f"{f'[{name}]' if ':' in name else name}:{port}"


def _watch(agents: list[_Agent]) -> int:
    """Wait until all agents have ended, or one has failed and the others had time to end; the first status that is not 0."""
    status, deadline = 0, float("inf")
    while time.monotonic() < deadline and any(agent.process.poll() is None for agent in agents):
        if not status:
            status = next((s for agent in agents if (s := agent.process.poll())), 0)
            deadline = time.monotonic() + _GRACE if status else deadline
        time.sleep(_LOOK)
    return status or next((s for agent in agents if (s := agent.process.poll())), 0)


def _end(agents: list[_Agent]) -> None:
    deadline = time.monotonic() + _ENDS
    for agent in agents:
        try:
            agent.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.process.kill()
            with suppress(subprocess.TimeoutExpired):  # Ctrl-C within `Popen.poll` leaves its lock taken
                agent.process.wait(_SOON)
    deadline = time.monotonic() + _SOON
    for agent in agents:
        agent.shown.join(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    main()
