"""batch_norm and its gradient. Sums over channels are matrix-vector products, and every pass works on channels that stay in cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...ir import Arithmetic, Native, OpDef, ProgramError, Rewrite, Sample, Storage, TensorType
from ..shared.blocked import column_sum, row_blocks
from ..shared.samples import f32, positive
from . import batch_norm_native
from .norm_shared import by_copy, channel_count, check_weight, only_first_has_gradient, put, weight_dtype

EVERY = slice(None)
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
    def kernel(xp, x, scale, bias, mean, variance, *, out, **attrs):
        BatchNorm._run(xp, partial(batch_statistics, xp), attrs, (x, scale, bias, mean, variance), out)()

    @staticmethod
    def _bind(ins, outs, attrs, ctx):
        return BatchNorm._run(np, statistics_in_cache, attrs, ins, outs)

    native = Native(calls=batch_norm_native.forward, scratch=batch_norm_native.scratch_types, any_size=True, tail=True, bind=_bind)

    @staticmethod
    def _run(xp, statistics, attrs, ins, outs):
        (x, scale, bias, mean, variance), (y, *stat_outs) = ins, outs
        x3, y3 = by_channel(x, attrs["data_layout"]), by_channel(y, attrs["data_layout"])
        if x3 is None or y3 is None:  # a view of another array whose axes cannot be merged
            return partial(by_copy, xp, partial(BatchNorm._run, xp, statistics, attrs), ins, outs, (0,), (0,))
        eps, keep = attrs["epsilon"], attrs["momentum"]
        if attrs["is_test"] or attrs["use_global_stats"]:
            return partial(normalize_with, xp, x3, scale, bias, mean, variance, y3, stat_outs, eps)
        if not x.size:
            raise ProgramError(f"op batch_norm cannot take statistics over an empty batch: X has shape {list(x.shape)}")
        used = (xp.empty(mean.shape, mean.dtype), xp.empty(mean.shape, mean.dtype))
        run = statistics(x3, scale, bias, y3, used, eps)

        def step():
            run()
            batch_mean, batch_var = used
            mean_out, var_out, saved_mean, saved_inv = stat_outs
            put(mean_out, mean * keep + batch_mean * (1 - keep))
            put(var_out, variance * keep + batch_var * (1 - keep))
            put(saved_mean, batch_mean)
            put(saved_inv, 1 / xp.sqrt(batch_var + eps))

        return step

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


def channel_blocks(x3: Any) -> list[slice]:
    return list(row_blocks(x3.shape[1], x3.shape[0] * x3.shape[2] * x3.itemsize, 128 << 10))


def is_rows(*arrays: Any) -> bool:
    """True for contiguous [N, C, 1] and NHWC arrays: they are matrices with the channels as columns."""
    return all(a.transpose(0, 2, 1).flags.c_contiguous for a in arrays)


def as_rows(a: Any) -> Any:
    return a.transpose(0, 2, 1).reshape(a.shape[0] * a.shape[2], a.shape[1])


def statistics_in_cache(x3, scale, bias, y3, used, eps) -> Callable[[], None]:
    """A call that normalizes `x3` with its own statistics into `y3` and writes these into `used`, some rows or channels at a time."""
    (mean, var), count = used, x3.shape[0] * x3.shape[2]
    if not is_rows(x3, y3):
        return batch_statistics(np, x3, scale, bias, y3, used, eps, channel_blocks(x3))
    x2, y2 = as_rows(x3), as_rows(y3)
    total, square = column_sum(x2, mean), np.empty_like(mean)
    blocks = list(row_blocks(len(x2), x2.shape[1] * x2.itemsize))

    def step():
        total()
        np.divide(mean, count, out=mean)
        var.fill(0)
        for rows in blocks:
            part = y2[rows]
            np.subtract(x2[rows], mean, out=part)
            np.einsum("ij,ij->j", part, part, out=square)
            np.add(var, square, out=var)
        np.divide(var, count, out=var)
        factor = scale / np.sqrt(var + x2.dtype.type(eps))
        for rows in blocks:
            part = y2[rows]
            np.multiply(part, factor, out=part)
            np.add(part, bias, out=part)

    return step


def batch_statistics(xp, x3, scale, bias, y3, used, eps, blocks=(EVERY,)) -> Callable[[], None]:
    """`statistics_in_cache` for any array module, for each of `blocks` of channels."""
    (mean, var), count = used, x3.shape[0] * x3.shape[2]

    def step():
        for c in blocks:
            a, y = x3[:, c], y3[:, c]
            m, v = mean[c], var[c]
            m[...] = a.sum(axis=(0, 2)) / count
            xp.subtract(a, m[None, :, None], out=y)
            v[...] = xp.einsum("nck,nck->c", y, y) / count
            factor = (scale[c] / xp.sqrt(v + eps)).astype(m.dtype)
            xp.multiply(y, factor[None, :, None], out=y)
            xp.add(y, bias[c][None, :, None], out=y)

    return step


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
    def kernel(xp, x, scale, mean, inv, g, *, out, **attrs):
        BatchNormGrad._run(xp, partial(batch_gradient, xp), attrs, (x, scale, mean, inv, g), out)()

    @staticmethod
    def _bind(ins, outs, attrs, ctx):
        return BatchNormGrad._run(np, gradient_in_cache, attrs, ins, outs)

    native = Native(calls=batch_norm_native.backward, scratch=batch_norm_native.scratch_types, any_size=True, bind=_bind)

    @staticmethod
    def _run(xp, gradient, attrs, ins, outs):
        (x, scale, mean, inv, g), (dx, dscale, dbias) = ins, outs
        layout, fixed = attrs["data_layout"], attrs["use_global_stats"]
        x3, g3, dx3 = (by_channel(a, layout) for a in (x, g, dx))
        if x3 is None or g3 is None or dx3 is None:
            return partial(by_copy, xp, partial(BatchNormGrad._run, xp, gradient, attrs), ins, outs, (0, 4), (0,))
        return gradient(x3, scale, mean, inv, g3, dx3, dscale, dbias, fixed)

    @staticmethod
    def samples():
        x, g = f32(5, 3, 2, 4), f32(5, 3, 2, 4, seed=1)
        stats = [positive(3, seed=2), x.mean(axis=(0, 2, 3)), 1 / x.std(axis=(0, 2, 3))]
        yield Sample.of(x, *stats, g, grad=(), why="a gradient itself")
        yield Sample.of(x, *stats, g, use_global_stats=True, grad=(), why="a gradient itself")


def batch_gradient(xp, x3, scale, mean, inv, g3, dx3, dscale, dbias, fixed, blocks=(EVERY,)) -> Callable[[], None]:
    """`gradient_in_cache` for any array module, for each of `blocks` of channels."""
    count = x3.shape[0] * x3.shape[2]
    longest = max((len(range(*b.indices(x3.shape[1]))) for b in blocks), default=0)
    scratch = xp.empty((x3.shape[0], longest, x3.shape[2]), x3.dtype)

    def step():
        for c in blocks:
            a, d, o = x3[:, c], g3[:, c], dx3[:, c]
            t = scratch[:, : a.shape[1]]
            s, r = scale[c], inv[c]
            xp.subtract(a, mean[c][None, :, None], out=t)
            bias_sum = d.sum(axis=(0, 2))
            dot = xp.einsum("nck,nck->c", d, t) * r  # sum of g * normalized x
            dbias[c], dscale[c] = bias_sum, dot
            factor = (s * r).astype(t.dtype)
            if fixed:
                xp.multiply(d, factor[None, :, None], out=o)
            else:
                xp.multiply(t, (dot * r / count).astype(t.dtype)[None, :, None], out=t)
                xp.subtract(d, t, out=o)
                xp.subtract(o, (bias_sum / count).astype(t.dtype)[None, :, None], out=o)
                xp.multiply(o, factor[None, :, None], out=o)

    return step


def gradient_in_cache(x3, scale, mean, inv, g3, dx3, dscale, dbias, fixed) -> Callable[[], None]:
    """A call for the gradients of batch_norm, on arrays with a channel axis, some rows or channels at a time."""
    if not is_rows(x3, g3, dx3):
        return batch_gradient(np, x3, scale, mean, inv, g3, dx3, dscale, dbias, fixed, channel_blocks(x3))
    x2, g2, dx2 = as_rows(x3), as_rows(g3), as_rows(dx3)
    count, columns = x2.shape
    blocks = list(row_blocks(count, columns * x2.itemsize))
    scratch = np.empty((max((b.stop - b.start for b in blocks), default=0), columns), x2.dtype)
    total, dot = column_sum(g2, np.empty_like(mean)), np.empty(columns, x2.dtype)

    def step():
        bias_sum, part = total(), np.empty(columns, x2.dtype)
        dot.fill(0)
        for rows in blocks:
            t = np.subtract(x2[rows], mean, out=scratch[: rows.stop - rows.start])
            np.einsum("ij,ij->j", g2[rows], t, out=part)
            np.add(dot, part, out=dot)
        np.multiply(dot, inv, out=dot)
        factor = scale * inv
        slope, shift = dot * inv / x2.dtype.type(count), bias_sum / x2.dtype.type(count)
        for rows in blocks:
            o = dx2[rows]
            if fixed:
                np.multiply(g2[rows], factor, out=o)
                continue
            t = np.subtract(x2[rows], mean, out=scratch[: rows.stop - rows.start])
            np.multiply(t, slope, out=t)
            np.subtract(g2[rows], t, out=o)
            np.subtract(o, shift, out=o)
            np.multiply(o, factor, out=o)
        dbias[...], dscale[...] = bias_sum, dot

    return step
