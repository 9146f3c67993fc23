"""ONNX models of benchmarks, written with onnx.helper: a GPT-2 shape with a cache as exporters write it, and a support vector machine."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, VOCABULARY, PLACES = 4, 256, 4, 2000, 1024
SIZE = WIDTH // HEADS
NEVER = np.finfo("float32").min

Feeds = list[dict[str, np.ndarray]]


class _Graph:
    """Nodes and initializers of a graph, with names of their own."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.held: list[Any] = []
        self.rng = np.random.default_rng(0)

    def add(self, op: str, *inputs: str, name: str = "", **attrs: Any) -> str:
        """A node; the name of its output."""
        from onnx import helper

        self.nodes.append(helper.make_node(op, inputs, [name or f"v{len(self.nodes)}"], **attrs))
        return self.nodes[-1].output[0]

    def known(self, value: Any, dtype: str = "int64") -> str:
        from onnx import numpy_helper

        self.held.append(numpy_helper.from_array(np.array(value, dtype), f"c{len(self.held)}"))
        return self.held[-1].name

    def weight(self, *shape: int) -> str:
        return self.known(self.rng.standard_normal(shape) * 0.08, "float32")

    def size(self, x: str, axis: int) -> str:
        """The size of an axis, as a vector of one."""
        return self.add("Unsqueeze", self.add("Gather", self.add("Shape", x), self.known(axis), axis=0), self.known([0]))

    def shape(self, *sizes: str) -> str:
        return self.add("Concat", *sizes, axis=0)

    def norm(self, x: str) -> str:
        apart = self.add("Sub", x, self.add("ReduceMean", x, axes=[-1]))
        variance = self.add("ReduceMean", self.add("Pow", apart, self.known(2, "float32")), axes=[-1])
        y = self.add("Div", apart, self.add("Sqrt", self.add("Add", variance, self.known(1e-5, "float32"))))
        return self.add("Add", self.add("Mul", y, self.weight(WIDTH)), self.weight(WIDTH))

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        """Conv1D of GPT-2: rows of all sequences at once."""
        rows = self.add("Gemm", self.add("Reshape", x, self.known([-1, inputs])), self.weight(inputs, outputs), self.weight(outputs))
        return self.add("Reshape", rows, self.shape(self.size(x, 0), self.size(x, 1), self.known([outputs])))

    def gelu(self, x: str) -> str:
        cube = self.add("Mul", self.add("Pow", x, self.known(3, "float32")), self.known(0.044715, "float32"))
        inner = self.add("Tanh", self.add("Mul", self.add("Add", x, cube), self.known(np.sqrt(2 / np.pi), "float32")))
        return self.add("Mul", self.add("Mul", x, self.known(0.5, "float32")), self.add("Add", inner, self.known(1, "float32")))

    def heads(self, x: str) -> str:
        sizes = self.shape(self.size(x, 0), self.size(x, 1), self.known([HEADS]), self.known([SIZE]))
        return self.add("Transpose", self.add("Reshape", x, sizes), perm=[0, 2, 1, 3])

    def attention(self, x: str, layer: int, seen: str, masked: str) -> str:
        from onnx import helper

        parts = [f"part{layer}.{k}" for k in range(3)]
        self.nodes.append(helper.make_node("Split", [self.dense(x, WIDTH, 3 * WIDTH), self.known([WIDTH] * 3)], parts, axis=2))
        q, k, v = map(self.heads, parts)
        k, v = (self.add("Concat", f"past.{layer}.{n}", new, axis=2, name=f"present.{layer}.{n}") for n, new in (("key", k), ("value", v)))
        scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.add("Div", scores, self.known(SIZE**0.5, "float32"))
        rows, columns = self.size(q, 2), self.size(k, 2)
        cut = self.add("Slice", seen, self.add("Sub", columns, rows), columns, self.known([2]), self.known([1]))
        cut = self.add("Slice", cut, self.known([0]), columns, self.known([3]), self.known([1]))
        scores = self.add("Add", self.add("Where", cut, scores, self.known(NEVER, "float32")), masked)
        y = self.add("Transpose", self.add("MatMul", self.add("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        y = self.add("Reshape", y, self.shape(self.size(y, 0), self.size(y, 1), self.known([WIDTH])))
        return self.dense(y, WIDTH, WIDTH)


def generation(lengths: int) -> tuple[bytes, Feeds]:
    """A decoder that gets one token and a cache of 40 rows, 41 rows, and so on."""
    from onnx import TensorProto, helper

    g = _Graph()
    past, new = (g.add("Squeeze", g.size(*of), g.known([0])) for of in (("past.0.key", 2), ("ids", 1)))
    places = g.add("Unsqueeze", g.add("Range", past, g.add("Add", past, new), g.known(1)), g.known([0]))
    x = g.add("Add", g.add("Gather", g.weight(VOCABULARY, WIDTH), "ids"), g.add("Gather", g.weight(PLACES, WIDTH), places))
    mask = g.add("Cast", g.add("Unsqueeze", g.add("Unsqueeze", "mask", g.known([1])), g.known([2])), to=TensorProto.FLOAT)
    masked = g.add("Mul", g.add("Sub", g.known(1, "float32"), mask), g.known(NEVER, "float32"))
    seen = g.known(np.tril(np.ones((1, 1, PLACES, PLACES))), "bool")
    for layer in range(LAYERS):
        x = g.add("Add", g.attention(g.norm(x), layer, seen, masked), x)
        x = g.add("Add", x, g.dense(g.gelu(g.dense(g.norm(x), WIDTH, 4 * WIDTH)), 4 * WIDTH, WIDTH))
    g.add("MatMul", g.norm(x), g.weight(WIDTH, VOCABULARY), name="logits")
    caches = [f"{layer}.{n}" for layer in range(LAYERS) for n in ("key", "value")]
    f32, i64, declared = TensorProto.FLOAT, TensorProto.INT64, helper.make_tensor_value_info
    inputs = [declared("ids", i64, ["batch", "new"]), declared("mask", i64, ["batch", "total"])]
    inputs += [declared(f"past.{n}", f32, ["batch", HEADS, "past", SIZE]) for n in caches]
    outputs = [declared("logits", f32, ["batch", "new", VOCABULARY])]
    outputs += [declared(f"present.{n}", f32, ["batch", HEADS, "total", SIZE]) for n in caches]
    graph = helper.make_graph(g.nodes, "generation", inputs, outputs, g.held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString(), [_step(g.rng, caches, 40 + k) for k in range(lengths)]


def _step(rng: np.random.Generator, caches: list[str], length: int) -> dict[str, np.ndarray]:
    made = {f"past.{n}": rng.standard_normal((1, HEADS, length, SIZE), dtype="float32") for n in caches}
    return {"ids": rng.integers(VOCABULARY, size=(1, 1)), "mask": np.ones((1, length + 1), "int64"), **made}


def vectors(rows: int, feeds: int) -> tuple[bytes, Feeds]:
    """A machine of 3 classes with 200 support vectors of 20 features each, and probabilities."""
    from onnx import helper

    rng, counts, features = np.random.default_rng(0), [200] * 3, 20
    node = helper.make_node(
        "SVMClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", kernel_type="RBF", kernel_params=[0.05, 0.0, 3.0],
        vectors_per_class=counts, classlabels_ints=[0, 1, 2], support_vectors=rng.standard_normal(sum(counts) * features).tolist(),
        coefficients=rng.standard_normal(2 * sum(counts)).tolist(), rho=[0.1, -0.2, 0.3], prob_a=[-1.0] * 3, prob_b=[0.1] * 3,
    )  # fmt: skip
    ends = [
        helper.make_tensor_value_info(n, t, shape)
        for n, t, shape in (("x", 1, [None, features]), ("label", 7, [None]), ("scores", 1, [None, 3]))
    ]
    opsets = [helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 18)]
    model = helper.make_model(helper.make_graph([node], "vectors", ends[:1], ends[1:]), opset_imports=opsets, ir_version=8)
    return model.SerializeToString(), [{"x": rng.standard_normal((rows, features), dtype="float32")} for _ in range(feeds)]
