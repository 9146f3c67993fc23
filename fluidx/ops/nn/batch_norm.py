"""batch_norm and its gradient. The operators that a sharded batch needs (batch_norm_parts.py) compute with the same functions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from ...ir import Arithmetic, Native, OpDef, ProgramError, Rewrite, Sample, Storage, TensorType
from ..shared.samples import f32, positive
from . import batch_norm_native
from .norm_shared import by_copy, channel_count, check_weight, only_first_has_gradient, put, weight_dtype

_BATCH_ATTRS = {"momentum": 0.9, "epsilon": 1e-5, "is_test": False, "data_layout": "NCHW", "use_global_stats": False}


def by_channel(x: Any, layout: str) -> Any:
    """The array as a view [N, C, everything else]; None if that would need a copy."""
    if x.ndim == 2:
        return x[:, :, None]
    if layout == "NHWC":
        x = x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))
    if x.ndim == 3:
        return x
    steps = [(d, s) for d, s in zip(x.shape[2:], x.strides[2:]) if d != 1]
    if x.size and any(outer != d * inner for (_, outer), (d, inner) in zip(steps, steps[1:])):
        return None
    return x.reshape(x.shape[0], x.shape[1], prod(x.shape[2:]))


def channel_words(x: TensorType | None, attrs: Mapping[str, Any]) -> str:
    """The axis words of X in the access pattern of an op that works by channel."""
    return "n * c" if attrs["data_layout"] == "NHWC" and x is not None and x.ndim > 2 else "n c *"


class BatchNorm(OpDef):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias with the mean and variance of each channel over the batch.

    Training uses the batch's own statistics, and MeanOut = momentum * Mean + (1 - momentum) * batch mean, VarianceOut likewise (the biased
    variance); they overwrite Mean and Variance if they have the same names. With `is_test` or `use_global_stats`, Mean and Variance are
    used and returned unchanged. SavedMean and SavedVariance hold the used mean and 1 / sqrt(variance + epsilon), for the gradient. Source:
    Ioffe and Szegedy 2015; fluid 1.8 `batch_norm`.
    """

    name = "batch_norm"
    rewrite = Rewrite(layout=("data_layout", ("X", "Y")))
    arithmetic = Arithmetic(flops=7)
    inputs = ("X", "Scale", "Bias", "Mean", "Variance")
    outputs = ("Y", "MeanOut?", "VarianceOut?", "SavedMean?", "SavedVariance?")
    attrs = _BATCH_ATTRS
    storage = Storage(inplace=(("Mean", "MeanOut"), ("Variance", "VarianceOut")))

    @staticmethod
    def decompose(d):
        """In training: operators that compute mean and variance as sums over the batch, and then the outputs."""
        a, layout = d.attrs, d.attrs["data_layout"]
        if not (a["is_test"] or a["use_global_stats"]):
            mean = d("bn_mean", d["X"], word="mean", data_layout=layout)
            variance = d("bn_variance", d["X"], mean, word="variance", data_layout=layout)
            ins = {**d.op.inputs, "BatchMean": (mean,), "BatchVariance": (variance,)}
            d.append("bn_apply", ins, d.op.outputs, data_layout=layout, momentum=a["momentum"], epsilon=a["epsilon"])

    @staticmethod
    def pattern(ins, outs, attrs):
        x, fixed = channel_words(ins[0], attrs), attrs["is_test"] or attrs["use_global_stats"]
        return f"{x}, c, c, c, c -> {x}, c, c, c, c | {'n:= *:=' if fixed else 'n! *!'} L(1,2>0)"

    @staticmethod
    def infer(x, scale, bias, mean, variance, *, momentum, epsilon, is_test, data_layout, use_global_stats):
        c = channel_count("batch_norm", x, data_layout)
        if epsilon < 0:
            raise ProgramError(f"op batch_norm: epsilon must not be negative, got {epsilon}")
        for slot, w in (("Scale", scale), ("Bias", bias), ("Mean", mean), ("Variance", variance)):
            check_weight("batch_norm", slot, w, c, x)
        weight_dtype("batch_norm", x, Scale=scale, Bias=bias, Mean=mean, Variance=variance)
        return x, mean, variance, mean, variance

    @staticmethod
    def grad(b, op, g):
        only_first_has_gradient("batch_norm", op, g, ("SavedMean", "SavedVariance"))
        a = op.attrs
        dx, ds, db = b.batch_norm_grad(op["X"], op["Scale"], op["SavedMean"], op["SavedVariance"], g[0], data_layout=a["data_layout"],
                                       use_global_stats=a["use_global_stats"] or a["is_test"])  # fmt: skip
        return dx, ds, db, None, None

    @staticmethod
    def kernel(xp, *ins, out, **attrs):
        BatchNorm._run(xp, attrs, ins, out)

    @staticmethod
    def _run(xp, attrs, ins, outs):
        (x, scale, bias, mean, variance), (y, *stat_outs) = ins, outs
        x3, y3 = by_channel(x, attrs["data_layout"]), by_channel(y, attrs["data_layout"])
        if x3 is None or y3 is None:  # a view of another array whose axes cannot be merged
            return by_copy(xp, partial(BatchNorm._run, xp, attrs), ins, outs, (0,), (0,))
        eps, keep = attrs["epsilon"], attrs["momentum"]
        if attrs["is_test"] or attrs["use_global_stats"]:
            return normalize_with(xp, x3, scale, bias, mean, variance, y3, stat_outs, eps)
        if not x.size:
            raise ProgramError(f"op batch_norm cannot take statistics over an empty batch: X has shape {list(x.shape)}")
        batch_mean, batch_variance = statistics(xp, x3)
        normalize(xp, x3, scale, bias, batch_mean, batch_variance, y3, eps)
        moved = mean * keep + batch_mean * (1 - keep), variance * keep + batch_variance * (1 - keep)
        for target, value in zip(stat_outs, (*moved, batch_mean, 1 / xp.sqrt(batch_variance + eps))):
            put(target, value)
        return None

    native = Native(calls=batch_norm_native.forward, scratch=batch_norm_native.scratch_types, any_size=True, tail=True)

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        rest = [positive(3, seed=1), f32(3, seed=2), f32(3, seed=3), positive(3, seed=4)]
        for k, shape, layout in ((0, (5, 3, 2, 4), "NCHW"), (0, (5, 2, 4, 3), "NHWC"), (5, (6, 3), "NCHW"), (6, (3, 3, 4), "NCHW")):
            x = f32(*shape, seed=k)
            yield Sample.of(x, *rest, data_layout=layout, grad=("X", "Scale", "Bias"), tolerance=2e-2, why=why)
        yield Sample.of(f32(5, 3, 2, 4, seed=7), *rest, is_test=True, epsilon=1e-3, grad=("X", "Scale", "Bias"), why=why)
        yield Sample.of(f32(3, 3, 2, 2, seed=7), *rest, use_global_stats=True, momentum=0.5, grad=("X", "Scale", "Bias"), why=why)


def normalize_with(xp, x3, scale, bias, mean, variance, y3, stat_outs, eps):
    inv = 1 / xp.sqrt(variance + eps)
    factor = (scale * inv).astype(mean.dtype)
    shift = bias - mean * factor
    xp.multiply(x3, factor[None, :, None], out=y3)
    xp.add(y3, shift[None, :, None], out=y3)
    for target, source, value in zip(stat_outs, (mean, variance, None, None), (mean, variance, mean, inv)):
        if target is not None and target is not source:
            target[...] = value


def by_rows(a):
    """Values of channels, shaped as [N, C, everything else]."""
    return a[None, :, None]


def mean_of(xp, x3, count):
    """The mean of each channel; `count` is its number of elements in the whole batch."""
    return x3.sum(axis=(0, 2)) / count


def variance_of(xp, x3, mean, count):
    t = x3 - by_rows(mean)
    return xp.einsum("nck,nck->c", t, t) / count


def statistics(xp, x3):
    """Mean and variance of each channel."""
    count = x3.shape[0] * x3.shape[2]
    mean = mean_of(xp, x3, count)
    return mean, variance_of(xp, x3, mean, count)


def normalize(xp, x3, scale, bias, mean, variance, y3, eps):
    t = x3 - by_rows(mean)
    t *= by_rows(scale / xp.sqrt(variance + eps))
    t += by_rows(bias)
    y3[...] = t


def gradient_sums(xp, x3, mean, inv, g3):
    """The gradients of Bias and Scale."""
    return g3.sum(axis=(0, 2)), xp.einsum("nck,nck->c", g3, x3 - by_rows(mean)) * inv


def gradient_of_x(xp, x3, scale, mean, inv, g3, dbias, dscale, count, dx3):
    """From the gradients of Bias and Scale over the whole batch, which has `count` elements for each channel."""
    t = x3 - by_rows(mean)
    t *= by_rows(dscale * inv / count)
    xp.subtract(g3, t, out=t)
    t -= by_rows(dbias / count)
    t *= by_rows(scale * inv)
    dx3[...] = t


class BatchNormGrad(OpDef):
    """Gradients of batch_norm with respect to X, Scale and Bias from the statistics that the forward pass saved."""

    name = "batch_norm_grad"
    rewrite = Rewrite(layout=("data_layout", ("X", "Y@GRAD", "X@GRAD")))
    arithmetic = Arithmetic(flops=11)
    inputs, outputs = ("X", "Scale", "SavedMean", "SavedVariance", "Y@GRAD"), ("X@GRAD", "Scale@GRAD", "Bias@GRAD")
    attrs = {"data_layout": "NCHW", "use_global_stats": False}

    @staticmethod
    def decompose(d):
        """In training: operators for the sums over the batch (the gradients of Bias and Scale) and for the gradient of X from them."""
        if not d.attrs["use_global_stats"]:
            layout, outs = d.attrs["data_layout"], d.op.outputs
            sums = {slot: outs[slot] for slot in ("Bias@GRAD", "Scale@GRAD")}
            d.append("bn_grad_sums", d.op.inputs, sums, data_layout=layout)
            d.append("bn_grad_apply", {**d.op.inputs, **sums}, {"X@GRAD": outs["X@GRAD"]}, data_layout=layout)

    @staticmethod
    def pattern(ins, outs, attrs):
        x = channel_words(ins[0], attrs)
        return f"{x}, c, c, c, {x} -> {x}, c, c | {'n:+ *:+' if attrs['use_global_stats'] else 'n! *!'} L(4)"

    @staticmethod
    def infer(x, scale, mean, inv, g, **attrs):
        return x, scale, scale

    @staticmethod
    def kernel(xp, *ins, out, **attrs):
        BatchNormGrad._run(xp, attrs, ins, out)

    @staticmethod
    def _run(xp, attrs, ins, outs):
        (x, scale, mean, inv, g), (dx, dscale, dbias) = ins, outs
        x3, g3, dx3 = (by_channel(a, attrs["data_layout"]) for a in (x, g, dx))
        if x3 is None or g3 is None or dx3 is None:
            return by_copy(xp, partial(BatchNormGrad._run, xp, attrs), ins, outs, (0, 4), (0,))
        of_bias, of_scale = gradient_sums(xp, x3, mean, inv, g3)
        if attrs["use_global_stats"]:
            xp.multiply(g3, by_rows(scale * inv), out=dx3)
        elif x.size:
            gradient_of_x(xp, x3, scale, mean, inv, g3, of_bias, of_scale, x3.shape[0] * x3.shape[2], dx3)
        dbias[...], dscale[...] = of_bias, of_scale
        return None

    native = Native(calls=batch_norm_native.backward, scratch=batch_norm_native.scratch_types, any_size=True)

    @staticmethod
    def samples():
        x, g = f32(5, 3, 2, 4), f32(5, 3, 2, 4, seed=1)
        stats = [positive(3, seed=2), x.mean(axis=(0, 2, 3)), 1 / x.std(axis=(0, 2, 3))]
        yield Sample.of(x, *stats, g, grad=(), why="a gradient itself")
        yield Sample.of(x, *stats, g, use_global_stats=True, grad=(), why="a gradient itself")
