"""Sessions over several runs: what was written for one feed serves the next one, and its answers are those of that feed."""

from __future__ import annotations

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, parser  # noqa: E402

from fluidx.onnx import OnnxError, session  # noqa: E402
from fluidx.onnx.sessions import Session  # noqa: E402


def model(text: str):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> {text}')


def written(monkeypatch) -> list[object]:
    """What sessions write from here on."""
    plans: list[object] = []
    write = Session._write

    def counted(self, fed):
        plans.append(write(self, fed))
        return plans[-1]

    monkeypatch.setattr(Session, "_write", counted)
    return plans


def test_what_the_host_computes_is_data_for_the_program_behind_it(monkeypatch):
    plans = written(monkeypatch)
    s = session(
        model("""
        g (float[rows, 2] x) => (float[rows, 2] y) {
            d = Add (x, x)
            s = ai.onnx.ml.Scaler <offset = [1.0, 0.0], scale = [2.0, 3.0]> (d)
            y = Mul (s, d)
        }""")
    )
    for x in np.float32([[[1, 2]], [[3, -4]], [[0, 5]]]):
        assert s.run([x])[0].tolist() == [[2 * (2 * x[0, 0] - 1) * 2 * x[0, 0], 3 * (2 * x[0, 1]) ** 2]]
    assert len(plans) == 1


def test_a_program_is_written_anew_for_another_number_of_results_and_found_again(monkeypatch):
    plans = written(monkeypatch)
    s = session(
        model("g (float[4] x) => (int64[k] y) { r = Relu (x)  n = NonZero (r)  k = Constant <value_ints = [-1]> ()  y = Reshape (n, k) }")
    )
    for x in ([1, 0, 2, 0], [0, 3, 0, 1], [1, 1, 1, 0], [-1, -1, 0, 0], [5, -5, -5, 1]):
        assert s.run([np.float32(x)])[0].tolist() == np.flatnonzero(np.float32(x) > 0).tolist()
    assert len(plans) == 3  # 2, 3 and 0 of them


GROWING = """
g (float[1, new, 2] q, float[1, past, 2] k) => (float[1, new, total] y, float[1, total, 2] all) {
    whole = Concat <axis = 1> (k, q)
    t = Transpose <perm = [0, 2, 1]> (whole)
    y = MatMul (q, t)
    all = Identity (whole)
}"""


def test_a_second_size_of_an_open_axis_gets_a_program_for_all_sizes(monkeypatch):
    plans, s = written(monkeypatch), session(model(GROWING))
    k, programs = np.ones((1, 1, 2), np.float32), set()
    for step in range(1, 6):  # as a cache of keys grows
        q = np.full((1, 1, 2), step, np.float32)
        y, k = s.run({"q": q, "k": k})
        assert y.tolist() == [[[2.0 * step * v for v in (1, *range(1, step + 1))]]] and k.shape == (1, step + 1, 2)
        programs |= {id(plan.main) for alike in s._plans.values() for plan, _ in alike}
    assert len(plans) == 1 and len(programs) == 2


def test_a_loaded_model_runs_the_program_that_was_loaded_with_the_values_of_the_file(monkeypatch):
    plans = written(monkeypatch)
    proto = model("g (float[n, 2] x) => (float[n, 2] y) { y = MatMul (x, w) }")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([[1, 2], [3, 4]]), "w"))
    loaded = fx.onnx.load(proto)
    with fx.program_guard(loaded.program, loaded.startup):  # what is written behind it has no part in it
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(loaded.fetches[0]))
    for rows in (1, 2, 5):
        assert loaded.run([np.ones((rows, 2), np.float32)])[0].tolist() == [[4, 6]] * rows
    assert plans == []


def test_sizes_that_the_file_declares_wrong_and_random_draws_get_a_program_of_their_own(monkeypatch):
    plans = written(monkeypatch)
    s = session(model("g (float[n, 3] x) => (float[n, m] y) { y = Relu (x) }"))
    for shape in ((2, 3), (2, 4), (5, 4), (4, 3)):  # 4 columns are not declared
        assert s.run([np.ones(shape, np.float32)])[0].shape == shape
    assert len(plans) == 3
    s = session(model("g (float[n, 3] x) => (float[n, 3] y) { u = RandomUniformLike (x)  y = Add (x, u) }"))
    for n in (2, 3, 4):
        assert s.run([np.ones((n, 3), np.float32)])[0].shape == (n, 3)
    assert len(plans) == 6


def test_strings_and_maps_go_through_without_a_program_of_their_own(monkeypatch):
    plans = written(monkeypatch)
    names = helper.make_node("LabelEncoder", ["x"], ["i"], domain="ai.onnx.ml", keys_strings=["a", "b"], values_int64s=[3, 4])
    counted = helper.make_node("DictVectorizer", ["m"], ["v"], domain="ai.onnx.ml", string_vocabulary=["p", "q"])
    said = helper.make_node("LabelEncoder", ["i"], ["t"], domain="ai.onnx.ml", keys_int64s=[3, 4], values_strings=["A", "B"])
    rows = helper.make_node("ZipMap", ["v"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[7, 8])
    strings = helper.make_tensor_type_proto(TensorProto.STRING, [None])
    made = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph = helper.make_graph(
        [names, said, counted, rows], "g", [helper.make_value_info("x", strings), helper.make_value_info("m", made)],
        [helper.make_value_info("t", strings), helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )  # fmt: skip
    s = session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)], ir_version=10))
    for x, m in ((["a", "b"], {"p": 1.0, "q": 2.0}), (["b", "b"], {"q": 5.0})):
        t, z = s.run([np.array(x, object), m])
        assert t.tolist() == [v.upper() for v in x] and z == [{7: m.get("p", 0), 8: m["q"]}]
    assert len(plans) == 1


def test_a_value_that_steers_is_checked_in_each_run(monkeypatch):
    plans = written(monkeypatch)
    s = session(
        model("""
        g (bool go, float[2] x) => (float[2] y) {
            d = Exp (x)
            y = If (go) <then_branch = t () => (float[2] a) { a = Neg (d) }, else_branch = e () => (float[2] b) { b = Add (d, x) }>
        }""")
    )
    for go in (True, False, True, False):
        x = np.float32([go, 0])
        want = -np.exp(x) if go else np.exp(x) + x
        assert np.allclose(s.run([np.array(go), x])[0], want, rtol=1e-6)  # exp to a unit in the last place
    assert len(plans) == 2


def test_what_fails_in_a_program_for_other_values_is_written_anew():
    s = session(
        model("""
        g (int64[1] k, float[6] x, int64[1] i) => (float[1] y) {
            zero = Constant <value_ints = [0]> ()
            front = Slice (x, zero, k)
            v = Gather (front, i)
            low = Constant <value_floats = [0.0]> ()
            go = Greater (v, low)
            y = If (go) <then_branch = t () => (float[1] a) { a = Neg (v) }, else_branch = e () => (float[1] b) { b = Identity (v) }>
        }""")
    )
    x = np.arange(6, dtype=np.float32)
    for k, i in ((2, 1), (6, 5), (2, 1)):
        assert s.run([np.array([k]), x, np.array([i])])[0].tolist() == [-i]
    with pytest.raises(OnnxError, match="out of|outside"):
        s.run([np.array([2]), x, np.array([5])])
    assert s.run([np.array([6]), x, np.array([4])])[0].tolist() == [-4]


def test_what_was_fed_may_be_changed_afterwards():
    s = session(model("g (seq(float[2]) x) => (float[n] y) { y = ConcatFromSequence <axis = 0> (x) }"))
    x = [np.float32([1, 2]), np.float32([3, 4])]
    first = s.run([x])[0]
    x[0][:] = 7
    assert s.run([x])[0].tolist() == [7, 7, 3, 4] and first.tolist() == [1, 2, 3, 4]


def test_outputs_are_the_callers_own():
    s = session(
        model(
            "g (float[2] x) => (float[2] y, float[2] z, int64[2] c) { y = Identity (x)  z = Relu (x)  c = Constant <value_ints=[1, 2]> () }"
        )
    )
    x = np.float32([1, 2])
    for _ in range(2):
        for v in s.run([x]):
            assert v.tolist() == [1, 2]
            v[:] = 9
    assert x.tolist() == [1, 2]


def test_what_is_drawn_at_random_is_one_draw_in_all_stages():
    s = session(
        model("""
        g (float[64] x) => (float[64] r, int64[n, k] at) {
            r = RandomUniformLike <low = -1.0, high = 1.0> (x)
            p = Relu (r)
            at = NonZero (p)
        }""")
    )
    for _ in range(3):
        r, at = s.run([np.zeros(64, np.float32)])
        assert at.tolist() == [np.flatnonzero(r > 0).tolist()]


def test_normalization_is_computed_into_the_filters_before_it_unless_somebody_wants_what_lies_between():
    text = """
        g (float[1, 2, 4, 4] x) => ({}float[1, 3, 3, 3] y)
        <float[3, 2, 2, 2] w = {{{}}}, float[3] s = {{2, -1, 3}}, float[3] b = {{1, 0, -2}},
         float[3] m = {{0.5, 1, -1}}, float[3] v = {{4, 1, 9}}> {{
            c = Conv (x, w)
            y = BatchNormalization (c, s, b, m, v)
        }}"""
    weights = ", ".join(str(k % 5 - 2) for k in range(24))
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)
    both, alone = (session(model(text.format(also, weights))) for also in ("float[1, 3, 3, 3] c, ", ""))
    (c, y), (folded,) = both.run([x]), alone.run([x])
    s, b, m, v = np.array([[2, -1, 3], [1, 0, -2], [0.5, 1, -1], [4, 1, 9]])[:, None, :, None, None]
    want = (c - m) / np.sqrt(v + 1e-5) * s + b
    for found in (y, folded):
        assert np.allclose(found, want, rtol=1e-5, atol=1e-5)  # sums of 8 products in float32, scaled before or after
    counts = [[op.type for op in s._plans.popitem()[1][0][0].main.ops].count("batch_norm") for s in (both, alone)]
    assert counts == [1, 0]


def test_a_normalization_by_what_nodes_hold_stays():
    s = session(
        model("""
        g (float[1, 2, 2, 2] x) => (float[1, 2, 2, 2] y) <float[2, 2, 1, 1] w = {1, 0, 0, 2}> {
            c = Conv (x, w)
            s = Constant <value_floats = [1.0, 2.0]> ()
            m = Constant <value_floats = [3.0, 4.0]> ()
            v = Constant <value_floats = [0.25, 4.0]> ()
            y = BatchNormalization <epsilon = 0.0> (c, s, m, m, v)
        }""")
    )
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)
    assert s.run([x])[0].tolist() == [[(2 * (x[0, 0] - 3) + 3).tolist(), (2 * x[0, 1] - 4 + 4).tolist()]]


def test_products_and_sums_by_channel_are_computed_into_what_is_before_them():
    text = """
        g (float[1, 2, 4, 4] x{}) => (float[1, 2, 4, 4] y)
        <float[2, 2, 1, 1] w = {{1, -2, 3, 1}}, float[2] b = {{1, 2}}, {} float[2, 1, 1] t = {{5, -7}}> {{
            c = Conv (x, w, b)
            d = Mul (c, s)
            e = Add (d, t)
            y = Relu (e)
        }}"""
    x = np.random.default_rng(0).integers(-4, 5, (1, 2, 4, 4)).astype(np.float32)  # whole numbers: any order gives the same sums
    w, b, s, t = np.array([[1, -2], [3, 1]]), np.array([1, 2]), np.array([2, -3]), np.array([5, -7])
    made = np.einsum("oi,nihw->nohw", w, x) + b[:, None, None]
    want = np.maximum(made * s[:, None, None] + t[:, None, None], 0)
    held = session(model(text.format("", "float[2, 1, 1] s = {2, -3},")))
    fed = session(model(text.format(", float[2, 1, 1] s", "")))
    assert np.array_equal(held.run([x])[0], want)
    assert np.array_equal(fed.run([x, s.reshape(2, 1, 1).astype(np.float32)])[0], want)
    kinds = [[op.type for op in of._plans.popitem()[1][0][0].main.ops] for of in (held, fed)]
    assert kinds[0] == ["conv2d", "elementwise_add", "relu"] and kinds[1].count("elementwise_mul") == 1


def test_a_product_behind_a_normalization_that_stays_is_its_scale():
    s = session(
        model("""
        g (float[1, 2, 2, 2] x) => (float[1, 2, 2, 2] y)
        <float[2] g = {2, 4}, float[2] b = {1, -1}, float[2] m = {3, 5}, float[2] v = {4, 16},
         float[2, 1, 1] p = {3, -1}, float[2, 1, 1] q = {1, 2}> {
            n = BatchNormalization <epsilon = 0.0> (x, g, b, m, v)
            o = Mul (n, p)
            y = Add (o, q)
        }""")
    )
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)
    want = np.stack([(x[0, 0] - 3 + 1) * 3 + 1, (x[0, 1] - 5 - 1) * -1 + 2])[None]
    assert np.array_equal(s.run([x])[0], want)
    assert [op.type for op in s._plans.popitem()[1][0][0].main.ops] == ["batch_norm"]


KEPT = [  # what is fed -> what an input of a dtype takes it for; None where that would be other values
    (np.float64([[0.1, 2]]), "float32", np.float32([[0.1, 2]])),
    (np.float64([[0.1, np.inf]]), "float32", np.float32([[0.1, np.inf]])),
    (np.float64([[1, 1e300]]), "float32", None),
    (np.float16([[1, 2]]), "float32", np.float32([[1, 2]])),
    (np.int64([[1, 2**40 + 1]]), "float32", np.float32([[1, 2**40]])),
    (np.array([[True, False]]), "float32", np.float32([[1, 0]])),
    (np.int64([[1, -2]]), "int32", np.int32([[1, -2]])),
    (np.int64([[1, 2**40]]), "int32", None),
    (np.float64([[1, 2]]), "int32", None),
    (np.complex64([[1, 2]]), "float32", None),
]


@pytest.mark.parametrize(("array", "dtype", "expected"), KEPT)
def test_sessions_executors_and_feeders_convert_what_is_fed_by_one_rule(array, dtype, expected):
    kind = {"float32": "float", "int32": "int32"}[dtype]
    graph = f"g ({kind}[n, 2] x) => ({kind}[n, 2] y) {{ y = Identity (x) }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> {graph}')
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        x = fx.data("x", [-1, 2], dtype)
        y = fx.layers.assign(x)
    exe = fx.Executor(fx.CPUPlace())
    ways = (
        lambda: fx.onnx.session(model).run([array])[0],
        lambda: exe.run(main, feed={"x": array}, fetch_list=[y])[0],
        lambda: fx.DataFeeder([x], None, main).feed([(array[0],)])["x"],
    )
    for way in ways:
        if expected is None:
            with pytest.raises(fx.FluidxError, match=r"has dtype|holds|found \w+; convert it first"):
                way()
        else:
            found = way()
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_a_shape_that_the_file_does_not_declare_is_named_when_the_model_cannot_take_it():
    conv = model("g (float[n, 3, 4, 4] x) => (float[n, 2, a, b] y) { w = ConstantOfShape <value = float[1] {1.0}> (s)  y = Conv (x, w) }")
    conv.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2, 3, 1, 1]), "s"))
    with pytest.raises(OnnxError, match=r"input 'x' is declared \[n, 3, 4, 4\], the feed has shape \[1, 1, 4, 4\]: node 'Conv'"):
        session(conv).run([np.zeros((1, 1, 4, 4), np.float32)])
    assert session(conv).run([np.zeros((1, 3, 5, 4), np.float32)])[0].shape == (1, 2, 5, 4)  # files may declare wrong sizes


@pytest.mark.parametrize("rows", [(5, 1, 5), (1, 5, 1)])
def test_an_open_axis_of_one_row_is_repeated(rows):
    s = session(model("g (float[n, 2] x) => (float[5, 2] y) { s = Constant <value_ints = [5, 2]> ()  y = Expand (x, s) }"))
    for n in rows:
        x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
        assert s.run([x])[0].tolist() == (x if n == 5 else x.repeat(5, axis=0)).tolist()


def test_a_slice_backwards_of_an_open_axis_begins_at_the_first_element_if_before():
    s = session(
        model("""
        g (float[n] x) => (float[m] y) {
            from = Constant <value_ints = [-3]> ()
            to = Constant <value_ints = [-100]> ()
            axis = Constant <value_ints = [0]> ()
            step = Constant <value_ints = [-1]> ()
            y = Slice (x, from, to, axis, step)
        }""")
    )
    for n, expected in ((5, [2, 1, 0]), (3, [0]), (4, [1, 0]), (2, [0]), (1, [0])):
        assert s.run([np.arange(n, dtype=np.float32)])[0].tolist() == expected


def test_chains_are_joined_and_weights_are_shared():
    """Normalization and attention written out are one operator each; the program of a second shape has the weights of the first one."""
    s = session(
        model("""
        g (float[rows, 4] x) => (float[rows, 4] y)
        <float[4] scale = {0.5, 1, 1.5, 0.2}, float[4, 4] w = {1, 0, 0, 1, 0, 0.5, 0, 0, 1, 0, 0.2, 0, 0, 0, 0, 1}, float eps = {0.00001}> {
            two = Constant <value_float = 2.0> ()
            axis = Constant <value_ints = [-1]> ()
            mean = ReduceMean <keepdims = 1> (x, axis)
            d = Sub (x, mean)
            square = Pow (d, two)
            variance = ReduceMean <keepdims = 1> (square, axis)
            above = Add (variance, eps)
            root = Sqrt (above)
            normal = Div (d, root)
            scaled = Mul (normal, scale)
            q = MatMul (scaled, w)
            k = Transpose <perm = [1, 0]> (scaled)
            scores = MatMul (q, k)
            weights = Softmax <axis = -1> (scores)
            y = MatMul (weights, scaled)
        }""")
    )
    for rows in (3, 5, 7):
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype("float32")
        normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * np.float32([0.5, 1, 1.5, 0.2])
        scores = np.exp(normal @ np.float32([[1, 0, 0, 1], [0, 0.5, 0, 0], [1, 0, 0.2, 0], [0, 0, 0, 1]]) @ normal.T)
        assert np.allclose(s.run({"x": x})[0], scores / scores.sum(1, keepdims=True) @ normal, rtol=1e-4, atol=1e-5)
    plans = [plan for alike in s._plans.values() for plan, _ in alike]
    assert len({id(p.main) for p in plans}) == 2
    for plan in plans:
        assert {op.type for op in plan.main.ops} == {"layer_norm", "matmul", "scaled_dot_product_attention"}
    assert len({id(plan.scope.arrays["w"]) for plan in plans}) == 1


def test_sizes_that_feeds_share_are_fixed_and_the_others_open(monkeypatch):
    """With an open batch and an open number of new rows, only the program can compute the shape of `back` and the first row of `place`. Two
    feeds that differ in the past alone get a program in which these are known, and it serves every length."""
    plans = written(monkeypatch)
    s = session(
        model(
            """
        g (float[b, s, 2] new, float[b, p, 2] past) => (float[b, t, 2] present, float[b, s, 2] y)
        <float[2, 2] w = {0, 1, 1, 0}, int64[2] flat = {-1, 2}, int64[1] two = {2}, int64[1] zero = {0}, int64[1] one = {1}> {
            present = Concat <axis = 1> (past, new)
            rows = Reshape (new, flat)
            turned = MatMul (rows, w)
            batch = Shape <start = 0, end = 1> (new)
            count = Shape <start = 1, end = 2> (new)
            sizes = Concat <axis = 0> (batch, count, two)
            back = Reshape (turned, sizes)
            all = Shape <start = 1, end = 2> (present)
            first = Sub (all, count)
            table = Constant <value = float[60, 2] {"""
            + ", ".join(map(str, range(120)))
            + """}> ()
            place = Slice (table, first, all, zero, one)
            y = Add (back, place)
        }"""
        )
    )
    for length in (4, 5, 6, 7, 30, 9, 50):
        past, new = np.full((3, length, 2), 0.5, "float32"), np.arange(6, dtype="float32").reshape(3, 1, 2)
        present, y = s.run({"new": new, "past": past})
        assert np.array_equal(present, np.concatenate([past, new], 1))
        assert np.array_equal(y, new[:, :, ::-1] + np.float32([2 * length, 2 * length + 1]))
    assert len(plans) == 1
    two = np.ones((3, 2, 2), "float32")  # other numbers of new rows have programs of their own
    assert np.array_equal(s.run({"new": two, "past": past})[1][0], [[101, 102], [103, 104]])


def test_arguments_of_other_runtimes_are_told_apart():
    s = session(parser.parse_model('<ir_version: 9, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Relu (x) }'))
    with pytest.raises(TypeError, match="got 2 arguments by position; it takes: feed"):
        s.run(None, {"x": np.ones(2, "float32")})
