"""Control flow, sequences, optionals: what the specification says, and ONNX Runtime where it is installed."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from fluidx.onnx import OnnxError, session  # noqa: E402


def model(text: str):
    return onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]>' + text)


def test_a_branch_that_is_taken_reads_names_around_it():
    m = model("""
        g (float[2] x, bool c) => (float[2] y) {
            two = Constant <value_float = 2.0> ()
            y = If (c) <then_branch = yes () => (float[2] a) { a = Mul(x, two) }, else_branch = no () => (float[2] b) { b = Sub(x, two) }>
        }""")
    s, x = session(m), np.float32([1, 5])
    assert s.run({"x": x, "c": np.array(True)})[0].tolist() == [2, 10]
    assert s.run({"x": x, "c": np.array(False)})[0].tolist() == [-1, 3]
    assert s.run({"x": x, "c": np.array(True)})[0].tolist() == [2, 10]


# x is doubled until it exceeds a limit; each value is an output too
_UNTIL = """
    g (float x, float limit) => (float y, float[N] all) {
        go = Constant <value = bool {1}> ()
        y, all = Loop ("", go, x) <body = b (int64 k, bool c, float v) => (bool more, float w, float out) {
            w = Add(v, v)
            out = Identity(w)
            more = Less(w, limit)
        }>
    }"""


def test_a_loop_goes_until_a_condition_that_it_computes():
    s = session(model(_UNTIL))
    for x, limit in ((1.0, 40.0), (3.0, 4.0), (1.0, 100.0)):
        want = []
        v = x
        while True:
            v *= 2
            want.append(v)
            if not v < limit:
                break
        y, all_ = s.run({"x": np.float32(x), "limit": np.float32(limit)})
        assert y == v and all_.tolist() == want


def test_the_body_of_a_loop_on_the_host_holds_loops_and_reads_what_lies_around_them():
    m = model("""
        g (int64 n, float[2] x) => (float[2] y) {
            go = Constant <value = bool {1}> ()
            three = Constant <value = int64 {3}> ()
            y = Loop (n, go, x) <body = b (int64 k, bool c, float[2] v) => (bool more, float[2] w) {
                w = Loop (three, c, v) <body = d (int64 i, bool e, float[2] p) => (bool f, float[2] q) {
                    q = Add(p, x)
                    f = Identity(e)
                }>
                big = ReduceMax <keepdims = 0> (w)
                most = Constant <value_float = 20.0> ()
                more = Less(big, most)
            }>
        }""")
    (y,) = session(m).run({"n": np.array(9), "x": np.float32([1, 2])})
    assert y.tolist() == [10, 20]  # 1 + 3 rounds of three times x: then 20 is not below 20


def test_a_loop_of_no_rounds_gives_the_first_states_and_outputs_of_length_0():
    m = model("""
        g (int64 n, float x) => (float y, float[N, 3] all) {
            y, all = Loop (n, "", x) <body = b (int64 k, bool c, float v) => (bool c2, float w, float[3] out) {
                w = Add(v, v)
                c2 = Identity(c)
                out = Constant <value_floats = [1.0, 2.0, 3.0]> ()
            }>
        }""")
    y, out = session(m).run({"n": np.array(0), "x": np.float32(4)})
    assert y == 4 and out.shape == (0, 3)
    y, out = session(m).run({"n": np.array(2), "x": np.float32(4)})
    assert y == 16 and out.tolist() == [[1, 2, 3]] * 2


def test_scan_goes_backwards_and_along_other_axes():
    m = model("""
        g (float[2] h, float[2, 3] x) => (float[2] last, float[2, 3] sums) {
            last, sums = Scan (h, x) <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [-1],
                scan_output_directions = [1], body = b (float[2] a, float[2] e) => (float[2] s, float[2] o) {
                s = Add(a, e)
                o = Identity(s)
            }>
        }""")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    last, sums = session(m).run({"h": np.float32([10, 20]), "x": x})
    want = np.float32([[10], [20]]) + np.cumsum(x[:, ::-1], 1)[:, ::-1]
    assert sums.tolist() == want.tolist() and last.tolist() == want[:, 0].tolist()


def test_gradients_pass_through_scans_and_sequences():
    # y = sum over t of (x_t * x_t), cut and joined again on the way: dy/dx = 2 x
    m = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18, "ai.onnx.preview.training" : 1]>
        g (float[3] x) => (float y, float[3] dx) {
            parts = SplitToSequence (x)
            same = ConcatFromSequence <axis = 0> (parts)
            zero = Constant <value_float = 0.0> ()
            y = Scan (zero, same) <num_scan_inputs = 1, body = b (float a, float e) => (float s) {
                sq = Mul(e, e)
                s = Add(a, sq)
            }>
            dx = ai.onnx.preview.training.Gradient <xs = ["x"], y = "y"> (x)
        }""")
    y, dx = session(m).run({"x": np.float32([1, 2, 3])})
    assert y == 14 and dx.tolist() == [2, 4, 6]


def test_sequences_are_edited_by_position():
    m = model("""
        g (float[1] a, float[2] b, float[3] c) => (seq(float[N]) s, int64 n, float[M] last) {
            first = SequenceConstruct (a, b)
            zero = Constant <value = int64 {0}> ()
            back = Constant <value = int64 {-1}> ()
            more = SequenceInsert (first, c, zero)
            s = SequenceErase (more, back)
            n = SequenceLength (more)
            last = SequenceAt (more, back)
        }""")
    a, b, c = (np.arange(k, dtype=np.float32) for k in (1, 2, 3))
    s, n, last = session(m).run({"a": a, "b": b, "c": c})
    assert [v.tolist() for v in s] == [c.tolist(), a.tolist()] and n == 3 and last.tolist() == b.tolist()


def test_a_position_outside_of_a_sequence_is_an_error():
    m = model("""
        g (float[1] a) => (float[1] b) {
            s = SequenceConstruct (a)
            two = Constant <value = int64 {2}> ()
            b = SequenceAt (s, two)
        }""")
    with pytest.raises(OnnxError, match="position 2 is outside of the sequence, which has 1 elements"):
        session(m).run({"a": np.float32([1])})


@pytest.mark.parametrize(("split", "sizes"), [("value = int64 {2}", [2, 2, 1]), ("value_ints = [1, 4]", [1, 4])])
def test_split_to_sequence_takes_one_size_or_all(split, sizes):
    m = model(f"g (float[5] x) => (seq(float[N]) s) {{ k = Constant <{split}> () \n s = SplitToSequence (x, k) }}")
    (s,) = session(m).run({"x": np.arange(5, dtype=np.float32)})
    assert [len(v) for v in s] == sizes and np.concatenate(s).tolist() == list(range(5))


def test_sequence_map_hands_tensors_to_each_round():
    m = model("""
        g (seq(float[N]) s, float[1] x) => (seq(float[N]) t) {
            t = SequenceMap (s, x) <body = b (float[N] a, float[1] c) => (float[N] d) { d = Add(a, c) }>
        }""")
    (t,) = session(m).run({"s": [np.float32([1]), np.float32([2, 3])], "x": np.float32([10])})
    assert [v.tolist() for v in t] == [[11], [12, 13]]


def test_optionals_say_whether_they_hold_something():
    m = model("""
        g (optional(float[2]) x) => (bool has) { has = OptionalHasElement (x) }""")
    s = session(m)
    assert not s.run({"x": None})[0] and s.run({"x": np.float32([1, 2])})[0]


@pytest.mark.parametrize("feeds", [(1.0, 40.0), (2.0, 3.0)])
def test_loops_agree_with_onnx_runtime(feeds):
    ort = pytest.importorskip("onnxruntime")
    m, feed = model(_UNTIL), {name: np.array(v, np.float32) for name, v in zip(("x", "limit"), feeds)}
    want = ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
    for g, w in zip(session(m).run(feed), want, strict=True):
        assert np.array_equal(g, w)


def test_an_optional_that_holds_nothing_goes_through_the_rounds_of_a_loop():
    m = model("""
        g (int64 n, optional(seq(float[N])) first, float[2] x) => (bool has) {
            go = Constant <value = bool {1}> ()
            last = Loop (n, go, first) <body = b (int64 k, bool c, optional(seq(float[N])) o) => (bool d, optional(seq(float[N])) p) {
                d = Identity(c)
                p = Identity(o)
            }>
            has = OptionalHasElement(last)
        }""")
    s = session(m)
    assert not s.run({"n": np.array(2), "first": None, "x": np.float32([1, 2])})[0]
    assert s.run({"n": np.array(2), "first": [np.float32([1])], "x": np.float32([1, 2])})[0]
