"""Counter-based random numbers: a slice of a draw equals the draw of the slice, on any array library, and each distribution is correct."""

from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir import ProgramError, opdef
from fluidx.ir.parts import Part
from fluidx.ops.shared import random_numbers as random
from fluidx.ops.shared.random_numbers import PHILOX

DRAWS = [random.uniform, random.normal, random.truncated_normal]
seeds = st.integers(-(2**63), 2**64 - 1)


def context(step=0):
    return SimpleNamespace(step=step, key=step, rank=0, world_size=1)


@settings(max_examples=50)
@given(seeds, st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 40))
def test_the_rounds_over_arrays_give_the_bits_of_numpy(seed, step, first, count):
    assert random.philox_words(np, seed, step, first, count).tolist() == random.PHILOX.words(seed, step, first, count).tolist()


def test_the_stream_is_that_of_numpys_philox():
    raw = np.random.Philox(key=np.array([7, 3], np.uint64)).random_raw(9)
    assert random.PHILOX.words(7, 3, 0, 9).tolist() == raw.tolist()


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=40)
@given(seed=seeds, step=st.integers(0, 9), k=st.integers(0, 70), n=st.integers(0, 70))
def test_a_draw_from_an_offset_is_a_slice_of_the_whole_draw(draw, dtype, seed, step, k, n):
    whole = draw(PHILOX, seed, step, 0, (k + n,), dtype)
    assert draw(PHILOX, seed, step, k, (n,), dtype).tolist() == whole[k:].tolist()


@given(st.integers(0, 50), st.integers(0, 50), st.sampled_from([16, 32, 64]))
def test_lanes_are_cut_from_one_stream(k, n, bits):
    assert random.lanes(PHILOX, 5, 1, k, n, bits).tolist() == random.lanes(PHILOX, 5, 1, 0, k + n, bits)[k:].tolist()


@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([(0, 10), (-5, 2**32 - 5), (-(2**50), 2**60)]))
def test_integers_from_an_offset_are_a_slice(k, n, bounds):
    whole = random.integers(PHILOX, 5, 1, 0, k + n, *bounds)
    assert random.integers(PHILOX, 5, 1, k, n, *bounds).tolist() == whole[k:].tolist()
    assert all(bounds[0] <= i < bounds[1] for i in whole.tolist())


def test_chunks_continue_the_stream(monkeypatch, run_op):
    for name in ("uniform_random", "gaussian_random", "truncated_gaussian_random"):
        whole = run_op(name, shape=(50,), seed=3)
        with monkeypatch.context() as patch:
            patch.setattr(random, "rounds", lambda xp: PHILOX._replace(chunk=8))
            assert run_op(name, shape=(50,), seed=3).tolist() == whole.tolist()
            assert run_op(name, shape=(13,), seed=3, offset=7).tolist() == whole[7:20].tolist()


def test_uniform_fills_its_interval_evenly():
    u = random.uniform(PHILOX, 1, 0, 0, (100_000,))
    assert u.dtype == np.float32 and 0 <= u.min() < 1e-4 and 1 - 1e-4 < u.max() < 1
    counts = np.bincount((u * 20).astype(int), minlength=20)
    assert abs(counts - 5000).max() < 350  # five standard deviations


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("draw, edge", [(random.normal, None), (random.truncated_normal, 2.0)])
def test_normal_numbers_follow_their_distribution(draw, edge, dtype):
    z = np.sort(draw(PHILOX, 2, 0, 0, (100_000,), dtype).astype("float64"))
    cdf = np.vectorize(NormalDist().cdf)
    want = cdf(z) if edge is None else (cdf(z) - cdf(-edge)) / (cdf(edge) - cdf(-edge))
    assert abs(want - np.arange(1, z.size + 1) / z.size).max() < 0.006  # Kolmogorov-Smirnov at 1e-3
    assert np.isfinite(z).all() and (edge is None or abs(z).max() <= edge)


def test_neighbours_and_steps_do_not_correlate():
    z = random.normal(PHILOX, 2, 0, 0, (100_000,))
    for other in (z[::2], random.normal(PHILOX, 2, 1, 0, (100_000,)), random.normal(PHILOX, 3, 0, 0, (100_000,))):
        n = other.size
        pair = z[1::2] if n < z.size else z
        assert abs(np.corrcoef(pair, other)[0, 1]) < 5 / np.sqrt(n)


def test_the_truncated_normal_is_the_inverse_of_its_distribution():
    u = random.uniform(PHILOX, 4, 0, 0, (200,), "float64")
    low, high = NormalDist().cdf(-2), NormalDist().cdf(2)
    want = [NormalDist().inv_cdf(low + v * (high - low)) for v in u.tolist()]
    assert random.truncated_normal(PHILOX, 4, 0, 0, (200,), "float64") == pytest.approx(want, abs=2e-6)  # the fit is single precision


def test_only_per_run_draws_change_with_the_step(run_op):
    for name, attrs in (("uniform_random", {}), ("gaussian_random", {}), ("randint", {"low": 0, "high": 2**40})):
        kept = [run_op(name, shape=(4,), seed=1, ctx=context(step), **attrs).tolist() for step in (0, 1)]
        fresh = [run_op(name, shape=(4,), seed=1, per_run=True, ctx=context(step), **attrs).tolist() for step in (0, 1)]
        assert kept[0] == kept[1] == fresh[0] != fresh[1]


@pytest.mark.parametrize("name, attrs", [("bernoulli", {"seed": 8}), ("sampling_id", {"seed": 8}),
                                         ("uniform_random_batch_size_like", {"seed": 8, "shape": (-1, 3)})])  # fmt: skip
def test_ranks_draw_the_slices_of_one_device(name, attrs, run_op):
    x = np.full((5, 4), 0.25, "float32")
    whole = run_op(name, x, **attrs)
    cuts = ((0, 2), (2, 3), (3, 5))
    parts = [run_op(name, x[a:b], part=Part(box=((a, b), *((0, d) for d in whole.shape[1:])), shape=whole.shape), **attrs) for a, b in cuts]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_sampling_follows_the_probabilities(run_op):
    x = np.tile(np.array([[0.0, 0.25, 0.75, 0.0]], "float32"), (20_000, 1))
    counts = np.bincount(run_op("sampling_id", x, seed=1), minlength=4)
    assert counts[0] == counts[3] == 0 and abs(counts[1] - 5000) < 310


def test_a_permutation_holds_every_number_once(run_op):
    p = run_op("randperm", n=100, seed=4)
    assert sorted(p.tolist()) == list(range(100)) and p.tolist() != list(range(100))


def test_narrow_floats_are_drawn_too(run_op):
    for dtype in ("float16", "bfloat16"):
        out = run_op("uniform_random", shape=(1000,), dtype=dtype)
        assert out.dtype.name == dtype and abs(out.astype("float32")).max() <= 1 and abs(out.astype("float32").mean()) < 0.1


def test_invalid_draws_are_refused():
    uniform = opdef("uniform_random")
    with pytest.raises(ProgramError, match="op uniform_random: min is 2.0, above max, which is 1.0"):
        uniform.infer(**uniform.complete_attrs({"shape": (1,), "min": 2.0}))
    with pytest.raises(ProgramError, match="op uniform_random: dtype must be a float type, found int64"):
        uniform.infer(**uniform.complete_attrs({"shape": (1,), "dtype": "int64"}))
    with pytest.raises(ProgramError, match=r"shape \[-1, 2\] must hold sizes of 0 or more; uniform_random_batch_size_like takes"):
        uniform.infer(**uniform.complete_attrs({"shape": (-1, 2)}))
    with pytest.raises(ProgramError, match="op randint: low 3 must be below high 3, both within int64"):
        opdef("randint").infer(**opdef("randint").complete_attrs({"shape": (1,), "low": 3, "high": 3}))


@pytest.mark.parametrize(
    "box",
    [((0, 4), (2, 5), (0, 3)), ((1, 3), (0, 5), (0, 3)), ((2, 3), (1, 4), (0, 3)), ((0, 4), (0, 5), (1, 2)), ((3, 4), (4, 5), (0, 2))],
)
@pytest.mark.parametrize("rows", [1, 7, 1 << 14])  # longer rows are drawn run by run; of shorter rows all is drawn and then sliced
def test_a_part_of_any_shape_equals_the_slice_of_one_device(box, rows, run_op, monkeypatch):
    monkeypatch.setattr(random, "_WHOLE_ROWS", rows)
    part, window = Part(box=box, shape=(4, 5, 3)), tuple(slice(a, b) for a, b in box)
    for name, attrs in (("gaussian_random", {"offset": 3}), ("uniform_random", {}), ("randint", {"low": 0, "high": 99})):
        whole = run_op(name, shape=(4, 5, 3), seed=1, **attrs)
        out = np.empty([b - a for a, b in box], whole.dtype)
        opdef(name).kernel(np, out=out, ctx=context(), part=part, **opdef(name).complete_attrs({"shape": (4, 5, 3), "seed": 1, **attrs}))
        assert (out == whole[window]).all()


@given(st.data())
def test_the_start_of_a_contiguous_part_is_known(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    box = tuple(tuple(sorted(data.draw(st.lists(st.integers(0, d), min_size=2, max_size=2, unique=True)))) for d in shape)
    ids = np.arange(np.prod(shape)).reshape(shape)[tuple(slice(a, b) for a, b in box)].reshape(-1)
    start = random.flat_start(Part(box=box, shape=shape))
    assert start == (ids[0] if (np.diff(ids) == 1).all() else None)
