"""`fx.onnx.load`: open sizes, names, what is refused and how, and files that are damaged."""

import random

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")

OnnxError = fx.onnx.OnnxError


def model_of(text, **weights):
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]> ' + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items())
    return model


def run(model, feed, name):
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    if model.startup.ops:
        exe.run(model.startup, scope=scope)
    return exe.run(model.program, feed=feed, fetch_list=[model[name]], scope=scope)[0]


# -- open sizes ----------------------------------------------------------------------------------------------------------------


def attention_block():
    """What an exporter writes for one block of a small encoder: shapes are read, picked and joined for every reshape."""
    rng = np.random.default_rng(0)
    weights = {n: np.float32(rng.standard_normal((8, 8)) / 3) for n in ("wq", "wk", "wv", "wo")}
    weights |= {"table": np.float32(rng.standard_normal((10, 8))), "cls": np.float32(rng.standard_normal((1, 1, 8)))}
    weights |= {"g": np.ones(8, np.float32), "b": np.zeros(8, np.float32)}
    return model_of(
        """block (int64[batch, 5] ids) => (float[batch, 8] y) {
          e = Gather(table, ids)
          s = Shape<start=0, end=1>(ids)
          one = Constant<value_ints=[1]>()
          eight = Constant<value_ints=[8]>()
          many = Concat<axis=0>(s, one, eight)
          first = Expand(cls, many)
          x = Concat<axis=1>(first, e)
          n = LayerNormalization(x, g, b)
          sx = Shape(x)
          zero = Constant<value_int=0>()
          rows = Gather(sx, zero)
          zeros = Constant<value_ints=[0]>()
          r = Unsqueeze(rows, zeros)
          rest = Constant<value_ints=[6, 2, 4]>()
          heads = Concat<axis=0>(r, rest)
          q0 = MatMul(n, wq)
          q1 = Reshape(q0, heads)
          q = Transpose<perm=[0, 2, 1, 3]>(q1)
          k0 = MatMul(n, wk)
          k1 = Reshape(k0, heads)
          k = Transpose<perm=[0, 2, 3, 1]>(k1)
          v0 = MatMul(n, wv)
          v1 = Reshape(v0, heads)
          v = Transpose<perm=[0, 2, 1, 3]>(v1)
          half = Constant<value_float=0.5>()
          qk = MatMul(q, k)
          scores = Mul(qk, half)
          p = Softmax<axis=-1>(scores)
          o = MatMul(p, v)
          o1 = Transpose<perm=[0, 2, 1, 3]>(o)
          back = Constant<value_ints=[-1, 8]>()
          joined = Concat<axis=0>(r, back)
          o2 = Reshape(o1, joined)
          o3 = MatMul(o2, wo)
          a = Add(x, o3)
          y = Gather<axis=1>(a, zero)
        }""",
        **weights,
    )


def test_an_open_batch_goes_through_shape_gather_concat_reshape_and_expand():
    model = fx.onnx.load(attention_block())
    assert model["y"].shape == (-1, 8) and model["q1"].shape == (-1, 6, 2, 4)
    rng = np.random.default_rng(1)
    for rows in (1, 3):
        ids = rng.integers(0, 10, (rows, 5))
        # the same operators, of which the session knows all shapes when it writes them
        np.testing.assert_allclose(run(model, {"ids": ids}, "y"), model.run([ids])[0], rtol=1e-6, atol=1e-6)


def test_a_model_with_an_open_batch_trains_on_ranks_as_on_one_device():
    model = fx.onnx.load(attention_block())
    with fx.unique_name.guard():
        loss = fx.onnx.set_training(model, head=lambda m: fx.layers.fc(m["y"], 3), loss="softmax_with_cross_entropy")
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.SGD(0.1).minimize(loss)
    rng = np.random.default_rng(2)
    feeds = [{"ids": rng.integers(0, 10, (4, 5)), "label": rng.integers(0, 3, (4, 1))} for _ in range(2)]
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    expected = [exe.run(model.program, feed=f, fetch_list=[loss], scope=scope)[0] for f in feeds]
    t = fx.DistributeTranspiler(fx.strategies.data_parallel())
    t.transpile(program=model.program, startup_program=model.startup, trainers=2)
    assert t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        found = [ranks.run(feed=f, fetch_list=[loss])[0] for f in feeds]
    np.testing.assert_allclose(found, expected, rtol=1e-5)  # sums of float32 in another order


def test_sizes_are_computed_with_and_products_of_one_open_size_are_known():
    model = fx.onnx.load(
        model_of("""g (float[n, 6] x) => (float[m, 3] y) {
      s = Shape(x)
      zero = Constant<value_ints=[0]>()
      two = Constant<value_ints=[2]>()
      three = Constant<value_ints=[3]>()
      n0 = Gather(s, zero)
      twice = Mul(n0, two)
      target = Concat<axis=0>(twice, three)
      y = Reshape(x, target)
    }""")
    )
    assert model["y"].shape == (-1, 3)
    x = np.float32(np.arange(24).reshape(4, 6))
    assert np.array_equal(run(model, {"x": x}, "y"), x.reshape(8, 3))


def test_an_open_size_is_computed_with():
    text = """g (float[n, 6] x) => (float[n, 6] y) {
      s = Shape(x)
      zero = Constant<value_int=0>()
      n0 = Gather(s, zero)
      count = Cast<to=1>(n0)
      y = Div(x, count)
    }"""
    for model in fx.onnx.load(model_of(text)), fx.onnx.load(model_of(text), shapes={"x": [8, 6]}):
        assert run(model, {"x": np.full((8, 6), 16, np.float32)}, "y").tolist() == [[2.0] * 6] * 8


def test_where_an_open_size_is_not_enough_the_node_and_the_way_out_are_named():
    text = """g (float[n, m] x) => (float[n, p] y, float[n, q] z) {
      m = Shape<start=1>(x)
      two = Constant<value_ints=[2]>()
      half = Div(m, two)
      rest = Sub(m, half)
      parts = Concat<axis=0>(half, rest)
      y, z = Split<axis=1>(x, parts)
    }"""
    with pytest.raises(OnnxError) as e:
        fx.onnx.load(model_of(text))
    assert str(e.value) == (
        "node 'Split' (Split) needs the value of 'parts' to know sizes or control flow, but this value depends on the feeds. If sizes "
        "determine it, give them: load(shapes=...). fx.onnx.session runs such models"
    )
    model = fx.onnx.load(model_of(text), shapes={"x": [2, 5]})
    assert run(model, {"x": np.zeros((2, 5), np.float32)}, "y").shape == (2, 2)


@pytest.mark.parametrize(
    ("nodes", "shape", "expected"),
    [
        ("y = Shape(x)", (3, 5), [3, 5]),
        ("y = Shape<start=-1>(x)", (3, 5), [5]),
        ("y = Size(x)", (3, 5), 15),
        ("s = Shape(x)  two = Constant<value_ints=[2]>()  y = Mul(s, two)", (3, 5), [6, 10]),
        ("s = Shape(x)  two = Constant<value_ints=[2]>()  y = Div(s, two)", (3, 5), [1, 2]),
        ("s = Shape(x)  two = Constant<value_ints=[2]>()  h = Div(s, two)  d = Mul(h, two)  y = Sub(s, d)", (3, 4), [1, 0]),
        ("s = Shape(x)  less = Constant<value_ints=[-1]>()  y = Mul(s, less)", (3, 5), [-3, -5]),
        ("s = Shape(x)  some = Constant<value_ints=[720]>()  y = Div(s, some)", (3, 1441), [0, 2]),
        ("n = Shape<end=1>(x)  m = Shape<start=1>(x)  y = Sub(m, n)", (3, 5), [2]),
        ("s = Shape(x)  ten = Constant<value_ints=[10]>()  y = Sub(ten, s)", (3, 5), [7, 5]),
        ("s = Shape(x)  one = Constant<value_int=1>()  y = Gather(s, one)", (3, 5), 5),
        ("s = Shape(x)  i = Cast<to=6>(s)  f = Cast<to=7>(i)  y = Identity(f)", (3, 5), [3, 5]),
    ],
)
def test_sizes_are_results_as_other_values_are(nodes, shape, expected):
    model = fx.onnx.load(model_of(f"g (float[n, m] x) => (int64[k] y) {{ {nodes} }}"))
    found = run(model, {"x": np.zeros(shape, np.float32)}, "y")
    assert (found.dtype, found.tolist()) == (np.int64, expected)


@pytest.mark.parametrize(("size", "expected"), [(4, [0, 1, 2, 3]), (5, [0, 1, 2, 3]), (1, [])])
def test_half_a_size_is_rounded_down(size, expected):
    text = """g (float[n] x) => (float[m] y) {
      n = Shape(x)
      two = Constant<value_ints=[2]>()
      zero = Constant<value_ints=[0]>()
      half = Div(n, two)
      even = Mul(half, two)
      y = Slice(x, zero, even)
    }"""
    assert run(fx.onnx.load(model_of(text)), {"x": np.arange(size, dtype="float32")}, "y").tolist() == expected


def test_sizes_of_two_names_stay_apart_however_late_each_is_asked_for():
    text = """g (float[a, 6] x, float[b, 3] z) => (float[p, q] y, float[b, 3] u, bool[1] same) {
      b = Shape<start=0, end=1>(z)
      u = Relu(z)
      rest = Constant<value_ints=[-1]>()
      shape = Concat<axis=0>(b, rest)
      a = Shape<start=0, end=1>(x)
      y = Reshape(x, shape)
      same = Equal(a, b)
    }"""
    model = fx.onnx.load(model_of(text))
    feed = {"x": np.zeros((4, 6), np.float32), "z": np.zeros((2, 3), np.float32)}
    assert run(model, feed, "y").shape == (2, 12)
    assert run(model, feed, "same").tolist() == [False]
    feed["z"] = np.zeros((4, 3), np.float32)
    assert run(model, feed, "same").tolist() == [True]


def axes_of(proto):
    return [[d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in (*proto.graph.input, *proto.graph.output)]


@pytest.mark.parametrize(
    ("shapes", "declared", "result"),
    [
        ([["N", "seq"], ["N", "seq"]], [["N", "seq"], ["N", "seq"]], ["N", "seq"]),
        ([["N", 3], ["M", 3]], [["N", 3], ["M", 3]], ["y_0", 3]),  # one of them may be 1
        ([["2*n", 3], ["2*n", 3]], [["_2_n", 3], ["_2_n", 3]], ["_2_n", 3]),
        ([["a b", 3], ["a_b", 3]], [["a_b_1", 3], ["a_b", 3]], ["y_0", 3]),
        ([[None, 3], [None, 3]], [["x0_0", 3], ["x1_0", 3]], ["y_0", 3]),  # nothing says that they are equal
    ],
)
def test_names_of_axes_are_kept_and_written_again(shapes, declared, result):
    from onnx import TensorProto, helper

    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x0", shapes[0]), ("x1", shapes[1]), ("y", [None] * 2))]
    proto = helper.make_model(helper.make_graph([helper.make_node("Add", ["x0", "x1"], ["y"])], "g", infos[:2], infos[2:]))
    model = fx.onnx.load(proto)
    assert [[str(d) if d < 0 else d for d in v.shape] for v in model.feeds] == declared
    again = fx.onnx.export.to_onnx(model.program, model.feeds, model.fetches)
    assert axes_of(again) == [*declared, result] and str(fx.onnx.load(again).program) == str(model.program)


def test_shapes_may_name_axes():
    model = fx.onnx.load(model_of("g (float[2, 6] x) => (float[2, 6] y) { y = Relu(x) }"), shapes={"x": ["rows", 6]})
    assert str(model["y"].desc.type) == "f32[rows,6]"


def test_a_size_that_is_fixed_in_the_model_can_be_opened():
    model = fx.onnx.load(model_of("g (float[1, 6] x) => (float[1, 6] y) { y = Relu(x) }"), shapes={"x": [-1, 6]})
    assert model["y"].shape == (-1, 6)


# -- names ---------------------------------------------------------------------------------------------------------------------


def test_every_value_has_its_name():
    model = fx.onnx.load(attention_block())
    assert [v.name for v in model.feeds] == ["ids"] and [v.name for v in model.fetches] == ["y"]
    assert model["scores"].name == "scores" and model["wq"].name == "wq" and [p.name for p in model.parameters][0] == "table"
    with pytest.raises(OnnxError, match="the model has no value 'score'; did you mean 'scores'?"):
        model["score"]


def test_a_model_is_one_program_however_often_it_is_loaded():
    assert fx.onnx.load(attention_block()).program == fx.onnx.load(attention_block()).program


# -- what is refused -----------------------------------------------------------------------------------------------------------


def test_all_nodes_that_are_unknown_are_listed_before_anything_is_built():
    x = onnx.helper.make_tensor_value_info("x", 1, [2])
    nodes = [
        onnx.helper.make_node("Relux", ["x"], ["a"], name="first"),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("FusedThing", ["b"], ["y"], domain="com.unheard"),
    ]
    model = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [onnx.helper.make_tensor_value_info("y", 1, [2])]))
    with pytest.raises(OnnxError) as e:
        fx.onnx.load(model)
    assert str(e.value) == (
        "fluidx has no operator for 2 nodes of the model:\n"
        "  first (Relux): did you mean 'Relu'?\n"
        "  y (FusedThing of domain 'com.unheard'): fluidx has no operator of that domain\n"
        "Write an importer for it, which returns its outputs by operators of fluidx, before you load the model:\n"
        '    @fx.onnx.face("FusedThing", domain="com.unheard")\n'
        "    def imported(n):\n"
        "        return n.b.relu(n.x(0))"
    )


@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"z": [1, 6]}, "shapes names 'z'; the inputs are: x"),
        ({"x": [6]}, r"shapes gives input 'x' 1 axes, \[6\]; the model has 2, \[n, 6\]"),
        ({"x": 6}, "shapes gives input 'x' 6; a shape is a list of sizes and names"),
        ([[1, 6]], "shapes are given by name, .* not as list"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(OnnxError, match=message):
        fx.onnx.load(model_of("g (float[n, 6] x) => (float[n, 6] y) { y = Relu(x) }"), shapes=shapes)


def test_inputs_and_outputs_may_have_no_shape_in_the_file():
    proto = model_of("g (float[n, 6] x) => (float[n, 6] y) { y = Relu(x) }")
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(OnnxError, match=r"input 'x' has no shape; give it: load\(shapes="):
        fx.onnx.load(proto)
    model = fx.onnx.load(proto, shapes={"x": ["rows", 6]})
    assert [str(v.desc.type) for v in (*model.feeds, *model.fetches)] == ["f32[rows,6]"] * 2


@pytest.mark.parametrize("at", [[1, 5], [[0, 1], [2, 1]]])
def test_a_sparse_initializer_is_a_weight(at):
    """Its elements lie where flat or full positions say; all others are 0."""
    proto = model_of("g (float[n, 3] x) => (float[n, 2] y) { y = MatMul(x, w) }")
    values = onnx.numpy_helper.from_array(np.float32([3, -4]), "w")
    proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, onnx.numpy_helper.from_array(np.int64(at)), [3, 2]))
    model, x = fx.onnx.load(proto), np.float32([[1, 2, 5]])
    assert [str(p.desc.type) for p in model.parameters] == ["f32[3,2]"]
    assert run(model, {"x": x}, "y").tolist() == fx.onnx.session(proto).run([x])[0].tolist() == [[0, 3 - 20]]
    constant = onnx.helper.make_node("Constant", [], ["w"], sparse_value=proto.graph.sparse_initializer.pop())
    proto.graph.node.insert(0, constant)
    assert fx.onnx.session(proto).run([x])[0].tolist() == [[0, 3 - 20]]


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
@pytest.mark.parametrize(("versions", "axes"), [((18, 18), "input"), ((18, 11), "attribute"), ((11, 18), "input")])
def test_of_an_opset_that_is_imported_twice_the_last_counts(domain, versions, axes):
    """As in ONNX Runtime and onnx's checker: Squeeze has its axes as an attribute up to opset 12, and as an input from 13 on."""
    text = {"input": "z = Constant <value_ints = [0]> ()  y = Squeeze (x, z)", "attribute": "y = Squeeze <axes = [0]> (x)"}[axes]
    proto = model_of(f"g (float[1, n] x) => (float[n] y) {{ {text} }}")
    del proto.opset_import[:]
    for name, version in zip(("", domain), versions, strict=True):
        proto.opset_import.add(domain=name, version=version)
    before = proto.SerializeToString()
    assert run(fx.onnx.load(proto), {"x": np.float32([[1, 2]])}, "y").tolist() == [1, 2]
    assert fx.onnx.session(proto).run([np.float32([[1, 2]])])[0].tolist() == [1, 2]
    assert proto.SerializeToString() == before


@pytest.mark.parametrize(("domain", "version", "newest"), [("", 99, "28"), ("ai.onnx", 99, "28"), ("ai.onnx.ml", 77, r"\d+")])
def test_an_opset_that_is_not_known_is_refused(domain, version, newest):
    proto = model_of("g (float[n, 3] x) => (float[n, 3] y) { y = Relu(x) }")
    if domain != "ai.onnx.ml":
        del proto.opset_import[:]
    proto.opset_import.add(domain=domain, version=version)
    said = f"opset {version} of {domain or 'ai.onnx'}; fluidx with the installed onnx reads opsets up to {newest}: export it with"
    with pytest.raises(OnnxError, match=said):
        fx.onnx.load(proto)
    with pytest.raises(OnnxError, match=said):
        fx.onnx.session(proto)


def test_a_file_that_is_none_is_said_to_be_none(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model at all")
    with pytest.raises(OnnxError, match="m.onnx: not an ONNX model"):
        fx.onnx.load(tmp_path / "m.onnx")
    with pytest.raises(OnnxError, match="cannot read .*gone.onnx: No such file"):
        fx.onnx.load(tmp_path / "gone.onnx")


def test_a_damaged_file_gives_an_error_and_no_traceback():
    whole, draw = attention_block().SerializeToString(), random.Random(5)
    for k in range(150):
        data = bytearray(whole[: draw.randrange(len(whole))] if k % 3 == 0 else whole)
        for _ in range(0 if k % 3 == 0 else draw.choice([1, 3, 20])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            fx.onnx.load(bytes(data))
        except OnnxError as e:
            assert str(e)


def test_what_a_session_is_fed_has_to_be_what_the_model_takes():
    ready = fx.onnx.session(model_of("g (float[rows, 2] x) => (float[rows, 2] y) { y = Relu(x) }"))
    x = np.ones((3, 2), "float32")
    for feed, message in (
        ([x, x], "2 values are fed; the model has: x"),
        (x, "in a dict, or in order in a list, not as ndarray; the model has: x"),
        ({}, "input 'x' is not fed; the model has: x"),
        ({"z": x}, "'z' is not an input, and input 'x' is not fed; the model has: x"),
        ({"x": x, "z": x}, "'z' is not an input; the model has: x"),
        ({"x": x.astype("complex64")}, "input 'x' takes float32, found complex64; convert it first"),
        ({"x": x * np.float64(1e300)}, r"input 'x' takes float32, the array holds 1e\+300, which float32 cannot"),
        ({"x": "text"}, "input 'x' takes float32, found strings; convert it first"),
        ({"x": x[0]}, r"input 'x' has 2 axes, \[rows, 2\]; found \[2\]"),
    ):
        with pytest.raises(fx.onnx.OnnxError, match=message):
            ready.run(feed)


@pytest.mark.parametrize("source", [5, None, [1]])
def test_what_is_no_model_at_all_is_said(source):
    with pytest.raises(fx.onnx.OnnxError, match="a model is a path, bytes or an onnx.ModelProto, not "):
        fx.onnx.load(source)


def test_an_operator_that_a_later_opset_brought_is_told_with_that_opset():
    text = "g (float[1, 1, 2, 4] q) => (float[1, 1, 2, 4] y) { y = Attention(q, q, q) }"
    model = model_of(text)
    model.opset_import[0].version = 21
    with pytest.raises(OnnxError, match="there is no such operator in opset 21; it came with opset 23"):
        fx.onnx.load(model)


def test_integers_that_no_float_has_stay_what_they_are():
    text = """g (int64[1] s, int64[1] x) => (int64[1] z) {
      big = Constant<value_ints=[9007199254740993]>()
      z = Add(x, big)
    }"""
    assert run(fx.onnx.load(model_of(text)), {"x": np.array([0])}, "z").tolist() == [2**53 + 1]
    filled = "g (int64[1] s) => (int64[n] y) { y = ConstantOfShape<value=int64[1] {9007199254740993}>(s) }"
    with pytest.raises(OnnxError, match="it fills with 9007199254740993, which a 64-bit float cannot hold exactly"):
        fx.onnx.load(model_of(filled))
    assert fx.onnx.session(model_of(filled)).run([np.array([2])])[0].tolist() == [2**53 + 1] * 2
