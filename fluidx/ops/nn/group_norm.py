"""group_norm and instance_norm, with their gradients: the channel groups of each image are normalized like rows of layer_norm."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ir import ANY, Arithmetic, Native, OpDef, ProgramError, Sample, TensorType
from ...ir.axis_letters import fold
from ...ir.parts import Part
from ..expr.native import expression_calls
from ..expr.nodes import const, make_node, sym
from ..shared.native import all_of, reduce_calls
from ..shared.samples import f32, positive
from ..shared.types import mul_sizes
from .layer_norm import norm_calls, normalize_rows
from .norm_shared import (
    channel_count,
    check_weight,
    emit_norm_grad,
    linear_in_weights,
    only_first_has_gradient,
    put,
    stat_dtype,
    weight_dtype,
)


def _grouped_channels(op: str, x: TensorType, groups: int, layout: str) -> int:
    c = channel_count(op, x, layout)
    if groups < 1 or (c != ANY and c % groups):
        raise ProgramError(f"op {op}: groups {groups} must divide the {c} channels of X {x}")
    return c


class _Grouped:
    """group_norm and instance_norm as row normalization: rows are (image, group), and the channel weights are applied afterwards."""

    @staticmethod
    def forward(xp, x, scale, bias, y, mean, var, groups, eps):
        """x and y are views [N, C, pixels] and contiguous; mean and var are [N * groups] (var the biased variance)."""
        shape = _rows_of(x, groups)
        normalize_rows(xp, x.reshape(shape), y.reshape(shape), None, None, mean, var, eps)
        if scale is not None:
            xp.multiply(y, scale[None, :, None], out=y)
        if bias is not None:
            xp.add(y, bias[None, :, None], out=y)

    @staticmethod
    def backward(xp, x, scale, mean, var, g, dx, dscale, dbias, groups, eps):
        shape = _rows_of(x, groups)
        inv = 1 / xp.sqrt(var + eps)
        hat = (x.reshape(shape) - mean[:, None]) * inv[:, None]
        put(dbias, g.sum(axis=(0, 2)))
        put(dscale, (g * hat.reshape(x.shape)).sum(axis=(0, 2)) if dscale is not None else None)
        if dx is None:
            return
        t = (g if scale is None else g * scale[None, :, None]).reshape(shape)
        t = (t - t.mean(axis=1, keepdims=True) - hat * (t * hat).mean(axis=1, keepdims=True)) * inv[:, None]
        dx[...] = t.reshape(x.shape)


def _rows_of(x: Any, groups: int) -> tuple[int, int]:
    """The shape of [N, C, pixels] with one row for each image and group; there may be no rows."""
    n, c, pixels = x.shape
    return n * groups, c // groups * pixels


def _channels_view(xp: Any, a: Any, layout: str) -> Any:
    """[N, C, pixels], contiguous: a view for an NCHW array, otherwise a copy."""
    if layout == "NHWC" and a.ndim > 2:
        a = a.transpose(0, a.ndim - 1, *range(1, a.ndim - 1))
    return xp.ascontiguousarray(a).reshape(a.shape[0], a.shape[1], prod(a.shape[2:]))


def _rows_are_contiguous(x: Any, layout: str, *arrays: Any) -> bool:
    """Are the channels of a group adjacent in memory, and all arrays contiguous and of one type?"""
    here = x.size and (layout == "NCHW" or x.ndim == 2)
    return bool(here) and all(a is None or a.dtype == x.dtype and a.flags.c_contiguous for a in arrays)


def _by_pixel(a: Any) -> Any:
    """The view [N, C, pixels] of a contiguous NCHW array."""
    return a.reshape(a.shape[0], a.shape[1], prod(a.shape[2:]))


def _local_groups(x: Any, groups: int, part: Part | None) -> int:
    """The number of groups in this part of the channels; `part` is in units of channels."""
    return groups if part is None else x.shape[1] // part.count


def _put_channels(a: Any, value: Any, layout: str) -> None:
    if layout == "NHWC" and a.ndim > 2:
        a = a.transpose(0, a.ndim - 1, *range(1, a.ndim - 1))
    a[...] = value.reshape(a.shape)


def _words(x: TensorType, groups: int, layout: str) -> tuple[str, str, str, dict[str, int]]:
    """The axis words for X, its channels and its groups, and sizes. A channel is (group, index in the group); the pixels are whole."""
    pixels = " ." * (x.ndim - 2)
    c = x.shape[-1 if layout == "NHWC" else 1]
    channel, group = ("(g c)", "g") if groups > 1 else ("c", ".")
    sizes = {"c": c if c == ANY else c // groups, **({"g": groups} if groups > 1 else {})}
    return f"n{pixels} {channel}" if layout == "NHWC" else f"n {channel}{pixels}", channel, group, sizes


class GroupNorm(OpDef):
    """Each image's channels in `groups` groups, shifted and scaled to mean 0 and variance 1 per group; then Scale and Bias per channel.

    Mean and Variance (biased) are [N, groups]. Source: Wu and He 2018; fluid 1.8 `group_norm`.
    """

    name = "group_norm"
    arithmetic = Arithmetic(flops=7)
    inputs, outputs = ("X", "Scale?", "Bias?"), ("Y", "Mean?", "Variance?")
    attrs = {"groups": 1, "epsilon": 1e-5, "data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, channel, group, sizes = _words(ins[0], attrs["groups"], attrs["data_layout"])
        return f"{x}, {channel}, {channel} -> {x}, n {group}, n {group} | c! #c {linear_in_weights(ins)}", sizes

    @staticmethod
    def infer(x, scale, bias, *, groups, epsilon, data_layout):
        c = _grouped_channels("group_norm", x, groups, data_layout)
        check_weight("group_norm", "Scale", scale, c, x)
        check_weight("group_norm", "Bias", bias, c, x)
        weight_dtype("group_norm", x, Scale=scale, Bias=bias)
        stat = TensorType(stat_dtype(x), (x.shape[0], groups))
        return x, stat, stat

    @staticmethod
    def grad(b, op, g):
        only_first_has_gradient("group_norm", op, g, ("Mean", "Variance"))
        return emit_norm_grad(b, "group_norm_grad", op, g[0], ("Mean", "Variance"))

    @staticmethod
    def kernel(xp, x, scale, bias, *, out, part=None, **attrs):
        GroupNorm._run(xp, (x, scale, bias), out, part=part, **attrs)

    @staticmethod
    def _run(xp, ins, outs, *, groups, epsilon, data_layout, part):
        (x, scale, bias), (y, mean, var) = ins, outs
        a = _channels_view(xp, x, data_layout)
        groups = _local_groups(a, groups, part)
        result, m, v = (xp.empty(shape, a.dtype) for shape in (a.shape, len(a) * groups, len(a) * groups))
        _Grouped.forward(xp, a, scale, bias, result, m, v, groups, epsilon)
        _put_channels(y, result, data_layout)
        put(mean, m.reshape(-1, groups))
        put(var, v.reshape(-1, groups))

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        """If the channels of a group are adjacent in memory: the rows normalized, then the weights of the channels."""
        (x, scale, bias), y = ins, outs[0]
        if not _rows_are_contiguous(x, attrs["data_layout"], *ins, *outs):
            return None
        rows = x.shape[0] * _local_groups(x, attrs["groups"], part)
        calls, e = norm_calls("layer_norm", (x, None, None, *outs), rows, attrs["epsilon"], dry), sym("y")
        values = {"y": _by_pixel(y), **{k: w[:, None] for k, w in (("s", scale), ("b", bias)) if w is not None}}
        e = e if scale is None else e * sym("s")
        e = e if bias is None else e + sym("b")
        return calls if len(values) == 1 else all_of([calls, expression_calls(e, values, values["y"], dry)])

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        yield Sample.of(f32(2, 4, 2, 3), positive(4, seed=1), f32(4, seed=2), groups=2, tolerance=1e-2, why=why)
        yield Sample.of(f32(2, 3, 2, 2), None, None, groups=1, tolerance=1e-2, why=why)
        yield Sample.of(f32(4, 6, 1, 3), positive(6, seed=1), f32(6, seed=2), groups=3, tolerance=1e-2, why=why)
        yield Sample.of(f32(4, 5, 3), positive(3, seed=1), f32(3, seed=2), groups=3, data_layout="NHWC", tolerance=1e-2, why=why)
        yield Sample.of(f32(2, 3, 2, 4, seed=3), positive(4, seed=1), f32(4, seed=2), groups=2, data_layout="NHWC", tolerance=1e-2, why=why)


class GroupNormGrad(OpDef):
    """Gradients of group_norm with respect to X, Scale and Bias; each may be absent."""

    name = "group_norm_grad"
    arithmetic = Arithmetic(flops=11)
    inputs, outputs = ("X", "Scale?", "Bias?", "Mean", "Variance", "Y@GRAD"), ("X@GRAD?", "Scale@GRAD?", "Bias@GRAD?")
    attrs = {"groups": 1, "epsilon": 1e-5, "data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, channel, group, sizes = _words(ins[0], attrs["groups"], attrs["data_layout"])
        return f"{x}, {channel}, ~{channel}, n {group}, n {group}, {x} -> {x}, {channel}, {channel} | c! n:+ #c L(5)", sizes

    @staticmethod
    def infer(x, scale, bias, mean, var, g, **attrs):
        return x, scale, bias

    @staticmethod
    def kernel(xp, x, scale, bias, mean, var, g, *, out, groups, epsilon, data_layout, part=None):
        dx, dscale, dbias = out
        a, d = _channels_view(xp, x, data_layout), _channels_view(xp, g, data_layout)
        groups = _local_groups(a, groups, part)
        result = None if dx is None else xp.empty(a.shape, a.dtype)
        _Grouped.backward(xp, a, scale, mean.reshape(-1), var.reshape(-1), d, result, dscale, dbias, groups, epsilon)
        if dx is not None:
            _put_channels(dx, result, data_layout)

    @staticmethod
    def _scratch(ins, outs, attrs):
        return [ins[0]]

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None, scratch=()):
        (x, scale, _, mean, var, g), (dx, dscale, dbias) = ins, outs
        if not _rows_are_contiguous(x, attrs["data_layout"], *ins, *outs):
            return None
        n, groups, epsilon = x.shape[0], _local_groups(x, attrs["groups"], part), attrs["epsilon"]
        work = _by_pixel(x if dry else scratch[0] if scratch else np.empty_like(x))
        calls: list[Any] = []
        if dbias is not None:
            calls.append(reduce_calls("sum", _by_pixel(g), (0, 2), dbias, dry=dry))
        if dscale is not None:
            rows = {"x": x.reshape(n, groups, -1), "g": g.reshape(n, groups, -1), "m": mean[:, :, None], "v": var[:, :, None]}
            e = sym("g") * ((sym("x") - sym("m")) * (const(1.0) / make_node("sqrt", sym("v") + epsilon)))
            calls.append(expression_calls(e, rows, work.reshape(n, groups, -1), dry))
            calls.append(reduce_calls("sum", work, (0, 2), dscale, dry=dry))
        if dx is not None:
            if scale is not None:
                calls.append(expression_calls(sym("g") * sym("s"), {"g": _by_pixel(g), "s": scale[:, None]}, work, dry))
            g = g if scale is None else work
            calls.append(norm_calls("layer_norm_grad", (x, None, mean, var, g, dx, None, None), n * groups, epsilon, dry))
        return all_of(calls)

    native = Native(calls=_calls, scratch=_scratch)

    @staticmethod
    def samples():
        x = f32(4, 6, 1, 3)
        rows = x.reshape(4, 3, -1)
        yield Sample.of(x, positive(6, seed=1), f32(6, seed=2), rows.mean(axis=2), rows.var(axis=2), f32(4, 6, 1, 3, seed=3), groups=3,
                        grad=(), why="a gradient itself")  # fmt: skip
        x = f32(2, 4, 2, 3)
        rows = x.reshape(2, 2, -1)
        yield Sample.of(x, positive(4, seed=1), f32(4, seed=2), rows.mean(axis=2), rows.var(axis=2), f32(2, 4, 2, 3, seed=3), groups=2,
                        grad=(), why="a gradient itself")  # fmt: skip


class InstanceNorm(OpDef):
    """Each channel of each image shifted and scaled to mean 0 and variance 1, then Scale and Bias per channel.

    SavedMean and SavedVariance are [N * C]: the mean and 1 / sqrt(variance + epsilon). Source: Ulyanov et al. 2016; fluid 1.8.
    """

    name = "instance_norm"
    arithmetic = Arithmetic(flops=7)
    inputs, outputs = ("X", "Scale?", "Bias?"), ("Y", "SavedMean?", "SavedVariance?")
    attrs = {"epsilon": 1e-5}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, stat = f"n c{' .' * (ins[0].ndim - 2)}", fold("n c", ins[0].shape[:2])
        return f"{x}, c, c -> {x}, {stat}, {stat} | {linear_in_weights(ins)}"

    @staticmethod
    def infer(x, scale, bias, *, epsilon):
        c = channel_count("instance_norm", x, "NCHW")
        check_weight("instance_norm", "Scale", scale, c, x)
        check_weight("instance_norm", "Bias", bias, c, x)
        weight_dtype("instance_norm", x, Scale=scale, Bias=bias)
        stat = TensorType(stat_dtype(x), (mul_sizes(x.shape[:2]),))
        return x, stat, stat

    @staticmethod
    def grad(b, op, g):
        only_first_has_gradient("instance_norm", op, g, ("SavedMean", "SavedVariance"))
        return emit_norm_grad(b, "instance_norm_grad", op, g[0], ("SavedMean", "SavedVariance"))

    @staticmethod
    def kernel(xp, x, scale, bias, *, out, epsilon):
        InstanceNorm._run(xp, (x, scale, bias), out, epsilon=epsilon)

    @staticmethod
    def _run(xp, ins, outs, *, epsilon):
        (x, scale, bias), (y, mean, inv) = ins, outs
        a, count = _channels_view(xp, x, "NCHW"), x.shape[0] * x.shape[1]
        result, m, v = (xp.empty(shape, a.dtype) for shape in (a.shape, count, count))
        _Grouped.forward(xp, a, scale, bias, result, m, v, x.shape[1], epsilon)
        _put_channels(y, result, "NCHW")
        put(mean, m)
        put(inv, 1 / xp.sqrt(v + epsilon))

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        yield Sample.of(f32(2, 3, 2, 4), positive(3, seed=1), f32(3, seed=2), tolerance=1e-2, why=why)
        yield Sample.of(f32(1, 2, 5, seed=3), None, None, epsilon=1e-2, tolerance=1e-2, why=why)
        yield Sample.of(f32(5, 3, 4), positive(3, seed=1), f32(3, seed=2), tolerance=1e-2, why=why)


class InstanceNormGrad(OpDef):
    """Gradients of instance_norm with respect to X, Scale and Bias; each may be absent."""

    name = "instance_norm_grad"
    arithmetic = Arithmetic(flops=11)
    inputs, outputs = ("X", "Scale?", "Bias?", "SavedMean", "SavedVariance", "Y@GRAD"), ("X@GRAD?", "Scale@GRAD?", "Bias@GRAD?")
    attrs = {"epsilon": 1e-5}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, stat = f"n c{' .' * (ins[0].ndim - 2)}", fold("n c", ins[0].shape[:2])
        return f"{x}, c, ~c, {stat}, {stat}, {x} -> {x}, c, c | n:+ L(5)"

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
        x = f32(5, 3, 4)
        rows = x.reshape(15, -1)
        yield Sample.of(x, positive(3, seed=1), f32(3, seed=2), rows.mean(axis=1), 1 / rows.std(axis=1), f32(5, 3, 4, seed=3),
                        grad=(), why="a gradient itself")  # fmt: skip
        x = f32(2, 3, 2, 4)
        rows = x.reshape(6, -1)
        yield Sample.of(x, positive(3, seed=1), f32(3, seed=2), rows.mean(axis=1), 1 / rows.std(axis=1), f32(2, 3, 2, 4, seed=3),
                        grad=(), why="a gradient itself")  # fmt: skip
