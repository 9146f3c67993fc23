"""Broken files of every format: each is read or refused by an error of fluidx, in seconds and with little memory."""

from __future__ import annotations

import json
import random
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import fluidx as fx
from fluidx.config import ConfigError
from fluidx.ir.errors import FluidxError
from fluidx.ir.jsonform import from_json, to_json

from .outcome import Outcome

SECONDS, MEMORY = 10, 4 << 30


class TooSlow(Exception):
    pass


@contextmanager
def limits() -> Iterator[None]:
    """At most SECONDS, and MEMORY more than the process has."""

    def late(*_: Any) -> None:
        raise TooSlow

    before, had = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, had[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, had)


@cache
def model() -> tuple[fx.Program, fx.Program, Any]:
    main, startup = fx.Program("files"), fx.Program("files_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        h = fx.layers.cond(fx.layers.mean(x) > 0.0, lambda: fx.layers.tanh(x), lambda: fx.layers.scale(x, 2.0))
        loss = fx.layers.mean(fx.layers.fc(fx.layers.fc(h, 4, act="relu"), 2))
        fx.optimizer.Adam(0.1).minimize(loss)
    return main, startup, loss


def saved(folder: Path) -> fx.Executor:
    main, startup, _ = model()
    exe = fx.Executor()
    exe.run(startup)
    fx.io.save(main, str(folder / "w"))
    return exe


@cache
def originals() -> dict[str, dict[str, bytes]]:
    """What each format has on disk: names and bytes."""
    main, _, _ = model()
    made: dict[str, dict[str, bytes]] = {
        "text": {"p.txt": str(main).encode()},
        "json": {"p.json": json.dumps(to_json(main)).encode()},
    }
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        saved(folder)
        made["checkpoint"] = {p.name: p.read_bytes() for p in folder.iterdir()}
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError:
        return made
    with tempfile.TemporaryDirectory() as at:
        with fx.unique_name.guard(), fx.program_guard(fx.Program("net"), fx.Program("net_startup")):
            x = fx.data("x", [-1, 3], "float32")
            y = fx.layers.softmax(fx.layers.fc(fx.layers.layer_norm(x), 4))
            exe, net = fx.Executor(), fx.default_main_program()
            exe.run(fx.default_startup_program())
            fx.onnx.save(net, str(Path(at) / "m.onnx"), ["x"], [y], exe)
        made["onnx"] = {"m.onnx": (Path(at) / "m.onnx").read_bytes()}
    return made


def json_of(path: Path) -> Any:
    """JSON of a file, or nothing where the json module itself refuses it: that is not fluidx's to answer."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


READ: dict[str, Callable[[Path], Any]] = {
    "text": lambda at: fx.Program.parse_from_string((at / "p.txt").read_bytes().decode("utf-8", "surrogateescape")),
    "json": lambda at: (found := json_of(at / "p.json")) is None or from_json(found),
    "checkpoint": lambda at: fx.io.load(model()[0], str(at / "w"), fx.Executor()),
    "onnx": lambda at: fx.onnx.load(str(at / "m.onnx")).run({"x": np.ones((2, 3), "float32")}),
}


def broken(rng: random.Random, data: bytes) -> bytes:
    """The bytes with something cut off, flipped, written over, doubled, or grown."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, kind = rng.randrange(len(data) or 1), rng.randrange(6)
        if kind == 0:
            del data[at:]
        elif kind == 1 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 200)]
        elif kind == 4:
            data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"9" * 12, b"-1", b"\xff\xff\xff\xff\x7f"])
        elif kind == 5:
            del data[at : at + rng.randint(1, 40)]
    return bytes(data)


def attack(number: int, seed: int, outcome: Outcome) -> None:
    rng = random.Random(f"{seed}/files/{number}")
    kind = rng.choice([k for k in originals() if k in READ])
    files = dict(originals()[kind])
    name = rng.choice(sorted(files))
    files[name] = broken(rng, files[name])
    with tempfile.TemporaryDirectory() as at, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, data in files.items():
            (Path(at) / n).write_bytes(data)
        try:
            with limits():
                READ[kind](Path(at))
        except (FluidxError, ConfigError) as e:
            outcome.verdicts["refused" if str(e) else "refused without a word"] += 1
        except TooSlow:
            outcome.fail(number, f"{kind}: {name} takes more than {SECONDS} s")
        except MemoryError:
            outcome.fail(number, f"{kind}: {name} takes more than {MEMORY >> 30} GiB")
        except Exception as e:  # what users must not see
            outcome.fail(number, f"{kind}: {name} ends in {type(e).__name__}: {str(e)[:200]}")
        else:
            outcome.verdicts["read"] += 1
