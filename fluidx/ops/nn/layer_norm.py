"""layer_norm and its gradient."""

from __future__ import annotations

from math import prod
from typing import Any

from ... import native
from ...ir import Arithmetic, Autocast, Native, OpDef, Sample, TensorType
from ...ir.axis_letters import fold, letters
from ..parts_kernel import by_parts
from ..shared.native import formats
from ..shared.samples import f32, positive
from .norm_shared import RowParts, emit_norm_grad, linear_in_weights, row_statistic

_VALUES = {"layer_norm": (0, 3), "layer_norm_grad": (0, 4, 5)}  # which arrays of a kernel are X, Y and gradients of these


def norm_calls(
    kernel: str, arrays: tuple[Any, ...], rows: int, epsilon: float, dry: bool, centered: bool = True
) -> list[native.NativeCall] | None:
    """The call of a kernel for rows of X, the first of `arrays` (None for an absent one); all are contiguous. X, Y and their gradients may
    be 16-bit floats; weights and statistics are of one float type. If rows are not `centered`, the deviations are the values themselves.
    """
    x, values = arrays[0], _VALUES[kernel]
    present = [a for a in arrays if a is not None]
    known = formats([arrays[k] for k in values])
    if known is None or not x.size or not all(a.flags.c_contiguous for a in present):
        return None
    kind, how_stored = known
    computed = "float64" if kind == "f64" else "float32"
    if any(a.dtype != computed for k, a in enumerate(arrays) if a is not None and k not in values):
        return None
    if dry:
        return []
    words = [0 if a is None else native.address(a) for a in arrays]
    return [native.NativeCall(f"{kernel}_{kind}", (*words, rows, x.size // rows, float(epsilon), int(centered), how_stored), arrays)]


def words_of(x: TensorType, axis: int) -> tuple[str, str, str]:
    """The axis words for X, for a value per row and for a value per column."""
    rows, columns = letters(axis, "b"), letters(x.ndim - axis, "c")
    return f"{rows} {columns}", rows, fold(columns, x.shape[axis:])


class LayerNorm(OpDef):
    """Each row, the axes from `begin_norm_axis` on, shifted and scaled to mean 0 and variance 1, times Scale plus Bias.

    Mean and Variance (biased) have the leading axes, so each of these can be sharded; fluid flattens them. Scale and Bias are [product of
    the normalized sizes], or absent. Source: Ba, Kiros and Hinton 2016; fluid 1.8 `layer_norm`.
    """

    name = "layer_norm"
    autocast = Autocast(mixed="any", wide=("Scale", "Bias"))
    arithmetic = Arithmetic(flops=7)
    inputs, outputs = ("X", "Scale?", "Bias?"), ("Y", "Mean?", "Variance?")
    attrs = {"begin_norm_axis": 1, "epsilon": 1e-5}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, row, column = words_of(ins[0], attrs["begin_norm_axis"])
        return f"{x}, {column}, {column} -> {x}, {row}, {row} | c?! {linear_in_weights(ins)}"

    @staticmethod
    def infer(x, scale, bias, *, begin_norm_axis, epsilon):
        stat = row_statistic("layer_norm", x, begin_norm_axis, Scale=scale, Bias=bias)
        return x, stat, stat

    @staticmethod
    def decompose(d):
        rows = RowParts(d)
        if rows.possible:
            even, _, variance = rows.centered(("Mean", "Variance"))
            rows.scaled(even, rows.inverse(variance))

    @staticmethod
    def grad(b, op, g):
        return emit_norm_grad(b, "layer_norm", op, g, ("Mean", "Variance"))

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, scale, bias), axis = ins, attrs["begin_norm_axis"]
        return norm_calls("layer_norm", (x, scale, bias, *outs), prod(x.shape[:axis]), attrs["epsilon"], dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        y_only = "statistics are not differentiable"
        yield Sample.of(f32(4, 6), positive(6, seed=1), f32(6, seed=2), tolerance=1e-2, why=y_only)
        x, scale, bias = f32(2, 3, 5, seed=3), positive(5, seed=4), f32(5, seed=5)
        yield Sample.of(x, scale, bias, begin_norm_axis=2, epsilon=1e-2, tolerance=1e-2, why=y_only)
        yield Sample.of(f32(3, 2, 3, seed=6), None, None, tolerance=1e-2, why=y_only)
        yield Sample.of(f32(5, 2, 3, seed=6), positive(6, seed=1), f32(6, seed=2), tolerance=1e-2, why=y_only)
        yield Sample.of(f32(3, 5, seed=6), None, f32(5, seed=7), tolerance=1e-2, why=y_only)
        yield Sample.of(
            f32(3, 4, seed=8).astype("float16"), positive(4, seed=9), None, grad=(), why="central differences are not accurate in float16"
        )


class LayerNormGrad(OpDef):
    """Gradients of layer_norm with respect to X, Scale and Bias; each may be absent."""

    name = "layer_norm_grad"
    autocast = Autocast(mixed="any", wide=("Scale", "Bias", "Mean", "Variance"))
    arithmetic = Arithmetic(flops=11)
    inputs, outputs = ("X", "Scale?", "Bias?", "Mean", "Variance", "Y@GRAD"), ("X@GRAD?", "Scale@GRAD?", "Bias@GRAD?")
    attrs = {"begin_norm_axis": 1, "epsilon": 1e-5}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, row, column = words_of(ins[0], attrs["begin_norm_axis"])
        return f"{x}, {column}, ~{column}, {row}, {row}, {x} -> {x}, {column}, {column} | c?! b?:+ L(5)"

    @staticmethod
    def infer(x, scale, bias, mean, var, g, **attrs):
        return x, scale, bias

    @staticmethod
    def decompose(d):
        rows = RowParts(d)
        if rows.possible:
            rows.gradients(rows.inverse(d["Variance"]), d["Mean"])

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, scale, _, mean, var, g), axis = ins, attrs["begin_norm_axis"]
        return norm_calls("layer_norm_grad", (x, scale, mean, var, g, *outs), prod(x.shape[:axis]), attrs["epsilon"], dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        x, g = f32(4, 6), f32(4, 6, seed=1)
        stats = [x.mean(axis=1), x.var(axis=1)]
        yield Sample.of(x, positive(6, seed=2), f32(6, seed=3), *stats, g, grad=(), why="a gradient itself")
        x, g = f32(5, 3, 4), f32(5, 3, 4, seed=1)
        stats = [x.mean(axis=2), x.var(axis=2)]
        yield Sample.of(x, positive(4, seed=2), f32(4, seed=3), *stats, g, begin_norm_axis=2, grad=(), why="a gradient itself")
