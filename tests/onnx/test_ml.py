"""Classical models: by the text of the specification, and as ONNX Runtime scores them where it is installed."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import fluidx as fx  # noqa: E402
from fluidx.onnx import OnnxError, load, session  # noqa: E402
from tests.onnx.test_host import one, run, texts  # noqa: E402

ML = {"domain": "ai.onnx.ml", "opset": 3}


def agrees(op, *inputs, tol=1e-5, outputs=1, **attrs):
    """float32 sums in another order: `tol` allows for some units in the last place."""
    ort = pytest.importorskip("onnxruntime")
    model = one(op, inputs, outputs=outputs, **ML, **attrs)
    model.opset_import[0].version = 18
    feed = {f"i{k}": v for k, v in enumerate(inputs)}
    options = ort.SessionOptions()
    options.log_severity_level = 4
    want = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feed)
    for g, w in zip(session(model).run(feed), want, strict=True):
        w = np.asarray(w)
        assert g.shape == w.shape
        if w.dtype.kind == "f":
            assert g.dtype == w.dtype and np.allclose(g, w, rtol=tol, atol=tol)
        else:
            assert g.tolist() == w.tolist()


X = np.random.RandomState(0).randn(8, 3).astype(np.float32)


def test_labels_are_encoded_by_key_or_by_default():
    x = texts("b", "a", "z")
    assert run("LabelEncoder", x, **ML, keys_strings=["a", "b"], values_int64s=[7, 8]).tolist() == [8, 7, -1]
    assert run("LabelEncoder", np.array([1, 5]), **ML, keys_int64s=[5], values_strings=["five"]).tolist() == ["_Unused", "five"]
    keys = {"keys_floats": [float("nan")], "values_floats": [2.0], "default_float": 1.0}
    assert run("LabelEncoder", np.float32([0, np.nan]), **ML, **keys).tolist() == [1, 2]


def test_maps_are_dicts():
    assert run("ZipMap", np.float32([[1, 2], [3, 4]]), **ML, classlabels_strings=["a", "b"]) == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    model = one("DictVectorizer", [texts("")], **ML, string_vocabulary=["a", "c", "b", "z"])
    assert session(model).run([{"a": 4, "c": 8}])[0].tolist() == [[4, 8, 0, 0]]
    model = one("CastMap", [texts("")], **ML, cast_to="TO_FLOAT", map_form="SPARSE", max_map=4)
    assert session(model).run([{3: 5, 0: 2}])[0].tolist() == [[2, 0, 0, 5]]


def test_features_are_scaled_filled_in_and_cut():
    x = np.float32([[1, np.nan], [np.nan, 4]])
    assert run("Imputer", x, **ML, imputed_value_floats=[7.0, 8.0], replaced_value_float=float("nan")).tolist() == [[1, 8], [7, 4]]
    assert run("Scaler", np.array([[1, 2]]), **ML, offset=[1.0, 0.0], scale=[2.0, 3.0]).tolist() == [[0, 6]]
    assert run("Binarizer", np.float32([[0.5, 0.6]]), **ML, threshold=0.5).tolist() == [[0, 1]]
    assert run("FeatureVectorizer", np.array([[1], [2]]), np.float32([[3, 4], [5, 6]]), **ML, inputdimensions=[1, 2]).tolist() == [
        [1, 3, 4],
        [2, 5, 6],
    ]
    with pytest.raises(OnnxError, match="9 is not one of its categories"):
        run("OneHotEncoder", np.array([9]), **ML, cats_int64s=[1, 2], zeros=0)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_rows_are_normalized(norm):
    agrees("Normalizer", np.vstack([X, np.zeros((1, 3), np.float32)]), norm=norm)


@pytest.mark.parametrize("how", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
def test_linear_models(how):
    agrees("LinearRegressor", X, coefficients=[1.0, 2, 3, -1, 0, 1], intercepts=[0.5, -0.5], targets=2, post_transform=how)
    agrees("LinearClassifier", X, outputs=2, coefficients=[1.0, 2, 3], intercepts=[0.5], classlabels_strings=["n", "y"], post_transform=how)
    agrees(
        "LinearClassifier",
        X,
        outputs=2,
        coefficients=[1.0, 2, 3, -1, 0, 1],
        intercepts=[0.5, -0.5],
        classlabels_ints=[4, 9],
        post_transform=how,
    )


@pytest.mark.parametrize("kind", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vectors(kind):
    rng = np.random.RandomState(1)
    kernel = {"kernel_type": kind, "kernel_params": [0.3, 0.2, 3.0]}
    agrees("SVMRegressor", X, n_supports=4, coefficients=rng.randn(4), support_vectors=rng.randn(12), rho=[0.3], tol=1e-4, **kernel)
    for counts in ([2, 3], [2, 3, 2]):
        size, pairs = sum(counts), len(counts) * (len(counts) - 1) // 2
        svc = {"coefficients": rng.randn((len(counts) - 1) * size), "support_vectors": rng.randn(3 * size), "rho": rng.randn(pairs)}
        more = {"vectors_per_class": counts, "classlabels_ints": list(range(len(counts))), **kernel}
        agrees("SVMClassifier", X, outputs=2, tol=2e-4, **svc, **more)
        agrees("SVMClassifier", X, outputs=2, tol=2e-4, **svc, **more, prob_a=-1 - rng.rand(pairs), prob_b=rng.randn(pairs))


def forest(rng, trees, depth, modes, kind, targets):
    """The attributes of full binary trees."""
    inner = 2**depth - 1
    ids = [(t, k) for t in range(trees) for k in range(2 * inner + 1)]
    leaves = [(t, k) for t, k in ids if k >= inner]
    attrs = {
        "nodes_treeids": [t for t, _ in ids],
        "nodes_nodeids": [k for _, k in ids],
        "nodes_modes": ["LEAF" if k >= inner else modes[rng.randint(len(modes))] for _, k in ids],
        "nodes_featureids": rng.randint(3, size=len(ids)).tolist(),
        "nodes_values": np.round(rng.randn(len(ids)), 1).tolist(),
        "nodes_truenodeids": [0 if k >= inner else 2 * k + 1 for _, k in ids],
        "nodes_falsenodeids": [0 if k >= inner else 2 * k + 2 for _, k in ids],
        "nodes_missing_value_tracks_true": rng.randint(2, size=len(ids)).tolist(),
        f"{kind}_treeids": [t for t, _ in leaves for _ in targets],
        f"{kind}_nodeids": [k for _, k in leaves for _ in targets],
        f"{kind}_ids": [j for _ in leaves for j in targets],
        f"{kind}_weights": rng.randn(len(leaves) * len(targets)).tolist(),
    }
    return attrs


ROWS = np.round(np.random.RandomState(2).randn(40, 3), 1).astype(np.float32)
ROWS[5, 1] = np.nan
MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]


@pytest.mark.parametrize("modes", [MODES[:1], MODES])
@pytest.mark.parametrize("how", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_trees_that_regress(how, modes):
    attrs = forest(np.random.RandomState(3), 5, 3, modes, "target", [0, 1])
    agrees("TreeEnsembleRegressor", ROWS, n_targets=2, aggregate_function=how, base_values=[0.5, -1.0], **attrs)


@pytest.mark.parametrize("how", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
def test_trees_that_classify(how):
    attrs = forest(np.random.RandomState(4), 5, 3, MODES[:2], "class", [0, 1, 2])
    agrees("TreeEnsembleClassifier", ROWS, outputs=2, classlabels_int64s=[3, 4, 5], post_transform=how, **attrs)
    attrs = forest(np.random.RandomState(5), 5, 3, MODES[:2], "class", [0])
    agrees("TreeEnsembleClassifier", ROWS, outputs=2, classlabels_strings=["n", "y"], base_values=[0.2], post_transform=how, **attrs)


def test_a_weight_of_a_node_that_no_tree_has_is_an_error():
    attrs = forest(np.random.RandomState(4), 1, 1, MODES[:1], "target", [0])
    attrs["target_nodeids"] = [1, 77]
    with pytest.raises(OnnxError, match="names a node that is in none of its trees"):
        run("TreeEnsembleRegressor", ROWS, **ML, n_targets=1, **attrs)


ML_NAME = "ai.onnx.ml"


@pytest.mark.parametrize("domains", [(ML_NAME, ML_NAME, ""), ("", ML_NAME, "ai.onnx"), (ML_NAME, "", "ai.onnx", ML_NAME)])
@pytest.mark.parametrize("kind", ["forest", "machine", "linear"])
def test_models_that_import_an_opset_twice(kind, domains):
    """As skl2onnx writes some. By hand: x0 <= 1 gives 5, else 7; a machine of one vector v = (2, 0) gives 3 * (x . v) + 0.5, which is the
    linear model 6 x0 + 0.5."""
    from onnx import helper

    tree = {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0], "nodes_values": [1.0, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0],
        "target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [5.0, 7.0], "n_targets": 1,
    }  # fmt: skip
    machine = {"n_supports": 1, "support_vectors": [2.0, 0.0], "coefficients": [3.0], "rho": [0.5], "kernel_type": "LINEAR"}
    linear = {"coefficients": [6.0, 0.0], "intercepts": [0.5]}
    op = {"forest": "TreeEnsembleRegressor", "machine": "SVMRegressor", "linear": "LinearRegressor"}[kind]
    attrs = {"forest": tree, "machine": machine, "linear": linear}[kind]
    want = [[5], [7]] if kind == "forest" else [[3.5], [15.5]]
    x = np.float32([[0.5, 9], [2.5, 9]])
    model = one(op, [x], domain=ML_NAME, opset=1, **attrs)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("o0", 1, ["rows", 1]))
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(domain, 1 if domain == ML_NAME else 18) for domain in domains)
    assert session(model.SerializeToString()).run([x])[0].tolist() == want
    if kind != "linear":
        return  # a program has no such operators
    loaded = load(model)
    executor, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    with fx.scope_guard(scope):
        executor.run(loaded.startup)
        assert executor.run(loaded.program, feed={loaded.feeds[0].name: x}, fetch_list=loaded.fetches)[0].tolist() == want
