"""Programs whose sizes depend on values, written as ONNX: ONNX Runtime and the loaded program give what the program gives."""

import numpy as np
import pytest

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

import fluidx as fx  # noqa: E402
from fluidx.ir import Builder  # noqa: E402

X = np.float32([[0, -2, 3], [-4, 3, 0]])
L = fx.layers


def boxes(b, x, k):
    corners = b.concat([b.fill_constant(shape=(1, 3, 2), value=0.0), b.reshape(b.square(x), shape=(1, 3, 2))], axis=2)
    scores = b.reshape(b.abs(b.slice(x, axes=(0,), starts=(1,), ends=(2,))), shape=(1, 1, 3))
    return [b.non_max_suppression(corners, scores, b.slice(k, axes=(0,), starts=(0,), ends=(1,)))]


CASES = {
    "where_index": lambda b, x, k: [b.where_index(x)],
    "masked_select": lambda b, x, k: [L.masked_select(x, x > -3.0)],
    "unique": lambda b, x, k: list(b.unique(x, flatten=True)),
    "unique_with_counts": lambda b, x, k: list(L.unique_with_counts(L.reshape(x, [-1]))),
    "unique_rows": lambda b, x, k: list(b.unique(x, axis=-1, sorted=True)),
    "non_max_suppression": boxes,
    "range": lambda b, x, k: [L.range(0, L.size(L.masked_select(x, x > -3.0)), 1, "int64")],
    "reshape": lambda b, x, k: [L.reshape(x, k)],
    "tile": lambda b, x, k: [L.expand(x, k)],
    "expand": lambda b, x, k: [b.expand_by(b.fill_constant(shape=(1,), value=2.0), k)],
    "slice": lambda b, x, k: [L.slice(x, [0, 1], [0, 1], k), b.slice_by(x, k, b.fill_constant(shape=(2,), dtype="int64", value=-9.0),
                                                                       axes=(0, 1), steps=(-1, -2))],
    "fill": lambda b, x, k: [L.fill_constant(k, "int64", 3)],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_gives_the_same(case, tmp_path):
    main = fx.Program("main")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        x, k = fx.data("x", [2, 3], "float32"), fx.data("k", [2], "int64")
        made = CASES[case](Builder(main.global_block()), x, k)
    feed = {"x": X, "k": np.array([2, 3])}
    read = {n for op in main.ops for n in op.input_arg_names}
    feed = {n: v for n, v in feed.items() if n in read}
    want = fx.Executor().run(main, feed=feed, fetch_list=made)
    path = str(tmp_path / "computed.onnx")
    fx.onnx.save(main, path, [main.global_block().var(n) for n in feed], made)
    loaded = fx.onnx.load(path)
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(loaded.startup, scope=scope)
    ours = exe.run(loaded.program, feed=feed, fetch_list=loaded.fetches, scope=scope)
    theirs = ort.InferenceSession(path).run(None, feed)
    for a, b, c in zip(want, ours, theirs, strict=True):
        assert a.dtype == b.dtype == c.dtype
        assert a.tolist() == b.tolist() == c.tolist()
