"""Classical models: ensembles of trees. All rows go down all trees at once, a level at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..importer import Outputs
from ..node import Node
from . import host
from .ml_scores import TRANSFORMS, floats, labels_of, of_two_classes, transformed

_ML = "ai.onnx.ml"
_AT_ONCE = 1 << 14  # places of rows in trees: what is worked on at a time stays in the cache
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_COMPARED: tuple[Callable[[Any, Any], Any], ...] = (np.less_equal, np.less, np.greater_equal, np.greater, np.equal, np.not_equal)


class _Forest(NamedTuple):
    """Nodes of all trees, and what leaves add: `weight` to `target`, from `starts` on, `counts` of them."""

    roots: np.ndarray
    feature: np.ndarray
    split: np.ndarray
    mode: np.ndarray  # -1 for a leaf, else the position in _MODES
    kinds: np.ndarray  # the modes that occur
    yes: np.ndarray
    no: np.ndarray
    missing: np.ndarray  # whether NaN goes to `yes`
    members: dict[int, np.ndarray]
    starts: np.ndarray
    counts: np.ndarray
    target: np.ndarray
    weight: np.ndarray

    def leaves(self, x: np.ndarray) -> np.ndarray:
        """[rows * trees]: the leaf of each row in each tree."""
        at = np.tile(self.roots, len(x))
        row, node, left = np.repeat(np.arange(len(x)), len(self.roots)), at, None
        while True:
            inner = self.mode[node] >= 0
            if not inner.all():
                left = np.flatnonzero(inner) if left is None else left[inner]
                if not len(left):
                    return at
                node, row = node[inner], row[inner]
            value = x[row, self.feature[node]]
            node = np.where(self._says_yes(node, value), self.yes[node], self.no[node])
            if left is None:
                at = node
            else:
                at[left] = node

    def _says_yes(self, node: np.ndarray, value: np.ndarray) -> np.ndarray:
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

    def added(self, x: np.ndarray, targets: int, how: str) -> np.ndarray:
        """[rows, targets]: what the leaves of each row add up to; the least or the largest of it; 0 where no leaf says anything."""
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


def _entries(leaf: np.ndarray, nodes: int, target: Any, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """`starts`, `counts`, `target` and `weight` of what the leaves add."""
    order = np.argsort(leaf, kind="stable")
    counts = np.bincount(leaf, minlength=nodes)
    return np.cumsum(counts) - counts, counts, np.asarray(target, np.int64)[order], weight.astype(np.float64)[order]


def _rows(n: Node) -> np.ndarray:
    x = np.asarray(n.value(0))
    x = x.reshape(1, -1) if x.ndim < 2 else x
    return x if x.dtype.kind == "f" else x.astype(np.float32)


# -- TreeEnsemble: nodes and leaves apart -----------------------------------------------------------------------------------------------


@host("TreeEnsemble", domain=_ML, computes=True)
def tree_ensemble(n: Node) -> object:
    x = _rows(n)
    how = ("AVERAGE", "SUM", "MIN", "MAX")[n.attr("aggregate_function", 1)]
    scores = n.once(lambda: _forest(n)).added(x, n.attr("n_targets", 1), how)
    return transformed(n, scores, TRANSFORMS[n.attr("post_transform", 0)]).astype(x.dtype)


def _forest(n: Node) -> _Forest:
    """Leaves follow the nodes here."""
    mode = n.attr("nodes_modes").astype(np.int64)
    nodes, weight = len(mode), n.attr("leaf_weights")
    leaves = len(weight)

    def child(side: str) -> np.ndarray:
        ids, leaf = np.array(n.attr(f"nodes_{side}nodeids")), np.array(n.attr(f"nodes_{side}leafs"))
        return np.concatenate([np.where(leaf != 0, ids + nodes, ids), np.zeros(leaves, np.int64)])

    def padded(given: Any, fill: Any) -> np.ndarray:
        return np.concatenate([np.asarray(given), np.full(leaves, fill)])

    member = np.flatnonzero(mode == _MODES.index("BRANCH_MEMBER"))
    missing = n.attr("nodes_missing_value_tracks_true") or [0] * nodes
    return _Forest(
        np.array(n.attr("tree_roots")), padded(n.attr("nodes_featureids"), 0), padded(n.attr("nodes_splits"), 0), padded(mode, -1),
        np.unique(mode), child("true"), child("false"), padded(missing, 0).astype(bool), dict(zip(member.tolist(), _members(n))),
        *_entries(np.arange(leaves) + nodes, nodes + leaves, n.attr("leaf_targetids"), weight),
    )  # fmt: skip


def _members(n: Node) -> list[np.ndarray]:
    """The sets of values, which NaN divides."""
    values = n.attr("membership_values")
    if values is None:
        return []
    return [part[~np.isnan(part)] for part in np.split(values, np.flatnonzero(np.isnan(values)) + 1)]


# -- TreeEnsembleRegressor, TreeEnsembleClassifier: nodes by tree and number ------------------------------------------------------------


def _numbered(n: Node, kind: str) -> _Forest:
    """`kind` says what the leaves add to: target or class."""
    trees, ids = np.array(n.attr("nodes_treeids"), np.int64), np.array(n.attr("nodes_nodeids"), np.int64)
    modes = np.array([_MODES.index(m) if m != "LEAF" else -1 for m in n.attr("nodes_modes")])
    span = ids.max() + 1
    key = trees * span + ids
    order = np.argsort(key)

    def place(tree: Any, node: Any) -> np.ndarray:
        wanted = np.asarray(tree, np.int64) * span + np.asarray(node, np.int64)
        found = order[np.minimum(np.searchsorted(key, wanted, sorter=order), len(order) - 1)]
        if (key[found] != wanted).any():
            raise n.wrong("it names a node that is in none of its trees")
        return found

    inner = modes >= 0
    yes, no = (np.where(inner, n.attr(f"nodes_{side}nodeids"), ids) for side in ("true", "false"))
    yes, no = place(trees, yes), place(trees, no)
    child = np.zeros(len(ids), bool)
    child[yes[inner]] = child[no[inner]] = True
    weight = floats(n, f"{kind}_weights")
    leaf = place(n.attr(f"{kind}_treeids"), n.attr(f"{kind}_nodeids"))
    missing = np.array(n.attr("nodes_missing_value_tracks_true") or [0] * len(ids)).astype(bool)
    return _Forest(
        np.flatnonzero(~child), np.array(n.attr("nodes_featureids")), floats(n, "nodes_values"), modes, np.unique(modes[inner]),
        yes, no, missing, {},
        *_entries(leaf, len(ids), n.attr(f"{kind}_ids"), weight),
    )  # fmt: skip


@host("TreeEnsembleRegressor", domain=_ML, computes=True)
def tree_ensemble_regressor(n: Node) -> object:
    scores = n.once(lambda: _numbered(n, "target")).added(_rows(n), n.attr("n_targets", 1), n.attr("aggregate_function", "SUM"))
    base = floats(n, "base_values")
    scores = scores + base if base.size else scores
    return transformed(n, scores, n.attr("post_transform", "NONE")).astype(np.float32)


@host("TreeEnsembleClassifier", domain=_ML, computes=True)
def tree_ensemble_classifier(n: Node) -> object:
    """Two classes of which the leaves name one have one score, that of the second: a share if no weight is negative, else a margin."""
    labels, how = labels_of(n, "classlabels_int64s"), n.attr("post_transform", "NONE")
    if labels is None:
        raise n.wrong("it has no class labels")
    forest, base = n.once(lambda: _numbered(n, "class")), floats(n, "base_values")
    scores = forest.added(_rows(n), len(labels), "SUM")
    if len(labels) == 2 and len(np.unique(forest.target)) == 1:
        score = scores[:, forest.target[0]] + (base[-1] if base.size else 0)
        shares = bool((forest.weight >= 0).all())
        said = (score > (0.5 if shares else 0)).astype(np.int64)
        scores = of_two_classes(n, score, how, shares)
    else:
        scores = scores + base if base.size else scores
        said = scores.argmax(1)
        scores = transformed(n, scores, how)
    return Outputs([labels[said], scores.astype(np.float32)])
