"""PreparedRun: everything that a ParallelExecutor caches for runs with equal feeds and fetches, and the key of this cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...native.world import Launch
from ..run.call_descriptions import RemotePlan
from .fetches import GlobalFetch
from .split_and_join import FeedSplit


class PreparedRun(NamedTuple):
    """Prepared runs for feeds of the same types and the same fetches: how feeds are split, the bound plan of each rank, and how fetches are
    gathered. `launch` runs all ranks in one C call, if all their calls are in C. `remote_plans`: descriptions of calls in other processes,
    filled when a profiler attaches."""

    feed_split: FeedSplit
    bounds: list[Any]
    launch: Launch | None
    global_fetches: list[GlobalFetch]
    versions: tuple[int, ...]  # of the scopes
    remote_plans: list[RemotePlan]


def are_arrays(feed: Any) -> bool:
    """Is a feed already a dict from names to arrays?"""
    return type(feed) is dict and all(type(a) is np.ndarray and type(n) is str for n, a in feed.items())


def kind_of(names: list[str], feed: Mapping[str, np.ndarray], merged: bool, apart: bool) -> tuple:
    """The cache key of a run: feeds by name and type, fetches, and whether results are merged and steps unfused."""
    return (merged, apart, *names, *sorted([(n, a.dtype, a.shape) for n, a in feed.items()]))
