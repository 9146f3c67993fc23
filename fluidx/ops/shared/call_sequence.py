"""One call for several calls in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def in_order(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """One call that runs all of `calls` in order; a single call is returned as it is.

    >>> in_order([lambda: print("first"), lambda: print("second")])()
    first
    second
    """
    return calls[0] if len(calls) == 1 else partial(_run, tuple(calls))


def _run(calls: tuple[Callable[[], Any], ...]) -> None:
    for call in calls:
        call()
