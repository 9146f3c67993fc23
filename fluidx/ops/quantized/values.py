"""Quantized values between products: rounding floats to 8-bit integers and back, functions as tables, sums, and maxima of windows."""

from __future__ import annotations

import numpy as np

from ... import native
from ...ir import Native, OpDef, ProgramError, Sample, TensorType
from ...ir.op_fields import Required
from ..nn.windows import place_windows
from ..shared.samples import eight_bits, f32
from .products import BYTES, rounded


def _need_bytes(name: str, *types: TensorType) -> None:
    for t in types:
        if t.dtype not in BYTES:
            raise ProgramError(f"op {name} takes uint8 or int8, got {t}")


def _flat(*arrays) -> bool:
    return all(a.flags.c_contiguous for a in arrays)


def _signed(x) -> int:
    return int(x.dtype == np.int8)


class QuantizeLinear(OpDef):
    """The nearest integers of X / scale, ties to even, plus the zero point, within the range of `dtype`: uint8 or int8."""

    name = "quantize_linear"
    inputs = ("X",)
    attrs = {"scale": Required(float), "zero": 0, "dtype": "uint8"}
    pattern = "* -> *"

    @staticmethod
    def infer(x, *, scale, zero, dtype):
        if x.dtype != "float32" or dtype not in BYTES or not scale > 0:
            takes = "float32, a scale above 0, and dtype uint8 or int8"
            raise ProgramError(f"op quantize_linear takes {takes}, got {x}, {scale} and {dtype!r}")
        return x.with_dtype(dtype)

    @staticmethod
    def kernel(xp, x, *, out, scale, zero, dtype):
        out[...] = rounded(xp, x / xp.float32(scale), zero, *BYTES[dtype])

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x,), (out,) = ins, outs
        if not _flat(x, out):
            return None
        words = (native.address(x), native.address(out), x.size, attrs["scale"], attrs["zero"], *BYTES[attrs["dtype"]])
        return [native.NativeCall("quantize", words, (x, out))]

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        x = np.array([-3, -1.25, -0.75, -0.25, 0, 0.25, 0.75, 1.25, 200], "float32")
        yield Sample.of(x, scale=0.5, zero=3)
        yield Sample.of(f32(3, 70), scale=0.01, zero=-5, dtype="int8")


class DequantizeLinear(OpDef):
    """(X - zero) * scale in float32, for integers of 8 bits."""

    name = "dequantize_linear"
    inputs = ("X",)
    attrs = {"scale": Required(float), "zero": 0}
    pattern = "* -> *"

    @staticmethod
    def infer(x, *, scale, zero):
        _need_bytes("dequantize_linear", x)
        return x.with_dtype("float32")

    @staticmethod
    def kernel(xp, x, *, out, scale, zero):
        xp.multiply((x.astype(xp.int32) - zero).astype(xp.float32), xp.float32(scale), out)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x,), (out,) = ins, outs
        if not _flat(x, out):
            return None
        words = (native.address(x), native.address(out), x.size, _signed(x), attrs["scale"], attrs["zero"])
        return [native.NativeCall("dequantize", words, (x, out))]

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(eight_bits(3, 70), scale=0.5, zero=3)
        yield Sample.of(eight_bits(5, signed=True), scale=0.25, zero=-128)


class DynamicQuantizeLinear(OpDef):
    """X rounded to uint8 with the scale that its own range has, 0 included, over 255 steps; the scale and the zero point."""

    name = "dynamic_quantize_linear"
    inputs, outputs = ("X",), ("Out", "Scale", "Zero")

    @staticmethod
    def infer(x):
        if x.dtype != "float32":
            raise ProgramError(f"op dynamic_quantize_linear takes float32, got {x}")
        return x.with_dtype("uint8"), TensorType("float32", ()), TensorType("uint8", ())

    @staticmethod
    def kernel(xp, x, *, out):
        q, scale, zero = out
        low, high = (xp.minimum(x.min(), 0), xp.maximum(x.max(), 0)) if x.size else (xp.float32(0), xp.float32(0))
        scale[...] = (high - low) / xp.float32(255) if high > low else 1
        zero[...] = xp.rint(-low / scale)
        q[...] = rounded(xp, x / scale, int(zero), 0, 255)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x,) = ins
        if not _flat(x, *outs):
            return None
        words = (native.address(x), native.address(outs[0]), x.size, native.address(outs[1]), native.address(outs[2]))
        return [native.NativeCall("quantize_range", words, (x, *outs))]

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 70))
        yield Sample.of(np.abs(f32(5)) + 1)
        yield Sample.of(np.zeros((2, 1), "float32"))


class QuantizedLookup(OpDef):
    """A function of 8-bit integers, by a table of its 256 values: Table[X], or Table[X + 256] for a negative X."""

    name = "quantized_lookup"
    inputs = ("X", "Table")
    pattern = "*, . -> *"

    @staticmethod
    def infer(x, table):
        _need_bytes("quantized_lookup", x, table)
        if table.shape != (256,):
            raise ProgramError(f"op quantized_lookup: Table must have 256 elements, got {table}")
        return x.with_dtype(table.dtype)

    @staticmethod
    def kernel(xp, x, table, *, out):
        out[...] = table[x.astype(xp.uint8)]

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, table), (out,) = ins, outs
        if not _flat(x, table, out):
            return None
        return [native.NativeCall("lookup", (*map(native.address, (x, table, out)), x.size), (x, table, out))]

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        table = eight_bits(256, seed=5)
        yield Sample.of(eight_bits(3, 70), table)
        yield Sample.of(eight_bits(4, signed=True), table.view("int8"))


class QuantizedSum(OpDef):
    """The sum of two quantized values, quantized: the nearest integer of (X - zero_x) * ratio_x + (Y - zero_y) * ratio_y, plus `zero`, from
    `lowest` to `highest`. The ratios are the scales of X and Y by that of the result."""

    name = "quantized_sum"
    inputs = ("X", "Y")
    attrs = {
        "zero_x": 0, "ratio_x": Required(float), "zero_y": 0, "ratio_y": Required(float), "zero": 0, "dtype": "uint8", "lowest": 0,
        "highest": 255,
    }  # fmt: skip
    pattern = "*, * -> *"

    @staticmethod
    def infer(x, y, *, dtype, **attrs):
        _need_bytes("quantized_sum", x, y)
        if not x.with_dtype(y.dtype).accepts(y) or dtype not in BYTES:
            raise ProgramError(f"op quantized_sum takes two values of one shape and dtype uint8 or int8, got {x}, {y} and {dtype!r}")
        return x.with_dtype(dtype)

    @staticmethod
    def kernel(xp, x, y, *, out, dtype, zero, lowest, highest, **attrs):
        parts = [
            (v.astype(xp.int32) - attrs[f"zero_{n}"]).astype(xp.float32) * xp.float32(attrs[f"ratio_{n}"]) for n, v in (("x", x), ("y", y))
        ]
        out[...] = rounded(xp, parts[0] + parts[1], zero, lowest, highest)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, y), (out,) = ins, outs
        if not _flat(x, y, out):
            return None
        each = (_signed(x), attrs["zero_x"], attrs["ratio_x"], _signed(y), attrs["zero_y"], attrs["ratio_y"])
        words = (*map(native.address, (x, y, out)), x.size, *each, attrs["zero"], attrs["lowest"], attrs["highest"])
        return [native.NativeCall("sum_bytes", words, (x, y, out))]

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(eight_bits(3, 70), eight_bits(3, 70, seed=1), ratio_x=0.5, ratio_y=0.3, zero_x=128, zero_y=7, zero=100)
        signed = eight_bits(5, signed=True, seed=2)
        yield Sample.of(signed, eight_bits(5, seed=3), ratio_x=2.0, ratio_y=0.25, zero_x=-9, zero=-1, dtype="int8", lowest=-1, highest=127)


class QuantizedMaxPool(OpDef):
    """The largest integer of each window of images [N, H, W, C] of 8-bit integers. Padding is never the largest."""

    name = "quantized_max_pool"
    inputs = ("X",)
    attrs = {"kernel": (1, 1), "strides": (1, 1), "paddings": (0, 0), "ceil_mode": False}
    pattern = "n . . c -> n . . c"

    @staticmethod
    def _windows(x, attrs):
        size, how = tuple(attrs["kernel"]), (attrs["strides"], attrs["paddings"])
        return place_windows("quantized_max_pool", x.shape[1:3], size, *how, (1, 1), "EXPLICIT", attrs["ceil_mode"])

    @classmethod
    def infer(cls, x, **attrs):
        _need_bytes("quantized_max_pool", x)
        if x.ndim != 4:
            raise ProgramError(f"op quantized_max_pool needs images, [N, H, W, C], got {x}")
        win = cls._windows(x, attrs)
        if any(win.pad[a] >= win.kernel[a // 2] for a in range(4)):
            raise ProgramError(f"op quantized_max_pool: paddings {list(win.pad)} must be smaller than the window {list(win.kernel)}")
        return TensorType(x.dtype, (x.shape[0], *win.out, x.shape[3]))

    @classmethod
    def kernel(cls, xp, x, *, out, **attrs):
        win = cls._windows(x, attrs)
        for i in range(win.out[0]):
            for j in range(win.out[1]):
                y, k = i * win.stride[0] - win.pad[0], j * win.stride[1] - win.pad[2]
                out[:, i, j] = x[:, max(y, 0) : y + win.kernel[0], max(k, 0) : k + win.kernel[1]].max((1, 2))

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False):
        (x,), (out,) = ins, outs
        if not _flat(x, out):
            return None
        win = cls._windows(x, attrs)
        sizes = (*x.shape, *win.kernel, *win.stride, win.pad[0], win.pad[2], *win.out)
        return [native.NativeCall("largest_bytes", (native.address(x), native.address(out), _signed(x), *sizes), (x, out))]

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(eight_bits(2, 5, 6, 3), kernel=(3, 2), strides=(2, 1), paddings=(1, 0))
        yield Sample.of(eight_bits(1, 4, 4, 70, signed=True), kernel=(3, 3), strides=(2, 2), paddings=(1, 1), ceil_mode=True)
