"""Types of values: dtype and shape. The entries of placements, which say how ranks share a value, can be imported from here too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from .dtypes import FLOATS, SHORT, np_dtype
from .entries import REPLICATE, At, Entry, Local, Own, Partial, Pieces, Placement, Shard, show_placement
from .errors import ProgramError

__all__ = [
    "ANY", "REPLICATE", "WORD", "At", "Dim", "Entry", "Local", "Own", "Partial", "Pieces", "Placement", "Shard", "TensorType",
    "common_size", "equal_size", "is_word", "show_placement", "size_names",
]  # fmt: skip

ANY = -1  # an axis whose size is known when the program is fed, usually the batch
WORD = r"[A-Za-z_][A-Za-z0-9_.\-]*"  # a name that text writes without quotes
_word = re.compile(WORD)


def is_word(text: str) -> bool:
    """Can text write a name without quotes?"""
    return _word.fullmatch(text) is not None


class Dim(int):
    """An open axis with a name. It compares equal to ANY. All axes with one name have one size in a run.

    Two names may stand for equal sizes, so == does not compare names; `common_size` does. Arithmetic such as `n + 1` gives a number without
    a name. Raises ProgramError for a name that text cannot write.

    >>> batch = Dim("batch")
    >>> batch == ANY, TensorType("float32", (batch, 4))
    (True, f32[batch,4])
    """

    name: str

    def __new__(cls, name: str) -> Dim:
        if not isinstance(name, str) or not is_word(name):
            raise ProgramError(f"an axis cannot be called {name!r}; a name has letters, digits and _ . -, and begins with a letter or _")
        made = super().__new__(cls, ANY)
        made.name = name
        return made

    def __reduce__(self) -> tuple:
        return Dim, (self.name,)

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)


def size_names(shape: Iterable[int]) -> tuple[str | None, ...]:
    """The name of each axis, None for an axis without a name; () if no axis has a name.

    >>> size_names((Dim("n"), 4)), size_names((-1, 4))
    (('n', None), ())
    """
    names = tuple([d.name if d.__class__ is Dim else None for d in shape])
    return names if any(names) else ()


def common_size(a: int, b: int) -> int:
    """The common size of two axes, or -1 if they may differ.

    >>> common_size(Dim("n"), Dim("n")), common_size(Dim("n"), Dim("m")), common_size(3, 4)
    (n, -1, -1)
    """
    return a if a == b and (a != ANY or size_names((a,)) == size_names((b,))) else ANY


def equal_size(a: int, b: int) -> int:
    """The size of two axes known to be equal: a number if either has one, otherwise a name.

    >>> equal_size(-1, Dim("n")), equal_size(Dim("n"), 4)
    (n, 4)
    """
    return max(a, b) if a != b else a if a.__class__ is Dim else b


@dataclass(frozen=True, slots=True)
class TensorType:
    """The dtype and shape of a value; -1, or a name (Dim), is an axis whose size the feed decides.

    >>> TensorType("float32", (-1, 10))
    f32[-1,10]
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements, or -1 when an axis is open."""
        return ANY if ANY in self.shape else prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the value, an open axis counted as 1."""
        return abs(prod(self.shape)) * np_dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def with_shape(self, shape: Iterable[int]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: str) -> TensorType:
        return TensorType(dtype, self.shape)

    def accepts(self, other: Any) -> bool:
        """True when a value of type `other` can stand where this type is declared (open axes match any size)."""
        if other.__class__ is not TensorType:
            return other.accepts(self)  # a tensor of any rank may accept it
        mine, theirs = self.shape, other.shape
        if self.dtype != other.dtype or len(mine) != len(theirs):
            return False
        return mine == theirs or all(a == b or a == ANY or b == ANY for a, b in zip(mine, theirs, strict=True))

    def says(self, other: Any) -> bool:
        """True when the two types are equal and their axes have the same names, which == ignores."""
        return self is other or self == other and other.__class__ is TensorType and size_names(self.shape) == size_names(other.shape)

    def __repr__(self) -> str:
        return f"{SHORT.get(self.dtype, self.dtype)}[{','.join(map(str, self.shape))}]"
