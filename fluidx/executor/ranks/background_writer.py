"""Client of the background threads inside rank processes, such as those that write checkpoints while the rank goes on."""

from __future__ import annotations

import selectors
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...comm.process_spawner import GONE, Channel, Process
from ...ir.program import Program
from .remote_errors import rebuilt

LOOK = 0.25  # seconds between two checks whether a process was stopped


class SharedCopy:
    """Values of a rank's variables in shared memory, with a channel to its background thread. They stay valid until `close`, even if the
    rank's process has ended."""

    def __init__(self, process: Process, channel: Channel, values: Mapping[str, np.ndarray], timeout: float, program: Program):
        self.process, self.channel, self.values, self.timeout, self.program = process, channel, values, timeout, program
        self.close = weakref.finalize(self, channel.close)

    def ask(self, *message: Any) -> Any:
        """The thread's answer to a message; its error is raised. EOFError if the process has ended, or has been stopped for the timeout."""
        try:
            self.channel.send(message)
            self._wait()
            answer, _ = self.channel.receive()
        except GONE as e:
            raise EOFError from e
        if "fault" in answer:
            raise rebuilt(answer["fault"], self.program)
        return answer["done"]

    def _wait(self) -> None:
        stopped = 0.0
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.channel.sock, selectors.EVENT_READ)
            while not waiting.select(LOOK):
                now = time.monotonic()
                stopped = (stopped or now) if self.process.stopped() else 0.0
                if stopped and now > stopped + self.timeout:
                    raise EOFError
