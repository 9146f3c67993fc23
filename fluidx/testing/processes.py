"""Run a function of a communicator on ranks that are processes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ..comm import base
from ..comm.process_spawner import Channel, start
from ..comm.processes import ProcessWorld
from ..native.shared import Memory


class ProcessRanks:
    """`n` processes, each a rank of one world, until `close`."""

    def __init__(self, n: int, timeout: float = 10.0):
        self.n, self.timeout = n, timeout
        self.memory = Memory.make(n)
        self.world = self.memory.world(timeout)
        given = {"start": self.memory.start, "ranks": n, "timeout": timeout}
        self.processes = [start("fluidx.testing.processes:answer", {**given, "rank": r}, [self.memory.fd]) for r in range(n)]
        self.memory.close()

    def each(self, function: str, args: Sequence[Any] = ()) -> list[Any]:
        """Call "module:function" with the communicator and the arguments on each rank; return the results in rank order.

        Arguments and results are sent as JSON. The first failure stops and ends all ranks and is raised; errors of ranks that only stopped
        because of it are dropped.
        """
        for p in self.processes:
            p.channel.send([function, list(args)])
        found = [p.channel.receive()[0] for p in self.processes]
        try:
            return values(found)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        for p in self.processes:
            p.end()


def answer(channel: Channel, fds: Sequence[int], given: Any) -> None:
    """The main loop of one process: a rank that answers calls."""
    memory = Memory(fds[0], given["start"], given["ranks"])
    memory.close()
    world = ProcessWorld(memory, given["rank"], given["timeout"])
    comm = world.communicator(given["rank"])
    while True:
        (function, args), _ = channel.receive()
        channel.send(reply(world, comm, function, args))


def reply(world: Any, comm: base.Communicator, function: str, args: Sequence[Any]) -> dict[str, Any]:
    """Call the function and return its value, or its error; an error stops all ranks of the world."""
    module, _, name = function.partition(":")
    try:
        return {"value": getattr(importlib.import_module(module), name)(comm, *args)}
    except Exception as e:
        world.abort(e)
        return {"error": [type(e).__name__, str(e), getattr(e, "rank", None)]}


def values(replies: Sequence[dict[str, Any]]) -> list[Any]:
    """The values of the replies. Raises the first error, preferring one that is not the consequence of another (CommAborted)."""
    errors = [f["error"] for f in replies if "error" in f]
    if errors:
        kind, text, rank = ([e for e in errors if e[0] != "CommAborted"] or errors)[0]
        if hasattr(base, kind):
            raise getattr(base, kind)(text, rank)
        raise RuntimeError(f"{kind}: {text}")
    return [f["value"] for f in replies]
