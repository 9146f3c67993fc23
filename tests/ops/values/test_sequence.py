"""Sequences and optionals in programs: these operators as ONNX's documentation defines them, and their gradients by hand."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, ExecutionError, Program, ProgramError


@pytest.fixture
def b():
    main = Program("p")
    with fx.program_guard(main, Program("startup")), fx.unique_name.guard():
        yield Builder(main.global_block())


def run(b, fetch, **feed):
    program = b.block.program
    again = Program.parse_from_string(str(program))
    assert again == program
    return fx.Executor(fx.CPUPlace()).run(again, feed=feed, fetch_list=[v.name for v in fetch])


def number(b, k):
    return b.fill_constant(shape=(), dtype="int64", value=float(k))


def counting(*shape):
    return np.arange(np.prod(shape), dtype="float32").reshape(shape)


def test_a_tensor_is_split_into_a_sequence_and_joined_again(b):
    x = fx.data("x", [-1, 2])
    ones, flat, twos = b.split_to_sequence(x), b.split_to_sequence(x, keepdims=False), b.split_to_sequence(x, number(b, 2))
    listed = b.split_to_sequence(x, b.assign_value(shape=(3,), dtype="int64", values=(1, 0, 4)))
    assert [str(v.desc.type) for v in (ones, flat, twos)] == ["seq<f32[1,2]>", "seq<f32[2]>", "seq<f32[-1,2]>"]
    value = counting(5, 2)
    fetch = [ones, flat, twos, listed, b.concat_from_sequence(twos, axis=0), b.concat_from_sequence(flat, axis=-1, new_axis=True)]
    found = run(b, fetch, x=value)
    for parts, sizes in zip((found[0], found[2], found[3]), ([1] * 5, [2, 2, 1], [1, 0, 4])):
        assert [len(p) for p in parts] == sizes and np.array_equal(np.concatenate(parts), value)
    assert [p.tolist() for p in found[1]] == value.tolist()
    assert np.array_equal(found[4], value) and np.array_equal(found[5], value.T)


def test_elements_are_taken_inserted_and_erased_by_positions_from_both_ends(b):
    s, x = fx.data("s", type="seq<f32[1]>"), fx.data("x", [1])
    first, last = b.sequence_at(s, number(b, 0)), b.sequence_at(s, number(b, -1))
    more = [b.sequence_insert(s, x), b.sequence_insert(s, x, number(b, 0)), b.sequence_insert(s, x, number(b, -1))]
    fewer = [b.sequence_erase(s), b.sequence_erase(s, number(b, 0)), b.sequence_erase(s, number(b, -2))]
    empty = b.sequence_length(b.sequence_empty(elem="f32[1]"))
    values = [np.float32([k]) for k in (1, 2, 3)]
    found = run(b, [first, last, *more, *fewer, b.sequence_length(s), empty], s=values, x=np.float32([9]))
    plain = [np.concatenate(v).tolist() if isinstance(v, list) else v.tolist() for v in found]
    assert plain == [[1], [3], [1, 2, 3, 9], [9, 1, 2, 3], [1, 2, 9, 3], [1, 2], [2, 3], [1, 3], 3, 0]


def test_a_position_outside_is_refused_with_the_operator(b):
    s = fx.data("s", type="seq<f32[1]>")
    y = b.sequence_at(s, number(b, 2))
    with pytest.raises(ExecutionError, match="op sequence_at failed: position 2 is outside of the sequence, which has 1 elements"):
        run(b, [y], s=[np.float32([1])])


def test_a_sequence_has_the_type_of_all_its_elements(b):
    x, y = fx.data("x", [-1, 2]), fx.data("y", [3])
    assert str(b.sequence_construct([x, x]).desc.type) == "seq<f32[-1,2]>"
    assert str(b.sequence_construct([x, y]).desc.type) == "seq<f32[*]>"
    with pytest.raises(ProgramError, match=r"no type holds both f32\[-1,2\] and i64\[1\]"):
        b.sequence_construct([x, fx.data("k", [1], "int64")])
    with pytest.raises(ProgramError, match=r"op sequence_at: S must be a sequence, found f32\[3\]; make one with sequence_construct"):
        b.sequence_at(y, number(b, 0))


def test_elements_that_are_strings_stay_strings(b):
    t = fx.data("t", ["n"], "string")
    joined = b.concat([t, t], axis=0)
    again = b.concat_from_sequence(b.split_to_sequence(joined), axis=0)
    found = run(b, [b.reshape(joined, shape=(2, -1)), again], t=np.array(["a", "b"], object))
    assert found[0].tolist() == [["a", "b"], ["a", "b"]] and found[1].tolist() == ["a", "b", "a", "b"]


def test_optionals_hold_a_value_or_none(b):
    o = fx.data("o", type="opt<f32[2]>")
    has = b.optional_has_element(o)
    held = b.optional_get_element(o)
    wrapped, nothing = b.optional(held), b.optional(elem="seq<f32[2]>")
    assert str(wrapped.desc.type) == "opt<f32[2]>" and str(nothing.desc.type) == "opt<seq<f32[2]>>"
    value = np.float32([1, 2])
    found = run(b, [has, held, wrapped, nothing], o=value)
    assert found[0] and found[1].tolist() == found[2].tolist() == [1, 2] and found[3] is None
    assert not run(b, [has], o=None)[0]
    with pytest.raises(ExecutionError, match="op optional_get_element: the optional is empty"):
        run(b, [held], o=None)


def test_gradients_flow_through_sequences(b):
    x = fx.data("x", [3, 2])
    x.stop_gradient = False
    parts = b.split_to_sequence(b.scale(x, scale=1.0), keepdims=False)
    taken = [b.sequence_at(parts, number(b, k)) for k in (1, 2, -1)]
    made = b.sequence_insert(b.sequence_erase(b.sequence_construct(taken), number(b, 0)), b.optional_get_element(b.optional(taken[0])))
    weights = b.assign_value(shape=(3, 1), dtype="float32", values=(1.0, 10.0, 100.0))
    loss = b.reduce_sum(b.elementwise_mul(b.concat_from_sequence(made, axis=0, new_axis=True), weights))
    (g,) = fx.gradients(loss, x)
    # rows 2, 2 and 1 are joined
    assert run(b, [g], x=counting(3, 2))[0].tolist() == [[0, 0], [100, 100], [11, 11]]


def test_a_sequence_is_trained_with_parts_of_any_sizes(b):
    """d mean(w * rows) / dw is the mean of each column."""
    w = fx.layers.create_parameter([2], "float32", name="w")
    s = fx.data("s", type="seq<f32[-1,2]>")
    loss = fx.layers.mean(b.elementwise_mul(b.concat_from_sequence(s, axis=0), w))
    fx.append_backward(loss)
    exe = fx.Executor(fx.CPUPlace())
    exe.run(fx.default_startup_program())
    for sizes in ((1, 3), (2, 2, 4)):
        values = [counting(k, 2) for k in sizes]
        (g,) = exe.run(b.block.program, feed={"s": values}, fetch_list=["w@GRAD"])
        rows = np.concatenate(values)
        assert np.array_equal(g, rows.sum(0) / rows.size)  # small integers, divided by 8 or 16


def test_programs_with_sequences_are_for_one_device(b):
    w = fx.layers.create_parameter([2], "float32", name="w")
    b.elementwise_mul(b.concat_from_sequence(b.split_to_sequence(fx.data("x", [-1, 2])), axis=0), w)
    with pytest.raises(
        fx.TranspileError, match=r"op split_to_sequence works on '.*', which is seq<f32\[1,2\]> .*give it tensors of numbers"
    ):
        fx.DistributeTranspiler().transpile(program=b.block.program, startup_program=fx.default_startup_program(), trainers=2)


def test_a_branch_works_with_a_sequence(b):
    x = fx.data("x", [2, 2])

    def turned():
        inner = b.__class__(b.block.program.current_block())
        rows = inner.split_to_sequence(x)
        first, second = (inner.sequence_at(rows, fx.layers.fill_constant([1], "int64", k)) for k in (0, 1))
        return fx.layers.concat([second, first], 0)

    taken = fx.layers.cond(fx.layers.reduce_sum(x) > 0.0, turned, lambda: fx.layers.scale(x, 2.0))
    values = counting(2, 2)
    assert run(b, [taken], x=values)[0].tolist() == values[::-1].tolist()
    assert run(b, [taken], x=-values)[0].tolist() == (-2 * values).tolist()
