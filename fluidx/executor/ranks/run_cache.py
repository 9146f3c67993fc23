"""What a ParallelExecutor keeps ready for runs of one kind, and which runs are of one kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...native.world import Launch
from ..run.call_descriptions import RemotePlan
from .fetches import GlobalFetch
from .split_and_join import FeedSplit


class PreparedRun(NamedTuple):
    """What runs of the same kinds of feeds and the same fetches take: how feeds are dealt, every rank's calls, and where those are all in C
    one function that makes them together; and how fetches are gathered. Of ranks that are other processes `sights` are what profilers are
    shown of their calls, once there is one."""

    feed_split: FeedSplit
    bounds: list[Any]
    launch: Launch | None
    global_fetches: list[GlobalFetch]
    versions: tuple[int, ...]  # of the scopes
    remote_plans: list[RemotePlan]


def are_arrays(feed: Any) -> bool:
    """Is a feed a dict of names and arrays already?"""
    return type(feed) is dict and all(type(a) is np.ndarray and type(n) is str for n, a in feed.items())


def kind_of(names: list[str], feed: Mapping[str, np.ndarray], merged: bool, apart: bool) -> tuple:
    """Runs of one kind have the same feeds, by name and type, and the same fetches, in one form."""
    return (merged, apart, *names, *sorted([(n, a.dtype, a.shape) for n, a in feed.items()]))
