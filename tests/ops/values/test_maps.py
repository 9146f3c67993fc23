"""Maps in programs: ZipMap, DictVectorizer and CastMap as ONNX's documentation defines them."""

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
    return fx.Executor(fx.CPUPlace()).run(again, feed=feed, fetch_list=[v.name for v in fetch])


def test_rows_become_maps_and_rows_again(b):
    x = fx.data("x", [-1, 2])
    named, numbered = b.zip_map(x, keys=("p", "q")), b.zip_map(x, keys=(7, 3))
    assert [str(v.desc.type) for v in (named, numbered)] == ["seq<map<str,f32[]>>", "seq<map<i64,f32[]>>"]
    again = b.dict_vectorizer(named, keys=("q", "none", "p"))
    value = np.float32([[1, 2], [3, 4]])
    found = run(b, named, numbered, again, x=value)
    assert found[0] == [{"p": 1, "q": 2}, {"p": 3, "q": 4}] and found[1] == [{7: 1, 3: 2}, {7: 3, 3: 4}]
    assert found[2].dtype == np.float32 and found[2].tolist() == [[2, 0, 1], [4, 0, 3]]


def test_the_values_of_a_map_are_in_key_order_or_at_their_keys(b):
    m, t = fx.data("m", type="map<i64,f32[]>"), fx.data("t", type="map<i64,str[]>")
    found = run(
        b, b.cast_map(m), b.cast_map(m, dtype="int64", size=4), b.cast_map(m, dtype="string"), b.cast_map(t, dtype="string", size=3),
        b.cast_map(t), b.dict_vectorizer(t, keys=(1, 5), dtype="string"), m={3: 1.5, 0: 2.0}, t={1: "7"},
    )  # fmt: skip
    assert [v.tolist() for v in found] == [[[2, 1.5]], [[2, 0, 0, 1]], [["2.000000", "1.500000"]], [["0", "7", "0"]], [[7]], [["7", ""]]]


def test_types_that_do_not_fit_are_refused(b):
    x, m = fx.data("x", [-1, 2]), fx.data("m", type="map<str,f32[]>")
    for make, why in (
        (lambda: b.zip_map(x, keys=("p",)), r"X must be \[rows, 1\], as there are 1 keys, found f32\[-1,2\]"),
        (lambda: b.zip_map(x, keys=("p", 1)), r"keys must be strings, or integers, and at least one, found \('p', 1\)"),
        (lambda: b.zip_map(x, keys=("p", "p")), "'p' is among the keys twice"),
        (lambda: b.dict_vectorizer(m, keys=(1,)), r"X must be a map of int64 to single values, found map<str,f32\[\]>"),
        (lambda: b.dict_vectorizer(m, keys=("p",), dtype="int64"), "the values are float32, but dtype is 'int64'"),
        (lambda: b.cast_map(m), r"X must be a map of int64 to single values, found map<str,f32\[\]>"),
        (lambda: b.relu(m), r"op relu takes no map, found map<str,f32\[\]> as X; make a tensor of it, with dict_vectorizer or cast_map"),
    ):
        with pytest.raises(ProgramError, match=why):
            make()


def test_a_key_without_a_position_is_refused(b):
    y = b.cast_map(fx.data("m", type="map<i64,f32[]>"), size=2)
    with pytest.raises(ExecutionError, match="op cast_map failed: the keys are 0 to 2, but the row has positions 0 to 1"):
        run(b, y, m={2: 1.0, 0: 1.0})
