"""Numbers worked by hand for ops whose result sizes are sizes of another value."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, ExecutionError, ProgramError


def run(write, **feed):
    """The results of the operators that `write` adds to a program with open data."""
    main = fx.Program()
    block = main.global_block()
    given = {n: block.create_var(n, [f"{n}_{k}" for k in range(a.ndim)], a.dtype.name, is_data=True) for n, a in feed.items()}
    made = write(Builder(block), **given)
    return fx.Executor().run(main, feed=feed, fetch_list=[made])[0]


FLOOR = {"mode": "nearest", "coordinates": "asymmetric", "nearest": "floor"}
PLAIN = {"scales": (), "spans": ()}
ROWS = np.zeros((3, 4), "float32")


def test_a_range_has_as_many_numbers_as_an_axis_has_elements():
    assert run(lambda b, x: b.range_like(x), x=ROWS).tolist() == [0, 1, 2]
    assert run(lambda b, x: b.range_like(x, axis=-1, start=5, step=-2), x=ROWS).tolist() == [5, 3, 1, -1]
    halves = run(lambda b, x: b.range_like(x, start=1, step=0.5, dtype="float32"), x=ROWS)
    assert halves.dtype == np.float32 and halves.tolist() == [1, 1.5, 2]


def test_large_integers_of_a_range_are_exact():
    assert run(lambda b, x: b.range_like(x, start=2.0**53, step=2), x=ROWS).tolist() == [2**53, 2**53 + 2, 2**53 + 4]


def test_the_size_of_an_axis_is_a_number():
    size = run(lambda b, x: b.axis_size(x, axis=1), x=ROWS)
    assert size.dtype == np.int64 and size.shape == () and size == 4


def test_a_slice_has_as_many_elements_as_an_axis_of_another_value():
    x = np.arange(12, dtype="float32").reshape(2, 6)
    assert run(lambda b, x, like: b.slice_like(x, like, axis=1), x=x, like=ROWS).tolist() == [[0, 1, 2], [6, 7, 8]]
    start = np.array(2)
    found = run(lambda b, x, like, start: b.slice_like(x, like, start, axis=1, like_axis=1), x=x, like=ROWS, start=start)
    assert found.tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]


def test_the_gradient_of_a_slice_is_zero_outside_of_it():
    x, g = np.ones((5,), "float32"), np.float32([7, 8])
    grad = run(lambda b, x, g, s: b.slice_like_grad(x, g, s), x=x, g=g, s=np.array([1]))
    assert grad.tolist() == [0, 7, 8, 0, 0]


def test_a_value_that_is_shorter_than_the_slice_is_refused():
    with pytest.raises(ProgramError, match="axis 0 of '?[xX]'? f32.2. has 2 elements, and axis 0 of '?[lL]ike'? f32.3,4. asks for 3"):
        run(lambda b, x, like: b.slice_like(x, like), x=np.zeros(2, "float32"), like=ROWS)
    with pytest.raises(ExecutionError, match="axis 0 of X has 4 elements, and 3 from position 2 on are asked for"):
        run(lambda b, x, like, s: b.slice_like(x, like, s), x=np.zeros(4, "float32"), like=ROWS, s=np.array(2))


def test_an_image_is_resized_to_the_sizes_of_another_value():
    x = np.float32([[0, 1], [2, 3]])
    found = run(
        lambda b, x, like: b.resize(x, like, axes=(0, 1), like_axes=(1, 0), **PLAIN, **FLOOR),
        x=x,
        like=np.zeros((2, 4), "float32"),
    )
    assert found.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    with pytest.raises(ProgramError, match="Like and like_axes are given together"):
        run(lambda b, x: b.resize(x, axes=(0,), like_axes=(0,), **PLAIN), x=x)


def test_a_batch_stays_split_where_another_open_axis_keeps_its_position():
    from fluidx.ir.opdef import opdef
    from fluidx.ir.types import TensorType

    t = [TensorType("float32", shape) for shape in ((-1, 1, -1, 8), (-1, 4, -1, 8))]
    p = opdef("reshape").pattern_of(t[:1], t[1:], {"shape": (-1, 4, 0, 0)})
    (whole,), (split,) = p.ins, p.outs
    assert whole[0] == (*split[0], *split[1]) and whole[2:] == split[2:] and not p.whole
