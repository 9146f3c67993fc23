"""Tree ensembles: each row of the input reaches a leaf in each tree, and the weights of these leaves are combined.

A C kernel takes one row after the other; NumPy takes all rows through all trees at once, level by level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .. import native
from .errors import OnnxError
from .kept_calls import KeptCalls

_AT_ONCE = 1 << 14  # rows times trees that NumPy computes at a time, so that they stay in the cache
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_COMPARED: tuple[Callable[[Any, Any], Any], ...] = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)
_HOW = {"SUM": 0, "AVERAGE": 0, "MIN": 1, "MAX": 2}


class _Packed(NamedTuple):
    """A tree ensemble in the layout of trees.h, with the numbers of features and targets."""

    nodes: np.ndarray
    roots: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    features: int
    targets: int


@dataclass(frozen=True)
class Forest:
    """Nodes of all trees. A leaf adds `weight` to `target` in `counts` entries from `starts` on."""

    roots: np.ndarray
    feature: np.ndarray
    split: np.ndarray
    mode: np.ndarray  # -1 for a leaf, else the position in MODES
    kinds: np.ndarray  # the modes that occur
    yes: np.ndarray
    no: np.ndarray
    missing: np.ndarray  # whether NaN goes to `yes`
    members: dict[int, np.ndarray]
    starts: np.ndarray
    counts: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    _packed: dict[np.dtype, _Packed | None] = field(default_factory=dict, init=False)  # by dtype of the rows
    _calls: KeptCalls = field(default_factory=KeptCalls, init=False)

    @cached_property
    def features(self) -> int:
        """The number of columns that the nodes read."""
        return int(self.feature[self.mode >= 0].max(initial=-1)) + 1

    def leaves(self, x: np.ndarray) -> np.ndarray:
        """[rows * trees]: the leaf of each row in each tree."""
        at = np.tile(self.roots, len(x))
        row, node, left = np.repeat(np.arange(len(x)), len(self.roots)), at, None
        for _ in range(len(self.mode) + 1):
            inner = self.mode[node] >= 0
            if not inner.all():
                left = np.flatnonzero(inner) if left is None else left[inner]
                if not len(left):
                    return at
                node, row = node[inner], row[inner]
            value = x[row, self.feature[node]]
            node = np.where(self._goes_to_yes(node, value), self.yes[node], self.no[node])
            if left is None:
                at = node
            else:
                at[left] = node
        raise OnnxError("a tree of the ensemble has a cycle")

    def _goes_to_yes(self, node: np.ndarray, value: np.ndarray) -> np.ndarray:
        found = np.zeros(len(node), bool)
        for mode in self.kinds:
            here = np.flatnonzero(self.mode[node] == mode) if len(self.kinds) > 1 else slice(None)
            if mode < len(_COMPARED):
                found[here] = _COMPARED[mode](value[here], self.split[node[here]])
                continue
            for one in np.unique(node[here]):
                these = node == one
                found[these] = np.isin(value[these], self.members[int(one)])
        return np.where(np.isnan(value), found | self.missing[node], found)

    def combined(self, x: np.ndarray, targets: int, how: str) -> np.ndarray:
        """[rows, targets]: for each row the sum, the minimum or the maximum of the weights of its leaves, or 0 if there are none."""
        if x.shape[1] < self.features:
            raise OnnxError(f"attribute nodes_featureids names feature {self.features - 1}, but the input has {x.shape[1]} columns")
        found = self._by_c_kernel(x, targets, how) if native.enabled() else None
        if found is None:
            step = max(_AT_ONCE // max(len(self.roots), 1), 1)
            parts = [self._part(x[k : k + step], targets, how) for k in range(0, len(x), step)]
            found = np.concatenate(parts) if parts else np.zeros((0, targets))
        return found / len(self.roots) if how == "AVERAGE" else found

    def _part(self, x: np.ndarray, targets: int, how: str) -> np.ndarray:
        leaf = self.leaves(x)
        counts = self.counts[leaf]
        entry = np.repeat(self.starts[leaf] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        place = np.repeat(np.repeat(np.arange(len(x)), len(self.roots)), counts) * targets + self.target[entry]
        if how in ("SUM", "AVERAGE"):
            return np.bincount(place, self.weight[entry], len(x) * targets).reshape(-1, targets)
        least = how == "MIN"
        found = np.full(len(x) * targets, np.inf if least else -np.inf)
        (np.minimum if least else np.maximum).at(found, place, self.weight[entry])
        return np.where(np.isinf(found), 0, found).reshape(-1, targets)

    def _by_c_kernel(self, x: np.ndarray, targets: int, how: str) -> np.ndarray | None:
        """`combined` by the C kernel, or None where it does not cover this forest."""
        if x.dtype not in self._packed:
            self._packed[x.dtype] = self._pack(x.dtype)
        p = self._packed[x.dtype]
        if p is None or x.shape[1] < p.features or targets < p.targets:
            return None
        work, mode = p.nodes.dtype["split"], int(self.kinds[0]) if len(self.kinds) == 1 else -1

        def call(x: np.ndarray) -> tuple[native.NativeCall, list[np.ndarray]]:
            found = np.empty((len(x), targets))
            at = [native.address(a) for a in (x, p.nodes, p.roots, p.target, p.weight, found)]
            words = (at[0], *x.shape, *at[1:3], len(p.roots), *at[3:], targets, _HOW[how], mode)
            return native.NativeCall(f"trees_f{8 * work.itemsize}", words, (x, *p[:4], found)), [found]

        return self._calls.run((work, targets, how), x if x.dtype == work else x.astype(work), call)[0]

    def _pack(self, dtype: np.dtype) -> _Packed | None:
        """The packed ensemble. None for sets of values, which only NumPy supports, and for a damaged ensemble, which C must not follow."""
        count, leaf = len(self.mode), self.mode < 0
        if dtype.name not in ("float32", "float64") or not count or (self.mode >= len(_COMPARED)).any() or not self._is_valid():
            return None
        exact = np.array_equal(self.split, self.split.astype(dtype), equal_nan=True)
        kinds = [("split", dtype if exact else "f8"), ("below", "i4", 2), ("feature", "i4"), ("mode", "i1"), ("missing", "i1")]
        nodes = np.empty(count, np.dtype(kinds, align=True))
        nodes["split"], nodes["mode"], nodes["missing"] = self.split, self.mode, self.missing
        nodes["feature"] = np.where(leaf, 0, self.feature)
        nodes["below"] = np.where(leaf, [self.starts, self.counts], [self.yes, self.no]).T
        features, targets = int(nodes["feature"].max()) + 1, int(self.target.max(initial=-1)) + 1
        return _Packed(nodes, self.roots.astype("i4"), self.target.astype("i4"), self.weight, features, targets)

    def _is_valid(self) -> bool:
        """Whether all indices are in range and the trees have no cycle."""
        inner, count = self.mode >= 0, len(self.mode)
        named = np.concatenate([self.roots, self.yes[inner], self.no[inner]])
        if len(named) and not 0 <= named.min() <= named.max() < count or (self.feature[inner] < 0).any() or (self.target < 0).any():
            return False
        return not len(without_end(inner, self.yes, self.no))


def without_end(inner: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    """The nodes in cycles, or below one, by the children of each node that is `inner`.

    >>> leaf = [0, 0]  # nodes 3 and 4; 0 has the children 1 and 3, 1 has 2 and 3, 2 has 1 and 4
    >>> without_end(np.arange(5) < 3, np.array([1, 2, 1, *leaf]), np.array([3, 3, 4, *leaf])).tolist()
    [1, 2, 3, 4]
    """
    parents = np.bincount(np.concatenate([yes[inner], no[inner]]), minlength=len(inner))
    level = np.flatnonzero(parents == 0)
    while len(level):
        level = level[inner[level]]
        below, times = np.unique(np.concatenate([yes[level], no[level]]), return_counts=True)
        parents[below] -= times
        level = below[parents[below] == 0]
    return np.flatnonzero(parents)
