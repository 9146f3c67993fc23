"""Other names of fluid's transpiler module: dispatchers that assign variables to servers, and calls for memory that have no effect here."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from ..ir.errors import TranspileError


class PSDispatcher:
    """Base of the dispatchers: `dispatch(variables)` gives an endpoint for each."""

    def __init__(self, pserver_endpoints: Sequence[str]):
        if isinstance(pserver_endpoints, str) or not pserver_endpoints:
            raise TranspileError(f"{type(self).__name__} takes a list of endpoints, got {pserver_endpoints!r}")
        self._eps, self._step = list(pserver_endpoints), 0

    @property
    def eps(self) -> list[str]:
        return self._eps

    def reset(self) -> None:
        """Begin with the first endpoint again."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        raise NotImplementedError(f"{type(self).__name__} does not define how it dispatches")


class HashName(PSDispatcher):
    """An endpoint by the CRC-32 of a variable's name, the same in every process.

    >>> HashName(["a:1", "b:1"]).dispatch(["fc_0.w_0", "fc_0.b_0"]) == HashName(["a:1", "b:1"]).dispatch(["fc_0.w_0", "fc_0.b_0"])
    True
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        return [self._eps[zlib.crc32(getattr(v, "name", v).encode()) % len(self._eps)] for v in varlist]


class RoundRobin(PSDispatcher):
    """One endpoint after the other.

    >>> RoundRobin(["a:1", "b:1"]).dispatch(["x", "y", "z"])
    ['a:1', 'b:1', 'a:1']
    """

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        start, self._step = self._step, self._step + len(varlist)
        return [self._eps[(start + k) % len(self._eps)] for k, _ in enumerate(varlist)]


def memory_optimize(
    input_program: Any, skip_opt_set: Any = None, print_log: bool = False, level: int = 0, skip_grads: bool = True
) -> None:
    """Has no effect, as in fluid 1.8: a plan always shares memory between values that are not live at the same time."""


def release_memory(input_program: Any, skip_opt_set: Any = None) -> None:
    """Has no effect, as in fluid 1.8: a plan decides when memory is free."""
