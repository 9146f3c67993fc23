"""rms_norm and its gradient: row normalization without a mean."""

from __future__ import annotations

from math import prod

from ...ir import Arithmetic, Native, OpDef, ProgramError, Sample, TensorType
from ..parts_kernel import by_parts
from ..shared.samples import f32, positive
from ..shared.types import mul_sizes, need_float
from .layer_norm import norm_calls, words_of
from .norm_shared import RowParts, check_weight, only_first_has_gradient, stat_dtype, weight_dtype


class RMSNorm(OpDef):
    """Each row, the axes from `begin_norm_axis` on, divided by the root of the mean of its squares plus epsilon, times Scale.

    MeanSquare has the leading axes. Scale is [product of the normalized sizes], or absent. Source: Zhang and Sennrich 2019; ONNX
    `RMSNormalization`.
    """

    name = "rms_norm"
    arithmetic = Arithmetic(flops=4)
    inputs, outputs = ("X", "Scale?"), ("Y", "MeanSquare?")
    attrs = {"begin_norm_axis": 1, "epsilon": 1e-5}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, row, column = words_of(ins[0], attrs["begin_norm_axis"])
        return f"{x}, {column} -> {x}, {row} | c?! {'' if ins[1] is None else 'L(1>0)'}"

    @staticmethod
    def infer(x, scale, *, begin_norm_axis, epsilon):
        need_float("rms_norm", "X", x)
        if not 0 < begin_norm_axis < x.ndim:
            raise ProgramError(f"op rms_norm: begin_norm_axis must be between 1 and {x.ndim - 1} for X {x}, got {begin_norm_axis}")
        check_weight("rms_norm", "Scale", scale, mul_sizes(x.shape[begin_norm_axis:]), x)
        weight_dtype("rms_norm", x, Scale=scale)
        return x, TensorType(stat_dtype(x), x.shape[:begin_norm_axis])

    @staticmethod
    def grad(b, op, g):
        only_first_has_gradient("rms_norm", op, g, ("MeanSquare",))
        skip = {f"{slot}@GRAD": None for slot in ("X", "Scale") if not op.needs(slot)}
        return b.emit("rms_norm_grad", op["X"], op["Scale"], op["MeanSquare"], g[0], out=skip, **op.attrs)

    @staticmethod
    def decompose(d):
        rows = RowParts(d)
        if rows.possible:
            x = rows.wide("X")
            rows.scaled(x, rows.inverse(rows.mean(d("square", x), "MeanSquare")))

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, scale), (y, square), axis = ins, outs, attrs["begin_norm_axis"]
        arrays = (x, scale, None, y, None, square)
        return norm_calls("layer_norm", arrays, prod(x.shape[:axis]), attrs["epsilon"], dry, centered=False)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        y_only = "the statistic is not differentiable"
        yield Sample.of(f32(4, 6), positive(6, seed=1), tolerance=1e-2, why=y_only)
        yield Sample.of(f32(2, 3, 5, seed=3), positive(5, seed=4), begin_norm_axis=2, epsilon=1e-2, tolerance=1e-2, why=y_only)
        yield Sample.of(f32(3, 2, 3, seed=6), None, tolerance=1e-2, why=y_only)
        yield Sample.of(f32(5, 2, 3, seed=6), positive(6, seed=1), tolerance=1e-2, why=y_only)
        yield Sample.of(
            f32(3, 4, seed=8).astype("float16"), positive(4, seed=9), grad=(), why="central differences are not accurate in float16"
        )


class RMSNormGrad(OpDef):
    """Gradients of rms_norm with respect to X and Scale; each may be absent."""

    name = "rms_norm_grad"
    arithmetic = Arithmetic(flops=8)
    inputs, outputs = ("X", "Scale?", "MeanSquare", "Y@GRAD"), ("X@GRAD?", "Scale@GRAD?")
    attrs = {"begin_norm_axis": 1, "epsilon": 1e-5}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, row, column = words_of(ins[0], attrs["begin_norm_axis"])
        return f"{x}, {column}, {row}, {x} -> {x}, {column} | c?! b?:+ L(3) {'' if ins[1] is None else 'L(1>0)'}"

    @staticmethod
    def infer(x, scale, square, g, **attrs):
        return x, scale

    @staticmethod
    def decompose(d):
        rows = RowParts(d)
        if rows.possible:
            rows.gradients(rows.inverse(d["MeanSquare"]))

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, scale, square, g), (dx, dscale), axis = ins, outs, attrs["begin_norm_axis"]
        arrays = (x, scale, None, square, g, dx, dscale, None)
        return norm_calls("layer_norm_grad", arrays, prod(x.shape[:axis]), attrs["epsilon"], dry, centered=False)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        x, g = f32(4, 6), f32(4, 6, seed=1)
        yield Sample.of(x, positive(6, seed=2), (x * x).mean(axis=1), g, grad=(), why="a gradient itself")
        x, g = f32(5, 3, 4), f32(5, 3, 4, seed=1)
        yield Sample.of(x, positive(4, seed=2), (x * x).mean(axis=2), g, begin_norm_axis=2, grad=(), why="a gradient itself")
