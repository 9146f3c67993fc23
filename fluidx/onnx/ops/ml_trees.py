"""Tree ensembles of ai.onnx.ml."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..node import Node
from ..table import on_numpy
from ..tree_ensemble import MODES, Forest
from ..values import Outputs
from .ml_scores import TRANSFORMS, floats, labels_of, of_two_classes, transformed

_ML = "ai.onnx.ml"


def _entries(leaf: np.ndarray, nodes: int, target: Any, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """`starts`, `counts`, `target` and `weight` of the leaves' entries, as `Forest` has them."""
    order = np.argsort(leaf, kind="stable")
    counts = np.bincount(leaf, minlength=nodes)
    return np.cumsum(counts) - counts, counts, np.asarray(target, np.int64)[order], weight.astype(np.float64)[order]


def _rows(n: Node) -> np.ndarray:
    x = np.asarray(n.value(0))
    x = x.reshape(1, -1) if x.ndim < 2 else x
    return x if x.dtype.kind == "f" else x.astype(np.float32)


# -- TreeEnsemble: nodes and leaves are listed separately -------------------------------------------------------------------------


@on_numpy("TreeEnsemble", domain=_ML, pure=True)
def tree_ensemble(n: Node) -> object:
    x, m = _rows(n), n.cached(lambda: _listed_ensemble(n))
    return transformed(n, m.scores(x), m.how).astype(x.dtype)


def _listed_ensemble(n: Node) -> _Ensemble:
    how = ("AVERAGE", "SUM", "MIN", "MAX")[n.attr("aggregate_function", 1)]
    return _Ensemble(_forest(n), np.zeros(0), n.attr("n_targets", 1), TRANSFORMS[n.attr("post_transform", 0)], how, None, -1, False)


def _forest(n: Node) -> Forest:
    """The ensemble with nodes first, then leaves."""
    mode = n.attr("nodes_modes").astype(np.int64)
    nodes, weight = len(mode), n.attr("leaf_weights")
    leaves = len(weight)

    def child(side: str) -> np.ndarray:
        ids, leaf = np.array(n.attr(f"nodes_{side}nodeids")), np.array(n.attr(f"nodes_{side}leafs"))
        return np.concatenate([np.where(leaf != 0, ids + nodes, ids), np.zeros(leaves, np.int64)])

    def padded(given: Any, fill: Any) -> np.ndarray:
        return np.concatenate([np.asarray(given), np.full(leaves, fill)])

    member = np.flatnonzero(mode == MODES.index("BRANCH_MEMBER"))
    missing = n.attr("nodes_missing_value_tracks_true") or [0] * nodes
    return Forest(
        np.array(n.attr("tree_roots")), padded(n.attr("nodes_featureids"), 0), padded(n.attr("nodes_splits"), 0), padded(mode, -1),
        np.unique(mode), child("true"), child("false"), padded(missing, 0).astype(bool), dict(zip(member.tolist(), _members(n))),
        *_entries(np.arange(leaves) + nodes, nodes + leaves, n.attr("leaf_targetids"), weight),
    )  # fmt: skip


def _members(n: Node) -> list[np.ndarray]:
    """The sets of values, which NaN separates."""
    values = n.attr("membership_values")
    if values is None:
        return []
    return [part[~np.isnan(part)] for part in np.split(values, np.flatnonzero(np.isnan(values)) + 1)]


# -- TreeEnsembleRegressor and TreeEnsembleClassifier: nodes have a tree id and a node id -----------------------------------------


def _ensemble_by_ids(n: Node, kind: str) -> Forest:
    """The ensemble whose leaves add to targets or classes, by `kind`."""
    trees, ids = np.array(n.attr("nodes_treeids"), np.int64), np.array(n.attr("nodes_nodeids"), np.int64)
    modes = np.array([MODES.index(m) if m != "LEAF" else -1 for m in n.attr("nodes_modes")])
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
    return Forest(
        np.flatnonzero(~child), np.array(n.attr("nodes_featureids")), floats(n, "nodes_values"), modes, np.unique(modes[inner]),
        yes, no, missing, {},
        *_entries(leaf, len(ids), n.attr(f"{kind}_ids"), weight),
    )  # fmt: skip


class _Ensemble(NamedTuple):
    """The attributes of a TreeEnsembleRegressor or TreeEnsembleClassifier."""

    forest: Forest
    base: np.ndarray  # a number for each target, or none
    targets: int
    how: str
    aggregate: str
    labels: np.ndarray | None
    only: int  # the one class that all leaves name, if there are two classes; else -1
    shares: bool  # is no weight negative?

    @classmethod
    def regressor(cls, n: Node) -> _Ensemble:
        targets, aggregate = n.attr("n_targets", 1), n.attr("aggregate_function", "SUM")
        return cls._of(n, _ensemble_by_ids(n, "target"), targets, aggregate, None)

    @classmethod
    def classifier(cls, n: Node) -> _Ensemble:
        labels = labels_of(n, "classlabels_int64s")
        if labels is None:
            raise n.wrong("it has no class labels")
        return cls._of(n, _ensemble_by_ids(n, "class"), len(labels), "SUM", labels)

    @classmethod
    def _of(cls, n: Node, forest: Forest, targets: int, aggregate: str, labels: np.ndarray | None) -> _Ensemble:
        named = np.unique(forest.target)
        only, shares = int(named[0]) if targets == 2 and len(named) == 1 else -1, bool((forest.weight >= 0).all())
        return cls(forest, floats(n, "base_values"), targets, n.attr("post_transform", "NONE"), aggregate, labels, only, shares)

    def scores(self, x: np.ndarray) -> np.ndarray:
        return self.forest.combined(x, self.targets, self.aggregate)

    def scores_from_base(self, x: np.ndarray) -> np.ndarray:
        return self.scores(x) + self.base if self.base.size else self.scores(x)


@on_numpy("TreeEnsembleRegressor", domain=_ML, pure=True)
def tree_ensemble_regressor(n: Node) -> object:
    m = n.cached(lambda: _Ensemble.regressor(n))
    return transformed(n, m.scores_from_base(_rows(n)), m.how).astype(np.float32)


@on_numpy("TreeEnsembleClassifier", domain=_ML, pure=True)
def tree_ensemble_classifier(n: Node) -> object:
    """If the leaves of two classes name only one, the score is that of the second class: a share if no weight is negative, else a margin.
    """
    m = n.cached(lambda: _Ensemble.classifier(n))
    assert m.labels is not None
    if m.only >= 0:
        score = m.scores(_rows(n))[:, m.only] + (m.base[-1] if m.base.size else 0)
        predicted = (score > (0.5 if m.shares else 0)).astype(np.int64)
        scores = of_two_classes(n, score, m.how, m.shares)
    else:
        scores = m.scores_from_base(_rows(n))
        predicted = scores.argmax(1)
        scores = transformed(n, scores, m.how)
    return Outputs([m.labels[predicted], scores.astype(np.float32)])
