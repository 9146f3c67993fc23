"""Metrics of runs: the fetched scalars, as a line of JSON for each run, and on a terminal one line with the latest."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from ..config import show_progress
from ..executor.run import observers
from .tensorboard import Events

_OFTEN = 0.1  # seconds between two updates of the line on a terminal
_SMOOTH = 0.9  # weight of the earlier steps in the rate


class Told:
    """A listener that passes the fetched scalars of runs to a function: `{"step": 3, "time": ..., "rate": ..., "loss": 0.25}`.

    `time` is seconds since 1970, `rate` runs of this program in a second, the latest counting most. Runs that fetch nothing are not told.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.time):
        self.take, self.clock = take, clock
        self._latest: dict[str, tuple[float | None, float | None]] = {}  # by program: time of the latest run, seconds for a run

    def __call__(self, program: str, step: int, names: Sequence[str], values: Sequence[Any]) -> None:
        if not names:
            return
        now = self.clock()
        before, taken = self._latest.get(program, (None, None))
        if before is not None:
            last = max(now - before, 1e-9)
            taken = last if taken is None else _SMOOTH * taken + (1 - _SMOOTH) * last
        self._latest[program] = now, taken
        record = {name: number for name, value in zip(names, values, strict=True) if (number := _scalar(value)) is not _NONE}
        self.take({**record, "program": program, "step": step, "time": now, "rate": None if taken is None else 1 / taken})


_NONE = object()


def _scalar(value: Any) -> Any:
    """The value as a JSON number; None if it is not finite, because JSON has no such numbers."""
    array = np.asarray(value)
    if array.size != 1:
        return _NONE
    number = array.reshape(()).item()
    try:
        number = number if isinstance(number, int) else float(number)
    except (TypeError, ValueError):
        return _NONE
    return number if math.isfinite(number) else None


@contextmanager
def heard(hear: Callable[[Any], None] | None) -> Iterator[None]:
    """A context in which `hear`, if given, receives the fetches of runs."""
    told = [] if hear is None else [Told(hear)]
    observers.listeners += told
    try:
        yield
    finally:
        for one in told:
            observers.listeners.remove(one)


class Log:
    """A file of such lines, which pandas reads by `read_json(path, lines=True)`, a folder for TensorBoard, and the line on a terminal. Each
    may be left away.

    Where it is known how many `steps` there will be, that line says how long they will take.
    """

    def __init__(
        self, metrics: Path | None = None, tensorboard: Path | None = None, stream: TextIO | None = None, steps: int | None = None,
        restart: int = 0, line: bool = True,
    ):  # fmt: skip
        """A `restart` appends to existing lines. Without `line` the terminal shows nothing. Raises OSError if a file cannot be written,
        ExecutionError if TensorBoard's writer is not installed."""
        self.stream, self.steps = stream or sys.stderr, steps
        self.shown = line and show_progress(self.stream)
        self.events = None if tensorboard is None else Events(tensorboard)
        self.file = metrics.open("a" if restart else "w", encoding="utf-8") if metrics is not None else None
        self._next = 0.0

    @property
    def wanted(self) -> bool:
        """Is there a file or a terminal for the records?"""
        return self.shown or self.file is not None or self.events is not None

    def take(self, record: Mapping[str, Any]) -> None:
        if self.events is not None:
            self.events.take(record)
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        if self.shown and time.monotonic() >= self._next:
            self._next = time.monotonic() + _OFTEN
            self.stream.write(f"\033[K{_line(record, self.steps)}\r")  # the next output overwrites this line
            self.stream.flush()

    def again(self) -> None:
        """Note that the script is restarted, perhaps from an earlier step."""
        if self.events is not None:
            self.events.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._next:
            self.stream.write("\033[K")
        self.again()
        if self.file is not None:
            self.file.close()


def _line(record: Mapping[str, Any], steps: int | None = None) -> str:
    """
    >>> _line({"loss": 0.25, "program": "net", "step": 7, "time": 0.0, "rate": 12.5})
    'net: step 7, 12.5 a second, loss 0.25'
    >>> _line({"loss": 0.25, "program": "net", "step": 7, "time": 0.0, "rate": 12.5}, steps=50_008)
    'net: step 7 of 50008, 12.5 a second, 1:06:40 left, loss 0.25'
    """
    rate, of = "" if record["rate"] is None else f", {record['rate']:.3g} a second", "" if steps is None else f" of {steps}"
    if steps is not None and record["rate"] is not None:
        rate += f", {timedelta(seconds=round(max(0, steps - 1 - record['step']) / record['rate']))} left"
    rest = [f", {n} {v:.6g}" for n, v in record.items() if n not in ("program", "step", "time", "rate") and v is not None]
    return f"{record['program']}: step {record['step']}{of}{rate}{''.join(rest[:4])}"
