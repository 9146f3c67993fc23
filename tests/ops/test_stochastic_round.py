"""Stochastic rounding: a neighbour in bfloat16, the mean is the value, and every rank draws what one device draws."""

from types import SimpleNamespace

import numpy as np
import pytest

from fluidx.ir import ProgramError, TensorType, np_dtype, opdef
from fluidx.ir.parts import Part

BFLOAT16 = np_dtype("bfloat16")


def context(step=0):
    return SimpleNamespace(step=step, key=step, rank=0, world_size=1)


def rounded(run_op, x, step=0, **told):
    result = run_op("stochastic_round", np.asarray(x, "float32"), seed=told.pop("seed", 3), ctx=context(step), **told)
    assert result.dtype == BFLOAT16
    return result.astype("float32")


def test_values_of_bfloat16_stay_at_every_step(run_op):
    every = np.arange(1 << 16, dtype="uint16").view(BFLOAT16)  # infinities, subnormals and both zeros among them
    some = every[~np.isnan(every.astype("float32"))]
    for step in range(3):
        found = run_op("stochastic_round", some.astype("float32"), seed=5, ctx=context(step))
        assert np.array_equal(found.view("uint16"), some.view("uint16"))


def test_nan_stays_nan(run_op):
    bits = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7F80FFFF], "uint32")
    for step in range(20):
        assert np.isnan(rounded(run_op, bits.view("float32"), step)).all()


@pytest.mark.parametrize("x, below, above, up", [
    (1 + 2.0**-9, 1, 1 + 2.0**-7, 0.25),  # bfloat16 has 7 binary digits behind the first: the next number after 1 is 1 + 1/128
    (-3 - 2.0**-7, -3, -3 - 2.0**-6, 0.5),  # and after 3 is 3 + 1/64
    (5 * 2.0**-136, 0, 2.0**-133, 0.625),  # subnormal numbers are multiples of 2**-133
    (3e-3, 196 * 2.0**-16, 197 * 2.0**-16, 0.608),  # 2**-9 <= 0.003 < 2**-8: multiples of 2**-16, 0.003 is 196.608 of them
])  # fmt: skip
def test_a_neighbour_with_the_probability_of_its_distance(run_op, x, below, above, up):
    n = 200_000
    found = rounded(run_op, np.full(n, x))
    assert set(found.tolist()) == {float(np.float32(below)), float(np.float32(above))}
    share = float((found == np.float32(above)).mean())
    assert share == pytest.approx(up, abs=5 * np.sqrt(up * (1 - up) / n))  # five standard deviations


def test_the_mean_over_many_steps_is_the_value(run_op):
    x = np.random.default_rng(0).standard_normal(64).astype("float32")
    n = 4000
    mean = np.mean([rounded(run_op, x, step) for step in range(n)], axis=0, dtype="float64")
    gap = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)  # between neighbours; a standard deviation is at most half of it
    assert (np.abs(mean - x) < 5 * gap / 2 / np.sqrt(n)).all()


def test_the_16_bits_of_lane_i_are_added_to_element_i_and_the_low_half_is_cut_off(run_op):
    """By NumPy's own Philox with the key (seed, step)."""
    x = np.random.default_rng(1).standard_normal((5, 7)).astype("float32")
    words = np.random.Philox(key=np.array([3, 9], "uint64")).random_raw(9)
    lanes = words.astype("<u8").view("<u2")[:35].astype("uint32")
    want = ((x.reshape(-1).view("uint32") + lanes) >> 16 << 16).view("float32").reshape(5, 7)
    assert np.array_equal(rounded(run_op, x, 9), want)


@pytest.mark.parametrize("box", [((2, 5), (0, 7)), ((0, 5), (3, 6)), ((1, 1), (0, 7))])
def test_a_part_is_that_of_the_whole_value(run_op, box):
    x = np.random.default_rng(2).standard_normal((5, 7)).astype("float32")
    window = tuple(slice(*side) for side in box)
    part = rounded(run_op, np.ascontiguousarray(x[window]), 4, part=Part(box=box, shape=x.shape))
    assert np.array_equal(part, rounded(run_op, x, 4)[window])


def test_other_seeds_and_steps_round_otherwise(run_op):
    x = np.full(64, 1 + 2.0**-8)
    assert len({rounded(run_op, x, step, seed=seed).tobytes() for step in range(3) for seed in (1, 2)}) == 6


def test_only_float32_is_rounded():
    with pytest.raises(ProgramError, match=r"op stochastic_round: X must be float32, found f64\[8\]"):
        opdef("stochastic_round").infer(TensorType("float64", (8,)), seed=1)
