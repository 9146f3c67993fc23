"""Scatter operators, and gradients of look-ups, exported as basic nodes."""

from __future__ import annotations

import numpy as np

from ...ir.dtypes import np_dtype
from ..export_graph import Op
from ..table import exports
from .gradient_formulas import number

_FOLDS = {"prod": ("mul", 16), "max": ("max", 18), "min": ("min", 18)}  # ScatterND's name of the reduction, and its first opset


def _zeros_like(op: Op, slot: str) -> str:
    return op.emit("ConstantOfShape", op.emit("Shape", op[slot]), value=op.tensor(np.zeros(1, np_dtype(op.dtype(slot)))))


def _reduced_into(op: Op, x: str, places: str, updates: str, how: str = "add", since: int = 16) -> str:
    if op.opset < since:
        raise op.wrong(f"its ScatterND has {how} from opset {since} on")
    return op.emit("ScatterND", x, places, updates, reduction=how)


def _added(op: Op, like: str, places: str, values: str) -> str:
    """Zeros in the shape of an operand, with values added at positions."""
    return _reduced_into(op, _zeros_like(op, like), places, values)


def _positions(op: Op, slot: str) -> str:
    ids = op.emit("Reshape", op[slot], op.ints([-1, 1]))
    return ids if op.dtype(slot) == "int64" else op.emit("Cast", ids, to=op.code("int64"))


# -- gradients of looking up --------------------------------------------------------------------------------------------------


@exports("lookup_table_grad")
def lookup_table_grad(op: Op) -> str:
    places, pad = _positions(op, "Ids"), op.attrs["padding_idx"]
    g = op.emit("Reshape", op["Out@GRAD"], op.ints([-1, op.type_of("W").shape[1]]))
    if pad != -1:
        padding = op.emit("Equal", places, op.const(np.array(pad, np.int64)))
        g = op.emit("Where", padding, number(op, 0, "W"), g)
    return _added(op, "W", places, g)


@exports("gather_grad")
def gather_grad(op: Op) -> str:
    return _added(op, "X", _positions(op, "Index"), op["Out@GRAD"])


@exports("gather_nd_grad")
def gather_nd_grad(op: Op) -> str:
    return _added(op, "X", op.emit("Cast", op["Index"], to=op.code("int64")), op["Out@GRAD"])


@exports("index_select_grad")
def index_select_grad(op: Op) -> str:
    """The indexed axis is moved to the front."""
    ndim = op.type_of("X").ndim
    axis = op.attrs["dim"] % ndim
    there = [axis, *(k for k in range(ndim) if k != axis)]
    rows = op.emit("Transpose", _zeros_like(op, "X"), perm=there)
    found = _reduced_into(op, rows, _positions(op, "Index"), op.emit("Transpose", op["Out@GRAD"], perm=there))
    return op.emit("Transpose", found, perm=[int(k) for k in np.argsort(there)])


@exports("take_along_axis_grad")
def take_along_axis_grad(op: Op) -> str:
    if op.opset < 16:
        raise op.wrong("its ScatterElements adds from opset 16 on")
    return op.emit("ScatterElements", _zeros_like(op, "X"), op["Index"], op["Out@GRAD"], axis=op.attrs["axis"], reduction="add")


@exports("argsort_grad")
def argsort_grad(op: Op) -> str:
    return op.emit("ScatterElements", _zeros_like(op, "X"), op["Indices"], op["Out@GRAD"], axis=op.attrs["axis"])


@exports("masked_select_grad")
def masked_select_grad(op: Op) -> str:
    places = op.emit("Transpose", op.emit("NonZero", op["Mask"]), perm=[1, 0])
    return op.emit("ScatterND", _zeros_like(op, "X"), places, op["Out@GRAD"])


# -- scatter ------------------------------------------------------------------------------------------------------------------


def _ids(op: Op) -> str:
    return op.emit("Reshape", op["Ids"], op.ints([-1]))


def _last_equal(op: Op) -> str:
    """For each id the position of the last equal one. ONNX does not define which update of repeated ids stays."""
    ids = _ids(op)
    same = op.emit("Equal", op.emit("Unsqueeze", ids, op.ints([1])), op.emit("Unsqueeze", ids, op.ints([0])))
    return op.emit("ArgMax", op.emit("Cast", same, to=op.code("int32")), axis=1, keepdims=0, select_last_index=1)


def _with_zero_rows(op: Op, slot: str) -> str:
    """An operand with zeros in the rows that ids name."""
    rows = op.emit("Gather", op[slot], _ids(op), axis=0)
    zeros = op.emit("ConstantOfShape", op.emit("Shape", rows), value=op.tensor(np.zeros(1, np_dtype(op.dtype(slot)))))
    return op.emit("ScatterND", op[slot], _positions(op, "Ids"), zeros)


@exports("scatter")
def scatter(op: Op) -> str:
    if op.attrs["overwrite"]:
        return op.emit("ScatterND", op["X"], _positions(op, "Ids"), op.emit("Gather", op["Updates"], _last_equal(op), axis=0))
    return _reduced_into(op, _with_zero_rows(op, "X"), _positions(op, "Ids"), op["Updates"])


@exports("scatter_grad")
def scatter_grad(op: Op) -> dict[str, str]:
    rows = op.emit("Gather", op["Out@GRAD"], _ids(op), axis=0)
    if op.attrs["overwrite"]:  # an update that a later one replaced has no effect
        last = _last_equal(op)
        count, (zero, one) = op.emit("Size", last), (op.const(np.array(n, np.int64)) for n in (0, 1))
        stays = op.emit("Cast", op.emit("Equal", last, op.emit("Range", zero, count, one)), to=op.code(op.dtype("Out@GRAD")))
        more = range(1, op.type_of("Out@GRAD").ndim)
        rows = op.emit("Mul", rows, op.emit("Unsqueeze", stays, op.ints(more)) if more else stays)
    return {"X@GRAD": _with_zero_rows(op, "Out@GRAD"), "Updates@GRAD": rows}


@exports("scatter_nd_add")
def scatter_nd_add(op: Op) -> str:
    return _reduced_into(op, op["X"], op.emit("Cast", op["Index"], to=op.code("int64")), op["Updates"])


@exports("scatter_fold")
def scatter_fold(op: Op) -> str:
    return _reduced_into(op, op["X"], _positions(op, "Ids"), op["Updates"], *_FOLDS[op.attrs["op"]])


@exports("scatter_fold_grad")
def scatter_fold_grad(op: Op) -> dict[str, str]:
    if op.attrs["op"] == "prod":
        raise op.wrong("the derivative by one factor is the product of all others, which fluidx cannot export")

    def share(value: str, result: str, g: str) -> str:
        return op.emit("Mul", op.emit("Cast", op.emit("Equal", value, result), to=op.code(op.dtype("X"))), g)

    result, g = (op.emit("Gather", op[slot], _ids(op), axis=0) for slot in ("Out", "Out@GRAD"))
    return {"X@GRAD": share(op["X"], op["Out"], op["Out@GRAD"]), "Updates@GRAD": share(op["Updates"], result, g)}
