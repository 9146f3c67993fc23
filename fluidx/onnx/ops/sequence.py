"""Operators on sequences and optionals. A sequence is a list whose elements may be variables: splitting and joining stay
differentiable.

If the number of elements, or the selected one, is unknown at import, the sequence is a variable of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir import ANY, TensorType, Variable
from ...ir.valuetypes import AnyRankType, OptionalType, SequenceType, as_type
from ...ops.shared.lists import element, erased, inserted, part_sizes
from ..export_graph import Op
from ..limits import checked_shape
from ..node import Node
from ..table import EXPORT, dynamic, entry, exports, on_numpy
from ..types import open_sizes, type_proto_of
from ..values import ABSENT, Outputs, numpy_dtype

# -- pieces of a tensor, in the program or known -------------------------------------------------------------------------------------


def cut(n: Node, value: Any, sizes: Sequence[int], axis: int) -> list[Any]:
    """A tensor split into parts of these sizes along an axis."""
    if isinstance(value, np.ndarray):
        return np.split(value, np.cumsum(sizes)[:-1], axis)
    x = n.importer.variable(value)
    return list(n.b.split(x, sections=tuple(sizes), axis=axis, n_out=len(sizes))) if len(sizes) > 1 else [x]


def slices(n: Node, value: Any, axis: int) -> list[Any]:
    """The slices of a tensor along an axis, without that axis."""
    if isinstance(value, np.ndarray):
        return [np.take(value, k, axis) for k in range(value.shape[axis])]
    x = n.importer.variable(value)
    count = x.shape[axis]
    if count == ANY:
        raise n.wrong(f"the size of axis {axis} must be known: it is the number of iterations or elements")
    if count == 1:
        return [n.b.squeeze(x, axes=(axis,))]
    return list(n.b.unstack(x, axis=axis, num=count, n_out=count)) if count else []


def joined(n: Node, values: Sequence[Any], axis: int, new: bool) -> Any:
    """Tensors concatenated along an axis, or stacked along a new one."""
    if all(isinstance(v, np.ndarray) for v in values):
        return np.stack(values, axis) if new else np.concatenate(values, axis)
    xs = [n.importer.variable(v) for v in values]
    return n.b.stack(xs, axis=axis) if new else n.b.concat(xs, axis=axis)


# -- sequences --------------------------------------------------------------------------------------------------------------------------


def _sequence(n: Node) -> list[Any]:
    found = n.operands[0]
    if not isinstance(found, list):
        raise n.wrong("its first input must be a sequence, found a tensor")
    return found


def _exported_position(op: Op, slot: str) -> str:
    """A position. In ONNX it is a number of 32 or 64 bits without axes."""
    return op.scalar(slot, "int32" if op.dtype(slot) == "int32" else "int64")


_POSITION = {"Position": _exported_position}
entry("SequenceConstruct", "sequence_construct", way=EXPORT)
entry("SequenceLength", "sequence_length", computed=(0,))
entry("SequenceAt", "sequence_at", computed=(0, 1), operands=_POSITION)
entry("SequenceInsert", "sequence_insert", computed=(0, 2), operands=_POSITION)
entry("SequenceErase", "sequence_erase", computed=(0, 1), operands=_POSITION)
entry("ConcatFromSequence", "concat_from_sequence", computed=(0,), axis=0, new_axis=False)


def _position(n: Node, k: int) -> int | None:
    """Operand k as a position; None if it is left out."""
    return int(np.asarray(n.value(k)).item()) if n.has(k) else None


@on_numpy("SequenceEmpty")
def sequence_empty(n: Node) -> object:
    return []


@on_numpy("SequenceConstruct")
def sequence_construct(n: Node) -> object:
    return list(n.operands)


@on_numpy("SequenceLength")
def sequence_length(n: Node) -> object:
    return np.array(len(_sequence(n)), np.int64)


@on_numpy("SequenceAt")
def sequence_at(n: Node) -> object:
    return element(_sequence(n), int(np.asarray(n.value(1)).item()))


@on_numpy("SequenceInsert")
def sequence_insert(n: Node) -> object:
    return inserted(_sequence(n), n.operands[1], _position(n, 2))


@on_numpy("SequenceErase")
def sequence_erase(n: Node) -> object:
    return erased(_sequence(n), _position(n, 1))


@on_numpy("SplitToSequence")
def split_to_sequence(n: Node) -> object:
    axis = n.attr("axis", 0) % n.rank()
    size = n.shape()[axis]
    if not n.has(1):
        return cut(n, n.operands[0], [1] * size, axis) if n.attr("keepdims", 1) else slices(n, n.operands[0], axis)
    return cut(n, n.operands[0], part_sizes(size, np.asarray(n.value(1)).tolist()), axis)


@dynamic("SplitToSequence", 0, 1)
def computed_split(n: Node) -> object:
    """A list if the number of parts is known, else a sequence variable."""
    split = n.operands[1] if n.has(1) else None
    if not isinstance(split, Variable) and isinstance(n.type(), TensorType) and n.shape()[n.attr("axis", 0)] != ANY:
        return split_to_sequence(n)
    return n.b.split_to_sequence(n.x(), n.x(1), axis=n.attr("axis", 0), keepdims=bool(n.attr("keepdims", 1)))


@on_numpy("ConcatFromSequence")
def concat_from_sequence(n: Node) -> object:
    found, new = _sequence(n), bool(n.attr("new_axis", 0))
    if not found:
        raise n.wrong("there is nothing to join: the sequence is empty")
    rank = len(n.importer.array(found[0]).shape) + new
    return joined(n, found, n.attr("axis") % rank, new)


@on_numpy("SequenceMap")
def sequence_map(n: Node) -> object:
    if any(isinstance(v, Variable) and isinstance(v.desc.type, SequenceType) for v in n.operands):
        return n.by_body()  # a loop over the elements, whose number is known in a run
    body, count = n.attr("body"), len(_sequence(n))
    for k, v in enumerate(n.operands):
        if isinstance(v, list) and len(v) != count:
            raise n.wrong(f"input {k} has {len(v)} elements, and the first has {count}")
    own = n.importer.weights(body)
    rounds = [n.inline(body, [v[k] if isinstance(v, list) else v for v in n.operands], own) for k in range(count)]
    return Outputs([made[k] for made in rounds] for k in range(len(body.output)))


# -- optionals --------------------------------------------------------------------------------------------------------------------------


@on_numpy("Optional")
def optional(n: Node) -> object:
    return n.operands[0] if n.has(0) else ABSENT


@on_numpy("OptionalHasElement")
def optional_has_element(n: Node) -> object:
    return np.array(n.has(0) and n.operands[0] is not ABSENT)


@on_numpy("OptionalGetElement")
def optional_get_element(n: Node) -> object:
    if not n.has(0) or n.operands[0] is ABSENT:
        raise n.wrong("the optional is empty; test it with OptionalHasElement first")
    return n.operands[0]


@dynamic("OptionalHasElement", 0)
def computed_has_element(n: Node) -> object:
    return n.b.optional_has_element(n.x()) if isinstance(n.x().desc.type, OptionalType) else optional_has_element(n)


@dynamic("OptionalGetElement", 0)
def computed_get_element(n: Node) -> object:
    return n.b.optional_get_element(n.x()) if isinstance(n.x().desc.type, OptionalType) else optional_get_element(n)


def empty_stack(info: Any, axis: int) -> Any:
    """The stack of no tensors of a declared type along an axis; sizes that are not declared are 0."""
    declared = info.type.tensor_type
    sizes = [d.dim_value for d in declared.shape.dim]
    sizes.insert(axis if axis >= 0 else axis + len(sizes) + 1, 0)
    return np.zeros(checked_shape(sizes), numpy_dtype(declared.elem_type or 1))


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("sequence_empty")
def export_sequence_empty(op: Op) -> str:
    elem = as_type(op.attrs["elem"])
    if not isinstance(elem, (TensorType, AnyRankType)):
        raise op.wrong(f"SequenceEmpty takes tensors, not {elem}")
    return op.emit("SequenceEmpty", dtype=op.code(elem.dtype))


@exports("split_to_sequence")
def export_split_to_sequence(op: Op) -> str:
    keep = {} if op.has("Split") else {"keepdims": int(op.attrs["keepdims"])}
    return op.emit("SplitToSequence", op["X"], *_sizes(op), axis=op.attrs["axis"], **keep)


def _sizes(op: Op) -> list[str]:
    if not op.has("Split"):
        return []
    known = op.dtype("Split") in ("int32", "int64")
    return [op["Split"] if known else op.emit("Cast", op["Split"], to=op.code("int64"))]


@exports("optional")
def export_optional(op: Op) -> str:
    if op.has("X"):
        return op.emit("Optional", op["X"])
    return op.emit("Optional", type=type_proto_of(as_type(op.attrs["elem"]), open_sizes))


@exports("optional_has_element")
def export_optional_has_element(op: Op) -> str:
    if not op.has("X") or not isinstance(op.type_of("X"), OptionalType):
        return op.const(np.array(op.has("X")))
    return op.emit("OptionalHasElement", op["X"])


@exports("optional_get_element")
def export_optional_get_element(op: Op) -> str:
    return op.emit("OptionalGetElement", op["X"]) if isinstance(op.type_of("X"), OptionalType) else op["X"]
