"""A thread in the process of a rank, which does something with values of its variables while the rank goes on: this side of it."""

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

LOOK = 0.25  # seconds between two looks at whether somebody has stopped a process


class SharedCopy:
    """`values` lie in the memory that the processes share, and stay there until it is closed; also where its process has ended."""

    def __init__(self, process: Process, channel: Channel, values: Mapping[str, np.ndarray], timeout: float, program: Program):
        self.process, self.channel, self.values, self.timeout, self.program = process, channel, values, timeout, program
        self.close = weakref.finalize(self, channel.close)

    def ask(self, *message: Any) -> Any:
        """What it gives for a message; its error is raised. EOFError where its process has ended, or is stopped for the time in which
        others would give it up."""
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
