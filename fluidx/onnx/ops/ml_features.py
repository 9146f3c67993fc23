"""Operators of ai.onnx.ml that turn columns into features."""

from __future__ import annotations

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS, np_dtype
from ...ops.shared.tables import table_values
from ..limits import checked_shape
from ..node import Node
from ..table import dynamic, imports, on_numpy
from .ml_maps import KeyedValues, look_up
from .shape import known_sizes

_ML = "ai.onnx.ml"


@imports("ArrayFeatureExtractor", domain=_ML)
def computed_extractor(n: Node) -> object:
    x = n.x() if n.rank() > 1 else n.b.reshape(n.x(), shape=(1, -1))
    return n.b.index_select(x, n.b.reshape(n.x(1), shape=(-1,)), dim=-1)


@imports("Binarizer", domain=_ML)
def computed_binarizer(n: Node) -> object:
    x = n.x() if n.dtype() in FLOATS else n.b.cast(n.x(), dtype="float64")  # float64 holds every threshold between integers
    return n.b.cast(n.b.greater_than(x, n.b.fill_any_like(x, value=n.attr("threshold", 0.0))), dtype=n.dtype())


@imports("Scaler", domain=_ML)
def computed_scaler(n: Node) -> object:
    x, offset, scale = _floats(n), n.attr("offset", [0.0]), n.attr("scale", [1.0])
    return n.b.elementwise_mul(n.b.elementwise_sub(x, n.const(offset, np.float32)), n.const(scale, np.float32))


def _floats(n: Node) -> Variable:
    return n.cast(n.x(), "float32")


@imports("Imputer", domain=_ML)
def computed_imputer(n: Node) -> object:
    x, (wanted, values) = n.x(), _imputer_values(n)
    missing = n.b.isnan(x) if wanted != wanted else n.b.equal(x, n.b.fill_any_like(x, value=float(wanted)))
    return n.b.where(missing, n.const(values), x)


def _imputer_values(n: Node) -> tuple[float, np.ndarray]:
    """The value that means missing, and its replacement for all features or for each."""
    kind = ("replaced_value_float", "imputed_value_floats") if n.dtype() in FLOATS else ("replaced_value_int64", "imputed_value_int64s")
    (size,) = known_sizes(n, n.shape()[-1:])
    values = np.array(n.attr(kind[1], []), np_dtype(n.dtype()))
    if values.size not in (1, size):
        raise n.wrong(f"{kind[1]} has {values.size} values, and the input {size} features")
    return n.attr(kind[0], 0), values


def _norm(n: Node) -> str:
    norm: str = n.attr("norm", "MAX")
    if norm not in ("MAX", "L1", "L2"):
        raise n.wrong(f"norm must be MAX, L1 or L2, found {norm!r}")
    return norm


@imports("Normalizer", domain=_ML)
def computed_normalizer(n: Node) -> object:
    """A row of length 0 stays as it is."""
    norm, x, last = _norm(n), _floats(n), {"dim": (-1,), "keep_dim": True}
    if norm == "MAX":
        length = n.b.reduce_max(x, **last)
    else:
        length = n.b.reduce_sum(n.b.abs(x), **last) if norm == "L1" else n.b.sqrt(n.b.reduce_sum(n.b.square(x), **last))
    ones = n.b.fill_any_like(length, value=1.0)
    return n.b.elementwise_div(x, n.b.where(n.b.equal(length, n.b.fill_zeros_like(length)), ones, length))


@on_numpy("OneHotEncoder", domain=_ML, pure=True)
def one_hot_encoder(n: Node) -> object:
    x, places = n.value(0), _category_positions(n)
    at = table_values(x if x.dtype.kind == "O" else x.astype(np.int64), *places)
    if not n.attr("zeros", 1) and (at < 0).any():
        raise n.wrong(f"{x[at < 0].tolist()[0]!r} is not one of its categories, and `zeros` is 0")
    return (at[..., None] == places.values).astype(np.float32)


@dynamic("OneHotEncoder", 0, domain=_ML)
def computed_one_hot(n: Node) -> object:
    if not n.attr("zeros", 1):
        raise n.wrong("`zeros` is 0, so unknown categories are an error, which a program cannot raise; fx.onnx.session runs it")
    x, places = n.x(), _category_positions(n)
    at = look_up(n, x if x.dtype in ("string", "int64") else n.b.cast(x, dtype="int64"), places)
    return n.b.cast(n.b.equal(n.b.unsqueeze(at, axes=(at.ndim,)), n.const(places.values)), dtype="float32")


def _category_positions(n: Node) -> KeyedValues:
    """Categories -> their positions."""
    categories = n.attr("cats_strings") or n.attr("cats_int64s", [])
    return KeyedValues(categories, np.arange(len(categories)), -1)


@on_numpy("FeatureVectorizer", domain=_ML, pure=True)
def feature_vectorizer(n: Node) -> object:
    parts = [np.atleast_2d(v).astype(np.float32) for v in n.values()]
    sizes = n.attr("inputdimensions", [p.shape[1] for p in parts])
    checked_shape([len(parts[0]), sum(sizes)])
    fitted = [np.pad(p[:, :size], ((0, 0), (0, max(size - p.shape[1], 0)))) for p, size in zip(parts, sizes)]
    return np.concatenate(fitted, 1)
