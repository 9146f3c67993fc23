"""Strategies that shard: the optimizer's state, and the gradients."""

from __future__ import annotations

from math import inf
from typing import Any

from ..choices import Sharded
from ..passes.waves import GatherWaves
from .base import Strategy, strategy


def zero1(loss: Any = None, strict: bool = False) -> Strategy:
    """Each rank keeps and updates its shard of the optimizer's state: reduce_scatter gradients, all_gather the new parameters.

    The bytes of data_parallel, 1/n of the state. Source: Rajbhandari et al., "ZeRO" (2020), stage 1.
    """
    return strategy("zero1", Sharded(), schedule=(("late", GatherWaves(inf, ("reduce_scatter",))),), loss=loss, strict=strict)


def zero2(loss: Any = None, strict: bool = False) -> Strategy:
    """zero1 whose gradients are reduced and cut as soon as they are finished, so that no rank keeps whole ones.

    Source: Rajbhandari et al., "ZeRO" (2020), stage 2.
    """
    return strategy("zero2", Sharded(), loss=loss, strict=strict)
