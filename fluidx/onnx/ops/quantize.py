"""Quantized values (integers or short floats with zero point and scale) and products of them.

A program for inference has operators of 8-bit integers. In one that trains, and where zero points or scales are computed, products are
those of floats that hold every sum exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, TINY, np_dtype
from ...ops.quantized.packing import as_int8, packed
from ...ops.quantized.products import BYTES, packed_filter
from ..export_graph import Op
from ..expression_nodes import by_expression
from ..fake_quantization import DTYPES
from ..limits import checked_shape
from ..node import Node
from ..table import exports, imports, on_numpy
from ..values import numpy_dtype
from ..window_geometry import windows
from .cast import converted, dtype_of
from .conv import convolved
from .product import multiplied

_EXACT = 1 << 24  # float32 holds all integers up to here
_LARGEST = 255  # the largest magnitude of an 8-bit number minus its zero point


@imports("QuantizeLinear")
def quantize_linear(n: Node) -> object:
    to, work = _target(n), _precision(n)
    if to.name in TINY:
        return quantize_on_host(n)
    if n.dtype(0) == work == "float32" and to.name in BYTES and (steps := _steps(n)):
        return n.b.quantize_linear(n.x(0), **steps, dtype=to.name)
    real = n.b.elementwise_div(n.cast(n.x(0), work), _aligned_operand(n, 1, work))
    return _saturated(n, real, _aligned_operand(n, 2, "float32") if n.has(2) else None, to)


@on_numpy("QuantizeLinear")
def quantize_on_host(n: Node) -> object:
    work = np_dtype(_precision(n))
    to, real = _target(n), n.value(0).astype(work) / _aligned_array(n, n.value(1)).astype(work)
    zero = _aligned_array(n, n.value(2)).astype(np.float64) if n.has(2) else 0.0
    return _rounded(real.astype(np.float64), zero, to, bool(n.attr("saturate", 1)))


def _steps(n: Node) -> dict[str, Any]:
    """The scale and the zero point of a value, as attributes; {} if they are computed or several, or in a program that trains."""
    if not n.importer.integers or not _is_known(n, (1, 2)) or n.value(1).size != 1:
        return {}
    return {"scale": float(n.value(1).reshape(())), "zero": int(n.value(2).reshape(())) if n.has(2) else 0}


@imports("DequantizeLinear")
def dequantize_linear(n: Node) -> object:
    if _is_known(n, (0, 1, 2)):  # weights are dequantized once, not in each run
        return dequantize_on_host(n)
    to = _output(n)
    if n.dtype(0) in BYTES and to == "float32" and (steps := _steps(n)):
        return n.b.dequantize_linear(n.x(0), **steps)
    x = n.b.cast(n.x(0), dtype="float32")
    x = n.b.elementwise_sub(x, _aligned_operand(n, 2, "float32")) if n.has(2) else x
    return n.b.elementwise_mul(n.cast(x, to), _aligned_operand(n, 1, to))


@on_numpy("DequantizeLinear")
def dequantize_on_host(n: Node) -> object:
    to, zero = np_dtype(_output(n)), _aligned_array(n, n.value(2)).astype(np.float64) if n.has(2) else 0.0
    return (n.value(0).astype(np.float64) - zero).astype(to) * _aligned_array(n, n.value(1)).astype(to)


def _target(n: Node) -> np.dtype:
    """The dtype of QuantizeLinear's result: that of its zero point, that of its attribute, or uint8."""
    if n.has(2):
        return dtype_of(n, 2)
    return numpy_dtype(n.attr("output_dtype", 0)) if n.attr("output_dtype", 0) else np.dtype(np.uint8)


def _precision(n: Node) -> str:
    """The dtype in which QuantizeLinear divides."""
    found = numpy_dtype(n.attr("precision", 0)) if n.attr("precision", 0) else dtype_of(n, 1)
    return found.name if found.name in FLOATS else "float32"


def _output(n: Node) -> str:
    """The dtype of DequantizeLinear's result."""
    found = numpy_dtype(n.attr("output_dtype", 0)) if n.attr("output_dtype", 0) else dtype_of(n, 1)
    return found.name if found.name in FLOATS else "float32"


@exports("fake_quantize")
def fake_quantize(op: Op) -> str:
    scale, zero, dtype = op.known("SCALE"), op.known("ZERO"), DTYPES.get((op.attrs["lowest"], op.attrs["highest"]))
    ndim = op.type_of("X").ndim
    axes = [k - scale.ndim + ndim for k, d in enumerate(scale.shape) if d != 1] if scale is not None else []
    if scale is None or zero is None or dtype is None or len(axes) > 1 or op.dtype("X") != "float32" or zero.size not in (1, scale.size):
        return by_expression(op)
    if dtype.itemsize == 2 and op.opset < 21:
        return by_expression(op)
    shape = (scale.size,) if axes else ()
    points = np.broadcast_to(zero.reshape(-1), shape).astype(dtype) if axes else zero.reshape(()).astype(dtype)
    operands = op.const(scale.reshape(shape)), op.const(points)
    axis = {"axis": axes[0]} if axes else {}
    real = op.op.inputs["X"][0]
    whole = op.graph.stored_as(real, "fake_quantize", dtype, lambda x: _rounded((x / scale).astype(np.float64), zero, dtype))
    if not whole and dtype == np.int32:  # QuantizeLinear makes 8 and 16 bits only
        return by_expression(op)
    return op.emit("DequantizeLinear", whole or op.emit("QuantizeLinear", op["X"], *operands, **axis), *operands, **axis)


# -- rounding -------------------------------------------------------------------------------------------------------------------------


def _saturated(n: Node, real: Variable, zero: Variable | None, to: np.dtype) -> Variable:
    """The nearest integers, ties to even, plus the zero point, clipped to the range of a dtype."""
    whole = n.cast(n.b.round(real, ties_to_even=True), "float32")
    whole = whole if zero is None else n.b.elementwise_add(whole, zero)
    info = np.iinfo(to)
    return n.b.cast(n.b.clip(whole, min=float(info.min), max=float(info.max)), dtype=to.name)


def _rounded(real: np.ndarray, zero: Any, to: np.dtype, saturate: bool = True) -> np.ndarray:
    """`_saturated` on the host, for any dtype."""
    import ml_dtypes

    if not (to.kind in "iu" or to.name.lstrip("u").startswith("int")):
        return converted((real + zero).astype(np.float32), to, saturate)
    info = ml_dtypes.iinfo(to)
    return converted(np.clip(np.rint(real) + zero, int(info.min), int(info.max)).astype(np.int64), to)


# -- scales and zero points in shapes that broadcast ------------------------------------------------------------------------------


def _aligned_operand(n: Node, k: int, dtype: str) -> Variable:
    """Scale or zero point k in a shape that broadcasts to operand 0."""
    v = n.operands[k]
    if not isinstance(v, Variable):
        return n.const(_aligned_array(n, n.value(k)), np_dtype(dtype))
    sizes = _broadcast_shape(n, v.shape)
    if sizes is not None:
        return n.cast(n.b.reshape(v, shape=sizes), dtype)
    axis, block = _axis(n), n.attr("block_size", 0)
    times = tuple(block if a == axis + 1 else 1 for a in range(v.ndim + 1))
    repeated = n.b.expand(n.b.unsqueeze(v, axes=(axis + 1,)), expand_times=times)
    flat = n.b.reshape(repeated, shape=(*v.shape[:axis], v.shape[axis] * block, *v.shape[axis + 1 :]))
    return n.cast(n.b.slice(flat, axes=(axis,), starts=(0,), ends=(n.shape(0)[axis],)), dtype)


def _aligned_array(n: Node, v: np.ndarray) -> np.ndarray:
    """A known scale or zero point in such a shape."""
    sizes, axis = _broadcast_shape(n, v.shape), _axis(n)
    if sizes is not None:
        return v.reshape(sizes)
    checked_shape([v.size, n.attr("block_size", 0)])
    return np.repeat(v, n.attr("block_size", 0), axis).take(range(n.shape(0)[axis]), axis)


def _broadcast_shape(n: Node, own: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape in which a scale of shape `own` broadcasts to operand 0; None if each element belongs to a block."""
    if len(own) <= 1 and prod(own) == 1:
        return ()
    if len(own) == 1:
        return tuple(own[0] if k == _axis(n) else 1 for k in range(n.rank()))
    return None if n.attr("block_size", 0) else own


def _axis(n: Node) -> int:
    return n.attr("axis", 1) % max(n.rank(), 1)


def _is_known(n: Node, at: Sequence[int]) -> bool:
    return not any(isinstance(n.operands[k], Variable) for k in at if n.has(k))


# -- products ---------------------------------------------------------------------------------------------------------------------------


@imports("DynamicQuantizeLinear")
def dynamic_quantize_linear(n: Node) -> object:
    return tuple(n.b.dynamic_quantize_linear(n.x(0))) if n.importer.integers and n.dtype(0) == "float32" else n.by_body()


@imports("MatMulInteger")
def matmul_integer(n: Node) -> object:
    if n.rank(1) == 2 and n.rank(0) > 1 and _is_quantized(n) and (not n.has(3) or prod(n.shape(3)) in (1, n.shape(1)[1])):
        w, less = as_int8(n.value(1), _weight_zero(n, _by_column(n, 3)), 1)
        zero, attrs = _zero(n, 2)
        made = n.const(packed(np.ascontiguousarray(w.T)[None])), *[None] * 4, zero, None, None if less is None else n.const(less)
        return n.b.quantized_matmul(n.x(0), *made, outputs=w.shape[1], **attrs)
    return n.b.cast(_product(n, (0, 2), (1, 3)), dtype="int32")


def _is_quantized(n: Node) -> bool:
    """Are operands 0 and 1 integers of 8 bits and operand 1 known, in a program for inference alone?"""
    alike = n.importer.integers and _is_known(n, (1, 3)) and n.dtype(0) in BYTES and n.dtype(1) in BYTES
    return alike and n.value(1).size > 0 and (not n.has(2) or prod(n.shape(2)) == 1)


def _weight_zero(n: Node, shape: Sequence[int]) -> np.ndarray:
    return n.value(3).reshape(tuple(shape)) if n.has(3) else np.zeros((), np.int32)


def _zero(n: Node, k: int) -> tuple[Variable | None, dict[str, Any]]:
    """The zero point of the rows of a product, operand k: a variable, or an attribute."""
    if isinstance(n.operands[k] if n.has(k) else None, Variable):
        return n.x(k), {}
    return None, {"zero": int(n.value(k).reshape(()))} if n.has(k) else {}


def _in_floats(n: Node, at: int, **attrs: Any) -> object:
    """A QLinear product with known scales as a product of dequantized values, which a session joins again."""
    weights = _is_known(n, range(1, 9)) and n.importer.rounding is not None and n.importer.integers
    if not weights or n.dtype(0) not in BYTES or prod(n.shape(1)) != 1 or prod(n.shape(6)) != 1:
        return None
    named = [n.apply("DequantizeLinear", *n.operands[k : k + 3], named=f"{n.proto.output[0]}/{k}", axis=at) for k in (0, 3)]
    if n.has(8):
        scale = np.asarray(n.value(1) * n.value(4), np.float32).reshape(-1)
        scale = np.broadcast_to(scale, n.shape(8)) if scale.size == 1 else scale
        named.append(n.apply("DequantizeLinear", n.operands[8], scale, None, named=f"{n.proto.output[0]}/8", axis=0))
    y = n.apply(n.op_type.removeprefix("QLinear"), *named, **attrs)
    return n.apply("QuantizeLinear", y, n.operands[6], n.operands[7], named=n.proto.output[0])


@imports("QLinearMatMul")
def q_linear_matmul(n: Node) -> object:
    if n.rank(0) > 1 and n.rank(3) == 2 and (found := _in_floats(n, 1)) is not None:
        return found
    product = n.cast(_product(n, (0, 2), (3, 5)), "float32")
    rows, columns = _aligned(n, 1, _by_row(n, 1), "float32"), _aligned(n, 4, _by_column(n, 4), "float32")
    return _requantized(n, product, n.b.elementwise_mul(rows, columns))


@on_numpy("QLinearMatMul")
def q_linear_matmul_on_host(n: Node) -> object:
    a, b = _dequantized(n, 0, _by_row), _dequantized(n, 3, _by_column)
    return _rounded(a @ b / n.value(6).astype(np.float64).reshape(()), n.value(7).astype(np.float64).reshape(()), dtype_of(n, 7))


def _dequantized(n: Node, k: int, shape: Callable[[Node, int], tuple[int, ...]]) -> np.ndarray:
    """Operand k dequantized; its scale and zero point are the next operands."""
    scale, zero = (n.value(j).astype(np.float64).reshape(shape(n, j)) for j in (k + 1, k + 2))
    return (n.value(k).astype(np.float64) - zero) * scale


@imports("ConvInteger")
def conv_integer(n: Node) -> object:
    if n.rank(1) == 4 and _is_quantized(n):
        return _quantized_conv(n, *as_int8(n.value(1), _weight_zero(n, (-1, 1, 1, 1)), 0))
    return n.b.cast(_convolution(n, (0, 2), (1, 3)), dtype="int32")


def _quantized_conv(n: Node, weight: np.ndarray, less: np.ndarray | None) -> Variable:
    """The sums of a convolution of integers, which reads and writes images with channels last."""
    b, at, groups, (zero, attrs) = n.b, windows(n, weight.shape[2:]), n.attr("group", 1), _zero(n, 2)
    x = b.assign(b.transpose(n.x(0), axis=(0, 2, 3, 1)))
    how = {
        "kernel": weight.shape[2:], "strides": tuple(a.stride for a in at), "dilations": tuple(a.dilation for a in at),
        "paddings": tuple(d for a in at for d in (a.before, a.after)),
    }  # fmt: skip
    made = n.const(packed_filter(weight, groups)), *[None] * 4, zero, None, None if less is None else n.const(less)
    y = b.quantized_conv(x, *made, outputs=weight.shape[0], groups=groups, **how, **attrs)
    return b.assign(b.transpose(y, axis=(0, 3, 1, 2)))


@imports("QLinearConv")
def q_linear_conv(n: Node) -> object:
    if n.rank(0) == 4 and (found := _in_floats(n, 0, **{name: n.attr(name) for name in n.attributes})) is not None:
        return found
    y = n.cast(_convolution(n, (0, 2), (3, 5)), "float32")
    along = (-1, *[1] * (n.rank() - 2))
    if n.has(8):
        y = n.b.elementwise_add(y, _aligned(n, 8, along, "float32"))
    scales = _aligned(n, 1, (), "float32"), _aligned(n, 4, along if prod(n.shape(4)) > 1 else (), "float32")
    return _requantized(n, y, n.b.elementwise_mul(*scales))


def _requantized(n: Node, sums: Variable, scale: Variable) -> Variable:
    """Sums of products, in units of `scale`, quantized with scale and zero point of operands 6 and 7."""
    real = n.b.elementwise_mul(sums, n.b.elementwise_div(scale, _aligned(n, 6, (), "float32")))
    return _saturated(n, real, _aligned(n, 7, (), "float32"), dtype_of(n, 7))


def _product(n: Node, a: tuple[int, int], b: tuple[int, int]) -> Variable:
    """The matrix product of two operands minus their zero points. `a` and `b` are the numbers of (operand, zero point)."""
    rows, columns = _by_row(n, a[1]), _by_column(n, b[1])
    sums = _largest_sum(n, a, rows, -1), _largest_sum(n, b, columns, -min(n.rank(b[0]), 2)), n.shape(a[0])[-1] * _LARGEST
    dtype = _exact_float(min(s for s in sums if s is not None))
    return multiplied(n, _minus_zero_point(n, a, rows, dtype), _minus_zero_point(n, b, columns, dtype))


def _convolution(n: Node, x: tuple[int, int], w: tuple[int, int]) -> Variable:
    """The convolution of an image with filters, both minus their zero points."""
    kernel = n.shape(w[0])
    by_filter = (-1, *[1] * (len(kernel) - 1)) if n.has(w[1]) and prod(n.shape(w[1])) > 1 else ()
    known = _largest_sum(n, w, by_filter, tuple(range(1, len(kernel))))
    dtype = _exact_float(prod(kernel[1:]) * _LARGEST if known is None else known)
    at = windows(n, kernel[2:])
    return convolved(n.b, _minus_zero_point(n, x, (), dtype), _minus_zero_point(n, w, by_filter, dtype), at, n.attr("group", 1))


def _exact_float(factors: int) -> str:
    """The float dtype that holds sums of 8-bit numbers times factors, if the magnitudes of the factors add up to `factors`."""
    return "float32" if factors * _LARGEST <= _EXACT else "float64"


def _largest_sum(n: Node, at: tuple[int, int], zero_shape: Sequence[int], axes: int | tuple[int, ...]) -> int | None:
    """The largest sum of magnitudes along axes of a known operand."""
    if not _is_known(n, at):
        return None
    return int(np.abs(_known_minus_zero_point(n, at, zero_shape)).sum(axes).max(initial=0))


def _minus_zero_point(n: Node, at: tuple[int, int], zero_shape: Sequence[int], dtype: str) -> Variable:
    """An operand minus its zero point."""
    x, zero = at
    if _is_known(n, at):
        return n.const(_known_minus_zero_point(n, at, zero_shape), np_dtype(dtype))
    y = n.b.cast(n.x(x), dtype=dtype)
    return n.b.elementwise_sub(y, _aligned(n, zero, zero_shape, dtype)) if n.has(zero) else y


def _known_minus_zero_point(n: Node, at: tuple[int, int], zero_shape: Sequence[int]) -> np.ndarray:
    x, zero = n.value(at[0]), n.value(at[1])
    return x.astype(np.int64) - (0 if zero is None else zero.astype(np.int64).reshape(zero_shape))


def _aligned(n: Node, k: int, shape: Sequence[int], dtype: str) -> Variable:
    """Operand k, a scale or zero point, in another shape and dtype."""
    if not isinstance(n.operands[k], Variable):
        return n.const(n.value(k).reshape(tuple(shape)), np_dtype(dtype))
    return n.cast(n.b.reshape(n.x(k), shape=tuple(shape)), dtype)


def _by_row(n: Node, k: int) -> tuple[int, ...]:
    """The shape in which zero point or scale k broadcasts to the rows of a matrix."""
    own = n.shape(k) if n.has(k) else ()
    return () if prod(own) == 1 else (*own, 1) if len(own) == 1 else own


def _by_column(n: Node, k: int) -> tuple[int, ...]:
    own = n.shape(k) if n.has(k) else ()
    return () if prod(own) == 1 else own
