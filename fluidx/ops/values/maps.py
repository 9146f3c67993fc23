"""Ops on maps, which are dicts on the host."""

from __future__ import annotations

from typing import Any

from ...ir.dtypes import np_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Control
from ...ir.opdef import OpDef, Required
from ...ir.types import ANY, TensorType
from ...ir.valuetypes import MapType, SequenceType, ValueType
from ..shared.maps import maps_as_rows, rows_as_maps, values_in_order


def _key_dtype(op: str, keys: Any) -> str:
    """The dtype of keys, which must be strings or integers, all different. Raises ProgramError for others."""
    for kind, dtype in ((str, "string"), (int, "int64")):
        if isinstance(keys, tuple) and keys and all(type(k) is kind for k in keys):
            if len(set(keys)) < len(keys):
                raise ProgramError(f"op {op}: {next(k for k in keys if keys.count(k) > 1)!r} is among the keys twice")
            return dtype
    raise ProgramError(f"op {op}: keys must be strings, or integers, and at least one, found {keys!r:.80}")


def _scalar_of(op: str, t: ValueType, key: str | None = None) -> str:
    """The dtype of the values of a map with keys of one dtype. Raises ProgramError for other types."""
    fits = isinstance(t, MapType) and isinstance(t.value, TensorType) and t.value.shape == () and key in (None, t.key)
    if not fits:
        raise ProgramError(f"op {op}: X must be a map of {key or 'int64'} to single values, found {t}")
    assert isinstance(t, MapType)
    return t.value.dtype


class ZipMap(OpDef):
    """Each row of X, [rows, columns] or [columns], as a map from the names of the columns, `keys`, to their values."""

    name = "zip_map"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=("sequence", "map"))
    inputs = ("X",)
    attrs = {"keys": Required(Any)}

    @staticmethod
    def infer(x, *, keys):
        if not isinstance(x, TensorType) or x.ndim not in (1, 2) or x.shape[-1] not in (ANY, len(keys)):
            raise ProgramError(f"op zip_map: X must be [rows, {len(keys)}], as there are {len(keys)} keys, found {x}")
        return SequenceType(MapType(_key_dtype("zip_map", keys), x.with_shape(())))

    @staticmethod
    def kernel(xp, x, *, keys):
        return rows_as_maps(x, keys)


class DictVectorizer(OpDef):
    """The values of a map at `keys`, [1, keys], with 0 or "" for a missing key; for a sequence of maps, one row each."""

    name = "dict_vectorizer"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=("sequence", "map", "string"))
    inputs = ("X",)
    attrs = {"keys": Required(Any), "dtype": "float32"}

    @staticmethod
    def infer(x, *, keys, dtype):
        one = x.elem if isinstance(x, SequenceType) else x
        found = _scalar_of("dict_vectorizer", one, _key_dtype("dict_vectorizer", keys))
        if found != dtype:
            raise ProgramError(
                f"op dict_vectorizer: the values are {found}, but dtype is {dtype!r}; use dtype={found!r}, and cast the result"
            )
        return TensorType(dtype, (ANY if one is not x else 1, len(keys)))

    @staticmethod
    def kernel(xp, x, *, keys, dtype):
        return maps_as_rows(x if isinstance(x, list) else [x], keys, np_dtype(dtype))


class CastMap(OpDef):
    """The values of a map with integer keys as `dtype`, [1, values]: in the order of the keys, or each at the position of its key in [1,
    size], with 0 elsewhere.
    """

    name = "cast_map"
    arithmetic = Arithmetic(flops=0)
    control = Control(beyond_tensors=("map", "string"))
    inputs = ("X",)
    attrs = {"dtype": "float32", "size": 0}

    @staticmethod
    def infer(x, *, dtype, size):
        _scalar_of("cast_map", x, "int64")
        if dtype not in ("float32", "int64", "string"):
            raise ProgramError(f"op cast_map: dtype must be float32, int64 or string, found {dtype!r}")
        if size < 0:
            raise ProgramError(f"op cast_map: size must be 0, for all values in the order of their keys, or above, found {size}")
        return TensorType(dtype, (1, size or ANY))

    @staticmethod
    def kernel(xp, x, *, dtype, size):
        return values_in_order(x, np_dtype(dtype), size)
