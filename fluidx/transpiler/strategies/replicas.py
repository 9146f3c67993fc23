"""The strategy `replicas`: each rank trains its own copy of the model, and ranks communicate only where the program says so."""

from __future__ import annotations

from typing import Unpack

from ...ir.errors import TranspileError
from ..placement.parameter_homes import Everywhere
from .base import Common, Strategy, strategy


def replicas(**common: Unpack[Common]) -> Strategy:
    """Each rank trains on its own rows with its own parameters; ranks communicate only where the program has `replica_mean`.

    Each rank computes from its rows what one device computes from a batch, so the results are those of as many separate devices. The
    program is minimized with an optimizer that says when ranks average, such as `optimizer.LocalSGDOptimizer`.
    Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019).
    """
    if wire := common.get("wire"):
        raise TranspileError(f"replicas: wire={wire!r} narrows gradients, and ranks that train separately send none; leave it out")
    return strategy("replicas", Everywhere(), own=True, **common)
