"""Reductions of ranks' arrays in C: in rank order for every number of ranks, at every level, in place, and with NaN as NumPy has it."""

import numpy as np
import pytest

from fluidx import native
from fluidx.testing import each_rank
from tests.each import each

UFUNC = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def terms(n, size, dtype):
    rng = np.random.default_rng(n)
    return [rng.standard_normal(size).astype(dtype) for _ in range(n)]


def in_order(arrays, op):
    """The reduction in the order of the ranks, rounded after each step."""
    total = arrays[0].copy()
    for x in arrays[1:]:
        total = UFUNC[op](total, x)
    return total / total.dtype.type(len(arrays)) if op == "avg" else total


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each("op", UFUNC)
@each("n, size", [(1, 5), (2, 0), (2, 1), (2, 2047), (3, 4096), (3, 4097), (4, 5001), (2, 70_001)])
def test_each_rank_gets_the_reduction_in_rank_order(n, size, op, dtype, level):
    xs = terms(n, size, dtype)
    want = in_order(xs, op)

    def job(comm):
        apart, there = np.full(size, np.nan, dtype), xs[comm.rank].copy()
        native.compile(comm.calls.all_reduce(xs[comm.rank], apart, op, tuple(range(n))))()
        native.compile(comm.calls.all_reduce(there, there, op, tuple(range(n))))()
        return apart, there

    assert all(np.array_equal(a, want) and np.array_equal(b, want) for a, b in each_rank(n, job))


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_nan_wins(op, level):
    xs = [np.float32([1, np.nan, 3, np.nan]), np.float32([np.nan, 2, 1, np.nan])]

    def job(comm):
        out = np.empty(4, "float32")
        comm.all_reduce(xs[comm.rank], out, op, (0, 1))
        return out

    assert all(np.array_equal(out, UFUNC[op](*xs), equal_nan=True) for out in each_rank(2, job))


def test_strided_parts_are_reduced_where_they_lie(level):
    """Columns, of which rows of one part are no neighbours, turned and reversed arrays."""
    xs = [np.arange(5 * 7 * 3, dtype="float64").reshape(5, 7, 3) * (r + 1) for r in range(3)]
    total = sum(xs)

    def job(comm):
        x, cut = xs[comm.rank].copy(), [slice(0, 2), slice(2, 2), slice(2, 7)]
        out = np.full((7, 5, 3), np.nan)[cut[comm.rank]].transpose(1, 0, 2)
        comm.reduce_scatter([x[:, c] for c in cut], out, "sum", (0, 1, 2))
        back = np.full((5, 7, 3), np.nan)[:, :, ::-1]
        comm.all_gather(out, [back[:, c] for c in cut], (0, 1, 2))
        return out.copy(), back.copy(), cut[comm.rank]

    for part, whole, cut in each_rank(3, job):
        assert np.array_equal(part, total[:, cut]) and np.array_equal(whole, total)
