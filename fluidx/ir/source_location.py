"""Find the user's line that is writing an operator, so that errors can point at it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from .errors import ProgramError


class Site(NamedTuple):
    """The user's line that wrote an operator."""

    filename: str
    lineno: int
    function: str

    def __str__(self) -> str:
        return f'"{self.filename}", line {self.lineno}, in {self.function}'


_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGE = __name__.partition(".")[0]
_scopes: list[str] = []
_commands: list[None] = []
_warned: dict[str | tuple[str, type[Warning], int], int] = {}  # where Python stores the warnings that it has shown
_last: list[Site | None] = [None]
# file name -> is it skipped: files of fluidx, and contextlib, which is between a `with` line and fluidx
_inside: dict[str, bool] = {contextlib.__file__: True}


def call_site() -> Site | None:
    """The innermost frame outside the fluidx package; None when there is none, and where a command of fluidx is at work."""
    frame: FrameType | None = None if _commands else sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        inside = _inside.get(name)
        if name == "<string>":  # what `python -c` runs, and the __init__ that dataclasses write for classes of fluidx
            inside = frame.f_globals.get("__name__", "").startswith(f"{_PACKAGE}.")
        if inside is None:
            inside = _inside[name] = name.startswith((_HOME, "<frozen"))
        if not inside:
            found = name, frame.f_lineno, "/".join([*_scopes, code.co_name]) if _scopes else code.co_name
            if found != _last[0]:  # a loop writes many operators in one line: they share the record
                _last[0] = Site(*found)
            return _last[0]
        frame = frame.f_back
    return None


def wrong(message: str) -> ProgramError:
    """A ProgramError that points at the line outside fluidx that is running."""
    site = call_site()
    return ProgramError(f"{message}\n  written at {site}" if site else message)


def warn(message: str) -> None:
    """Warn at the line outside fluidx that is running, once for each message and line."""
    site = call_site()
    filename, line = (site.filename, site.lineno) if site else ("fluidx", 1)
    warnings.warn_explicit(message, UserWarning, filename, line, registry=_warned)


@contextmanager
def name_scope(prefix: str) -> Iterator[None]:
    """Operators written inside carry the prefix in their call site; nested scopes join with "/"."""
    if not isinstance(prefix, str):
        raise wrong(f"name_scope: prefix must be a string, got {type(prefix).__name__}: {prefix!r}")
    _scopes.append(prefix)
    try:
        yield
    finally:
        _scopes.pop()


@contextmanager
def by_command() -> Iterator[None]:
    """Operators written inside have no call site: a command of fluidx writes them."""
    _commands.append(None)
    try:
        yield
    finally:
        _commands.pop()
