"""Import of Constant, ConstantOfShape and Identity."""

from __future__ import annotations

import numpy as np

from ..import_tables import on_numpy
from ..limits import checked_shape
from ..node import Node


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
