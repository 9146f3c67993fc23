"""Forests: rows go down by the C kernel as they do by NumPy, and what is damaged ends."""

import numpy as np
import pytest

from fluidx import native
from fluidx.onnx.errors import OnnxError
from fluidx.onnx.tree_ensemble import MODES, Forest, without_end
from tests.onnx.test_host import run


def forest(rng, trees, depth, targets, modes, dtype="float32"):
    """Whole trees of so many levels; leaves say nothing, one thing or two."""
    size = 2 ** (depth + 1) - 1
    here = np.arange(size)
    leaf = np.tile(here >= size // 2, trees)
    base = np.repeat(np.arange(trees) * size, size)
    counts = np.where(leaf, rng.integers(0, 3, trees * size), 0)
    child = np.where(leaf, 0, 2 * np.tile(here, trees) + base + 1)
    mode = np.where(leaf, -1, rng.choice(modes, trees * size))
    return Forest(
        np.arange(trees) * size, rng.integers(0, 5, trees * size), rng.integers(-2, 3, trees * size).astype(dtype), mode,
        np.unique(mode[~leaf]), child, np.where(leaf, 0, child + 1), rng.random(trees * size) < 0.5, {},
        np.cumsum(counts) - counts, counts, rng.integers(0, targets, counts.sum()), rng.standard_normal(counts.sum()),
    )  # fmt: skip


@pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [[0], [1, 3], range(6)])
def test_the_kernel_goes_where_numpy_goes(modes, how, monkeypatch):
    rng = np.random.default_rng(0)
    for rows, dtype, splits in ((1, "f4", "f4"), (200, "f4", "f8"), (70, "f8", "f4"), (0, "f4", "f4")):
        f = forest(rng, 7, 3, 3, list(modes), splits)
        x = rng.integers(-3, 4, (rows, 5)).astype(dtype)  # whole numbers meet the splits
        x[rng.random(x.shape) < 0.1] = np.nan
        assert f._by_c_kernel(x, 3, how) is not None
        found = f.combined(x, 3, how)
        with monkeypatch.context() as m:
            m.setenv("FLUIDX_KERNELS", "numpy")
            assert np.array_equal(f.combined(x, 3, how), found)


@pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")
def test_calls_for_few_rows_are_kept_and_give_results_of_their_own():
    rng = np.random.default_rng(0)
    f = forest(rng, 11, 4, 2, [0])
    rows = [rng.integers(-3, 4, (2, 5)).astype("f4") for _ in range(3)]
    found = [f.combined(x, 2, "SUM") for x in rows]
    assert len(f._calls._free) == 1
    for x, one in zip(rows, found):
        assert np.array_equal(f._part(x, 2, "SUM"), one)
    for many in range(1, 16):  # no more are kept than a few
        f.combined(np.zeros((many, 5), "f4"), 2, "SUM")
    assert 0 < len(f._calls._free) <= 8


def test_numpy_takes_what_the_kernel_does_not():
    rng = np.random.default_rng(0)
    f = forest(rng, 2, 2, 2, [0])
    x = np.zeros((3, 5), "float32")
    assert f._by_c_kernel(x[:, :1], 2, "SUM") is None and f._by_c_kernel(x, 1, "SUM") is None
    assert f._by_c_kernel(x.astype("float16"), 2, "SUM") is None
    f = forest(rng, 2, 2, 2, [0])
    f.mode[0] = MODES.index("BRANCH_MEMBER")
    assert f._by_c_kernel(x, 2, "SUM") is None


def test_a_way_back_is_found_out():
    f = forest(np.random.default_rng(0), 1, 2, 1, [0])
    f.yes[1:3] = f.no[1:3] = 0
    with pytest.raises(OnnxError, match="has a cycle"):
        f.combined(np.zeros((2, 5), "float32"), 1, "SUM")


# -- files that cannot be right ---------------------------------------------------------------------------------------------------

ROWS = np.array([[0.0, 9, 9], [1.0, 9, 9]], "float32")
ONE = {
    "nodes_treeids": [4, 4, 4], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0], "nodes_values": [0.5, 0.0, 0.0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
    "target_treeids": [4, 4], "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0], "n_targets": 1,
}  # fmt: skip
TWO = {  # node 0 has a leaf and node 1, and that has two leaves
    **ONE, "nodes_treeids": [4] * 5, "nodes_nodeids": [0, 1, 2, 3, 4], "nodes_featureids": [0] * 5, "nodes_values": [0.5] * 5,
    "nodes_modes": ["BRANCH_LEQ"] * 2 + ["LEAF"] * 3, "nodes_truenodeids": [1, 3, 0, 0, 0], "nodes_falsenodeids": [2, 4, 0, 0, 0],
    "target_treeids": [4] * 3, "target_nodeids": [2, 3, 4], "target_ids": [0] * 3, "target_weights": [1.0, 2.0, 3.0],
}  # fmt: skip


def scored(attrs):
    return run("TreeEnsembleRegressor", ROWS, domain="ai.onnx.ml", opset=3, **attrs)


def test_small_trees_by_hand():
    assert scored(ONE).tolist() == [[1], [2]] and scored(TWO).tolist() == [[2], [1]]
    assert scored({**ONE, "nodes_featureids": [0, -1, -1]}).tolist() == [[1], [2]]  # a leaf reads no column


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        ({"nodes_featureids": [-1, 0, 0]}, "attribute nodes_featureids has -1 at node 0 of tree 4"),
        ({"nodes_featureids": [2**63 - 1, 0, 0]}, "attribute nodes_featureids has 9223372036854775807 at node 0 of tree 4"),
        ({"nodes_featureids": [3, 0, 0]}, "attribute nodes_featureids names feature 3, but the input has 3 columns"),
        ({"nodes_values": [0.5]}, "attribute nodes_values has 1 numbers, expected one for each node: 3"),
        ({"nodes_truenodeids": [1]}, "attribute nodes_truenodeids has 1 numbers, expected one for each node: 3"),
        ({"target_ids": [0]}, "attribute target_ids has 1 numbers, expected one for each weight: 2"),
        ({"target_ids": [0, 1]}, "attribute target_ids has 1 at number 1, expected 0 to 0"),
        ({"target_ids": [0, -1]}, "attribute target_ids has -1 at number 1"),
        ({"nodes_truenodeids": [0, 0, 0]}, "attribute nodes_truenodeids: node 0 of tree 4 is its own child"),
        ({"nodes_falsenodeids": [0, 0, 0]}, "attribute nodes_falsenodeids: node 0 of tree 4 is its own child"),
        ({"nodes_truenodeids": [2**63 - 1, 0, 0]}, "it names a node that is in none of its trees"),
        ({"nodes_nodeids": [0, 1, 1]}, "nodes_treeids and nodes_nodeids list node 1 of tree 4 twice"),
        ({"nodes_nodeids": [0, 1, 2**63 - 1]}, "attribute nodes_nodeids has 9223372036854775807 at number 2"),
        ({"nodes_modes": ["BRANCH", "LEAF", "LEAF"]}, "attribute nodes_modes has 'BRANCH'; expected LEAF or one of BRANCH_LEQ"),
        ({**TWO, "nodes_truenodeids": [1, 0, 0, 0, 0]}, "node 0 of tree 4 is in a cycle of nodes, or below one"),
    ],
)
def test_attributes_that_cannot_be_right_are_named(attrs, said):
    with pytest.raises(OnnxError, match=said):
        scored({**ONE, **attrs})


def test_nodes_with_two_parents_are_no_cycle():
    inner, yes, no = np.array([True, True, True, False]), np.array([1, 2, 3, 0]), np.array([2, 2, 3, 0])
    assert without_end(inner, yes, no).tolist() == []
