"""The programs that layers write into, and the guards that choose others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ProgramError
from .program import Program

_DEVICE = re.compile(r"cpu|gpu(:[0-9]+)?|stage:[0-9]+")
_main = Program("main")
_startup = Program("startup")


def default_main_program() -> Program:
    """The program that layers append operators to: that of `program_guard`, else one of the process."""
    return _main


def default_startup_program() -> Program:
    """The program that gives parameters their first values: that of `program_guard`, else one of the process."""
    return _startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Inside the block, layers write into `main_program` and their parameters' initial values into `startup_program`."""
    global _main, _startup
    for p in (main_program, startup_program):
        if p is not None and not isinstance(p, Program):
            raise ProgramError(f"program_guard takes Programs, got {type(p).__name__}")
    old = _main, _startup
    _main, _startup = main_program, startup_program or _startup
    try:
        yield
    finally:
        _main, _startup = old


@contextmanager
def device_guard(device: str | None = None) -> Iterator[None]:
    """Operators written inside carry the hint "cpu", "gpu", "gpu:1" or "stage:1"; their gradients and updates too.

    Where ranks have an axis `pp`, number 1 is the pipeline stage that runs them. None takes the hint away. Raises ProgramError for another
    device.
    """
    if device is not None and not (isinstance(device, str) and _DEVICE.fullmatch(device)):
        raise ProgramError(f"device_guard takes 'cpu', 'gpu', 'gpu:1', 'stage:1' or None, got {device!r}")
    with _main.device_guard(device or ""):
        yield
