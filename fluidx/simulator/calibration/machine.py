"""This machine: what a calibration belongs to, and how busy it is by others."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ... import native
from ..._version import __version__
from ...ir.errors import FluidxError
from ..step_table import TimedStep

_BUSY = 0.15  # of a core that others may use, for each core
_STEAL = 0.02  # of the time that the hypervisor may take
_STAT = Path("/proc/stat")


class CalibratedMachine(NamedTuple):
    """The machine of a calibration. Times hold for its processor, cores, kernel threads and kernel level; the rest is for the reader."""

    cpu: str
    cores: int
    threads: int  # kernel threads of one device
    level: str  # of the C kernels; "numpy" without them
    fluidx: str = ""
    python: str = ""
    numpy: str = ""
    date: str = ""
    load: float = 0.0

    @staticmethod
    def here() -> CalibratedMachine:
        """This machine, now."""
        on = native.enabled()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return CalibratedMachine(
            _cpu(), native.cores(), native.num_threads() if on else 1, native.level() if on else "numpy", __version__,
            platform.python_version(), np.__version__, time.strftime("%Y-%m-%d %H:%M"), round(load, 2),
        )  # fmt: skip

    def check(self, here: CalibratedMachine, name: str) -> None:
        """Raise FluidxError if the calibration `name` of this machine is used on another."""
        for what, mine, its in (
            ("processor", self.cpu, here.cpu), ("number of cores", self.cores, here.cores),
            ("number of kernel threads", self.threads, here.threads), ("kernel level", self.level, here.level),
        ):  # fmt: skip
            if mine != its:
                raise FluidxError(
                    f"{name} is a calibration of another machine: its {what} is {mine}, here it is {its}; "
                    "run `fluidx calibrate` here, with the same FLUIDX_THREADS as the program"
                )


@cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


class Others(NamedTuple):
    """What others do on this machine: the cores that they use, and the share of time that the hypervisor takes."""

    cores: float
    steal: float


def others(seconds: float = 0.5, sleep: Callable[[float], None] = time.sleep, stat: Path = _STAT) -> Others:
    """What others do, while this process sleeps for `seconds`; nothing where the system does not say."""
    before = _ticks(stat)
    sleep(seconds)
    after = _ticks(stat)
    passed = [b - a for a, b in zip(before, after)]
    total = sum(passed[:8])  # guest time is part of user time
    if not total:
        return Others(0.0, 0.0)
    idle, steal = passed[3] + passed[4], passed[7] if len(passed) > 7 else 0
    return Others((total - idle - steal) / total * native.cores(), steal / total)


def _ticks(stat: Path) -> list[int]:
    try:
        return list(map(int, stat.read_text(encoding="utf-8").splitlines()[0].split()[1:]))
    except (OSError, ValueError, IndexError):
        return []


def check_idle(found: Others, cores: int) -> None:
    """Raise FluidxError if the machine is too busy to be measured.

    >>> check_idle(Others(1.5, 0.0), 2)
    Traceback (most recent call last):
    fluidx.ir.errors.FluidxError: this machine is busy: others use 1.5 of 2 cores; times measured now are worth nothing. ...
    """
    why = f"others use {found.cores:.1f} of {cores} cores" if found.cores > _BUSY * cores else ""
    if found.steal > _STEAL:
        why = f"the hypervisor takes {found.steal:.0%} of the time"
    if why:
        raise FluidxError(
            f"this machine is busy: {why}; times measured now are worth nothing. Wait until it is idle, or give --anyway (anyway=True), "
            "and take the result for a sketch"
        )


def check_steady(steps: Sequence[TimedStep], most: float) -> None:
    """Raise FluidxError if steps with a spread above 10 % take more than this share of the time."""
    unsure, total = (sum(s.seconds for s in steps if s.spread > least) for least in (0.1, -1.0))
    if unsure > most * total:
        raise FluidxError(
            f"times vary on this machine: steps with a spread above 10 % take {unsure / total:.0%} of the time; end what else "
            "runs here, or give --anyway (anyway=True), and take the result for a sketch"
        )
