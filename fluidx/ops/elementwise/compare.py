"""Comparisons, logic, and tests for NaN and infinity, all with bool results; and logic on the bits of integers."""

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


def _comparison(name, body, doc, samples=_pairs, dtypes="number"):
    elementwise(name, body, axis=True, dtypes=dtypes, samples=samples, doc=doc)


_comparison("equal", lambda x, y: ex.eq(x, y), "True where X and Y are equal.", _equal_pairs, "any")
_comparison("not_equal", lambda x, y: ex.ne(x, y), "True where X and Y differ.", _equal_pairs, "any")
_comparison("less_than", lambda x, y: x < y, "True where X is less than Y.")
_comparison("less_equal", lambda x, y: x <= y, "True where X is at most Y.")
_comparison("greater_than", lambda x, y: x > y, "True where X is greater than Y.")
_comparison("greater_equal", lambda x, y: x >= y, "True where X is at least Y.")

elementwise("logical_and", lambda x, y: x & y, dtypes="bool", doc="True where X and Y are true.")
elementwise("logical_or", lambda x, y: x | y, dtypes="bool", doc="True where X or Y is true, or both.")
elementwise("logical_xor", lambda x, y: x ^ y, dtypes="bool", doc="True where exactly one of X and Y is true.")
elementwise("logical_not", lambda x: ~x, dtypes="bool", doc="True where X is false.")


def _odd_values():
    yield Sample.of(np.array([[np.nan, np.inf, -np.inf], [0, 1, -2]], "float32"))
    yield Sample.of(np.array([np.nan]))
    yield Sample.of(np.arange(7, dtype="float32"))


elementwise("isnan", lambda x: ex.isnan(x), samples=_odd_values, doc="True where X is NaN.")
elementwise("isinf", lambda x: ex.isinf(x), samples=_odd_values, doc="True where X is infinity or minus infinity.")
elementwise("isfinite", lambda x: ex.isfinite(x), samples=_odd_values, doc="True where X is neither NaN nor infinite.")


def _bits(*dtypes):
    def samples():
        rng = np.random.default_rng(5)
        for k, dtype in enumerate(dtypes):
            info = np.iinfo(dtype)
            x = rng.integers(info.min, info.max, (3, 4), dtype, endpoint=True)
            yield Sample.of(x, rng.integers(info.min, info.max, (3, 4)[k % 2 :], dtype, endpoint=True))
            yield Sample.of(x, (np.arange(12, dtype=dtype) * 7 % 80 - (8 if info.min else 0)).astype(dtype).reshape(3, 4))

    return samples


def _whole():
    for dtype in ("int8", "uint8", "int64"):
        yield Sample.of(np.arange(-6 if dtype[0] == "i" else 0, 7).astype(dtype))


_KINDS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
elementwise("bitwise_and", lambda x, y: ex.bit_and(x, y), dtypes="int", samples=_bits(*_KINDS),
    doc="The bits that are set in X and in Y.")  # fmt: skip
elementwise("bitwise_or", lambda x, y: ex.bit_or(x, y), dtypes="int", samples=_bits(*_KINDS),
    doc="The bits that are set in X, in Y or in both.")  # fmt: skip
elementwise("bitwise_xor", lambda x, y: ex.bit_xor(x, y), dtypes="int", samples=_bits(*_KINDS),
    doc="The bits that are set in exactly one of X and Y.")  # fmt: skip
elementwise("bitwise_not", lambda x: ex.bit_not(x), dtypes="int", samples=_whole, doc="The bits that are not set in X.")
elementwise("shift_left", lambda x, y: ex.shift_left(x, y), dtypes="int", samples=_bits(*_KINDS),
    doc="The bits of X shifted left by Y; 0 where Y is negative or shifts all bits out.")  # fmt: skip
elementwise("shift_right", lambda x, y: ex.shift_right(x, y), dtypes="int", samples=_bits(*_KINDS),
    doc="The bits of X shifted right by Y, with the sign kept: 0 or -1 where Y is negative or shifts all bits out.")  # fmt: skip
