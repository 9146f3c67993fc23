"""One run of the fault suite: start a training, have it fail, and look at how it ended and what it left."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fluidx.comm.mpi import mpirun
from tests.comm.hosts import two_hosts

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("script.py")
LINE = next(k for k, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.endswith("# THE LINE"))
MARK = "FLUIDX_TEST_MARK"
DEADLINE, MORE = 3.0, 5.0  # seconds that ranks wait for one another, and what everything may take beyond
STARTS = 90.0  # seconds that a run has to come to its fault in, on a machine that is busy

BODIES = ("threads", "processes", "run", "mpi", "hosts", "tcp hosts")
ON_HOSTS = BODIES[4:]
STRATEGIES = ("data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero3")

# failures, the bodies in which a rank alone can fail so, and the status that a launcher ends with
FAILURES = {
    "raise": (BODIES, 1),
    "leave": (BODIES, 3),
    "exit": (BODIES[1:], 7),
    "kill": (BODIES[1:], 137),
    "stop": (BODIES[1:], 1),
    "other program": (BODIES, 1),
    "ctrl-c": (BODIES, 130),
    "parent killed": (BODIES[1:], -9),
}
CASES = [(failure, body) for failure, (bodies, _) in FAILURES.items() for body in bodies]


class Fault(NamedTuple):
    """What happens, and where."""

    how: str
    body: str
    ranks: int
    rank: int
    step: int
    place: int  # the layer behind which the operator stands
    strategy: str


class Outcome(NamedTuple):
    """What was wrong, an empty text if nothing was, and how many seconds all took to end."""

    wrong: str
    seconds: float
    printed: str


def drawn(how: str, body: str, seed: int) -> Fault:
    """A fault of a kind, at random."""
    rng = np.random.default_rng([seed, *map(ord, how + body)])
    ranks = int(rng.integers(2, 4 if body in ("mpi", *ON_HOSTS) else 5))
    return Fault(how, body, ranks, *(int(rng.integers(n)) for n in (ranks, 4, 4)), STRATEGIES[rng.integers(len(STRATEGIES))])


def words(fault: Fault, hosts: str | None) -> list[str]:
    """The command; `hosts` are in a file."""
    python, given = [sys.executable], [str(SCRIPT), json.dumps({**fault._asdict(), "deadline": DEADLINE})]
    if fault.body in ("threads", "processes"):
        return [*python, *given]
    backend = "processes" if fault.body in ("run", "tcp hosts") else "mpi"
    where = ["--hosts", hosts] if hosts else []
    return [*python, "-m", "fluidx.cli", "run", "-n", str(fault.ranks), "--backend", backend, *where, *given]


@cache
def why_not(body: str) -> str:
    """Why a body cannot be tried here, or an empty text."""
    if body in ("mpi", "hosts") and mpirun.why_not():
        return mpirun.why_not()
    if body not in ON_HOSTS:
        return ""
    try:
        with tempfile.TemporaryDirectory() as folder, _where(body, 1, Path(folder)):
            return ""
    except pytest.skip.Exception as e:
        return str(e)


def _where(body: str, ranks: int, folder: Path) -> AbstractContextManager[tuple[list[str], str | None, dict[str, str]]]:
    """The command that runs something where the body is, its hosts, and the environment."""
    return two_hosts(folder, (ranks + 1) // 2) if body in ON_HOSTS else nullcontext(([], None, dict(os.environ)))


def run(fault: Fault) -> Outcome:
    """Have it happen."""
    mark, names = secrets.token_hex(8), set(os.listdir("/dev/shm"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        prefix, hosts, environ = stack.enter_context(_where(fault.body, fault.ranks, folder))
        own, note, log = (folder / name for name in ("tmp", "note", "log"))
        own.mkdir()
        environ |= {
            MARK: mark, "TMPDIR": str(own), "FLUIDX_TEST_NOTE": str(note), "PYTHONPATH": str(ROOT),
            "FLUIDX_TIMEOUT": f"{STARTS if fault.body in ON_HOSTS else DEADLINE:g}",  # there it is for how long ranks may take to begin too
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*prefix, *words(fault, hosts)], cwd=ROOT, env=environ, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=hears_ctrl_c,
            )  # fmt: skip
        try:
            begin = _provoked(fault, process, note, log)
            limit = begin + DEADLINE + MORE
            status = _waited(process, limit + 2 * MORE)
            ended = time.monotonic()
            left = _gone(mark, names, own, limit)
            wrong = _wrong(fault, status, log.read_text(errors="replace"), ended - begin) or left
            return Outcome(wrong, time.monotonic() - begin, log.read_text(errors="replace"))
        except TimeoutError as e:
            return Outcome(str(e), STARTS, log.read_text(errors="replace"))
        finally:
            for pid in processes(mark):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def hears_ctrl_c() -> None:
    """Which whoever starts the suite in the background has it ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _provoked(fault: Fault, process: subprocess.Popen[bytes], note: Path, log: Path) -> float:
    """When it happened; a signal to all of it is sent when the first rank says that it is there."""
    limit = time.monotonic() + STARTS
    signals = {"ctrl-c": signal.SIGINT, "parent killed": signal.SIGKILL}
    while time.monotonic() < limit:
        if fault.how in signals and b"here" in log.read_bytes():
            begin = time.monotonic()
            (os.killpg if fault.how == "ctrl-c" else os.kill)(process.pid, signals[fault.how])  # as a terminal does
            return begin
        if note.exists() and (text := note.read_text()):
            return float(text)
        if process.poll() is not None:
            break
        time.sleep(0.01)
    raise TimeoutError(f"the fault did not happen; the status is {process.poll()}")


def _waited(process: subprocess.Popen[bytes], limit: float) -> int | None:
    try:
        return process.wait(max(0.0, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def processes(mark: str) -> list[int]:
    """Those that have the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _gone(mark: str, names: set[str], own: Path, limit: float) -> str:
    """What is left when the time is over, or an empty text as soon as nothing is."""
    while True:
        pids, files, shared = processes(mark), [p.name for p in own.iterdir()], sorted(set(os.listdir("/dev/shm")) - names)
        shared = [name for name in shared if not _held(name)]
        if not (pids or files or shared):
            return ""
        if time.monotonic() > limit:
            return f"left behind: processes {pids}, temporary files {files}, shared memory {shared}"
        time.sleep(0.02)


def _held(name: str) -> bool:
    """Is it another job's? One that goes on, or a process that loaded MPI and is no rank of any."""
    if name.startswith("sm_segment.") and name.endswith("0000.0"):
        return True
    if name.startswith("fluidx-") and (owner := Path("/proc", name.split("-")[1])).exists():
        return owner.joinpath("environ").exists()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in path.read_text():
                return True
        except OSError:
            continue
    return False


# -- what has to be said -----------------------------------------------------------------------------------------------------


def _wrong(fault: Fault, status: int | None, printed: str, seconds: float) -> str:
    if status is None:
        return "it did not end"
    if seconds > DEADLINE + MORE:
        return f"it took {seconds:.1f} s"
    if status != (want := _status(fault)):
        return f"status {status} instead of {want}"
    if "through" in printed:
        return "a rank came to its end"
    if printed.count("Traceback (most recent call last)") > (fault.body in ("threads", "processes")) and not one_traceback(printed):
        return "more than one traceback"
    return "; ".join(f"no {what} in the report" for what, pattern in _said(fault).items() if not _once(what, pattern, printed))


def one_traceback(printed: str) -> bool:
    """Is it one traceback, with those of its causes, and of what was being handled when Ctrl-C came?"""
    causes = printed.count("The above exception was the direct cause") + printed.count("During handling of the above exception")
    return printed.count("Traceback (most recent call last)") == causes + 1


def _status(fault: Fault) -> int:
    alone = fault.body in ("threads", "processes")
    if fault.how == "ctrl-c":
        return -signal.SIGINT if alone else 130
    return 1 if alone and fault.how != "parent killed" else FAILURES[fault.how][1]


def _once(what: str, pattern: str, printed: str) -> bool:
    """Is it said, and what names the rank just once?"""
    found = len(re.findall(pattern, printed, re.MULTILINE))
    return found == 1 if what == "one line that names the rank" else found > 0


def _said(fault: Fault) -> dict[str, str]:
    """What the report shows, as regular expressions."""
    rank, alone = fault.rank, fault.body in ("threads", "processes")
    start = r"RankError: " if alone else r"^fluidx run: "
    if fault.how == "parent killed":
        return {}
    if fault.how == "ctrl-c":
        return {"one line that names the rank": "^KeyboardInterrupt" if alone else "^fluidx run: interrupted by SIGINT"}
    recorder = {"recorder": r"the last collective that each rank completed:" + "".join(rf"\n    rank {r}: .*" for r in range(fault.ranks))}
    name = "host-[01]" if fault.body in ON_HOSTS else re.escape(socket.gethostname())
    host = {"host": rf"on host {name}, process \d+"}
    if fault.how == "other program":
        if alone:  # before any rank begins
            start = r"^fluidx\.ir\.errors\.ExecutionError: the ranks' programs are not from one transpile"
        disagree = rf"{start}(.*\n)*?.*\b(rank {rank}\b|ranks [\d, ]*\b{rank}\b)"
        return {"rank": disagree, **({} if alone else host | recorder)}
    first = {
        "raise": rf"{start}rank {rank}: op t_faulty failed: ZeroDivisionError: of all things$",
        "leave": rf"{start}rank {rank}: " + (r"SystemExit: 3$" if alone else "its script exited with status 3$"),
        "exit": rf"{start}rank {rank}: (the|its) process exited with status 7",
        "kill": rf"{start}rank {rank}: (the|its) process was killed by signal 9 \(SIGKILL\)$",
        "stop": rf"{start}rank {rank}.*(did not (come|arrive)|is stopped|stopped)",
    }[fault.how]
    said = {"one line that names the rank": first, "step": rf"^ +in step {fault.step}$", **host, **recorder}
    if alone or fault.how != "leave":  # a script that leaves is at no operator
        said["operator"] = r"^ +in %\S+ = t_faulty\("
        said["group"] = r'group="dp"|then it was in compare_calls among'  # the others may not have begun the step yet
        said["line"] = rf'^ +written at "{re.escape(str(SCRIPT))}", line {LINE}, '
    else:
        said["step"] = "^ +after " + (f"step {fault.step - 1}$" if fault.step else "the startup program$")
    return said if fault.body != "threads" else {k: v for k, v in said.items() if k != "group"}
