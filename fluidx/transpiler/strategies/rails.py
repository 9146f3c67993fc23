"""The strategy of Fairring and Herring: every device of a host is a server for a shard of the sums."""

from __future__ import annotations

from math import inf
from typing import Unpack

from ...ir.errors import TranspileError
from ..choices import Everywhere
from ..passes.rails import Rails
from .base import Common, Strategy, strategy


def rails(slice_mb: float = 25, staging_mb: float = 50, parallelism: int = 4, **common: Unpack[Common]) -> Strategy:
    """data_parallel over several hosts whose gradients go over the rails: the hops of an all_reduce do not grow with the hosts.

    Each rank sends 2(h-1)/h of 1/g of the bytes over the network, for h hosts with g devices. `slice_mb`: the most that travels as one;
    `parallelism`: slices on their way at a time, `staging_mb`: the most bytes of them. What is no all_reduce goes as in data_parallel.
    Sources: Fairring (Facebook Research); Thangakrishnan et al., "Herring" (2020).
    """
    for name, value in (("slice_mb", slice_mb), ("staging_mb", staging_mb)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < inf:
            raise TranspileError(f"rails: {name} must be a finite number of MiB above 0, got {value!r}")
    if not isinstance(parallelism, int) or isinstance(parallelism, bool) or parallelism < 1:
        raise TranspileError(f"rails: parallelism must be a number of slices of at least 1, got {parallelism!r}")
    if staging_mb < slice_mb:
        raise TranspileError(f"rails: staging_mb={staging_mb!r} has no room for a slice of slice_mb={slice_mb!r}; give it room for two")
    options = {"slice_mb": slice_mb, "staging_mb": staging_mb, "parallelism": parallelism}
    made = strategy("rails", Everywhere(), options, **common)
    return made.before("hosts", Rails(float(slice_mb), float(staging_mb), parallelism), name="rails")
