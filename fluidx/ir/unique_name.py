"""Names that do not repeat: `fc_0`, `fc_1`, ... as fluid users know them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any


class _Names:
    """How often each key was asked for, and what stands before the names."""

    __slots__ = ("ids", "prefix")

    def __init__(self, prefix: str = ""):
        self.prefix = prefix
        self.ids: dict[str, int] = {}


_current = _Names()


def generate(key: str) -> str:
    """The next name for `key`.

    >>> with guard():
    ...     generate("fc"), generate("fc")
    ('fc_0', 'fc_1')
    """
    ids = _current.ids
    n = ids.get(key, 0)
    ids[key] = n + 1
    return f"{_current.prefix}{key}_{n}"


def unused(base: str, taken: Container[str] | Callable[[str], Any], ending: Callable[[int], str] = str) -> str:
    """`base`, or where that is taken `base` with the first of the endings of 1, 2, ... that is not. `taken`: names, or a test of one.

    >>> unused("w", {"w", "w1"}), unused("w", {"w"}, "_{}".format), unused("w", {"w", "w_"}, "_".__mul__), unused("w", {})
    ('w2', 'w_1', 'w__', 'w')
    """
    is_taken = taken if callable(taken) else taken.__contains__
    name, k = base, 0
    while is_taken(name):
        k += 1
        name = base + ending(k)
    return name


def switch() -> None:
    """Start counting anew (fluid's name)."""
    global _current
    _current = _Names()


@contextmanager
def guard(prefix: str = "") -> Iterator[None]:
    """Within the block names count from 0 again, behind an optional prefix, so that a program can be built twice alike."""
    global _current
    old, _current = _current, _Names(prefix)
    try:
        yield
    finally:
        _current = old
