"""Constants, and tensors filled with one value."""

from __future__ import annotations

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from ..export_graph import Op
from ..host_builder import HostBuilder
from ..limits import checked_shape
from ..node import Node
from ..table import dynamic, exports, on_numpy


@dynamic("ConstantOfShape", 0)
def computed_constant_of_shape(n: Node) -> object:
    value = n.attr("value", np.zeros(1, np.float32))
    return n.b.fill_by(n.x(), value=n.filler(value), dtype=value.dtype.name)


@on_numpy("Constant")
def constant(n: Node) -> object:
    for name in ("value", "value_int", "value_ints", "value_float", "value_floats", "value_string", "value_strings"):
        found = n.attr(name)
        if found is not None:
            dtype = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}.get(name)
            return n.constant(found) if name == "value" else np.array(found, dtype or object)
    raise n.wrong("it has no value")


@on_numpy("Identity")
def identity(n: Node) -> object:
    return n.operands[0]


@on_numpy("ConstantOfShape")
def constant_of_shape(n: Node) -> object:
    value = n.attr("value", np.zeros(1, np.float32))
    return n.constant(np.full(checked_shape(n.ints(0) or (), value.itemsize), value.reshape(-1)[0], value.dtype))


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("fill_constant", "assign_value", "range", "linspace", "eye")
def computed_once(op: Op) -> str:
    """An operator without operands is its value."""
    return op.emit("Constant", value=op.tensor(HostBuilder().emit(op.type, **op.attrs).array))


@exports("diag")
def diag(op: Op) -> str:
    size, zero = op.type_of("Diagonal").shape[0], op.const(np.zeros((), np_dtype(op.dtype("Diagonal"))))
    if size == ANY:
        raise op.wrong("the size of the matrix is open")
    return op.emit("Where", op.const(np.eye(size, dtype=bool)), op.emit("Unsqueeze", op["Diagonal"], op.ints([1])), zero)


@exports("fill_zeros_like", "fill_any_like")
def like(op: Op) -> str:
    value = np.array([op.attrs.get("value", 0)], np_dtype(op.out_type("Out").dtype))
    return op.emit("ConstantOfShape", op.emit("Shape", op["X"]), value=op.tensor(value))


@exports("fill_constant_batch_size_like")
def batch_like(op: Op) -> str:
    a = op.attrs
    source, target = a["input_dim_idx"] % op.type_of("Input").ndim, a["output_dim_idx"] % len(a["shape"])
    size = op.sizes(op["Input"], source, source + 1)
    before, behind = a["shape"][:target], a["shape"][target + 1 :]
    parts = [*([op.ints(before)] if before else []), size, *([op.ints(behind)] if behind else [])]
    sizes = op.emit("Concat", *parts, axis=0) if len(parts) > 1 else size
    return op.emit("ConstantOfShape", sizes, value=op.tensor(np.array([a["value"]], np_dtype(a["dtype"]))))


@exports("fill_by")
def fill_by(op: Op) -> str:
    value = np.array([op.attrs["value"]], np_dtype(op.attrs["dtype"]))
    return op.emit("ConstantOfShape", op.cast("Shape", "int64"), value=op.tensor(value))
