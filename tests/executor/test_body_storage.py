"""Where the values of sub-blocks lie: they share memory, take the places of operands and are views as those of the program do."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.executor.plan.storage_proof import check_storage
from fluidx.ir import TensorType
from fluidx.testing import interpret

L = fx.layers
SIZE = 1 << 14  # floats: beside them what a loop counts with takes next to nothing


@pytest.fixture(autouse=True)
def fresh():
    with fx.program_guard(fx.Program("main"), fx.Program()), fx.unique_name.guard():
        yield


def looped(body, shape=(SIZE,)):
    """`body` of a state, n times; the plan of that, whose storage is proved, and whose values are those of the interpreter."""
    x, n = fx.data("x", list(shape), "float32"), fx.data("n", [1], "int64")
    begin = [L.zeros([1], "int64"), x]
    _, h = L.while_loop(lambda i, h: L.less_than(i, n), lambda i, h: [i + 1, body(h)], begin)
    main = fx.default_main_program()
    planned = plan(main, {"x": TensorType("float32", shape), "n": TensorType("int64", (1,))}, [h.name], {}, RunContext())
    check_storage(planned)
    feed = {"x": np.arange(np.prod(shape), dtype="float32").reshape(shape) % 7 - 3, "n": np.int64([3])}
    (found,) = fx.Executor().run(main, feed=feed, fetch_list=[h])
    assert found.tolist() == interpret(main, feed)[h.name].tolist()  # small integers
    return planned


def values_of(planned):
    return planned.arena_bytes / (4 * SIZE)


def kernels(planned):
    return [s.kernel for steps in planned.bodies.values() for s in steps]


def chain(h, length):
    """Operators that nothing joins, of which each may lie where its operand lies."""
    for k in range(length):
        h = L.clip(L.scale(h, -1.0), -3.0, 3.0) if k % 2 else L.relu(h + 1.0)
    return h


def test_a_chain_of_20_operators_takes_the_memory_of_two_values():
    # what is carried, and what becomes of it in a round
    assert 2 <= values_of(looped(lambda h: chain(h, 10))) < 2.1


def test_what_lives_at_once_lies_apart():
    def body(h):
        a, b, c = (L.scale(h, k) for k in (1.0, -1.0, 2.0))
        return L.clip(a * b + c, -3.0, 3.0)

    assert 4 <= values_of(looped(body)) < 4.1


def test_what_branches_make_on_the_way_shares_memory():
    def body(h):
        return L.cond(L.reduce_sum(h) > 0.0, lambda: chain(h, 6), lambda: chain(L.scale(h, -1.0), 6))

    assert values_of(looped(body)) < 4.1  # what is carried, the result, and what each branch hands out


def test_a_reshape_and_a_slice_in_a_body_take_no_memory():
    def body(h):
        rows = L.reshape(h, [-1, 4])
        return L.clip(L.reshape(rows * 2.0, [SIZE]), -3.0, 3.0)

    planned = looped(body)
    assert values_of(planned) < 2.1 and kernels(planned).count("view") == 2


def test_a_view_of_what_the_round_overwrites_is_a_copy():
    x, n = fx.data("x", [8], "float32"), fx.data("n", [1], "int64")
    i, h, total = L.zeros([1], "int64"), L.assign(x), L.zeros([2, 4], "float32")
    more = L.less_than(i, n)
    loop = L.While(more)
    with loop.block():
        rows = L.reshape(h, [2, 4])
        L.assign(h * 2.0, h)
        L.assign(total + rows, total)  # rows are what h was
        L.increment(i, 1)
        L.less_than(i, n, cond=more)
    feed = {"x": np.arange(8, dtype="float32"), "n": np.int64([3])}
    (found,) = fx.Executor().run(feed=feed, fetch_list=[total])
    assert found.ravel().tolist() == (7 * feed["x"]).tolist()  # 1 + 2 + 4 times x


def test_parts_are_joined_where_they_are_made():
    def body(h):
        low, high = L.split(h, 2, 0)
        return L.concat([L.clip(high * 2.0, -3.0, 3.0), L.clip(low + 1.0, -3.0, 3.0)], 0)

    assert values_of(looped(body)) <= 3.1
