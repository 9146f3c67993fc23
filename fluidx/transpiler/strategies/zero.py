"""The ZeRO strategies, which shard the optimizer's state (zero1), the gradients (zero2) and the parameters (zero3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from ..placement.parameter_homes import InBuckets, Sharded, reshards
from .base import Common, Strategy, buckets, changed, strategy
from .search_space import searched


@searched(order=1, saves=True, bucket_mb=(25, 5, 50, 100))
def zero1(bucket_mb: float = 25, first_bucket_mb: float = 1, **common: Unpack[Common]) -> Strategy:
    """Each rank keeps and updates its part of the optimizer's state: reduce_scatter the gradients, all_gather the new parameters.

    It sends as many bytes as data_parallel, and each rank has 1/n of the state. Parameters are updated in flat ranges of buckets (see
    data_parallel), with one collective per bucket; `bucket_mb=0` cuts each parameter along an axis instead. Source: Rajbhandari et al.,
    "ZeRO" (2020), stage 1.
    """
    return _zero("zero1", ("reduce_scatter",), bucket_mb, first_bucket_mb, common)


@searched(order=2, saves=True, bucket_mb=(25, 5, 50, 100))
def zero2(bucket_mb: float = 25, first_bucket_mb: float = 1, **common: Unpack[Common]) -> Strategy:
    """zero1 in which gradients are reduced and scattered as soon as a bucket of them is finished, so no rank keeps all full gradients.

    Source: Rajbhandari et al., "ZeRO" (2020), stage 2.
    """
    return _zero("zero2", (), bucket_mb, first_bucket_mb, common)


def _zero(name: str, late: tuple[str, ...], bucket_mb: float, first_bucket_mb: float, common: Common) -> Strategy:
    bucket = buckets(name, bucket_mb, first_bucket_mb, late)
    update = InBuckets(bucket.mb, bucket.first_mb) if bucket.mb else Sharded()
    options = changed(zero1, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb)
    return strategy(name, update, options, bucket=bucket, **common)


@searched(order=4, saves=True, reshard_after_forward=(True, False))
def zero3(reshard_after_forward: bool | int | str | Sequence[str] = True, **common: Unpack[Common]) -> Strategy:
    """zero2 in which parameters are stored sharded, too: each is gathered before its first reader in forward, and again in backward.

    The parameters that forward gathers last stay for backward. Each rank has 1/n of parameters, gradients and state, and sends at most 1.5
    times the bytes of data_parallel.
    `reshard_after_forward=False` keeps gathered parameters for backward: as many bytes as data_parallel, and full parameters in memory
    until backward has read them. A number reshards so many first parameters of forward; names of fx.name_scope, or patterns of names,
    reshard the parameters that are first read there. The others are kept. Source: Rajbhandari et al., "ZeRO" (2020), stage 3.
    """
    reshard = reshards("zero3", reshard_after_forward)
    options: dict[str, Any] = {} if reshard is True else {"reshard_after_forward": reshard_after_forward}
    return strategy("zero3", options=options, rest=Sharded(), reshard=reshard, **common)
