"""Types of values other than tensors of a known rank: sequences, optionals, maps, and tensors whose rank the feed decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from .dtypes import FLOATS, FULL, INTS, SHORT, dtype_name
from .errors import ProgramError, nearest
from .types import ANY, Dim, TensorType, is_word

MAX_NESTING = 32  # of types in types
MAX_SIZE = (1 << 63) - 1  # of one axis
KEYS = ("string", *INTS)  # dtypes of keys of a map
A_TYPE = "a type such as f32[-1,10], f32[*] of any rank, seq<f32[4]>, opt<f32[4]> or map<i64,f32[]>"
_SIZES = f"sizes of 0 to {MAX_SIZE}, or a name or -1 for an open axis, or * alone for any number of axes"


class _NoTensor:
    """Base of the types without a shape: an access to the shape raises an error with a hint."""

    __slots__ = ()
    kind: ClassVar[str]
    next_step: ClassVar[str]

    def _none(self, what: str) -> NoReturn:
        raise ProgramError(f"{self!r} has no {what}; {self.next_step}")

    @property
    def shape(self) -> tuple[int, ...]:
        self._none("shape")

    @property
    def ndim(self) -> int:
        self._none("number of axes")

    @property
    def numel(self) -> int:
        self._none("number of elements")

    @property
    def nbytes(self) -> int:
        self._none("size in bytes")

    @property
    def dtype(self) -> str:
        self._none("dtype")


@dataclass(frozen=True, slots=True)
class SequenceType(_NoTensor):
    """A list of values of one type. Its gradient is a sequence of gradients.

    >>> SequenceType(TensorType("float32", (Dim("n"), 4)))
    seq<f32[n,4]>
    """

    elem: ValueType
    kind: ClassVar[str] = "sequence"
    next_step: ClassVar[str] = "take an element of it, with sequence_at, or join them, with concat_from_sequence"

    @property
    def is_float(self) -> bool:
        return self.elem.is_float

    def accepts(self, other: Any) -> bool:
        return other.__class__ is SequenceType and self.elem.accepts(other.elem)

    def says(self, other: Any) -> bool:
        return other.__class__ is SequenceType and self.elem.says(other.elem)

    def __repr__(self) -> str:
        return f"seq<{self.elem}>"


@dataclass(frozen=True, slots=True)
class OptionalType(_NoTensor):
    """A value of a type, or nothing, which is None.

    >>> OptionalType(SequenceType(TensorType("int64", ())))
    opt<seq<i64[]>>
    """

    elem: ValueType
    kind: ClassVar[str] = "optional"
    next_step: ClassVar[str] = "take what it holds, with optional_get_element"

    @property
    def is_float(self) -> bool:
        return self.elem.is_float

    def accepts(self, other: Any) -> bool:
        return other.__class__ is OptionalType and self.elem.accepts(other.elem)

    def says(self, other: Any) -> bool:
        return other.__class__ is OptionalType and self.elem.says(other.elem)

    def __repr__(self) -> str:
        return f"opt<{self.elem}>"


@dataclass(frozen=True, slots=True)
class MapType(_NoTensor):
    """A dict, keys being integers or strings of one dtype, and values of one type.

    >>> MapType("int64", TensorType("float32", ()))
    map<i64,f32[]>
    """

    key: str
    value: ValueType
    kind: ClassVar[str] = "map"
    next_step: ClassVar[str] = "make a tensor of it, with dict_vectorizer or cast_map"

    def __post_init__(self) -> None:
        if self.key not in KEYS:
            raise ProgramError(f"the keys of a map are strings or integers, found {self.key!r}; {nearest(self.key, KEYS, 'they may be')}")

    @property
    def is_float(self) -> bool:
        return False

    def accepts(self, other: Any) -> bool:
        return other.__class__ is MapType and self.key == other.key and self.value.accepts(other.value)

    def says(self, other: Any) -> bool:
        return other.__class__ is MapType and self.key == other.key and self.value.says(other.value)

    def __repr__(self) -> str:
        return f"map<{SHORT[self.key]},{self.value}>"


@dataclass(frozen=True, slots=True)
class AnyRankType(_NoTensor):
    """A tensor of a dtype whose number of axes the feed decides.

    >>> AnyRankType("float32")
    f32[*]
    """

    dtype: str  # only the dtype is known
    kind: ClassVar[str] = "tensor of any rank"
    next_step: ClassVar[str] = "how many axes it has is known when it is fed: declare as many, -1 for sizes that are open"

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def accepts(self, other: Any) -> bool:
        return other.__class__ in (AnyRankType, TensorType) and self.dtype == other.dtype

    def says(self, other: Any) -> bool:
        return self == other

    def with_dtype(self, dtype: str) -> AnyRankType:
        return AnyRankType(dtype)

    def __repr__(self) -> str:
        return f"{SHORT.get(self.dtype, self.dtype)}[*]"


ValueType = TensorType | SequenceType | OptionalType | MapType | AnyRankType
_ELEMENTS: dict[str, type[SequenceType] | type[OptionalType]] = {"seq": SequenceType, "opt": OptionalType}


def kind_of(t: Any) -> str:
    """What a value of a type is where it is no dense tensor of numbers: "sequence", "optional", "map", "string" or "tensor of any rank"; ""
    where it is one."""
    if isinstance(t, (TensorType, AnyRankType)) and t.dtype == "string":
        return "string"
    return "" if isinstance(t, TensorType) else t.kind


def is_ranked(*types: Any) -> bool:
    """Are all types those of tensors with known numbers of axes?"""
    return all(t.__class__ is TensorType for t in types)


def on_host(t: Any) -> bool:
    """Do values of a type exist on the host only?"""
    return t.__class__ is not TensorType and t.__class__ is not AnyRankType or t.dtype == "string"


def as_type(given: Any) -> ValueType:
    """A type, or the type that a text describes. Raises ProgramError for anything else."""
    if isinstance(given, str):
        try:
            return read_type(given)
        except ProgramError as e:
            raise ProgramError(f"expected {e}, found {given!r}") from None
    if not isinstance(given, ValueType):
        raise ProgramError(f"expected {A_TYPE}, found {type(given).__name__}: {given!r}")
    return given


def common_type(a: ValueType, b: ValueType) -> ValueType:
    """The most specific type that accepts values of both types. Raises ProgramError if there is none.

    >>> common_type(TensorType("float32", (2, 3)), TensorType("float32", (2, 4)))
    f32[2,-1]
    >>> common_type(TensorType("float32", (2,)), TensorType("float32", ()))
    f32[*]
    >>> common_type(as_type("seq<f32[2]>"), as_type("seq<f32[*]>"))
    seq<f32[*]>
    """
    if a.__class__ is TensorType and b.__class__ is TensorType and a.dtype == b.dtype:
        if len(a.shape) == len(b.shape):
            return a if a == b and a.says(b) else a.with_shape(x if x == y and x != ANY else ANY for x, y in zip(a.shape, b.shape))
        return AnyRankType(a.dtype)
    if isinstance(a, (TensorType, AnyRankType)) and isinstance(b, (TensorType, AnyRankType)) and a.dtype == b.dtype:
        return AnyRankType(a.dtype)
    if a.__class__ is b.__class__ and a.__class__ in (SequenceType, OptionalType):
        return a.__class__(common_type(a.elem, b.elem))  # type: ignore[union-attr]
    if a.accepts(b):
        return a
    if b.accepts(a):
        return b
    raise ProgramError(f"no type holds both {a} and {b}; cast, or convert one of them")


# -- text -------------------------------------------------------------------------------------------------------------------------


def read_type(text: str, depth: int = 0) -> ValueType:
    """Parse the text of a type. Raises ProgramError that lists what is possible.

    >>> read_type("seq<map<str,f32[n,4]>>")
    seq<map<str,f32[n,4]>>
    """
    text = text.strip()
    if depth > MAX_NESTING:
        raise ProgramError(f"a type that is nested {MAX_NESTING} deep at most")
    if text.endswith("]"):
        return _read_tensor(text)
    word, opened, inner = text.partition("<")
    if opened and text.endswith(">"):
        inner = inner[:-1]
        if (made := _ELEMENTS.get(word.strip())) is not None:
            return made(read_type(inner, depth + 1))
        if word.strip() == "map":
            key, comma, value = inner.partition(",")
            if not comma or FULL.get(key.strip(), key.strip()) not in KEYS:
                raise ProgramError(f"the dtype of keys ({', '.join(SHORT[k] for k in KEYS)}), a comma and the type of values in map<>")
            return MapType(FULL.get(key.strip(), key.strip()), read_type(value, depth + 1))
    raise ProgramError(A_TYPE)


def _read_tensor(text: str) -> ValueType:
    short, opened, sizes = text[:-1].partition("[")
    dtype = FULL.get(short, short)
    if not opened or dtype not in SHORT:
        raise ProgramError(A_TYPE)
    if sizes.strip() == "*":
        return AnyRankType(dtype)
    return TensorType(dtype, tuple([_read_size(s.strip()) for s in sizes.split(",")] if sizes.strip() else ()))


def _read_size(digits: str) -> int:
    if digits == "-1":
        return ANY
    if digits.isascii() and digits.isdigit() and len(digits) <= 19 and int(digits) <= MAX_SIZE:
        return int(digits)
    if is_word(digits):
        return Dim(digits)
    raise ProgramError(_SIZES)


# -- values -----------------------------------------------------------------------------------------------------------------------


def unlike(value: Any, t: ValueType, where: str = "") -> str:
    """Why a value does not have a type; "" if it does. `where` names the part of the value in the message.

    >>> unlike([np.zeros(3)], SequenceType(TensorType("float32", (3,))))
    'element 0 is f64[3], expected f32[3]'
    """
    if t.__class__ is OptionalType:
        return "" if value is None else unlike(value, t.elem, where)
    if t.__class__ is SequenceType:
        if not isinstance(value, list):
            return _found(value, "a list", where)
        return next((why for k, v in enumerate(value) if (why := unlike(v, t.elem, f"{where}element {k} "))), "")
    if t.__class__ is MapType:
        if not isinstance(value, dict):
            return _found(value, "a dict", where)
        wanted: Any = str if t.key == "string" else (int, np.integer)
        odd = next((k for k in value if not isinstance(k, wanted) or isinstance(k, bool)), None)
        if odd is not None:
            return _found(odd, SHORT[t.key], f"{where}a key ")
        return next((why for k, v in value.items() if (why := unlike(v, t.value, f"{where}the value of {k!r} "))), "")
    if not isinstance(value, (np.ndarray, np.generic)):
        plain = t.__class__ is TensorType and t.shape == () and _plain(value, t.dtype)  # a number or text without axes
        return "" if plain else _found(value, f"an array, {t}", where)
    have = TensorType(dtype_name(value.dtype), value.shape)
    if not t.accepts(have):
        return _found(have, str(t), where)
    if t.dtype == "string" and (odd := next((v for v in np.asarray(value).flat if not isinstance(v, str)), None)) is not None:
        return _found(odd, "str in an array of objects", f"{where}an element ")
    return ""


def _plain(value: Any, dtype: str) -> bool:
    kinds: Any = str if dtype == "string" else bool if dtype == "bool" else float if dtype in FLOATS else int
    return isinstance(value, kinds) and (dtype == "bool" or not isinstance(value, bool))


def _found(value: Any, expected: str, where: str) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        value = TensorType(dtype_name(value.dtype), value.shape)
    said = str(value) if isinstance(value, TensorType) else "None" if value is None else f"{type(value).__name__} {value!r:.40}"
    return f"{where.strip() or 'it'} is {said}, expected {expected}"


def tensors(value: Any, t: ValueType) -> Iterator[tuple[TensorType, np.ndarray]]:
    """The arrays in a value, each with its type; none for a tensor of unknown rank."""
    if t.__class__ is TensorType:
        if isinstance(value, np.ndarray):
            yield t, value
    elif t.__class__ is SequenceType:
        for v in value:
            yield from tensors(v, t.elem)
    elif t.__class__ is OptionalType:
        if value is not None:
            yield from tensors(value, t.elem)
    elif t.__class__ is MapType:
        for v in value.values():
            yield from tensors(v, t.value)


def known_bytes(t: ValueType) -> int:
    """The known bytes of a value of a type: of a tensor with open axes counted as 1; 0 for other values.

    >>> known_bytes(TensorType("float32", (-1, 4))), known_bytes(SequenceType(TensorType("float32", (4,))))
    (16, 0)
    """
    return t.nbytes if t.__class__ is TensorType else 0
