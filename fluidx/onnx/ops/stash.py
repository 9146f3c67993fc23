"""Stashes, exported as a tensor of rows: they keep one value for each round of a loop, and grow by one if they start with none."""

from __future__ import annotations

import numpy as np

from ...ir.dtypes import np_dtype
from ..export_graph import Op
from ..table import exports


def _row(op: Op, slot: str) -> str:
    """A value as a tensor of one row."""
    return op.emit("Unsqueeze", op[slot], op.ints([0]))


def _read(op: Op) -> str:
    return op.emit("Gather", op["Stash"], op.emit("Reshape", op["Round"], op.const(np.zeros(0, np.int64))), axis=0)


def _with_row(op: Op, stash: str, row: str) -> str:
    return op.emit("ScatterND", stash, op.emit("Reshape", op["Round"], op.ints([1, 1])), row)


def _zeros(op: Op, shape: str, slot: str) -> str:
    return op.emit("ConstantOfShape", shape, value=op.tensor(np.zeros(1, np_dtype(op.dtype(slot)))))


@exports("stash")
def stash(op: Op) -> str:
    rounds = op.sizes(op["Like"], 0, 1) if op.has("Like") else op.ints([op.attrs["rounds"]])
    return _zeros(op, op.emit("Concat", rounds, op.emit("Shape", op["X"]), axis=0), "X")


@exports("stash_write")
def stash_write(op: Op) -> str:
    if op.type_of("Stash").shape[0] == 0:  # rounds are stored in order
        return op.emit("Concat", op["Stash"], _row(op, "X"), axis=0)
    return _with_row(op, op["Stash"], _row(op, "X"))


@exports("stash_read")
def stash_read(op: Op) -> str:
    return _read(op)


@exports("stash_read_grad")
def stash_read_grad(op: Op) -> str:
    return _with_row(op, _zeros(op, op.emit("Shape", op["Stash"]), "Stash"), _row(op, "Out@GRAD"))


@exports("stash_add")
def stash_add(op: Op) -> str:
    return _with_row(op, op["Stash"], op.emit("Unsqueeze", op.emit("Add", _read(op), op["X"]), op.ints([0])))


@exports("stash_rows")
def stash_rows(op: Op) -> str:
    return op.emit("Identity", op["Stash"])
