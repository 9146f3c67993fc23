"""What becomes of ranks on several hosts: they say it in lines among what they write, which mpirun brings. What is left follows."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NoReturn

from ..comm import mpirun
from ..comm.mpirun import Hosts
from ..comm.nursery import Channel, Process, die_with, start
from .launcher import Lines
from .report import Failure
from .script import how_of

_PATIENCE = 10.0  # seconds for a host to answer in
_GRACE = 6.0  # seconds for mpirun to end in, and for what stands between to notice
_SOMETHING = ("sleep", "1")  # to start on a host; Open MPI 5.0 waits for ever, now and then, for what ends at once


def run(job: str, rank: int, script: Callable[[], None]) -> None:
    """Run a script in a child of this process, and say how it ended: one that is killed, or ended by MPI, cannot."""

    def say(**what: Any) -> None:
        os.write(2, f"{_mark(job)}{json.dumps({'rank': rank, **what})}\n".encode())  # at once: it stays in one piece

    me = os.getpid()
    if child := os.fork():
        _see_through(child, say)
    die_with(me)
    try:
        script()
    except SystemExit as e:
        say(how="failed" if e.code else "ended")
        raise
    except BaseException as e:
        say(how=how_of(e), at=getattr(e, "rank", None))
        raise
    say(how="ended")


def _see_through(child: int, say: Callable[..., None]) -> NoReturn:
    """Wait for a child, and end as it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    say(host=socket.gethostname())
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    say(how="ended" if status == 0 else "left" if status > 0 else "stopped" if status == -signal.SIGTERM else "lost")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def _mark(job: str) -> str:
    return f"fluidx {job} "


class Words(Lines):
    """What mpirun brings, of which `hear` is given what ranks say of themselves."""

    def __init__(self, shown: Any, job: str, hear: Callable[[Any], None]):
        super().__init__(-1, None, shown, prefix="")
        self.mark, self.hear = _mark(job), hear

    def _line(self, text: str) -> None:
        text, found, said = text.partition(self.mark)
        if found:
            self.hear(json.loads(said))
        if text or not found:
            super()._line(text)


class Far:
    """What the ranks of a job on these hosts have said of themselves."""

    def __init__(self, ranks: int, hosts: Hosts):
        self.ranks, self.hosts = ranks, hosts
        self.said: dict[int, str] = {}  # names of their hosts
        self.ends: dict[int, Failure] = {}

    def take(self, said: Mapping[str, Any]) -> None:
        if "host" in said:
            self.said[said["rank"]] = said["host"]
        else:
            self.ends.setdefault(said["rank"], Failure(said["rank"], said["how"], "", at=said.get("at")))

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
        started[name] = start("fluidx.launch.guard:serve", given, [nothing, nothing])
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
