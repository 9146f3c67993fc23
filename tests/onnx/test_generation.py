"""Generation with a cache: what a session writes for it beforehand, and that every growth gives what one computation would."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper, parser

from fluidx.onnx import OnnxError, session
from fluidx.onnx.cache_inputs import likely_shapes
from fluidx.onnx.sessions import Session

ATTENTION = """<ir_version: 9, opset_import: ["" : 20]>
g (float[batch, new, 4] x, float[batch, total] mask, float[batch, past, 4] old) => (float[batch, new, 4] y, float[batch, total, 4] all) {
    all = Concat <axis = 1> (old, x)
    turned = Transpose <perm = [0, 2, 1]> (all)
    scores = MatMul(x, turned)
    axes = Constant <value_ints = [1]> ()
    wide = Unsqueeze(mask, axes)
    masked = Add(scores, wide)
    weights = Softmax <axis = -1> (masked)
    y = MatMul(weights, all)
}"""


def computed(x, mask, old):
    """The same by NumPy."""
    whole = np.concatenate([old, x], 1)
    weights = np.exp(x @ whole.swapaxes(1, 2) + mask[:, None])
    return weights / weights.sum(-1, keepdims=True) @ whole, whole


def step(rng, batch, new, old):
    def draw(*shape):
        return rng.standard_normal(shape, dtype="float32")

    return {"x": draw(batch, new, 4), "mask": draw(batch, old.shape[1] + new), "old": old}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("growth", [[7, *[1] * 40], [1, 1, 1, 1], [3, 1, 2, 1, 5, 1, 1], [40, 1, 1, 100, 1, 1, 1, 1]])
def test_any_growth_gives_what_one_computation_does(batch, growth):
    """A cache that begins empty and is fed back gets the rows of `growth`; results stay as they were, whatever is written into feeds."""
    s, rng, old, kept = session(parser.parse_model(ATTENTION)), np.random.default_rng(0), np.zeros((batch, 0, 4), "float32"), []
    for new in growth:
        feed = step(rng, batch, new, old)
        want, (y, whole) = computed(**feed), s.run(feed)
        np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-5)
        assert np.array_equal(whole, want[1])
        kept += [(y, y.copy()), (whole, want[1])]
        feed["x"][...] = feed["mask"][...] = np.nan
        old = whole
    assert all(np.array_equal(a, b) for a, b in kept)


def test_prompts_and_steps_of_one_sequence_have_their_programs_before_the_first_run(monkeypatch):
    s, rng, written = session(parser.parse_model(ATTENTION)), np.random.default_rng(0), []
    for method in ("_write", "_import_whole"):
        monkeypatch.setattr(Session, method, lambda self, *given, method=method: written.append(method) or {}[method])
    for prompt in (5, 9, 30):
        feed = step(rng, 1, prompt, np.zeros((1, 0, 4), "float32"))
        for _ in range(6):
            for a, b in zip(s.run(feed), computed(**feed), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            feed = step(rng, 1, 1, computed(**feed)[1])
    assert not written


def test_the_shapes_of_a_cache():
    """One row and any length; any number of rows and no length. A model in which nothing grows, or whose axes have no names, has none."""
    graph = parser.parse_model(ATTENTION).graph
    one = {"x": [1, 1, 4], "mask": [1, "total"], "old": [1, "past", 4]}
    assert likely_shapes(graph, {}) == [one, {"x": [1, "new", 4], "mask": [1, "new"], "old": [1, 0, 4]}]
    assert likely_shapes(parser.parse_model(ATTENTION.replace("[batch, past, 4] old", "[batch, ?, 4] old")).graph, {}) == []
    elsewhere = ATTENTION.replace("float[batch, total, 4] all)", "float[batch, 4, total] turned)")
    assert likely_shapes(parser.parse_model(elsewhere).graph, {}) == []


# -- weights ----------------------------------------------------------------------------------------------------------------------------


def products(given=None):
    """A chain of products with 6 matrices of 1 MB; `given` is the number of bytes that the file has of the first."""
    rng, ends = np.random.default_rng(0), [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 512]) for n in ("v0", "v6")]
    held = [np.linalg.qr(rng.standard_normal((512, 512)))[0].astype("float32") for _ in range(6)]
    tensors = [numpy_helper.from_array(w, f"w{k}") for k, w in enumerate(held)]
    tensors[0].raw_data = tensors[0].raw_data[:given]
    nodes = [helper.make_node("MatMul", [f"v{k}", f"w{k}"], [f"v{k + 1}"]) for k in range(6)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), np.linalg.multi_dot(held)


def test_a_session_has_the_weights_of_a_file_once(tmp_path):
    """Nor is there more while it is made. The model that a caller gives is not changed."""
    made, w = products()
    path, before, x = tmp_path / "m.onnx", made.SerializeToString(), np.ones((3, 512), "float32")
    path.write_bytes(before)
    session(path).run([x])
    tracemalloc.start()
    s = session(path)
    found = [s.run([x[:n]])[0] for n in (1, 2, 3)]
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 1.6 * 6 * 2**20 and peak < 1.7 * 6 * 2**20  # one MB more is no memory of its own: it stands for each array in plans
    path.write_bytes(b"changed")
    for y in (found[2], s.run([x])[0], session(made).run([x])[0]):
        np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
    assert made.SerializeToString() == before


def test_weights_of_another_size_than_their_shape_are_refused():
    made, _ = products(given=-4)
    with pytest.raises(OnnxError, match="tensor 'w0' does not match its shape"):
        session(made.SerializeToString()).run([np.ones((1, 512), "float32")])
