"""The product with a weight of a few bits: against the converted weight, at each level, for odd shapes."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ops.math.matmul_n_bits import MatMulNBits, MatMulNBitsGrad, dequantized

SHAPES = [  # rows, columns, rows of the weight, blocks, elements of a block
    (1, 1, 1, 1, 1), (3, 65, 1025, 1, 1025), (2, 7, 40, 3, 16), (4, 70, 300, 19, 16), (5, 70, 300, 19, 16), (33, 64, 512, 4, 128),
    (6, 130, 77, 3, 32), (40, 5, 96, 3, 32), (128, 129, 260, 9, 32), (17, 3, 700, 1, 700), (29, 200, 31, 1, 256),
]  # fmt: skip


@pytest.fixture(params=native.levels() if not native.why_not() else [])
def level(request):
    with native.at_level(request.param):
        if not native.has_products():
            pytest.skip("level base has no BLAS here")
        yield request.param


def weight(columns, blocks, size, bits, zero, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 256, (columns, blocks, size * bits // 8)).astype("uint8")
    scale = rng.uniform(0.01, 1, (columns, blocks)).astype("float32")
    zeros = {
        "no": None,
        "packed": rng.integers(0, 256, (columns, -(-blocks * bits // 8))).astype("uint8"),
        "floats": rng.uniform(0, 1 << bits, (columns, blocks)).astype("float32"),
    }
    return y, scale, zeros[zero]


def ran(op, *operands, bits, out):
    calls = op.native.calls(operands, [out], {"bits": bits})
    assert calls
    native.compile(calls)()
    return out


@pytest.mark.parametrize("zero", ["no", "packed", "floats"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("m", "n", "k", "blocks", "size"), SHAPES)
def test_both_products_are_those_of_the_converted_weight(level, m, n, k, blocks, size, bits, zero):
    if size * bits % 8:
        pytest.skip("no block of whole bytes")
    held = weight(n, blocks, size, bits, zero)
    w = dequantized(np, *held, bits)[:, :k]
    x, g = (np.random.default_rng(j).standard_normal((m, d)).astype("float32") for j, d in ((1, k), (2, n)))
    y = ran(MatMulNBits, x, *held, bits=bits, out=np.full((m, n), np.nan, "float32"))
    dx = ran(MatMulNBitsGrad, g, *held, x, bits=bits, out=np.full((m, k), np.nan, "float32"))
    bound = 1e-6 * (k + n) ** 0.5  # sums of float32 in some order, relative to those of absolute values
    assert (abs(y - x @ w.T.astype(float)) <= bound * (abs(x) @ abs(w.T))).all()
    assert (abs(dx - g @ w.astype(float)) <= bound * (abs(g) @ abs(w))).all()
    if level != "base":  # the same chains of sums as those of our own product
        for found, a, b in ((dx, g, w), *([(y, x, w.T)] if m > 4 else [])):
            same = np.empty_like(found)
            native.compile([native.gemm(a, np.ascontiguousarray(b) if b is w else np.ascontiguousarray(w).T, same)])()
            assert (found == same).all()


def test_results_do_not_depend_on_the_level_or_on_threads():
    held = weight(300, 8, 32, 4, "packed")
    found = set()
    for name in native.levels()[1:]:
        for threads in (1, 2):
            native.use_threads(threads)
            with native.at_level(name):
                for m in (2, 9):
                    x = np.random.default_rng(m).standard_normal((m, 256)).astype("float32")
                    found.add((m, ran(MatMulNBits, x, *held, bits=4, out=np.empty((m, 300), "float32")).tobytes()))
    native.use_threads(0)
    assert len(found) == 2


@pytest.mark.parametrize("change", ["x", "scale", "strides"])
def test_other_operands_are_left_to_numpy(change):
    y, scale, zero = weight(4, 2, 16, 8, "no")
    x = np.ones((3, 32), "float64" if change == "x" else "float32")
    x = np.ones((3, 64), "float32")[:, ::2] if change == "strides" else x
    scale = scale.astype("float16") if change == "scale" else scale
    assert MatMulNBits.native.calls((x, y, scale, zero), [np.empty((3, 4), x.dtype)], {"bits": 8}) is None
