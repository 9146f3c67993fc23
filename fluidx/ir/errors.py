"""Every exception a user of fluidx can meet, and the helpers that word them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FluidxError(Exception):
    """Base of every error that fluidx raises on purpose."""


class ProgramError(FluidxError, ValueError):
    """A program was written wrongly: a shape, dtype, attribute or name does not fit."""


class ParseError(ProgramError):
    """A program text is truncated, foreign or malformed."""


class VerifyError(FluidxError, ValueError):
    """A program, or a set of rank programs, was not proved right."""


class TranspileError(FluidxError, ValueError):
    """A program cannot be transpiled as asked."""


class FeedError(FluidxError, ValueError):
    """A feed or a fetch does not fit the program."""


class NotInitializedError(FluidxError, RuntimeError):
    """A persistable variable has no value yet: the startup program was not run."""


class ExecutionError(FluidxError, RuntimeError):
    """An operator failed while a program ran: `operator`, where it is known."""

    operator: Any = None


class RankError(ExecutionError):
    """A rank failed, stalled or disagreed; the message names the rank and the operator."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


def nearest(name: str, options: Iterable[str], what: str = "") -> str:
    """Say which of `options` is closest to `name`, or list them when none is close.

    >>> nearest("ring_optimiser", ["ring_optimizer", "data_parallel"])
    "did you mean 'ring_optimizer'?"
    """
    options = sorted(options)
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    listed = ", ".join(options[:16]) + (", ..." if len(options) > 16 else "")
    return f"{what or 'there are'}: {listed}" if options else f"{what or 'there are'}: none"
