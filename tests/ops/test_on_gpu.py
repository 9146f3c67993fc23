"""Every op computes on a GPU what it computes with NumPy, on its samples and their 16-bit forms. Not yet run on a GPU."""

import dataclasses

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Effect, ProgramError, all_ops
from fluidx.ir.dtypes import HALVES, np_dtype
from fluidx.testing.one_operator import program_of_sample

pytestmark = pytest.mark.gpu

# an op that writes the variable that it reads cannot stand in a program of one operator
OURS = [op for op in all_ops() if op.__module__.startswith("fluidx.ops.") and not op.storage.same_variable]
OURS = [op for op in OURS if op.effect not in (Effect.COLLECTIVE, Effect.P2P)]

# relative to the largest element: sums are added in another order, and exp, log and the like are rounded by another library
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def run(place, program, fetches, feed):
    with fx.scope_guard(fx.Scope()):
        return fx.Executor(place).run(program, feed=feed, fetch_list=fetches)


def check(program, fetches, feed):
    want = run(fx.CPUPlace(), program, fetches, feed)
    found = run(fx.CUDAPlace(0), program, fetches, feed)
    for w, f in zip(want, found, strict=True):
        if w is None or w.dtype.kind == "O":
            continue
        assert (f.dtype, f.shape) == (w.dtype, w.shape)
        near = TOLERANCE.get(w.dtype.name)
        if near is None:
            np.testing.assert_array_equal(f, w)
        else:
            far = float(np.max(np.abs(w), initial=0, where=np.isfinite(w))) if w.size else 0.0
            np.testing.assert_allclose(np.float64(f), np.float64(w), near, near * max(far, 1e-3))


def in_halves(sample, dtype):
    def cast(a):
        if isinstance(a, (list, tuple)):
            return [cast(x) for x in a]
        return a.astype(np_dtype(dtype)) if isinstance(a, np.ndarray) and a.dtype == np.float32 else a

    return dataclasses.replace(sample, args=tuple(map(cast, sample.args)))


def forms(sample):
    """The sample, and its 16-bit forms that the op takes."""
    yield sample
    if any(isinstance(a, (list, np.ndarray)) for a in sample.args):
        for dtype in HALVES:
            yield in_halves(sample, dtype)


@pytest.mark.parametrize("module", sorted({op.__module__ for op in OURS}))
def test_ops_of(module):
    failed, checked = [], 0
    for op in OURS:
        if op.__module__ != module:
            continue
        for sample in op.samples():
            for form in forms(sample):
                try:
                    program, fetches, feed = program_of_sample(op.name, form)
                except ProgramError:  # the op does not take 16 bits
                    continue
                checked += 1
                try:
                    check(program, fetches, feed)
                except Exception as e:
                    shapes = ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in feed.items())
                    failed.append(f"{op.name}({shapes}; {dict(form.attrs)}): {type(e).__name__}: {e}")
    assert not failed, f"{len(failed)} of {checked}:\n" + "\n".join(failed)
