"""Whatever a model holds, it gives something or a fluidx error, in little time and memory. FLUIDX_FUZZ=N breaks N models an operator."""

import os
import random

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx", minversion="1.23")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from fluidx.onnx import limits  # noqa: E402

from . import fuzzing, suite  # noqa: E402

OnnxError = fx.onnx.OnnxError
EACH = int(os.environ.get("FLUIDX_FUZZ", "1"))
# every fifth file: each that is taken has to make its cases first
FILES = suite.node_files() if EACH > 1 else suite.node_files()[1::5]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(limits, "MEMORY", 2**26)
    monkeypatch.setattr(limits, "ROUNDS", 20)


def graph_of(nodes, inputs=(), outputs=("y",), held=None, name="g"):
    kinds = inputs if isinstance(inputs, dict) else dict.fromkeys(inputs, np.dtype("float32"))
    ins = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(kind), None) for n, kind in kinds.items()]
    ends = [helper.make_empty_tensor_value_info(n) for n in outputs]
    return helper.make_graph(nodes, name, ins, ends, [numpy_helper.from_array(np.asarray(v), n) for n, v in (held or {}).items()])


def model_of(nodes, inputs=(), outputs=("y",), held=None, opset=28):
    return helper.make_model(graph_of(nodes, inputs, outputs, held), opset_imports=[helper.make_opsetid("", opset)])


def refused(model, feed=(), match=""):
    with pytest.raises(OnnxError, match=match):
        fx.onnx.session(model).run(dict(feed))


@pytest.mark.parametrize("file", FILES)
def test_broken_cases_raise_fluidx_errors_alone(file):
    draw = random.Random(file)
    for case in draw.choices(list(suite.node_cases(file).values()), k=EACH * 3):
        inputs = next(iter(suite.data_of(case)))[0]
        for _ in range(2):
            fuzzing.tried(fuzzing.mutated(case.model, draw), fuzzing.fed(list(inputs), draw))


X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize("held", [True, False], ids=["held", "fed"])
@pytest.mark.parametrize(
    "op, operands",
    [
        ("ConstantOfShape", [np.array([2**40])]),
        ("ConstantOfShape", [np.array([-1])]),
        ("ConstantOfShape", [np.full(9, 2**62)]),
        ("ConstantOfShape", [np.full(100, 1)]),
        ("Expand", [X, np.array([2**50, 2, 3])]),
        ("Tile", [X, np.array([2**25, 2**25])]),
        ("Tile", [X, np.array([-1, 1])]),
        ("Range", [np.array(0), np.array(10**12), np.array(1)]),
        ("Range", [np.array(0), np.array(5), np.array(0)]),
        ("Pad", [X, np.array([0, 0, 2**40, 0])]),
        ("OneHot", [np.array([1]), np.array(2**40), np.float32([0, 1])]),
        ("Resize", [X, None, None, np.array([2**30, 2**30])]),
        ("Reshape", [X, np.array([2**40, -1])]),
        ("BlackmanWindow", [np.array(2**45)]),
        ("DFT", [X[..., None], np.array(2**45)]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_sizes_that_no_memory_holds_are_refused_before_they_are_allocated(op, operands, held):
    given = {f"x{k}": v for k, v in enumerate(operands) if v is not None}
    node = helper.make_node(op, [f"x{k}" if v is not None else "" for k, v in enumerate(operands)], ["y"])
    inputs = {} if held else {name: v.dtype for name, v in given.items()}
    refused(model_of([node], inputs, held=given if held else None), {} if held else given, f"node '({op}|Range)' ")


def test_windows_that_no_memory_holds_are_refused():
    node = helper.make_node("MaxPool", ["x"], ["y", "at"], kernel_shape=[2**30], pads=[2**31, 2**31])
    refused(model_of([node], ["x"], ["y", "at"]), {"x": X[None]}, "it asks for")


@pytest.mark.parametrize("smallest, largest, skips", [(-(2**63), 2, 0), (0, 2, 0), (2, 2**62, 2**62)])
def test_n_grams_of_any_length_are_counted_in_bounded_time(smallest, largest, skips):
    gram = {"mode": "TF", "min_gram_length": smallest, "max_gram_length": largest, "max_skip_count": skips}
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], **gram, ngram_counts=[0, 0], ngram_indexes=[0], pool_int64s=[1, 3])
    model, x = model_of([node], {"x": np.dtype("int64")}), np.array([1, 2, 3])
    if smallest < 1:
        refused(model, {"x": x}, f"min_gram_length is {smallest}, but an n-gram has at least one item")
    else:
        assert fx.onnx.session(model).run([x])[0].tolist() == [1.0]  # 1 and 3, of which 2 is skipped


def test_the_message_says_how_much_is_asked_for_and_how_much_there_is():
    refused(
        model_of([helper.make_node("ConstantOfShape", ["n"], ["y"])], held={"n": np.array([2**40])}),
        match=r"^node 'ConstantOfShape' \(ConstantOfShape\): it asks for the shape \[1099511627776\]: 4.1e\+03 GB, and this machine has",
    )


def test_what_is_not_expected_names_the_node_its_operands_and_the_cause(monkeypatch):
    from fluidx.onnx.table import IMPORTERS

    monkeypatch.setitem(IMPORTERS, ("", "Relu"), lambda n: {}["lost"])
    with pytest.raises(OnnxError, match=r"^node 'Relu' \(Relu\): KeyError: 'lost'; the operands are float32\[2, 3\]$") as e:
        fx.onnx.session(model_of([helper.make_node("Relu", ["x"], ["y"])], ["x"])).run([X])
    assert isinstance(e.value.__cause__, KeyError)


def nested(depth):
    """A copy behind so many conditions; written in place, since files cannot hold many."""
    model = model_of([], ["x"], held={"c": np.array(True)})
    graph = model.graph
    for _ in range(depth):
        node = graph.node.add(op_type="If", input=["c"], output=["y"])
        node.attribute.add(name="else_branch", type=onnx.AttributeProto.GRAPH).g.CopyFrom(graph_of([], outputs=()))
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        graph.output.add(name="y")
    graph.node.add(op_type="Identity", input=["x"], output=["y"])
    return model


def test_graphs_in_graphs_end_somewhere():
    assert fx.onnx.session(nested(20)).run([X])[0].shape == (2, 3)
    refused(nested(200), {"x": X}, "graphs are nested 64 deep")


def test_a_loop_that_does_not_end_is_left():
    body = graph_of(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["s"], ["t"])], ["k", "c", "s"], ["d", "t"], name="body"
    )
    node = helper.make_node("Loop", ["", "", "x"], ["y"], body=body)
    refused(model_of([node], ["x"]), {"x": X}, "has not ended after 20 rounds")


RELU = helper.make_node("Relu", ["x"], ["y"])


@pytest.mark.parametrize("op, value", [("LayerNormalization", 2**63 - 1), ("Softmax", -(2**32)), ("Flatten", 65)])
def test_an_axis_that_no_array_has_is_refused(op, value):
    node = helper.make_node(op, ["x", "x"] if op == "LayerNormalization" else ["x"], ["y"], axis=value)
    refused(model_of([node], ["x"], opset=17), {"x": X}, f"attribute 'axis' names axis {value}, and no array has more than 64 axes")


@pytest.mark.parametrize(
    "nodes, message",
    [
        ([helper.make_node("Add", ["x", "z"], ["y"]), helper.make_node("Relu", ["y"], ["z"])], "which no node before it computes"),
        ([RELU, RELU], "defines 'y', which an earlier node defines too"),
        ([helper.make_node("Relu", ["x", "x"], ["y"])], "expected 1 operands, found 2"),
        ([helper.make_node("Add", ["x", ""], ["y"])], "operand 1 is left out"),
        ([helper.make_node("Flatten", ["x"], ["y"], axis="one")], "attribute 'axis' is of type INT, found STRING"),
        ([helper.make_node("Cast", ["x"], ["y"])], "it has no attribute 'to'"),
        ([helper.make_node("Transpose", ["x"], ["y"], perm=[0, 7])], "node 'Transpose'"),
        ([helper.make_node("Softmax", ["x"], ["y"], axis=9)], "node 'Softmax'"),
        ([helper.make_node("Fused", ["x"], ["y"], domain="com.example")], "Fused"),
        ([helper.make_node("Relux", ["x"], ["y"])], "did you mean 'Relu'"),
        ([helper.make_node("Relu", ["x"], ["z"])], "has the output 'y', which no node computes"),
    ],
)
@pytest.mark.parametrize("opset", [18, 28])
def test_what_has_not_the_form_of_a_model_is_refused(nodes, message, opset):
    refused(model_of(nodes, ["x"], opset=opset), {"x": X}, message)


def outside(tmp_path, **place):
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], ["x"], held={"w": X})
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(np.float32([[1, 2, 3], [4, 5, 6]]).tobytes() + b"rest")
    (tmp_path / "secret").write_bytes(b"x" * 24)
    (folder / "link").symlink_to(tmp_path / "secret")
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def test_a_tensor_beside_the_model_is_read_from_its_offset(tmp_path):
    path = outside(tmp_path, location="w.bin", offset=4, length=24)
    assert fx.onnx.session(path).run([X])[0].ravel()[:5].tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "place, message",
    [
        ({"location": "../secret"}, "outside of the model's folder"),
        ({"location": "/etc/hostname"}, "outside of the model's folder"),
        ({"location": "link"}, "outside of the model's folder"),
        ({"location": "w\0.bin"}, "a file name cannot contain NUL"),
        ({"location": "a" * 5000}, "there is no such file: File name too long"),
        ({"location": "gone.bin"}, "no such file"),
        ({}, "its external_data names none"),
        ({"location": "w.bin", "offset": 20}, "bytes 20 to 44; the file has 28"),
        ({"location": "w.bin", "offset": 20, "length": 24}, "bytes 20 to 44; the file has 28"),
        ({"location": "w.bin", "length": 2**60}, r"length of 1152921504606846976 bytes, but its shape \[2, 3\] of float32 needs 24"),
        ({"location": "w.bin", "length": 20}, "needs 24"),
        ({"location": "w.bin", "offset": -4}, "offset '-4', which is not a number of bytes"),
        ({"location": "w.bin", "offset": "far"}, "not a number of bytes"),
        ({"location": "w.bin", "length": "9" * 5000}, "not a number of bytes"),
    ],
)
def test_tensors_outside_of_the_file_are_confined_to_its_folder(tmp_path, place, message):
    refused(outside(tmp_path, **place), {"x": X}, message)


@pytest.mark.parametrize(
    ("shape", "code", "message"),
    [
        ([2**18, 2**18], TensorProto.FLOAT, "64 GB, and this machine has"),
        ([2**62, 2**62], TensorProto.FLOAT, "which no array has"),
        ([-2, 3], TensorProto.FLOAT, "sizes must not be negative"),
        ([2, 3], TensorProto.STRING, "has strings, which a model cannot store in another file"),
        ([2, 3], 99, "there is no tensor type 99"),
    ],
)
def test_what_lies_in_another_file_is_looked_at_before_it_is_read(tmp_path, monkeypatch, shape, code, message):
    monkeypatch.setattr(limits, "MEMORY", 2**30)
    path = outside(tmp_path, location="w.bin", length=2**40)
    with open(path.with_name("w.bin"), "wb") as stream:
        stream.truncate(2**40)  # takes no place on the disk
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].dims[:], model.graph.initializer[0].data_type = shape, code
    path.write_bytes(model.SerializeToString())
    refused(path, {"x": X}, message)


def test_tensors_beside_a_model_fit_into_memory_together(tmp_path, monkeypatch):
    path = outside(tmp_path, location="w.bin")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer.extend(model.graph.initializer[0].__deepcopy__({}) for _ in range(9))
    path.write_bytes(model.SerializeToString())
    monkeypatch.setattr(limits, "MEMORY", 200)
    refused(path, {"x": X}, "have 240 bytes, and this machine has 200")


def test_of_a_file_that_is_longer_than_its_tensor_the_rest_is_left(tmp_path):
    """The length may be left out; numbers of 4 bits are two to a byte."""
    assert fx.onnx.session(outside(tmp_path, location="w.bin")).run([X])[0].tolist() == (X + np.float32([[1, 2, 3], [4, 5, 6]])).tolist()


def test_bytes_have_no_folder(tmp_path):
    refused(outside(tmp_path, location="w.bin").read_bytes(), {"x": X}, "load the model by its path")


def test_a_model_and_its_tensors_may_be_links_to_files_that_lie_together(tmp_path):
    """As caches of downloaded models have them."""
    path, links = outside(tmp_path, location="w.bin", offset=4, length=24), tmp_path / "links"
    expected = fx.onnx.session(path).run([X])[0]
    links.mkdir()
    for name in ("m.onnx", "w.bin"):
        (links / name).symlink_to(path.with_name(name))
    np.testing.assert_array_equal(fx.onnx.session(links / "m.onnx").run([X])[0], expected)


def test_a_model_in_memory_has_no_folder(tmp_path):
    proto = onnx.load(outside(tmp_path, location="w.bin", offset=4, length=24), load_external_data=False)
    for read in (fx.onnx.load, fx.onnx.session):
        with pytest.raises(fx.onnx.OnnxError, match="tensor 'w' is stored in another file; load the model by its path"):
            read(proto)


SMALL = """<ir_version: 10, opset_import: ["": 17, "own": 1]>
    g (float[n, 2] x) => (float[n, 2] y) {
        often = Constant <value = int64 {3}> ()
        goes = Constant <value = bool {1}> ()
        z = Loop (often, goes, x) <body = b (int64 k, bool c, float[n, 2] s) => (bool d, float[n, 2] t) {
            d = Identity (c)
            t = own.f (s)
        }>
        h = MatMul (z, w)
        y = BatchNormalization (h, one, zero, zero, one)
    }
    <domain: "own", opset_import: ["": 17, "own": 1]> f (a) => (b) { b = Sin (a) }"""


def small_file():
    model = onnx.parser.parse_model(SMALL)
    for name, array in {"w": np.eye(2), "one": np.ones(2), "zero": np.zeros(2)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(array), name))
    return model.SerializeToString()


@pytest.mark.parametrize("seed", range(6))
def test_a_file_that_is_cut_or_has_other_bits_ends_in_an_error_of_fluidx(seed, tmp_path, monkeypatch):
    from fluidx.onnx.report import info

    monkeypatch.setattr(limits, "MEMORY", 2**26)
    monkeypatch.setattr(limits, "OPERATORS", 1000)
    draw, whole = random.Random(seed), small_file()
    for _ in range(25):
        broken = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        for _ in range(draw.choice([0, 1, 1, 3]) if broken else 0):
            broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        (tmp_path / "m.onnx").write_bytes(broken)
        for read in (fx.onnx.load, fx.onnx.session, info):
            try:
                read(tmp_path / "m.onnx")
            except fx.FluidxError as e:
                assert str(e)


@pytest.mark.parametrize("old", [b"batch_axis", b"somebody"])
def test_names_of_axes_and_of_who_wrote_a_file_are_text(tmp_path, old):
    from fluidx.onnx.report import info

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch_axis", 2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    data = helper.make_model(graph, producer_name="somebody", opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data.replace(old, b"\xff" * len(old)))
    for read in (fx.onnx.load, fx.onnx.session, info):
        with pytest.raises(OnnxError, match="is not UTF-8 text, as names must be; the file is damaged"):
            read(tmp_path / "m.onnx")
