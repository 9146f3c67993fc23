"""Ops on tensors of strings, which are arrays of objects on the host."""

from __future__ import annotations

from math import prod

import numpy as np

from ...ir.dtypes import SHORT, np_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Control
from ...ir.opdef import OpDef, Required
from ...ir.types import ANY, TensorType
from ..shared.broadcast import broadcast_sizes
from ..shared.low_bit import converted
from ..shared.texts import CASES, compiled, concatenated, matched, normalized, parsed, split, texts, written

_STRINGS = ("string",)


def _need_strings(op: str, **types: TensorType) -> None:
    for slot, t in types.items():
        if t.dtype != "string":
            raise ProgramError(f"op {op}: {slot} must be strings, found {t}")


class FillString(OpDef):
    """The strings `values`, in their order, with the given shape."""

    name = "fill_string"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=_STRINGS)
    attrs = {"shape": Required(tuple), "values": Required(tuple[str, ...])}

    @staticmethod
    def infer(*, shape, values):
        if prod(shape) != len(values) or min(shape, default=0) < 0:
            raise ProgramError(f"op fill_string: shape {list(shape)} does not have {len(values)} elements")
        return TensorType("string", shape)

    @staticmethod
    def kernel(xp, *, shape, values):
        return texts(shape, values)


class StringCast(OpDef):
    """X as `dtype`: strings parsed as numbers, or numbers written as strings. Numbers that are not finite are NaN, INF and -INF."""

    name = "string_cast"
    control = Control(beyond_tensors=_STRINGS)
    inputs = ("X",)
    attrs = {"dtype": Required(str)}

    @staticmethod
    def infer(x, *, dtype):
        if dtype not in SHORT or (x.dtype == "string") is (dtype == "string"):
            raise ProgramError(f"op string_cast: X or dtype must be strings, but not both, found {x} and {dtype!r}; cast is for numbers")
        return x.with_dtype(dtype)

    @staticmethod
    def kernel(xp, x, *, dtype):
        return written(x) if dtype == "string" else converted(parsed(x, np_dtype(dtype)), np_dtype(dtype))


class StringEqual(OpDef):
    """True where the strings of X and Y, which broadcast, are equal."""

    name = "string_equal"
    control = Control(beyond_tensors=_STRINGS)
    inputs = ("X", "Y")

    @staticmethod
    def infer(x, y):
        _need_strings("string_equal", X=x, Y=y)
        return TensorType("bool", broadcast_sizes("string_equal", x.shape, y.shape))

    @staticmethod
    def kernel(xp, x, y):
        return np.asarray(x == y, bool)


class StringConcat(OpDef):
    """Each string of X followed by the string of Y; X and Y broadcast."""

    name = "string_concat"
    control = Control(beyond_tensors=_STRINGS)
    inputs = ("X", "Y")

    @staticmethod
    def infer(x, y):
        _need_strings("string_concat", X=x, Y=y)
        return TensorType("string", broadcast_sizes("string_concat", x.shape, y.shape))

    @staticmethod
    def kernel(xp, x, y):
        return concatenated(x, y)


class StringSplit(OpDef):
    """The parts of each string of X along a new last axis, padded with "", and the number of parts of each string.

    Without a `delimiter` strings are split at whitespace. After `maxsplit` cuts, if that is not -1, the rest is one part.
    """

    name = "string_split"
    control = Control(beyond_tensors=_STRINGS)
    inputs, outputs = ("X",), ("Out", "Count")
    attrs = {"delimiter": "", "maxsplit": -1}

    @staticmethod
    def infer(x, *, delimiter, maxsplit):
        _need_strings("string_split", X=x)
        return x.with_shape((*x.shape, ANY)), x.with_dtype("int64")

    @staticmethod
    def kernel(xp, x, *, delimiter, maxsplit):
        return split(x, delimiter, maxsplit)


class StringNormalizer(OpDef):
    """The strings of X, [C] or [1, C], without `stopwords`, in lower or upper case if `case` is set; "" if none remains."""

    name = "string_normalizer"
    control = Control(beyond_tensors=_STRINGS)
    inputs = ("X",)
    attrs = {"case": "NONE", "case_sensitive": False, "stopwords": Required(tuple[str, ...])}

    @staticmethod
    def infer(x, *, case, case_sensitive, stopwords):
        _need_strings("string_normalizer", X=x)
        if x.ndim not in (1, 2) or x.ndim == 2 and x.shape[0] not in (1, ANY):
            raise ProgramError(f"op string_normalizer: X must be [C] or [1, C], found {x}")
        if case not in CASES:
            raise ProgramError(f"op string_normalizer: case must be one of {', '.join(CASES)}, found {case!r}")
        return x.with_shape((*x.shape[:-1], ANY))

    @staticmethod
    def kernel(xp, x, *, case, case_sensitive, stopwords):
        return normalized(x, case, case_sensitive, stopwords)


class RegexFullMatch(OpDef):
    """True for the strings of X that the `pattern` (RE2) matches completely."""

    name = "regex_full_match"
    control = Control(beyond_tensors=_STRINGS)
    inputs = ("X",)
    attrs = {"pattern": Required(str)}

    @staticmethod
    def infer(x, *, pattern):
        _need_strings("regex_full_match", X=x)
        compiled(pattern)
        return x.with_dtype("bool")

    @staticmethod
    def kernel(xp, x, *, pattern):
        return matched(x, pattern)
