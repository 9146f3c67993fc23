"""Strategies in which one rank, its root, updates each parameter, or several ranks update pieces of it."""

from __future__ import annotations

from typing import Unpack

from ...ir.errors import TranspileError, nearest
from ..passes.bucket import Bucket
from ..passes.gather_waves import FROM_OWNERS, TO_OWNERS, GatherWaves
from ..passes.pack import PackSmall
from ..placement.parameter_homes import AtRoots, InPieces
from ..placement.roots import METHODS
from .base import Common, Steps, Strategy, buckets, changed, strategy
from .search_space import searched


@searched(order=6, bucket_mb=(25, 5, 100))
def reduce_broadcast(
    roots: str = "greedy", bucket_mb: float = 25, first_bucket_mb: float = 1, **common: Unpack[Common]
) -> Strategy:  # fmt: skip
    """Reduce each gradient to its parameter's root, optimize there, broadcast the parameter.

    The optimizer's state exists once. `roots`: "greedy" balances bytes, "round_robin" takes ranks in turn, "hash" is a fixed hash of the
    name. Values to or from one root travel in buckets, as with data_parallel.
    Source: Paddle's BuildStrategy.ReduceStrategy.Reduce.
    """
    _check_roots(roots)
    bucket = buckets("reduce_broadcast", bucket_mb, first_bucket_mb)
    options = {"roots": roots, **changed(reduce_broadcast, bucket_mb=bucket_mb, first_bucket_mb=first_bucket_mb)}
    return strategy("reduce_broadcast", AtRoots(roots), options, bucket=bucket, **common)


@searched(order=5, carried=False, chunk_mb=(4, 1, 16))
def ring_optimizer(chunk_mb: float = 4, roots: str = "greedy", **common: Unpack[Common]) -> Strategy:
    """Send gradients around the ring to their roots piece by piece, update there, and send the new values on around the ring.

    2(n-1) message rounds in all; 1/n of the optimizer's work and state on each rank. `chunk_mb`: largest piece in MiB. `roots`: which rank
    gets a piece, as in reduce_broadcast.
    Source: the ring scheme of Paddle's NCCL design document (steps 1 to 6).
    """
    _check_roots(roots)
    if not isinstance(chunk_mb, (int, float)) or isinstance(chunk_mb, bool) or not chunk_mb > 0:
        raise TranspileError(f"ring_optimizer: chunk_mb must be a number of MiB above 0, got {chunk_mb!r}")
    schedule: Steps = (("waves", GatherWaves(float(chunk_mb))), ("pack", PackSmall()))
    return strategy(
        "ring_optimizer", InPieces(float(chunk_mb), roots), {"chunk_mb": chunk_mb, "roots": roots}, schedule,
        bucket=Bucket(types=("all_reduce",)), usual="ring", carried=TO_OWNERS + FROM_OWNERS, **common,
    )  # fmt: skip


def _check_roots(roots: str) -> None:
    if roots not in METHODS:
        raise TranspileError(f"unknown roots={roots!r}; {nearest(str(roots), METHODS, 'there are')}")
