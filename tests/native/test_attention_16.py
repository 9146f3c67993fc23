"""Attention of bfloat16 in C, at the levels that multiply pairs, against the formula in float64."""

import ml_dtypes
import numpy as np
import pytest

from fluidx import native
from tests.native.bodies import normal, run
from tests.native.test_attention import BACKWARD, FORWARD, SIZES, exact, operands


@pytest.fixture(params=["v4_bf16", "amx"], autouse=True)
def pairs(request):
    if request.param not in native.levels():
        pytest.skip(f"this processor lacks {request.param}")
    with native.at_level(request.param):
        yield request.param


def halves(*arrays):
    return [a.astype(ml_dtypes.bfloat16) for a in arrays]


def agree(q, k, v, g, mask=None, **attrs):
    """Results are rounded to 8 digits, and so are the weights and the gradients of scores of which they are sums."""
    out, lse = run(FORWARD, q, k, v, mask, **attrs)
    found = out, lse, *run(BACKWARD, q, k, v, mask, out, lse, g, outs=[q, k, v, None], **attrs)[:3]
    wide = [a.astype("float64") for a in (q, k, v, g)]
    told = None if mask is None else mask if mask.dtype == bool else mask.astype("float64")
    want = exact(*wide, told, **attrs)
    for name, a, b in zip(("Out", "Lse", "dQ", "dK", "dV"), found, want, strict=False):
        finite = np.isfinite(b)
        assert a.dtype == (np.float32 if name == "Lse" else q.dtype) and (a[~finite] == b[~finite]).all(), name
        error = abs(a[finite] - b[finite])
        assert error.max(initial=0) <= (1e-4 if name == "Lse" else 0.02) * max(abs(b[finite]).max(initial=0), 1), name
        assert np.sqrt((error**2).mean()) <= 0.006 * max(np.sqrt((b[finite] ** 2).mean()), 0.1), name
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_and_pieces_of_every_size(sizes, causal):
    agree(*halves(*operands(sizes)), scale=0.7 / sizes[4] ** 0.5, causal=causal)


@pytest.mark.parametrize("shape", [(2, 4, 40, 70), (40, 70), (4, 1, 70), (40, 1), (1,)])
@pytest.mark.parametrize("kind", ["numbers", "bool"])
def test_masks_that_broadcast(kind, shape):
    mask = halves(normal(shape, seed=9))[0] if kind == "numbers" else normal(shape, seed=9) > -1
    agree(*halves(*operands((4, 2, 40, 70, 16, 8))), mask, scale=0.3, causal=True)


def test_a_row_that_sees_nothing_is_zero():
    mask = np.ones((4, 300), bool)
    mask[1, :280], mask[3] = False, False
    out = agree(*halves(*operands((1, 1, 4, 300, 2, 3), batch=1)), mask, scale=1.0)
    assert (out[0, 0, 3] == 0).all()
