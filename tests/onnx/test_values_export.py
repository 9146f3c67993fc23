"""Programs of sequences, optionals and strings, written as ONNX: ONNX Runtime and the loaded program give what the program gives."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import fluidx as fx  # noqa: E402
from fluidx.ir import Builder  # noqa: E402
from fluidx.onnx.export import to_onnx  # noqa: E402

from .suite import same  # noqa: E402


def number(b, k, dtype="int64"):
    return b.fill_constant(shape=(1,), dtype=dtype, value=float(k))


def edited(b, s, x, k, **_):
    more = b.sequence_insert(s, x, k)
    return [more, b.sequence_insert(s, x), b.sequence_erase(more, k), b.sequence_erase(s), b.sequence_at(more, number(b, -1, "int32")),
            b.sequence_length(more)]  # fmt: skip


def cut(b, x, sizes, k, **_):
    flat, rows, listed = b.split_to_sequence(x, keepdims=False), b.split_to_sequence(x, axis=-1), b.split_to_sequence(x, sizes)
    twos = b.split_to_sequence(x, b.fill_constant(shape=(), dtype="int16", value=2.0))
    joined = [b.concat_from_sequence(flat, axis=1, new_axis=True), b.concat_from_sequence(rows, axis=-1)]
    return [flat, rows, listed, b.sequence_at(twos, k), *joined]


def made(b, x, s, **_):
    several = b.sequence_construct([x, b.scale(x, scale=2.0)])
    return [
        several,
        b.sequence_empty(elem="f32[*]"),
        b.sequence_insert(b.sequence_empty(elem="f32[3]"), b.sequence_at(several, number(b, 1))),
    ]


def asked(b, o, x, **_):
    return [b.optional_has_element(o), b.optional_get_element(o), b.optional(x), b.optional_has_element(x), b.optional_has_element(None),
            b.optional_get_element(x)]  # fmt: skip


def zipped(b, rows, m, **_):
    return [b.zip_map(rows, keys=("p", "q", "r")), b.zip_map(rows, keys=(4, 2, 9)), b.dict_vectorizer(m, keys=(5, 7, 2)), b.cast_map(m),
            b.cast_map(m, dtype="int64"), b.cast_map(m, size=6)]  # fmt: skip


def written(b, t, u, **_):
    known, digits = b.fill_string(shape=(2,), values=("a", "ü")), b.fill_string(shape=(2,), values=("1", "-2"))
    parts, counts = b.string_split(b.string_concat(t, u), delimiter=",", maxsplit=1)
    return [
        b.string_concat(t, known),
        b.string_equal(t, known),
        parts,
        counts,
        b.string_split(u)[0],
        b.string_normalizer(t, case="UPPER", stopwords=("b",)),
        b.string_normalizer(t, case_sensitive=True, stopwords=()),
        b.regex_full_match(t, pattern="[a-c,]+"),
        b.look_up(t, keys=("a", "b,c"), values=(4, 5), default=-1, dtype="int64"),
        b.look_up(b.string_cast(digits, dtype="int64"), keys=(1,), values=("one",), default="other", dtype="string"),
        b.string_cast(b.string_cast(digits, dtype="int64"), dtype="string"),
    ]


def judge(path):
    """A session of ONNX Runtime. Left to itself it changes case by a locale, en_US, which few containers have."""
    proto = onnx.load(path)
    for node in proto.graph.node:
        if node.op_type == "StringNormalizer":
            node.attribute.append(onnx.helper.make_attribute("locale", "C"))
    return ort.InferenceSession(proto.SerializeToString())


X = np.float32([[0, -2, 3], [-4, 3, 0], [5, 0, 1]])
VALUES = {
    "s": ("seq<f32[-1]>", [np.float32([1]), np.float32([2, 3])]), "x": ("f32[3]", X[0]), "k": ("i64[]", np.array(1)),
    "rows": ("f32[n,3]", X), "sizes": ("i32[2]", np.int32([1, 2])), "o": ("opt<f32[3]>", X[1]),
    "m": ("map<i64,f32[]>", {5: 1.5, 2: 3.0}),
    "t": ("str[2]", np.array(["a", "b,c"], object)), "u": ("str[2]", np.array(["x y,1", ""], object)),
}  # fmt: skip
CASES = [edited, cut, made, asked, zipped, written]


@pytest.mark.parametrize("build", CASES)
def test_what_is_written_gives_the_same(build, tmp_path):
    main = fx.Program("values")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        given = {n: fx.data(n, type=t) for n, (t, _) in VALUES.items()}
        if build is cut:
            given["x"] = given["rows"]
        fetches = build(Builder(main.global_block()), **given)
    read = {n for op in main.ops for n in op.input_arg_names}
    feed = {n: v for n, (_, v) in VALUES.items() if n in read}
    want = fx.Executor().run(main, feed=feed, fetch_list=fetches)
    path = str(tmp_path / "values.onnx")
    fx.onnx.save(main, path, fetches=fetches)
    again = fx.onnx.load(path)
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(again.startup, scope=scope)
    assert [str(v.desc.type) for v in again.feeds] == [VALUES[v.name][0] for v in again.feeds]
    ours = exe.run(again.program, feed=feed, fetch_list=again.fetches, scope=scope)
    theirs = judge(path).run(None, feed)
    for a, b, c in zip(want, ours, theirs, strict=True):
        assert same(b, a, 0, 0) == same(c, a, 0, 0) == ""


def lines_of(error):
    return str(error.value).splitlines()[1:]


def test_what_onnx_has_not_or_not_yet_is_listed():
    main = fx.Program("late")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        b, t = Builder(main.global_block()), fx.data("t", type="str[2]")
        nested = b.sequence_empty(elem="seq<f32[2]>")
        fetches = [b.string_equal(t, t), b.string_concat(t, t), b.sequence_length(nested)]
    with pytest.raises(fx.onnx.OnnxError) as told:
        to_onnx(main, None, fetches, opset=18)
    late = "Equal takes strings in ONNX from opset 19 on", "its StringConcat is in ONNX from opset 20 on"
    for line, why in zip(lines_of(told), ("SequenceEmpty takes tensors, not seq<f32[2]>", *late), strict=True):
        assert why in line


def test_a_model_that_is_read_and_written_again_has_the_same_nodes(tmp_path):
    text = """<ir_version: 10, opset_import: ["" : 21]> g (seq(float[n]) s, int64 k, string[m] t) => (float[n] y, bool[m] same) {
        one = SequenceAt (s, k)
        more = SequenceInsert (s, one, k)
        y = ConcatFromSequence <axis = 0> (more)
        known = Constant <value_strings = ["a"]> ()
        same = Equal (t, known)
    }"""
    proto = onnx.parser.parse_model(text)
    loaded = fx.onnx.load(proto)
    fx.onnx.save(loaded.program, tmp_path / "again.onnx", loaded.feeds, loaded.fetches)
    again = onnx.load(tmp_path / "again.onnx")
    assert [n.op_type for n in again.graph.node] == [n.op_type for n in proto.graph.node]
    assert fx.onnx.load(again).program.ops == loaded.program.ops


def test_a_split_without_a_limit_says_none():
    with fx.program_guard(fx.Program("texts"), fx.Program()), fx.unique_name.guard():
        b = Builder(fx.default_main_program().global_block())
        t = fx.data("t", type="str[2]")
        free, limited = b.string_split(t)[0], b.string_split(t, maxsplit=1)[0]
    for y, expected in ((free, []), (limited, [("maxsplit", 1)])):
        (node,) = to_onnx(y.block.program, None, [y]).graph.node
        assert [(a.name, a.i) for a in node.attribute if a.name == "maxsplit"] == expected
