"""Strategies with server ranks, which keep the parameters (`parameter_server`) or only add up gradients (`reduction_servers`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from ...ir.errors import TranspileError, nearest
from ..algorithms import PushPull
from ..passes.bucket import Bucket
from ..passes.compose import Compose
from ..placement.parameter_homes import Everywhere, OnServers
from .base import Common, Strategy, buckets, changed, strategy

SPLITS = ("round_robin", "hash")


def parameter_server(
    servers: int = 1, sync: bool = True, min_block: int = 8192, split: str = "round_robin", **common: Unpack[Common]
) -> Strategy:
    """`servers` ranks, numbered after the trainers, keep the parameters and the optimizer's state: trainers pull the parameters before
    their first use and push their gradients; servers add these up and update the parameters.

    Each step sends the parameters to every trainer and the gradients from every trainer. Parameters are cut into slices of at least
    `min_block` elements, at most one for each server, assigned to servers in turn or, with `split="hash"`, by a hash. `algorithm` is for
    sums among the trainers.
    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014); fluid's pserver mode.
    """
    _check_counts("parameter_server", servers=servers, min_block=min_block)
    if split not in SPLITS:
        raise TranspileError(f"parameter_server: unknown split={split!r}; {nearest(str(split), SPLITS, 'there are')}")
    if sync is not True:
        raise TranspileError(
            "parameter_server: sync=False is not available: the result of a step would depend on which gradient arrives first, so it "
            "could not be proved; with strategies.replicas() and optimizer.LocalSGDOptimizer trainers run separately and are averaged "
            "at fixed steps"
        )
    if common.get("cpu_offload"):
        raise TranspileError(
            "parameter_server: cpu_offload is not available: servers do nothing but update, so there is nothing to make room for; leave it "
            "False"
        )
    rest = OnServers(servers, min_block, split)
    options = {"servers": servers, "min_block": min_block, "split": split}
    one_by_one = Bucket(0)  # startup sends values that servers keep and values that they do not: one message with both fits no receiver
    made = strategy("parameter_server", options=options, rest=rest, reshard=False, bucket=one_by_one, **common)
    return replace(made, servers=servers)


def reduction_servers(servers: int = 1, bucket_mb: float = 25, first_bucket_mb: float = 1, **common: Unpack[Common]) -> Strategy:
    """data_parallel in which `servers` ranks, numbered after the trainers, add up the gradients; these ranks do nothing else.

    A trainer sends each bucket of its gradients once, a slice to each server, and receives the sums once: P bytes out and P bytes in, where
    a ring sends 2(n-1)/n of P. Each of k servers receives and sends n/k of P. Other collectives, and sums of open size, stay among the
    trainers.
    Sources: BytePS (Jiang et al. 2020); Google's Reduction Server; the CPU servers of Herring (Thangakrishnan et al. 2020).
    """
    _check_counts("reduction_servers", servers=servers)
    bucket = buckets("reduction_servers", bucket_mb, first_bucket_mb)
    options = {"servers": servers, **changed(reduction_servers, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb)}
    made = strategy("reduction_servers", Everywhere(), options, bucket=bucket, **common)
    return replace(made.before("hosts", Compose(PushPull(servers)), "servers").as_made(), servers=servers, keep=False)


def _check_counts(name: str, **counts: int) -> None:
    for what, n in counts.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise TranspileError(f"{name}: {what} must be an integer of at least 1, got {n!r}")
