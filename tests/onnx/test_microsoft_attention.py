"""Attention of ONNX Runtime's own domain, compared with it."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

from tests.onnx import one_node  # noqa: E402 (after the check for onnx)
from tests.onnx.test_microsoft import F, S, U, eight, f, normal, same  # noqa: E402 (after the check for onnx)


def ones(rows, columns, *lengths, dtype="int32"):
    """A mask that shows the first `lengths` columns of each row."""
    return (np.arange(columns) < np.array(lengths)[:, None]).astype(dtype).reshape(rows, columns)


X3, W, WB = normal(2, 3, 8), normal(8, 24), normal(24)
PAST = normal(2, 2, 2, 5, 4)


@pytest.mark.parametrize(
    ("inputs", "outputs", "attrs"),
    [
        ([X3, W, WB], 1, {}),
        ([X3, W, WB], 1, {"unidirectional": 1, "scale": 0.3}),
        ([X3, W, None], 1, {}),
        ([X3, W, WB, ones(2, 3, 2, 3)], 1, {}),
        ([X3, W, WB, ones(2, 3, 2, 3), None, normal(1, 2, 3, 3)], 1, {"mask_filter_value": -50.0}),
        ([X3, W, WB, np.tril(np.ones((2, 3, 3), "int32"))], 1, {}),
        ([X3, W, WB, np.array([2, 3], "int32")], 1, {}),
        ([X3, W, WB, np.array([3, 3, 1, 0], "int32")], 1, {}),
        ([X3, W, WB, None, PAST], 2, {}),
        ([X3, W, WB, None, PAST], 2, {"unidirectional": 1}),
        ([X3, W, WB, ones(2, 8, 7, 8), PAST], 2, {"unidirectional": 1}),
        ([X3, normal(8, 20), normal(20)], 1, {"qkv_hidden_sizes": [8, 8, 4]}),
    ],
)  # fmt: skip
def test_attention(inputs, outputs, attrs):
    same("Attention", inputs, outputs, known=(1, 2), num_heads=2, atol=1e-5, **attrs)


def test_quantized_attention():
    x, w = eight(2, 3, 8), eight(8, 24, signed=True)
    inputs = [x, w, WB, f(0.02), f(0.01), np.array([2, 3], "int32"), U, S]
    same("QAttention", inputs, known=(1, 2, 3, 4, 6, 7), num_heads=2, atol=1e-4)


Q, K, V, BIAS = normal(2, 3, 8), normal(2, 5, 8), normal(2, 5, 8, seed=1), normal(24)


@pytest.mark.parametrize(
    ("inputs", "outputs", "attrs"),
    [
        ([Q, K, V], 1, {}),
        ([Q, K, normal(2, 5, 12)], 1, {"scale": 0.7}),
        ([Q, K, V, BIAS], 1, {}),
        ([Q, normal(2, 2, 5, 4), normal(2, 2, 5, 4, seed=1)], 1, {}),
        ([Q, normal(2, 2, 5, 4), normal(2, 2, 5, 4, seed=1), BIAS], 1, {}),
        ([Q, K, V, None, ones(2, 5, 2, 5)], 1, {}),
        ([Q, K, V, None, np.array([2, 5], "int32")], 1, {}),
        ([Q, K, V, None, None, normal(1, 1, 3, 5)], 1, {}),
        ([Q, Q, V[:, :3], BIAS, ones(2, 7, 6, 7), normal(2, 2, 3, 7), *PAST[:, :, :, :4]], 3, {}),
        ([Q, Q, V[:, :3]], 3, {"unidirectional": 1}),
        ([Q, Q, V[:, :3], None, None, None, *PAST], 3, {"unidirectional": 1}),
    ],
)  # fmt: skip
def test_multi_head_attention(inputs, outputs, attrs):
    inputs = [v if v is None else np.ascontiguousarray(v) for v in inputs]
    same("MultiHeadAttention", inputs, outputs, num_heads=2, atol=1e-5, **attrs)


def test_packed_heads():
    """[batch, rows, heads, 3, width], which CPUs of ONNX Runtime lack, is the same as three operands."""
    q, k, v = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(2, 3, 8, seed=2)
    apart = [x.reshape(2, 3, 2, 4) for x in (q, k, v)]
    attrs = {"num_heads": 2, "domain": "com.microsoft"}
    want = one_node.ran("MultiHeadAttention", [q, k, v, BIAS], **attrs)
    for packed in ([np.stack(apart, 3), None, None], [q, np.stack(apart[1:], 3), None]):
        np.testing.assert_allclose(one_node.ran("MultiHeadAttention", [*packed, BIAS], **attrs), want, rtol=1e-5, atol=1e-6)


TABLES = [np.cos(normal(9, 2)), np.sin(normal(9, 2))]


@pytest.mark.parametrize(("x", "at", "attrs"), [
    (normal(2, 3, 8), np.array([4], "int64"), {}),
    (normal(2, 3, 8), np.array([[1, 2, 3], [0, 5, 8]], "int64"), {"interleaved": 1}),
    (normal(2, 2, 3, 4), np.array([[1, 2, 3], [0, 5, 8]], "int64"), {}),
    (normal(2, 3, 12), np.array([0], "int64"), {"num_heads": 2, "rotary_embedding_dim": 4}),
])  # fmt: skip
def test_rotary_embedding(x, at, attrs):
    same("RotaryEmbedding", [x, at, *TABLES], known=(2, 3), **attrs)


def grouped(batch, rows, held, ends, total, *more, packed=False, heads=4, few=2, width=16):
    """The operands of a GroupQueryAttention."""
    new = [normal(batch, rows, heads * width), normal(batch, rows, few * width), normal(batch, rows, few * width, seed=1)]
    new = [np.concatenate(new, -1), None, None] if packed else new
    cache = [normal(batch, few, held, width, seed=k) for k in (2, 3)]
    return [*new, *cache, np.array(ends, "int32") - 1, np.array(total, "int32"), *more]


WIDE = [np.cos(normal(12, 8)), np.sin(normal(12, 8))]


@pytest.mark.parametrize(
    ("inputs", "attrs"),
    [
        (grouped(1, 3, 0, [3], 3), {}),
        (grouped(2, 3, 0, [3, 3], 3, *WIDE), {"do_rotary": 1}),
        (grouped(1, 1, 5, [6], 6), {}),
        (grouped(1, 1, 5, [6], 6, *WIDE, packed=True), {"do_rotary": 1, "rotary_interleaved": 1, "scale": 0.4}),
        (grouped(1, 3, 5, [8], 8), {"local_window_size": 3}),
        (grouped(1, 3, 5, [8], 8), {"softcap": 0.7}),
        (grouped(2, 1, 5, [6, 6], 6), {}),
        (grouped(2, 1, 9, [6, 4], 6, *WIDE), {"do_rotary": 1}),
        (grouped(1, 3, 9, [3], 3), {}),
        (grouped(1, 3, 0, [3], 3, None, None, None, normal(1, 4, 3, 3)), {}),
    ],
)  # fmt: skip
def test_group_query_attention(inputs, attrs):
    known = tuple(k for k in (5, 6, 7, 8) if k < len(inputs))
    attrs = {"num_heads": 4, "kv_num_heads": 2, "domain": "com.microsoft", **attrs}
    if inputs[3].shape[2] == 0:
        inputs[3] = inputs[4] = None
    want = one_node.by_runtime("GroupQueryAttention", inputs, 3, known, **attrs)
    got = one_node.ran("GroupQueryAttention", inputs, 3, known, **attrs)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    for g, w in zip(got[1:], want[1:], strict=True):
        assert g.shape == w.shape
        ends = np.minimum(inputs[5] + 1, inputs[6])
        for row, end in enumerate(ends):  # rows behind the end of a sequence are not specified
            np.testing.assert_allclose(g[row, :, :end], w[row, :, :end], rtol=1e-5, atol=1e-5)


GROUPS = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}


@pytest.mark.parametrize(
    ("op", "inputs", "wrt", "attrs"),
    [
        ("Attention", [X3, W, WB, np.array([2, 3], "int32")], (0, 1, 2), {"num_heads": 2, "unidirectional": 1}),
        ("MultiHeadAttention", [Q, K, V, BIAS], (0, 1, 2, 3), {"num_heads": 2}),
        ("GroupQueryAttention", grouped(1, 2, 0, [2], 2, *WIDE), (0, 1, 2), {**GROUPS, "softcap": 0.9}),
    ],
)
def test_gradients(op, inputs, wrt, attrs):
    inputs = [v.astype("float64") if v.dtype == F else v for v in inputs]
    if op == "GroupQueryAttention":
        inputs[3] = inputs[4] = None
    known = tuple(k for k, v in enumerate(inputs) if k not in wrt and v is not None)
    one_node.check_gradient(op, inputs, wrt=wrt, known=known, domain="com.microsoft", **attrs)


OPEN = {
    "Attention": ([X3, W, WB, ones(2, 3, 2, 3)], {0: "bs", 3: "bs"}, (1, 2), {"num_heads": 2, "unidirectional": 1}),
    "MultiHeadAttention": ([Q, K, V, BIAS, ones(2, 5, 2, 5)], {0: "bs", 1: "bk", 2: "bk", 4: "bk"}, (3,), {"num_heads": 2}),
    "RotaryEmbedding": ([normal(2, 3, 8), np.array([4]), *TABLES], {0: "bs"}, (2, 3), {}),
    "GroupQueryAttention": (
        grouped(2, 1, 5, [6, 6], 6, *WIDE), {0: "bs", 1: "bs", 2: "bs", 3: "b.p", 4: "b.p", 5: "b"}, (7, 8), GROUPS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", OPEN)
def test_open_axes(op):
    """One program for any batch and any number of rows."""
    inputs, axes, known, attrs = OPEN[op]
    outputs, attrs = 3 if op == "GroupQueryAttention" else 1, {"domain": "com.microsoft", **attrs}
    model = one_node.model(op, inputs, outputs, known, **attrs)
    for value in model.graph.input:
        for k, letter in enumerate(axes.get(int(value.name[1:]), "")):
            if letter != ".":
                value.type.tensor_type.shape.dim[k].dim_param = letter
    for value in model.graph.output:
        value.type.tensor_type.elem_type = 1
    want = one_node.by_runtime(op, inputs, outputs, known, **attrs)
    loaded, executor, scope = fx.onnx.load(model), fx.Executor(), fx.Scope()
    executor.run(loaded.startup, scope=scope)
    feed = {v.name: inputs[int(i.name[1:])] for i, v in zip(model.graph.input, loaded.feeds, strict=True)}
    got = executor.run(loaded.program, feed=feed, fetch_list=list(loaded.fetches), scope=scope)
    for g, w in zip(got, want if outputs > 1 else [want], strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
