"""Values of a model: arrays for tensors; and sequences, maps, optionals and strings, which only the host can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.dtypes import SHORT, TINY, np_dtype
from ..ir.errors import ProgramError
from .errors import OnnxError
from .limits import checked_shape
from .mapped_tensors import is_mapped, mapped_array

_PROGRAM_DTYPES = {np_dtype(name) for name in SHORT if name not in (*TINY, "string")}

# A sequence is a list, a map is a dict, an empty optional is ABSENT, strings are an array of objects, and every other value is an array.
Host = Any


class Absent:
    """An empty optional, fed or computed. An input that a node leaves out is None instead."""

    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:
        return "ABSENT"  # copies of values keep the one instance


ABSENT = Absent()


class Weight:
    """A float initializer. Its array is known, and it becomes a parameter of the program if an operator reads it."""

    def __init__(self, name: str, array: np.ndarray):
        self.name, self.array = name, array


class FrozenPart:
    """A part of a quantized weight, by the name that the model gives it: a parameter of the program that is not trained."""

    def __init__(self, name: str, array: np.ndarray):
        self.name, self.array = name, array


class RuntimeValue:
    """A value that may differ in another run and that no program can hold. `value` is that of the run that the program is written for."""

    def __init__(self, value: Host):
        self.value = value


class Outputs(list):
    """Several outputs of a node; a plain list is one output that is a sequence."""


def as_outputs(result: Any) -> list[Any]:
    """The outputs that an import function returned, as a list."""
    return list(result) if isinstance(result, (tuple, Outputs)) else [result]


def map_leaves(value: Any, f: Callable[[Any], Any]) -> Any:
    """The value with `f` applied to it, or for a sequence, however deep, to each of its elements."""
    return [map_leaves(v, f) for v in value] if isinstance(value, list) else f(value)


def leaves(value: Any) -> list[Any]:
    """The elements of a sequence, however deep; another value alone in a list."""
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]


def array_of(tensor: Any) -> np.ndarray:
    """The array of a TensorProto. Strings become objects."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL:
        if is_mapped(tensor):
            return mapped_array(tensor, numpy_dtype(tensor.data_type))
        raise OnnxError(f"tensor {tensor.name!r} is stored in another file; load the model by its path")
    try:
        found = numpy_helper.to_array(tensor)
    except (KeyError, TypeError, ValueError) as e:
        said = f"its shape {list(tensor.dims)} and type {tensor.data_type}"
        raise OnnxError(f"tensor {tensor.name!r} does not match {said}: {e}") from None
    return found.astype(object) if found.dtype.kind in "SU" else found


def dense_of(s: Any) -> np.ndarray:
    """The array of a SparseTensorProto."""
    values, indices = array_of(s.values), array_of(s.indices)
    try:
        out = np.zeros(checked_shape(s.dims, values.itemsize), values.dtype)
        if indices.ndim == 1:
            out.reshape(-1)[indices] = values
        else:
            out[tuple(indices.T)] = values
    except (IndexError, ProgramError, ValueError) as e:
        raise OnnxError(f"the sparse tensor {s.values.name!r} of shape {list(s.dims)} has inconsistent data: {e}") from None
    return out


def numpy_dtype(code: int) -> np.dtype:
    """The NumPy dtype of a TensorProto.DataType; strings are objects. Raises ProgramError for an unknown code."""
    from onnx import TensorProto, helper

    if code not in TensorProto.DataType.values() or code == TensorProto.UNDEFINED:
        raise ProgramError(f"there is no tensor type {code}; they go from 1 to {max(TensorProto.DataType.values())}")
    return np.dtype(object) if code == TensorProto.STRING else np.dtype(helper.tensor_dtype_to_np_dtype(code))


def dtype_code(dtype: np.dtype) -> int:
    """The TensorProto.DataType of a NumPy dtype."""
    from onnx import TensorProto, helper

    return TensorProto.STRING if dtype.kind in "OSU" else helper.np_dtype_to_tensor_dtype(dtype)


def in_float(number: Any) -> bool:
    """Does a 64-bit float hold the number exactly? Fill operators take their number as one; integers beyond 2^53 may not fit.

    >>> in_float(np.int64(2**53)), in_float(np.int64(2**53 + 1)), in_float(np.float32(0.1))
    (True, False, True)
    """
    return number.dtype.kind not in "iu" or int(float(number)) == int(number)


def fits_program(value: Any) -> bool:
    """Can a plan compute with the value? Sequences, optionals, strings, and dtypes without arithmetic stay on the host."""
    return isinstance(value, np.ndarray) and value.dtype in _PROGRAM_DTYPES


def is_string_array(value: Any) -> bool:
    """Is it an array of strings?"""
    return isinstance(value, np.ndarray) and value.dtype.kind == "O"


def type_proto(value: Host) -> Any:
    """The TypeProto of a value on the host."""
    from onnx import helper

    if isinstance(value, list):
        inner = type_proto(value[0]) if value else helper.make_tensor_type_proto(1, None)
        return helper.make_sequence_type_proto(inner)
    if isinstance(value, np.ndarray):
        return helper.make_tensor_type_proto(dtype_code(value.dtype), list(value.shape))
    return helper.make_optional_type_proto(helper.make_tensor_type_proto(1, None))
