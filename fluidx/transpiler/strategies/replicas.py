"""The strategy whose ranks train by themselves and meet where the program says so."""

from __future__ import annotations

from typing import Unpack

from ...ir.errors import TranspileError
from ..placement.parameter_homes import Everywhere
from .base import Common, Strategy, strategy


def replicas(**common: Unpack[Common]) -> Strategy:
    """Each rank trains on its rows with parameters of its own; ranks talk where the program has `replica_mean`, and nowhere else.

    What one device computes of a batch, each rank computes of its rows: the answers are those of as many devices, not of one. The program
    is minimized with an optimizer that says when ranks meet, such as `optimizer.LocalSGDOptimizer`.
    Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019).
    """
    if wire := common.get("wire"):
        raise TranspileError(f"replicas: wire={wire!r} narrows gradients, and ranks that train by themselves send none; leave it out")
    return strategy("replicas", Everywhere(), own=True, **common)
