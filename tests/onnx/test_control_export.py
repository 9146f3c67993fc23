"""Branches and loops are written as If and Loop, which ONNX Runtime runs to the same values and `load` reads back."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import fluidx as fx  # noqa: E402
from fluidx.onnx.export import to_onnx  # noqa: E402

L = fx.layers


def branches():
    x, c = fx.data("x", [2], "float32"), fx.data("c", [1], "bool")
    w = L.create_parameter([2], "float32", name="w", default_initializer=fx.initializer.Constant(3.0))
    h = x * 2.0
    inner = L.reduce_sum(h) > 4.0
    return [L.cond(c, lambda: L.cond(inner, lambda: h * w, lambda: h) + w, lambda: x)]


def rounds(bound=0):
    x, n = fx.data("x", [2], "float32"), fx.data("n", [1], "int64")
    w = L.create_parameter([2], "float32", name="w", default_initializer=fx.initializer.Constant(2.0))
    i, h = L.zeros([1], "int64"), L.scale(x, 1.0)

    def body(i, a, b):
        odd = L.equal(L.elementwise_mod(i, L.fill_constant([1], "int64", 2)), L.ones([1], "int64"))
        return [L.increment(i, in_place=False), b, L.cond(odd, lambda: a + w, lambda: a * w)]

    return L.while_loop(lambda i, a, b: L.less_than(i, n), body, [i, h, x], max_rounds=bound)


def written():
    v, n = fx.data("x", [2], "float32"), fx.data("n", [1], "int64")
    i, h = L.zeros([1], "int64"), L.scale(v, 1.0)
    more = L.less_than(i, n)
    with L.While(more).block():
        L.assign(h * h, output=h)
        L.assign(h - v, output=h)
        L.increment(i)
        L.less_than(i, n, cond=more)
    return [h, i, more]


FEEDS = {
    branches: [{"x": [1, 5], "c": [True]}, {"x": [1, 0], "c": [True]}, {"x": [1, 5], "c": [False]}],
    rounds: [{"x": [1, -2], "n": [k]} for k in (0, 1, 4)],
    lambda: rounds(3): [{"x": [1, -2], "n": [k]} for k in (2, 3, 9)],
    written: [{"x": [1, -1], "n": [k]} for k in (0, 1, 3)],
}


@pytest.mark.parametrize("build", FEEDS)
def test_the_model_gives_what_the_program_gives(build):
    fetches = build()
    exe, main = fx.Executor(), fx.default_main_program()
    exe.run(fx.default_startup_program())
    model = to_onnx(main, fetches=fetches)
    again = fx.onnx.load(model)
    exe.run(again.startup)
    feeds = [{n: np.array(v, main.global_block().desc(n).type.dtype) for n, v in given.items()} for given in FEEDS[build]]
    want = [[a.tolist() for a in exe.run(main, feed=feed, fetch_list=fetches)] for feed in feeds]
    assert [[a.tolist() for a in exe.run(again.program, feed=feed, fetch_list=again.fetches)] for feed in feeds] == want
    assert [[a.tolist() for a in fx.onnx.session(model).run(feed)] for feed in feeds] == want
    ort = pytest.importorskip("onnxruntime")
    found = ort.InferenceSession(model.SerializeToString())
    assert [[a.tolist() for a in found.run(None, feed)] for feed in feeds] == want


def test_what_training_added_is_not_written():
    x, n = fx.data("x", [2], "float32"), fx.data("n", [1], "int64")
    w = L.create_parameter([2], "float32", name="w")
    _, h = L.while_loop(lambda i, h: L.less_than(i, n), lambda i, h: [L.increment(i, in_place=False), h * w], [L.zeros([1], "int64"), x])
    fx.optimizer.SGD(0.1).minimize(L.mean(h))
    fx.Executor().run(fx.default_startup_program())
    (loop,) = (node for node in to_onnx(fx.default_main_program(), fetches=[h]).graph.node if node.op_type == "Loop")
    assert len(loop.output) == 3  # the counter, the state, the condition
