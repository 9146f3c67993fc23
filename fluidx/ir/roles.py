"""The roles of operators: the section of a program that each one is in."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """The section of a program that an operator belongs to; passes key on it, never on a position in a list."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    LR_SCHED = "lr_sched"
    OPTIMIZE = "optimize"
    DIST = "dist"
