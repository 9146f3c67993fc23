"""Attributes of operators: how their values are stored, and which values an attribute of a declared type takes."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import numpy as np

from .constants import Array, elements
from .errors import ProgramError
from .offsets import Offsets

_INTS = frozenset({int})
_EXACT = frozenset({int, str, Offsets})  # equal values of these kinds are the same value


@dataclass(frozen=True, slots=True)
class BlockRef:
    """An attribute that names a sub-block of the same program by its index."""

    idx: int

    def __repr__(self) -> str:
        return f"block {self.idx}"


def normalize_attr(value: Any) -> Any:
    """An attribute as it is stored: a bool, int, float, str, None, BlockRef, Array, or a tuple of those.

    >>> normalize_attr([np.float64(0.5), np.int32(2)])
    (0.5, 2)
    """
    if isinstance(value, (np.ndarray, np.generic)):  # before the builtins: NumPy's float64 is a float and writes itself otherwise
        return normalize_attr(value.tolist())
    if isinstance(value, enum.Enum):
        return normalize_attr(value.value)
    if isinstance(value, float) and value != value:
        return math.nan  # the one object, so that equal attributes compare equal
    if value is None or isinstance(value, (BlockRef, Array, Offsets)):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        return tuple(normalize_attr(v) for v in value)
    raise ProgramError(f"an attribute must be a bool, number, str, block, Array or a list of those, not {type(value).__name__}: {value!r}")


def attrs_key(attrs: Mapping[str, Any]) -> str:
    """Attributes as a dict key: their text. As values 1, 1.0 and True would be one key in Python, and so would 0.0 and -0.0.

    >>> attrs_key({"axis": 1}) == attrs_key({"axis": True})
    False
    """
    return repr(attrs)


class Frozen(dict):
    """A read-only dict. Operators share their dicts, so a change would show in others. `{**frozen, key: value}` is a changed copy.

    >>> attrs = Frozen(axis=0)
    >>> {**attrs, "axis": 1}, dict(attrs)
    ({'axis': 1}, {'axis': 0})
    """

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("operators are immutable; op.replace(attrs={**op.attrs, name: value}) gives a changed copy")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple:
        return Frozen, (dict(self),)


EMPTY = Frozen()


def frozen(given: Mapping[str, Any] | None) -> Frozen:
    return given if given.__class__ is Frozen else Frozen(given) if given else EMPTY


# -- values of a declared type ----------------------------------------------------------------------------------------------------


def is_exact(value: Any) -> bool:
    """Is no other value of the same class equal? (1,) equals (True,), 0.0 equals -0.0, and a subclass may define equality in its own
    way. Of tuples only those of ints are exact."""
    kind = value.__class__
    if kind is tuple:
        return _INTS.issuperset(map(type, value))
    return kind in _EXACT or kind is bool or kind is float and value == value and (value != 0.0 or math.copysign(1.0, value) > 0.0)


def stored(value: Any, want: Any) -> Any:
    """An attribute as it is stored. An array becomes an Array directly, without a list of its numbers."""
    return elements(value) if want is Array and isinstance(value, np.ndarray) else normalize_attr(value)


def fits(value: Any, want: Any) -> bool:
    """Can an attribute of the declared type `want` hold the value without a conversion?"""
    if want is Any or want is type(None):
        return True
    if value.__class__ is Offsets:
        return want is Offsets or want is tuple or want == tuple[int, ...]
    if (of := _element(want)) is not None:
        return isinstance(value, tuple) and all(fits(v, of) for v in value)
    if want is Array:
        return isinstance(value, (tuple, Array))
    return isinstance(value, want) and not (want is int and isinstance(value, bool))


def _element(want: Any) -> Any:
    """The element type of a declared tuple; None if `want` is not a tuple."""
    return int if want is tuple or want is Offsets else get_args(want)[0] if get_origin(want) is tuple else None


def coerce(op: str, name: str, value: Any, want: Any) -> Any:
    if fits(value, want):
        return Offsets.of(value) if want is Offsets else value
    if (of := _element(want)) is not None and isinstance(value, (tuple, int, float, str)):
        return tuple(coerce(op, f"{name}[{k}]", v, of) for k, v in enumerate(value if isinstance(value, tuple) else (value,)))
    if want is Array and isinstance(value, (int, float)):
        return (value,)
    if want is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if want is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if want is bool and isinstance(value, (int, np.bool_)) and value in (0, 1):
        return bool(value)
    if want is BlockRef and isinstance(value, int):
        return BlockRef(value)
    raise ProgramError(f"op {op}: attribute {name!r} must be {want.__name__}, got {type(value).__name__}: {value!r}")
