"""Embedding tables: rows of a matrix selected by id, and the gradient, which adds rows to a table."""

from __future__ import annotations

import numpy as np

from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Native
from ...ir.opdef import OpDef, Sample
from ...ir.types import ANY, TensorType
from ..data.indexing import add_local_rows, take_local_rows
from ..shared.native import add_row_calls, take_calls
from ..shared.samples import f32
from ..shared.types import need_ids, need_ndim


def _check(op: str, w: TensorType, ids: TensorType, padding_idx: int) -> None:
    need_ndim(op, "W", w, 2)
    need_ids(op, "Ids", ids)
    if padding_idx != -1 and (padding_idx < 0 or w.shape[0] != ANY and padding_idx >= w.shape[0]):
        raise ProgramError(f"op {op}: padding_idx must be -1 (none) or an id from 0 to {w.shape[0] - 1}, found {padding_idx}")


class _Lookup(OpDef):
    """Base of the two look-up ops, which differ in the axes of Ids."""

    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    inputs = ("W", "Ids")
    attrs = {"padding_idx": -1}

    @staticmethod
    def grad(b, op, g):
        return b.lookup_table_grad(op["W"], op["Ids"], g, padding_idx=op.attrs["padding_idx"]), None

    @classmethod
    def kernel(cls, xp, w, ids, *, out, padding_idx, part=None):
        flat, rows = xp.ascontiguousarray(ids).reshape(-1), out.reshape(-1, w.shape[1])
        take_local_rows(xp, cls.name, "table W", w, flat, rows, part)
        if padding_idx != -1:
            rows[flat == padding_idx] = 0

    @classmethod
    def _calls(cls, ins, outs, attrs, dry=False, part=None):
        (w, ids), out = ins, outs[0]
        return take_calls(cls.name, "table W", w, ids, out, part, attrs["padding_idx"], dry)

    native = Native(calls=_calls, any_size=True)


class LookupTable(_Lookup):
    """The rows of the table W [vocabulary, width] for Ids [..., 1], as [..., width]; zeros for the id `padding_idx`.

    Raises ExecutionError, which names the id and the size of the vocabulary, for an id out of range.
    """

    name = "lookup_table"
    pattern = "v d, * . -> * d | v@ v:+ L(0)"

    @staticmethod
    def infer(w, ids, *, padding_idx):
        _check("lookup_table", w, ids, padding_idx)
        need_ndim("lookup_table", "Ids", ids, 1, 99)
        if ids.shape[-1] not in (1, ANY):
            raise ProgramError(f"op lookup_table: the last axis of Ids must have size 1, found {ids}; lookup_table_v2 takes ids without it")
        return w.with_shape((*ids.shape[:-1], w.shape[1]))

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 4), np.array([[1], [4], [1]], "int64"))
        yield Sample.of(f32(5, 4), np.array([[[0], [2]], [[2], [3]]], "int32"), padding_idx=2)
        yield Sample.of(f32(5, 4), np.array([[[0], [2]], [[2], [4]], [[1], [0]]]), padding_idx=2)


class LookupTableV2(_Lookup):
    """The rows of the table W [vocabulary, width] for Ids, along a new last axis; zeros for the id `padding_idx`.

    Raises ExecutionError, which names the id and the size of the vocabulary, for an id out of range.
    """

    name = "lookup_table_v2"
    pattern = "v d, * -> * d | v@ v:+ L(0)"

    @staticmethod
    def infer(w, ids, *, padding_idx):
        _check("lookup_table_v2", w, ids, padding_idx)
        return w.with_shape((*ids.shape, w.shape[1]))

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 4), np.array([1, 4, 1], "int64"))
        yield Sample.of(f32(5, 4), np.array([[0, 2], [2, 3]], "int32"), padding_idx=0)
        yield Sample.of(f32(5, 4), np.array([[0, 2], [2, 4], [1, 0]]), padding_idx=2)


class LookupTableGrad(OpDef):
    """The gradient of a table: zeros in W's shape, with each row of Out@GRAD added to the row of its id.

    Repeated ids are added in order, so the result is bitwise equal in every run. Only the shape of W is read.
    """

    name = "lookup_table_grad"
    inputs, outputs = ("W", "Ids", "Out@GRAD"), ("W@GRAD",)
    attrs = {"padding_idx": -1}

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"~v d, * {'.' if ins[1].ndim == ins[2].ndim else ''}, * d -> v d | v@ *:+ L(2)"

    @staticmethod
    def _flops(ins, outs, attrs):
        return ins[2].numel  # each element of the gradient is added once

    arithmetic = Arithmetic(flops=_flops)

    @staticmethod
    def infer(w, ids, g, *, padding_idx):
        return w

    @staticmethod
    def kernel(xp, w, ids, g, *, out, padding_idx, part=None):
        out.fill(0)
        add_local_rows(xp, out, xp.ascontiguousarray(ids).reshape(-1), g.reshape(-1, out.shape[1]), part)
        row = padding_idx - (part.start if part is not None else 0)
        if padding_idx != -1 and 0 <= row < len(out):
            out[row] = 0

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        _, ids, g = ins
        return add_row_calls("lookup_table_grad", "table W", outs[0], ids, g, part, attrs["padding_idx"], dry=dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        g = np.arange(12, dtype="float32").reshape(3, 4)
        yield Sample.of(f32(5, 4), np.array([[1], [4], [1]], "int64"), g, grad=(), why="a gradient op")
        yield Sample.of(f32(5, 4), np.array([[0, 2], [2, 4], [1, 0]]), f32(3, 2, 4), padding_idx=2, grad=(), why="a gradient op")
