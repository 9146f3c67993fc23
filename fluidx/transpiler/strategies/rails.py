"""The strategy of Fairring and Herring: every device of a host adds up one shard of the gradients and serves it to the other hosts."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Unpack

from ...ir.errors import TranspileError
from ..algorithms.rails import Rails
from ..passes.compose import Compose
from ..placement.parameter_homes import Everywhere
from .base import Common, Strategy, buckets, changed, strategy
from .search_space import searched


@searched(order=7, needs="hosts", carried=False, slice_mb=(25, 10, 50), bucket_mb=(25, 100, "auto"))
def rails(
    slice_mb: float = 25, staging_mb: float = 50, parallelism: int = 4, bucket_mb: float | str = 25, **common: Unpack[Common]
) -> Strategy:  # fmt: skip
    """data_parallel over several hosts, with gradients sent over the rails: the rounds of an all_reduce do not grow with the number of
    hosts.

    Each rank sends 2(h-1)/h of 1/g of the bytes over the network, for h hosts with g devices. `slice_mb`: the largest slice; `parallelism`:
    how many slices are in flight at a time, `staging_mb`: the most bytes of these. Other collectives are sent as in data_parallel.
    `bucket_mb="auto"`: buckets of 25 MiB on up to 8 hosts, and in proportion to the hosts on more, 50 on 16 and 100 on 32, so that a
    message stays as large as it is on 8; slice_mb and staging_mb then are the sizes for 8 hosts, and grow in the same proportion.
    Sources: Fairring (Facebook Research); Thangakrishnan et al., "Herring" (2020).
    """
    for name, value in (("slice_mb", slice_mb), ("staging_mb", staging_mb)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < inf:
            raise TranspileError(f"rails: {name} must be a finite number of MiB above 0, got {value!r}")
    if not isinstance(parallelism, int) or isinstance(parallelism, bool) or parallelism < 1:
        raise TranspileError(f"rails: parallelism must be a number of slices of at least 1, got {parallelism!r}")
    if staging_mb < slice_mb:
        raise TranspileError(f"rails: staging_mb={staging_mb!r} has no room for a slice of slice_mb={slice_mb!r}; give it room for two")
    grows = bucket_mb == "auto"
    if isinstance(bucket_mb, str) and not grows:
        raise TranspileError(f'rails: bucket_mb is a number of MiB, 0 or more, or "auto", got {bucket_mb!r}')
    bucket = replace(buckets("rails", 25 if isinstance(bucket_mb, str) else bucket_mb, 1), grows=grows)
    options = {"slice_mb": slice_mb, "staging_mb": staging_mb, "parallelism": parallelism, **changed(rails, bucket_mb=bucket_mb)}
    made = strategy("rails", Everywhere(), options, bucket=bucket, **common)
    return made.before("hosts", Compose(Rails(float(slice_mb), float(staging_mb), parallelism, grows)), name="rails").as_made()
