"""Find the user's line that is writing an operator, so that errors can point at it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from .errors import ProgramError


@dataclass(frozen=True, slots=True)
class Site:
    """The user's line that wrote an operator."""

    filename: str
    lineno: int
    function: str

    def __str__(self) -> str:
        return f'"{self.filename}", line {self.lineno}, in {self.function}'


_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_scopes: list[str] = []


def call_site() -> Site | None:
    """The innermost frame outside the fluidx package; None when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_HOME) and not code.co_filename.startswith("<frozen"):
            function = "/".join([*_scopes, code.co_name]) if _scopes else code.co_name
            return Site(code.co_filename, frame.f_lineno, function)
        frame = frame.f_back
    return None


def wrong(message: str) -> ProgramError:
    """A ProgramError that points at the line outside fluidx that is running."""
    site = call_site()
    return ProgramError(f"{message}\n  written at {site}" if site else message)


@contextmanager
def name_scope(prefix: str) -> Iterator[None]:
    """Operators written inside carry the prefix in their call site; nested scopes join with "/"."""
    _scopes.append(prefix)
    try:
        yield
    finally:
        _scopes.pop()
