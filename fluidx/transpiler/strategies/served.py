"""The strategy whose parameters rest on ranks that do nothing but serve them."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ...ir.errors import TranspileError, nearest
from ..choices import OnServers
from ..passes.bucket import Bucket
from .base import Common, Strategy, strategy

SPLITS = ("round_robin", "hash")


def parameter_server(
    servers: int = 1, sync: bool = True, min_block: int = 8192, split: str = "round_robin", **common: Unpack[Common]
) -> Strategy:
    """`servers` ranks behind the trainers keep the parameters and the optimizer's state: trainers pull the parameters in front of their
    first use and push their gradients, servers add these up and optimize.

    Each step sends the parameters to every trainer and a gradient from each. Parameters are cut into slices of at least `min_block`
    elements, at most one for each server, dealt in turn or by a `split` "hash". `algorithm` is for what trainers add up among themselves.
    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014); fluid's pserver mode.
    """
    for what, n in (("servers", servers), ("min_block", min_block)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise TranspileError(f"parameter_server: {what} must be an integer of at least 1, got {n!r}")
    if split not in SPLITS:
        raise TranspileError(f"parameter_server: unknown split={split!r}; {nearest(str(split), SPLITS, 'there are')}")
    if sync is not True:
        raise TranspileError(
            "parameter_server: sync=False is not available: what a step gives would hang on which gradient comes first, and nothing could "
            "be proved of it; strategies.replicas() with optimizer.LocalSGDOptimizer lets trainers run apart, and says when they meet"
        )
    rest = OnServers(servers, min_block, split)
    options = {"servers": servers, "min_block": min_block, "split": split}
    one_by_one = Bucket(0)  # startup hands out what servers keep and what they have no use for: together it would be for nobody
    made = strategy("parameter_server", options=options, rest=rest, kept=True, bucket=one_by_one, **common)
    return replace(made, servers=servers)
