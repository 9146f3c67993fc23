"""Ops on sequences, which are lists on the host. The gradient of a sequence is a sequence of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.dtypes import INTS
from ...ir.errors import ExecutionError, ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control, Rewrite
from ...ir.opdef import OpDef, Required
from ...ir.types import ANY, TensorType
from ...ir.valuetypes import AnyRankType, SequenceType, ValueType, as_type, common_type
from ..shared.lists import element, erased, inserted, part_sizes
from ..shared.types import norm_axis

KINDS = ("sequence", "optional", "map", "string", "tensor of any rank")  # an element may also be one of these


def elem_of(op: str, slot: str, t: ValueType) -> ValueType:
    """The type of the elements of a sequence. Raises ProgramError for a type that is not a sequence."""
    if not isinstance(t, SequenceType):
        raise ProgramError(f"op {op}: {slot} must be a sequence, found {t}; make one with sequence_construct")
    return t.elem


def _need_position(op: str, t: ValueType | None) -> None:
    if t is not None and not (isinstance(t, TensorType) and t.dtype in INTS and t.numel in (1, ANY)):
        raise ProgramError(f"op {op}: Position must be one integer, found {t}")


def _number(position: Any) -> int:
    return int(np.asarray(position).reshape(-1)[0])


def _at(position: Any) -> int | None:
    return None if position is None else _number(position)


class SequenceConstruct(OpDef):
    """A sequence of the values X, in their order."""

    name = "sequence_construct"
    autocast = Autocast(takes_low_bit=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs = ("X*",)

    @staticmethod
    def infer(xs):
        if not xs:
            raise ProgramError("op sequence_construct needs at least one X; sequence_empty makes a sequence without elements")
        elem = xs[0]
        for x in xs[1:]:
            elem = common_type(elem, x)
        return SequenceType(elem)

    @staticmethod
    def grad(b, op, g):
        return [b.sequence_at(g, b.fill_constant(shape=(), dtype="int64", value=float(k))) for k, _ in enumerate(op["X"])]

    @staticmethod
    def kernel(xp, xs):
        return list(xs)


class SequenceEmpty(OpDef):
    """An empty sequence, with elements of the type in the text `elem`."""

    name = "sequence_empty"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    attrs = {"elem": Required(str)}

    @staticmethod
    def infer(*, elem):
        return SequenceType(as_type(elem))

    @staticmethod
    def kernel(xp, *, elem):
        return []


class SequenceAt(OpDef):
    """The element of S at Position; a negative position counts from the end."""

    name = "sequence_at"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs = ("S", "Position")

    @staticmethod
    def infer(s, position):
        _need_position("sequence_at", position)
        return elem_of("sequence_at", "S", s)

    @staticmethod
    def grad(b, op, g):
        return b.sequence_at_grad(op["S"], op["Position"], g), None

    @staticmethod
    def kernel(xp, s, position):
        return element(s, _number(position))


class SequenceAtGrad(OpDef):
    """Zeros like the elements of S, except for the gradient at Position."""

    name = "sequence_at_grad"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs, outputs = ("S", "Position", "Out@GRAD"), ("S@GRAD",)

    @staticmethod
    def infer(s, position, g):
        elem_of("sequence_at_grad", "S", s)
        return s

    @staticmethod
    def kernel(xp, s, position, g):
        made = zeros_like(s)
        made[_number(position)] = g
        return made


def zeros_like(value: Any) -> Any:
    """Zeros in the shape of a value: an array, or all arrays in nested lists."""
    return [zeros_like(v) for v in value] if isinstance(value, list) else None if value is None else np.zeros_like(value)


class SequenceSum(OpDef):
    """The elementwise sums of the sequences X, which have equal lengths."""

    name = "sequence_sum"
    control = Control(beyond_tensors=KINDS)
    inputs = ("X*",)

    @staticmethod
    def infer(xs):
        for x in xs:
            elem_of("sequence_sum", "X", x)
        return xs[0]

    @staticmethod
    def kernel(xp, xs):
        return _summed(xs)


def _summed(values: list[Any]) -> Any:
    if not isinstance(values[0], list):
        return sum(values[1:], np.array(values[0]))
    if len({len(v) for v in values}) > 1:
        raise ExecutionError(f"op sequence_sum: X have {[len(v) for v in values]} elements; expected equal numbers")
    return [_summed(list(at)) for at in zip(*values, strict=True)]


class SequenceInsert(OpDef):
    """S with X inserted before the element at Position, or at the end without Position."""

    name = "sequence_insert"
    autocast = Autocast(takes_low_bit=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs = ("S", "X", "Position?")

    @staticmethod
    def infer(s, x, position):
        _need_position("sequence_insert", position)
        return SequenceType(common_type(elem_of("sequence_insert", "S", s), x))

    @staticmethod
    def grad(b, op, g):
        at = op["Position"]
        return b.sequence_erase(g, at), b.sequence_at(g, b.fill_constant(shape=(), dtype="int64", value=-1.0) if at is None else at), None

    @staticmethod
    def kernel(xp, s, x, position):
        return inserted(s, x, _at(position))


class SequenceWrite(OpDef):
    """S with X as the element at Position, and the previous number of elements; at the position after the last element, X is appended."""

    name = "sequence_write"
    autocast = Autocast(takes_low_bit=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs, outputs = ("S", "X", "Position"), ("Out", "Before")

    @staticmethod
    def infer(s, x, position):
        _need_position("sequence_write", position)
        return SequenceType(common_type(elem_of("sequence_write", "S", s), x)), TensorType("int64", ())

    @staticmethod
    def grad(b, op, gs):
        return b.sequence_write_grad(op["Position"], op["Before"], gs[0]), b.sequence_at(gs[0], op["Position"]), None

    @staticmethod
    def kernel(xp, s, x, position):
        at = _number(position)
        if not 0 <= at <= len(s):
            raise ExecutionError(f"op sequence_write: Position is {at}, but the sequence has {len(s)} elements; write one after the other")
        return [*s[:at], x, *s[at + 1 :]], np.int64(len(s))


class SequenceWriteGrad(OpDef):
    """The gradients of the elements of S, whose number was Before: zeros for an overwritten element, none for an appended one."""

    name = "sequence_write_grad"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs, outputs = ("Position", "Before", "Out@GRAD"), ("S@GRAD",)

    @staticmethod
    def infer(position, before, g):
        elem_of("sequence_write_grad", "Out@GRAD", g)
        return g

    @staticmethod
    def kernel(xp, position, before, g):
        at = _number(position)
        return [zeros_like(v) if k == at else v for k, v in enumerate(g[: _number(before)])]


class SequenceErase(OpDef):
    """S without the element at Position, or without the last one if Position is absent."""

    name = "sequence_erase"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs = ("S", "Position?")

    @staticmethod
    def infer(s, position):
        _need_position("sequence_erase", position)
        elem_of("sequence_erase", "S", s)
        return s

    @staticmethod
    def grad(b, op, g):
        return b.sequence_erase_grad(op["S"], op["Position"], g), None

    @staticmethod
    def kernel(xp, s, position):
        return erased(s, _at(position))


class SequenceEraseGrad(OpDef):
    """The gradients of the remaining elements of S, and zeros for the erased one."""

    name = "sequence_erase_grad"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs, outputs = ("S", "Position?", "Out@GRAD"), ("S@GRAD",)

    @staticmethod
    def infer(s, position, g):
        elem_of("sequence_erase_grad", "S", s)
        return s

    @staticmethod
    def kernel(xp, s, position, g):
        at = len(s) - 1 if position is None else _number(position) % len(s)
        return inserted(g, zeros_like(s[at]), at)


class SequenceLength(OpDef):
    """The number of elements of S, an int64 without axes."""

    name = "sequence_length"
    rewrite = Rewrite(constant=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=KINDS)
    inputs = ("S",)

    @staticmethod
    def infer(s):
        elem_of("sequence_length", "S", s)
        return TensorType("int64", ())

    @staticmethod
    def kernel(xp, s):
        return np.int64(len(s))


class SplitToSequence(OpDef):
    """The parts of X along `axis`. A vector Split lists their sizes; a number Split is the size of all parts, but the last may be smaller.
    Without Split the parts have size 1, and the axis is removed unless `keepdims`.
    """

    name = "split_to_sequence"
    autocast = Autocast(takes_low_bit=True)
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=("sequence", "string", "tensor of any rank"))
    inputs = ("X", "Split?")
    attrs = {"axis": 0, "keepdims": True}

    @staticmethod
    def infer(x, split, *, axis, keepdims):
        if split is not None and not (isinstance(split, TensorType) and split.dtype in INTS and split.ndim < 2):
            raise ProgramError(f"op split_to_sequence: Split must be a number or a vector of int64, found {split}")
        if isinstance(x, AnyRankType):
            return SequenceType(x)
        if not isinstance(x, TensorType):
            raise ProgramError(f"op split_to_sequence: X must be a tensor, found {x}")
        at = norm_axis("split_to_sequence", axis, x.ndim)
        if split is None and not keepdims:
            return SequenceType(x.with_shape(x.shape[:at] + x.shape[at + 1 :]))
        return SequenceType(x.with_shape(d if k != at else 1 if split is None else ANY for k, d in enumerate(x.shape)))

    @staticmethod
    def grad(b, op, g):
        new = op["Split"] is None and not op.attrs["keepdims"]
        return b.concat_from_sequence(g, axis=op.attrs["axis"], new_axis=new), None

    @staticmethod
    def kernel(xp, x, split, *, axis, keepdims):
        size = x.shape[axis]
        if split is None and not keepdims:
            return [np.take(x, k, axis) for k in range(size)]
        sizes = part_sizes(size, 1 if split is None else split.tolist())
        return [np.array(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis)] if sizes else []


class ConcatFromSequence(OpDef):
    """The elements of S joined along `axis`, a new one if `new_axis`."""

    name = "concat_from_sequence"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=("sequence", "string", "tensor of any rank"))
    inputs = ("S",)
    attrs = {"axis": Required(int), "new_axis": False}

    @staticmethod
    def infer(s, *, axis, new_axis):
        elem = elem_of("concat_from_sequence", "S", s)
        if isinstance(elem, AnyRankType):
            return elem
        if not isinstance(elem, TensorType):
            raise ProgramError(f"op concat_from_sequence joins tensors, found {s}")
        at = norm_axis("concat_from_sequence", axis, elem.ndim, int(new_axis))
        shape = list(elem.shape)
        shape[at : at + (not new_axis)] = [ANY]
        return elem.with_shape(shape)

    @staticmethod
    def grad(b, op, g):
        return b.concat_from_sequence_grad(op["S"], g, **op.attrs)

    @staticmethod
    def kernel(xp, s, *, axis, new_axis):
        if not s:
            raise ExecutionError("op concat_from_sequence: there is nothing to join: the sequence is empty")
        return np.stack(s, axis) if new_axis else np.concatenate(s, axis)


class ConcatFromSequenceGrad(OpDef):
    """The gradient split into the parts from which S was joined; only the shapes of S are read."""

    name = "concat_from_sequence_grad"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=("sequence", "tensor of any rank"))
    inputs, outputs = ("S", "Out@GRAD"), ("S@GRAD",)
    attrs = {"axis": Required(int), "new_axis": False}

    @staticmethod
    def infer(s, g, *, axis, new_axis):
        elem_of("concat_from_sequence_grad", "S", s)
        return s

    @staticmethod
    def kernel(xp, s, g, *, axis, new_axis):
        if new_axis:
            return [np.take(g, k, axis) for k, _ in enumerate(s)]
        return [np.array(part) for part in np.split(g, np.cumsum([v.shape[axis] for v in s])[:-1], axis)]
