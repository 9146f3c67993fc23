"""The environment variables of fluidx: a table with a line of documentation for each, and a function that reads each.

A variable is read when its function is called, never at import, and an empty value counts as unset. A call takes the time of reading the
environment, so code that runs for each operator reads it once, when its plan is made.
"""

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TextIO, TypeVar

_T = TypeVar("_T")
_PREFIX = "FLUIDX_"
_OF_TESTS = "FLUIDX_TEST_"  # passed to ranks on other hosts, like every variable with the prefix
_NEAR = 0.65  # the share of common letters from which a name counts as a misspelling of another
_looked = False  # has this process warned of unknown variables?


class ConfigError(ValueError):
    """An environment variable holds a value that fluidx cannot use."""


class Setting(NamedTuple):
    """One row of the table of environment variables."""

    name: str
    accepts: str
    default: str
    doc: str


_DEBUG = Setting(
    "FLUIDX_DEBUG", "an integer from 0 to 4", "0", "What is printed: 1 passes, 2 also diffs, 3 also programs, 4 also every operator run."
)
_DUMP = Setting("FLUIDX_DUMP", "a directory, made when needed", "", "Programs before and after a transpile are written there.")
_TIMEOUT = Setting("FLUIDX_TIMEOUT", "a number of seconds above 0", "60", "How long a rank waits for another before the run fails.")
_STALL = Setting(
    "FLUIDX_STALL_SECONDS", "a number of seconds above 0", "20", "How long a rank waits for another before a warning names that rank."
)
_OVERLAP = Setting(
    "FLUIDX_OVERLAP", "auto, 0 or 1", "auto", "1: a second thread for communication in each CPU rank; auto: if there are free cores for it."
)
_CHECK_NAN = Setting("FLUIDX_CHECK_NAN", "0 or 1", "0", "1 stops a run at the first operator whose result has a NaN or an infinity.")
_VERIFY = Setting(
    "FLUIDX_VERIFY", "0 or 1", "0", "1 verifies each pass of a transpile, and that no plan overwrites a value still to be read."
)
_PROGRESS = Setting("FLUIDX_PROGRESS", "auto, 0 or 1", "auto", "Progress bars in the commands; auto shows them on a terminal only.")
_KERNELS = Setting(
    "FLUIDX_KERNELS", "auto, numpy or native", "auto", "CPU kernels: C if built (auto), NumPy only, or an error without C kernels."
)
_THREADS = Setting("FLUIDX_THREADS", "an integer from 0 to 256", "0", "Threads of the C kernels; 0 means one for each core of the process.")
_LEVELS = ("base", "v3", "v4", "v4_vnni", "v4_bf16", "amx")
_NATIVE_LEVEL = Setting(
    "FLUIDX_NATIVE_LEVEL", "base, v3, v4, v4_vnni, v4_bf16 or amx", "", "Instructions of the C kernels; unset: the processor's."
)
_NATIVE = Setting("FLUIDX_NATIVE", "0 or 1", "", "Read by setup.py: 0 builds without the C kernels, 1 fails where they do not build.")
_REWRITE = Setting("FLUIDX_REWRITE", "0 or 1", "1", "0 turns off the rewrites of an executor, which change no bit of the results.")
_WINOGRAD = Setting(
    "FLUIDX_WINOGRAD", "0, 2 or 4", "2", "Tile size of Winograd convolutions: 4 is faster and less accurate, 0 turns them off."
)
_AFFINITY = Setting(
    "FLUIDX_AFFINITY", "auto, or cores for each rank such as 0-3;4-7", "", "The cores that each CPU rank may use; auto gives equal shares."
)
_RANK = Setting("FLUIDX_RANK", "a whole number, 0 or more", "", "The rank of this process; `fluidx run` sets it.")
_WORLD_SIZE = Setting("FLUIDX_WORLD_SIZE", "an integer above 0", "", "The number of launched ranks; `fluidx run` sets it.")
_LOCAL_WORLD_SIZE = Setting("FLUIDX_LOCAL_WORLD_SIZE", "an integer above 0", "", "How many of the launched ranks are on this host.")
_ADDRESS = Setting("FLUIDX_ADDRESS", "host:port", "", "Where rank 0 listens; ranks on several hosts then connect by TCP and need no MPI.")
_INTERFACE = Setting(
    "FLUIDX_INTERFACE", "a name such as eth0, or an address", "", "The network interface by which ranks on several hosts connect by TCP."
)
_SSH = Setting(
    "FLUIDX_SSH", "a command", "ssh -o BatchMode=yes", "With which `fluidx run --hosts` runs a command on a host, whose name follows it."
)
_SEED = Setting("FLUIDX_SEED", "a whole number, 0 or more", "", "The seed of programs without a random_seed; unset draws one for each job.")
_JOB_SEED = Setting("FLUIDX_JOB_SEED", "a whole number, 0 or more", "", "The seed that was drawn for a job; `fluidx run` sets it.")
_JOB = Setting("FLUIDX_JOB", "a name", "", "By which ranks started by hand find each other: one name for each job.")
_JOB_KEY = Setting(
    "FLUIDX_JOB_KEY", "a text", "", "A secret that each rank of a job must know to connect, by TCP always; `fluidx run` makes one."
)
_RESTART = Setting("FLUIDX_RESTART", "a whole number, 0 or more", "0", "How many times the job was restarted; `fluidx run` sets it.")
_DEVICE = Setting(
    "FLUIDX_DEVICE", "cpu or cuda", "cpu", "Device of ranks whose script names no places; cuda: a GPU for each. `--backend nccl` sets it."
)
_CPU_NUM = Setting("CPU_NUM", "an integer above 0", "1", "How many places cpu_places() returns without a count.")


def describe() -> tuple[Setting, ...]:
    """Return the table of environment variables, for the documentation and the command line.

    >>> [row.name for row in describe()]  # doctest: +ELLIPSIS
    ['FLUIDX_DEBUG', 'FLUIDX_DUMP', ..., 'FLUIDX_RESTART', 'CPU_NUM']
    """
    hosts = (_LOCAL_WORLD_SIZE, _ADDRESS, _INTERFACE, _SSH)
    launching = (_RANK, _WORLD_SIZE, *hosts, _JOB, _JOB_SEED, _JOB_KEY, _DEVICE, _RESTART)
    natively = (_KERNELS, _THREADS, _NATIVE_LEVEL, _WINOGRAD, _NATIVE)
    runs = (_TIMEOUT, _STALL, _OVERLAP, _CHECK_NAN, _PROGRESS, _REWRITE, _SEED)
    return (_DEBUG, _DUMP, _VERIFY, *runs, *natively, _AFFINITY, *launching, _CPU_NUM)


def unknown(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The set variables with fluidx's prefix that fluidx does not know, each with the text of a warning.

    >>> unknown({"FLUIDX_TIMEOUTS": "5", "FLUIDX_TIMEOUT": "5", "FLUIDX_": ""})
    {'FLUIDX_TIMEOUTS': 'fluidx has no such variable; did you mean FLUIDX_TIMEOUT?'}
    """
    known = {row.name.removeprefix(_PREFIX): row.name for row in describe()}
    ours = [n for n in sorted(environ) if n.startswith(_PREFIX) and not n.startswith(_OF_TESTS)]
    found = [n for n in ours if n.removeprefix(_PREFIX) not in known and environ[n]]
    if not found:
        return {}
    from difflib import get_close_matches

    near = {n: get_close_matches(n.removeprefix(_PREFIX), known, 1, _NEAR) for n in found}  # the prefix makes all of them alike
    return {
        n: "fluidx has no such variable; " + (f"did you mean {known[one[0]]}?" if one else "fluidx env lists all")
        for n, one in near.items()
    }


def warn_of_unknown(environ: Mapping[str, str] = os.environ) -> None:
    """Warn of each unknown variable, once in a process."""
    global _looked
    if not _looked:
        _looked = True
        for name, why in unknown(environ).items():
            warnings.warn_explicit(f"environment variable {name}: {why}", UserWarning, "environment", 1)


def debug_level(environ: Mapping[str, str] = os.environ) -> int:
    """Return FLUIDX_DEBUG, the amount of debug output.

    >>> debug_level({"FLUIDX_DEBUG": "2"})
    2
    >>> debug_level({"FLUIDX_DEBUG": "all"})
    Traceback (most recent call last):
    fluidx.config.ConfigError: environment variable FLUIDX_DEBUG: expected an integer from 0 to 4, found 'all'
    """
    return _read(_DEBUG, environ, lambda text: _within(int(text), 0, 4))


def dump_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return FLUIDX_DUMP, the directory for dumps of programs, or None for no dumps.

    >>> dump_dir({})
    >>> dump_dir({"FLUIDX_DUMP": "dumps"}).name
    'dumps'
    """
    return _read(_DUMP, environ, _directory)


def verify_all(environ: Mapping[str, str] = os.environ) -> bool:
    """Return FLUIDX_VERIFY, whether the result of each pass, and the storage of every plan, is proved.

    >>> verify_all({"FLUIDX_VERIFY": "1"})
    True
    """
    return _read(_VERIFY, environ, _switch)


def rewrites(environ: Mapping[str, str] = os.environ) -> bool:
    """Return FLUIDX_REWRITE, whether an executor leaves out needless operators of a program.

    >>> rewrites({"FLUIDX_REWRITE": "0"})
    False
    """
    return _read(_REWRITE, environ, _switch)


def timeout(environ: Mapping[str, str] = os.environ) -> float:
    """Return FLUIDX_TIMEOUT, the seconds a rank waits in a collective.

    >>> timeout({})
    60.0
    >>> timeout({"FLUIDX_TIMEOUT": "-1"})
    Traceback (most recent call last):
    fluidx.config.ConfigError: environment variable FLUIDX_TIMEOUT: expected a number of seconds above 0, found '-1'
    """
    return _read(_TIMEOUT, environ, _seconds)


def stall(environ: Mapping[str, str] = os.environ) -> float:
    """Return FLUIDX_STALL_SECONDS, the seconds that a rank waits in a collective before a warning.

    >>> stall({"FLUIDX_STALL_SECONDS": "5"})
    5.0
    """
    return _read(_STALL, environ, _seconds)


def overlap(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return FLUIDX_OVERLAP, whether the communication of CPU ranks overlaps with compute; None: it depends on the program and the number
    of cores.

    >>> overlap({}), overlap({"FLUIDX_OVERLAP": "1"})
    (None, True)
    """
    return _read(_OVERLAP, environ, _choice)


def check_nan(environ: Mapping[str, str] = os.environ) -> bool:
    """Return FLUIDX_CHECK_NAN, whether every result is searched for NaN and infinity.

    >>> check_nan({"FLUIDX_CHECK_NAN": "1"})
    True
    """
    return _read(_CHECK_NAN, environ, _switch)


def show_progress(stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether to draw progress bars on `stream` (standard error by default), as FLUIDX_PROGRESS says.

    >>> show_progress(environ={"FLUIDX_PROGRESS": "0"})
    False
    """
    choice = _read(_PROGRESS, environ, _choice)
    if choice is None:
        return (stream or sys.stderr).isatty()
    return choice


def kernels(environ: Mapping[str, str] = os.environ) -> str:
    """Return FLUIDX_KERNELS, the kind of kernels that compute on CPUs.

    >>> kernels({"FLUIDX_KERNELS": "numpy"})
    'numpy'
    """
    return _read(_KERNELS, environ, lambda text: {"auto": "auto", "numpy": "numpy", "native": "native"}[text])


def threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return FLUIDX_THREADS, the number of threads of the native kernels, or 0 for one per core.

    >>> threads({})
    0
    """
    return _read(_THREADS, environ, lambda text: _within(int(text), 0, 256))


def native_level(environ: Mapping[str, str] = os.environ) -> str:
    """Return FLUIDX_NATIVE_LEVEL, the instruction set that the native kernels may use, or "" for the best.

    >>> native_level({"FLUIDX_NATIVE_LEVEL": "v3"})
    'v3'
    """
    return _read(_NATIVE_LEVEL, environ, lambda text: {name: name for name in ("", *_LEVELS)}[text])


def winograd(environ: Mapping[str, str] = os.environ) -> int:
    """Return FLUIDX_WINOGRAD, the outputs along a side of the tiles of Winograd's convolutions, or 0 for convolutions without them.

    >>> winograd({}), winograd({"FLUIDX_WINOGRAD": "4"})
    (2, 4)
    """
    return _read(_WINOGRAD, environ, lambda text: {"0": 0, "2": 2, "4": 4}[text])


def affinity(environ: Mapping[str, str] = os.environ) -> list[frozenset[int]] | str:
    """Return FLUIDX_AFFINITY, the cores for each CPU rank: "auto", or a list by rank, which is empty if it is not set.

    >>> affinity({})
    []
    >>> [sorted(cores) for cores in affinity({"FLUIDX_AFFINITY": "0-2,8; 3"})]
    [[0, 1, 2, 8], [3]]
    """
    return _read(_AFFINITY, environ, lambda text: text if text in ("", "auto") else [_cores(part) for part in text.split(";")]) or []


def world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return FLUIDX_WORLD_SIZE, the number of ranks that the script was launched for, or None.

    >>> world_size({})
    >>> world_size({"FLUIDX_WORLD_SIZE": "4"})
    4
    """
    return _read(_WORLD_SIZE, environ, lambda text: _within(int(text), 1, math.inf) if text else None)


def seed(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return FLUIDX_SEED, the seed of programs without one, or None.

    >>> seed({}), seed({"FLUIDX_SEED": "7"})
    (None, 7)
    """
    return _read(_SEED, environ, _maybe_number)


def job_seed(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return FLUIDX_JOB_SEED, the seed that a launcher drew for all its ranks, or None.

    >>> job_seed({"FLUIDX_JOB_SEED": "1234"})
    1234
    """
    return _read(_JOB_SEED, environ, _maybe_number)


def job_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return FLUIDX_JOB_KEY, the secret that all ranks of a job share.

    >>> job_key({})
    ''
    """
    return _read(_JOB_KEY, environ, str)


def local_world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return FLUIDX_LOCAL_WORLD_SIZE, the number of launched ranks on this host, or None.

    >>> local_world_size({})
    >>> local_world_size({"FLUIDX_LOCAL_WORLD_SIZE": "2"})
    2
    """
    return _read(_LOCAL_WORLD_SIZE, environ, lambda text: _within(int(text), 1, math.inf) if text else None)


def address(environ: Mapping[str, str] = os.environ) -> str:
    """Return FLUIDX_ADDRESS, where rank 0 listens for ranks on other hosts, or "".

    >>> address({"FLUIDX_ADDRESS": "node0:29500"})
    'node0:29500'
    """
    return _read(_ADDRESS, environ, _host_and_port)


def interface(environ: Mapping[str, str] = os.environ) -> str:
    """Return FLUIDX_INTERFACE, the name or the address of the network interface for connections between hosts, or "".

    >>> interface({"FLUIDX_INTERFACE": "eth0"})
    'eth0'
    """
    return _read(_INTERFACE, environ, str)


def ssh(environ: Mapping[str, str] = os.environ) -> str:
    """Return FLUIDX_SSH, the command that runs a command on another host.

    >>> ssh({})
    'ssh -o BatchMode=yes'
    """
    return _read(_SSH, environ, str)


def restart(environ: Mapping[str, str] = os.environ) -> int:
    """Return FLUIDX_RESTART, the number of restarts of the job.

    >>> restart({})
    0
    """
    return _read(_RESTART, environ, lambda text: _within(int(text), 0, math.inf))


def device(environ: Mapping[str, str] = os.environ) -> str:
    """Return FLUIDX_DEVICE, the device of ranks if a script names no places.

    >>> device({}), device({"FLUIDX_DEVICE": "cuda"})
    ('cpu', 'cuda')
    """
    return _read(_DEVICE, environ, lambda text: {"cpu": "cpu", "cuda": "cuda"}[text])


def cpu_num(environ: Mapping[str, str] = os.environ) -> int:
    """Return CPU_NUM, the number of CPU places; fluid's name, and fluid's default of one.

    >>> cpu_num({"CPU_NUM": "4"})
    4
    """
    return _read(_CPU_NUM, environ, lambda text: _within(int(text), 1, math.inf))


def _read(setting: Setting, environ: Mapping[str, str], parse: Callable[[str], _T]) -> _T:
    if not _looked and environ is os.environ:
        warn_of_unknown()
    # `in` first: os.environ raises an error internally for a missing name, which is slow, and every run reads settings
    text = (environ[setting.name].strip() if setting.name in environ else "") or setting.default
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ConfigError(f"environment variable {setting.name}: expected {setting.accepts}, found {text!r}") from None


def _host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdigit() and 0 < int(port) < 1 << 16 and (":" in host) == host.startswith("[")):
        raise ValueError
    return text


def _maybe_number(text: str) -> int | None:
    return _within(int(text), 0, math.inf) if text else None


def _switch(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _choice(text: str) -> bool | None:
    return {"auto": None, "0": False, "1": True}[text]


def _within(value: int, low: int, high: float) -> int:
    if not low <= value <= high:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:  # an endless wait is not allowed: a dead rank must end the others
        raise ValueError
    return value


def _cores(text: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        some = range(int(first), int(last or first) + 1)
        if not some or some[0] < 0:
            raise ValueError
        found.update(some)
    return frozenset(found)


def _directory(text: str) -> Path | None:
    if not text:
        return None
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ValueError
    return path
