"""Operators computed at once on known values, by the kernels of the executor."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")

import ml_dtypes

from fluidx.ir import ProgramError
from fluidx.onnx.host_builder import HostBuilder, HostTensor

B = HostBuilder()


def held(values, dtype=None):
    return HostTensor(np.array(values, dtype))


def test_results_have_the_types_of_the_operators():
    x = held([[1, 2], [3, 4]], np.float32)
    assert B.matmul(x, x, transpose_y=True).array.tolist() == [[5, 11], [11, 25]]
    parts = B.split(held([1, 2, 3]), sections=(1, 2), axis=0, n_out=2)
    assert [p.array.tolist() for p in parts] == [[1], [2, 3]]
    values, places = B.top_k(held([3, 1, 2]), k=2)
    assert (values.array.tolist(), places.array.tolist()) == ([3, 2], [0, 2])


def test_sixteen_bits_are_computed_as_in_a_run_and_rounded_once():
    x = held([1.0, 2.0, 3.0], ml_dtypes.bfloat16)
    made = B.reduce_sum(B.elementwise_mul(x, x), dim=(0,))
    assert made.array.dtype == ml_dtypes.bfloat16 and made.array.tolist() == [14.0]


def test_sizes_that_values_give_are_found():
    assert B.where_index(held([0, 5, 0, 7])).array.tolist() == [[1], [3]]


def test_strings_are_moved_also_by_operators_that_take_none():
    texts = held(["a", "b", "", "d"], object)
    assert B.concat([texts, texts], axis=0).array.tolist() == ["a", "b", "", "d"] * 2
    assert B.scatter(texts, held([2, 0]), held(["x", "y"], object)).array.tolist() == ["y", "b", "x", "d"]
    assert B.pad(texts, paddings=(1, 0), pad_value=0.0).array.tolist() == ["", "a", "b", "", "d"]


def test_a_result_without_room_is_refused():
    with pytest.raises(ProgramError, match="it asks for the shape"):
        B.expand(held([1.0]), expand_times=(1 << 50,))
