"""What becomes of ranks on several hosts: they say it in lines among what they write, which mpirun brings. What is left follows."""

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

_PATIENCE = 10.0  # seconds for a host to answer in
_OF_MPI = (14,)  # statuses with which Open MPI ends a process that has lost another: MPI_ERR_UNKNOWN
_GOES_ON = 2.0  # seconds in which a process ends that was stopped, and let go on to be ended
_PIECE = 900  # characters
_SOON = 0.5  # seconds in which what is being sent arrives
_GRACE = 6.0  # seconds for mpirun to end in, and for what stands between to notice
_SOMETHING = ("sleep", "1")  # to start on a host; Open MPI 5.0 waits for ever, now and then, for what ends at once


def run(job: str, rank: int, script: Callable[[], None]) -> None:
    """Run a script in a child of this process, and say how it ended: one that is killed, or ended by MPI, cannot."""

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
    world = None if (joined := launched_rank.entered()) is None else getattr(joined.world, "shared", None)
    return None if world is None else FlightRecord.of(world, rank)


def _end(error: BaseException, status: int) -> NoReturn:
    """End this rank, of which all has been said, and by that all: mpirun ends them. At its end MPI would wait for the others."""
    if (joined := launched_rank.entered()) is not None:
        joined.world.abort(error)  # some hear that before mpirun ends them, and can say where they were
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _see_through(child: int, channel: Channel, rank: int, say: Callable[..., None]) -> NoReturn:
    """Wait for a child, say how it ended and how far it had come, and end as it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    say(host=socket.gethostname(), process=child)
    memory = _memory_of(child, channel)
    world = None if memory is None else memory.look(rank)
    _wait_for(child, lambda halted: say(halted=halted, trail=None if world is None else flight_recorder.FlightRecord.of(world, rank)))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # there is nobody any more to tell
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
    """Wait until a child has ended, which stays to be asked for. `halt` is told at once when somebody stops it, for what is said while
    mpirun ends the processes of another host may not arrive, and when it goes on."""
    while (event := os.waitid(os.P_PID, child, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)) is not None:
        if event.si_code not in (os.CLD_STOPPED, os.CLD_CONTINUED):
            return
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)  # what has been seen
        if event.si_code == os.CLD_CONTINUED:
            time.sleep(_GOES_ON)
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
        halt(event.si_code == os.CLD_STOPPED)


def _memory_of(child: int, channel: Channel) -> Memory | None:
    """The memory in which a child leaves word of where it is; None if it ends without, or shares none."""
    try:
        ended = os.pidfd_open(child)
    except OSError:  # a kernel that has none: Linux before 5.3, or a sandbox
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
    """Lines that say something, so short that each stays in one piece among what all ranks write."""
    text = json.dumps(said)
    for at in range(0, len(text), _PIECE):
        yield f"{_mark(job)}{who} {int(at + _PIECE >= len(text))} {text[at : at + _PIECE]}\n".encode()


def _mark(job: str) -> str:
    return f"fluidx {job} "


class Words(Lines):
    """What mpirun brings, of which `hear` is given what ranks say of themselves."""

    def __init__(self, shown: Any, job: str, hear: Callable[[Any], None]):
        super().__init__(-1, None, shown, prefix="")
        self.mark, self.hear = _mark(job), hear
        self.begun: defaultdict[str, str] = defaultdict(str)  # by who says it

    def _line(self, text: str) -> None:
        text, found, said = text.partition(self.mark)
        if found:
            with suppress(ValueError):  # a piece was lost, or cut
                who, last, piece = said.split(" ", 2)
                self.begun[who] += piece
                if last == "1":
                    self.hear(json.loads(self.begun.pop(who)))
        if text or not found:
            super()._line(text)


class Far:
    """What the ranks of a job on these hosts have said of themselves."""

    def __init__(self, ranks: int, hosts: Hosts):
        self.ranks, self.hosts = ranks, hosts
        self.said: dict[int, str] = {}  # names of their hosts
        self.processes: dict[int, int] = {}
        self.ends: dict[int, Failure] = {}  # "ended" are those that came to the end of the script
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
        """Has a rank said that it did, and not because of another one?"""
        return any(end.how not in ("ended", "stopped") for end in self.ends.values())

    def seen(self) -> JobReport | None:
        """What is to be told; None if no rank has said that it failed."""
        if not self.failed():
            return None
        ended = {rank: 0 for rank, end in self.ends.items() if end.how == "ended"}
        failures = {rank: end for rank, end in self.ends.items() if rank not in ended}
        places = {rank: (self.processes[rank], host) for rank, host in self.said.items()}
        return JobReport(self.trails, places, failures, ended, self.halted)

    def open(self) -> list[int]:
        """The ranks that began and did not come to the end of their script, as far as is known: mpirun may end well without a host."""
        return [rank for rank in range(self.ranks) if self.said and (rank not in self.ends or self.ends[rank].how != "ended")]

    def lost(self, gone: Collection[str] = ()) -> set[int]:
        """The ranks that failed by themselves, as well as is known: those on hosts that are `gone`, and that say so or were killed; or for
        which others waited; or that said nothing; or that ended in some other way. All, if nothing says more of one than of another."""
        ends, everyone = self.ends.values(), set(range(self.ranks))
        failed = {end.rank for end in ends if end.how in ("failed", "lost")}
        failed |= {rank for rank in everyone if gone and self.placed[rank] in gone}
        missed = {end.at for end in ends if end.how == "waited" and end.at is not None}
        left = {end.rank for end in ends if end.how == "left"}
        return failed or missed or (everyone - set(self.ends)) or left or everyone

    @cached_property
    def placed(self) -> dict[int, str]:
        """The host of each rank, by the name that was given for it: by its own one, else in the order of the ranks."""
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
        """The hosts with room for the ranks that are not lost; of hosts on which no rank was all."""
        lost, taken = self.lost(gone), Counter(self.placed.values())
        left = Counter(name for rank, name in self.placed.items() if rank not in lost)
        return [(name, left[name] or slots) for name, slots in self.hosts if name not in gone and (left[name] or not taken[name])]


def _first(name: str) -> str:
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def unreachable(hosts: Hosts) -> set[str]:
    """The names of those hosts on which mpirun cannot start anything, within some seconds."""
    nothing, started = os.open(os.devnull, os.O_WRONLY), dict[str, Process]()
    for name, _ in hosts:
        words, environ = mpirun.command(1, _SOMETHING, [(name, 1)])
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
    """What a guard's command has ended with, if it says so in time."""
    try:
        return guard.receive()[0]["ended"]
    except (OSError, EOFError):
        return None
