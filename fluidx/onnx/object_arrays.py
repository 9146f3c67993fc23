"""Arrays of arrays that np.save wrote: NumPy stores them as pickles, which may run any code when they are loaded. Here none runs: the
pickle may name arrays and types only, in place of which classes of this module are made, and NumPy makes arrays of their bytes
afterwards."""

from __future__ import annotations

import pickle
from typing import IO, Any

import numpy as np

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class _SavedType:
    """The dtype of an array in the file."""

    def __init__(self, name: str, *rest: Any):
        self.name, self.order = name, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype:
        order: Any = self.order if self.order in ("<", ">") else "="
        found = np.dtype(self.name).newbyteorder(order)
        if found.kind not in "biufUO":
            raise pickle.UnpicklingError(f"it has elements of type {self.name}; expected numbers, text or arrays")
        return found


class _SavedArray:
    """An array in the file."""

    def __init__(self, *rest: Any):
        self.state: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        _, shape, kind, by_columns, data = self.state
        dtype = kind.dtype()
        if dtype.kind == "O":
            made = np.empty(len(data), object)
            for k, v in enumerate(data):
                made[k] = v.array() if isinstance(v, _SavedArray) else v
        else:
            made = np.frombuffer(data, dtype)
        return made.reshape(shape, order="F" if by_columns else "C")


class _SavedClass:
    """Stands for the class ndarray, which an array in the file names."""


_NAMED = {
    ("numpy", "ndarray"): _SavedClass, ("numpy", "dtype"): _SavedType,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _SavedArray for core in ("core", "_core")},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMED:
            raise pickle.UnpicklingError(f"its pickle names {module}.{name}; only arrays of numbers and text, and lists of them, are read")
        return _NAMED[module, name]


def read_object_array(stream: IO[bytes]) -> np.ndarray:
    """The array of objects in a stream, which np.save wrote: its elements are arrays, lists, numbers and text. Raises an error of any type
    for other content.

    >>> from io import BytesIO
    >>> stream = BytesIO()
    >>> np.save(stream, np.array([np.array([1, 2]), [3]], object))
    >>> _ = stream.seek(0)
    >>> read_object_array(stream)
    array([array([1, 2]), list([3])], dtype=object)
    """
    version = np.lib.format.read_magic(stream)
    _HEADERS[version](stream)
    found = _Unpickler(stream).load()
    if not isinstance(found, _SavedArray):
        raise pickle.UnpicklingError(f"its pickle is a {type(found).__name__}, not an array")
    return found.array()
