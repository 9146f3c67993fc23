"""Unique names: `fc_0`, `fc_1`, ... as in fluid."""

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


def generate(key: str, taken: Callable[[str], Any] | None = None) -> str:
    """The next name for `key`; with `taken`, the next one that is not. A program may be continued under another guard, which counts anew.

    >>> with guard():
    ...     generate("fc"), generate("fc"), generate("fc", {"fc_2"}.__contains__)
    ('fc_0', 'fc_1', 'fc_3')
    """
    ids = _current.ids
    while True:
        n = ids.get(key, 0)
        ids[key] = n + 1
        name = f"{_current.prefix}{key}_{n}"
        if taken is None or not taken(name):
            return name


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


class UnusedNames:
    """`unused` for many names of one base: a search begins where the last one for that base ended. With `numbered`, no base stands alone.

    >>> taken = {"w"}
    >>> names = UnusedNames(taken.__contains__, "_{}".format)
    >>> for _ in range(2): taken.add(names("w"))
    >>> sorted(taken)
    ['w', 'w_1', 'w_2']
    """

    def __init__(self, taken: Callable[[str], Any], ending: Callable[[int], str] = str, numbered: bool = False):
        self.taken, self.ending, self.numbered = taken, ending, numbered
        self._last: dict[str, int] = {}

    def __call__(self, base: str) -> str:
        if not self.numbered and not self.taken(base):
            return base
        k = self._last.get(base, 0)
        if k and not self.taken(base + self.ending(k)):  # it was given another name, and so may be those before it
            k = 0
        k += 1
        while self.taken(base + self.ending(k)):
            k += 1
        self._last[base] = k
        return base + self.ending(k)


def switch() -> None:
    """Count from 0 again (fluid's name)."""
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
