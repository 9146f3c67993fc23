"""Quantized operators of ONNX Runtime's domain `com.microsoft`: operands are dequantized, and the result is quantized again. They train as
QuantizeLinear and DequantizeLinear do. Weights of a few bits in blocks are dequantized once, and are not trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...ir import Variable
from ..node import Node
from ..normalize import MICROSOFT
from ..table import imports

microsoft = partial(imports, domain=MICROSOFT)


def dequantized(n: Node, x: int, scale: int, zero: int, **attrs: Any) -> Any:
    """Operand `x` as floats; `scale` and `zero` are the numbers of its scale and zero point."""
    return n.apply("DequantizeLinear", n.operands[x], n.operands[scale], n.operands[zero] if n.has(zero) else None, **attrs)


def _requantized(n: Node, y: Any, scale: int, zero: int, like: int = 0) -> Any:
    """y in integers: those of the zero point, or those of operand `like`."""
    point = n.operands[zero] if n.has(zero) else np.zeros((), n.dtype(like))
    return n.apply("QuantizeLinear", y, n.operands[scale], point, named=n.proto.output[0])


# -- operators of values --------------------------------------------------------------------------------------------------------------


@microsoft("QLinearAdd", "QLinearMul")
def of_two(n: Node) -> object:
    y = n.apply(n.op_type.removeprefix("QLinear"), dequantized(n, 0, 1, 2), dequantized(n, 3, 4, 5))
    return _requantized(n, y, 6, 7)


@microsoft("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearReduceMean")
def of_one(n: Node) -> object:
    kept = {name: n.attr(name) for name in ("alpha", "axis", "keepdims") if name in n.attributes}
    if n.op_type == "QLinearSoftmax" and n.attr("opset") < 13 and n.attr("axis", 1) % n.rank() != n.rank() - 1:
        raise n.wrong(f"a softmax over several axes, as up to opset 12, is not supported; axis must be {n.rank() - 1}")
    axes = [np.array(n.attr("axes"), np.int64)] if "axes" in n.attributes else []
    return _requantized(n, n.apply(n.op_type.removeprefix("QLinear"), dequantized(n, 0, 1, 2), *axes, **kept), 3, 4)


@microsoft("QLinearAveragePool", "QLinearGlobalAveragePool")
def pool(n: Node) -> object:
    kept = {name: n.attr(name) for name in n.attributes - {"channels_last"}}
    y = _channels_first(n, dequantized(n, 0, 1, 2), lambda x: n.apply(n.op_type.removeprefix("QLinear"), x, **kept))
    return _requantized(n, y, 3, 4)


@microsoft("NhwcMaxPool")
def nhwc_max_pool(n: Node) -> object:
    kept = {name: n.attr(name) for name in n.attributes}
    return _channels_first(n, n.operands[0], lambda x: n.apply("MaxPool", x, **kept), last=True)


@microsoft("QLinearConv")
def conv(n: Node) -> object:
    kept = {name: n.attr(name) for name in n.attributes - {"channels_last"}}
    return _channels_first(n, n.operands[0], lambda x: n.apply("QLinearConv", x, *n.operands[1:], **kept))


def _channels_first(n: Node, x: Any, write: Any, last: bool = False) -> Any:
    """What `write` gives for an image with the channels as axis 1, in the layout of the node."""
    if not (last or n.attr("channels_last", 0)):
        return write(x)
    rank = n.rank()
    y = write(n.apply("Transpose", x, perm=[0, rank - 1, *range(1, rank - 1)]))
    return n.apply("Transpose", y, named=n.proto.output[0], perm=[0, *range(2, rank), 1])


@microsoft("QLinearWhere")
def where(n: Node) -> object:
    return _requantized(n, n.apply("Where", n.operands[0], dequantized(n, 1, 2, 3), dequantized(n, 4, 5, 6)), 7, 8)


@microsoft("QLinearConcat")
def concat(n: Node) -> object:
    parts = [dequantized(n, k, k + 1, k + 2) for k in range(2, len(n.operands), 3)]
    return _requantized(n, n.apply("Concat", *parts, axis=n.attr("axis")), 0, 1)


# -- products ---------------------------------------------------------------------------------------------------------------------------


@microsoft("QGemm")
def gemm(n: Node) -> object:
    """The bias C is in units of the product of both scales."""
    turns = {name: n.attr(name, 0) for name in ("transA", "transB")}
    y = n.apply("Gemm", dequantized(n, 0, 1, 2), dequantized(n, 3, 4, 5, axis=1 - turns["transB"]), alpha=n.attr("alpha", 1.0), **turns)
    if n.has(6):
        unit = n.apply("Mul", n.apply("Mul", n.operands[1], n.operands[4]), np.array(n.attr("alpha", 1.0), np.float32))
        y = n.apply("Add", y, n.apply("Mul", n.apply("Cast", n.operands[6], to=1), unit))
    return _requantized(n, y, 7, 8) if n.has(7) else y


@microsoft("MatMulIntegerToFloat")
def matmul_integer_to_float(n: Node) -> object:
    """Operands A, B, scale of A, scale of B, zero point of A, zero point of B, bias."""
    return _product(n, *(n.operands[k] if n.has(k) else None for k in (0, 2, 4, 1, 3, 5, 6)))


@microsoft("DynamicQuantizeMatMul")
def dynamic_quantize_matmul(n: Node) -> object:
    """A is quantized to 8 bits over its range. Where the weights are trained, both are floats that are rounded, which gradients pass."""
    weight, bias = [n.operands[k] if n.has(k) else None for k in (1, 2, 3)], n.operands[4] if n.has(4) else None
    whole, scale, zero = n.apply("DynamicQuantizeLinear", n.operands[0], outputs=3)
    if n.importer.rounding is None:
        return _product(n, whole, scale, zero, *weight, bias)
    step, point = n.importer.variable(scale), n.cast(n.importer.variable(zero), "float32")
    rounded = n.b.fake_quantize(n.x(0), step, point, lowest=0.0, highest=255.0)
    y = n.apply("MatMul", rounded, _weight(n, *weight))
    return y if bias is None else n.apply("Add", y, bias)


def _weight(n: Node, b: Any, scale: Any, zero: Any) -> Any:
    """B as floats, with one scale or one for each column."""
    return n.apply("DequantizeLinear", b, scale, zero, axis=-1)


def _product(n: Node, *operands: Any) -> Any:
    """The product of integers A and B, in floats, plus a bias. A and B each come with scale and zero point. The sums are exact."""
    a, a_scale, a_zero, b, b_scale, b_zero, bias = operands
    sums = n.apply("Cast", n.apply("MatMulInteger", a, b, a_zero, b_zero), to=1)
    y = n.apply("Mul", sums, n.apply("Mul", a_scale, b_scale))
    return y if bias is None else n.apply("Add", y, bias)


# -- weights of a few bits -------------------------------------------------------------------------------------------------------------


@microsoft("MatMulNBits")
def matmul_n_bits(n: Node) -> object:
    y = n.apply("MatMul", n.operands[0], _from_blocks(n))
    return n.apply("Add", y, n.operands[5]) if n.has(5) else y


def _from_blocks(n: Node) -> np.ndarray:
    """The weights [K, N] that operands 1 to 3 hold: for each of N columns blocks of K with a scale and a zero point each."""
    if any(n.has(k) and isinstance(n.operands[k], Variable) for k in (1, 2, 3)):
        raise n.wrong("its weights must be part of the model, not computed")
    bits, size, depth, columns = (n.attr(name) for name in ("bits", "block_size", "K", "N"))
    bits = 4 if bits is None else bits
    if n.has(4) or n.attr("weight_prepacked", 0) or bits not in (2, 4, 8):
        raise n.wrong(f"expected 2, 4 or 8 bits without g_idx and weight_prepacked, found {bits} bits")
    blocks = -(-depth // size)
    held = n.value(1)
    if held.size != columns * blocks * size * bits // 8:
        raise n.wrong(f"B must have {columns} x {blocks} blocks of {size * bits // 8} bytes, found shape {list(held.shape)}")
    scales = n.value(2)
    found = _unpacked(held.reshape(columns, -1), bits).reshape(columns, blocks, size).astype(scales.dtype)
    found -= _zero_points(n, bits, columns, blocks).astype(scales.dtype)
    found *= scales.reshape(columns, blocks, 1)
    return np.ascontiguousarray(found.reshape(columns, -1)[:, :depth].T)


def _zero_points(n: Node, bits: int, columns: int, blocks: int) -> np.ndarray:
    """[columns, blocks or 1, 1]"""
    zero = n.value(3)
    if zero is None:
        return np.full((1, 1, 1), 1 << (bits - 1), np.uint8)
    if zero.dtype == np.uint8:
        zero = _unpacked(zero.reshape(columns, -1), bits)[:, :blocks]
    return zero.reshape(columns, blocks, 1)


def _unpacked(held: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits out of bytes along the last axis, those of the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((held[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*held.shape[:-1], -1).astype(np.uint8)
