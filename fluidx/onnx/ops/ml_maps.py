"""Operators of ai.onnx.ml on labels and on maps, which are dicts on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...ir import Variable
from ...ir.dtypes import as_dtype, np_dtype
from ...ir.valuetypes import MapType, SequenceType
from ...ops.shared.maps import maps_as_rows, rows_as_maps, values_in_order
from ..export_graph import Op
from ..limits import checked_shape
from ..node import Node
from ..table import dynamic, exports, on_numpy

_ML = "ai.onnx.ml"
_DEFAULTS = {"strings": ("default_string", "_Unused"), "int64s": ("default_int64", -1), "floats": ("default_float", -0.0)}
_DTYPES: dict[str, Any] = {"strings": object, "int64s": np.int64, "floats": np.float32}


class KeyedValues(NamedTuple):
    """Values by key, and the default for other keys."""

    keys: list[Any]
    values: np.ndarray
    default: Any

    @property
    def dtype(self) -> str:
        return as_dtype(self.values.dtype)


@dynamic("LabelEncoder", 0, domain=_ML)
def computed_encoder(n: Node) -> object:
    return look_up(n, n.x(), _labels(n))


def look_up(n: Node, x: Variable, table: KeyedValues) -> Variable:
    """Values by key, in a program."""
    default = np.asarray(table.default, table.values.dtype).item()
    return n.b.look_up(x, keys=tuple(table.keys), values=tuple(table.values.tolist()), default=default, dtype=table.dtype)


def _labels(n: Node) -> KeyedValues:
    """Keys and values of a LabelEncoder. In version 1 they are classes and their positions."""
    classes = n.attr("classes_strings")
    if classes is not None:
        return _text_number_table(n, classes, list(range(len(classes))))
    keys, values = _list_attribute(n, "keys"), _list_attribute(n, "values")
    if keys is None or values is None or len(keys) != len(values):
        raise n.wrong("it must have as many keys_* as values_*")
    return KeyedValues(keys.tolist(), values, _default(n, values))


def _text_number_table(n: Node, texts: list[str], numbers: list[int]) -> KeyedValues:
    """Strings -> numbers if the operand has strings, else numbers -> strings."""
    if n.dtype() == "string":
        return KeyedValues(texts, np.array(numbers, np.int64), n.attr("default_int64", -1))
    return KeyedValues(numbers, np.array(texts, object), n.attr("default_string", "_Unused"))


def _list_attribute(n: Node, what: str) -> np.ndarray | None:
    tensor = n.attr(f"{what}_tensor")
    if tensor is not None:
        return tensor.ravel()
    for kind, dtype in _DTYPES.items():
        found = n.attr(f"{what}_{kind}")
        if found is not None:
            return np.array(found, dtype)
    return None


def _default(n: Node, values: np.ndarray) -> Any:
    tensor = n.attr("default_tensor")
    if tensor is not None:
        return tensor.ravel()[0]
    name, default = _DEFAULTS[{"O": "strings", "f": "floats"}.get(values.dtype.kind, "int64s")]
    return n.attr(name, default)


@dynamic("CategoryMapper", 0, domain=_ML)
def computed_mapper(n: Node) -> object:
    return look_up(n, n.x(), _categories(n))


def _categories(n: Node) -> KeyedValues:
    return _text_number_table(n, n.attr("cats_strings"), n.attr("cats_int64s"))


@on_numpy("DictVectorizer", domain=_ML, pure=True)
def dict_vectorizer(n: Node) -> object:
    """One row for a map, and one row for each element of a sequence of maps."""
    given = n.value(0)
    rows = given if isinstance(given, list) else [given]
    first = next((v for row in rows for v in row.values()), 0.0)
    if isinstance(first, str):
        return maps_as_rows(rows, _vocabulary(n), object)
    return maps_as_rows(rows, _vocabulary(n), np.int64 if isinstance(first, (int, np.integer)) else np.asarray(first, np.float32).dtype)


@dynamic("DictVectorizer", 0, domain=_ML)
def computed_vectorizer(n: Node) -> object:
    t = n.x().desc.type
    one = t.elem if isinstance(t, SequenceType) else t
    dtype = one.value.dtype if isinstance(one, MapType) else "float32"
    return n.b.dict_vectorizer(n.x(), keys=tuple(_vocabulary(n)), dtype=dtype)


def _vocabulary(n: Node) -> list[Any]:
    return n.attr("string_vocabulary") or n.attr("int64_vocabulary") or []


_CASTS = {"TO_FLOAT": "float32", "TO_INT64": "int64", "TO_STRING": "string"}


def _cast(n: Node) -> tuple[str, int]:
    """The dtype of CastMap's result, and the size of its row: 0 if the values are ordered by key."""
    size = n.attr("max_map", 1) if n.attr("map_form", "DENSE") == "SPARSE" else 0
    return _CASTS[n.attr("cast_to", "TO_FLOAT")], checked_shape([1, size])[1]


@on_numpy("CastMap", domain=_ML, pure=True)
def cast_map(n: Node) -> object:
    """The values ordered by key. SPARSE puts each at the position of its key, and 0 elsewhere."""
    dtype, size = _cast(n)
    return values_in_order(n.value(0), np_dtype(dtype), size)


@dynamic("CastMap", 0, domain=_ML)
def computed_cast_map(n: Node) -> object:
    dtype, size = _cast(n)
    return n.b.cast_map(n.x(), dtype=dtype, size=size)


@on_numpy("ZipMap", domain=_ML, pure=True)
def zip_map(n: Node) -> object:
    return rows_as_maps(n.value(0), n.cached(lambda: _class_labels(n)))


@dynamic("ZipMap", 0, domain=_ML)
def computed_zip_map(n: Node) -> object:
    return n.b.zip_map(n.x(), keys=tuple(_class_labels(n)))


def _class_labels(n: Node) -> list[Any]:
    return n.attr("classlabels_strings") or n.attr("classlabels_int64s") or []


# -- export -------------------------------------------------------------------------------------------------------------------------

_LISTS = {"string": "strings", "int64": "int64s", "float32": "floats"}


def _keys_attribute(op: Op, texts: str, numbers: str) -> dict[str, Any]:
    """The attribute that lists the keys."""
    keys = list(op.attrs["keys"])
    return {texts if isinstance(keys[0], str) else numbers: keys, "domain": _ML}


@exports("zip_map")
def export_zip_map(op: Op) -> str:
    if op.dtype("X") != "float32":
        raise op.wrong(f"ZipMap takes float32, X is {op.dtype('X')}")
    return op.emit("ZipMap", op["X"], **_keys_attribute(op, "classlabels_strings", "classlabels_int64s"))


@exports("dict_vectorizer")
def export_dict_vectorizer(op: Op) -> str:
    if not isinstance(op.type_of("X"), MapType):
        raise op.wrong(f"DictVectorizer takes one map, X is {op.type_of('X')}")
    return op.emit("DictVectorizer", op["X"], **_keys_attribute(op, "string_vocabulary", "int64_vocabulary"))


@exports("cast_map")
def export_cast_map(op: Op) -> str:
    size = op.attrs["size"]
    places = {"map_form": "SPARSE", "max_map": size} if size else {"map_form": "DENSE"}
    to = next(name for name, dtype in _CASTS.items() if dtype == op.attrs["dtype"])
    return op.emit("CastMap", op["X"], domain=_ML, cast_to=to, **places)


@exports("look_up")
def export_look_up(op: Op) -> str:
    sides = ("keys", op.dtype("X")), ("values", op.attrs["dtype"]), ("default", op.attrs["dtype"])
    attrs: dict[str, Any] = {}
    for what, dtype in sides:
        if dtype not in _LISTS:
            raise op.wrong(f"LabelEncoder has tables of {', '.join(_LISTS)}, and {what} are {dtype}")
        found = op.attrs[what]
        attrs[f"{what}_{_LISTS[dtype].removesuffix('s' if what == 'default' else '')}"] = list(found) if isinstance(found, tuple) else found
    return op.emit("LabelEncoder", op["X"], domain=_ML, **attrs)
