"""Strategies with ranks behind the trainers that serve them: that keep the parameters, or that only add up."""

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
    """`servers` ranks behind the trainers keep the parameters and the optimizer's state: trainers pull the parameters in front of their
    first use and push their gradients, servers add these up and optimize.

    Each step sends the parameters to every trainer and a gradient from each. Parameters are cut into slices of at least `min_block`
    elements, at most one for each server, dealt in turn or by a `split` "hash". `algorithm` is for what trainers add up among themselves.
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
    one_by_one = Bucket(0)  # startup hands out what servers keep and what they have no use for: together it would be for nobody
    made = strategy("parameter_server", options=options, rest=rest, kept=True, bucket=one_by_one, **common)
    return replace(made, servers=servers)


def reduction_servers(servers: int = 1, bucket_mb: float = 25, first_bucket_mb: float = 1, **common: Unpack[Common]) -> Strategy:
    """data_parallel whose gradients are added up by `servers` ranks behind the trainers, which do nothing else: their processors are free.

    A trainer sends each bucket of its gradients once, a slice to each server, and receives the sums once: P bytes out and in, where a ring
    takes 2(n-1)/n of P. Each of k servers has n/k of P in and out. What is no sum of a known size stays among the trainers.
    Sources: BytePS (Jiang et al. 2020); Google's Reduction Server; the CPU servers of Herring (Thangakrishnan et al. 2020).
    """
    _check_counts("reduction_servers", servers=servers)
    bucket = buckets("reduction_servers", bucket_mb, first_bucket_mb)
    options = {"servers": servers, **changed(reduction_servers, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb)}
    made = strategy("reduction_servers", Everywhere(), options, bucket=bucket, **common)
    return replace(made.before("hosts", Compose(PushPull(servers)), "servers"), servers=servers, keep=False)


def _check_counts(name: str, **counts: int) -> None:
    for what, n in counts.items():
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise TranspileError(f"{name}: {what} must be an integer of at least 1, got {n!r}")
