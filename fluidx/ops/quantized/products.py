"""Products and convolutions of 8-bit integers: exact sums in int32, and from them floats or 8-bit integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ... import native
from ...ir import ANY, Arithmetic, Native, OpDef, ProgramError, Sample, TensorType
from ...ir.dtypes import dtype_name
from ..nn.windows import Windows, place_windows
from ..shared.samples import eight_bits
from .packing import packed, packed_shape, unpacked

BYTES = {"uint8": (0, 255), "int8": (-128, 127)}
_LARGEST = 255  # the largest magnitude of an 8-bit number minus its zero point
_KINDS = ("int32", "float32", "uint8", "int8")  # of results, in the order of integer.h
_INPUTS = ("Filter", "Bias?", "Scale?", "Shift?", "Other?", "Zero?", "Factor?", "FilterZero?")
_ATTRS = {
    "outputs": 0, "groups": 1, "zero": 0, "dtype": "int32", "out_zero": 0, "lowest": -128, "highest": 127, "ratio": 1.0, "other_zero": 0,
    "other_ratio": 1.0, "sum_zero": 0, "sum_lowest": -128, "sum_highest": 127,
}  # fmt: skip


class QuantizedProduct(OpDef):
    """Base of products and convolutions of 8-bit integers; `geometry` says how rows are read."""

    attrs = _ATTRS
    arithmetic = Arithmetic(sums_products="matrix")
    geometry: ClassVar[Any]  # (type or array of X, attrs) -> (batch, channels, Windows)
    result: ClassVar[Any]  # (X, batch, Windows, attrs) -> the type of the result

    @classmethod
    def infer(cls, x, w, bias, scale, shift, other, point, factor, less=None, **attrs):
        name = f"op {cls.name}"
        if x.dtype not in BYTES or w.dtype != "int8" or w.ndim != 4:
            raise ProgramError(f"{name}: Input must be uint8 or int8 and Filter packed weights, int8 with 4 axes, got {x} and {w}")
        if attrs["dtype"] not in _KINDS:
            raise ProgramError(f"{name}: dtype must be one of {', '.join(_KINDS)}, got {attrs['dtype']!r}")
        made = cls._result(x, w, attrs)
        whole, real = (("Bias", bias), ("FilterZero", less)), (("Scale", scale), ("Shift", shift))
        for slot, t, dtype in (*((*pair, "int32") for pair in whole), *((*pair, "float32") for pair in real)):
            sizes = (made.shape[-1],) if slot != "Scale" else (1, made.shape[-1])
            if t is not None and (t.dtype != dtype or t.ndim != 1 or t.shape[0] not in sizes):
                raise ProgramError(f"{name}: {slot} must be {dtype} with {made.shape[-1]} elements, one for each output, got {t}")
        if (scale is None) != (attrs["dtype"] == "int32"):
            raise ProgramError(f"{name}: a result in {attrs['dtype']} {'takes no' if scale is not None else 'needs a'} Scale")
        fits = other is None or {attrs["dtype"], other.dtype} <= BYTES.keys() and made.with_dtype(other.dtype).accepts(other)
        if not fits:
            raise ProgramError(f"{name}: Other must be 8-bit integers of the shape of the result, {made}, and the result too, got {other}")
        if point is not None and (point.dtype != x.dtype or point.numel != 1) or factor is not None and factor.numel != 1:
            raise ProgramError(f"{name}: Zero must be one {x.dtype} and Factor one number, got {point} and {factor}")
        return made

    @classmethod
    def _result(cls, x, w, attrs):
        n, c, win = cls.geometry(x, attrs)
        groups, o = attrs["groups"], attrs["outputs"]
        if c % groups or o % groups or o < 1:
            raise ProgramError(f"op {cls.name}: groups {groups} must divide the {c} channels of Input and the {o} outputs")
        found = filter_shape(groups, o, c, win.kernel)
        if w.shape != found:
            raise ProgramError(f"op {cls.name}: Filter must have the packed shape {list(found)}, got {w}")
        return cls.result(x, n, win, attrs)

    @classmethod
    def kernel(cls, xp, x, w, bias, scale, shift, other, point, factor, less=None, *, out, **attrs):
        n, c, win = cls.geometry(x, attrs)
        z = attrs["zero"] if point is None else int(point.reshape(-1)[0])
        image = x.reshape(n, *win.image, c).astype(xp.int32) - xp.int32(z)
        sums = _sums(xp, image, w, less, win, attrs["groups"], attrs["outputs"]).reshape(out.shape)
        out[...] = _finished(xp, sums, bias, scale, shift, other, factor, attrs)

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False):
        x, w, *rest = ins
        present, made = [a for a in (*ins, outs[0]) if a is not None], dtype_name(outs[0].dtype)
        if any(not a.flags.c_contiguous for a in present) or not x.size or made not in _KINDS:
            return None
        bias, scale, shift, other, zero, factor, less = (*rest, None)[:7]
        n, c, win = cls.geometry(x, attrs)
        groups, o, out = attrs["groups"], attrs["outputs"], outs[0]
        at = [0 if a is None else native.address(a) for a in (x, w, bias, scale, shift, other, zero, factor, out, less)]
        signed = [int(a is not None and a.dtype == np.int8) for a in (x, other)]
        kind = _KINDS.index(made)
        words = (
            at[0], signed[0], attrs["zero"], at[6], at[1], at[2], at[3], 0 if scale is None else scale.size, at[7], at[4], at[8], kind,
            attrs["out_zero"], attrs["lowest"], attrs["highest"], at[5], signed[1], attrs["other_zero"], attrs["other_ratio"],
            attrs["ratio"], attrs["sum_zero"], attrs["sum_lowest"], attrs["sum_highest"], n, *win.image, c // groups, o // groups,
            groups, *win.kernel, *win.stride, *win.dilation, win.pad[0], win.pad[2], *win.out, at[9], 0,
        )  # fmt: skip
        return [native.NativeCall("integer", words, tuple(present), kind == 1)]

    native = Native(calls=_calls, any_size=True, tail=True, memory_per_thread=True)


def filter_shape(groups: int, outputs: int, channels: int, kernel: Sequence[int]) -> tuple[int, ...]:
    """The shape of packed weights: those of filters for one channel each are [1, 1, taps, channels]."""
    taps = kernel[0] * kernel[1]
    if groups == channels == outputs > 1:
        return 1, 1, taps, channels
    return packed_shape(groups, outputs // groups, taps * (channels // groups))


def packed_filter(w: np.ndarray, groups: int) -> np.ndarray:
    """Filters [outputs, channels of a group, height, width] of int8 as `quantized_conv` reads them.

    >>> packed_filter(np.ones((8, 3, 2, 2), "int8"), 1).shape, packed_filter(np.ones((8, 1, 2, 2), "int8"), 8).shape
    ((1, 1, 17, 64), (1, 1, 4, 8))
    """
    o, c, kh, kw = w.shape
    if groups == c * groups == o > 1:
        return np.ascontiguousarray(w.reshape(o, kh * kw).T).reshape(1, 1, kh * kw, o)
    return packed(w.transpose(0, 2, 3, 1).reshape(groups, o // groups, kh * kw * c))


def _sums(xp: Any, image: Any, w: Any, less: Any, win: Windows, groups: int, outputs: int) -> Any:
    """The sums of products [N, out height, out width, outputs] in int32; `image` is NHWC without zero point."""
    n, c = image.shape[0], image.shape[3]
    top, bottom, left, right = win.pad
    padded = xp.pad(image, ((0, 0), (top, bottom), (left, right), (0, 0)))
    taps = [padded[:, rows, columns] for rows, columns in (win.tap(i, j) for i, j in win.taps)]
    if groups == c == outputs > 1:
        return sum(tap * (w[0, 0, k].astype(xp.int32) - (0 if less is None else less)) for k, tap in enumerate(taps))
    depth = len(taps) * (c // groups)
    exact = xp.float32 if depth * _LARGEST**2 <= 1 << 24 else xp.float64  # products of floats are fast, and these hold every sum
    columns = xp.stack(taps, 3).reshape(n, *win.out, len(taps), groups, c // groups).astype(exact)
    dense = unpacked(w, outputs // groups, depth).astype(exact)
    dense = dense if less is None else dense - less.reshape(groups, -1, 1).astype(exact)
    parts = [columns[..., g, :].reshape(n, *win.out, depth) @ dense[g].T for g in range(groups)]
    return xp.concatenate(parts, 3).astype(xp.int64)


def _finished(xp: Any, sums: Any, bias: Any, scale: Any, shift: Any, other: Any, factor: Any, attrs: Any) -> Any:
    """The result of sums: in int32, in float, or rounded to 8 bits."""
    sums = sums.astype(xp.int32) if bias is None else sums.astype(xp.int32) + bias
    if scale is None:
        return sums
    y = sums.astype(xp.float32) * (scale if factor is None else scale * factor.reshape(-1))
    y = y if shift is None else y + shift
    if attrs["dtype"] == "float32":
        return y
    q = rounded(xp, y, attrs["out_zero"], attrs["lowest"], attrs["highest"])
    if other is not None:
        far = (other.astype(xp.int32) - attrs["other_zero"]).astype(xp.float32) * xp.float32(attrs["other_ratio"])
        near = (q - attrs["out_zero"]).astype(xp.float32) * xp.float32(attrs["ratio"])
        q = rounded(xp, near + far, attrs["sum_zero"], attrs["sum_lowest"], attrs["sum_highest"])
    return q


def rounded(xp: Any, y: Any, zero: int, lowest: int, highest: int) -> Any:
    """The nearest integers of floats, ties to even, plus the zero point, within a range; in int32. NaN becomes the lowest."""
    limits = xp.float32(lowest - zero), xp.float32(highest - zero)
    return xp.rint(xp.clip(xp.where(xp.isnan(y), limits[0], y), *limits)).astype(xp.int32) + zero


class QuantizedConv(QuantizedProduct):
    """The convolution of images of 8-bit integers, [N, H, W, C], with filters of int8: exact sums in int32, and what follows.

    The sums are those of (Input - zero) * (Filter - FilterZero), plus Bias in int32; padding is the zero point. `dtype` int32 gives the
    sums; float32 gives sums * Scale + Shift; uint8 and int8 give the nearest integers of that, ties to even, plus `out_zero`, from `lowest`
    to `highest`. Other is a quantized value of the shape of the result that is added then: the nearest integer of (result - out_zero) *
    ratio + (Other - other_zero) * other_ratio, plus `sum_zero`, from `sum_lowest` to `sum_highest`. Zero takes the place of `zero`, and
    Factor multiplies Scale. Filter is packed as `fluidx.ops.quantized.products.packed_filter` does.
    """

    name = "quantized_conv"
    inputs = ("Input", *_INPUTS)
    attrs = {**_ATTRS, "kernel": (1, 1), "strides": (1, 1), "paddings": (0, 0), "dilations": (1, 1)}
    arithmetic = Arithmetic(
        sums_products="convolution", flops=lambda ins, outs, attrs: 2 * outs[0].numel * ins[0].shape[3] // attrs["groups"]
        * attrs["kernel"][0] * attrs["kernel"][1],
    )  # fmt: skip

    @staticmethod
    def geometry(x, attrs):
        if x.ndim != 4:
            raise ProgramError(f"op quantized_conv needs an Input of 4 axes, [N, H, W, C], got {x}")
        n, h, w, c = x.shape
        return n, c, place_windows("quantized_conv", (h, w), attrs["kernel"], attrs["strides"], attrs["paddings"], attrs["dilations"])

    @staticmethod
    def result(x, n, win, attrs):
        return TensorType(attrs["dtype"], (n, *win.out, attrs["outputs"]))

    @staticmethod
    def pattern(ins, outs, attrs):
        other = ["n . . ." if t is not None else "" for t in ins[5:6]]
        words = ["n . . .", ". . . .", *("." if t is not None else "" for t in ins[2:5]), *other, *_scalars(ins[6:])]
        return f"{', '.join(words)} -> n . . ."

    @staticmethod
    def samples():
        x, w = eight_bits(2, 5, 4, 3), eight_bits(5, 3, 3, 3, signed=True, seed=1)
        bias, scale, shift = np.arange(-2, 3, dtype="int32") * 100, np.linspace(1e-3, 3e-3, 5, dtype="float32"), np.ones(5, "float32")
        how: Any = {"outputs": 5, "kernel": (3, 3), "paddings": (1, 1), "zero": 128}
        yield Sample.of(x, packed_filter(w, 1), bias, *[None] * 5, **how)
        yield Sample.of(x, packed_filter(w, 1), bias, scale, shift, *[None] * 3, **how, dtype="float32")
        to: Any = {"dtype": "uint8", "out_zero": 100, "lowest": 100, "highest": 255}
        yield Sample.of(x, packed_filter(w, 1), bias, scale, *[None] * 4, **how, **to)
        other = eight_bits(2, 5, 4, 5, signed=True, seed=2)
        sums: Any = {"ratio": 0.5, "other_zero": 3, "other_ratio": 0.25, "sum_zero": 9, "sum_lowest": 0, "sum_highest": 250}
        yield Sample.of(x, packed_filter(w, 1), bias, scale, None, other, None, None, **how, **to, **sums)
        y, v = eight_bits(1, 6, 7, 4, signed=True, seed=3), eight_bits(6, 2, 2, 1, signed=True, seed=4)
        far: Any = {"groups": 2, "kernel": (2, 1), "strides": (2, 3), "dilations": (2, 1), "paddings": (1, 0, 0, 2), "zero": -7}
        yield Sample.of(y, packed_filter(v, 2), *[None] * 6, outputs=6, **far)
        yield Sample.of(y, packed_filter(eight_bits(4, 1, 3, 3, signed=True), 4), *[None] * 6, outputs=4, groups=4, kernel=(3, 3), zero=5)
        less = np.arange(-3, 3, dtype="int32") * 40
        yield Sample.of(y, packed_filter(v, 2), *[None] * 6, less, outputs=6, **far)


class QuantizedMatMul(QuantizedProduct):
    """The product of rows of 8-bit integers with a matrix of int8: exact sums in int32, and what follows, as in quantized_conv.

    Filter is packed as `fluidx.ops.quantized.packing.packed` does with the transposed matrix.
    """

    name = "quantized_matmul"
    inputs = ("Input", *_INPUTS)

    @staticmethod
    def geometry(x, attrs):
        if x.ndim < 1 or attrs["groups"] != 1:
            raise ProgramError(f"op quantized_matmul needs rows and one group, got {x} and {attrs['groups']} groups")
        rows = ANY if ANY in x.shape[:-1] else int(np.prod(x.shape[:-1], dtype=np.int64))
        return 1, x.shape[-1], Windows((rows, 1), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), (rows, 1))

    @staticmethod
    def result(x, n, win, attrs):
        return TensorType(attrs["dtype"], (*x.shape[:-1], attrs["outputs"]))

    @staticmethod
    def pattern(ins, outs, attrs):
        other = "* ." if ins[5] is not None else ""
        words = ["* .", ". . . .", *("." if t is not None else "" for t in ins[2:5]), other, *_scalars(ins[6:])]
        return f"{', '.join(words)} -> * ."

    @staticmethod
    def samples():
        x, w = eight_bits(3, 2, 70), eight_bits(1, 5, 70, signed=True, seed=1)
        bias, scale, shift = np.arange(5, dtype="int32"), np.linspace(1e-3, 3e-3, 5, dtype="float32"), np.ones(5, "float32")
        yield Sample.of(x, packed(w), *[None] * 6, outputs=5, zero=100)
        zero, factor = np.array([77], "uint8"), np.array([0.5], "float32")
        yield Sample.of(x, packed(w), None, scale, shift, None, zero, factor, outputs=5, dtype="float32")
        other = eight_bits(3, 2, 5, seed=2)
        yield Sample.of(x, packed(w), bias, scale[:1], None, other, None, None, outputs=5, dtype="int8", lowest=-100, ratio=0.5)
        yield Sample.of(eight_bits(7, 3, signed=True), packed(w[:, :, :3]), bias, *[None] * 5, outputs=5, zero=-128)
        yield Sample.of(x, packed(w), *[None] * 6, bias, outputs=5, zero=3)


def _scalars(types: Sequence[Any]) -> list[str]:
    """The axis words of operands of one element."""
    return ["" if t is None else " ".join(["."] * t.ndim) for t in types]
