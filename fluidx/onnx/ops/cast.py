"""Cast, CastLike and BitCast, between all types of ONNX."""

from __future__ import annotations

import numpy as np

from ...ir import Variable
from ...ir.dtypes import SHORT, as_dtype, np_dtype
from ...ops.shared import low_bit
from ...ops.shared.low_bit import bits_of, from_bits, width
from ...ops.shared.texts import parsed, written
from ..export_graph import Op
from ..node import Node
from ..table import exports, imports, on_numpy
from ..values import numpy_dtype


@imports("Cast", "CastLike")
def cast(n: Node) -> object:
    to, x = _target_dtype(n), n.operands[0]
    if isinstance(x, Variable) and n.importer.evaluate is None and (to.kind == "O") != (x.dtype == "string"):
        return n.b.string_cast(x, dtype=as_dtype(to))
    if dtype_of(n, 0) == to and isinstance(x, Variable):
        return x
    if to.name not in SHORT or isinstance(x, np.ndarray):  # the value is known, and CastLike needs only the type of Y
        return cast_on_host(n)
    return n.b.cast(n.x(), dtype=to.name, saturate=bool(n.attr("saturate", 1)), round_mode=n.attr("round_mode", "up"))


@on_numpy("Cast", "CastLike", pure=True)
def cast_on_host(n: Node) -> object:
    return converted(n.value(0), _target_dtype(n), bool(n.attr("saturate", 1)), n.attr("round_mode", "up"))


def _target_dtype(n: Node) -> np.dtype:
    return numpy_dtype(n.attr("to")) if n.op_type == "Cast" else dtype_of(n, 1)


def dtype_of(n: Node, k: int) -> np.dtype:
    """The NumPy dtype of an operand, even if a program cannot hold it."""
    v = n.operands[k]
    return np_dtype(v.desc.type.dtype) if isinstance(v, Variable) else n.importer.array(v).dtype


# -- on the host -------------------------------------------------------------------------------------------------------------------


def converted(x: np.ndarray, to: np.dtype, saturate: bool = True, round_mode: str = "up") -> np.ndarray:
    """An array converted to another type by the rules of Cast; strings are arrays of objects."""
    if x.dtype.kind == "O" and to.kind != "O":
        x = parsed(x, to)
    return low_bit.converted(x, to, saturate, round_mode) if x.dtype == to or to.kind != "O" else written(x)


# -- bits --------------------------------------------------------------------------------------------------------------------------


@on_numpy("BitCast", pure=True)
def bit_cast(n: Node) -> object:
    x, to = n.value(0), numpy_dtype(n.attr("to"))
    if to.kind == "O" or x.dtype.kind == "O" or width(x.dtype) != width(to):
        raise n.wrong(f"expected a type with as many bits as {x.dtype.name}, found {to.name if to.kind != 'O' else 'string'}")
    return from_bits(bits_of(x), to) if to.name in low_bit.BITS else np.ascontiguousarray(x).reshape(x.shape).view(to)


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("cast")
def export_cast(op: Op) -> str:
    said = {} if op.attrs["saturate"] else {"saturate": 0}
    if op.attrs["round_mode"] != "up":
        said["round_mode"] = op.attrs["round_mode"]
    return op.emit("Cast", op["X"], to=op.code(op.attrs["dtype"]), **said)
