"""MpiJob: a script on ranks that mpirun starts. Ranks of this host are watched as by ProcessJob; ranks on several hosts by mpirun."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import native
from ..comm.mpi import mpirun
from ..comm.mpi.mpirun import Hosts
from ..comm.process_spawner import Channel, is_stopped, start
from ..ir.errors import ExecutionError
from ..native import shared
from . import ssh_hosts
from .process_job import Ended, ProcessJob
from .remote_hosts import Far, Words, unreachable
from .report import Failure, cause, report

_SOON = 3.0  # seconds in which mpirun reports how a rank ended
_GRACE = 6.0  # seconds for mpirun to end, and for the watchdog to notice it
_PEER = struct.Struct("3i")  # pid, uid, gid


class _RankProcess(NamedTuple):
    """A process that mpirun has started on this host."""

    pid: int
    channel: Channel

    def stopped(self) -> bool:
        return is_stopped(self.pid)


class MpiJob(ProcessJob):
    """A script on ranks that mpirun starts, or on several hosts another `starter`."""

    starter: Any = mpirun
    interrupt = signal.SIGINT  # SIGTERM is mpirun's
    door: socket.socket | None = None  # to which ranks of this host connect

    def __init__(self, *args: Any, hosts: Path | Hosts | None = None, logs: Sequence[Path | None] = (), **how: Any):
        """`hosts` is a host file for mpirun. `logs` are the paths of a `metrics.Log`; rank 0 writes them itself if there are other
        hosts."""
        super().__init__(*args, **how)
        self.hosts, self.far = hosts, Far(self.ranks, () if hosts is None else mpirun.hosts_of(hosts))
        self.logs = [None if path is None else str(path.resolve()) for path in logs]
        self.here = hosts is None and not (native.why_not() or shared.why_not())
        self.status: int | None = None  # of mpirun
        self.guard: Any = None
        self.until = time.monotonic() + self.timeout

    def _check(self) -> None:
        """Nothing to check: ranks without C kernels, or on several hosts, communicate over MPI."""

    # -- starting ----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        name = f"fluidx-run-{os.getuid()}-{secrets.token_hex(8)}" if self.here else ""
        said = {"door": name, "restart": self.given["restart"], "module": self.given["module"], "job": self.given["job"], "logs": self.logs}
        own = [sys.executable, "-m", "fluidx.launch.mpi_rank_main", json.dumps(said), self.given["script"], *self.given["args"]]
        words, environ = self.starter.command(self.ranks, own, self.hosts)
        if self.here:
            self._open_door(name)
        self.said = [Words(stream, self.given["job"], self._take) for stream in (sys.stdout, sys.stderr)]
        writing = [self._heard(lines) for lines in self.said]
        try:
            self.guard = start("fluidx.launch.watchdog:serve", {"words": words, "environ": environ, "alone": self.hosts is None}, writing)
        finally:
            for fd in writing:
                os.close(fd)
        self.waiting.register(self.guard.channel.sock, selectors.EVENT_READ, self._ended_all)

    def _open_door(self, name: str) -> None:
        self._make_memory()
        self.nothing = os.open(os.devnull, os.O_WRONLY)
        self.door = socket.socket(socket.AF_UNIX)
        self.door.bind("\0" + name)
        self.door.listen(self.ranks)
        self.waiting.register(self.door, selectors.EVENT_READ, self._welcome)

    def _welcome(self) -> None:
        """Accept a rank: send it the shared memory and its output files."""
        assert self.door is not None
        channel = Channel(self.door.accept()[0])
        channel.sock.settimeout(_SOON)
        _, uid, _ = _PEER.unpack(channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid != os.getuid():
            channel.close()
            return
        try:
            said, _ = channel.receive()
            rank = said["rank"]
            with self._streams(rank, self.nothing) as (out, err):
                channel.send({**self.given, "start": self.memory.start, "rank": rank}, [self.memory.fd, out, err])
        except (OSError, EOFError):  # it has ended; mpirun will report it
            return
        for lines in self.said:  # later output is mpirun's own, about failures that are reported here anyway
            lines.shown = None
        self._enter(rank, _RankProcess(said["pid"], channel))

    def _take(self, said: Mapping[str, Any]) -> None:
        self.far.take(said)
        if self.far.failed():  # later output is from ranks that MPI ends, and from mpirun about them
            self.said[1].shown = None

    # -- watching ----------------------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        if self._late():
            return True
        return super()._over() if self.failures else self.status is not None and not self._open()

    def _late(self) -> list[int]:
        """The ranks that have not started in time, on several hosts."""
        if self.hosts is None or time.monotonic() < self.until:
            return []
        return [rank for rank in range(self.ranks) if rank not in self.far.said]

    def _hear(self, rank: int) -> None:
        super()._hear(rank)
        if self.ended.get(rank) and rank not in self.closed:  # a rank that fails waits for this one before it ends
            self.waiting.unregister(self.processes[rank].channel.sock)
            self._close(rank, self.ended[rank])

    def _interrupt(self) -> None:
        if self.here:
            super()._interrupt()
        if not self.processes:
            self.guard.channel.send("end")

    def _ended_all(self) -> None:
        """Called when mpirun has ended, and all ranks with it."""
        self._learn(_SOON)
        self.waiting.unregister(self.guard.channel.sock)
        for rank in self._open():  # read the ranks' own reports first
            while rank not in self.closed:
                self._hear(rank)
        if self.status and self.processes and not self.failures:
            missing = next((rank for rank in range(self.ranks) if rank not in self.processes), 0)
            self._close(missing, self.starter.ended(self.status))

    def _learn(self, longest: float) -> None:
        """Read mpirun's exit status, if it ends within `longest` seconds."""
        if self.status is not None:
            return
        self.guard.channel.sock.settimeout(longest)
        try:
            self.status = self.guard.channel.receive()[0]["ended"]
        except TimeoutError:
            return
        except (OSError, EOFError):  # the watchdog was killed
            self.status = 1

    def _status(self, rank: int) -> int | None:
        self.processes[rank].channel.close()
        if rank in self.ended:
            return self.ended[rank]
        if rank in self.failures:
            return 1
        self.world.abort(f"rank {rank}: its process has ended")
        self._learn(_SOON)
        return None if self.status is None else self.starter.ended(self.status)

    def _close(self, rank: int, status: int | None) -> None:
        if self.failures and rank not in self.ended:  # mpirun ends the other ranks after a failure; MPICH's before they can report
            self.failures.setdefault(rank, Failure(rank, "stopped", f"{self.starter.NAME} ended its process"))
        super()._close(rank, status)

    def _end(self) -> None:
        for rank in self._open():
            os.kill(self.processes[rank].pid, signal.SIGKILL)
        for process in self.processes.values():
            process.channel.close()
        if self.guard is not None:
            self._end_guard()
        if self.door is not None:
            self.door.close()
            os.close(self.nothing)
            self.memory.close()

    def _end_guard(self) -> None:
        if self.status is None:
            try:
                self.guard.channel.send("end")
            except OSError:
                pass
            self._learn(_GRACE)
        self.guard.end()

    def left(self) -> dict[str, Any]:
        return {} if self.hosts is None else {"hosts": self.far.left(self.gone)}

    def _ended(self) -> Ended:
        late = self._late()
        if self.signal is None and not self.failures and (self.status or late or self.far.open()):
            self.gone = unreachable(self.far.hosts, self.starter.trial)
            seen, lost = self.far.seen(), sorted(self.far.lost(self.gone))
            gone = f"nothing can be started on {', '.join(sorted(self.gone))}" if self.gone else ""
            if seen is not None and not late:
                return Ended(cause(seen.failures).status, report(seen) + (f"\n  {gone}" if gone else ""), True, len(lost))
            how = f"{self.starter.NAME} ended with status {self.status}"
            if late:
                how = f"{_listed(late)} had not started after {self.timeout:g} s"
            elif len(lost) < self.ranks:
                how += f"; {_listed(lost)} failed"
            elif not self.status:
                how += " before the ranks reached the end of the script"
            return Ended(self.status or 1, "; ".join(filter(None, (how, gone))), True, len(lost))
        return super()._ended()


class HostsJob(MpiJob):
    """A script on ranks on several hosts that are started by ssh and connect by TCP."""

    starter = ssh_hosts

    def __init__(self, *args: Any, hosts: Path | Hosts, **how: Any):
        super().__init__(*args, hosts=hosts, **how)
        try:
            ssh_hosts.counts(self.ranks, self.far.hosts)
        except ValueError as e:
            raise ExecutionError(f"--hosts: {e}; give the hosts more slots, or -n fewer ranks") from None


def _listed(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
