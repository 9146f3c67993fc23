"""Tree ensembles of ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..node import Node
from ..table import on_numpy
from ..tree_ensemble import MODES, Forest, without_end
from ..values import Outputs
from .ml_scores import TRANSFORMS, floats, labels_of, of_two_classes, transformed

_ML = "ai.onnx.ml"
_MOST = 1 << 31  # trees.h has 32-bit indices


def _entries(leaf: np.ndarray, nodes: int, target: Any, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """`starts`, `counts`, `target` and `weight` of the leaves' entries, as `Forest` has them."""
    order = np.argsort(leaf, kind="stable")
    counts = np.bincount(leaf, minlength=nodes)
    return np.cumsum(counts) - counts, counts, np.asarray(target, np.int64)[order], weight.astype(np.float64)[order]


def _rows(n: Node) -> np.ndarray:
    x = np.asarray(n.value(0))
    x = x.reshape(1, -1) if x.ndim < 2 else x
    return x if x.dtype.kind == "f" else x.astype(np.float32)


# -- what a file may say: it is not trusted --------------------------------------------------------------------------------------


def _listed(n: Node, name: str, count: int, of: str = "node") -> np.ndarray:
    """An attribute that has one number for each node, leaf or weight."""
    found = floats(n, name) if name == "nodes_values" else np.asarray(n.attr(name, np.zeros(0, np.int64))).reshape(-1)
    if len(found) != count:
        raise n.wrong(f"attribute {name} has {len(found)} numbers, expected one for each {of}: {count}")
    return found


def _missing(n: Node, count: int) -> np.ndarray:
    name = "nodes_missing_value_tracks_true"
    return _listed(n, name, count).astype(bool) if n.attr(name) else np.zeros(count, bool)


def _within(n: Node, name: str, count: int, found: np.ndarray, where: Any = True, named: Callable[[int], str] = "number {}".format) -> Any:
    """The numbers of an attribute, of which those at `where` must be from 0 to below `count`."""
    wrong = np.flatnonzero(((found < 0) | (found >= count)) & where).tolist()
    if wrong:
        raise n.wrong(f"attribute {name} has {found[wrong[0]]} at {named(wrong[0])}, expected 0 to {count - 1}")
    return found


def _named(trees: np.ndarray, ids: np.ndarray) -> Callable[[int], str]:
    return lambda k: f"node {ids[k]} of tree {trees[k]}"


def _check_ways(n: Node, inner: np.ndarray, yes: np.ndarray, no: np.ndarray, named: Callable[[int], str]) -> None:
    """Raise OnnxError if a node is below itself."""
    for name, to in (("nodes_truenodeids", yes), ("nodes_falsenodeids", no)):
        if own := np.flatnonzero(inner & (to == np.arange(len(to)))).tolist():
            raise n.wrong(f"attribute {name}: {named(own[0])} is its own child")
    if circular := without_end(inner, yes, no).tolist():
        raise n.wrong(f"attributes nodes_truenodeids and nodes_falsenodeids: {named(circular[0])} is in a cycle of nodes, or below one")


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
    mode = n.attr("nodes_modes").astype(np.int64).reshape(-1)
    nodes, weight = len(mode), n.attr("leaf_weights").reshape(-1)
    leaves, targets = len(weight), _within(n, "leaf_targetids", n.attr("n_targets", 1), _listed(n, "leaf_targetids", len(weight), "leaf"))
    _within(n, "nodes_modes", len(MODES), mode)

    def child(side: str) -> np.ndarray:
        name = f"nodes_{side}nodeids"
        ids, leaf = _listed(n, name, nodes), _listed(n, f"nodes_{side}leafs", nodes) != 0
        _within(n, name, nodes, ids, ~leaf)
        return np.concatenate([np.where(leaf, _within(n, name, leaves, ids, leaf) + nodes, ids), np.zeros(leaves, np.int64)])

    def padded(given: Any, fill: Any) -> np.ndarray:
        return np.concatenate([np.asarray(given), np.full(leaves, fill)])

    member = np.flatnonzero(mode == MODES.index("BRANCH_MEMBER"))
    sets = _members(n)
    if len(sets) < len(member):
        raise n.wrong(f"attribute membership_values has {len(sets)} sets, but {len(member)} nodes are BRANCH_MEMBER")
    whole, yes, no = padded(mode, -1), child("true"), child("false")
    _check_ways(n, whole >= 0, yes, no, "node {}".format)
    return Forest(
        _within(n, "tree_roots", nodes, np.array(n.attr("tree_roots"), np.int64)),
        padded(_within(n, "nodes_featureids", _MOST, _listed(n, "nodes_featureids", nodes)), 0),
        padded(_listed(n, "nodes_splits", nodes), 0), whole, np.unique(mode), yes, no, padded(_missing(n, nodes), False),
        dict(zip(member.tolist(), sets)), *_entries(np.arange(leaves) + nodes, nodes + leaves, targets, weight),
    )  # fmt: skip


def _members(n: Node) -> list[np.ndarray]:
    """The sets of values, which NaN separates."""
    values = n.attr("membership_values")
    if values is None:
        return []
    return [part[~np.isnan(part)] for part in np.split(values, np.flatnonzero(np.isnan(values)) + 1)]


# -- TreeEnsembleRegressor and TreeEnsembleClassifier: nodes have a tree id and a node id -----------------------------------------


def _ensemble_by_ids(n: Node, kind: str, targets: int) -> Forest:
    """The ensemble whose leaves add to so many targets or classes, by `kind`."""
    modes = np.array([_mode(n, m) for m in n.attr("nodes_modes")])
    inner, count = modes >= 0, len(modes)
    trees, ids = (_within(n, name, _MOST, _listed(n, name, count)) for name in ("nodes_treeids", "nodes_nodeids"))
    key = trees << 31 | ids
    order = np.argsort(key)
    if twice := np.flatnonzero(np.diff(key[order]) == 0).tolist():
        raise n.wrong(f"attributes nodes_treeids and nodes_nodeids list {_named(trees, ids)(order[twice[0]])} twice")

    def place(tree: np.ndarray, node: np.ndarray) -> np.ndarray:
        wanted = tree << 31 | node
        found = order[np.minimum(np.searchsorted(key, wanted, sorter=order), len(order) - 1)]
        if (key[found] != wanted).any() or not ((node >= 0) & (node < _MOST)).all():
            raise n.wrong("it names a node that is in none of its trees")
        return found

    yes, no = (place(trees, np.where(inner, _listed(n, f"nodes_{side}nodeids", count), ids)) for side in ("true", "false"))
    _check_ways(n, inner, yes, no, _named(trees, ids))
    child = np.zeros(count, bool)
    child[yes[inner]] = child[no[inner]] = True
    weight = floats(n, f"{kind}_weights").reshape(-1)
    tree, node, target = (_listed(n, f"{kind}_{name}", len(weight), "weight") for name in ("treeids", "nodeids", "ids"))
    feature = _within(n, "nodes_featureids", _MOST, _listed(n, "nodes_featureids", count), inner, _named(trees, ids))
    return Forest(
        np.flatnonzero(~child), feature, _listed(n, "nodes_values", count), modes, np.unique(modes[inner]), yes, no, _missing(n, count), {},
        *_entries(place(_within(n, f"{kind}_treeids", _MOST, tree), node), count, _within(n, f"{kind}_ids", targets, target), weight),
    )  # fmt: skip


def _mode(n: Node, name: str) -> int:
    if name not in ("LEAF", *MODES):
        raise n.wrong(f"attribute nodes_modes has {name!r}; expected LEAF or one of {', '.join(MODES)}")
    return -1 if name == "LEAF" else MODES.index(name)


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
        return cls._of(n, _ensemble_by_ids(n, "target", targets), targets, aggregate, None)

    @classmethod
    def classifier(cls, n: Node) -> _Ensemble:
        labels = labels_of(n, "classlabels_int64s")
        if labels is None:
            raise n.wrong("it has no class labels")
        return cls._of(n, _ensemble_by_ids(n, "class", len(labels)), len(labels), "SUM", labels)

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
