"""Strings, random numbers, boxes and optimizers: by the text of the specification, and ONNX Runtime where it is installed."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from fluidx.onnx import OnnxError, load, session  # noqa: E402


def one(op, inputs, outputs=1, domain="", opset=18, **attrs):
    """The model of one node."""
    from onnx import TensorProto, helper

    def info(name, value):
        kind = TensorProto.STRING if value.dtype.kind == "O" else helper.np_dtype_to_tensor_dtype(value.dtype)
        return helper.make_tensor_value_info(name, kind, value.shape)

    ins, outs = [f"i{k}" for k in range(len(inputs))], [f"o{k}" for k in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, ins, outs, domain=domain, **attrs)], "one", [info(n, v) for n, v in zip(ins, inputs)],
        [helper.make_empty_tensor_value_info(o) for o in outs],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 24)] + ([helper.make_opsetid(domain, opset)] if domain else [])
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(op, *inputs, **more):
    found = session(one(op, inputs, **more)).run(list(inputs))
    return found[0] if len(found) == 1 else found


def texts(*values):
    return np.array(values, object)


# -- strings -----------------------------------------------------------------------------------------------------------------------


def test_strings_are_split_at_a_delimiter_or_at_space():
    parts, counts = run("StringSplit", texts("a,b,,c", ""), outputs=2, delimiter=",")
    assert parts.tolist() == [["a", "b", "", "c"], ["", "", "", ""]] and counts.tolist() == [4, 1]
    parts, counts = run("StringSplit", texts(" a  b c"), outputs=2, maxsplit=1)
    assert parts.tolist() == [["a", "b c"]] and counts.tolist() == [2]


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [(r"a.c", "abc", True), (r"a.c", "abcd", False), (r"[[:digit:]]+\z", "123", True), (r"\Qa.c\E", "abc", False),
     (r"\Qa.c\E", "a.c", True), (r"\w+", "é", False)],
)  # fmt: skip
def test_patterns_are_those_of_re2(pattern, text, matches):
    assert run("RegexFullMatch", texts(text), pattern=pattern).tolist() == [matches]


def test_a_pattern_that_is_none_is_an_error():
    with pytest.raises(OnnxError, match="cannot use the pattern"):
        run("RegexFullMatch", texts("a"), pattern="(")


def test_stop_words_go_and_a_text_of_them_alone_becomes_empty():
    assert run("StringNormalizer", texts("A", "b", "the"), stopwords=["THE"], case_change_action="UPPER").tolist() == ["A", "B"]
    assert run("StringNormalizer", np.array([["the"]], object), stopwords=["the"]).tolist() == [[""]]


def test_n_grams_are_counted_with_gaps_and_weighed():
    # [94, 17, 36, 12, 28] with no item skipped has (94, 17) and (17, 36); with one skipped (17, 12) too
    attrs = {
        "pool_int64s": [94, 94, 17, 17, 12],
        "ngram_counts": [0, 1],
        "ngram_indexes": [2, 0, 1],
        "min_gram_length": 1,
        "max_gram_length": 2,
    }
    x = np.array([94, 17, 36, 12, 94])
    assert run("TfIdfVectorizer", x, mode="TF", max_skip_count=0, **attrs).tolist() == [1, 0, 2]
    assert run("TfIdfVectorizer", x, mode="TF", max_skip_count=1, **attrs).tolist() == [1, 1, 2]
    assert run("TfIdfVectorizer", x, mode="IDF", max_skip_count=1, weights=[5.0, 3.0, 4.0], **attrs).tolist() == [3, 4, 5]


# -- pictures ----------------------------------------------------------------------------------------------------------------------


def test_a_picture_that_is_fed_is_not_taken_for_one_that_cannot_be_read():
    model = '<ir_version: 10, opset_import: ["" : 20]> g (uint8[n] x) => (uint8[h, w, 3] y) { y = ImageDecoder (x) }'
    with pytest.raises(OnnxError, match="needs the value of 'x'"):
        load(onnx.parser.parse_model(model))


# -- random numbers ----------------------------------------------------------------------------------------------------------------


def test_numbers_are_drawn_anew_in_each_run_and_alike_for_a_seed():
    model = one("RandomNormal", (), shape=[1000], mean=3.0, scale=2.0, seed=7.0)
    a, b = session(model), session(model)
    first, second = a.run([])[0], a.run([])[0]
    assert not np.array_equal(first, second) and np.array_equal(first, b.run([])[0])
    assert abs(first.mean() - 3) < 0.3 and abs(first.std() - 2) < 0.2  # 5 and 4 times the standard error


def test_a_multinomial_draws_classes_by_their_unnormalized_log_probability():
    x = np.log(np.float32([[1, 3, 0.001], [0.001, 0.001, 5]])) + 4
    found = run("Multinomial", x, sample_size=400, dtype=onnx.TensorProto.INT64)
    assert found.dtype == np.int64 and found.shape == (2, 400)
    share = (found[0] == 1).mean()
    assert abs(share - 0.75) < 0.11 and (found[1] == 2).mean() > 0.95  # 5 times the standard error of 400 draws


def test_bernoulli_gives_its_ones_with_the_probability_of_each_element():
    found = run("Bernoulli", np.float32([0, 1] * 50), dtype=onnx.TensorProto.INT32)
    assert found.dtype == np.int32 and found.tolist() == [0, 1] * 50


# -- boxes -------------------------------------------------------------------------------------------------------------------------


def test_boxes_that_cover_a_better_one_are_left_away():
    boxes = np.float32([[[0, 0, 1, 1], [1, 1.1, 0, 0.1], [5, 5, 6, 6]]])  # the second by other corners
    scores = np.float32([[[0.5, 0.9, 0.3]]])
    most, overlap, least = np.array([5]), np.float32([0.5]), np.float32([0.0])
    assert run("NonMaxSuppression", boxes, scores, most, overlap, least).tolist() == [[0, 0, 1], [0, 0, 2]]
    assert run("NonMaxSuppression", boxes, scores, most, overlap, np.float32([0.4])).tolist() == [[0, 0, 1]]
    assert run("NonMaxSuppression", boxes, scores, np.array([1]), np.float32([0.99]), least).tolist() == [[0, 0, 1]]


def test_suppression_agrees_with_onnx_runtime():
    ort = pytest.importorskip("onnxruntime")
    rng = np.random.RandomState(0)
    inputs = [
        rng.rand(2, 30, 4).astype(np.float32),
        rng.rand(2, 3, 30).astype(np.float32),
        np.array([7]),
        np.float32([0.3]),
        np.float32([0.2]),
    ]
    for centered in (0, 1):
        model = one("NonMaxSuppression", inputs, center_point_box=centered)
        model.opset_import[0].version = 18
        feed = {f"i{k}": v for k, v in enumerate(inputs)}
        (want,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
        assert np.array_equal(session(model).run(feed)[0], want)


# -- optimizers --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3])
def test_a_step_of_adam_is_that_of_the_specification(step):
    r, t = np.array(0.1, np.float32), np.array(step)
    x, g, v, h = np.float32([[1, -2], [0.5, -1], [0.1, 0.2], [0.3, 0.4]])
    alpha, beta, eps = 0.9, 0.99, 1e-3
    new_v, new_h = alpha * v + (1 - alpha) * g, beta * h + (1 - beta) * g * g
    rate = 0.1 * (np.sqrt(1 - beta**step) / (1 - alpha**step) if step else 1)
    want = x - rate * new_v / (np.sqrt(new_h) + eps)
    attrs = {"alpha": alpha, "beta": beta, "epsilon": eps}
    found = run("Adam", r, t, x, g, v, h, outputs=3, domain="ai.onnx.preview.training", opset=1, **attrs)
    for a, b in zip(found, (want, new_v, new_h), strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-6)  # float32 against float64
