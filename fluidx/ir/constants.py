"""Arrays as attributes. Program text lists the elements of a small array and names a large one by digest; the array is kept beside it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .dtypes import TINY, as_dtype, is_float, np_dtype
from .errors import ProgramError
from .mapped_file import FileRange, MappedFile, owner
from .types import TensorType

FEW = 64  # an array of at most so many elements is written out in text
_digest_re = re.compile("sha256:[0-9a-f]{64}")


class Array:
    """A read-only array with a digest of its contents. Arrays with equal digests are equal.

    It copies the given array, except for bytes, files and arrays that their owner marked as not writeable.

    >>> a = Array(np.arange(3), "int32")
    >>> a.type, a.digest[:12], a == Array(a.values.copy()), a == Array(a.values, "int64")
    (i32[3], 'sha256:e790b', True, False)
    """

    __slots__ = ("_digest", "_values")

    def __init__(self, values: Any, dtype: Any = None):
        given = np.asarray(values)
        kind = np_dtype(as_dtype(given.dtype if dtype is None else dtype))
        if kind.kind == "O":
            raise ProgramError("an array that a program holds has numbers; strings are a list of them, as attributes of op fill_string")
        self._values = given.astype(kind, order="C", copy=not _settled(given))
        self._values.setflags(write=False)
        self._digest = ""

    @classmethod
    def trusted(cls, values: np.ndarray, digest: str) -> Array:
        """An array whose digest is known to be right, because this program computed it. The array is not copied."""
        self = cls.__new__(cls)
        values.setflags(write=False)
        self._values, self._digest = values, digest
        return self

    @property
    def values(self) -> np.ndarray:
        return self._values

    @property
    def in_file(self) -> FileRange | None:
        """The place in a file from which the values are read; None if they are in memory."""
        return FileRange.of(self._values)

    @property
    def type(self) -> TensorType:
        return TensorType(as_dtype(self._values.dtype), self._values.shape)

    @property
    def digest(self) -> str:
        """The SHA-256 of the text of the type, a line end and the bytes of the elements; computed at the first use."""
        if not self._digest:
            found = hashlib.sha256(f"{self.type}\n".encode())
            place = self.in_file
            for block in [self._values.reshape(-1).view(np.uint8)] if place is None else place.blocks():
                found.update(block.data)
            self._digest = f"sha256:{found.hexdigest()}"
        return self._digest

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values.astype(dtype or self._values.dtype, copy=bool(copy))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Array) and self.type == other.type and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f'array("{self.digest}", {self.type})'

    def __copy__(self) -> Array:
        return self

    def __deepcopy__(self, memo: Any) -> Array:
        return self

    def __reduce__(self) -> tuple:
        return Array, (self._values,)


def _settled(array: Any) -> bool:
    """Is the memory of an array read-only for everybody?"""
    while isinstance(array, np.ndarray) and isinstance(array.base, np.ndarray):
        if array.flags.writeable:
            return False
        array = array.base
    return not array.flags.writeable and (array.base is None or isinstance(owner(array), (bytes, MappedFile)))


def elements(values: np.ndarray, dtype: Any = None) -> tuple | Array:
    """The elements of an array as an attribute: a tuple of numbers if they are few, otherwise an Array of that dtype.

    >>> elements(np.eye(2), "float32"), elements(np.ones((30, 3)), "float32").type
    ((1.0, 0.0, 0.0, 1.0), f32[30,3])
    """
    name = as_dtype(values.dtype if dtype is None else dtype)
    if values.size > FEW:
        return Array(values, name)
    plain = name if name not in TINY else "float64" if "float" in name else "int64"
    return tuple(values.astype("float64" if is_float(name) else plain).ravel().tolist())


class Given:
    """The arrays, by digest, that a caller passes to the reader of a program. Each one that the program names is checked once."""

    def __init__(self, arrays: Mapping[str, Any] | None):
        self._arrays = arrays or {}
        self._taken: dict[str, Array] = {}

    def array(self, digest: str, type_: TensorType) -> Array:
        """The array with this digest. Raises ProgramError if it is missing or its contents have another digest."""
        found = self._taken.get(digest)
        if found is None:
            if not is_digest(digest):
                raise ProgramError(f'{digest!r} is no digest of an array, "sha256:" and 64 digits from 0 to f')
            if digest not in self._arrays:
                raise ProgramError(
                    f"constant {digest} of {type_} is missing. It is in the file written next to the program, named as the program with "
                    ".constants.safetensors: put it there, or pass constants=fx.io.load_constants(FILE)"
                )
            given = self._arrays[digest]
            found = self._taken[digest] = given if isinstance(given, Array) else Array(given)
        if (found.digest, found.type) != (digest, type_):
            raise ProgramError(f"constant {digest} of {type_} does not match the array given for it, which is {found}")
        return found


def is_digest(name: str) -> bool:
    """Does a text have the form of `Array.digest`?"""
    return _digest_re.fullmatch(name) is not None


def arrays_in(values: Iterable[Any]) -> Iterator[Array]:
    """The arrays among attribute values, also inside lists."""
    for v in values:
        if isinstance(v, Array):
            yield v
        elif isinstance(v, tuple):
            yield from arrays_in(v)
