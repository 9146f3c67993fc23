"""Names that do not repeat: `fc_0`, `fc_1`, ... as fluid users know them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _Generator:
    def __init__(self, prefix: str = ""):
        self.prefix = prefix
        self.ids: dict[str, int] = {}

    def __call__(self, key: str) -> str:
        n = self.ids.get(key, 0)
        self.ids[key] = n + 1
        return f"{self.prefix}{key}_{n}"


_current = _Generator()


def generate(key: str) -> str:
    """The next name for `key`.

    >>> with guard():
    ...     generate("fc"), generate("fc")
    ('fc_0', 'fc_1')
    """
    return _current(key)


def switch() -> None:
    """Start counting anew (fluid's name)."""
    global _current
    _current = _Generator()


@contextmanager
def guard(prefix: str = "") -> Iterator[None]:
    """Within the block names count from 0 again, behind an optional prefix, so that a program can be built twice alike."""
    global _current
    old, _current = _current, _Generator(prefix)
    try:
        yield
    finally:
        _current = old
