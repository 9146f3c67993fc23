"""Limits on what a model may ask for. Anybody can write sizes into a file, so they are compared with the memory of the machine first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

from ..ir.errors import ProgramError

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes
MAPPED = 1 << 28  # bytes of weights, from which on a model's files are mapped and not read
MAPPED_TENSOR = 1 << 20  # bytes of an initializer that stays in a mapped file; smaller ones are read
HELD_TENSOR = 1 << 14  # bytes of an initializer that a session has as an array only
PROTOBUF = 2**31 - 1  # bytes of the largest message that protobuf reads or writes
AXES = 64  # the most that NumPy supports
UNROLLED = 512  # operators of unrolled rounds of a loop
OPERATORS = 200_000  # in a block of a program, and nodes of a model after its functions are inlined
ROUNDS = 1_000_000  # rounds of a Loop, before it counts as endless


def checked_shape(shape: Sequence[int], itemsize: int = 8) -> tuple[int, ...]:
    """`shape` as integers. Raises ProgramError if a size is negative or the machine has too little memory."""
    shape = tuple(int(d) for d in shape)
    if any(d < 0 for d in shape):
        raise ProgramError(f"it asks for the shape {list(shape)}: sizes must not be negative")
    if len(shape) > AXES or prod(max(d, 1) for d in shape) * itemsize >= 2**63:
        raise ProgramError(f"it asks for {len(shape)} axes and the shape {str(list(shape)):.200}, which no array has")
    if prod(shape) * itemsize > MEMORY:
        raise ProgramError(f"it asks for the shape {list(shape)}: {_gb(prod(shape) * itemsize)} GB, and this machine has {_gb(MEMORY)}")
    return shape


def _gb(size: int) -> str:
    return f"{size / 2**30:.3g}"
