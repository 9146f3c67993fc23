"""Strategies whose parameters are updated by every rank."""

from __future__ import annotations

from typing import Any

from ..choices import Everywhere
from .base import Strategy, strategy


def data_parallel(loss: Any = None, strict: bool = False) -> Strategy:
    """Broadcast the initial values, all_reduce each gradient, optimize on every rank.

    2(n-1)/n of the parameters' bytes per rank and step. `loss` names the loss when it must be checked; `strict` refuses communication
    that the strategy itself does not ask for.
    Source: the AllReduce scheme of Paddle's NCCL design document.
    """
    return strategy("data_parallel", Everywhere(), loss=loss, strict=strict)
