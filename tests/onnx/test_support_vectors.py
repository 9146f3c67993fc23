"""Support vector machines: the C kernel gives what NumPy gives, and both what is worked out by hand."""

import numpy as np
import pytest

from fluidx import native
from fluidx.onnx import OnnxError
from fluidx.onnx.support_vectors import KINDS, SupportVectors
from tests.onnx.test_host import run

ML = {"domain": "ai.onnx.ml", "opset": 3}


def machine(rng, counts, features, kind, degree=3.0):
    total, sums = sum(counts), max(len(counts) - 1, 1)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    vectors, weights = rng.standard_normal((total, features)), rng.standard_normal((sums, total))
    return SupportVectors(vectors, weights, starts, kind, 0.3, 0.2, degree)


@pytest.mark.skipif(bool(native.why_not()), reason="the extension is not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [[1], [37], [3, 4], [5, 0, 21, 7]])
def test_the_kernel_sums_as_numpy_does(kind, counts, monkeypatch):
    rng = np.random.default_rng(0)
    for rows, features, degree in ((0, 3, 2.0), (1, 1, 3.0), (5, 9, 2.0), (131, 17, 0.5)):
        m = machine(rng, counts, features, kind, degree)
        x = np.abs(rng.standard_normal((rows, features))) if kind == "POLY" else rng.standard_normal((rows, features))
        if kind == "POLY":
            m = SupportVectors(np.abs(m.vectors), *[getattr(m, f) for f in ("weights", "starts", "kind", "gamma", "bias", "degree")])
        pairs = len(counts) * (len(counts) - 1) // 2
        rho, a, b = rng.standard_normal((3, pairs))
        found = m.sums(x), m.pairs(x, rho), m.pairs(x, rho, a, b)
        with monkeypatch.context() as env:
            env.setenv("FLUIDX_KERNELS", "numpy")
            wanted = m.sums(x), m.pairs(x, rho), m.pairs(x, rho, a, b)
        assert np.allclose(found[0], wanted[0], rtol=1e-11, atol=1e-11)
        for g, w in zip(found[1:], wanted[1:], strict=True):
            assert np.allclose(g.scores, w.scores, rtol=1e-11, atol=1e-11) and np.array_equal(g.wins, w.wins)
            assert (g.shares is None) == (w.shares is None)
            if g.shares is not None and len(counts) > 1:
                assert np.allclose(g.shares, w.shares, rtol=1e-8, atol=1e-10) and np.allclose(g.shares.sum(1), 1)


def test_by_hand():
    """Two vectors, 0 and (3, 4), and a row at (3, 4): distances of 25 and 0."""
    x, vectors, starts = np.array([[3.0, 4.0]]), np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([0, 1, 2])
    weights = np.array([[2.0, 5.0]])
    of = {kind: SupportVectors(vectors, weights, starts, kind, 0.1, 1.0, 2.0).sums(x).ravel() for kind in KINDS}
    assert of["LINEAR"].tolist() == [0, 125]
    assert np.allclose(of["RBF"], [2 * np.exp(-2.5), 5], rtol=1e-14)
    assert np.allclose(of["POLY"], [2, 5 * 3.5**2], rtol=1e-14)
    assert np.allclose(of["SIGMOID"], [2 * np.tanh(1), 5 * np.tanh(3.5)], rtol=1e-14)
    pairs = SupportVectors(vectors, weights, starts, "LINEAR", 0.1, 1.0, 2.0).pairs(x, np.array([-126.0]))
    assert pairs.scores.tolist() == [[-1]] and pairs.wins.tolist() == [[0, 1]]


def test_numbers_that_are_none_stay_so():
    """A kernel of an endless distance is 0, and of no number no number."""
    m = machine(np.random.default_rng(0), [20], 3, "RBF")
    found = m.sums(np.array([[np.nan, 0, 0], [np.inf, 0, 0], [1e200, 0, 0], [0, 0, 0]])).ravel()
    assert np.isnan(found[0]) and found[1:3].tolist() == [0, 0] and np.isfinite(found[3])


@pytest.mark.parametrize(
    ("attrs", "said"),
    [
        ({"support_vectors": [1.0] * 5}, "it has 2 support vectors, which 5 numbers and 2 coefficients do not fit"),
        ({"coefficients": [1.0] * 3}, "it has 2 support vectors, which 6 numbers and 3 coefficients do not fit"),
        ({"rho": [0.1, 0.2]}, "2 classes have 1 pairs; found 2 rho, 0 prob_a and 0 prob_b"),
        ({"kernel_type": "CUBE"}, "kernel_type must be LINEAR, POLY, RBF or SIGMOID, found 'CUBE'"),
        ({"support_vectors": [1.0] * 8}, "its support vectors have 4 features, the input has shape"),
        ({"vectors_per_class": [3, -1]}, r"numbers of support vectors must be integers of at least 0, found \[3, -1\]"),
        ({"classlabels_ints": [7, 8, 9]}, "vectors_per_class has 2 classes, but there are 3 labels of classes"),
        ({"vectors_per_class": [1, 1, 0], "coefficients": [1.0] * 4}, "vectors_per_class has 3 classes, but there are 2 labels of classes"),
        ({"vectors_per_class": [2], "classlabels_ints": [7]}, "vectors_per_class has one class; .* compares two or more"),
        ({"vectors_per_class": [0, 0], "coefficients": [1.0] * 5}, "5 coefficients do not divide evenly among 2 classes"),
        ({"vectors_per_class": [0, 0]}, "its coefficients are for 1 features, the input has shape"),
    ],
)
def test_sizes_that_do_not_fit_are_named(attrs, said):
    whole = {
        "support_vectors": [1.0] * 6,
        "coefficients": [1.0, -1.0],
        "rho": [0.5],
        "vectors_per_class": [1, 1],
        "classlabels_ints": [0, 1],
    }
    with pytest.raises(OnnxError, match=said):
        run("SVMClassifier", np.ones((2, 3), "float32"), outputs=2, **ML, **{**whole, **attrs})


MOST = 2**63 - 1


@pytest.mark.parametrize("counts", [[MOST, MOST, 5], [2**62, 2**62, 2**62, 2**62 + 3], [MOST, 4]])
def test_numbers_of_vectors_that_have_more_than_64_bits_together_are_named(counts):
    """In 64 bits, each sum of these would wrap to a small number, or to a negative one."""
    sums = len(counts) - 1
    sizes = {"support_vectors": [1.0] * 9, "coefficients": [1.0] * (3 * sums), "rho": [0.0] * (len(counts) * sums // 2)}
    attrs = {**sizes, "vectors_per_class": counts, "classlabels_ints": list(range(len(counts))), "kernel_type": "RBF"}
    with pytest.raises(OnnxError, match=f"it has {sum(counts)} support vectors, which 9 numbers and {3 * sums} coefficients do not fit"):
        run("SVMClassifier", np.ones((2, 3), "float32"), outputs=2, **ML, **{**attrs, "kernel_params": [0.5, 0.0, 0.0]})


@pytest.mark.parametrize("supports", [MOST, -1])
def test_a_regressor_of_another_number_of_vectors_is_named(supports):
    with pytest.raises(OnnxError, match="support vectors"):
        held = {"support_vectors": [1.0] * 6, "coefficients": [1.0] * 2, "rho": [0.0]}
        run("SVMRegressor", np.ones((2, 3), "float32"), **ML, n_supports=supports, **held)


def test_a_regressor_needs_the_number_that_it_adds_and_coefficients_of_all_features():
    x = np.array([[1.0, 2.0, 3.0]], "float32")
    assert run("SVMRegressor", x, **ML, coefficients=[1.0, 0.0, 2.0], rho=[0.5]).tolist() == [[7.5]]
    with pytest.raises(OnnxError, match="attribute rho is missing or empty"):
        run("SVMRegressor", x, **ML, n_supports=1, support_vectors=[1.0] * 3, coefficients=[1.0])
    with pytest.raises(OnnxError, match=r"its coefficients are for 2 features, the input has shape \[1, 3\]"):
        run("SVMRegressor", x, **ML, coefficients=[1.0, 0.0], rho=[0.5])
