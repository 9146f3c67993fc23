"""Remainders, quotients and rounding as fluid 1.8 computes them, and as ONNX does."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers
A, B = [7, -7, 7, -7, 6, 0], [3, 3, -3, -3, 3, 3]


@pytest.fixture(params=["auto", "numpy"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", request.param)


def run(build, *arrays):
    main = fx.Program("math")
    with fx.program_guard(main, fx.Program()):
        made = build(*[fx.data(f"x{k}", a.shape, a.dtype.name) for k, a in enumerate(arrays)])
    feed = {f"x{k}": a for k, a in enumerate(arrays)}
    return [a.tolist() for a in fx.Executor().run(main, feed=feed, fetch_list=list(made))]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_remainder_of_whole_numbers_has_the_sign_of_the_dividend_as_in_c(dtype, kernels):
    found = run(lambda x, y: (L.elementwise_mod(x, y), x % y, L.elementwise_floordiv(x, y), x // y), np.array(A, dtype), np.array(B, dtype))
    remainder, quotient = [1, -1, 1, -1, 0, 0], [2, -2, -2, 2, 2, 0]
    assert found == [remainder, remainder, quotient, quotient]
    assert [q * b + r for q, r, b in zip(quotient, remainder, B, strict=True)] == A


def test_the_remainder_of_floats_has_the_sign_of_the_divisor(kernels):
    found = run(lambda x, y: (L.elementwise_mod(x, y), x % y), np.float32(A) / 2, np.float32(B) / 2)
    assert found == [[0.5, 1, -1, -0.5, 0, 0]] * 2


ROUNDED = {
    0.5: (1, 0), 1.5: (2, 2), 2.5: (3, 2), -0.5: (-1, 0), -2.5: (-3, -2), 0.49999997: (0, 0), -0.3: (0, 0), 8388607.5: (8388608, 8388608),
    8388609.0: (8388609, 8388609), 3e38: (float(np.float32(3e38)),) * 2, np.inf: (np.inf, np.inf), -np.inf: (-np.inf, -np.inf), 0: (0, 0),
}  # fmt: skip


def test_round_takes_halves_away_from_zero_and_onnx_to_the_even_one(kernels):
    x = np.float32([*ROUNDED, np.nan])
    away, even = run(lambda x: (L.round(x), fx.ir.Builder(x.block).round(x, ties_to_even=True)), x)
    assert away[:-1] == [a for a, _ in ROUNDED.values()] and even[:-1] == [e for _, e in ROUNDED.values()]
    assert np.isnan(away[-1]) and np.isnan(even[-1])
    assert run(lambda x: (L.elementwise_add(x, x, act="round"),), np.float32([0.25, 0.75])) == [[1, 2]]


@pytest.mark.parametrize("ties_to_even, nodes", [(True, {"Round"}), (False, {"Floor", "Where"})])
def test_rounding_goes_to_onnx_and_back(ties_to_even, nodes, tmp_path):
    pytest.importorskip("onnx")
    main = fx.Program("rounded")
    with fx.program_guard(main, fx.Program()):
        v = fx.data("x", [5])
        y = fx.ir.Builder(v.block).round(v, ties_to_even=ties_to_even)
    path = str(tmp_path / "rounded.onnx")
    fx.onnx.save(main, path, fetches=[y])
    import onnx

    assert nodes <= {n.op_type for n in onnx.load(path).graph.node}
    x = np.float32([0.5, 1.5, -2.5, 0.3, -0.7])
    (found,) = fx.onnx.load(path).run({"x": x})
    assert found.tolist() == ([0, 2, -2, 0, -1] if ties_to_even else [1, 2, -3, 0, -1])
