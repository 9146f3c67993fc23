"""Classical models: labels, and maps, which are dicts on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..limits import room
from ..node import Node
from . import host

_ML = "ai.onnx.ml"
_DEFAULTS = {"strings": ("default_string", "_Unused"), "int64s": ("default_int64", -1), "floats": ("default_float", -0.0)}
_DTYPES: dict[str, Any] = {"strings": object, "int64s": np.int64, "floats": np.float32}


@host("LabelEncoder", domain=_ML, computes=True)
def label_encoder(n: Node) -> object:
    """The value that stands at the place of each key, else the default. In version 1 classes and their positions are key and value."""
    classes = n.attr("classes_strings")
    if classes is not None:
        return _classes(n, classes)
    keys = _listed(n, "keys")
    values = _listed(n, "values")
    if keys is None or values is None or len(keys) != len(values):
        raise n.wrong("it has to have keys_* and values_*, and as many of the one as of the other")
    return looked_up(n.value(0), keys, values, _default(n, values))


def _classes(n: Node, classes: list[str]) -> np.ndarray:
    names, at = np.array(classes, object), np.arange(len(classes))
    x = n.value(0)
    if x.dtype.kind == "O":
        return looked_up(x, names, at, n.attr("default_int64", -1))
    return looked_up(x, at, names, n.attr("default_string", "_Unused"))


def _listed(n: Node, what: str) -> np.ndarray | None:
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


def looked_up(x: np.ndarray, keys: np.ndarray, values: np.ndarray, default: Any) -> np.ndarray:
    """Values by key, element by element; NaN is a key like others."""
    places = {_key(k): at for at, k in enumerate(keys.tolist())}
    distinct, inverse = (x.ravel(), slice(None)) if x.dtype.kind == "O" else np.unique(x, return_inverse=True)
    at = np.array([places.get(_key(v), len(keys)) for v in distinct.tolist()], np.int64)[inverse].ravel()
    table = np.empty(len(values) + 1, values.dtype)
    table[:-1], table[-1] = values, default
    return table[at].reshape(x.shape)


def _key(value: Any) -> Any:
    return "nan" if value != value else value


@host("CategoryMapper", domain=_ML, computes=True)
def category_mapper(n: Node) -> object:
    x, texts, numbers = n.value(0), np.array(n.attr("cats_strings"), object), np.array(n.attr("cats_int64s"), np.int64)
    if x.dtype.kind == "O":
        return looked_up(x, texts, numbers, n.attr("default_int64", -1))
    return looked_up(x, numbers, texts, n.attr("default_string", "_Unused"))


@host("DictVectorizer", domain=_ML, computes=True)
def dict_vectorizer(n: Node) -> object:
    """One row; a sequence of maps gives one each."""
    given = n.value(0)
    names = n.attr("string_vocabulary") or n.attr("int64_vocabulary") or []
    rows = given if isinstance(given, list) else [given]
    values = [[row.get(name, 0) for name in names] for row in rows]
    first = next((v for row in rows for v in row.values()), 0.0)
    if isinstance(first, str):
        return np.array([[row.get(name, "") for name in names] for row in rows], object)
    return np.array(values, np.int64 if isinstance(first, (int, np.integer)) else np.asarray(first, np.float32).dtype)


@host("CastMap", domain=_ML, computes=True)
def cast_map(n: Node) -> object:
    """The values by rising key; SPARSE puts each at its key, and 0 elsewhere."""
    given = n.value(0)
    dtype = {"TO_FLOAT": np.float32, "TO_INT64": np.int64, "TO_STRING": object}[n.attr("cast_to", "TO_FLOAT")]
    keys = sorted(given)
    values = [_text(given[k]) if dtype is object else given[k] for k in keys]
    if n.attr("map_form", "DENSE") == "DENSE":
        return np.array([values], dtype)
    size = n.attr("max_map", 1)
    if keys and not 0 <= keys[0] <= keys[-1] < size:
        raise n.wrong(f"its keys are {keys[0]} to {keys[-1]}, and max_map is {size}")
    out = np.full(room([1, size]), "0" if dtype is object else 0, dtype)
    out[0, keys] = values
    return out


def _text(value: Any) -> str:
    return f"{value:f}" if isinstance(value, (float, np.floating)) else str(value)


@host("ZipMap", domain=_ML, computes=True)
def zip_map(n: Node) -> object:
    keys = n.attr("classlabels_strings") or n.attr("classlabels_int64s") or []
    rows = np.atleast_2d(n.value(0))
    if rows.shape[1] != len(keys):
        raise n.wrong(f"it has {len(keys)} class labels, and {rows.shape[1]} columns to name")
    return [dict(zip(keys, row.tolist())) for row in rows]
