"""Quantized operators of ONNX Runtime's domain `com.microsoft`: operands are dequantized, and the result is quantized again. They train as
QuantizeLinear and DequantizeLinear do. Weights of a few bits in blocks stay as they are, and are not trained."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from ...ir import Variable
from ...ops.math.matmul_n_bits import block_size
from ..export_graph import Op
from ..node import Node
from ..normalize import MICROSOFT
from ..table import exports, imports

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
    """Operands A, B, scales, zero points, g_idx, bias."""
    if any(n.has(k) and isinstance(n.operands[k], Variable) for k in (1, 2, 3)):
        raise n.wrong("its weights must be part of the model, not computed")
    bits, size, depth, columns = (n.attr(name) for name in ("bits", "block_size", "K", "N"))
    bits = 4 if bits is None else bits
    if n.has(4):
        raise n.wrong("it has g_idx, an order of the rows of its weight, which fluidx does not read; quantize the model without it "
                      "(GPTQ: desc_act=False)")  # fmt: skip
    if n.attr("weight_prepacked", 0):
        raise n.wrong("its weight is packed for one kind of device (weight_prepacked); write the model without that")
    if bits not in (2, 4, 8):
        raise n.wrong(f"expected weights of 2, 4 or 8 bits, found {bits} bits")
    blocks = -(-depth // size)
    shapes = (columns, blocks, size * bits // 8), (columns, blocks), (columns, -(-blocks * bits // 8))
    packed = n.has(3) and n.type(3).dtype == "uint8"
    y, scale, zero = (_part(n, k, shape) for k, shape in zip((1, 2, 3), (*shapes[:2], shapes[2] if packed else shapes[1]), strict=True))
    out = n.b.matmul_n_bits(n.x(0), y, scale, zero, bits=bits)
    return n.apply("Add", out, n.operands[5]) if n.has(5) else out


def _part(n: Node, k: int, shape: tuple[int, ...]) -> Any:
    """Operand k, a part of the weight, in this shape: older files have scales and zero points with one axis."""
    if n.has(k) and prod(n.shape(k)) != prod(shape):
        name, what = ("B", "scales", "zero_points")[k - 1], {1: "blocks of bytes", 2: "scales", 3: "zero points"}[k]
        raise n.wrong(f"{name} must have {list(shape)} {what}, found shape {list(n.shape(k))}")
    return n.frozen(k, shape)


@exports("matmul_n_bits")
def export_matmul_n_bits(op: Op) -> str:
    """MatMulNBits for its sizes of blocks, or MatMul and the scales of columns."""
    y, bits = op.type_of("Y"), op.attrs["bits"]
    (columns, blocks, _), size, rows = y.shape, block_size(y, bits), op.type_of("X").shape[-1]
    parts = [op[slot] for slot in ("Y", "Scale", "ZeroPoint") if op.has(slot)]
    if size >= 16 and size & (size - 1) == 0:
        return op.emit("MatMulNBits", op["X"], *parts, domain=MICROSOFT, K=rows, N=columns, bits=bits, block_size=size)
    if bits != 8 or blocks != 1 or op.has("ZeroPoint") and op.dtype("ZeroPoint") != "uint8":
        raise op.wrong(f"ONNX has no product with a weight of {bits} bits in blocks of {size}")
    ints = [op.emit("Reshape", parts[0], op.ints([columns, size])), *(op.emit("Reshape", p, op.ints([columns, 1])) for p in parts[2:])]
    whole, *zero = (op.emit("Cast", v, to=op.code("float32")) for v in ints)
    whole = op.emit("Sub", whole, zero[0] if zero else op.const(np.array(128, np.float32)))
    if rows != size:  # the block is longer
        whole = op.emit("Slice", whole, op.ints([0]), op.ints([rows]), op.ints([1]))
    product = op.emit("MatMul", op["X"], op.emit("Transpose", whole, perm=[1, 0]))
    return op.emit("Mul", product, op.emit("Reshape", parts[1], op.ints([columns])))
