"""Sizes in a model are numbers that anybody can write: they are compared with the memory of the machine before they are allocated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

from ..ir.errors import ProgramError

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes
AXES = 64  # of NumPy's arrays
UNROLLED = 512  # operators of rounds that are written one behind the other
OPERATORS = 200_000  # of a block of a program, and nodes of a model whose functions are written out where they are called
ROUNDS = 1_000_000  # of a Loop, before it is said to have no end


def room(shape: Sequence[int], itemsize: int = 8) -> tuple[int, ...]:
    """`shape`, where it has no negative size and the machine has the memory for it. Raises ProgramError."""
    shape = tuple(int(d) for d in shape)
    if any(d < 0 for d in shape):
        raise ProgramError(f"it asks for the shape {list(shape)}: sizes are not negative")
    if len(shape) > AXES or prod(max(d, 1) for d in shape) * itemsize >= 2**63:
        raise ProgramError(f"it asks for {len(shape)} axes and the shape {str(list(shape)):.200}, which no array has")
    if prod(shape) * itemsize > MEMORY:
        raise ProgramError(f"it asks for the shape {list(shape)}: {_gb(prod(shape) * itemsize)} GB, and this machine has {_gb(MEMORY)}")
    return shape


def _gb(size: int) -> str:
    return f"{size / 2**30:.3g}"
