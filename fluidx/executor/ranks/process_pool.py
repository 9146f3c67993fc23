"""ProcessPool: the processes of ranks. It starts and ends them, sends messages to all, and detects processes that do not answer."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ... import native
from ...comm import flight_recorder
from ...comm.base import CommError, CommTimeout
from ...comm.process_spawner import Process, start
from ...ir.errors import ExecutionError
from ...native import shared
from .affinity import Cores
from .background_writer import LOOK
from .thread_workers import GRACE


class ProcessPool:
    """The processes of the ranks, and the memory that they share."""

    def __init__(self, ranks: int, timeout: float, cores: Sequence[Cores | None]):
        self.timeout, self.ended = timeout, False
        self.processes: list[Process] = []
        self.threads = native.num_threads()  # of all ranks
        try:
            self.memory = shared.Memory.make(ranks)
            self.world = self.memory.world(timeout)
            given = {"start": self.memory.start, "ranks": ranks, "timeout": timeout, "threads": self.threads}
            self._start([{**given, "rank": r, "cores": sorted(cores[r] or ())} for r in range(ranks)])
        except OSError as e:
            raise ExecutionError(f"cannot start {ranks} processes: {e}; cpu_places({ranks}) runs ranks as threads") from e

    def _start(self, given: Sequence[Any]) -> None:
        try:
            for own in given:
                self.processes.append(start("fluidx.executor.ranks.process_worker:serve", own, [self.memory.fd]))
                self.processes[-1].channel.sock.settimeout(self.timeout)
        except BaseException:
            self.end()
            raise
        finally:
            self.memory.close()

    def said(self, rank: int) -> str:
        """The rank's current operator as text, from its progress record; also after the rank has ended."""
        return self.world.whereabouts(rank)[0]

    def scene(self, rank: int) -> str:
        """Lines that name the process of a rank, and the last collective of every rank."""
        return flight_recorder.failure_context(self.processes[rank].pid, self.world, len(self.processes))

    def end(self) -> None:
        """End the processes. Their memory is freed when no array uses it any more."""
        self.ended = True
        for p in self.processes:
            p.end()

    def ask(self, messages: Mapping[int, Any], files: Mapping[int, int]) -> dict[int, Any]:
        """Send a message to each rank; their answers, or errors for ranks that did not answer. After a failure the others get `GRACE`
        seconds; a rank that is still silent then is missing in the result. `files`: an open file to send along, by rank."""
        answers: dict[int, Any] = {}
        deadline, stopped = float("inf"), dict[int, float]()
        with selectors.DefaultSelector() as waiting:
            for r, message in messages.items():
                waiting.register(self.processes[r].channel.sock, selectors.EVENT_READ, r)
                try:
                    self.processes[r].channel.send(message, [files[r]] if r in files else ())
                except TimeoutError:  # it reads nothing, for example because it is stopped
                    answers[r] = self._lost(r, CommTimeout(f"the process read no message for {self.timeout:g} s", rank=r))
                except OSError:  # it has ended: `_answer` reports it
                    pass
            while len(answers) < len(messages) and time.monotonic() < deadline:
                come = waiting.select(LOOK)
                for key, _ in come:
                    answers[key.data] = self._answer(key.data)
                    waiting.unregister(key.fileobj)
                for r in () if come else messages:
                    if r in answers or not self.processes[r].stopped():
                        stopped.pop(r, None)
                    elif time.monotonic() > stopped.setdefault(r, time.monotonic()) + self.timeout:
                        answers[r] = self._lost(r, CommTimeout(f"the process has been stopped for {self.timeout:g} s", rank=r))
                if deadline == float("inf") and any("done" not in a for a in answers.values()):
                    deadline = time.monotonic() + min(self.timeout, GRACE)
        return answers

    def _answer(self, rank: int) -> Any:
        try:
            return self.processes[rank].channel.receive()[0]
        except (EOFError, OSError):
            status = self.processes[rank].end()
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exited with status {status}"
            return self._lost(rank, CommError(f"the process {how}", rank=rank))

    def _lost(self, rank: int, error: CommError) -> Any:
        self.world.abort(f"rank {rank}: {error}")
        return {"error": error}
