"""Changes of type: Cast, CastLike and BitCast, to and from all that ONNX has."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import Variable
from ...ir.dtypes import SHORT, np_dtype
from ...ops.shared import tiny
from ...ops.shared.tiny import bits_of, from_bits, width
from ..node import Node
from ..values import numpy_dtype
from . import face, host


@face("Cast", "CastLike")
def cast(n: Node) -> object:
    to = _wanted(n)
    if to.name not in SHORT or isinstance(n.operands[0], np.ndarray):  # known, and CastLike reads no more of Y than its type
        return cast_on_host(n)
    if dtype_of(n, 0) == to:
        return n.x()
    return n.b.cast(n.x(), dtype=to.name, saturate=bool(n.attr("saturate", 1)), round_mode=n.attr("round_mode", "up"))


@host("Cast", "CastLike", computes=True)
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
    if x.dtype.kind == "O" and to.kind != "O":
        x = _parsed(x, to)
    return tiny.converted(x, to, saturate, round_mode) if x.dtype == to or to.kind != "O" else _written(x)


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


@host("BitCast", computes=True)
def bit_cast(n: Node) -> object:
    x, to = n.value(0), numpy_dtype(n.attr("to"))
    if to.kind == "O" or x.dtype.kind == "O" or width(x.dtype) != width(to):
        raise n.wrong(f"expected a type of as many bits as {x.dtype.name}, found {to.name if to.kind != 'O' else 'string'}")
    return from_bits(bits_of(x), to) if to.name in tiny.BITS else np.ascontiguousarray(x).reshape(x.shape).view(to)
