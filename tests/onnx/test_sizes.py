"""What is computed of open sizes is what NumPy computes of the sizes that are fed, which may be 0, whether it was folded or not."""

import itertools

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

SIZES = (0, 1, 2, 7)
NODES = {  # of sizes, as vectors of one number; ONNX cuts quotients towards zero
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Min": np.minimum, "Max": np.maximum,
    "Div": lambda a, b: np.trunc(a / b).astype(np.int64),
}  # fmt: skip
TESTS = {"Equal": np.equal, "Less": np.less, "Greater": np.greater, "LessOrEqual": np.less_equal, "GreaterOrEqual": np.greater_equal}


class Expressions:
    """Lines of a graph that computes with the sizes of x [n, m] and of parts of it, each with its value for n and m."""

    def __init__(self, seed):
        self.rng, self.lines, self.values = np.random.default_rng(seed), [], {}

    def add(self, node, value):
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {node}")
        self.values[name] = value
        return name

    def number(self, value):
        return self.add(f"Constant<value_ints=[{value}]>()", lambda n, m: np.array([value]))

    def leaf(self):
        end = self.number(3)
        part = self.add(f"Slice(x, {self.number(0)}, {end}, {self.number(0)})", None)
        size = lambda k, cut: lambda n, m: np.array([min(n, 3) if cut else (n, m)[k]])  # noqa: E731
        kinds = [("x", 0, False), ("x", 1, False), (part, 0, True), (part, 1, False)]
        of, k, cut = kinds[self.rng.integers(4)]
        found = self.add(f"Shape<start={k}, end={k + 1}>({of})", size(k, cut))
        return found if self.rng.random() < 0.7 else self.number(int(self.rng.integers(-2, 4)))

    def computed(self, depth):
        if depth == 0:
            return self.leaf()
        kind = self.rng.choice([*NODES, "Where", "ReduceProd", "Gather", "Slice"])
        a, b = self.computed(depth - 1), self.computed(depth - 1)
        va, vb = self.values[a], self.values[b]
        if kind == "Div":
            value = int(self.rng.integers(1, 4))
            b, vb = self.number(value), lambda n, m: np.array([value])
        if kind in NODES:
            return self.add(f"{kind}({a}, {b})", lambda n, m: NODES[kind](va(n, m), vb(n, m)))
        if kind == "Where":
            c = self.test(depth - 1)
            return self.add(f"Where({c}, {a}, {b})", lambda n, m, vc=self.values[c]: np.where(vc(n, m), va(n, m), vb(n, m)))
        both = self.add(f"Concat<axis=0>({a}, {b})", lambda n, m: np.concatenate([va(n, m), vb(n, m)]))
        if kind == "ReduceProd":
            return self.add(f"ReduceProd<keepdims=1>({both})", lambda n, m: va(n, m) * vb(n, m))
        last = self.number(-1)
        if kind == "Gather":
            return self.add(f"Gather({both}, {last})", vb)
        return self.add(f"Slice({both}, {last}, {self.number(9)})", vb)

    def test(self, depth):
        kind = self.rng.choice(list(TESTS), p=[0.6, 0.1, 0.1, 0.1, 0.1])
        a, b = self.computed(depth), self.computed(depth)
        va, vb = self.values[a], self.values[b]
        return self.add(f"{kind}({a}, {b})", lambda n, m: TESTS[kind](va(n, m), vb(n, m)))


@pytest.mark.parametrize("seed", range(20))
def test_sizes_are_what_numpy_computes(seed):
    made = Expressions(seed)
    size, test = made.computed(2), made.test(1)
    graph = f"g (float[n, m] x) => (int64[1] {size}, bool[1] {test}) {{ {'  '.join(made.lines)} }}"
    model = fx.onnx.load(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {graph}'))
    exe = fx.Executor()
    exe.run(model.startup)
    for n, m in itertools.product(SIZES, SIZES):
        found = exe.run(model.program, feed={"x": np.zeros((n, m), np.float32)}, fetch_list=model.fetches)
        assert [v.tolist() for v in found] == [made.values[name](n, m).tolist() for name in (size, test)], (n, m, graph)


def test_a_model_guards_against_what_is_empty():
    model = fx.onnx.load(
        onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]> g (float[n] x) => (float[1] y) {
      n = Shape(x)
      zero = Constant<value_ints=[0]>()
      none = Equal(n, zero)
      other = Constant<value_floats=[-1.0]>()
      sum = ReduceSum(x)
      y = Where(none, other, sum)
    }""")
    )
    exe = fx.Executor()
    exe.run(model.startup)
    assert [exe.run(model.program, feed={"x": np.ones(n, np.float32)}, fetch_list=["y"])[0].tolist() for n in SIZES] == [
        [-1],
        [1],
        [2],
        [7],
    ]


def test_positions_and_numbers_of_copies_are_sizes_too():
    """What stands for an open size is no number of elements to cut, and no position."""
    model = fx.onnx.load(
        onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]> g (float[n] x) => (int64[a] y, int64[b] z, int64[1] u) {
      n = Shape(x)
      zero = Constant<value_ints=[0]>()
      some = Constant<value_ints=[5, 6, 7, 8, 9, 10, 11, 12]>()
      y = Slice(some, zero, n)
      z = Tile(some, n)
      u = Gather(some, n)
    }""")
    )
    exe = fx.Executor()
    exe.run(model.startup)
    some = np.arange(5, 13)
    for n in SIZES:
        y, z, u = exe.run(model.program, feed={"x": np.ones(n, np.float32)}, fetch_list=model.fetches)
        assert (y.tolist(), z.tolist(), u.tolist()) == (some[:n].tolist(), np.tile(some, n).tolist(), [some[n]])


def test_an_open_axis_of_one_element_is_repeated_to_another_one():
    text = """<ir_version: 9, opset_import: ["" : 18]> g (float[n] x, float[m] w) => (float[k] y) {
      n = Shape(x)
      y = Expand(w, n)
    }"""
    model = fx.onnx.load(onnx.parser.parse_model(text))
    for n, m in ((7, 1), (2, 2), (0, 1), (1, 7)):
        feed = {"x": np.zeros(n, np.float32), "w": np.arange(m, dtype="float32")}
        found = fx.Executor().run(model.program, feed=feed, fetch_list=["y"])[0]
        assert found.tolist() == np.broadcast_to(feed["w"], np.broadcast_shapes((n,), (m,))).tolist()
