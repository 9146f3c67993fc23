"""Strategies whose parameters are updated by every rank."""

from __future__ import annotations

from typing import Unpack

from ...ir.errors import TranspileError
from ..passes.bucket import MOVING
from ..placement.parameter_homes import Everywhere
from .base import Common, Strategy, buckets, changed, strategy
from .search_space import searched


@searched(order=0, bucket_mb=(25, 5, 50, 100))
def data_parallel(bucket_mb: float = 25, first_bucket_mb: float = 1, overlap: bool = True, **common: Unpack[Common]) -> Strategy:
    """Broadcast the initial values, all_reduce the gradients bucket by bucket, and update every parameter on every rank.

    A rank sends 2(n-1)/n of the parameters' bytes in a step. Gradients travel in buckets of at most `bucket_mb` MiB; the first bucket has
    `first_bucket_mb`. Each bucket is sent as soon as its last gradient is finished, or with `overlap=False` after backward; `bucket_mb=0`
    sends each gradient by itself. Sources: the AllReduce scheme of Paddle's NCCL design document; the buckets of PyTorch's
    DistributedDataParallel.
    """
    if not isinstance(overlap, bool):
        raise TranspileError(f"data_parallel: overlap is True or False, got {overlap!r}")
    bucket = buckets("data_parallel", bucket_mb, first_bucket_mb, late=() if overlap else MOVING)
    options = changed(data_parallel, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb, overlap=overlap)
    return strategy("data_parallel", Everywhere(), options, bucket=bucket, **common)
