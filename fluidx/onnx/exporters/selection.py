"""Export of operators whose result sizes depend on values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir.dtypes import np_dtype
from . import exports
from .layout import top_k_nodes

if TYPE_CHECKING:
    from ..export_graph import Op


def _sizes(op: Op, slot: str) -> str:
    """A vector of sizes as int64, which is the only dtype that ONNX has for them."""
    return op.cast(slot, "int64")


# -- selection by values ----------------------------------------------------------------------------------------------------------


@exports("where_index")
def where_index(op: Op) -> str:
    return op.emit("Transpose", op.emit("NonZero", op["X"]), perm=[1, 0])


@exports("masked_select")
def masked_select(op: Op) -> str:
    return op.emit("Compress", *(op.emit("Reshape", op[slot], op.ints([-1])) for slot in ("X", "Mask")))


@exports("unique")
def unique(op: Op) -> dict[str, Any]:
    attrs = {"sorted": int(op.attrs["sorted"])} | ({} if op.attrs["flatten"] else {"axis": op.attrs["axis"] % op.type_of("X").ndim})
    made = op.emit_many("Unique", 4, op["X"], **attrs)
    if op.attrs["dtype"] != "int64":
        made[1:] = [op.emit("Cast", v, to=op.code(op.attrs["dtype"])) for v in made[1:]]
    return dict(zip(("Out", "First", "Index", "Count"), made, strict=True))


@exports("non_max_suppression")
def non_max_suppression(op: Op) -> str:
    limits = {"MaxOutput": "int64", "IouThreshold": "float32", "ScoreThreshold": "float32"}
    if op.dtype("Boxes") != "float32":
        raise op.wrong(f"NonMaxSuppression takes float32, Boxes are {op.dtype('Boxes')}")
    given = [single(op, slot, dtype) if op.has(slot) else "" for slot, dtype in limits.items()]
    while given and not given[-1]:
        given.pop()
    return op.emit("NonMaxSuppression", op["Boxes"], op["Scores"], *given, center_point_box=int(op.attrs["center_point_box"]))


def single(op: Op, slot: str, dtype: str) -> str:
    """A single number in a dtype, without axes."""
    found = op.cast(slot, dtype)
    return op.emit("Reshape", found, op.ints([])) if op.type_of(slot).ndim else found


# -- sizes from computed values ---------------------------------------------------------------------------------------------------


@exports("range_between")
def range_between(op: Op) -> str:
    return op.emit("Range", *(single(op, slot, op.dtype(slot)) for slot in ("Start", "End", "Step")))


@exports("reshape_by")
def reshape_by(op: Op) -> str:
    return op.emit("Reshape", op["X"], _sizes(op, "Shape"), **({"allowzero": 1} if op.attrs["zeros"] else {}))


@exports("expand_by")
def expand_by(op: Op) -> str:
    return op.emit("Expand", op["X"], _sizes(op, "Shape"))


@exports("tile_by")
def tile_by(op: Op) -> str:
    return op.emit("Tile", op["X"], _sizes(op, "Times"))


@exports("slice_by")
def slice_by(op: Op) -> str:
    axes = [a % op.type_of("X").ndim for a in op.attrs["axes"]]
    steps = [op.ints(op.attrs["steps"])] if op.attrs["steps"] else []
    return op.emit("Slice", op["X"], _sizes(op, "Starts"), _sizes(op, "Ends"), op.ints(axes), *steps)


@exports("top_k_by")
def top_k_by(op: Op) -> dict[str, Any]:
    return top_k_nodes(op, _sizes(op, "K"))


@exports("fill_by")
def fill_by(op: Op) -> str:
    value = np.array([op.attrs["value"]], np_dtype(op.attrs["dtype"]))
    return op.emit("ConstantOfShape", _sizes(op, "Shape"), value=op.tensor(value))
