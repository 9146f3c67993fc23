"""ProcessJob: start a script on several ranks that are processes of this host, watch them, and end all of them when one fails."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from .. import config, native
from ..comm import launch_environment
from ..comm.flight_recorder import flight_records
from ..comm.process_spawner import start
from ..executor.ranks.affinity import cores_of
from ..ir.errors import ExecutionError
from ..native import shared
from .report import Failure, JobReport, cause, lost, of_status, report

_LOOK = 0.25  # seconds between two checks whether a process was stopped
_GRACE = 4.0  # seconds in which the other ranks must stop after one has failed
_TAIL = 20  # lines: the last output of a rank that is not shown; the report shows them when the rank fails
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ended(NamedTuple):
    """How a script ended: the exit status and the report."""

    status: int
    report: str
    again: bool  # may it be restarted?
    lost: int = 0  # the number of ranks that caused the failure


class ProcessJob:
    """A script on ranks that are processes of this host."""

    interrupt = signal.SIGTERM  # the signal that asks ranks to end

    def __init__(
        self, script: str, args: Sequence[str], ranks: int, timeout: float | None = None, everything: bool = False, restart: int = 0,
        hear: Callable[[Any], None] | None = None, say: Callable[[str], None] = print, module: bool = False,
    ):  # fmt: skip
        """`module`: the script is the name of a module. `everything`: show the output of all ranks, each line with its rank. `hear`
        receives rank 0's fetches, and `say` warnings of ranks."""
        self._check()
        self.ranks, self.everything = ranks, everything
        self.timeout = config.timeout() if timeout is None else timeout
        self.hear, self.say = hear or (lambda message: None), say
        self._quiet = 0.0  # the time until which no warning is shown
        cores_of(ranks)  # raises here instead of in each rank
        self.given: dict[str, Any] = {
            "ranks": ranks, "timeout": self.timeout, "threads": max(1, native.num_threads() // ranks), "script": script,
            "args": list(args), "module": module, "restart": restart, "job": secrets.token_hex(8), "heard": hear is not None,
            "interrupt": int(self.interrupt),
        }  # fmt: skip
        self.processes: dict[int, Any] = {}  # by rank
        self.failures: dict[int, Failure] = {}
        self.ended: dict[int, int] = {}  # exit statuses of scripts that reached their end
        self.read: dict[int, Lines] = {}  # by the pipe from which they are read
        self.closed: set[int] = set()
        self.halted: list[int] = []
        self.tails = [deque[str](maxlen=_TAIL) for _ in range(ranks)]
        self.signal: int | None = None

    def _check(self) -> None:
        if reason := native.why_not() or shared.why_not():
            raise ExecutionError(f"--backend processes needs the C kernels and shared memory: {reason}; --backend threads needs neither")

    def run(self) -> Ended:
        """Start the ranks, and wait until all have ended."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            with selectors.DefaultSelector() as self.waiting:
                self._start()
                self._watch()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._ended()

    def _on_signal(self, number: int, frame: Any) -> None:
        self.signal = number

    def _end(self) -> None:
        for p in self.processes.values():
            p.end()

    # -- starting ----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._make_memory()
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            for rank in range(self.ranks):
                given = {**self.given, "start": self.memory.start, "rank": rank}
                with self._streams(rank, nothing) as (out, err):
                    self._enter(rank, start("fluidx.launch.rank_main:serve", given, [self.memory.fd, out, err]))
        except OSError as e:
            raise ExecutionError(f"cannot start {self.ranks} processes: {e}; --backend threads runs ranks as threads") from e
        finally:
            os.close(nothing)
            self.memory.close()

    def _make_memory(self) -> None:
        try:
            self.memory = shared.Memory.make(self.ranks)
        except OSError as e:
            raise ExecutionError(f"cannot allocate memory for {self.ranks} processes: {e}; --backend threads needs none") from e
        self.world = self.memory.world(self.timeout)

    @contextmanager
    def _streams(self, rank: int, nothing: int) -> Iterator[tuple[int, int]]:
        """The files to which a rank prints. Rank 0 prints where this process does. The lines of other ranks are read here, and shown or
        kept for the report."""
        out, err = 1 if rank == 0 else nothing, 2
        made = []
        if self.everything or rank:
            err = self._heard(Lines(rank, self.tails[rank], sys.stderr if self.everything else None))
            made.append(err)
        if self.everything:
            out = self._heard(Lines(rank, None, sys.stdout))
            made.append(out)
        try:
            yield out, err
        finally:
            for fd in made:
                os.close(fd)

    def _heard(self, lines: Lines) -> int:
        """A pipe to which a rank writes; `lines` receives its output."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self.read[reading] = lines
        self.waiting.register(reading, selectors.EVENT_READ, partial(self._read, reading, lines))
        return writing

    def _enter(self, rank: int, process: Any) -> None:
        process.channel.sock.settimeout(self.timeout)
        self.processes[rank] = process
        self.waiting.register(process.channel.sock, selectors.EVENT_READ, partial(self._hear, rank))

    # -- watching ----------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        deadline, stopped, interrupted = float("inf"), dict[int, float](), False
        while not self._over() and time.monotonic() < deadline:
            come = self.waiting.select(_LOOK)
            for key, _ in come:
                key.data()
            if not come:
                self._look_for_stopped(stopped)
            if self.signal is not None and not interrupted:
                interrupted = True
                self._interrupt()
            if deadline == float("inf") and (interrupted or self.failures):
                deadline = time.monotonic() + _GRACE
        for fd, lines in list(self.read.items()):
            self._read(fd, lines)

    def _over(self) -> bool:
        return len(self.closed | set(self.halted)) >= self.ranks

    def _interrupt(self) -> None:
        self.world.abort("the run was interrupted")
        for rank in self._open():
            os.kill(self.processes[rank].pid, self.interrupt)

    def _open(self) -> list[int]:
        """The ranks whose processes have not ended."""
        return [rank for rank in self.processes if rank not in self.closed]

    def _read(self, fd: int, lines: Lines) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        lines.take(data)
        if not data:
            self.waiting.unregister(fd)
            os.close(fd)
            del self.read[fd]

    def _hear(self, rank: int) -> None:
        try:
            message, _ = self.processes[rank].channel.receive()
        except (EOFError, OSError):
            self.waiting.unregister(self.processes[rank].channel.sock)
            self._close(rank, self._status(rank))
            return
        if "ended" in message:
            self.ended[rank] = message["ended"]
        elif "how" in message:
            self._fail(Failure(rank, **message))
        elif "warns" in message:
            self._warn(message["warns"])
        else:
            self.hear(message["fetched"])

    def _warn(self, text: str) -> None:
        """Show a warning that a rank waits. All waiting ranks warn at about the same time; it is shown once."""
        if time.monotonic() > self._quiet:
            self._quiet = time.monotonic() + config.stall() / 2
            self.say(f"fluidx run: {text}")

    def _status(self, rank: int) -> int | None:
        """The exit status of a rank's process."""
        return self.processes[rank].end()

    def _close(self, rank: int, status: int | None) -> None:
        """Record that a rank's process has ended."""
        self.closed.add(rank)
        if rank in self.failures or (status == 0 and rank in self.ended):
            return
        self._fail(of_status(rank, status, rank in self.ended))

    def _fail(self, failure: Failure) -> None:
        if failure.how == "waited" and not self.halted:  # the late rank may have waited for a stopped one
            self.halted = [r for r in self._open() if self.processes[r].stopped()]
            failure = failure._replace(at=self.halted[0]) if self.halted else failure
        self.failures.setdefault(failure.rank, failure)
        self.world.abort(f"rank {failure.rank}: {failure.text}")

    def _look_for_stopped(self, since: dict[int, float]) -> None:
        for rank in self._open():
            if not self.processes[rank].stopped():
                since.pop(rank, None)
            elif time.monotonic() > since.setdefault(rank, time.monotonic()) + self.timeout:
                self.halted = [rank]
                self._fail(Failure(rank, "lost", f"its process has been stopped for {self.timeout:g} s, as by SIGSTOP"))

    # -- reporting ---------------------------------------------------------------------------------------------------------------

    def left(self) -> dict[str, Any]:
        """Changed arguments for a restart on the ranks that did not fail."""
        return {}

    def _ended(self) -> Ended:
        if self.signal is not None:
            return Ended(128 + self.signal, f"interrupted by {signal.Signals(self.signal).name}; all ranks were ended", False)
        if not self.failures:
            return Ended(0, "", False)
        tails = {} if self.everything else dict(enumerate(self.tails))
        places = {rank: (process.pid, None) for rank, process in self.processes.items()}
        seen = JobReport(flight_records(self.world, self.ranks), places, self.failures, self.ended, self.halted, tails)
        return Ended(cause(self.failures).status, report(seen), True, len(lost(self.failures)))


class Lines:
    """The output of a rank, line by line: shown with the rank in front, or kept (the last lines)."""

    def __init__(self, rank: int, tail: deque[str] | None, shown: Any, prefix: str | None = None):
        self.rank, self.tail, self.shown, self.rest = rank, tail, shown, b""
        self.prefix = f"[{rank}] " if prefix is None else prefix

    def take(self, data: bytes) -> None:
        """Take the next bytes; no bytes: the end of the output."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            self._line(line.decode(errors="replace"))

    def _line(self, text: str) -> None:
        if self.tail is not None:
            self.tail.append(text)
        if self.shown is not None:
            print(f"{self.prefix}{text}", file=self.shown, flush=True)


@contextmanager
def _environ(added: Mapping[str, str]) -> Iterator[None]:
    """A context in which started processes get these environment variables."""
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})


def run(
    script: str, args: Sequence[str], ranks: int, restarts: int = 0, say: Callable[[str], None] = print, least: int | None = None,
    job: type[ProcessJob] = ProcessJob, again: Callable[[], None] = lambda: None, **how: Any,
) -> int:  # fmt: skip
    """Run a script on ranks that are processes. After a failure it is restarted, at most `restarts` times: on all ranks, or, with `least`,
    on the ranks that did not fail, if these are at least so many. If all ranks failed, all are started again. `again` is called before a
    restart. Returns the exit status."""
    drawn = launch_environment.draw()
    for restart in range(restarts + 1):
        # a restart keeps the seed
        with _environ({launch_environment.JOB_SEED: str(drawn), launch_environment.JOB_KEY: secrets.token_hex(16)}):
            started = job(script, args, ranks, restart=restart, say=say, **how)
            ended = started.run()
        if ended.report:
            say(f"fluidx run: {ended.report}")
        if not ended.again or restart == restarts:
            return ended.status
        left = ranks if least is None or ended.lost == ranks else ranks - ended.lost
        if least is not None and left < least:
            say(f"fluidx run: {left} of {ranks} ranks {'is' if left == 1 else 'are'} left, fewer than --min-ranks {least}: no restart")
            return ended.status
        turn = f"restart {restart + 1} of {restarts}"
        if left == ranks:
            say(f"fluidx run: restarting all {ranks} ranks ({turn})")
        else:
            say(f"fluidx run: restarting on {left} of {ranks} ranks ({turn}); the global batch stays, each rank computes 1/{left} of it")
            how |= started.left()
        ranks = left
        again()
    raise AssertionError("the last turn returns")
