"""Branches and loops whose conditions a program computes: they load as `cond` and `while`, and are trained through."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import fluidx as fx  # noqa: E402
from fluidx.onnx import OnnxError  # noqa: E402


def loaded(text: str):
    return fx.onnx.load(onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]>' + text))


def run(model, **feed):
    exe = fx.Executor()
    with fx.scope_guard(fx.Scope()):
        exe.run(model.startup)
        return [a.tolist() for a in exe.run(model.program, feed=feed, fetch_list=model.fetches)]


def types(model):
    return [op.type for op in model.program.ops]


def test_a_branch_reads_names_around_it_and_holds_constants():
    m = loaded("""
        g (float[2] x, bool c) => (float[2] y, float[2] z) <float[2] w = {3, 4}> {
            two = Constant <value_float = 2.0> ()
            y = If (c) <
                then_branch = yes () => (float[2] a) { p = Mul(x, two) a = Add(p, w) },
                else_branch = no () => (float[2] b) { q = Constant <value_float = 7.0> () r = Sub(x, q) b = Mul(r, w) }
            >
            z = Mul(y, w)
        }""")
    x = np.float32([1, 5])
    assert types(m)[-2:] == ["cond", "elementwise_mul"] and m["y"].name == "y"
    assert [p.name for p in m.parameters] == ["w"]
    assert run(m, x=x, c=np.array(True)) == [[5, 14], [15, 56]]
    assert run(m, x=x, c=np.array(False)) == [[-18, -8], [-54, -32]]


def test_branches_in_branches():
    m = loaded("""
        g (float[2] x, float[1] t) => (float[2] y) {
            zero = Constant <value = float[1] {0}> ()
            c = Less(zero, t)
            y = If (c) <
                then_branch = yes () => (float[2] a) {
                    one = Constant <value = float[1] {1}> ()
                    d = Less(one, t)
                    a = If (d) <then_branch = y2 () => (float[2] e) { e = Exp(x) }, else_branch = n2 () => (float[2] f) { f = Add(x, one) }>
                },
                else_branch = no () => (float[2] b) { b = Identity(x) }
            >
        }""")
    x = np.float32([0, 1])
    for t, want in ((-1, x), (0.5, x + 1), (2, np.exp(x))):
        # float32, and an exponential that is right to a few units in the last place
        np.testing.assert_allclose(run(m, x=x, t=np.float32([t]))[0], want, rtol=1e-6)


_UNTIL = """
    g (float x, float limit) => (float y) {
        go = Constant <value = bool {1}> ()
        y = Loop ("", go, x) <body = b (int64 k, bool c, float v) => (bool more, float w) {
            w = Add(v, v)
            more = Less(w, limit)
        }>
    }"""


def test_a_loop_goes_until_a_condition_that_it_computes():
    m = loaded(_UNTIL)
    assert "while" in types(m)
    for x, limit in ((1.0, 40.0), (3.0, 4.0), (1.0, 100.0)):
        want = x * 2
        while want < limit:
            want *= 2
        assert run(m, x=np.float32(x), limit=np.float32(limit)) == [want]


def test_a_loop_has_as_many_rounds_as_are_fed():
    m = loaded("""
        g (float[2] x, int64 n) => (float[2] y, int64 total) {
            zero = Constant <value = int64 {0}> ()
            y, total = Loop (n, "", x, zero) <body = b (int64 k, bool c, float[2] v, int64 s) => (bool c2, float[2] w, int64 t) {
                w = Add(v, x)
                t = Add(s, k)
                c2 = Identity(c)
            }>
        }""")
    for n in (0, 1, 4):
        assert run(m, x=np.float32([1, -2]), n=np.int64(n)) == [[1 + n, -2 - 2 * n], sum(range(n))]


def test_a_limit_ends_a_loop_whose_condition_is_computed():
    m = loaded(_UNTIL.replace('Loop ("", go, x)', "Loop (three, go, x)").replace("go =", "three = Constant <value = int64 {3}> ()\n go ="))
    assert run(m, x=np.float32(1), limit=np.float32(100)) == [8]
    assert run(m, x=np.float32(1), limit=np.float32(3)) == [4]


def test_a_weight_in_a_computed_loop_is_trained():
    m = loaded("""
        g (float[1,2] x, int64 n) => (float[1,2] y) <float[2,2] w = {1, 0, 1, 1}> {
            y = Loop (n, "", x) <body = b (int64 k, bool c, float[1,2] v) => (bool c2, float[1,2] u) {
                u = MatMul(v, w)
                c2 = Identity(c)
            }>
        }""")
    with fx.program_guard(m.program, m.startup):
        (g,) = fx.gradients(m.fetches, [m.program.global_block().var("w")])
    exe = fx.Executor()
    exe.run(m.startup)
    x, w = np.float32([[1, 2]]), np.float32([[1, 0], [1, 1]])
    found = exe.run(m.program, feed={"x": x, "n": np.int64(2)}, fetch_list=[*m.fetches, g])
    # y = x w w; d sum(y) / dw = x' (1 w') + (x w)' 1
    ones = np.ones((1, 2), "float32")
    want = x.T @ (ones @ w.T) + (x @ w).T @ ones
    assert found[0].tolist() == (x @ w @ w).tolist() and found[1].tolist() == want.tolist()


def test_what_a_program_cannot_repeat_is_refused():
    gathers = _UNTIL.replace("(float y)", "(float y, float[N] all)").replace("y = Loop", "y, all = Loop")
    gathers = gathers.replace("float w) {", "float w, float out) {").replace("more = Less", "out = Identity(w)\n more = Less")
    with pytest.raises(OnnxError, match="the length of what it gathers as 'out'; fx.onnx.session runs it"):
        loaded(gathers)
    grows = """
        g (float[1] x, int64 n) => (float[M] y) {
            y = Loop (n, "", x) <body = b (int64 k, bool c, float[K] v) => (bool c2, float[L] w) {
                w = Concat <axis = 0> (v, x)
                c2 = Identity(c)
            }>
        }"""
    with pytest.raises(OnnxError, match=r"'w' is f32\[1\] when it begins and f32\[2\] after a round"):
        loaded(grows)
