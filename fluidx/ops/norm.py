"""Normalizations: batch_norm, layer_norm, group_norm, instance_norm, norm (l2_normalize), lrn, and their gradients.

Sums over an axis are matrix-vector products, and every pass works on a block that stays in cache: rows for layer_norm, channels for
batch_norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..ir import ANY, OpDef, Partial, ProgramError, Sample, Shard, TensorType
from ..ir.placement import PlaceError, by_group, place_rows, place_rowwise
from .blocked import column_sum, in_order, row_blocks, row_sum
from .matmul import _f32, is_half, meet, product_of
from .softmax import check_axis, check_float, place_along_axis


def _positive(k: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(k).random(shape) + 0.5).astype("float32")


def _check_weight(op: str, slot: str, w: TensorType | None, size: int, x: TensorType) -> None:
    if w is not None and (w.ndim != 1 or not meet(w.shape[0], size)):
        raise ProgramError(f"op {op}: {slot} must have shape [{size}] for X {x}, got {w}")


def _stat_dtype(x: TensorType) -> str:
    """Statistics of 16-bit floats are kept in float32."""
    return "float32" if x.dtype in ("float16", "bfloat16") else x.dtype


def _weight_dtype(op: str, x: TensorType, **weights: TensorType | None) -> None:
    for slot, w in weights.items():
        if w is not None and w.dtype not in (x.dtype, _stat_dtype(x)):
            raise ProgramError(f"op {op}: {slot} must be {_stat_dtype(x)} for X {x}, got {w}")


def _put(target: Any, value: Any) -> None:
    if target is not None:
        target[...] = value


# -- batch_norm --------------------------------------------------------------------------------------------------------------

_BATCH_ATTRS = {"momentum": 0.9, "epsilon": 1e-5, "is_test": False, "data_layout": "NCHW", "use_global_stats": False}


def _by_channel(x: Any, layout: str) -> Any:
    """The array seen as [N, C, everything else], or None where that would take a copy."""
    if x.ndim == 2:
        return x[:, :, None]
    if layout == "NHWC":
        x = x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))
    if x.ndim == 3:
        return x
    steps = [(d, s) for d, s in zip(x.shape[2:], x.strides[2:]) if d != 1]
    if any(outer != d * inner for (_, outer), (d, inner) in zip(steps, steps[1:])):
        return None
    return x.reshape(x.shape[0], x.shape[1], prod(x.shape[2:]))


def _channel_count(op: str, x: TensorType, layout: str) -> int:
    if layout not in ("NCHW", "NHWC"):
        raise ProgramError(f"op {op}: data_layout must be NCHW or NHWC, got {layout!r}")
    if x.ndim < 2:
        raise ProgramError(f"op {op} needs X with at least 2 axes, got {x}")
    check_float(op, "X", x)
    return x.shape[1] if layout == "NCHW" or x.ndim == 2 else x.shape[-1]


def _place_batch_norm(x, scale, bias, mean, variance, **attrs):
    if attrs["is_test"] or attrs["use_global_stats"]:
        y = place_rowwise(x, scale, bias, mean, variance)
        stats = place_rowwise_stats(x, scale, bias, mean, variance)
        return (y, stats, stats, stats, stats)

    def rule(stat, group, x, *weights):
        if x.on(group) == Shard(0, group) and all(w.on(group) is None for w in weights):
            return Partial("avg", group) if stat else Shard(0, group)
        listed = ", ".join(f"%{a.name} is {a.on(group) or 'replicate'}" for a in (x, *weights))
        raise PlaceError(f"batch_norm takes X replicated or split by rows and everything else whole over {group}: {listed}")

    args = (x, scale, bias, mean, variance)
    y, stats = by_group(partial(rule, False))(*args), by_group(partial(rule, True))(*args)
    return (y, stats, stats, stats, stats)


@by_group
def place_rowwise_stats(group, x, *weights):
    """Whole statistics stay whole beside rows that are split."""
    if x.on(group) == Shard(0, group) and all(w.on(group) is None for w in weights):
        return None
    raise PlaceError(f"%{x.name} must be split by rows and the statistics be whole over {group}")


class BatchNorm(OpDef):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias with the mean and variance of each channel over the batch.

    In training the batch's own statistics are used, and MeanOut = momentum * Mean + (1 - momentum) * batch mean, VarianceOut likewise (the
    biased variance); they are written over Mean and Variance when given their names. With `is_test` or `use_global_stats` Mean and Variance
    are used and pass through unchanged. SavedMean and SavedVariance hold the mean and 1 / sqrt(variance + epsilon) that were used, for the
    gradient. Source: Ioffe and Szegedy 2015; fluid 1.8 `batch_norm`.
    """

    name = "batch_norm"
    inputs = ("X", "Scale", "Bias", "Mean", "Variance")
    outputs = ("Y", "MeanOut?", "VarianceOut?", "SavedMean?", "SavedVariance?")
    attrs = _BATCH_ATTRS
    inplace = (("Mean", "MeanOut"), ("Variance", "VarianceOut"))
    onnx = "BatchNormalization"
    place = staticmethod(_place_batch_norm)

    @staticmethod
    def infer(x, scale, bias, mean, variance, *, momentum, epsilon, is_test, data_layout, use_global_stats):
        c = _channel_count("batch_norm", x, data_layout)
        if epsilon < 0:
            raise ProgramError(f"op batch_norm: epsilon must not be negative, got {epsilon}")
        for slot, w in (("Scale", scale), ("Bias", bias), ("Mean", mean), ("Variance", variance)):
            _check_weight("batch_norm", slot, w, c, x)
        _weight_dtype("batch_norm", x, Scale=scale, Bias=bias, Mean=mean, Variance=variance)
        return x, mean, variance, mean, variance

    @staticmethod
    def grad(b, op, g):
        if any(part is not None for part in g[1:]):
            raise ProgramError("op batch_norm has a gradient through Y only; its statistics cannot be differentiated")
        if op["SavedMean"] is None or op["SavedVariance"] is None:
            raise ProgramError("op batch_norm needs its outputs SavedMean and SavedVariance to have a gradient")
        a = op.attrs
        dx, ds, db = b.batch_norm_grad(op["X"], op["Scale"], op["SavedMean"], op["SavedVariance"], g[0], data_layout=a["data_layout"],
                                       use_global_stats=a["use_global_stats"] or a["is_test"])  # fmt: skip
        return dx, ds, db, None, None

    @staticmethod
    def kernel(xp, x, scale, bias, mean, variance, *, out, **attrs):
        BatchNorm.bind(xp, (x, scale, bias, mean, variance), out, attrs, None)()

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, scale, bias, mean, variance), (y, *stat_outs) = ins, outs
        x3, y3 = _by_channel(x, attrs["data_layout"]), _by_channel(y, attrs["data_layout"])
        if x3 is None or y3 is None:  # a view of some other array whose axes cannot be joined
            return partial(_by_copy, xp, BatchNorm, ins, outs, attrs, (0,), (0,))
        eps, keep = attrs["epsilon"], attrs["momentum"]
        if attrs["is_test"] or attrs["use_global_stats"]:
            return partial(_normalize_with, xp, x3, scale, bias, mean, variance, y3, stat_outs, eps)
        if not x.size:
            raise ProgramError(f"op batch_norm cannot take statistics over an empty batch: X has shape {list(x.shape)}")
        used = (xp.empty(mean.shape, mean.dtype), xp.empty(mean.shape, mean.dtype))
        run = _batch_statistics(xp, x3, scale, bias, y3, used, eps)

        def step():
            run()
            batch_mean, batch_var = used
            mean_out, var_out, saved_mean, saved_inv = stat_outs
            _put(mean_out, mean * keep + batch_mean * (1 - keep))
            _put(var_out, variance * keep + batch_var * (1 - keep))
            _put(saved_mean, batch_mean)
            _put(saved_inv, 1 / xp.sqrt(batch_var + eps))

        return step

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        rest = [_positive(1, 3), _f32(2, 3), _f32(3, 3), _positive(4, 3)]
        for k, shape, layout in ((0, (4, 3, 2, 3), "NCHW"), (0, (2, 3, 2, 3), "NHWC"), (5, (6, 3), "NCHW"), (6, (3, 3, 4), "NCHW")):
            x = _f32(k, *shape)
            yield Sample.of(x, *rest, data_layout=layout, grad=("X", "Scale", "Bias"), tolerance=2e-2, why=why)
        yield Sample.of(_f32(7, 3, 3, 2, 2), *rest, is_test=True, epsilon=1e-3, grad=("X", "Scale", "Bias"), why=why)
        yield Sample.of(_f32(7, 3, 3, 2, 2), *rest, use_global_stats=True, momentum=0.5, grad=("X", "Scale", "Bias"), why=why)


def _by_copy(xp: Any, op: Any, ins: Sequence[Any], outs: Sequence[Any], attrs: Any, in_at: Sequence[int], out_at: Sequence[int]) -> None:
    """Run an op on contiguous copies of the inputs and outputs named by position."""
    ins, dense = list(ins), list(outs)
    for k in in_at:
        ins[k] = xp.ascontiguousarray(ins[k])
    for k in out_at:
        dense[k] = None if outs[k] is None else xp.empty(outs[k].shape, outs[k].dtype)
    op.bind(xp, ins, dense, attrs, None)()
    for k in out_at:
        _put(outs[k], dense[k]) if outs[k] is not None else None


def _normalize_with(xp, x3, scale, bias, mean, variance, y3, stat_outs, eps):
    inv = 1 / xp.sqrt(variance + eps)
    factor = (scale * inv).astype(mean.dtype)
    shift = bias - mean * factor
    if is_half(x3.dtype):
        y3[...] = x3.astype("float32") * factor[None, :, None] + shift[None, :, None]
    else:
        xp.multiply(x3, factor[None, :, None], out=y3)
        xp.add(y3, shift[None, :, None], out=y3)
    for target, source, value in zip(stat_outs, (mean, variance, None, None), (mean, variance, mean, inv)):
        if target is not None and target is not source:
            target[...] = value


def _channel_blocks(x3: Any) -> list[slice]:
    return list(row_blocks(x3.shape[1], x3.shape[0] * x3.shape[2] * x3.itemsize, 128 << 10))


def _is_rows(xp: Any, *arrays: Any) -> bool:
    """True for contiguous [N, C, 1] and NHWC arrays on NumPy: matrices whose columns are the channels."""
    return xp is np and all(not is_half(a.dtype) and a.transpose(0, 2, 1).flags.c_contiguous for a in arrays)


def _as_rows(a: Any) -> Any:
    return a.transpose(0, 2, 1).reshape(a.shape[0] * a.shape[2], a.shape[1])


def _batch_statistics(xp, x3, scale, bias, y3, used, eps) -> Callable[[], None]:
    """A call that normalizes `x3` with its own statistics into `y3` and leaves them in `used`."""
    (mean, var), count = used, x3.shape[0] * x3.shape[2]
    if _is_rows(xp, x3, y3):
        x2, y2 = _as_rows(x3), _as_rows(y3)
        total, square = column_sum(x2, mean), np.empty_like(mean)
        blocks = list(row_blocks(len(x2), x2.shape[1] * x2.itemsize))

        def rows_step():
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

        return rows_step
    blocks = _channel_blocks(x3) if xp is np else [slice(0, x3.shape[1])]
    wide = is_half(x3.dtype)

    def step():
        for c in blocks:
            a, y = x3[:, c], y3[:, c]
            m, v = mean[c], var[c]
            if wide:
                a, y = a.astype("float32"), xp.empty(a.shape, "float32")
            m[...] = a.sum(axis=(0, 2)) / count
            xp.subtract(a, m[None, :, None], out=y)
            v[...] = xp.einsum("nck,nck->c", y, y) / count
            factor = (scale[c] / xp.sqrt(v + eps)).astype(m.dtype)
            xp.multiply(y, factor[None, :, None], out=y)
            xp.add(y, bias[c][None, :, None], out=y)
            if wide:
                y3[:, c] = y

    return step


def _place_batch_norm_grad(x, scale, mean, inv, g, **attrs):
    def rule(stat, group, x, scale, mean, inv, g):
        if x.on(group) == g.on(group) == Shard(0, group) and scale.on(group) is None:
            return Partial("sum", group) if stat else Shard(0, group)
        found = f"%{x.name} is {x.on(group)}, %{g.name} {g.on(group)}"
        raise PlaceError(f"batch_norm's gradient takes X and the gradient of Y split by rows over {group}: {found}")

    args = (x, scale, mean, inv, g)
    rows, terms = by_group(partial(rule, False))(*args), by_group(partial(rule, True))(*args)
    return rows, terms, terms


class BatchNormGrad(OpDef):
    """Gradients of batch_norm with respect to X, Scale and Bias from the statistics that the forward pass saved."""

    name = "batch_norm_grad"
    inputs, outputs = ("X", "Scale", "SavedMean", "SavedVariance", "YGrad"), ("XGrad", "ScaleGrad", "BiasGrad")
    attrs = {"data_layout": "NCHW", "use_global_stats": False}
    place = staticmethod(_place_batch_norm_grad)

    @staticmethod
    def infer(x, scale, mean, inv, g, **attrs):
        return x, scale, scale

    @staticmethod
    def kernel(xp, x, scale, mean, inv, g, *, out, **attrs):
        BatchNormGrad.bind(xp, (x, scale, mean, inv, g), out, attrs, None)()

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, scale, mean, inv, g), (dx, dscale, dbias) = ins, outs
        layout, fixed = attrs["data_layout"], attrs["use_global_stats"]
        x3, g3, dx3 = (_by_channel(a, layout) for a in (x, g, dx))
        if x3 is None or g3 is None or dx3 is None:
            return partial(_by_copy, xp, BatchNormGrad, ins, outs, attrs, (0, 4), (0,))
        count = x3.shape[0] * x3.shape[2]
        if _is_rows(xp, x3, g3, dx3):
            return _batch_norm_rows_grad(_as_rows(x3), scale, mean, inv, _as_rows(g3), _as_rows(dx3), dscale, dbias, fixed)
        blocks = _channel_blocks(x3) if xp is np else [slice(0, x3.shape[1])]
        wide = is_half(x.dtype)
        longest = max((b.stop - b.start for b in blocks), default=0)
        scratch = xp.empty((x3.shape[0], longest, x3.shape[2]), "float32" if wide else x.dtype)

        def step():
            for c in blocks:
                a, d, t = x3[:, c], g3[:, c], scratch[:, : c.stop - c.start]
                o = t if wide else dx3[:, c]
                if wide:
                    a, d = a.astype("float32"), d.astype("float32")
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
                if wide:
                    dx3[:, c] = o

        return step

    @staticmethod
    def samples():
        x, g = _f32(0, 4, 3, 2, 3), _f32(1, 4, 3, 2, 3)
        stats = [_positive(2, 3), x.mean(axis=(0, 2, 3)), 1 / x.std(axis=(0, 2, 3))]
        yield Sample.of(x, *stats, g, grad=(), why="a gradient itself")
        yield Sample.of(x, *stats, g, use_global_stats=True, grad=(), why="a gradient itself")


def _batch_norm_rows_grad(x2, scale, mean, inv, g2, dx2, dscale, dbias, fixed) -> Callable[[], None]:
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


# -- layer_norm, group_norm, instance_norm: rows normalized by themselves ----------------------------------------------------------


def _rows_normalized(xp: Any, x2: Any, y2: Any, scale: Any, bias: Any, mean: Any, var: Any, eps: float) -> Callable[[], None]:
    """A call that normalizes each row of `x2` into `y2`, times `scale` plus `bias` (each [columns] or None); `mean`, `var` are [rows]."""
    rows, columns = x2.shape
    if xp is not np or is_half(x2.dtype) or not x2.size:

        def plain():
            a = x2.astype(mean.dtype)
            mean[...] = a.mean(axis=1)
            t = a - mean[:, None]
            var[...] = (t * t).mean(axis=1)
            t *= (1 / xp.sqrt(var + eps)).astype(t.dtype)[:, None]
            if scale is not None:
                t *= scale
            if bias is not None:
                t += bias
            y2[...] = t

        return plain if x2.size else in_order([])
    calls: list[Callable[[], Any]] = []
    many, small = x2.dtype.type(columns), x2.dtype.type(eps)
    for block in row_blocks(rows, columns * x2.itemsize):
        a, y, m, v = x2[block], y2[block], mean[block], var[block]
        inv = np.empty_like(v)
        calls += [row_sum(a, m), partial(np.divide, m, many, m), partial(np.subtract, a, m[:, None], y)]
        calls += [partial(np.vecdot, y, y, v), partial(np.divide, v, many, v), partial(np.add, v, small, inv)]
        calls += [partial(np.sqrt, inv, inv), partial(np.divide, y, inv[:, None], y)]
        if scale is not None:
            calls.append(partial(np.multiply, y, scale, y))
        if bias is not None:
            calls.append(partial(np.add, y, bias, y))
    return in_order(calls)


def _rows_normalized_grad(xp: Any, x2: Any, scale: Any, mean: Any, var: Any, g2: Any, dx2: Any, dscale: Any, dbias: Any, eps: float):
    """A call for the gradients of `_rows_normalized`; `dx2`, `dscale` and `dbias` may be None."""
    rows, columns = x2.shape
    if xp is not np or is_half(x2.dtype) or not x2.size:

        def plain():
            inv = (1 / xp.sqrt(var + eps)).astype(mean.dtype)[:, None]
            g = g2.astype(mean.dtype)
            hat = (x2.astype(mean.dtype) - mean[:, None]) * inv
            _put(dbias, g.sum(axis=0))
            _put(dscale, (g * hat).sum(axis=0))
            if dx2 is not None and x2.size:
                t = g if scale is None else g * scale
                dx2[...] = (t - t.mean(axis=1, keepdims=True) - hat * (t * hat).mean(axis=1, keepdims=True)) * inv

        return plain
    blocks = list(row_blocks(rows, columns * x2.itemsize, 128 << 10))
    longest = blocks[0].stop
    hat_all, part_all = np.empty((longest, columns), x2.dtype), np.empty((longest, columns), x2.dtype)
    column, many, small = np.empty(columns, x2.dtype), x2.dtype.type(columns), x2.dtype.type(eps)
    calls: list[Callable[[], Any]] = [partial(t.fill, 0) for t in (dscale, dbias) if t is not None]
    for block in blocks:
        m = block.stop - block.start
        a, g, hat, t = x2[block], g2[block], hat_all[:m], part_all[:m]
        inv, dot = np.empty(m, x2.dtype), np.empty(m, x2.dtype)
        calls += [partial(np.add, var[block], small, inv), partial(np.sqrt, inv, inv), partial(np.divide, 1, inv, inv)]
        calls += [partial(np.subtract, a, mean[block][:, None], hat), partial(np.multiply, hat, inv[:, None], hat)]
        if dbias is not None:
            calls += [column_sum(g, column), partial(np.add, dbias, column, dbias)]
        if dscale is not None:
            calls += [partial(np.multiply, g, hat, t), column_sum(t, column), partial(np.add, dscale, column, dscale)]
        if dx2 is None:
            continue
        if scale is not None:
            calls.append(partial(np.multiply, g, scale, t))
            g = t
        o = dx2[block]
        calls += [partial(np.vecdot, g, hat, dot), partial(np.divide, dot, many, dot), partial(np.multiply, hat, dot[:, None], hat)]
        calls += [row_sum(g, dot), partial(np.divide, dot, many, dot), partial(np.subtract, g, dot[:, None], o)]
        calls += [partial(np.subtract, o, hat, o), partial(np.multiply, o, inv[:, None], o)]
    return in_order(calls)


def _layer_rows(x: Any, axis: int) -> Any:
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


def _dense(*arrays: Any) -> bool:
    return all(a is None or a.flags.c_contiguous for a in arrays)


def _keep_rows_place(x: Any, *weights: Any, **attrs: Any) -> Any:
    return (place_rowwise(x, *weights),) * 3


class LayerNorm(OpDef):
    """Each row, the axes from `begin_norm_axis` on, shifted and scaled to mean 0 and variance 1, times Scale plus Bias.

    Mean and Variance (biased) are [product of the leading sizes]; Scale and Bias are [product of the normalized sizes], or absent.
    Source: Ba, Kiros and Hinton 2016; fluid 1.8 `layer_norm`.
    """

    name = "layer_norm"
    inputs, outputs = ("X", "Scale?", "Bias?"), ("Y", "Mean?", "Variance?")
    attrs = {"begin_norm_axis": 1, "epsilon": 1e-5}
    onnx = "LayerNormalization"
    place = staticmethod(_keep_rows_place)

    @staticmethod
    def infer(x, scale, bias, *, begin_norm_axis, epsilon):
        check_float("layer_norm", "X", x)
        if not 0 < begin_norm_axis < x.ndim:
            raise ProgramError(f"op layer_norm: begin_norm_axis must be between 1 and {x.ndim - 1} for X {x}, got {begin_norm_axis}")
        size = product_of(x.shape[begin_norm_axis:])
        _check_weight("layer_norm", "Scale", scale, size, x)
        _check_weight("layer_norm", "Bias", bias, size, x)
        _weight_dtype("layer_norm", x, Scale=scale, Bias=bias)
        stat = TensorType(_stat_dtype(x), (product_of(x.shape[:begin_norm_axis]),))
        return x, stat, stat

    @staticmethod
    def grad(b, op, g):
        scale, bias = op["Scale"], op["Bias"]
        _through_first_only("layer_norm", op, g, ("Mean", "Variance"))
        skip = {slot: None for slot, v in (("XGrad", op["X"]), ("ScaleGrad", scale), ("BiasGrad", bias)) if v is None or v.stop_gradient}
        return b.emit("layer_norm_grad", op["X"], scale, bias, op["Mean"], op["Variance"], g[0], out=skip, **op.attrs)

    @staticmethod
    def kernel(xp, x, scale, bias, *, out, **attrs):
        LayerNorm.bind(xp, (x, scale, bias), out, attrs, None)()

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, scale, bias), (y, mean, var), axis = ins, outs, attrs["begin_norm_axis"]
        if not _dense(x, y):
            return partial(_by_copy, xp, LayerNorm, ins, outs, attrs, (0,), (0,))
        x2, dtype = _layer_rows(x, axis), "float32" if is_half(x.dtype) else x.dtype
        mean = xp.empty(len(x2), dtype) if mean is None else mean
        var = xp.empty(len(x2), dtype) if var is None else var
        return _rows_normalized(xp, x2, _layer_rows(y, axis), scale, bias, mean, var, attrs["epsilon"])

    @staticmethod
    def samples():
        y_only = "statistics are not differentiable"
        yield Sample.of(_f32(0, 4, 6), _positive(1, 6), _f32(2, 6), tolerance=1e-2, why=y_only)
        yield Sample.of(_f32(3, 2, 3, 5), _positive(4, 5), _f32(5, 5), begin_norm_axis=2, epsilon=1e-2, tolerance=1e-2, why=y_only)
        yield Sample.of(_f32(6, 3, 2, 3), None, None, tolerance=1e-2, why=y_only)
        yield Sample.of(_f32(6, 3, 5), None, _f32(7, 5), tolerance=1e-2, why=y_only)
        yield Sample.of(_f32(8, 3, 4).astype("float16"), _positive(9, 4), None, grad=(), why="central differences drown in float16")


def _through_first_only(name: str, op: Any, g: Sequence[Any], stats: tuple[str, str]) -> None:
    if any(part is not None for part in g[1:]):
        raise ProgramError(f"op {name} has a gradient through its first output only; {stats[0]} and {stats[1]} cannot be differentiated")
    if any(op[s] is None for s in stats):
        raise ProgramError(f"op {name} needs its outputs {stats[0]} and {stats[1]} to have a gradient")


def _place_norm_grad(x, scale, bias, mean, var, g, **attrs):
    def rule(terms, group, x, mean, var, g, *weights):
        if x.on(group) == g.on(group) == mean.on(group) == var.on(group) == Shard(0, group) and all(w.on(group) is None for w in weights):
            return Partial("sum", group) if terms else Shard(0, group)
        found = f"%{x.name} is {x.on(group)}, %{g.name} {g.on(group)}"
        raise PlaceError(f"the gradient takes X, its statistics and the gradient of Y split by rows over {group}: {found}")

    args = [a for a in (x, mean, var, g, scale, bias) if a is not None]
    rows, terms = by_group(partial(rule, False))(*args), by_group(partial(rule, True))(*args)
    return rows, terms, terms


class LayerNormGrad(OpDef):
    """Gradients of layer_norm with respect to X, Scale and Bias; each may be left away."""

    name = "layer_norm_grad"
    inputs, outputs = ("X", "Scale?", "Bias?", "Mean", "Variance", "YGrad"), ("XGrad?", "ScaleGrad?", "BiasGrad?")
    attrs = {"begin_norm_axis": 1, "epsilon": 1e-5}
    place = staticmethod(_place_norm_grad)

    @staticmethod
    def infer(x, scale, bias, mean, var, g, **attrs):
        return x, scale, bias

    @staticmethod
    def kernel(xp, *arrays, out, **attrs):
        LayerNormGrad.bind(xp, arrays, out, attrs, None)()

    @staticmethod
    def bind(xp, ins, outs, attrs, ctx):
        (x, scale, _, mean, var, g), (dx, dscale, dbias), axis = ins, outs, attrs["begin_norm_axis"]
        if not _dense(x, g, dx):
            return partial(_by_copy, xp, LayerNormGrad, ins, outs, attrs, (0, 5), (0,))
        dx2 = None if dx is None else _layer_rows(dx, axis)
        return _rows_normalized_grad(xp, _layer_rows(x, axis), scale, mean, var, _layer_rows(g, axis), dx2, dscale, dbias, attrs["epsilon"])

    @staticmethod
    def samples():
        x, g = _f32(0, 4, 6), _f32(1, 4, 6)
        stats = [x.mean(axis=1), x.var(axis=1)]
        yield Sample.of(x, _positive(2, 6), _f32(3, 6), *stats, g, grad=(), why="a gradient itself")


def _grouped_channels(op: str, x: TensorType, groups: int, layout: str) -> int:
    c = _channel_count(op, x, layout)
    if groups < 1 or (c != ANY and c % groups):
        raise ProgramError(f"op {op}: groups {groups} must divide the {c} channels of X {x}")
    return c


class _Grouped:
    """group_norm and instance_norm as row normalization: rows are (image, group), the channel weights come on afterwards."""

    @staticmethod
    def forward(xp, x, scale, bias, y, mean, var, groups, eps):
        """x and y seen as [N, C, pixels] and contiguous; mean and var are [N * groups] (var the biased variance)."""
        n, c, pixels = x.shape
        rows = _rows_normalized(xp, x.reshape(n * groups, -1), y.reshape(n * groups, -1), None, None, mean, var, eps)

        def run():
            rows()
            if scale is not None:
                xp.multiply(y, scale[None, :, None].astype(y.dtype), out=y)
            if bias is not None:
                xp.add(y, bias[None, :, None].astype(y.dtype), out=y)

        return run

    @staticmethod
    def backward(xp, x, scale, mean, var, g, dx, dscale, dbias, groups, eps):
        n, c, pixels = x.shape
        dtype = "float32" if is_half(x.dtype) else x.dtype
        inv = (1 / xp.sqrt(var + eps)).astype(dtype)
        hat = (x.reshape(n * groups, -1).astype(dtype) - mean[:, None]) * inv[:, None]
        g = g.astype(dtype)
        _put(dbias, g.sum(axis=(0, 2)))
        _put(dscale, (g * hat.reshape(x.shape)).sum(axis=(0, 2)) if dscale is not None else None)
        if dx is None:
            return
        t = (g if scale is None else g * scale[None, :, None]).reshape(n * groups, -1)
        t = (t - t.mean(axis=1, keepdims=True) - hat * (t * hat).mean(axis=1, keepdims=True)) * inv[:, None]
        dx[...] = t.reshape(x.shape)


def _channels_view(xp: Any, a: Any, layout: str) -> Any:
    """[N, C, pixels], contiguous: a view for an NCHW array, a copy otherwise."""
    if layout == "NHWC" and a.ndim > 2:
        a = a.transpose(0, a.ndim - 1, *range(1, a.ndim - 1))
    return xp.ascontiguousarray(a).reshape(a.shape[0], a.shape[1], prod(a.shape[2:]))


def _put_channels(a: Any, value: Any, layout: str) -> None:
    if layout == "NHWC" and a.ndim > 2:
        a = a.transpose(0, a.ndim - 1, *range(1, a.ndim - 1))
    a[...] = value.reshape(a.shape)


class GroupNorm(OpDef):
    """Each image's channels, in `groups` groups, shifted and scaled to mean 0 and variance 1 per group; then Scale and Bias by channel.

    Mean and Variance (biased) are [N, groups]. Source: Wu and He 2018; fluid 1.8 `group_norm`.
    """

    name = "group_norm"
    inputs, outputs = ("X", "Scale?", "Bias?"), ("Y", "Mean?", "Variance?")
    attrs = {"groups": 1, "epsilon": 1e-5, "data_layout": "NCHW"}
    onnx = "GroupNormalization"
    place = staticmethod(_keep_rows_place)

    @staticmethod
    def infer(x, scale, bias, *, groups, epsilon, data_layout):
        c = _grouped_channels("group_norm", x, groups, data_layout)
        _check_weight("group_norm", "Scale", scale, c, x)
        _check_weight("group_norm", "Bias", bias, c, x)
        _weight_dtype("group_norm", x, Scale=scale, Bias=bias)
        stat = TensorType(_stat_dtype(x), (x.shape[0], groups))
        return x, stat, stat

    @staticmethod
    def grad(b, op, g):
        _through_first_only("group_norm", op, g, ("Mean", "Variance"))
        return _emit_norm_grad(b, "group_norm_grad", op, g[0], ("Mean", "Variance"))

    @staticmethod
    def kernel(xp, x, scale, bias, *, out, groups, epsilon, data_layout):
        y, mean, var = out
        a = _channels_view(xp, x, data_layout)
        stat, result = "float32" if is_half(x.dtype) else x.dtype, xp.empty(a.shape, a.dtype)
        m, v = xp.empty(len(a) * groups, stat), xp.empty(len(a) * groups, stat)
        _Grouped.forward(xp, a, scale, bias, result, m, v, groups, epsilon)()
        _put_channels(y, result, data_layout)
        _put(mean, m.reshape(-1, groups))
        _put(var, v.reshape(-1, groups))

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        yield Sample.of(_f32(0, 2, 4, 2, 3), _positive(1, 4), _f32(2, 4), groups=2, tolerance=1e-2, why=why)
        yield Sample.of(_f32(0, 2, 3, 2, 2), None, None, groups=1, tolerance=1e-2, why=why)
        yield Sample.of(_f32(3, 2, 3, 2, 4), _positive(1, 4), _f32(2, 4), groups=2, data_layout="NHWC", tolerance=1e-2, why=why)


def _emit_norm_grad(b: Any, name: str, op: Any, g: Any, stats: tuple[str, str]) -> Any:
    scale, bias = op["Scale"], op["Bias"]
    skip = {slot: None for slot, v in (("XGrad", op["X"]), ("ScaleGrad", scale), ("BiasGrad", bias)) if v is None or v.stop_gradient}
    return b.emit(name, op["X"], scale, bias, op[stats[0]], op[stats[1]], g, out=skip, **op.attrs)


class GroupNormGrad(OpDef):
    """Gradients of group_norm with respect to X, Scale and Bias; each may be left away."""

    name = "group_norm_grad"
    inputs, outputs = ("X", "Scale?", "Bias?", "Mean", "Variance", "YGrad"), ("XGrad?", "ScaleGrad?", "BiasGrad?")
    attrs = {"groups": 1, "epsilon": 1e-5, "data_layout": "NCHW"}
    place = staticmethod(_place_norm_grad)

    @staticmethod
    def infer(x, scale, bias, mean, var, g, **attrs):
        return x, scale, bias

    @staticmethod
    def kernel(xp, x, scale, bias, mean, var, g, *, out, groups, epsilon, data_layout):
        dx, dscale, dbias = out
        a, d = _channels_view(xp, x, data_layout), _channels_view(xp, g, data_layout)
        result = None if dx is None else xp.empty(a.shape, a.dtype)
        _Grouped.backward(xp, a, scale, mean.reshape(-1), var.reshape(-1), d, result, dscale, dbias, groups, epsilon)
        if dx is not None:
            _put_channels(dx, result, data_layout)

    @staticmethod
    def samples():
        x = _f32(0, 2, 4, 2, 3)
        rows = x.reshape(2, 2, -1)
        yield Sample.of(x, _positive(1, 4), _f32(2, 4), rows.mean(axis=2), rows.var(axis=2), _f32(3, 2, 4, 2, 3), groups=2,
                        grad=(), why="a gradient itself")  # fmt: skip


class InstanceNorm(OpDef):
    """Each channel of each image shifted and scaled to mean 0 and variance 1, then Scale and Bias by channel.

    SavedMean and SavedVariance are [N * C]: the mean and 1 / sqrt(variance + epsilon). Source: Ulyanov et al. 2016; fluid 1.8.
    """

    name = "instance_norm"
    inputs, outputs = ("X", "Scale?", "Bias?"), ("Y", "SavedMean?", "SavedVariance?")
    attrs = {"epsilon": 1e-5}
    onnx = "InstanceNormalization"
    place = staticmethod(_keep_rows_place)

    @staticmethod
    def infer(x, scale, bias, *, epsilon):
        c = _channel_count("instance_norm", x, "NCHW")
        _check_weight("instance_norm", "Scale", scale, c, x)
        _check_weight("instance_norm", "Bias", bias, c, x)
        _weight_dtype("instance_norm", x, Scale=scale, Bias=bias)
        stat = TensorType(_stat_dtype(x), (product_of(x.shape[:2]),))
        return x, stat, stat

    @staticmethod
    def grad(b, op, g):
        _through_first_only("instance_norm", op, g, ("SavedMean", "SavedVariance"))
        return _emit_norm_grad(b, "instance_norm_grad", op, g[0], ("SavedMean", "SavedVariance"))

    @staticmethod
    def kernel(xp, x, scale, bias, *, out, epsilon):
        y, mean, inv = out
        stat, count = "float32" if is_half(x.dtype) else x.dtype, x.shape[0] * x.shape[1]
        m, v = xp.empty(count, stat), xp.empty(count, stat)
        a = _channels_view(xp, x, "NCHW")
        result = xp.empty(a.shape, a.dtype)
        _Grouped.forward(xp, a, scale, bias, result, m, v, x.shape[1], epsilon)()
        _put_channels(y, result, "NCHW")
        _put(mean, m)
        _put(inv, 1 / xp.sqrt(v + epsilon))

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        yield Sample.of(_f32(0, 2, 3, 2, 4), _positive(1, 3), _f32(2, 3), tolerance=1e-2, why=why)
        yield Sample.of(_f32(3, 1, 2, 5), None, None, epsilon=1e-2, tolerance=1e-2, why=why)


class InstanceNormGrad(OpDef):
    """Gradients of instance_norm with respect to X, Scale and Bias; each may be left away."""

    name = "instance_norm_grad"
    inputs, outputs = ("X", "Scale?", "Bias?", "SavedMean", "SavedVariance", "YGrad"), ("XGrad?", "ScaleGrad?", "BiasGrad?")
    attrs = {"epsilon": 1e-5}
    place = staticmethod(_place_norm_grad)

    @staticmethod
    def infer(x, scale, bias, mean, var, g, **attrs):
        return x, scale, bias

    @staticmethod
    def kernel(xp, x, scale, bias, mean, inv, g, *, out, epsilon):
        dx, dscale, dbias = out
        a, d = _channels_view(xp, x, "NCHW"), _channels_view(xp, g, "NCHW")
        result = None if dx is None else xp.empty(a.shape, a.dtype)
        _Grouped.backward(xp, a, scale, mean, 1 / (inv * inv), d, result, dscale, dbias, x.shape[1], 0.0)
        if dx is not None:
            _put_channels(dx, result, "NCHW")

    @staticmethod
    def samples():
        x = _f32(0, 2, 3, 2, 4)
        rows = x.reshape(6, -1)
        yield Sample.of(x, _positive(1, 3), _f32(2, 3), rows.mean(axis=1), 1 / rows.std(axis=1), _f32(3, 2, 3, 2, 4),
                        grad=(), why="a gradient itself")  # fmt: skip


# -- norm, lrn ---------------------------------------------------------------------------------------------------------------------


def _place_norm(x, *, axis, **attrs):
    place = place_along_axis(x, axis=axis)
    return place, place


class Norm(OpDef):
    """X divided by its length along `axis`, sqrt(sum of squares + epsilon), and that length (`axis` kept with size 1).

    Source: fluid 1.8 `norm`, which l2_normalize writes.
    """

    name = "norm"
    inputs, outputs = ("X",), ("Out", "Norm")
    attrs = {"axis": -1, "epsilon": 1e-10}
    place = staticmethod(_place_norm)

    @staticmethod
    def infer(x, *, axis, epsilon):
        check_float("norm", "X", x)
        at = check_axis("norm", x, axis)
        return x, TensorType(x.dtype, tuple(1 if k == at else d for k, d in enumerate(x.shape)))

    @staticmethod
    def grad(b, op, g):
        if g[1] is not None:
            raise ProgramError("op norm has a gradient through Out only; use sqrt(reduce_sum(square(x))) to differentiate the length")
        return b.norm_grad(op["Out"], op["Norm"], g[0], axis=op.attrs["axis"])

    @staticmethod
    def kernel(xp, x, *, out, axis, epsilon):
        y, length = out
        a = x.astype("float32") if is_half(x.dtype) else x
        wide = xp.sqrt((a * a).sum(axis=axis, keepdims=True) + epsilon)
        length[...] = wide
        y[...] = a / wide

    @staticmethod
    def samples():
        why = "the length is not differentiable here"
        yield Sample.of(_f32(0, 3, 4), why=why)
        yield Sample.of(_f32(1, 2, 3, 2), axis=1, epsilon=1e-3, why=why)


class NormGrad(OpDef):
    """Gradient of norm: (g - out * sum(g * out)) / norm along `axis`."""

    name = "norm_grad"
    inputs, outputs = ("Out", "Norm", "OutGrad"), ("XGrad",)
    attrs = {"axis": -1}
    place = staticmethod(place_along_axis)

    @staticmethod
    def infer(y, length, g, *, axis):
        return y

    @staticmethod
    def kernel(xp, y, length, g, *, out, axis):
        if is_half(y.dtype):
            y, length, g = (a.astype("float32") for a in (y, length, g))
        out[...] = (g - y * (g * y).sum(axis=axis, keepdims=True)) / length

    @staticmethod
    def samples():
        x = _f32(0, 3, 4)
        length = np.sqrt((x * x).sum(axis=1, keepdims=True))
        yield Sample.of(x / length, length, _f32(1, 3, 4), grad=(), why="a gradient itself")


def _neighbours(xp: Any, squares: Any, n: int, back: bool = False) -> Any:
    """For each channel the sum over the window of `n` channels around it (mirrored with `back`)."""
    before = n - 1 - (n - 1) // 2 if back else (n - 1) // 2
    c, total = squares.shape[1], xp.zeros_like(squares)
    for k in range(-before, n - before):
        low, high = max(0, -k), min(c, c - k)
        if low < high:
            total[:, low:high] += squares[:, low + k : high + k]
    return total


class Lrn(OpDef):
    """Local response normalization over `n` neighbouring channels: x / (k + alpha * sum of squares) ** beta.

    MidOut is the bracket. Source: Krizhevsky, Sutskever and Hinton 2012; fluid 1.8 `lrn`.
    """

    name = "lrn"
    inputs, outputs = ("X",), ("Out", "MidOut")
    attrs = {"n": 5, "k": 1.0, "alpha": 1e-4, "beta": 0.75}
    onnx = "LRN"

    @staticmethod
    def place(x, **attrs):
        return (place_rowwise(x),) * 2

    @staticmethod
    def infer(x, *, n, k, alpha, beta):
        check_float("lrn", "X", x)
        if x.ndim < 2 or n < 1:
            raise ProgramError(f"op lrn needs X with at least 2 axes and n of at least 1, got {x} and n {n}")
        return x, x

    @staticmethod
    def grad(b, op, g):
        if g[1] is not None:
            raise ProgramError("op lrn has a gradient through Out only")
        return b.lrn_grad(op["X"], op["MidOut"], g[0], **op.attrs)

    @staticmethod
    def kernel(xp, x, *, out, n, k, alpha, beta):
        y, mid = out
        a = x.astype("float32") if is_half(x.dtype) else x
        wide = k + alpha * _neighbours(xp, a * a, n)
        mid[...] = wide
        y[...] = a * wide**-beta

    @staticmethod
    def samples():
        why = "MidOut is not differentiable"
        yield Sample.of(_f32(0, 2, 6, 2, 2), n=3, alpha=0.5, why=why)
        yield Sample.of(_f32(1, 1, 3, 2, 2), n=4, alpha=0.1, k=2.0, why=why)


class LrnGrad(OpDef):
    """Gradient of lrn: g * mid**-beta - 2 * alpha * beta * x * (sum over the channels that see x of g * x * mid**(-beta - 1))."""

    name = "lrn_grad"
    inputs, outputs = ("X", "MidOut", "OutGrad"), ("XGrad",)
    attrs = {"n": 5, "k": 1.0, "alpha": 1e-4, "beta": 0.75}
    place = staticmethod(place_rows)

    @staticmethod
    def infer(x, mid, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, mid, g, *, out, n, k, alpha, beta):
        if is_half(x.dtype):
            x, mid, g = (a.astype("float32") for a in (x, mid, g))
        seen = _neighbours(xp, g * x * mid ** (-beta - 1), n, back=True)
        out[...] = g * mid**-beta - 2 * alpha * beta * x * seen

    @staticmethod
    def samples():
        yield Sample.of(_f32(0, 1, 4, 2, 2), _positive(1, 1, 4, 2, 2), _f32(2, 1, 4, 2, 2), n=3, grad=(), why="a gradient itself")
