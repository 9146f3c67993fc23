"""Attention in C against the formula in float64: pieces of keys, blocks of rows, masks, parts, and rows that see nothing."""

import numpy as np
import pytest

from fluidx import native
from fluidx.ir import opdef
from fluidx.ir.parts import Part
from tests.native.bodies import normal, run

FORWARD, BACKWARD = "scaled_dot_product_attention", "scaled_dot_product_attention_grad"

# (heads of q, of k, rows, keys, width, width of v): one of everything; sizes beside blocks, panels and pieces; more keys than a piece holds
SIZES = [(1, 1, 1, 1, 1, 1), (2, 2, 3, 5, 4, 7), (2, 1, 33, 65, 17, 16), (4, 2, 64, 64, 32, 32), (1, 1, 300, 70, 64, 64)]
SIZES += [(2, 2, 40, 1100, 8, 5), (4, 2, 300, 530, 8, 5)]
# Relative to the largest value. Scores of a size of some 5 are off by some 10 units of their last place, and weights by as much.
CLOSE = {"float32": 1e-5, "float64": 1e-13}


def operands(sizes, dtype="float32", batch=2):
    h, few, s, t, d, e = sizes
    shapes = (batch, h, s, d), (batch, few, t, d), (batch, few, t, e), (batch, h, s, e)
    return [normal(shape, dtype, seed=k) for k, shape in enumerate(shapes)]


def exact(q, k, v, g, mask=None, causal=False, scale=1.0, first=0):
    """Result, logarithm of the sums, gradients of q, k, v and the scores, in float64. `first`: which row of all the first one is."""
    group = q.shape[-3] // k.shape[-3]
    q, g, keys, values = (x.astype("float64") for x in (q, g, np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)))
    scores = q @ keys.swapaxes(-1, -2) * scale
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], first, dtype=bool), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.where(top == -np.inf, top, np.log(np.exp(scores - top).sum(axis=-1, keepdims=True)) + top)
        weights = np.where(top == -np.inf, 0, np.exp(scores - lse))
    out, products = weights @ values, g @ values.swapaxes(-1, -2)
    ds = weights * (products - (g * out).sum(axis=-1, keepdims=True))
    dk, dv = ds.swapaxes(-1, -2) @ q * scale, weights.swapaxes(-1, -2) @ g
    b, few, t = k.shape[:-1]
    dk, dv = (x.reshape(b, few, group, t, -1).sum(axis=2) for x in (dk, dv))
    return out, lse[..., 0], ds @ keys * scale, dk, dv, ds


def agree(found, want):
    for name, a, b in zip(("Out", "Lse", "dQ", "dK", "dV", "dScores"), found, want, strict=True):
        finite = np.isfinite(b)
        assert a.shape == b.shape and (a[~finite] == b[~finite]).all(), name
        size = max(np.abs(b[finite]).max(initial=0), 1.0)
        assert np.abs(a[finite] - b[finite]).max(initial=0) <= CLOSE[a.dtype.name] * size, name


def both(q, k, v, g, mask=None, told=None, **attrs):
    """The six results of both kernels, each the same on one thread and on two."""
    out, lse = run(FORWARD, q, k, v, mask, told=told, **attrs)
    return out, lse, *run(BACKWARD, q, k, v, mask, out, lse, g, told=told, **attrs)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_and_pieces_of_every_size(sizes, causal, dtype):
    q, k, v, g = operands(sizes, dtype)
    agree(both(q, k, v, g, scale=0.7, causal=causal), exact(q, k, v, g, causal=causal, scale=0.7))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 40, 70), (40, 70), (4, 1, 70), (2, 1, 1, 70), (40, 1), (1,)])
@pytest.mark.parametrize("kind", ["numbers", "bool"])
def test_masks_that_broadcast(kind, shape, causal):
    q, k, v, g = operands((4, 2, 40, 70, 16, 8))
    mask = normal(shape, seed=9) if kind == "numbers" else normal(shape, seed=9) > -1
    agree(both(q, k, v, g, mask, scale=0.3, causal=causal), exact(q, k, v, g, mask, causal, 0.3))


def test_on_every_level(level):
    q, k, v, g = operands((2, 1, 70, 130, 20, 24))
    agree(both(q, k, v, g, scale=0.3, causal=True), exact(q, k, v, g, None, True, 0.3))


def test_a_larger_score_in_a_later_piece_and_pieces_where_a_row_looks_nowhere():
    """Scores rise over 1,100 keys by 80 and more: what the first pieces gave must vanish. Rows that skip pieces begin later, or never."""
    q, k, v, g = operands((1, 1, 4, 1100, 2, 3), batch=1)
    q[...], k[..., 0], k[..., 1] = [1, 0], np.linspace(-60, 60, 1100), 0
    mask = np.ones((4, 1100), bool)
    mask[1, :900], mask[2, 3:], mask[3] = False, False, False
    found = both(q, k, v, g, mask, scale=1.0)
    agree(found, exact(q, k, v, g, mask))
    assert (found[0][0, 0, 3] == 0).all() and found[1][0, 0, 3] == -np.inf


def test_the_least_number_in_a_mask_is_a_score():
    """Beside others it hides a position, and a row of nothing else is the mean of all values, as for the parts in simpler operators."""
    q, k, v, g = operands((1, 1, 3, 300, 2, 3), batch=1)
    mask = np.full((3, 300), np.finfo("float32").min)
    mask[0, :7], mask[2, :-1] = 0, -np.inf
    hidden = np.where(mask == 0, mask, -np.inf)
    g[0, 0, 1:], hidden[2, -1] = 0, 0
    out, lse, *made = both(q, k, v, g, mask, scale=1.0)
    want = exact(q, k, v, g, hidden)
    np.testing.assert_allclose(out[0, 0], [want[0][0, 0, 0], v[0, 0].mean(axis=0), v[0, 0, -1]], rtol=0, atol=1e-5)  # roundings of float32
    assert (lse[0, 0, 1:] == np.finfo("float32").min).all()
    for a, b in zip(made, want[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    parts = [np.empty_like(a) for a in (out, lse)]
    opdef(FORWARD).kernel(np, q, k, v, mask, out=parts, scale=1.0, causal=False)
    for a, b in zip(parts, (out, lse), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


def test_an_infinite_score_gives_nan_in_its_row():
    q, k, v, _ = operands((1, 1, 2, 3, 4, 5), batch=1)
    out, lse = run(FORWARD, q, k, v, np.array([[0, np.inf, 0], [0, 0, 0]], "float32"), scale=1.0)
    assert np.isnan(out[0, 0, 0]).all() and np.isnan(lse[0, 0, 0]) and np.isfinite(out[0, 0, 1]).all() and np.isfinite(lse[0, 0, 1])


def test_operands_whose_rows_lie_apart():
    """Heads side by side in a row, as a reshape and a transpose leave them: nothing is copied, and the values are the same."""
    q, k, v, g = operands((3, 3, 37, 41, 8, 8))
    apart = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v, g)]
    assert not apart[0].flags.c_contiguous
    agree(both(*apart, scale=0.4), exact(q, k, v, g, scale=0.4))


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("seed", range(8))
def test_operands_and_results_that_are_parts_of_others(seed, dtype):
    """Thirds of one value, in each order of heads and rows: the bits are those of values in one piece, and what lies between stays."""
    rng = np.random.default_rng(seed)
    b, h, s, d = (int(n) for n in rng.integers(1, (3, 4, 70, 24)))
    order = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)][seed % 4]
    shape = [(b, h, s, d)[k] for k in order]

    def thirds(x):
        return [part.transpose(np.argsort(order)) for part in np.split(x, 3, axis=3)]

    def apart(x):
        return np.ascontiguousarray(x)

    q, k, v = thirds(normal((*shape[:3], 3 * d), dtype))
    g, causal = normal((b, h, s, d), dtype, seed=4), bool(seed % 2)
    want = both(*map(apart, (q, k, v)), g, scale=0.4, causal=causal)
    room = np.full((*shape[:3], 3 * d + 2), 77, dtype)
    made, lse, attrs = thirds(room[..., 1:-1]), np.empty((b, h, s), dtype), {"scale": 0.4, "causal": causal}
    native.compile(opdef(FORWARD).native.calls([q, k, v, None], [made[1], lse], attrs))()
    assert apart(made[1]).tobytes() == want[0].tobytes() and lse.tobytes() == want[1].tobytes()
    assert (made[0] == 77).all() and (made[2] == 77).all()
    native.compile(opdef(BACKWARD).native.calls([q, k, v, None, apart(made[1]), lse, g], [*made, None], attrs))()
    assert [apart(x).tobytes() for x in made] == [x.tobytes() for x in want[2:5]]
    assert (room[..., [0, -1]] == 77).all()


def test_what_lies_otherwise_is_left_to_numpy():
    q, k, v, _ = operands((2, 2, 5, 6, 4, 4))
    turned = np.ascontiguousarray(q.swapaxes(-1, -2)).swapaxes(-1, -2)
    assert run(FORWARD, turned, k, v, None, scale=1.0) is None
    assert run(FORWARD, *(x.astype("float16") for x in (q, k, v)), None, scale=1.0) is None
    assert run(FORWARD, q[:0], k[:0], v[:0], None, scale=1.0) is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3)])
def test_axes_before_the_rows(shape):
    q, k, v = normal((*shape, 9, 4)), normal((*shape, 11, 4), seed=1), normal((*shape, 11, 6), seed=2)
    out, lse = run(FORWARD, q, k, v, None, scale=0.5)
    flat = [x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v)]
    want, logs, *_ = exact(*flat, np.zeros((flat[0].shape[0], 1, 9, 6)), scale=0.5)
    np.testing.assert_allclose(out, want.reshape(out.shape), atol=1e-5)  # roundings of float32
    np.testing.assert_allclose(lse, logs.reshape(lse.shape), atol=1e-5)


def test_a_part_of_the_rows_is_told_where_it_begins():
    q, k, v, g = operands((2, 2, 90, 90, 8, 8))
    whole = exact(q, k, v, g, causal=True, scale=0.5)
    part = [x[:, :, 37:90] for x in (q, g)]
    found = both(part[0], k, v, part[1], told={"part": Part(start=37, size=90)}, scale=0.5, causal=True)
    agree(found, exact(part[0], k, v, part[1], causal=True, scale=0.5, first=37))
    np.testing.assert_allclose(found[0], whole[0][:, :, 37:90], atol=1e-5)  # roundings of float32


def test_gradients_that_nobody_wants_are_left_away():
    q, k, v, g = operands((2, 1, 40, 50, 8, 8))
    out, lse = run(FORWARD, q, k, v, None, scale=0.5)
    every = run(BACKWARD, q, k, v, None, out, lse, g, scale=0.5)
    for kept in range(4):
        outs = [x if i == kept else None for i, x in enumerate(every)]
        assert run(BACKWARD, q, k, v, None, out, lse, g, outs=outs, scale=0.5)[kept].tobytes() == every[kept].tobytes()


def test_what_is_not_finite_stays_where_it_is_seen():
    q, k, v, g = operands((1, 1, 70, 70, 8, 8), batch=1)
    q[0, 0, 5, 2] = np.nan
    out, lse, dq, _, dv, _ = both(q, k, v, g, scale=0.5, causal=True)
    rows = np.arange(70) == 5
    assert np.isnan(out[0, 0, rows]).all() and np.isfinite(out[0, 0, ~rows]).all() and np.isnan(lse[0, 0, 5])
    assert np.isnan(dq[0, 0, rows]).all() and np.isfinite(dq[0, 0, ~rows]).all()
    assert np.isnan(dv[0, 0, :6]).all() and np.isfinite(dv[0, 0, 6:]).all()  # row 5 sees keys 0 to 5
    q[0, 0, 5] = np.inf  # scores of either sign, all infinite
    assert np.isnan(both(q, k, v, g, scale=0.5, causal=True)[0][0, 0, 5]).all()


def test_scores_beyond_the_range_of_exp():
    q, k, v, g = operands((2, 2, 40, 40, 8, 8))
    out, lse, *grads = both(q * np.float32(1e18), k * np.float32(1e18), v, g, scale=0.5)
    best = (q.astype("float64") @ k.swapaxes(-1, -2)).argmax(axis=-1)
    assert (out == np.take_along_axis(v, best[..., None], axis=-2)).all()  # the others lie 1e36 and more below, if they do not tie
    assert np.isfinite(lse).all()


def test_three_threads_give_the_bits_of_one():
    q, k, v, g = operands((4, 2, 600, 600, 16, 16))
    out, lse = run(FORWARD, q, k, v, None, scale=0.5, causal=True)
    made = run(BACKWARD, q, k, v, None, out, lse, g, scale=0.5, causal=True)
    native.set_num_threads(3)
    again = [np.full_like(x, 77) for x in (out, lse, *made)]
    attrs = {"scale": 0.5, "causal": True}
    native.compile(opdef(FORWARD).native.calls([q, k, v, None], again[:2], attrs))()
    native.compile(opdef(BACKWARD).native.calls([q, k, v, None, out, lse, g], again[2:], attrs))()
    assert [a.tobytes() for a in again] == [a.tobytes() for a in (out, lse, *made)]
