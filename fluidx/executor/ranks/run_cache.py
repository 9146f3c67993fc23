"""PreparedRun: everything that a ParallelExecutor caches for runs with equal feeds and fetches, and the key of this cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .fetches import GlobalFetch
from .split_and_join import FeedSplit


class PreparedRun(NamedTuple):
    """Prepared runs for feeds of the same types and the same fetches: how feeds are split, the step of the ranks, and how
    fetches are gathered. `versions`: those of the ranks when it was made (RankGroup.versions)."""

    feed_split: FeedSplit
    step: Any
    global_fetches: list[GlobalFetch]
    versions: tuple[int, ...]


def are_arrays(feed: Any) -> bool:
    """Is a feed already a dict from names to arrays?"""
    return type(feed) is dict and all(type(a) is np.ndarray and type(n) is str for n, a in feed.items())


def kind_of(names: list[str], feed: Mapping[str, np.ndarray], merged: bool, apart: bool) -> tuple:
    """The cache key of a run: feeds by name and type, fetches, and whether results are merged and steps unfused."""
    return (merged, apart, *names, *sorted([(n, a.dtype, a.shape) for n, a in feed.items()]))
