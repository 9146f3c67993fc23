"""The process spawner (fork server): it starts the processes of ranks as forks of a helper process that has fluidx loaded and no threads.

A fork of the user's process would have its locks but not its threads. A new interpreter for each rank would load all modules again. The
helper forks in milliseconds. The system kills the helper and its children when the user's process ends, however it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .. import config

GONE = EOFError, BrokenPipeError, ConnectionResetError  # errors of a channel whose other side has ended
_LENGTH = struct.Struct("<Q")
_SOON = 3.0  # seconds for the system to end a process that is killed
_PATIENCE = 30.0  # seconds for the helper to start or to answer; FLUIDX_TIMEOUT if that is longer
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_START = (
    # Ctrl-C reaches all processes of a terminal; the user's process handles it. Until it is ignored here, it is blocked
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])\n"
    "import json, sys; sys.path[:] = json.loads(sys.argv[3])\n"
    "from fluidx.comm.process_spawner import tend; tend(int(sys.argv[1]), int(sys.argv[2]))"
)
_ALONE = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")  # a fork does not copy threads


class Channel:
    """A socket for JSON messages and open files."""

    def __init__(self, sock: socket.socket):
        self.sock = sock

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        if fds:
            socket.send_fds(self.sock, [_LENGTH.pack(len(data))], list(fds))
        else:
            data = _LENGTH.pack(len(data)) + data
        self.sock.sendall(data)

    def receive(self, files: int = 0, most: int | None = None) -> tuple[Any, list[int]]:
        """The next message and its files. EOFError if the other side is closed, ValueError if it is no JSON or has more than `most`
        bytes."""
        head, fds, _, _ = socket.recv_fds(self.sock, _LENGTH.size, files)
        head += self.exactly(_LENGTH.size - len(head)) if head else b""
        if not head:
            raise EOFError
        (size,) = _LENGTH.unpack(head)
        if most is not None and size > most:
            raise ValueError(f"a message of {size} bytes, and at most {most} were expected")
        return json.loads(self.exactly(size)), fds

    def exactly(self, count: int) -> bytes:
        """The next `count` bytes. EOFError if the other side is closed."""
        found = bytearray()
        while len(found) < count:
            some = self.sock.recv(min(count - len(found), 1 << 20))
            if not some:
                raise EOFError
            found += some
        return bytes(found)

    def close(self) -> None:
        self.sock.close()


class Process:
    """A started process, seen from the user's process. It calls `role` ("module:function") with its channel, files and further data."""

    def __init__(self, spawner: _Spawner, pid: int, channel: Channel):
        self.spawner, self.pid, self.channel = spawner, pid, channel
        self.status: int | None = None

    def stopped(self) -> bool:
        """Is the process stopped, by SIGSTOP or a debugger?"""
        return is_stopped(self.pid)

    def end(self) -> int:
        """Kill the process if it has not ended yet; return its exit status, as `os.waitstatus_to_exitcode` gives it."""
        if self.status is None:
            self.status = self.spawner.ask({"end": self.pid})["status"]
            self.channel.close()
        return self.status


def is_stopped(pid: int) -> bool:
    """Is a process of this host stopped?"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def start(role: str, given: Any, fds: Sequence[int] = ()) -> Process:
    """Start a process that calls `role` with `given` and its own copies of the files. Raises OSError if it cannot be started."""
    config.warn_of_unknown()  # once here, and not in the new processes
    spawner = _current_spawner()
    ours, theirs = socket.socketpair()
    try:
        said = {"role": role, "given": given, "environ": dict(os.environ), "path": sys.path, "cwd": os.getcwd()}
        pid = spawner.ask({"start": said}, [theirs.fileno(), _file(sys.stdout, 1), _file(sys.stderr, 2), *fds])["pid"]
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Process(spawner, pid, Channel(ours))


def open_closed() -> None:
    """Open missing standard files as /dev/null. Otherwise the next opened file would get number 0, 1 or 2, and receive printed text."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _file(stream: Any, number: int) -> int:
    """The file number to which a stream prints."""
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # the stream of a notebook, or no stream
        return number


# -- the helper, seen from the user's process -------------------------------------------------------------------------------


class _Spawner:
    def __init__(self) -> None:
        open_closed()
        ours, theirs = socket.socketpair()
        self.pid, self.lock = os.getpid(), threading.Lock()
        self.channel = Channel(ours)
        ours.settimeout(max(_PATIENCE, config.timeout()))
        args = [sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        with theirs:
            self.process = _on_lasting_thread(
                lambda: subprocess.Popen(args, stdin=subprocess.DEVNULL, env=os.environ | _ALONE, pass_fds=[theirs.fileno()])
            )

    def ask(self, message: Any, fds: Sequence[int] = ()) -> Any:
        if self.pid != os.getpid():  # this is a fork: the channel belongs to its parent
            return {"status": 0}
        with self.lock:
            try:
                self.channel.send(message, fds)
                answer, _ = self.channel.receive()
            except (EOFError, OSError) as e:
                self.close()
                if "start" in message:
                    why = f"the process that starts ranks does not answer ({e or 'it has ended'})"
                    raise OSError(f"{why}; FLUIDX_TIMEOUT gives it more time" if isinstance(e, TimeoutError) else why) from e
                return {"status": -signal.SIGKILL}  # its children have ended with it
            except BaseException:  # Ctrl-C: the next answer would belong to this message
                self.close()
                raise
        return answer

    def ended(self) -> bool:
        """Has the helper ended? `Popen.poll` would keep its lock for ever if Ctrl-C came within it."""
        if self.channel.sock.fileno() < 0:
            return True
        looking = select.poll()
        looking.register(self.channel.sock, 0)
        return bool(looking.poll(0))  # the other side is closed

    def close(self) -> None:
        self.channel.close()
        self.process.kill()  # its children are killed by the system
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_SOON)


_current: _Spawner | None = None
_guard = threading.Lock()


def _current_spawner() -> _Spawner:
    global _current
    with _guard:
        if _current is None or _current.pid != os.getpid() or _current.ended():
            if _current is None or _current.pid != os.getpid():
                atexit.register(_close)
            _current = _Spawner()
        return _current


def _close() -> None:
    if _current is not None and _current.pid == os.getpid():
        _current.close()


_Made = tuple[Callable[[], Any], "queue.SimpleQueue[Any]"]
_makers: dict[int, queue.SimpleQueue[_Made]] = {}


def _on_lasting_thread(make: Callable[[], Any]) -> Any:
    """Call `make` on a thread that lives as long as the process: Linux sends the death signal to a child when the thread that made it
    ends."""
    orders = _makers.get(os.getpid())
    if orders is None:
        orders = _makers[os.getpid()] = queue.SimpleQueue()
        threading.Thread(target=_carry_out, args=(orders,), name="fluidx-nursery", daemon=True).start()
    answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
    orders.put((make, answer))
    found = answer.get()
    if isinstance(found, BaseException):
        raise found
    return found


def _carry_out(orders: queue.SimpleQueue[_Made]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a child inherits it: a new interpreter would report a Ctrl-C otherwise
    while True:
        make, answer = orders.get()
        try:
            answer.put(make())
        except BaseException as e:
            answer.put(e)


# -- the helper -------------------------------------------------------------------------------------------------------------


def tend(fd: int, parent: int) -> None:
    """The main loop of the helper: start processes and report their exit status, until its parent ends."""
    die_with(parent)
    channel = Channel(socket.socket(fileno=fd))
    for name in ("fluidx", "fluidx._native", "ml_dtypes", "numpy.random"):
        importlib.import_module(name)
    gc.freeze()
    while True:
        try:
            message, fds = channel.receive(files=8)
        except GONE:
            return
        if (said := message.get("start")) is None:
            os.kill(message["end"], signal.SIGKILL)  # the process was not waited for yet, so its number is not reused
            channel.send({"status": os.waitstatus_to_exitcode(os.waitpid(message["end"], 0)[1])})
            continue
        importlib.import_module(said["role"].partition(":")[0])  # loaded once, for all processes that it starts
        me = os.getpid()
        if pid := os.fork():
            for f in fds:
                os.close(f)
            channel.send({"pid": pid})
            continue
        status = 1
        try:
            die_with(me)
            channel.close()
            status = _begin(said, fds)
        finally:
            os._exit(status)


def _begin(said: Any, fds: Sequence[int]) -> int:
    """The main function of a new process."""
    try:
        for number, fd in zip((1, 2), fds[1:3], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        config.warn_of_unknown({})  # the user's process has warned already
        os.environ.clear()
        os.environ.update(said["environ"])
        sys.path[:] = said["path"]
        os.chdir(said["cwd"])
        module, _, name = said["role"].partition(":")
        getattr(importlib.import_module(module), name)(Channel(socket.socket(fileno=fds[0])), list(fds[3:]), said["given"])
        return 0
    except GONE:  # the user's process has closed the channel
        return 0
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def adopt() -> None:
    """Make orphaned processes of this process's children its own children (Linux subreaper)."""
    _prctl(_SUBREAPER, 1)


def outlive() -> None:
    """Let this process live on when its parent ends."""
    _prctl(_DEATH_SIGNAL, 0)


def _prctl(option: int, value: int) -> None:
    """Call `prctl` for this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def die_with(parent: int) -> None:
    """Make the system kill this process when its parent ends, even while it is stopped."""
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)
