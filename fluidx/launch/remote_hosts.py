"""Reports of ranks on several hosts. Ranks write reports as marked lines to stderr, which mpirun forwards; from them follows which ranks
and hosts are left after a failure."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NoReturn

from ..comm import flight_recorder, launched_rank
from ..comm.flight_recorder import FlightRecord
from ..comm.mpi import mpirun
from ..comm.mpi.mpirun import Hosts
from ..comm.process_spawner import Channel, Process, die_with, start
from ..native.shared import Memory
from .process_job import Lines
from .rank_main import failure_of
from .report import Failure, JobReport, of_status

_PATIENCE = 10.0  # seconds for a host to answer
_OF_MPI = (14,)  # statuses with which Open MPI ends a process that has lost another: MPI_ERR_UNKNOWN
_GOES_ON = 2.0  # seconds in which a stopped process ends after it was continued in order to end it
_PIECE = 900  # characters
_SOON = 0.5  # seconds for a message to arrive
_GRACE = 6.0  # seconds for mpirun to end, and for the watchdog to notice it


def run(job: str, rank: int, script: Callable[[], None]) -> None:
    """Run a script in the child of a fork; the parent reports how it ended, because a rank that is killed cannot report."""

    def say(**what: Any) -> None:
        for line in lines(job, f"{rank}.{os.getpid()}", {"rank": rank, **what}):
            os.write(2, line)

    me, (ours, theirs) = os.getpid(), socket.socketpair()
    if child := os.fork():
        theirs.close()
        _see_through(child, Channel(ours), rank, say)
    die_with(me)
    ours.close()
    flight_recorder.readers.append(lambda memory: Channel(theirs).send({"start": memory.start, "ranks": memory.ranks}, [memory.fd]))
    try:
        script()
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if not status:
            say(how="ended")
            raise
        failure = of_status(rank, status, ended=True)
        if not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
        say(**failure._asdict(), trail=_own_trail(rank))
        atexit._run_exitfuncs()
        _end(RuntimeError(f"rank {rank}: {failure.text}"), status)
    except BaseException as e:
        say(**failure_of(e), trail=_own_trail(rank))
        _end(e, 1)
    say(how="ended")


def _own_trail(rank: int) -> FlightRecord | None:
    world = None if (joined := launched_rank.entered()) is None else joined.world.shared
    return None if world is None else FlightRecord.of(world, rank)


def _end(error: BaseException, status: int) -> NoReturn:
    """End this rank after its report; mpirun then ends the others. A normal exit would wait for the others in MPI."""
    if (joined := launched_rank.entered()) is not None:
        joined.world.abort(error)  # some ranks notice it before mpirun ends them, and can report their operator
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _see_through(child: int, channel: Channel, rank: int, say: Callable[..., None]) -> NoReturn:
    """Wait for a child, report how it ended and its progress, and end in the same way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    say(host=socket.gethostname(), process=child)
    memory = _memory_of(child, channel)
    world = None if memory is None else memory.look(rank)
    _wait_for(child, lambda halted: say(halted=halted, trail=None if world is None else flight_recorder.FlightRecord.of(world, rank)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the child has ended: no signal to forward any more
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    trail = None if world is None else flight_recorder.FlightRecord.of(world, rank)
    if status == 0:
        say(how="ended", trail=trail)
    else:
        failure = of_status(rank, status, ended=False)
        how = "stopped" if status == -signal.SIGTERM else "left" if status in _OF_MPI else "lost"
        say(**failure._replace(how=how)._asdict(), trail=trail)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _wait_for(child: int, halt: Callable[[bool], None]) -> None:
    """Wait until a child has ended; its status stays available. `halt` is called when the child is stopped or continued: at once, because a
    report that is written while mpirun ends processes may be lost."""
    while (event := os.waitid(os.P_PID, child, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)) is not None:
        if event.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
            return
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)  # consume the event
        if event.si_code == os.CLD_CONTINUED:
            time.sleep(_GOES_ON)
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
        halt(event.si_code == os.CLD_STOPPED)


def _memory_of(child: int, channel: Channel) -> Memory | None:
    """The shared memory with a child's flight record; None if it has none."""
    try:
        ended = os.pidfd_open(child)
    except OSError:  # not available: Linux before 5.3, or a sandbox
        return None
    with selectors.DefaultSelector() as waiting:
        waiting.register(ended, selectors.EVENT_READ)
        waiting.register(channel.sock, selectors.EVENT_READ)
        waiting.select()
    os.close(ended)
    try:
        channel.sock.settimeout(_SOON)
        said, fds = channel.receive(files=1)
        return Memory(fds[0], said["start"], said["ranks"])
    except (OSError, EOFError):
        return None


def lines(job: str, who: str, said: Any) -> Iterator[bytes]:
    """JSON data as marked lines. Each is so short that it is not split between the outputs of other ranks."""
    text = json.dumps(said)
    for at in range(0, len(text), _PIECE):
        yield f"{_mark(job)}{who} {int(at + _PIECE >= len(text))} {text[at : at + _PIECE]}\n".encode()


def _mark(job: str) -> str:
    return f"fluidx {job} "


class Words(Lines):
    """The output of mpirun. Reports of ranks are given to `hear`; other lines are shown."""

    def __init__(self, shown: Any, job: str, hear: Callable[[Any], None]):
        super().__init__(-1, None, shown, prefix="")
        self.mark, self.hear = _mark(job), hear
        self.begun: defaultdict[str, str] = defaultdict(str)  # incomplete reports, by sender

    def _line(self, text: str) -> None:
        text, found, said = text.partition(self.mark)
        if found:
            with suppress(ValueError):  # a line was lost or cut
                who, last, piece = said.split(" ", 2)
                self.begun[who] += piece
                if last == "1":
                    self.hear(json.loads(self.begun.pop(who)))
        if text or not found:
            super()._line(text)


class Far:
    """The reports of a job's ranks on several hosts."""

    def __init__(self, ranks: int, hosts: Hosts):
        self.ranks, self.hosts = ranks, hosts
        self.said: dict[int, str] = {}  # the host name that each rank reported
        self.processes: dict[int, int] = {}
        self.ends: dict[int, Failure] = {}  # how = "ended" for a rank that reached the end of the script
        self.trails: list[FlightRecord | None] = [None] * ranks
        self.halted: set[int] = set()

    def take(self, said: Mapping[str, Any]) -> None:
        rank, rest = said["rank"], dict(said)
        if "host" in rest:
            self.said[rank], self.processes[rank] = rest["host"], rest["process"]
            return
        if (trail := rest.pop("trail", None)) is not None:
            self.trails[rank] = FlightRecord(*trail)
        if "halted" in rest:
            (self.halted.add if rest["halted"] else self.halted.discard)(rank)
            return
        self.ends.setdefault(rank, Failure(**{"text": "", **rest}))

    def failed(self) -> bool:
        """Has a rank reported a failure that is not a consequence of another one?"""
        return any(end.how not in ("ended", "stopped") for end in self.ends.values())

    def seen(self) -> JobReport | None:
        """The job report; None if no rank has reported a failure."""
        if not self.failed():
            return None
        ended = {rank: 0 for rank, end in self.ends.items() if end.how == "ended"}
        failures = {rank: end for rank, end in self.ends.items() if rank not in ended}
        places = {rank: (self.processes[rank], host) for rank, host in self.said.items()}
        return JobReport(self.trails, places, failures, ended, self.halted)

    def open(self) -> list[int]:
        """The ranks that started and are not known to have reached the end of the script. mpirun may end with status 0 after losing a
        host."""
        return [rank for rank in range(self.ranks) if self.said and (rank not in self.ends or self.ends[rank].how != "ended")]

    def lost(self, gone: Collection[str] = ()) -> set[int]:
        """The ranks that caused the failure, as far as is known: ranks on hosts that are `gone`, and ranks that reported a failure or were
        killed; else ranks for which others waited; else ranks without a report; else ranks that ended in another way; else all ranks."""
        ends, everyone = self.ends.values(), set(range(self.ranks))
        failed = {end.rank for end in ends if end.how in ("failed", "lost")}
        failed |= {rank for rank in everyone if gone and self.placed[rank] in gone}
        missed = {end.at for end in ends if end.how == "waited" and end.at is not None}
        left = {end.rank for end in ends if end.how == "left"}
        return failed or missed or (everyone - set(self.ends)) or left or everyone

    @cached_property
    def placed(self) -> dict[int, str]:
        """The host of each rank, by the name in the host list: the name that equals the reported one, else names in the order of ranks."""
        rest = list(dict.fromkeys(self.said[rank] for rank in sorted(self.said)))
        own = {name: said for name, _ in self.hosts for said in rest if _first(name) == _first(said)}
        rest = [said for said in rest if said not in own.values()]
        own |= dict(zip([name for name, _ in self.hosts if name not in own], rest, strict=False))
        found = {rank: name for name, said in own.items() for rank, on in self.said.items() if on == said}
        room = [name for name, slots in self.hosts for _ in range(slots or 1)] * self.ranks
        for name in found.values():
            room.remove(name)
        return {rank: found[rank] if rank in found else room.pop(0) for rank in range(self.ranks)}

    def left(self, gone: Collection[str]) -> Hosts:
        """The hosts, with slots for the ranks that are not lost. A host that had no rank keeps all its slots."""
        lost, taken = self.lost(gone), Counter(self.placed.values())
        left = Counter(name for rank, name in self.placed.items() if rank not in lost)
        return [(name, left[name] or slots) for name, slots in self.hosts if name not in gone and (left[name] or not taken[name])]


def _first(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def unreachable(hosts: Hosts, trial: Callable[[str], tuple[list[str], dict[str, str]]] = mpirun.trial) -> set[str]:
    """The names of the hosts on which nothing can be started within some seconds. `trial` makes the command for a host."""
    nothing, started = os.open(os.devnull, os.O_WRONLY), dict[str, Process]()
    for name, _ in hosts:
        words, environ = trial(name)
        given = {"words": words, "environ": environ, "alone": False}
        started[name] = start("fluidx.launch.watchdog:serve", given, [nothing, nothing])
    os.close(nothing)
    deadline, found = time.monotonic() + _PATIENCE, set[str]()
    for name, guard in started.items():
        guard.channel.sock.settimeout(max(0.001, deadline - time.monotonic()))
        if _answer(guard.channel) != 0:
            found.add(name)
    for name in found:
        with suppress(OSError):
            started[name].channel.send("end")
    for name, guard in started.items():
        guard.channel.sock.settimeout(_GRACE)
        if name in found:
            _answer(guard.channel)
        guard.end()
    return found


def _answer(guard: Channel) -> int | None:
    """The exit status of a watchdog's command, if it arrives in time; else None."""
    try:
        return guard.receive()[0]["ended"]
    except (OSError, EOFError):
        return None
