"""Pause Python's garbage collector while fluidx makes many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """No cyclic garbage is collected meanwhile. Where a program grows by thousands of operators, or is planned, there is none, and each
    collection would look at all of them.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
