"""fft: the sums of its definition, the inverse, and refused arguments."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, ProgramError
from fluidx.ir.dtypes import np_dtype


def transformed(x, **attrs):
    main = fx.Program("waves")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        out = Builder(main.global_block()).fft(fx.data("x", list(x.shape), str(x.dtype)), **attrs)
    return fx.Executor().run(main, feed={"x": x}, fetch_list=[out])[0]


@pytest.mark.parametrize("inverse", [False, True])
def test_each_element_is_a_sum_of_rotated_elements(inverse):
    x = np.random.default_rng(0).normal(size=(3, 5, 2))
    k = np.arange(5)
    turns = np.exp((2j if inverse else -2j) * np.pi * np.outer(k, k) / 5) / (5 if inverse else 1)
    want = (x[..., 0] + 1j * x[..., 1]) @ turns
    got = transformed(x, inverse=inverse)
    np.testing.assert_allclose(got[..., 0] + 1j * got[..., 1], want, atol=1e-14)  # float64, five terms near 1


def test_a_real_signal_is_a_complex_one_without_an_imaginary_part():
    x = np.random.default_rng(0).normal(size=(6, 3, 1))
    np.testing.assert_allclose(transformed(x, axis=0), transformed(np.concatenate([x, 0 * x], -1), axis=0), atol=1e-14)


@pytest.mark.parametrize("dtype, eps", [("float32", 1e-6), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_the_inverse_restores_the_values(dtype, eps):
    x = np.random.default_rng(0).uniform(-1, 1, size=(4, 3, 2)).astype(np_dtype(dtype))
    again = transformed(transformed(x, axis=0), axis=0, inverse=True)
    assert again.dtype == x.dtype
    np.testing.assert_allclose(again.astype("float32"), x.astype("float32"), atol=eps)  # a few roundings of sums up to 4


def test_the_axis_of_real_and_imaginary_parts_cannot_be_transformed():
    with pytest.raises(ProgramError, match="expected 1 or 2 along the last axis of X, and an `axis` before it"):
        transformed(np.zeros((3, 2), "float32"), axis=-1)
    with pytest.raises(ProgramError, match="expected 1 or 2 along the last axis"):
        transformed(np.zeros((3, 4), "float32"))
