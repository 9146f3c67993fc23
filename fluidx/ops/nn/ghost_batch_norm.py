"""Ghost batch normalization: batch_norm with separate statistics for several runs of rows. Ranks with whole runs need no communication."""

from __future__ import annotations

from typing import Any

from ...ir import Arithmetic, OpDef, ProgramError, Required, Sample, Storage
from ...ir.parts import Part
from ..shared.samples import f32, positive
from ..shared.types import meet
from .batch_norm import BatchNorm, BatchNormGrad, channel_words
from .norm_shared import channel_count, check_weight, only_first_has_gradient, weight_dtype

_MOST = 1 << 16  # statistics are stored for each run, even for one without rows


def _runs(op: str, x: Any, mine: int, sub_batches: int, part: Part | None) -> tuple[list[slice], int]:
    """The number of rows on this rank of each of the `mine` runs, and how many runs of the whole batch have rows."""
    first, total = (0, x.shape[0]) if part is None else (part.start, part.count)
    if not total or 0 in x.shape[1:]:
        raise ProgramError(f"op {op} cannot take statistics over an empty batch")
    begins = [k * total // sub_batches - first * total // sub_batches for k in range(first, first + mine + 1)]
    if begins[-1] != x.shape[0]:  # the parts do not end between runs: fail instead of returning a wrong result
        raise ProgramError(
            f"op {op}: {x.shape[0]} rows do not match runs {first} to {first + mine} of the {sub_batches} runs of {total} rows"
        )
    return [slice(a, b) for a, b in zip(begins, begins[1:])], min(sub_batches, total)


class GhostBatchNorm(OpDef):
    """batch_norm in training, separately for each of `sub_batches` runs of rows, with one scale and bias for all.

    For B rows and g runs, run k has rows k*B//g to (k+1)*B//g, like rank k of g ranks. SavedMean and SavedVariance [g, c] hold each run's
    mean and 1 / sqrt(variance + epsilon). BatchStats [2, c] holds the mean of the means and of the (biased) variances over the runs, with
    equal weights. If there are fewer rows than runs, a run without rows is not counted, and its saved values are 0. With `is_test`, Mean
    and Variance are used as in batch_norm, for every run, and `sub_batches` has no effect. Source: Hoffer, Hubara and Soudry 2017, "Train
    longer, generalize better".
    """

    name = "ghost_batch_norm"
    arithmetic = Arithmetic(flops=7)
    inputs = ("X", "Scale", "Bias", "Mean", "Variance")
    outputs = ("Y", "SavedMean", "SavedVariance", "BatchStats")
    attrs = {"sub_batches": Required(int), "epsilon": 1e-5, "is_test": False, "data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, runs = channel_words(ins[0], attrs), f"n/{attrs['sub_batches']}"
        if attrs["is_test"]:
            return f"{x}, c, c, c, c -> {x}, . c, . c, . c | n:= *:= L(1,2>0)"
        return f"{x}, c, c, ~c, ~c -> {x}, {runs} c, {runs} c, . c | {runs}@ #n n:+ *! L(1,2>0)"

    @staticmethod
    def infer(x, scale, bias, mean, variance, *, sub_batches, epsilon, is_test, data_layout):
        c = channel_count("ghost_batch_norm", x, data_layout)
        if not 1 <= sub_batches <= _MOST:
            raise ProgramError(f"op ghost_batch_norm: sub_batches must be from 1 to {_MOST}, got {sub_batches}")
        if epsilon < 0:
            raise ProgramError(f"op ghost_batch_norm: epsilon must not be negative, got {epsilon}")
        weights = {"Scale": scale, "Bias": bias, "Mean": mean, "Variance": variance}
        for slot, w in weights.items():
            check_weight("ghost_batch_norm", slot, w, c, x)
        weight_dtype("ghost_batch_norm", x, **weights)
        saved = mean.with_shape((sub_batches, *mean.shape))
        return x, saved, saved, mean.with_shape((2, *mean.shape))

    @staticmethod
    def grad(b, op, g):
        only_first_has_gradient("ghost_batch_norm", op, g, ())
        a = op.attrs
        if a["is_test"]:
            mean, inv = (b.slice(op[s], axes=(0,), starts=(0,), ends=(1,), decrease_axis=(0,)) for s in ("SavedMean", "SavedVariance"))
            layout = a["data_layout"]
            dx, ds, db = b.batch_norm_grad(op["X"], op["Scale"], mean, inv, g[0], data_layout=layout, use_global_stats=True)
        else:
            dx, ds, db = b.ghost_batch_norm_grad(op["X"], op["Scale"], op["SavedMean"], op["SavedVariance"], g[0],
                                                 sub_batches=a["sub_batches"], data_layout=a["data_layout"])  # fmt: skip
        return dx, ds, db, None, None

    @staticmethod
    def kernel(xp, x, scale, bias, mean, variance, *, out, sub_batches, part=None, **attrs):
        """Each run by batch_norm: from zeros with momentum 0, its new statistics are those of the run."""
        y, saved_mean, saved_inv, stats = out
        if attrs["is_test"]:
            used = [xp.empty_like(mean) for _ in range(2)]
            BatchNorm.kernel(xp, x, scale, bias, mean, variance, out=(y, *stats, *used), **{**BatchNorm.attrs, **attrs})
            saved_mean[...], saved_inv[...] = used
            return
        runs, count = _runs("ghost_batch_norm", x, len(saved_mean), sub_batches, part)
        variances = xp.zeros(saved_mean.shape, saved_mean.dtype)
        saved_mean.fill(0)
        saved_inv.fill(0)
        for k, r in enumerate(runs):
            if r.stop > r.start:
                outs = y[r], saved_mean[k], variances[k], None, saved_inv[k]
                given = {**BatchNorm.attrs, **attrs, "momentum": 0.0}
                BatchNorm.kernel(xp, x[r], scale, bias, saved_mean[k], variances[k], out=outs, **given)
        stats[0], stats[1] = saved_mean.sum(axis=0) / count, variances.sum(axis=0) / count

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        rest = [positive(3, seed=1), f32(3, seed=2), f32(3, seed=3), positive(3, seed=4)]
        cases = [((5, 3, 2, 4), "NCHW", 2), ((7, 2, 5, 3), "NHWC", 4), ((9, 3), "NCHW", 2), ((2, 3, 4), "NCHW", 4), ((1, 3, 5), "NCHW", 2)]
        for k, (shape, layout, runs) in enumerate(cases):
            x = f32(*shape, seed=k)
            yield Sample.of(x, *rest, sub_batches=runs, data_layout=layout, grad=("X", "Scale", "Bias"), tolerance=2e-2, why=why)
        yield Sample.of(f32(5, 3, 2, 4, seed=7), *rest, sub_batches=2, is_test=True, epsilon=1e-3, grad=("X", "Scale", "Bias"), why=why)


class GhostBatchNormGrad(OpDef):
    """Gradients of ghost_batch_norm with respect to X, Scale and Bias: separate by run for X, summed over all runs for Scale and Bias."""

    name = "ghost_batch_norm_grad"
    arithmetic = Arithmetic(flops=11)
    inputs, outputs = ("X", "Scale", "SavedMean", "SavedVariance", "Y@GRAD"), ("X@GRAD", "Scale@GRAD", "Bias@GRAD")
    attrs = {"sub_batches": Required(int), "data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, runs = channel_words(ins[0], attrs), f"n/{attrs['sub_batches']}"
        return f"{x}, c, {runs} c, {runs} c, {x} -> {x}, c, c | {runs}@ #n n:+ *! L(4)"

    @staticmethod
    def infer(x, scale, mean, inv, g, *, sub_batches, data_layout):
        if any(t.ndim != 2 or not meet(t.shape[0], sub_batches) for t in (mean, inv)):
            raise ProgramError(f"op ghost_batch_norm_grad needs statistics of {sub_batches} runs, got {mean} and {inv}")
        return x, scale, scale

    @staticmethod
    def kernel(xp, x, scale, mean, inv, g, *, out, sub_batches, data_layout, part=None):
        dx, dscale, dbias = out
        runs, _ = _runs("ghost_batch_norm_grad", x, len(mean), sub_batches, part)
        scales, biases = (xp.zeros(mean.shape, mean.dtype) for _ in range(2))
        for k, r in enumerate(runs):
            if r.stop > r.start:
                outs = dx[r], scales[k], biases[k]
                BatchNormGrad.kernel(xp, x[r], scale, mean[k], inv[k], g[r], out=outs, data_layout=data_layout, use_global_stats=False)
        dscale[...], dbias[...] = scales.sum(axis=0), biases.sum(axis=0)

    @staticmethod
    def samples():
        for k, (shape, layout, runs) in enumerate([((5, 3, 2, 4), "NCHW", 2), ((7, 2, 5, 3), "NHWC", 4), ((2, 3, 4), "NCHW", 4)]):
            stats = [positive(3, seed=k), f32(runs, 3, seed=k + 1), positive(runs, 3, seed=k + 2)]
            yield Sample.of(f32(*shape, seed=k + 3), *stats, f32(*shape, seed=k + 4), sub_batches=runs, data_layout=layout, grad=(),
                            why="a gradient itself")  # fmt: skip


class BnRunning(OpDef):
    """The running mean and variance after a step: momentum * old + (1 - momentum) * Batch, whose two rows are the statistics of the step.

    With `is_test` they are returned unchanged. They overwrite Mean and Variance if they have the same names. The pattern declares no
    linearity, so that partial sums of Batch are added once, not those of both results.
    """

    name = "bn_running"
    inputs, outputs = ("Mean", "Variance", "Batch"), ("MeanOut", "VarianceOut")
    attrs = {"momentum": 0.9, "is_test": False}
    storage = Storage(inplace=(("Mean", "MeanOut"), ("Variance", "VarianceOut")))

    @staticmethod
    def pattern(ins, outs, attrs):
        return "c, c, ~. c -> c, c | L(0>0) L(1>1) L(0,1)" if attrs["is_test"] else "c, c, . c -> c, c"

    @staticmethod
    def infer(mean, variance, batch, **attrs):
        both = mean.with_shape((2, *mean.shape))
        if mean.ndim != 1 or not mean.accepts(variance) or not both.accepts(batch):
            raise ProgramError(f"op bn_running needs Mean and Variance [c] and Batch [2,c], got {mean}, {variance} and {batch}")
        return mean, variance

    @staticmethod
    def kernel(xp, mean, variance, batch, *, out, momentum, is_test):
        for k, (target, old) in enumerate(zip(out, (mean, variance))):
            target[...] = old if is_test else old * momentum + batch[k] * (1 - momentum)

    @staticmethod
    def samples():
        for attrs in ({"momentum": 0.7}, {"is_test": True}):
            yield Sample.of(f32(3), positive(3, seed=1), f32(2, 3, seed=2), grad=(), why="state", **attrs)
