"""Conversion between TypeProto of ONNX and types of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..ir.dtypes import as_dtype, np_dtype
from ..ir.types import ANY, Dim, TensorType, is_word
from ..ir.valuetypes import MAX_NESTING, AnyRankType, MapType, OptionalType, SequenceType, ValueType
from .errors import OnnxError
from .values import dtype_code, numpy_dtype


def value_type(declared: Any, named: bool = False, depth: int = 0) -> ValueType:
    """The type that a TypeProto declares. Raises OnnxError if it has no type or is a sparse tensor.

    Open axes keep their names only if `named`: most files use one name in all elements of a sequence, although the sizes differ.
    """
    kind = declared.WhichOneof("value")
    if depth > MAX_NESTING:
        raise OnnxError(f"its type has more levels than {MAX_NESTING}")
    if kind == "tensor_type":
        t = declared.tensor_type
        if not t.HasField("shape"):
            return AnyRankType(dtype_of(t.elem_type))
        return TensorType(dtype_of(t.elem_type), tuple(_size(d, named) for d in t.shape.dim))
    if kind == "sequence_type":
        return SequenceType(value_type(declared.sequence_type.elem_type, named, depth + 1))
    if kind == "optional_type":
        return OptionalType(value_type(declared.optional_type.elem_type, named, depth + 1))
    if kind == "map_type":
        return MapType(dtype_of(declared.map_type.key_type), value_type(declared.map_type.value_type, named, depth + 1))
    raise OnnxError(f"it is {'a sparse tensor' if kind else 'of no type'}; a program is fed with tensors, sequences, optionals and maps")


def _size(d: Any, named: bool) -> int:
    if d.HasField("dim_value"):
        return d.dim_value if d.dim_value >= 0 else ANY
    return Dim(d.dim_param) if named and is_word(d.dim_param) else ANY


def dtype_of(code: int) -> str:
    """The dtype of a TensorProto.DataType. Raises OnnxError for an unknown code."""
    try:
        return as_dtype(numpy_dtype(code))
    except (KeyError, TypeError, ValueError):
        raise OnnxError(f"it has ONNX dtype {code}, which programs do not support") from None


def open_sizes(t: TensorType) -> list[Any]:
    """The sizes of a tensor for ONNX: open ones are None or a name."""
    return [d if d != ANY else d.name if isinstance(d, Dim) else None for d in t.shape]


def type_proto_of(t: ValueType, sizes: Callable[[TensorType], Iterable[Any]]) -> Any:
    """The TypeProto that declares a type. `sizes` returns the sizes of a tensor; open ones are None or a name."""
    from onnx import helper

    if isinstance(t, SequenceType):
        return helper.make_sequence_type_proto(type_proto_of(t.elem, sizes))
    if isinstance(t, OptionalType):
        return helper.make_optional_type_proto(type_proto_of(t.elem, sizes))
    if isinstance(t, MapType):
        return helper.make_map_type_proto(dtype_code(np_dtype(t.key)), type_proto_of(t.value, sizes))
    return helper.make_tensor_type_proto(dtype_code(np_dtype(t.dtype)), None if isinstance(t, AnyRankType) else list(sizes(t)))
