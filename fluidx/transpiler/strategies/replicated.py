"""Strategies whose parameters are updated by every rank."""

from __future__ import annotations

from typing import Unpack

from ..choices import Everywhere
from .base import Common, Strategy, strategy


def data_parallel(**common: Unpack[Common]) -> Strategy:
    """Broadcast the initial values, all_reduce each gradient, optimize on every rank.

    2(n-1)/n of the parameters' bytes per rank and step. Source: the AllReduce scheme of Paddle's NCCL design document.
    """
    return strategy("data_parallel", Everywhere(), **common)
