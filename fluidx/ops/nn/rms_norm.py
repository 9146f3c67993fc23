"""rms_norm and its gradient: row normalization without a mean."""

from __future__ import annotations

from math import prod

from ...ir import Arithmetic, Autocast, Native, OpDef, Sample
from ..parts_kernel import by_parts
from ..shared.samples import f32, positive
from .layer_norm import norm_calls, words_of
from .norm_shared import RowParts, emit_norm_grad, row_statistic


class RMSNorm(OpDef):
    """Each row, the axes from `begin_norm_axis` on, divided by the root of the mean of its squares plus epsilon, times Scale.

    MeanSquare has the leading axes. Scale is [product of the normalized sizes], or absent. Source: Zhang and Sennrich 2019; ONNX
    `RMSNormalization`.
    """

    name = "rms_norm"
    autocast = Autocast(mixed="any", wide=("Scale",))
    arithmetic = Arithmetic(flops=4)
    inputs, outputs = ("X", "Scale?"), ("Y", "MeanSquare?")
    attrs = {"begin_norm_axis": 1, "epsilon": 1e-5}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, row, column = words_of(ins[0], attrs["begin_norm_axis"])
        return f"{x}, {column} -> {x}, {row} | c?! {'' if ins[1] is None else 'L(1>0)'}"

    @staticmethod
    def infer(x, scale, *, begin_norm_axis, epsilon):
        return x, row_statistic("rms_norm", x, begin_norm_axis, Scale=scale)

    @staticmethod
    def grad(b, op, g):
        return emit_norm_grad(b, "rms_norm", op, g, ("MeanSquare",))

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

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        y_only = "the statistic is not differentiable"
        yield Sample.of(f32(4, 6), positive(6, seed=1), tolerance=1e-2, why=y_only)
        yield Sample.of(f32(2, 3, 5, seed=3), positive(5, seed=4), begin_norm_axis=2, epsilon=1e-2, tolerance=1e-2, why=y_only)
        yield Sample.of(f32(3, 2, 3, seed=6), None, tolerance=1e-2, why=y_only)
        yield Sample.of(f32(5, 2, 3, seed=6), positive(6, seed=1), tolerance=1e-2, why=y_only)
        half = "central differences are not accurate in float16"
        yield Sample.of(f32(3, 4, seed=8).astype("float16"), positive(4, seed=9), grad=(), why=half)


class RMSNormGrad(OpDef):
    """Gradients of rms_norm with respect to X and Scale; each may be absent."""

    name = "rms_norm_grad"
    autocast = Autocast(mixed="any", wide=("Scale", "MeanSquare"))
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

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        x, g = f32(4, 6), f32(4, 6, seed=1)
        yield Sample.of(x, positive(6, seed=2), (x * x).mean(axis=1), g, grad=(), why="a gradient itself")
        x, g = f32(5, 3, 4), f32(5, 3, 4, seed=1)
        yield Sample.of(x, positive(4, seed=2), (x * x).mean(axis=2), g, begin_norm_axis=2, grad=(), why="a gradient itself")
