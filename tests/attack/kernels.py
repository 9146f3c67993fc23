"""Every operator on random and special operands: C kernels, NumPy kernels, and NumPy kernels in float64 must agree."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np

import fluidx as fx
from fluidx import native
from fluidx.ir import OPS
from fluidx.ir.errors import FluidxError
from fluidx.ir.opdef import Effect, Sample
from fluidx.testing.one_operator import program_of_sample
from fluidx.testing.reference import run_op

from .outcome import Outcome

SPECIAL = np.float64([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 20.5, -20.5, 88.0, -88.0, 200.0, -200.0, 1e-40, 3e38, -3e38])
# gradients are reached through their forward operators, whose results they read
NAMES = sorted(
    n
    for n, d in OPS.items()
    if d.effect is Effect.PURE and d.__module__.startswith("fluidx.") and not n.endswith("_grad")
    if not d.control.bodies and not d.control.sized_by_values
)


def operands(rng: np.random.Generator, args: Any, special: float) -> Any:
    """The float operands of a sample with other values, `special` of them special; integers stay: they are indices and sizes."""

    def other(a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return [other(x) for x in a]
        if not isinstance(a, np.ndarray) or a.dtype.kind != "f":
            return a
        out = rng.choice([1.0, 10.0]) * rng.standard_normal(a.shape)
        out = np.abs(out) + 0.1 if a.size and (a > 0).all() else out  # what takes positive numbers alone
        return np.where(rng.random(a.shape) < special, rng.choice(SPECIAL, a.shape), out).astype("float32")

    return [other(a) for a in args]


def results(name: str, args: Any, attrs: Any, body: str) -> list[np.ndarray]:
    out = run_op(OPS[name], args, attrs, body=body)
    flat = [x for o in out for x in (o if isinstance(o, (list, tuple)) else [o])]
    return [np.asarray(x) for x in flat if x is not None]


def widened(args: Any) -> Any:
    """The float operands as float64."""

    def wide(a: Any) -> Any:
        return a.astype("float64") if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a

    return [[wide(x) for x in a] if isinstance(a, list) else wide(a) for a in args]


def gradients(name: str, sample: Sample, kernels: str) -> list[np.ndarray]:
    """The results of an operator and the gradients of their sum, in a run of an executor; nothing where there are none."""
    program, fetches, feed = program_of_sample(name, sample)
    with fx.program_guard(program, fx.Program()):
        floats = [program.global_block().var(n) for n, a in feed.items() if a.dtype.kind == "f"]
        for v in floats:
            v.stop_gradient = False
        sums = [fx.layers.reduce_sum(v) for v in fetches if v is not None and v.dtype in ("float32", "float64")]
        slopes = [g for g in fx.gradients(sums, floats) if g is not None] if sums and floats else []
    before = os.environ.get("FLUIDX_KERNELS")
    os.environ["FLUIDX_KERNELS"] = kernels
    try:
        return fx.Executor().run(program, feed=feed, fetch_list=[*fetches, *slopes], scope=fx.executor.Scope())
    finally:
        os.environ.pop("FLUIDX_KERNELS")
        if before is not None:
            os.environ["FLUIDX_KERNELS"] = before


def allowed(results: list[np.ndarray]) -> float:
    """How far apart float32 results may be: sums of some hundred terms, relative to the largest result."""
    found = [float(np.abs(r[np.isfinite(r)]).max(initial=0.0)) for r in results if r.dtype.kind == "f"]
    return 2e-3 * max(1.0, *found, 0.0)


def differ(a: np.ndarray, b: np.ndarray, size: float) -> str:
    """Why two results are not the same but for rounding: other NaN, other infinities, or further apart than `size` allows."""
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return f"{a.dtype}{a.shape} and {b.dtype}{b.shape}"
    if a.dtype.kind != "f":
        return "" if np.array_equal(a, b) else "other integers"
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return "NaN in other elements"
    with np.errstate(all="ignore"):
        near = np.isfinite(a) & np.isfinite(b) & (np.abs(a.astype("float64") - b) <= size * (1.0 + np.abs(b.astype("float64"))))
        near |= (np.sign(a) == np.sign(b)) & (np.abs(a) > 3e38) & (np.abs(b) > 3e38)  # the largest number, or infinity
        far = ~np.isnan(a) & ~near
    return f"{a[far][0]!r} and {b[far][0]!r}" if far.any() else ""


def attack(number: int, seed: int, outcome: Outcome) -> None:
    rng = np.random.default_rng([seed, number])
    name = random.Random(f"{seed}/kernels/{number}").choice(NAMES)
    definition = OPS[name]
    samples = [s for s in definition.samples() if any(isinstance(a, np.ndarray) and a.dtype == "float32" for a in s.args)]
    if not samples:
        outcome.verdicts["no floats"] += 1
        return
    sample = samples[rng.integers(len(samples))]
    # element by element the limits are known; where products are added, kernels may leave out different ones that are 0 times infinity
    special = float(rng.choice([0.0, 0.2])) if definition.expr is not None else 0.0
    args = operands(rng, sample.args, special)
    attrs = definition.complete_attrs(dict(sample.attrs))
    what = f"{name}{dict(sample.attrs)}, operands {[a.shape for a in args if isinstance(a, np.ndarray)]}, special {special}"
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            plain = results(name, args, attrs, "any")
        except FluidxError:
            outcome.verdicts["refused"] += 1
            return
        bodies = {b: results(name, args, attrs, b) for b in ("numpy", *([] if native.why_not() else ["native"]))}
        # of special operands the two kernels are compared; of ordinary ones float64 is the judge of both
        try:
            judge = plain if special else results(name, widened(args), attrs, "any")
        except FluidxError:  # of float32 alone
            judge = plain
    size = 2e-3 if special else allowed(judge)
    for body, found in {"any": plain, **bodies}.items():
        for k, (a, b) in enumerate(zip(found, judge, strict=True)):
            with np.errstate(over="ignore"):
                b = b.astype(a.dtype) if a.dtype.kind == b.dtype.kind == "f" else b
            if why := differ(a, b, size):
                outcome.fail(number, f"{what}: result {k} of the {body} kernel: {why}")
                return
    if not native.why_not():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                one = gradients(name, Sample(tuple(args), sample.attrs), "numpy")
            except FluidxError:
                outcome.verdicts["no gradient"] += 1
                return
            other = gradients(name, Sample(tuple(args), sample.attrs), "native")
        size = 2e-3 if special else allowed(one)
        for k, (a, b) in enumerate(zip(other, one, strict=True)):
            if why := differ(a, b, size):
                outcome.fail(number, f"{what}: value {k} of a run with C kernels and with NumPy's: {why}")
                return
    outcome.verdicts["agree"] += 1
