"""Changes of type: Cast, CastLike and BitCast, to and from all that ONNX has."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import Variable
from ...ir.dtypes import SHORT, np_dtype
from ..node import Node
from ..values import numpy_dtype
from . import face, host

_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}  # ml_dtypes keeps each in a byte of its own


@face("Cast", "CastLike")
def cast(n: Node) -> object:
    to = _wanted(n)
    if to.name not in SHORT or isinstance(n.operands[0], np.ndarray):  # known, and CastLike reads no more of Y than its type
        return cast_on_host(n)
    return n.x() if dtype_of(n, 0) == to else n.b.cast(n.x(), dtype=to.name)


@host("Cast", "CastLike")
def cast_on_host(n: Node) -> object:
    return converted(n.value(0), _wanted(n), bool(n.attr("saturate", 1)), n.attr("round_mode", "up"))


def _wanted(n: Node) -> np.dtype:
    return numpy_dtype(n.attr("to")) if n.op_type == "Cast" else dtype_of(n, 1)


def dtype_of(n: Node, k: int) -> np.dtype:
    """The NumPy dtype of an operand, also of one that a program cannot hold."""
    v = n.operands[k]
    return np_dtype(v.desc.type.dtype) if isinstance(v, Variable) else n.importer.array(v).dtype


# -- on the host -------------------------------------------------------------------------------------------------------------------


def converted(x: np.ndarray, to: np.dtype, saturate: bool = True, round_mode: str = "up") -> np.ndarray:
    """An array in another type, by the tables of Cast; strings are arrays of objects."""
    if x.dtype == to:
        return x
    if to.kind == "O":
        return _written(x)
    if x.dtype.kind == "O":
        return converted(_parsed(x, to), to, saturate, round_mode)
    if x.dtype.kind == "V" and to.kind != "f":
        x = x.astype(np.float32)  # holds all that the short types hold, which have no way from each to each
    if to.name == "float8_e8m0fnu":
        return _powers_of_two(x, to, saturate, round_mode)
    if to.name.startswith("float8") and saturate:
        import ml_dtypes

        info = ml_dtypes.finfo(to)
        x = np.clip(x, float(info.min), float(info.max))
    elif to.name in _BITS and x.dtype.kind in "iub":
        x = x.astype(np.int64)  # the bits above are dropped below
        return from_bits((x & ((1 << _BITS[to.name]) - 1)).astype(np.uint8), to) if to.name != "float4_e2m1fn" else x.astype(to)
    return x.astype(to)


def _powers_of_two(x: np.ndarray, to: np.dtype, saturate: bool, round_mode: str) -> np.ndarray:
    """E8M0: the byte k stands for 2 to the power of k - 127, and 255 for NaN. It has no sign and no zero."""
    size = np.abs(x.astype(np.float64))
    fraction, exponent = np.frexp(size)  # size = fraction * 2**exponent, fraction in [0.5, 1)
    up = {"up": fraction > 0.5, "down": np.zeros(x.shape, bool), "nearest": fraction >= 0.75}[round_mode]
    code = exponent.astype(np.int64) + 126 + up
    code = np.where(size == 0, -1, np.where(np.isinf(size), 255, code))
    code = np.clip(code, 0, 254) if saturate else np.where((code < 0) | (code > 254), 255, code)
    return np.where(np.isnan(size), 255, code).astype(np.uint8).view(to)


def _written(x: np.ndarray) -> np.ndarray:
    """Numbers as text."""
    if x.dtype.kind in "biu":
        texts = [str(int(v)) for v in x.ravel()]
    else:
        special = {"nan": "NaN", "inf": "INF", "-inf": "-INF"}
        texts = [special.get(t, t) for t in map(str, x.ravel())]
    out = np.empty(len(texts), object)
    out[:] = texts
    return out.reshape(x.shape)


def _parsed(x: np.ndarray, to: np.dtype) -> np.ndarray:
    """Text as numbers: whole ones where whole ones are wanted and written."""
    whole = to.kind in "iu" or to.name in ("int4", "uint4", "int2", "uint2")
    values: list[Any] = [_number(t, whole) for t in x.ravel()]
    kind = (np.uint64 if any(v >= 1 << 63 for v in values) else np.int64) if whole else np.float64
    return np.array(values, kind).reshape(x.shape)


def _number(text: str, whole: bool) -> float | int:
    if not whole:
        return float(text)
    try:
        return int(text)
    except ValueError:
        return int(float(text))


# -- bits --------------------------------------------------------------------------------------------------------------------------


@host("BitCast")
def bit_cast(n: Node) -> object:
    x, to = n.value(0), numpy_dtype(n.attr("to"))
    if to.kind == "O" or x.dtype.kind == "O" or width(x.dtype) != width(to):
        raise n.wrong(f"expected a type of as many bits as {x.dtype.name}, found {to.name if to.kind != 'O' else 'string'}")
    return from_bits(bits_of(x), to) if to.name in _BITS else np.ascontiguousarray(x).reshape(x.shape).view(to)


def width(dtype: np.dtype) -> int:
    """Bits of an element."""
    return _BITS.get(dtype.name, 8 * dtype.itemsize)


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bits of elements of 4 or 2 bits, as bytes."""
    whole = x.astype(np.int8) if x.dtype.name.startswith("int") else x
    return np.ascontiguousarray(whole).reshape(x.shape).view(np.uint8) & np.uint8((1 << width(x.dtype)) - 1)


def from_bits(bits: np.ndarray, to: np.dtype) -> np.ndarray:
    """Elements of 4 or 2 bits that have these bits."""
    if not to.name.startswith("int"):
        return bits.view(to)
    sign = 1 << (_BITS[to.name] - 1)
    return ((bits.astype(np.int8) ^ sign) - sign).astype(to)
