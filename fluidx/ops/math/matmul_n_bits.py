"""The product with a frozen weight of 2, 4 or 8 bits, and its gradient. The weight is never converted as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ... import native
from ...ir import Arithmetic, Native, OpDef, ProgramError, Sample, TensorType
from ...ir.types import ANY
from ..shared.samples import f32, ints, positive
from ..shared.types import meet

_STRIP = 1 << 20  # elements of the weight that are converted at a time
_ZEROS = {"": 0, "uint8": 1, "float32": 2}  # kinds of zero points, by their dtype: the numbers of n_bits.h


def block_size(y: Any, bits: int) -> int:
    """The elements of a block of a weight Y [columns, blocks, bytes of a block]."""
    return y.shape[2] * 8 // bits


def unpacked(xp: Any, held: Any, bits: int) -> Any:
    """Integers of a few bits out of bytes along the last axis, those of the lowest bits first, as uint8.

    >>> unpacked(np, np.array([0x9A], "uint8"), 4).tolist()
    [10, 9]
    """
    if bits == 8:
        return held
    shifts = xp.arange(0, 8, bits, dtype="uint8")
    return ((held[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*held.shape[:-1], -1)


def dequantized(xp: Any, y: Any, scale: Any, zero: Any, bits: int) -> Any:
    """The transpose of a weight as float32, [columns, blocks * block size]: (Y - ZeroPoint) * Scale."""
    columns, blocks, _ = y.shape
    if zero is None:
        zero = np.float32(1 << (bits - 1))
    elif zero.dtype == np.uint8:
        zero = unpacked(xp, zero, bits)[:, :blocks, None].astype("float32")
    else:
        zero = zero[..., None].astype("float32")
    w = unpacked(xp, y, bits).astype("float32")
    w -= zero
    w *= scale.astype("float32")[..., None]
    return w.reshape(columns, -1)


def _strips(xp: Any, y: Any, scale: Any, zero: Any, bits: int, rows: int) -> Iterator[tuple[slice, Any]]:
    """Parts of the transpose of a weight with `rows` rows, some columns at a time."""
    step = max(1, _STRIP // max(1, rows))
    for k in range(0, y.shape[0], step):
        part = slice(k, k + step)
        yield part, dequantized(xp, y[part], scale[part], None if zero is None else zero[part], bits)[:, :rows]


def _check(op: str, y: TensorType, scale: TensorType, zero: TensorType | None, bits: int, rows: int, columns: int) -> None:
    """Raise ProgramError if the operands are no weight of `rows` rows and `columns` columns."""
    if bits not in (2, 4, 8):
        raise ProgramError(f"op {op}: bits must be 2, 4 or 8, got {bits}")
    if y.dtype != "uint8" or y.ndim != 3:
        raise ProgramError(f"op {op}: Y must be uint8 [columns, blocks, bytes of a block], got {y}")
    size, blocks = block_size(y, bits), y.shape[1]
    if not meet(columns, y.shape[0]) or rows != ANY and not (blocks - 1) * size < max(rows, 1) <= max(blocks * size, 1):
        want = f"{y.shape[0]} columns and {blocks} blocks of {size} rows"
        raise ProgramError(f"op {op}: Y {y} has {want}, and the product needs a weight of {rows} rows and {columns} columns")
    if not scale.is_float or not _fits(scale, y.shape[:2]):
        raise ProgramError(f"op {op}: Scale must be floats {list(y.shape[:2])}, one for each block of Y, got {scale}")
    if zero is None:
        return
    shape = (y.shape[0], -(-blocks * bits // 8)) if zero.dtype == "uint8" else y.shape[:2]
    if zero.dtype not in ("uint8", "float32", "float16") or not _fits(zero, shape):
        raise ProgramError(f"op {op}: ZeroPoint must be uint8 {list(shape)} or floats {list(y.shape[:2])}, got {zero}")


def _fits(t: TensorType, shape: tuple[int, ...]) -> bool:
    return t.ndim == len(shape) and all(map(meet, t.shape, shape))


def _words(y: TensorType, zero: TensorType | None, bits: int, rows: int) -> tuple[str, str, str, dict[str, int]]:
    """The words for the rows of a weight in X, for Y, Scale and ZeroPoint, the exceptions, and sizes of factors. Ranks may share columns,
    and rows where these are whole blocks."""
    blocks, size = y.shape[1], block_size(y, bits)
    if blocks == 1 and bits == 8 and rows == size:  # a scale for each column
        return "k", "m . k, m ., m .", "k:+", {}
    if rows == blocks * size and (bits == 8 or zero is None or zero.dtype != "uint8"):
        return "(k t)", "m k s, m k, m k", "k:+ t:+ s:+ t! s!", {"k": blocks, "t": size}
    return "k", "m b s, m b, m z", "k:+ b:+ s:+ z:+ k! b! s! z!", {}


class _NBits(OpDef):
    """Base of both ops: the C call, which takes the operand, Y, Scale and ZeroPoint."""

    arithmetic = Arithmetic(flops=lambda ins, outs, attrs: 2 * prod(ins[0].shape) * outs[0].shape[-1], sums_products="matrix")

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False):
        x, y, scale, zero = ins[:4]
        (out,), bits = outs, attrs["bits"]
        kind = _ZEROS.get("" if zero is None else zero.dtype.name)
        arrays = [a for a in (x, y, scale, zero, out) if a is not None]
        if kind is None or {x.dtype.name, scale.dtype.name} != {"float32"} or not native.has_products():
            return None
        if not all(a.flags.c_contiguous for a in arrays):
            return None
        if dry or not out.size:
            return []
        turned = cls.name.endswith("_grad")
        rows = out.shape[-1] if turned else x.shape[-1]
        at = [0 if a is None else native.address(a) for a in (x, y, scale, zero, out)]
        step = 0 if zero is None else zero.shape[1]
        words = (int(turned), prod(x.shape[:-1]), y.shape[0], rows, bits, block_size(y, bits), y.shape[1], kind, step, *at)
        return [native.NativeCall("matmul_n_bits_f32", words, tuple(arrays))]

    native = Native(calls=_calls, any_size=True)


class MatMulNBits(_NBits):
    """The product of the rows of X with a weight W [k, m] of `bits` bits, in blocks along k that have a scale and a zero point each.

    Y [m, blocks, bytes of a block] holds the columns of W, uint8, the lowest bits first: W = (Y - ZeroPoint) * Scale. Scale and ZeroPoint
    are [m, blocks]; a ZeroPoint of uint8 is packed as Y is; without one it is 2^(bits - 1). A block may be a whole column, and the last
    block may be longer than what is left of k. Only X has a gradient. Source: ONNX Runtime `com.microsoft.MatMulNBits`.
    """

    name = "matmul_n_bits"
    inputs = ("X", "Y", "Scale", "ZeroPoint?")
    attrs = {"bits": 8}

    @staticmethod
    def infer(x, y, scale, zero, *, bits):
        if not x.is_float or not x.ndim:
            raise ProgramError(f"op matmul_n_bits: X must be floats with one or more axes, got {x}")
        _check("matmul_n_bits", y, scale, zero, bits, x.shape[-1], ANY)
        return TensorType(x.dtype, (*x.shape[:-1], y.shape[0]))

    @staticmethod
    def pattern(ins, outs, attrs):
        x, y, _, zero = ins
        k, weight, exceptions, sizes = _words(y, zero, attrs["bits"], x.shape[-1])
        return f"* {k}, {weight} -> * m | {exceptions} L(0)", sizes

    @staticmethod
    def grad(b, op, g):
        return b.matmul_n_bits_grad(g, op["Y"], op["Scale"], op["ZeroPoint"], op["X"], **op.attrs), None, None, None

    @staticmethod
    def kernel(xp, x, y, scale, zero, *, out, bits):
        for part, w in _strips(xp, y, scale, zero, bits, x.shape[-1]):
            out[..., part] = xp.matmul(x, w.T.astype(x.dtype, copy=False))

    @staticmethod
    def samples():
        for rows, k, weight, bits in _weights():
            yield Sample.of(f32(*rows, k), *weight, bits=bits, grad=("X",), why="the weight is frozen")


class MatMulNBitsGrad(_NBits):
    """Gradient of matmul_n_bits with respect to X, in X's shape: the product with the transpose of the weight."""

    name = "matmul_n_bits_grad"
    inputs, outputs = ("Out@GRAD", "Y", "Scale", "ZeroPoint?", "X"), ("X@GRAD",)
    attrs = {"bits": 8}

    @staticmethod
    def infer(g, y, scale, zero, x, *, bits):
        if not g.ndim or not x.ndim:
            raise ProgramError(f"op matmul_n_bits_grad: Out@GRAD and X must have rows, got {g} and {x}")
        _check("matmul_n_bits_grad", y, scale, zero, bits, x.shape[-1], g.shape[-1])
        return x

    @staticmethod
    def pattern(ins, outs, attrs):
        g, y, _, zero, x = ins
        k, weight, exceptions, sizes = _words(y, zero, attrs["bits"], x.shape[-1])
        return f"* m, {weight}, ~* {k} -> * {k} | m:+ {exceptions} L(0)", sizes

    @staticmethod
    def grad(b, op, g):
        return b.matmul_n_bits(g, op["Y"], op["Scale"], op["ZeroPoint"], **op.attrs), None, None, None, None

    @staticmethod
    def kernel(xp, g, y, scale, zero, x, *, out, bits):
        out[...] = 0
        for part, w in _strips(xp, y, scale, zero, bits, out.shape[-1]):
            out += xp.matmul(g[..., part], w.astype(g.dtype, copy=False))

    @staticmethod
    def samples():
        for rows, k, weight, bits in _weights():
            yield Sample.of(f32(*rows, weight[0].shape[0]), *weight, f32(*rows, k), bits=bits, grad=(), why="a gradient itself")


def _weights() -> Iterator[tuple[tuple[int, ...], int, tuple[Any, ...], int]]:
    """For samples: the sizes of X but the last, k, a weight with scales and zero points, and its bits."""

    def weight(m: int, blocks: int, size: int, bits: int, zero: str = "") -> tuple[Any, ...]:
        y = ints(m, blocks, size * bits // 8, high=256, seed=1).astype("uint8")
        packed = ints(m, -(-blocks * bits // 8), high=256, seed=3).astype("uint8")
        return y, positive(m, blocks, seed=2) / (1 << bits), {"": None, "packed": packed, "floats": f32(m, blocks, seed=3)}[zero]

    yield (3,), 4, weight(6, 1, 4, 8), 8
    yield (2, 3), 8, weight(4, 2, 4, 8, "packed"), 8
    yield (3,), 8, weight(4, 2, 4, 4, "packed"), 4
    yield (2,), 16, weight(2, 4, 4, 4, "floats"), 4
    yield (3,), 7, weight(4, 2, 4, 2), 2
    yield (2,), 6, weight(4, 1, 8, 8), 8
    yield (3,), 10, weight(4, 3, 4, 4, "packed"), 4  # a byte and a half of zero points
