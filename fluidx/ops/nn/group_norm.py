"""group_norm and instance_norm, with their gradients: the channel groups of each image are normalized like rows of layer_norm."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ...ir import ANY, Arithmetic, Native, OpDef, ProgramError, Sample, TensorType
from ...ir.axis_letters import fold
from ...ir.dtypes import HALVES, dtype_name
from ...ir.parts import Part
from ..expr.native import expression_calls
from ..expr.nodes import const, make_node, sym
from ..parts_kernel import by_parts
from ..shared.native import all_of, reduce_calls
from ..shared.samples import f32, positive
from ..shared.types import mul_sizes
from .layer_norm import norm_calls
from .norm_shared import (
    GroupParts,
    channel_count,
    check_weight,
    emit_norm_grad,
    linear_in_weights,
    stat_dtype,
    weight_dtype,
)


def _grouped_channels(op: str, x: TensorType, groups: int, layout: str) -> int:
    c = channel_count(op, x, layout)
    if groups < 1 or (c != ANY and c % groups):
        raise ProgramError(f"op {op}: groups {groups} must divide the {c} channels of X {x}")
    return c


def _rows_are_contiguous(x: Any, layout: str, *arrays: Any) -> bool:
    """Are the channels of a group adjacent in memory, and all arrays contiguous and of one type, in which the steps below need no rounding
    between them?"""
    here = x.size and dtype_name(x.dtype) not in HALVES and (layout == "NCHW" or x.ndim == 2)
    return bool(here) and all(a is None or a.dtype == x.dtype and a.flags.c_contiguous for a in arrays)


def _by_pixel(a: Any) -> Any:
    """The view [N, C, pixels] of a contiguous NCHW array."""
    return a.reshape(a.shape[0], a.shape[1], prod(a.shape[2:]))


def _local_groups(x: Any, groups: int, part: Part | None, layout: str = "NCHW") -> int:
    """The number of groups in this part of the channels; `part` is in units of channels."""
    return groups if part is None else x.shape[-1 if layout == "NHWC" else 1] // part.count


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
        return emit_norm_grad(b, "group_norm", op, g, ("Mean", "Variance"))

    @staticmethod
    def decompose(d):
        rows = GroupParts(d, _local_groups(d.type(d["X"]), d.attrs["groups"], d.part, d.attrs["data_layout"]))
        if rows.possible:
            even, _, variance = rows.centered(("Mean", "Variance"))
            rows.scaled(even, rows.inverse(variance))

    kernel = by_parts

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
    def decompose(d):
        rows = GroupParts(d, _local_groups(d.type(d["X"]), d.attrs["groups"], d.part, d.attrs["data_layout"]))
        if rows.possible:
            rows.gradients(rows.inverse(d["Variance"]), d["Mean"])

    kernel = by_parts

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
        return emit_norm_grad(b, "instance_norm", op, g, ("SavedMean", "SavedVariance"))

    @staticmethod
    def decompose(d):
        rows = GroupParts(d)
        even, mean, variance = rows.centered(("", ""))
        inverse = rows.inverse(variance)
        for slot, value in (("SavedMean", mean), ("SavedVariance", inverse)):
            if d.out(slot):
                d("reshape", value, out=d.out(slot), shape=(-1,))
        rows.scaled(even, inverse)

    kernel = by_parts

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
    def decompose(d):
        if (channels := d.type(d["X"]).shape[1]) != ANY:
            mean, inverse = (d("reshape", d[slot], shape=(-1, channels)) for slot in ("SavedMean", "SavedVariance"))
            GroupParts(d).gradients(inverse, mean)

    kernel = by_parts

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
