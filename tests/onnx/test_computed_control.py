"""Branches and loops whose conditions a program computes: they load as `cond` and `while`, and are trained through."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import fluidx as fx  # noqa: E402
from fluidx.onnx import OnnxError  # noqa: E402
from tests.onnx.suite import data_of, node_cases, same  # noqa: E402


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


_GATHERS = """
    g (float x, float limit) => (float y, float[N] all) {
        go = Constant <value = bool {1}> ()
        y, all = Loop ("", go, x) <body = b (int64 k, bool c, float v) => (bool more, float w, float out) {
            w = Add(v, v)
            out = Mul(w, x)
            more = Less(w, limit)
        }>
    }"""


def test_a_loop_of_computed_length_gathers_and_is_trained_through():
    m = loaded(_GATHERS)
    assert m["all"].name == "all" and m["all"].shape == (-1,)
    with fx.program_guard(m.program, m.startup):
        (g,) = fx.gradients([m["all"]], [m["x"]])
    exe = fx.Executor()
    for x, limit in ((1.0, 40.0), (3.0, 4.0), (1.0, 100.0)):
        doubled = [2 * x]
        while doubled[-1] < limit:
            doubled.append(2 * doubled[-1])
        y, rows, slope = exe.run(m.program, feed={"x": np.float32(x), "limit": np.float32(limit)}, fetch_list=[*m.fetches, g])
        # round k gives 2^k x * x, whose derivative is 2 * 2^k x
        assert y == doubled[-1] and rows.tolist() == [v * x for v in doubled] and slope == 2 * sum(doubled)


def test_a_loop_of_no_rounds_gathers_nothing():
    m = loaded("""
        g (int64 n, float[2] x) => (float[2] y, float[N, 2] all) {
            y, all = Loop (n, "", x) <body = b (int64 k, bool c, float[2] v) => (bool c2, float[2] w, float[2] out) {
                w = Add(v, v)
                c2 = Identity(c)
                out = Identity(v)
            }>
        }""")
    x = np.float32([1, 3])
    for n in (2, 0, 3):
        rows = [(x * 2**k).tolist() for k in range(n)]
        assert run(m, n=np.int64(n), x=x) == [(x * 2**n).tolist(), rows]


def test_what_a_loop_gathers_behind_rounds_that_are_written_out():
    m = loaded("""
        g (float x) => (float y, float[N] all) {
            go = Constant <value = bool {1}> ()
            first = Constant <value_float = 1.0> ()
            y, all = Loop ("", go, first) <body = b (int64 k, bool c, float v) => (bool more, float w, float out) {
                w = Mul(v, x)
                out = Add(w, x)
                limit = Constant <value_float = 100.0> ()
                more = Less(w, limit)
            }>
        }""")
    assert run(m, x=np.float32(5)) == [125, [10, 30, 130]]
    assert run(m, x=np.float32(200)) == [200, [400]]


_GROWS = """
    g (float[1] x, int64 n) => (float[M] y, int64[R,1] lengths) {
        y, lengths = Loop (n, "", x) <body = b (int64 k, bool c, float[K] v) => (bool c2, float[L] w, int64[1] s) {
            w = Concat <axis = 0> (v, x)
            s = Shape(v)
            c2 = Identity(c)
        }>
    }"""


def test_a_value_may_grow_from_round_to_round():
    m = loaded(_GROWS)
    for n in (0, 1, 3):
        assert run(m, x=np.float32([2]), n=np.int64(n)) == [[2.0] * (1 + n), [[k + 1] for k in range(n)]]


def test_states_of_another_dtype_or_rank_are_refused():
    text = """
        g (float[1] x, int64 n) => (float[M] y) {
            y = Loop (n, "", x) <body = b (int64 k, bool c, float[K] v) => (bool c2, float[L] w) {
                axes = Constant <value = int64[1] {0}> ()
                w = Unsqueeze (v, axes)
                c2 = Identity(c)
            }>
        }"""
    with pytest.raises(OnnxError, match=r"'w' is f32\[1\] before the loop and f32\[1,1\] after a round"):
        loaded(text)


def scan(length):
    return f"""
        g (float[2] h, float[2, {length}] x) => (float[2] last, float[2, S] squares) <float[2] w = {{1, 2}}> {{
            last, squares = Scan (h, x) <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [-1],
                scan_output_directions = [1], body = b (float[2] a, float[2] e) => (float[2] s, float[2] o) {{
                t = Mul(e, w)
                s = Add(a, t)
                o = Mul(s, s)
            }}>
        }}"""


@pytest.mark.parametrize("length", [200, "N"])
def test_a_long_scan_is_a_loop_with_gradients(length):
    m = loaded(scan(length))
    assert "while" in types(m) and len(types(m)) < 30
    with fx.program_guard(m.program, m.startup):
        grads = fx.gradients(m.fetches, [m["h"], m["x"], m["w"]])
    exe, rng = fx.Executor(), np.random.default_rng(0)
    h, x, w = rng.integers(-1, 2, 2), rng.integers(-1, 2, (2, 200)), np.array([1, 2])
    exe.run(m.startup)
    found = exe.run(m.program, feed={"h": np.float32(h), "x": np.float32(x)}, fetch_list=[*m.fetches, *grads])
    # from the last column on: s_t = h + w (x_t + x_(t+1) + ...), and the results are s_0 and all squares
    tails = np.cumsum(x[:, ::-1], 1)[:, ::-1]
    s = h[:, None] + w[:, None] * tails
    ds = 2 * s + (np.arange(200) == 0)
    want = [s[:, 0], s**2, ds.sum(1), w[:, None] * np.cumsum(ds, 1), (ds * tails).sum(1)]
    # small integers, exact in float32
    assert all(np.array_equal(f, v) for f, v in zip(found, want, strict=True))


def test_a_loop_of_many_rounds_that_are_known_is_one_too():
    text = """
        g (float[2] x) => (float[2] y, float[N, 2] all) {
            n = Constant <value = int64 {300}> ()
            y, all = Loop (n, "", x) <body = b (int64 k, bool c, float[2] v) => (bool c2, float[2] w, float[2] out) {
                w = Add(v, x)
                out = Identity(w)
                c2 = Identity(c)
            }>
        }"""
    m = loaded(text)
    assert "while" in types(m) and len(types(m)) < 20 and m["all"].shape == (300, 2)
    x = np.float32([1, -2])
    assert run(m, x=x) == [(301 * x).tolist(), (np.arange(2, 302)[:, None] * x).tolist()]


def test_a_long_scan_over_batches_is_trained_by_ranks_as_by_one_device(monkeypatch):
    monkeypatch.setattr(fx.onnx.limits, "UNROLLED", 8)
    m = loaded("""
        g (float[B, 2] h, float[12, B, 2] x) => (float[B, 2] last, float[12, B, 2] sums) <float[2,2] w = {1, 0, 1, 1}> {
            last, sums = Scan (h, x) <num_scan_inputs = 1, body = b (float[B, 2] a, float[B, 2] e) => (float[B, 2] s, float[B, 2] o) {
                o = MatMul(e, w)
                s = Add(a, o)
            }>
        }""")
    assert "while" in types(m)
    with fx.program_guard(m.program, m.startup):
        loss = fx.layers.reduce_sum(m["sums"] * m["x"]) + fx.layers.reduce_sum(m["last"])
        fx.optimizer.SGD(2.0**-6).minimize(loss)
    rng, exe = np.random.default_rng(0), fx.Executor()
    feeds = [{"h": rng.integers(0, 2, (4, 2)).astype("float32"), "x": rng.integers(0, 2, (12, 4, 2)).astype("float32")} for _ in range(2)]
    with fx.scope_guard(fx.Scope()):
        exe.run(m.startup)
        want = [exe.run(m.program, feed=f, fetch_list=[loss])[0].item() for f in feeds]
    t = fx.DistributeTranspiler(fx.strategies.data_parallel()).transpile(program=m.program, startup_program=m.startup, trainers=2)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        # small integers, weights in steps of 1/64: exact in float32
        assert [ranks.run(feed=f, fetch_list=[loss])[0].item() for f in feeds] == want


_SIGNS = np.float32(np.random.default_rng(0).integers(-1, 2, (2, 200)))


@pytest.mark.parametrize(
    ("text", "feed"),
    [
        (_GATHERS, {"x": np.float32(1), "limit": np.float32(40)}),
        (_GROWS, {"x": np.float32([2]), "n": np.int64(3)}),
        (scan(200), {"h": np.float32([1, 2]), "x": _SIGNS}),
        (scan("N"), {"h": np.float32([1, 2]), "x": _SIGNS[:, :30]}),
    ],
)
def test_such_loops_are_written_and_read_again(text, feed, tmp_path):
    m, path = loaded(text), tmp_path / "loop.onnx"
    want, exe = run(m, **feed), fx.Executor()
    with fx.scope_guard(fx.Scope()):
        exe.run(m.startup)
        fx.onnx.save(m.program, path, fetches=m.fetches)
    again = fx.onnx.load(path)
    assert run(again, **feed) == want
    runtime = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    found = runtime.run(None, {name: np.asarray(v) for name, v in feed.items()})
    assert [a.tolist() for a in found] == want


OFFICIAL = {
    "loop": ("test_loop11", "test_loop13_seq", "test_loop16_seq_none"),
    "rangeop": ("test_range_float_type_positive_delta_expanded", "test_range_int32_type_negative_delta_expanded"),
    "if_": ("test_if_seq",),
    "sequence_map": ("test_sequence_map_add_2_sequences", "test_sequence_map_identity_1_sequence_1_tensor_expanded"),
}


@pytest.mark.parametrize("name", [name for names in OFFICIAL.values() for name in names])
def test_official_cases_of_computed_control_flow_are_programs(name):
    (file,) = (f for f, names in OFFICIAL.items() if name in names)
    case = node_cases(file)[name]
    m, exe = fx.onnx.load(case.model), fx.Executor()
    for ins, outs in data_of(case):
        with fx.scope_guard(fx.Scope()):
            exe.run(m.startup)
            found = exe.run(m.program, feed={v.name: x for v, x in zip(m.feeds, ins, strict=True)}, fetch_list=m.fetches)
        assert not any(same(f, want, 0, 0) for f, want in zip(found, outs, strict=True))


def test_a_sequence_is_gathered_by_a_loop_and_joined():
    m = loaded("""
        g (int64 n, float[2] x) => (float[N] y) {
            none = SequenceEmpty ()
            rows = Loop (n, "", none) <body = b (int64 k, bool c, seq(float[M]) s) => (bool c2, seq(float[L]) t) {
                t = SequenceInsert (s, x)
                c2 = Identity(c)
            }>
            y = ConcatFromSequence <axis = 0> (rows)
        }""")
    for n in (1, 3):
        assert run(m, n=np.int64(n), x=np.float32([1, 2])) == [[1, 2] * n]
    with fx.program_guard(m.program, m.startup), pytest.raises(fx.ProgramError, match=r"and 'rows' is seq<f32\[-1\]>; carry tensors"):
        fx.gradients(m.fetches, [m["x"]])
