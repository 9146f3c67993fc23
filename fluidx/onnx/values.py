"""Values of a model: tensors as arrays, and what only the host can hold: sequences, maps, optionals and strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.dtypes import SHORT, TINY, np_dtype
from ..ir.errors import ProgramError
from .errors import OnnxError
from .limits import room

_HELD = {np_dtype(name) for name in SHORT if name not in (*TINY, "string")}

# A sequence is a list, a map a dict, an optional that holds nothing is ABSENT, strings are an array of objects; all else is an array.
Host = Any


class Absent:
    """An optional that holds nothing, fed or computed; an input that a node does not name is None."""

    def __repr__(self) -> str:
        return "absent"

    def __reduce__(self) -> str:
        return "ABSENT"  # there is one, also where values are copied


ABSENT = Absent()


class Weight:
    """A float initializer: known, and a parameter of the program where an operator computes with it."""

    def __init__(self, name: str, array: np.ndarray):
        self.name, self.array = name, array


class RuntimeValue:
    """What another run may have another value of, and no program holds; `value` is that of the run for which the program is written."""

    def __init__(self, value: Host):
        self.value = value


class Outputs(list):
    """Several outputs of a node; a plain list is one output that is a sequence."""


def as_outputs(result: Any) -> list[Any]:
    """The outputs that an import function returned, as a list."""
    return list(result) if isinstance(result, (tuple, Outputs)) else [result]


def each(value: Any, f: Callable[[Any], Any]) -> Any:
    """A value with `f` of what it holds: of each element where it is a sequence, however deep."""
    return [each(v, f) for v in value] if isinstance(value, list) else f(value)


def leaves(value: Any) -> list[Any]:
    """The elements of sequences, however deep; a value that is none alone."""
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]


def array_of(tensor: Any) -> np.ndarray:
    """The array of a TensorProto; strings as objects."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL:
        raise OnnxError(f"tensor {tensor.name!r} is stored in another file; load the model by its path")
    try:
        found = numpy_helper.to_array(tensor)
    except (KeyError, TypeError, ValueError) as e:
        said = f"its shape {list(tensor.dims)} and type {tensor.data_type}"
        raise OnnxError(f"tensor {tensor.name!r} does not hold what {said} say: {e}") from None
    return found.astype(object) if found.dtype.kind in "SU" else found


def dense_of(s: Any) -> np.ndarray:
    """The array of a SparseTensorProto."""
    values, indices = array_of(s.values), array_of(s.indices)
    try:
        out = np.zeros(room(s.dims, values.itemsize), values.dtype)
        if indices.ndim == 1:
            out.reshape(-1)[indices] = values
        else:
            out[tuple(indices.T)] = values
    except (IndexError, ProgramError, ValueError) as e:
        raise OnnxError(f"the sparse tensor {s.values.name!r} of shape {list(s.dims)} does not hold what it says: {e}") from None
    return out


def numpy_dtype(code: int) -> np.dtype:
    """The NumPy dtype of a TensorProto.DataType; strings are objects. Raises ProgramError for a number of none."""
    from onnx import TensorProto, helper

    if code not in TensorProto.DataType.values() or code == TensorProto.UNDEFINED:
        raise ProgramError(f"there is no tensor type {code}; they go from 1 to {max(TensorProto.DataType.values())}")
    return np.dtype(object) if code == TensorProto.STRING else np.dtype(helper.tensor_dtype_to_np_dtype(code))


def dtype_code(dtype: np.dtype) -> int:
    """The TensorProto.DataType of a NumPy dtype."""
    from onnx import TensorProto, helper

    return TensorProto.STRING if dtype.kind in "OSU" else helper.np_dtype_to_tensor_dtype(dtype)


def in_float(number: Any) -> bool:
    """Is it the same number in 64 bits of a float, which operators that fill are told? Integers beyond 2^53 may not be.

    >>> in_float(np.int64(2**53)), in_float(np.int64(2**53 + 1)), in_float(np.float32(0.1))
    (True, False, True)
    """
    return number.dtype.kind not in "iu" or int(float(number)) == int(number)


def in_programs(value: Any) -> bool:
    """Does a plan compute with it? Others stay on the host: sequences, optionals, strings, dtypes that have no arithmetic."""
    return isinstance(value, np.ndarray) and value.dtype in _HELD


def are_texts(value: Any) -> bool:
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
