"""Calls of C kernels that are kept for feeds of few rows, for which making a call takes longer than running it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from .. import native

_FEW = 16  # rows of a call that is kept
_MOST = 8  # calls that one model part keeps
MakeCall = Callable[[np.ndarray], tuple[native.NativeCall, Sequence[np.ndarray]]]


class KeptCalls:
    """Runs a kernel on rows. A call for few rows has arrays of its own and is run again; a thread takes it out of here while it runs."""

    def __init__(self) -> None:
        self._free: dict[Hashable, tuple[np.ndarray, Callable[[], None], Sequence[np.ndarray]]] = {}

    def run(self, kind: Hashable, x: np.ndarray, make: MakeCall) -> Sequence[np.ndarray]:
        """The results of the call that `make` gives for rows in C order; calls of one kind differ in nothing but the rows."""
        if len(x) > _FEW:
            call, made = make(np.ascontiguousarray(x))
            native.compile([call])()
            return made
        key = kind, x.shape
        kept = self._free.pop(key, None)  # one step: another thread may want it too
        held, run, made = _ready(x, make) if kept is None else kept
        held[...] = x
        run()
        found = [a.copy() for a in made]
        if len(self._free) >= _MOST:
            self._free.clear()
        self._free[key] = held, run, made
        return found


def _ready(x: np.ndarray, make: MakeCall) -> tuple[np.ndarray, Callable[[], None], Sequence[np.ndarray]]:
    held: Any = np.array(x, order="C")
    call, made = make(held)
    return held, native.compile([call]), made
