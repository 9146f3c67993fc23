"""Start a script on several ranks that are processes of this host, watch them, and end all when one fails."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import config, native
from ..comm.nursery import Process, start
from ..executor.affinity import cores_of
from ..ir.errors import ExecutionError
from ..native import shared

_LOOK = 0.25  # seconds between two looks at whether somebody has stopped a process
_GRACE = 4.0  # seconds that the other ranks have to stop in when one has failed
_TAIL = 20  # lines that a rank whose output is not shown wrote last, told of when it fails
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Failure(NamedTuple):
    """Why a rank did not come to the end of its script. `how` tells causes from consequences."""

    rank: int
    how: str  # failed, lost: by itself; waited: too long for another; stopped: because of another; interrupted
    text: str
    trace: str = ""
    status: int = 1
    at: int | None = None  # the rank that is to blame


class Ended(NamedTuple):
    """How a script ended: the status to exit with, and what to say."""

    status: int
    report: str
    again: bool  # may it be started once more?
    lost: int = 0  # how many ranks failed by themselves


class Job:
    """A script on some ranks."""

    def __init__(
        self, script: str, args: Sequence[str], ranks: int, timeout: float | None = None, everything: bool = False, restart: int = 0,
        hear: Callable[[Any], None] | None = None,
    ):  # fmt: skip
        """`everything`: show what all ranks print, each line with its rank. `hear` is given what rank 0 fetches, if there is one."""
        if reason := native.why_not() or shared.why_not():
            raise ExecutionError(f"--backend processes needs the C kernels and shared memory: {reason}; --backend threads needs neither")
        self.ranks, self.everything = ranks, everything
        self.timeout = config.timeout() if timeout is None else timeout
        self.hear = hear or (lambda message: None)
        cores_of(ranks)  # refused here, not by each rank
        self.given = {
            "ranks": ranks, "timeout": self.timeout, "threads": max(1, native.num_threads() // ranks), "script": script,
            "args": list(args), "restart": restart, "job": secrets.token_hex(8), "heard": hear is not None,
        }  # fmt: skip
        self.processes: list[Process] = []
        self.failures: dict[int, Failure] = {}
        self.ended: dict[int, int] = {}  # statuses of scripts that came to their end
        self.closed: set[int] = set()
        self.tails = [deque[str](maxlen=_TAIL) for _ in range(ranks)]
        self.signal: int | None = None

    def run(self) -> Ended:
        """Start the ranks, and wait until all have ended."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            with selectors.DefaultSelector() as self.waiting:
                self._start()
                self._watch()
        finally:
            for p in self.processes:
                p.end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._ended()

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = number

    # -- starting ----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self.memory = shared.Memory.make(self.ranks)
        except OSError as e:
            raise ExecutionError(f"memory for {self.ranks} processes cannot be had: {e}") from e
        self.world = self.memory.world(self.timeout)
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            for rank in range(self.ranks):
                self._start_rank(rank, nothing)
        except OSError as e:
            raise ExecutionError(f"{self.ranks} processes cannot be had: {e}; --backend threads runs ranks as threads") from e
        finally:
            os.close(nothing)
            self.memory.close()

    def _start_rank(self, rank: int, nothing: int) -> None:
        """Rank 0 prints where this process does. Of the others the lines are read here, and shown or kept for the report."""
        out, err = 1 if rank == 0 else nothing, 2
        made = []
        if self.everything or rank:
            reading, err = os.pipe()
            made.append(err)
            self.waiting.register(reading, selectors.EVENT_READ, _Lines(rank, self.tails[rank], sys.stderr if self.everything else None))
        if self.everything:
            reading, out = os.pipe()
            made.append(out)
            self.waiting.register(reading, selectors.EVENT_READ, _Lines(rank, None, sys.stdout))
        try:
            given = {**self.given, "start": self.memory.start, "rank": rank}
            process = start("fluidx.launch.script:serve", given, [self.memory.fd, out, err])
        finally:
            for fd in made:
                os.close(fd)
        process.channel.sock.settimeout(self.timeout)
        self.processes.append(process)
        self.waiting.register(process.channel.sock, selectors.EVENT_READ, rank)

    # -- watching ----------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        deadline, stopped, interrupted = float("inf"), dict[int, float](), False
        while len(self.closed) < self.ranks and time.monotonic() < deadline:
            come = self.waiting.select(_LOOK)
            for key, _ in come:
                if isinstance(key.data, _Lines):
                    self._read(key)
                else:
                    self._hear(key.data)
            if not come:
                self._look_for_stopped(stopped)
            if self.signal is not None and not interrupted:
                interrupted = True
                self.world.abort("the run was interrupted")
                for rank in set(range(self.ranks)) - self.closed:
                    os.kill(self.processes[rank].pid, signal.SIGTERM)
            if deadline == float("inf") and (interrupted or self.failures):
                deadline = time.monotonic() + _GRACE
        for key in list(self.waiting.get_map().values()):
            if isinstance(key.data, _Lines) and key.data.rank in self.closed:
                self._read(key)

    def _read(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, 1 << 16)
        key.data.take(data)
        if not data:
            self.waiting.unregister(key.fd)
            os.close(key.fd)

    def _hear(self, rank: int) -> None:
        try:
            message, _ = self.processes[rank].channel.receive()
        except (EOFError, OSError):
            self.waiting.unregister(self.processes[rank].channel.sock)
            self._close(rank, self.processes[rank].end())
            return
        if "ended" in message:
            self.ended[rank] = message["ended"]
        elif "how" in message:
            self._fail(Failure(rank, message["how"], message["text"], message["trace"], at=message["at"]))
        else:
            self.hear(message["fetched"])

    def _close(self, rank: int, status: int) -> None:
        """A rank's process has ended."""
        self.closed.add(rank)
        if rank in self.failures or (status == 0 and rank in self.ended):
            return
        if status < 0:
            how = f"its process was killed by signal {-status} ({signal.Signals(-status).name})"
        elif rank in self.ended:
            how = f"its script exited with status {status}"
        else:
            how = f"its process exited with status {status} in the middle of the script"
        self._fail(Failure(rank, "lost", how, status=128 - status if status < 0 else max(status, 1)))

    def _fail(self, failure: Failure) -> None:
        self.failures.setdefault(failure.rank, failure)
        self.world.abort(f"rank {failure.rank}: {failure.text}")

    def _look_for_stopped(self, since: dict[int, float]) -> None:
        for rank in set(range(self.ranks)) - self.closed:
            if not self.processes[rank].stopped():
                since.pop(rank, None)
            elif time.monotonic() > since.setdefault(rank, time.monotonic()) + self.timeout:
                self._fail(Failure(rank, "lost", f"its process has been stopped for {self.timeout:g} s, as by SIGSTOP"))

    # -- telling -----------------------------------------------------------------------------------------------------------------

    def _ended(self) -> Ended:
        if self.signal is not None:
            return Ended(128 + self.signal, f"interrupted by {signal.Signals(self.signal).name}; all ranks were ended", False)
        if not self.failures:
            return Ended(0, "", False)
        return Ended(self._cause().status, self._report(), True, len(self._lost()))

    def _lost(self) -> set[int]:
        """The ranks that failed by themselves, or did not come."""
        own = {f.rank for f in self.failures.values() if f.how in ("failed", "lost")}
        cause = self._cause()
        return own or {cause.rank if cause.at is None else cause.at}

    def _cause(self) -> Failure:
        """The first failure of the kind that says most."""
        for kind in (("failed", "lost"), ("waited",), ("interrupted",)):
            for failure in self.failures.values():
                if failure.how in kind:
                    return failure
        return next(iter(self.failures.values()))

    def _report(self) -> str:
        cause = self._cause()
        blamed = cause.rank if cause.at is None else cause.at
        lines = [cause.text if cause.text.startswith("rank ") else f"rank {cause.rank}: {cause.text}"]
        if blamed != cause.rank:
            lines[0] = f"rank {blamed} did not come{self._whereabouts(blamed)}\n  {lines[0]}"
        lines.append(f"  on host {socket.gethostname()}, process {self.processes[blamed].pid}")
        if cause.trace:
            lines.append(f"  where rank {cause.rank} was:\n{cause.trace.rstrip()}")
        if self.tails[blamed] and not self.everything:
            lines.append(f"  what rank {blamed} wrote last:\n" + "\n".join(f"    {line}" for line in self.tails[blamed]))
        lines.append("  the latest meeting that each rank came to:")
        lines += [f"    rank {r}: {self.world.latest(r) or 'none'}{self._whereabouts(r)}" for r in range(self.ranks)]
        return "\n".join(lines)

    def _whereabouts(self, rank: int) -> str:
        failure = self.failures.get(rank)
        if failure is None:
            return ": its script had come to its end" if rank in self.ended else ": it said nothing until it was ended"
        return {"stopped": ": stopped", "waited": ": waited too long", "interrupted": ": interrupted"}.get(failure.how, "")


class _Lines:
    """What a rank prints, line by line: shown behind its rank, or its last lines kept."""

    def __init__(self, rank: int, tail: deque[str] | None, shown: Any):
        self.rank, self.tail, self.shown, self.rest = rank, tail, shown, b""

    def take(self, data: bytes) -> None:
        """The next bytes; none: that was all."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            text = line.decode(errors="replace")
            if self.tail is not None:
                self.tail.append(text)
            if self.shown is not None:
                print(f"[{self.rank}] {text}", file=self.shown, flush=True)


def run(
    script: str, args: Sequence[str], ranks: int, restarts: int = 0, say: Callable[[str], None] = print, least: int | None = None,
    **how: Any,
) -> int:  # fmt: skip
    """Run a script on ranks that are processes; start it again after a failure, so often: on as many ranks, or, where it may run on `least`
    of them, on those that did not fail. What fails on all ranks is the fault of none. Returns the status to exit with."""
    for restart in range(restarts + 1):
        ended = Job(script, args, ranks, restart=restart, **how).run()
        if ended.report:
            say(f"fluidx run: {ended.report}")
        if not ended.again or restart == restarts:
            return ended.status
        left = ranks if least is None or ended.lost == ranks else ranks - ended.lost
        if least is not None and left < least:
            say(f"fluidx run: {left} of {ranks} ranks are left, and --min-ranks asks for {least}: the script is not started again")
            return ended.status
        turn = f"restart {restart + 1} of {restarts}"
        if left == ranks:
            say(f"fluidx run: starting all {ranks} ranks again, {turn}")
        else:
            say(f"fluidx run: starting again on {left} of {ranks} ranks, {turn}; a step's whole batch stays, a rank takes 1/{left} of it")
        ranks = left
    raise AssertionError("the last turn returns")
