"""The strategy `fsdp`: parameters are stored sharded, in units that are gathered and freed together."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Unpack

from ...ir.errors import TranspileError
from ..passes.bucket import Bucket
from ..passes.prefetch import Prefetch
from ..placement.parameter_homes import InFlatUnits, Sharded, reshards
from .base import Common, Steps, Strategy, strategy
from .search_space import searched


@searched(order=3, saves=True, units=(25, 5, 100, "scope"), prefetch=(1, 0, 2), reshard_after_forward=(True, False))
def fsdp(
    units: float | str = 25, reshard_after_forward: bool | int | str | Sequence[str] = True, prefetch: int = 1, **common: Unpack[Common]
) -> Strategy:  # fmt: skip
    """zero3 by units: one all_gather gathers the parameters of a unit for use, and one reduce_scatter returns its gradients.

    `units`: the most MiB of a unit, "scope" for one unit per fx.name_scope, or "parameter". `prefetch`: how many units are gathered ahead
    of the one that computes. The last unit of forward stays gathered for backward; `reshard_after_forward=False` keeps all units gathered
    for it. A number reshards so many first units of forward; names of fx.name_scope, or patterns of names, reshard the units with
    parameters that are first read there. The others stay gathered.
    Source: PyTorch's FullyShardedDataParallel.
    """
    mb = isinstance(units, (int, float)) and not isinstance(units, bool) and units > 0
    if not mb and units not in ("scope", "parameter"):
        raise TranspileError(f'fsdp: units is a number of MiB above 0, "scope" or "parameter", got {units!r}')
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise TranspileError(f"fsdp: prefetch is a number of units, 0 or more, got {prefetch!r}")
    reshard = reshards("fsdp", reshard_after_forward)
    rest = Sharded() if units == "parameter" else InFlatUnits(units)
    schedule: Steps = (("prefetch", Prefetch(prefetch)),) if prefetch else ()
    options: dict[str, Any] = {"units": units, "reshard_after_forward": reshard_after_forward, "prefetch": prefetch}
    return strategy(
        "fsdp", options=options, rest=rest, reshard=reshard, bucket=Bucket(inf, inf), schedule=schedule, **common
    )
