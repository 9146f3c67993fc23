"""Types of values that are no dense tensors of numbers: their text, what may be fed to them, and who refuses them."""

import numpy as np
import pytest
from hypothesis import given

import fluidx as fx
from fluidx.ir import AnyRankType, Builder, MapType, OptionalType, ParseError, Program, ProgramError, SequenceType, TensorType
from fluidx.ir.jsonform import from_json, to_json
from fluidx.ir.types import Dim
from fluidx.ir.valuetypes import common_type, read_type, unlike
from tests.ir.random_programs import types


@given(types)
def test_a_type_comes_back_from_its_text_with_the_names_of_its_axes(t):
    again = read_type(str(t))
    assert again == t and again.says(t) and str(again) == str(t)


@given(types)
def test_a_variable_of_any_type_comes_back_from_text_and_json(t):
    program = Program("p")
    program.global_block().create_var("x", type=t, is_data=True)
    for again in (Program.parse_from_string(str(program)), from_json(to_json(program))):
        assert again == program and again.global_block().var("x").desc.type.says(t)


def test_types_are_written_as_they_are_read():
    for text in ("seq<f32[n,4]>", "opt<f32[4]>", "map<i64,f32[]>", "str[n]", "f32[*]", "str[*]", "seq<opt<map<str,seq<i64[2]>>>>"):
        assert str(read_type(text)) == text
    assert read_type(" map< i64 , f32[ n , 4 ] > ") == MapType("int64", TensorType("float32", (Dim("n"), 4)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seq<f32>", r"expected a type such as .*seq<f32\[4\]>, opt<f32\[4\]> or map<i64,f32\[\]>"),
        ("seq<>", "expected a type such as"),
        ("map<f32,f32[]>", r"expected the dtype of keys \(str, i8, .*u64\), a comma and the type of values in map<>"),
        ("map<i64>", "expected the dtype of keys"),
        ("seq<f32[a b]>", r"expected sizes of 0 to [0-9]+, or a name or -1 for an open axis, or \* alone"),
        ("f32[*,2]", r"or \* alone for any number of axes"),
        ("seq<f32[2]", "expected a type such as"),
        ("list<f32[2]>", "expected a type such as"),
        ("seq<" * 50 + "f32[]" + ">" * 50, "nested 32 deep at most"),
    ],
)
def test_what_is_no_type_is_refused_with_what_may_stand_there(text, expected):
    with pytest.raises(ParseError, match=expected):
        Program.parse_from_string(f"program p {{ data %x: {text} }}")
    with pytest.raises(ProgramError, match="variable 'x': .*" + expected):
        Program("p").global_block().create_var("x", type=text)


def test_a_type_accepts_what_it_holds():
    seq = read_type("seq<f32[-1,4]>")
    assert seq.accepts(read_type("seq<f32[3,4]>")) and not seq.accepts(read_type("seq<f32[3]>"))
    assert not seq.accepts(TensorType("float32", (3, 4))) and not TensorType("float32", (3, 4)).accepts(seq)
    any_rank = AnyRankType("float32")
    assert any_rank.accepts(TensorType("float32", (3,))) and TensorType("float32", (3,)).accepts(any_rank)
    assert not any_rank.accepts(TensorType("int64", (3,)))
    assert not OptionalType(any_rank).accepts(any_rank)


def test_the_type_of_either_keeps_what_both_say():
    a, b, c = (TensorType("float32", s) for s in ((Dim("n"), 3), (Dim("n"), 4), (2,)))
    assert str(common_type(a, a)) == "f32[n,3]" and str(common_type(a, b)) == "f32[-1,-1]" and str(common_type(a, c)) == "f32[*]"
    assert str(common_type(SequenceType(a), SequenceType(c))) == "seq<f32[*]>"
    with pytest.raises(ProgramError, match=r"no type holds both f32\[2\] and seq"):
        common_type(c, SequenceType(c))


@pytest.mark.parametrize(
    ("text", "value", "why"),
    [
        ("seq<f32[3]>", [], ""),
        ("seq<f32[3]>", (np.zeros(3, "f4"),), "it is tuple .*, expected a list"),
        ("opt<f32[3]>", None, ""),
        ("opt<f32[3]>", np.zeros(2, "f4"), r"it is f32\[2\], expected f32\[3\]"),
        ("seq<seq<i64[]>>", [[np.int64(1)], [np.zeros(1, int)]], r"element 1 element 0 is i64\[1\], expected i64\[\]"),
        ("map<str,f32[]>", {"a": 1.0, "b": np.float32(2)}, ""),
        ("map<str,f32[]>", {1: 1.0}, "a key is int 1, expected str"),
        ("map<i64,f32[]>", {1: "x"}, "the value of 1 is str 'x', expected"),
        ("map<i64,f32[]>", [1], "it is list .*, expected a dict"),
        ("str[2]", np.array(["a", "b"], object), ""),
        ("str[2]", np.array(["a", 1], object), "int 1, expected str"),
    ],
)
def test_a_value_is_of_a_type_or_it_is_said_why_not(text, value, why):
    import re

    found = unlike(value, read_type(text))
    assert re.search(why, found) if why else found == ""


# -- in programs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def b():
    main = Program("p")
    with fx.program_guard(main, Program()):
        yield Builder(main.global_block())


def test_what_an_op_does_not_take_is_refused_with_the_next_step(b):
    seq, names = fx.data("s", type="seq<f32[n]>"), fx.data("t", ["n"], "string")
    with pytest.raises(ProgramError, match=r"op relu takes no sequence, found seq<f32\[n\]> as X; take an element of it"):
        b.relu(seq)
    with pytest.raises(ProgramError, match=r"op concat takes no optional, found opt<f32\[2\]> as X; take what it holds"):
        b.concat([fx.data("o", type="opt<f32[2]>")], axis=0)
    with pytest.raises(ProgramError, match=r"op relu takes no strings, found str\[n\] as X"):
        b.relu(names)
    with pytest.raises(ProgramError, match=r"variable 's': seq<f32\[n\]> has no shape; take an element"):
        _ = seq.shape


def test_state_is_tensors_of_numbers(b):
    with pytest.raises(ProgramError, match=r"'v': seq<f32\[2\]> cannot be persistable"):
        b.block.create_var("v", type="seq<f32[2]>", persistable=True)
    with pytest.raises(ProgramError, match=r"parameter 'w' is declared str\[2\]"):
        b.block.create_parameter([2], "string", name="w")


def test_data_has_a_shape_or_a_type(b):
    with pytest.raises(ProgramError, match="data: give a shape or a type"):
        fx.data("x", [2], type="f32[2]")
    with pytest.raises(ProgramError, match="data: give a shape or a type"):
        fx.data("x")


def test_elementwise_operators_carry_an_unknown_rank_and_run_on_any(b):
    x = fx.data("x", type="f32[*]")
    y = fx.layers.relu(x) + x
    assert str(y.desc.type) == "f32[*]"
    exe = fx.Executor(fx.CPUPlace())
    for value in (np.float32(-2.0), np.float32([-1, 2]), np.ones((2, 1, 3), "f4")):
        (found,) = exe.run(b.block.program, feed={"x": value}, fetch_list=[y])
        assert np.array_equal(found, np.maximum(value, 0) + value) and found.shape == np.shape(value)


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("seq<f32[n]>", np.zeros(3, "f4"), r"variable 'x' is declared seq<f32\[n\]>, in the feed it is f32\[3\], expected a list"),
        ("seq<f32[n]>", [np.zeros(3, "f4"), np.zeros((2, 2), "f4")], r"in the feed element 1 is f32\[2,2\], expected f32\[n\]"),
        ("seq<f32[n]>", [np.zeros(3, "f4"), np.zeros(2, "f4")], "axes called 'n' have one size in a run: it is 3 .* and 2"),
        ("seq<f32[n]>", None, "it is None, expected a list"),
        ("seq<f32[n]>", [np.zeros(3, complex)], r"variable 'x\[0\]' .* the feed has dtype complex128"),
        ("opt<f32[2]>", np.zeros(3, "f4"), r"it is f32\[3\], expected f32\[2\]"),
        ("map<i64,f32[]>", {"a": 1.0}, "a key is str 'a', expected i64"),
        ("str[2]", np.zeros(2), r"it is f64\[2\], expected str\[2\]"),
        ("f32[*]", None, "it is None, expected an array"),
    ],
)
def test_feeds_are_checked(b, text, value, expected):
    x = fx.data("x", type=text)
    with pytest.raises(fx.FeedError, match=expected):
        fx.Executor(fx.CPUPlace()).run(b.block.program, feed={"x": value}, fetch_list=[x])


def test_what_is_fed_can_be_fetched_and_is_the_callers_own(b):
    feed = {"s": [np.ones(2, "f4"), np.zeros(3, "f4")], "o": None, "m": {"a": 1.0}, "t": np.array(["x", "y"], object)}
    types_ = {"s": "seq<f32[-1]>", "o": "opt<f32[2]>", "m": "map<str,f32[]>", "t": "str[2]"}
    fetch = [fx.data(n, type=t) for n, t in types_.items()]
    s, o, m, t = fx.Executor(fx.CPUPlace()).run(b.block.program, feed=feed, fetch_list=fetch)
    assert all(map(np.array_equal, s, feed["s"])) and s[0] is not feed["s"][0] and o is None and m == feed["m"] and t.tolist() == ["x", "y"]


def test_ranks_are_dealt_tensors_alone(b):
    w = fx.layers.create_parameter([2], "float32")
    x = fx.layers.relu(fx.data("x", type="f32[*]"))
    startup = fx.default_startup_program()
    assert x is not None and w is not None
    with pytest.raises(fx.TranspileError, match=r"variable 'x' is f32\[\*\], and the ranks deal with tensors of a known number of axes"):
        fx.DistributeTranspiler().transpile(program=b.block.program, startup_program=startup, trainers=2)
