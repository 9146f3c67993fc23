"""The element types of variables: full names in the API, short codes in program text."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .errors import ProgramError, nearest

SHORT = {
    "bool": "bool",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
    "float8_e4m3fn": "f8e4m3fn", "float8_e4m3fnuz": "f8e4m3fnuz", "float8_e5m2": "f8e5m2", "float8_e5m2fnuz": "f8e5m2fnuz",
    "float8_e8m0fnu": "f8e8m0fnu", "float4_e2m1fn": "f4e2m1fn", "int4": "i4", "uint4": "u4", "int2": "i2", "uint2": "u2",
    "string": "str",
}  # fmt: skip
FULL = {short: full for full, short in SHORT.items()}
FLOATS = ("float16", "bfloat16", "float32", "float64")
HALVES = ("float16", "bfloat16")
# Storage formats: values are moved and cast, without arithmetic. Each element takes one byte.
TINY = (
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
    "int4", "uint4", "int2", "uint2",
)  # fmt: skip
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def as_dtype(value: Any) -> str:
    """The full name of a dtype given as a name, a short code, a NumPy dtype or a Python type.

    >>> as_dtype("f32"), as_dtype(np.int64), as_dtype(float)
    ('float32', 'int64', 'float32')
    """
    if isinstance(value, str):
        if value in SHORT:
            return value
        if value in FULL:
            return FULL[value]
        raise ProgramError(f"unknown dtype {value!r}; {nearest(value, SHORT, 'fluidx has')}")
    if value is float:
        return "float32"  # fluid's default, not NumPy's
    try:
        name = np.dtype(value).name
    except TypeError:
        name = str(value)
    if value is str or name == "object":
        return "string"
    if name not in SHORT:
        raise ProgramError(f"unknown dtype {value!r}; {nearest(name, SHORT, 'fluidx has')}")
    return name


@cache
def np_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a full dtype name; bfloat16 and smaller floats come from ml_dtypes, strings are objects."""
    if name == "string":
        return np.dtype(object)
    if name == "bfloat16" or name in TINY:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


@cache
def dtype_name(dtype: np.dtype) -> str:
    """The full name of a NumPy dtype, cached: NumPy computes `dtype.name` at each access, in more than a microsecond."""
    return "string" if dtype.kind == "O" else dtype.name


def is_float(name: str) -> bool:
    return name in FLOATS


def kept(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A fed array, converted to the dtype of the variable: the one rule for executors, sessions, feeders and commands.

    Values stay the same, up to the rounding of floats. Raises ValueError with the reason for a value that the dtype does not have: one
    that overflows a float, or that is not a whole number of the integer type.

    >>> kept(np.array([0.1, 2]), np.dtype("float32")).dtype, kept(np.array([3]), np.dtype("uint8")).tolist()
    (dtype('float32'), [3])
    >>> kept(np.array([1e300]), np.dtype("float32"))
    Traceback (most recent call last):
    ValueError: holds 1e+300, which float32 cannot
    """
    if array.dtype == dtype:
        return array
    if array.dtype.name.startswith("void") and array.dtype.names is None:
        raise ValueError(f"holds bytes without a type, {array.dtype}, as NumPy's files keep bfloat16; give .view(ml_dtypes.bfloat16)")
    numbers = array.dtype.kind in "biu" or array.dtype.name in FLOATS
    if not numbers or dtype.name not in (*FLOATS, *INTS) or (dtype.name in INTS and array.dtype.kind not in "biu"):
        raise ValueError(f"has dtype {array.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
    other = made != array if dtype.name in INTS else np.isfinite(array) & ~np.isfinite(made)
    if other.any():
        raise ValueError(f"holds {array[other][0]}, which {dtype.name} cannot")
    return made
