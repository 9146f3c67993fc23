"""Strategies that shard: the optimizer's state, the gradients, the parameters."""

from __future__ import annotations

from math import inf
from typing import Any, Unpack

from ...ir.errors import TranspileError
from ..choices import Sharded
from ..passes.waves import GatherWaves
from .base import Common, Steps, Strategy, strategy


def zero1(**common: Unpack[Common]) -> Strategy:
    """Each rank keeps and updates its shard of the optimizer's state: reduce_scatter gradients, all_gather the new parameters.

    The bytes of data_parallel, 1/n of the state. Source: Rajbhandari et al., "ZeRO" (2020), stage 1.
    """
    late: Steps = (("late", GatherWaves(inf, (("reduce_scatter",),))),)
    return strategy("zero1", Sharded(), schedule=late, **common)


def zero2(**common: Unpack[Common]) -> Strategy:
    """zero1 whose gradients are reduced and cut as soon as they are finished, so that no rank keeps whole ones.

    Source: Rajbhandari et al., "ZeRO" (2020), stage 2.
    """
    return strategy("zero2", Sharded(), **common)


def zero3(reshard_after_forward: bool = True, **common: Unpack[Common]) -> Strategy:
    """zero2 whose parameters rest cut, too: each is gathered in front of its first reader in forward and again in backward.

    1/n of parameters, gradients and state on each rank, for half as many bytes more than data_parallel sends.
    `reshard_after_forward=False` keeps what forward gathered for backward: the bytes of data_parallel again, and whole parameters until
    backward has read them. Source: Rajbhandari et al., "ZeRO" (2020), stage 3.
    """
    if not isinstance(reshard_after_forward, bool):
        raise TranspileError(f"zero3: reshard_after_forward is True or False, got {reshard_after_forward!r}")
    options: dict[str, Any] = {} if reshard_after_forward else {"reshard_after_forward": False}
    return strategy("zero3", options=options, rest=Sharded(), kept=not reshard_after_forward, **common)
