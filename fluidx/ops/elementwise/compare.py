"""Comparisons, logic and tests for NaN and infinity: the results are bool."""

from __future__ import annotations

import numpy as np

from ...ir import Sample
from .. import expr as ex
from .declare import elementwise


def _pairs():
    rng = np.random.default_rng(0)
    for a, b, axis in (((3, 4), (3, 4), -1), ((2, 3, 4), (4,), -1), ((1,), (5,), -1), ((2, 3, 4), (3,), 1), ((1,), (1,), -1)):
        x, y = rng.integers(-2, 3, a), rng.integers(-2, 3, b)
        yield Sample.of(x.astype("float32"), y.astype("float32"), axis=axis)
        yield Sample.of(x, y, axis=axis)
    yield Sample.of(np.array([np.nan, np.inf, 1], "float32"), np.array([np.nan, np.inf, np.inf], "float32"))


def _equal_pairs():
    yield from _pairs()
    yield Sample.of(np.array([True, False, True]), np.array([True, True, False]))


def _comparison(name, body, onnx, doc, samples=_pairs, dtypes="number"):
    elementwise(name, body, axis=True, dtypes=dtypes, onnx=onnx, samples=samples, doc=doc)


_comparison("equal", lambda x, y: ex.eq(x, y), "Equal", "True where X and Y are equal.", _equal_pairs, "any")
_comparison("not_equal", lambda x, y: ex.ne(x, y), None, "True where X and Y differ.", _equal_pairs, "any")
_comparison("less_than", lambda x, y: x < y, "Less", "True where X is less than Y.")
_comparison("less_equal", lambda x, y: x <= y, "LessOrEqual", "True where X is at most Y.")
_comparison("greater_than", lambda x, y: x > y, "Greater", "True where X is greater than Y.")
_comparison("greater_equal", lambda x, y: x >= y, "GreaterOrEqual", "True where X is at least Y.")

elementwise("logical_and", lambda x, y: x & y, dtypes="bool", onnx="And", doc="True where both are.")
elementwise("logical_or", lambda x, y: x | y, dtypes="bool", onnx="Or", doc="True where one or both are.")
elementwise("logical_xor", lambda x, y: x ^ y, dtypes="bool", onnx="Xor", doc="True where exactly one is.")
elementwise("logical_not", lambda x: ~x, dtypes="bool", onnx="Not", doc="True where X is not.")


def _odd_values():
    yield Sample.of(np.array([[np.nan, np.inf, -np.inf], [0, 1, -2]], "float32"))
    yield Sample.of(np.array([np.nan]))
    yield Sample.of(np.arange(7, dtype="float32"))


elementwise("isnan", lambda x: ex.isnan(x), onnx="IsNaN", samples=_odd_values, doc="True where X is NaN.")
elementwise("isinf", lambda x: ex.isinf(x), onnx="IsInf", samples=_odd_values, doc="True where X is an infinity of either sign.")
elementwise("isfinite", lambda x: ex.isfinite(x), samples=_odd_values, doc="True where X is neither NaN nor infinite.")
