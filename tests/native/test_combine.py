"""Reductions of ranks' arrays in C: right for every number of terms, in place, and with NaN as NumPy has it."""

import threading

import numpy as np
import pytest

from fluidx import native
from fluidx.comm.threads import ThreadWorld

UFUNC = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def terms(n, size, dtype):
    rng = np.random.default_rng(n)
    return [rng.integers(-8, 9, size).astype(dtype) for _ in range(n)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "max", "min", "avg"])
@pytest.mark.parametrize("n, size", [(1, 5), (2, 0), (2, 1), (2, 2047), (3, 2048), (4, 5001)])
def test_each_result_is_the_reduction(n, size, op, dtype):
    ins = terms(n, size, dtype)
    want = ins[0].copy()
    for x in ins[1:]:
        want = UFUNC.get(op, np.add)(want, x)
    want = want / want.dtype.type(n) if op == "avg" else want
    outs = [ins[0], np.full(size, np.nan, dtype)]  # one in the place of a term
    native.compile([native.combine([x.copy() if k else x for k, x in enumerate(ins)], outs, op)])()
    assert all(np.array_equal(o, want) for o in outs)


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_nan_wins(op):
    a, b = np.float32([1, np.nan, 3, np.nan]), np.float32([np.nan, 2, 1, np.nan])
    out = np.empty(4, "float32")
    native.compile([native.combine([a, b], [out], op)])()
    assert np.array_equal(out, UFUNC[op](a, b), equal_nan=True)


def test_what_does_not_fit_gives_none():
    a = np.ones(8, "float32")
    assert native.combine([a, a.astype("float64")], [a], "sum") is None
    assert native.combine([a, a[:4]], [a], "sum") is None
    assert native.combine([a[::2], a[::2]], [a[:4]], "sum") is None
    assert native.combine([a], [a], "prod") is None
    assert native.combine([a.astype("int64")], [a.astype("int64")], "sum") is None


def test_large_arrays_of_threads_are_added_in_place():
    world, size = ThreadWorld(3), 300_001
    arrays = terms(3, size, "float32")
    want = arrays[0] + arrays[1] + arrays[2]

    def rank(r):
        world.communicator(r).all_reduce(arrays[r], arrays[r], "sum", (0, 1, 2))

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(np.array_equal(a, want) for a in arrays)
