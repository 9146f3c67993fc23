"""Open axes: what a model computes of their sizes are sizes, also on ranks; files of PyTorch's exporter train there as they come."""

from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir.data_dependent_ops import cutting
from fluidx.testing.models import TestModel, train_ranks, train_single

onnx = pytest.importorskip("onnx")

from fluidx.onnx.importer import _describe  # noqa: E402
from fluidx.onnx.symbolic_sizes import OpenSizes  # noqa: E402

DATA = Path(__file__).parent / "data"


def loaded(text, **options):
    return fx.onnx.load(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> g {text}'), **options)


def run(model, **feed):
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    return [v.tolist() for v in exe.run(model.program, feed=feed, fetch_list=model.fetches, scope=scope)]


def sized(text):
    """A model in which all sizes are known when it is planned."""
    model = loaded(text)
    assert [op.type for op, _ in cutting(model.program)] == []
    return model


X = np.zeros((2, 3), np.float32)

# -- operators that take sizes -------------------------------------------------------------------------------------------------------


def test_a_range_up_to_a_size():
    model = sized("""(float[b, s] x) => (int64[n] y, int64[m] z, int64[k] w) {
      n = Shape<start=1, end=2>(x)  s = Squeeze(n)
      zero = Constant<value_int=0>()  one = Constant<value_int=1>()  two = Constant<value_int=2>()  back = Constant<value_int=-1>()
      y = Range(zero, s, one)
      more = Add(s, two)  z = Range(two, more, one)
      last = Sub(s, one)  w = Range(last, back, back)
    }""")
    assert run(model, x=X) == [[0, 1, 2], [2, 3, 4], [2, 1, 0]]
    assert run(model, x=X[:, :1]) == [[0], [2], [0]]


def test_positions_after_a_past_begin_at_its_length():
    model = sized("""(float[p] past, float[s] x) => (int64[n] y) {
      one = Constant<value_int=1>()
      p = Shape(past)  q = Squeeze(p)  s = Shape(x)  t = Squeeze(s)  all = Add(q, t)
      y = Range(q, all, one)
    }""")
    assert run(model, past=np.zeros(5, np.float32), x=np.zeros(2, np.float32)) == [[5, 6]]
    assert run(model, past=np.zeros(0, np.float32), x=np.zeros(3, np.float32)) == [[0, 1, 2]]


def test_a_table_is_cut_to_the_length_of_a_sequence():
    model = sized("""(float[b, s] x) => (int64[m, s] y) {
      n = Shape<start=1, end=2>(x)  zero = Constant<value_ints=[0]>()  one = Constant<value_ints=[1]>()
      table = Constant<value = int64[2, 4] {0, 1, 2, 3, 10, 11, 12, 13}>()
      y = Slice(table, zero, n, one)
    }""")
    assert run(model, x=X) == [[[0, 1, 2], [10, 11, 12]]]
    with pytest.raises(fx.ProgramError, match="axis 1 of '.*' i64.2,4. has 4 elements, and axis 1 of 'x' f32.2,5. asks for 5"):
        run(model, x=np.zeros((2, 5), np.float32))


def test_a_slice_from_beyond_the_end_is_empty():
    """The number of its elements is a number, -1, and no size."""
    model = loaded("""(float[b, s] x) => (float[b, m] y) {
      n = Shape<start=1, end=2>(x)
      one = Constant<value_ints=[1]>()  most = Constant<value_ints=[9223372036854775807]>()
      more = Add(n, one)  y = Slice(x, more, most, one)
    }""")
    assert run(model, x=X) == [[[], []]] and run(model, x=X[:, :0]) == [[[], []]]


def test_the_message_of_a_broken_node_shows_open_sizes():
    sizes = OpenSizes(np.array([1 << 40, 3]), np.array([None, None]), lambda: None, True, np.array([0, 3]), "int32")
    assert _describe(sizes) == "open sizes int32[2]"


def test_the_rows_of_a_mask_after_a_past():
    model = sized("""(float[p] past, float[s] x) => (int64[s] y, int64[n] z) {
      zero = Constant<value_ints=[0]>()
      p = Shape(past)  s = Shape(x)  all = Add(p, s)
      table = Constant<value = int64[6] {0, 1, 2, 3, 4, 5}>()
      y = Slice(table, p, all, zero)
      w = Concat<axis=0>(past, x)  i = Cast<to=7>(w)  last = Constant<value_ints=[9223372036854775807]>()
      z = Slice(i, p, last, zero)
    }""")
    assert run(model, past=np.zeros(2, np.float32), x=np.float32([7, 8, 9])) == [[2, 3, 4], [7, 8, 9]]


def test_a_rounded_half_of_a_size_is_a_size():
    """As after a convolution of stride 2: floor((n - 1) / 2) + 1."""
    model = sized("""(float[n] x) => (int64[m] y) {
      n = Shape(x)  zero = Constant<value_ints=[0]>()  one = Constant<value_ints=[1]>()  two = Constant<value_ints=[2]>()
      less = Sub(n, one)  half = Div(less, two)  m = Add(half, one)
      table = Constant<value = int64[6] {0, 1, 2, 3, 4, 5}>()
      y = Slice(table, zero, m, zero)
    }""")
    assert [len(run(model, x=np.zeros(n, np.float32))[0]) for n in (1, 2, 3, 4, 7, 8)] == [1, 1, 2, 2, 4, 4]


def test_a_causal_mask_of_open_sizes():
    model = sized("""(float[b, s] x) => (float[s, s] y, bool[s, t] z) {
      n = Shape<start=1, end=2>(x)  two = Constant<value_ints=[2]>()  m = Add(n, two)  square = Concat<axis=0>(n, n)
      ones = ConstantOfShape<value = float[1] {1}>(square)
      y = Trilu<upper=0>(ones)
      wide = Concat<axis=0>(n, m)  true = ConstantOfShape<value = bool[1] {1}>(wide)
      one = Constant<value_ints=[1]>()  k = Sub(n, one)  diagonal = Squeeze(k)
      z = Trilu<upper=1>(true, diagonal)
    }""")
    assert run(model, x=X) == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]], np.triu(np.ones((3, 5), bool), 2).tolist()]


def test_values_repeated_to_open_sizes():
    model = sized("""(float[b, s] x) => (float[b, s] y, float[n] z) {
      n = Shape<end=1>(x)  s = Shape<start=1, end=2>(x)  one = Constant<value_ints=[1]>()  both = Concat<axis=0>(n, s)
      c = Constant<value = float[1, 1] {5}>()
      y = Expand(c, both)
      d = Constant<value_floats=[2.0]>()  z = Tile(d, n)
    }""")
    assert run(model, x=X) == [[[5, 5, 5], [5, 5, 5]], [2, 2]]


def test_an_image_resized_to_open_sizes():
    model = sized("""(float[b, 1, h, w] x, float[b, 1, s, t] like) => (float[b, 1, s, t] y) {
      first = Shape<end=2>(x)  last = Shape<start=2>(like)  sizes = Concat<axis=0>(first, last)
      y = Resize<mode="nearest", nearest_mode="floor", coordinate_transformation_mode="asymmetric">(x, , , sizes)
    }""")
    x, like = np.float32([[[[0, 1], [2, 3]]]]), np.zeros((1, 1, 2, 4), np.float32)
    assert run(model, x=x, like=like) == [[[[[0, 0, 1, 1], [2, 2, 3, 3]]]]]
    assert run(model, x=x, like=np.zeros((1, 1, 3, 2), np.float32)) == [[[[[0, 1], [0, 1], [2, 3]]]]]


def test_heads_are_split_and_joined_with_two_open_axes():
    model = sized("""(float[b, 2, s, 4] x) => (float[c, s, 4] y, float[b, 2, s, 4] z) {
      n = Shape<end=1>(x)  s = Shape<start=2, end=3>(x)  two = Constant<value_ints=[2]>()  four = Constant<value_ints=[4]>()
      any = Constant<value_ints=[-1]>()
      flat = Concat<axis=0>(any, s, four)  y = Reshape(x, flat)
      whole = Concat<axis=0>(n, two, s, four)  z = Reshape(y, whole)
    }""")
    x = np.arange(48, dtype=np.float32).reshape(2, 2, 3, 4)
    assert run(model, x=x) == [x.reshape(4, 3, 4).tolist(), x.tolist()]


def test_a_value_takes_the_whole_shape_of_another():
    """As around a softmax of an old opset: axes are flattened, and then the shape is that of before."""
    model = sized("""(float[b, 2, s, t] x) => (float[b, 2, s, t] y) {
      whole = Shape(x)  flat = Flatten<axis=3>(x)  soft = Softmax(flat)  y = Reshape(soft, whole)
    }""")
    x = np.zeros((1, 2, 3, 4), np.float32)
    assert run(model, x=x) == [np.full((1, 2, 3, 4), 0.25).tolist()]


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("padding", ['auto_pad="SAME_UPPER"', "ceil_mode=1"])
def test_windows_whose_padding_depends_on_an_open_size(size, padding):
    """Windows of 2 with stride 2: the last one has one element if the size is odd."""
    model = sized(f"(float[1, 1, h, w] x) => (float[1, 1, i, j] y) {{ y = MaxPool<kernel_shape=[2, 2], strides=[2, 2], {padding}>(x) }}")
    x = np.arange(size * size, dtype=np.float32).reshape(1, 1, size, size)
    last = [min(2 * k + 1, size - 1) for k in range(-(-size // 2))]
    assert run(model, x=x)[0] == x[:, :, last][:, :, :, last].tolist()


def test_sizes_that_add_up_to_other_sizes_are_not_taken_for_equal():
    model = loaded("""(float[a] w, float[b] x, float[c] y, float[d] z) => (bool[1] one, bool[1] two) {
      a = Shape(w)  b = Shape(x)  c = Shape(y)  d = Shape(z)
      ad = Add(a, d)  bc = Add(b, c)  one = Equal(ad, bc)
      bb = Add(b, b)  ac = Add(a, c)  two = Equal(ac, bb)
    }""")
    sizes = {n: np.zeros(k, np.float32) for n, k in zip("wxyz", (5, 2, 3, 4), strict=True)}
    assert run(model, **sizes) == [[False], [False]]


def test_axes_that_a_file_calls_by_a_question_mark_are_not_equal():
    text = "(float[a] x, float[b] y) => (float[c] z) { z = Add(x, y) }"
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> g {text}')
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "?"
    model = fx.onnx.load(proto)
    assert run(model, x=np.float32([1]), y=np.float32([1, 2, 3])) == [[2, 3, 4]]


def test_a_table_that_is_only_compared_is_not_trained():
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 18]> g (float[n, 2] x) => (float[n, 2] y)
      <float[2, 2] w = {1, 2, 3, 4}, float[2] mask = {1, 0}> {
      zero = Constant<value_float=0.0>()  hidden = Equal(mask, zero)  h = MatMul(x, w)  y = Where(hidden, zero, h)
    }""")
    model = fx.onnx.load(proto)
    assert [p.name for p in model.parameters] == ["w"]
    from fluidx.onnx.roles import initializer_roles

    said = {r.name: r.why for r in initializer_roles(proto.graph, ["w"])}
    assert said == {"w": "MatMul", "mask": "the outputs depend on it through true and false alone (Equal)"}


# -- recurrent networks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, gates", [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_a_network_with_an_open_number_of_steps_gives_what_a_session_gives(kind, gates, direction):
    rng, many = np.random.default_rng(0), 1 + (direction == "bidirectional")
    weights = {"W": (many, gates * 4, 3), "R": (many, gates * 4, 4), "B": (many, 2 * gates * 4)}
    info, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    F, I = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32  # noqa: E741
    nodes = [node(kind, ["x", *weights, "lengths"], ["y", "last"], hidden_size=4, direction=direction)]
    inputs = [info("x", F, ["steps", "batch", 3]), info("lengths", I, ["batch"])]
    outputs = [info("y", F, [None] * 4), info("last", F, [None] * 3)]
    own = [onnx.numpy_helper.from_array(rng.standard_normal(s).astype("float32"), n) for n, s in weights.items()]
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, own)
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    model, session = fx.onnx.load(proto), fx.onnx.session(proto)
    assert "while" in [op.type for op in model.program.ops] and not list(cutting(model.program))
    for steps, lengths in ((5, [5, 2]), (1, [1, 1])):
        feed = {"x": rng.standard_normal((steps, 2, 3)).astype("float32"), "lengths": np.int32(lengths)}
        for found, want in zip(run(model, **feed), session.run(feed), strict=True):
            np.testing.assert_allclose(found, want, atol=1e-6)


# -- files of PyTorch's exporter ------------------------------------------------------------------------------------------------------

FREEZE = {"whisper": "positions"}  # a buffer, which a file does not tell from a parameter


def trained(name):
    """A model in training, its loss, and the steps: PyTorch 2.14 made the files with dynamo=True, the inputs and the losses."""
    model = fx.onnx.load(DATA / f"{name}_exported.onnx", untie=True)
    loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy", freeze=FREEZE.get(name, ()))
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.SGD(0.1).minimize(loss)
    with np.load(DATA / f"{name}_exported.npz") as stored:
        feed = dict(stored)
    losses = feed.pop("losses")
    return model, TestModel(model.program, model.startup, loss, lambda rows: feed, []), [feed] * len(losses), losses


NAMES = ["gpt", "gpt_table", "minilm", "whisper", "seq2seq"]


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_trains_as_in_pytorch(name):
    _, test, feeds, want = trained(name)
    values, _ = train_single(test, feeds, [test.loss])
    np.testing.assert_allclose([v[0].item() for v in values], want, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_trains_on_ranks_as_on_one_device(name, strategy):
    _, test, feeds, want = trained(name)
    values, _ = train_ranks(test, getattr(fx.strategies, strategy)(), 4, feeds, [test.loss])
    np.testing.assert_allclose([v[0].item() for v in values], want, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_is_saved_with_its_open_axes(name, tmp_path):
    model, test, feeds, _ = trained(name)
    _, scope = train_single(test, feeds[:1], [test.loss])
    fx.onnx.save(model.program, tmp_path / "trained.onnx", fetches=model.fetches, scope=scope)
    before, after = (onnx.load(p).graph.input for p in (DATA / f"{name}_exported.onnx", tmp_path / "trained.onnx"))
    assert [i.type for i in before] == [i.type for i in after]
    again = fx.onnx.load(tmp_path / "trained.onnx")
    assert not list(cutting(again.program))
    feed = {n: a[:2] for n, a in feeds[0].items() if n != "label"}
    exe = fx.Executor()
    exe.run(again.startup)
    whole = {**feed, "label": feeds[0]["label"][:2]}
    want = exe.run(model.program.clone(for_test=True), feed=whole, fetch_list=model.fetches, scope=scope)
    np.testing.assert_allclose(exe.run(again.program, feed=feed, fetch_list=again.fetches)[0], want[0], atol=1e-6)
