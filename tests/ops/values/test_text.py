"""Strings in programs, by the examples of ONNX's documentation of these operators."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, ExecutionError, Program, ProgramError


@pytest.fixture
def b():
    main = Program("p")
    with fx.program_guard(main, Program()), fx.unique_name.guard():
        yield Builder(main.global_block())


def run(b, *fetch, **feed):
    again = Program.parse_from_string(str(b.block.program))
    assert again == b.block.program
    return [v.tolist() for v in fx.Executor(fx.CPUPlace()).run(again, feed=feed, fetch_list=[v.name for v in fetch])]


def test_strings_are_joined_compared_and_stored(b):
    x = fx.data("x", ["n"], "string")
    y = b.fill_string(shape=(1,), values=("b",))
    found = run(b, b.string_concat(x, y), b.string_equal(x, y), x=np.array(["a", "b"], object))
    assert found == [["ab", "bb"], [False, True]]


def test_strings_are_split_and_padded(b):
    x = fx.data("x", ["n"], "string")
    out, count = b.string_split(x, delimiter=".", maxsplit=1)
    blank, _ = b.string_split(x)
    assert str(out.desc.type) == "str[n,-1]" and str(count.desc.type) == "i64[n]"
    found = run(b, out, count, blank, x=np.array(["a.b.c", "d  e"], object))
    assert found == [[["a", "b.c"], ["d  e", ""]], [2, 1], [["a.b.c", ""], ["d", "e"]]]


def test_stop_words_are_removed_and_case_changes(b):
    x = fx.data("x", [-1], "string")
    lower = b.string_normalizer(x, case="LOWER", stopwords=("MONDAY",))
    exact = b.string_normalizer(x, case="UPPER", case_sensitive=True, stopwords=("monday", "tuesday"))
    assert run(b, lower, exact, x=np.array(["Monday", "tuesday"], object)) == [["tuesday"], ["MONDAY"]]
    assert run(b, lower, x=np.array(["monday"], object)) == [[""]]


def test_numbers_are_converted_to_text_and_back(b):
    x, t, w = fx.data("x", [-1]), fx.data("t", ["n"], "string"), fx.data("w", ["n"], "string")
    made = [
        b.string_cast(x, dtype="string"),
        b.string_cast(t, dtype="float32"),
        *(b.string_cast(w, dtype=d) for d in ("int64", "float8_e5m2")),
    ]
    feed = {"t": np.array(["1e-5", "-INF"], object), "w": np.array(["9007199254740993", "2.5"], object)}
    found = run(b, *made, x=np.float32([0.1, -np.inf, np.nan]), **feed)
    assert found == [["0.1", "-INF", "NaN"], [np.float32(1e-5), -np.inf], [2**53 + 1, 2], [57344, 2.5]]
    with pytest.raises(ProgramError, match=r"X or dtype must be strings, but not both, found f32\[-1\] and 'int64'; cast is for numbers"):
        b.string_cast(x, dtype="int64")
    with pytest.raises(ExecutionError, match="op string_cast failed: ValueError: could not convert string to float: 'one'"):
        run(b, b.string_cast(t, dtype="float32"), t=np.array(["one"], object))


def test_an_invalid_pattern_is_refused_when_the_program_is_written(b):
    with pytest.raises(ProgramError, match="cannot use the pattern '\\('"):
        b.regex_full_match(fx.data("x", ["n"], "string"), pattern="(")


def test_a_pattern_matches_a_whole_string(b):
    found = b.regex_full_match(fx.data("x", ["n"], "string"), pattern=r"www\.[\w.-]+\.\bcom\b")
    assert run(b, found, x=np.array(["www.google.com", "www.facebook.com.net"], object)) == [[True, False]]


def test_numbers_are_refused(b):
    with pytest.raises(ProgramError, match=r"op string_equal: Y must be strings, found f32\[2\]"):
        b.string_equal(fx.data("x", ["n"], "string"), fx.data("y", [2]))
    with pytest.raises(ProgramError, match=r"op fill_string: shape \[2\] does not have 1 elements"):
        b.fill_string(shape=(2,), values=("a",))
