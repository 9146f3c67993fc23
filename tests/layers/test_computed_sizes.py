"""Layers that take Variables where they take sizes, as in fluid 1.8, against NumPy."""

import numpy as np
import pytest

import fluidx as fx

X = np.float32([[1, 4, 3], [6, 5, 2]])


@pytest.fixture(autouse=True)
def fresh():
    with fx.program_guard(fx.Program("main"), fx.Program("startup")), fx.unique_name.guard():
        yield


def number(name):
    return fx.data(name, [1], "int32")


L = fx.layers
CASES = [
    (lambda x, a, b: L.reshape(x, [a, -1]), X.reshape(3, -1)),
    (lambda x, a, b: L.reshape(x, L.concat([a, b], 0)), X.reshape(3, 2)),
    (lambda x, a, b: L.reshape(x, [0, 0], actual_shape=L.concat([a, b], 0)), X.reshape(3, 2)),
    (lambda x, a, b: L.expand(x, [1, b]), np.tile(X, (1, 2))),
    (lambda x, a, b: L.slice(x, [0, 1], [0, 1], [b, a]), X[0:2, 1:3]),
    (lambda x, a, b: L.slice(x, [-1], [-2], L.cast(a, "int64")), X[:, -2:3]),
    (lambda x, a, b: L.fill_constant([b, 2], "float32", 1.5), np.full((2, 2), 1.5)),
    (lambda x, a, b: L.range(1, a, 1, "int64"), np.arange(1, 3)),
    (lambda x, a, b: L.topk(x, b)[0], [[4, 3], [6, 5]]),
    (lambda x, a, b: L.topk(x, b)[1], [[1, 2], [0, 1]]),
]


@pytest.mark.parametrize("layer, want", CASES)
def test_a_size_may_be_a_variable(layer, want):
    y = layer(fx.data("x", [-1, 3], "float32"), number("a"), number("b"))
    feed = {"x": X, "a": np.int32([3]), "b": np.int32([2])}
    used = {n for op in fx.default_main_program().ops for n in op.input_arg_names}
    (found,) = fx.Executor().run(feed={n: v for n, v in feed.items() if n in used}, fetch_list=[y])
    assert found.tolist() == np.asarray(want).tolist()


def test_gradients_pass_through_what_is_moved():
    x, a, b = fx.data("x", [-1, 3], "float32"), number("a"), number("b")
    y = L.expand(L.slice(L.reshape(x, [a, -1]), [0], [0], [b]), [1, b])
    (grad,) = fx.gradients([L.reduce_sum(L.square(y))], [x])
    (found,) = fx.Executor().run(feed={"x": X, "a": np.int32([3]), "b": np.int32([2])}, fetch_list=[grad])
    # each of the first four elements stands twice in y
    assert found.tolist() == (4 * X.reshape(-1) * [1, 1, 1, 1, 0, 0]).reshape(2, 3).tolist()


def test_sizes_that_are_numbers_are_known_behind():
    x, a = fx.data("x", [-1, 3], "float32"), number("a")
    y = L.reshape(x, [a, 6])
    assert y.shape == (-1, 6) and L.fc(y, 2).shape == (-1, 2)
    said = r"op reshape_by computed a value of 'z' that does not fit its type rule: it is f32\[2,3\], expected f32\[-1,4\]"
    with pytest.raises(fx.ExecutionError, match=said):
        z = x.block.create_var("z", [-1, 4], "float32")
        x.block.append_op("reshape_by", {"X": x, "Shape": L.shape(x)}, {"Out": z}, {"known": [-1, 4]})
        fx.Executor().run(feed={"x": X}, fetch_list=[z])


def test_what_is_no_vector_of_sizes_is_refused():
    x = fx.data("x", [-1, 3], "float32")
    with pytest.raises(fx.ProgramError, match="layers.reshape: shape must have 1 axes; variable 'x'"):
        L.reshape(x, x)
    with pytest.raises(fx.ProgramError, match="op reshape_by: Shape must be int32 or int64"):
        L.reshape(x, fx.data("s", [2], "float32"))
    with pytest.raises(fx.ProgramError, match="the number of sizes in Shape must be known"):
        L.reshape(x, fx.data("t", [-1], "int64"))


@pytest.mark.parametrize("k", [-1, 4])
def test_there_are_no_more_to_pick_than_there_are(k):
    y = L.topk(fx.data("x", [-1, 3], "float32"), number("k"))[0]
    said = f"op top_k_by: K is {k}; it must be from 0 to 3, the size of axis 1 of X"
    with pytest.raises(fx.ExecutionError, match=said):
        fx.Executor().run(feed={"x": X, "k": np.int32([k])}, fetch_list=[y])
    assert fx.Executor().run(feed={"x": X, "k": np.int32([0])}, fetch_list=[y])[0].shape == (2, 0)
