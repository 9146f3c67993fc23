"""Casts to and from dtypes without arithmetic, by the tables of ONNX's Cast, and the bits of their elements."""

from __future__ import annotations

import numpy as np

BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}  # ml_dtypes stores each element in one byte
ROUND_MODES = ("up", "down", "nearest")


def converted(x: np.ndarray, to: np.dtype, saturate: bool = True, round_mode: str = "up") -> np.ndarray:
    """Numbers converted to another dtype. A number outside the range of an 8-bit float becomes its largest number, or, without `saturate`,
    infinity or NaN. `round_mode` applies to float8_e8m0fnu, which has powers of two only.
    """
    if x.dtype == to:
        return x
    if x.dtype.kind == "V" and to.kind != "f":
        x = x.astype(np.float32)  # float32 holds every number of the short dtypes, which have no direct conversions
    if to.name == "float8_e8m0fnu":
        return _powers_of_two(x, to, saturate, round_mode)
    if to.name.startswith("float8") and saturate:
        import ml_dtypes

        info = ml_dtypes.finfo(to)
        x = np.clip(x, float(info.min), float(info.max))
    elif to.name in BITS and x.dtype.kind in "iub":
        x = x.astype(np.int64)  # the higher bits are dropped below
        return from_bits((x & ((1 << BITS[to.name]) - 1)).astype(np.uint8), to) if to.name != "float4_e2m1fn" else x.astype(to)
    return x.astype(to)


def _powers_of_two(x: np.ndarray, to: np.dtype, saturate: bool, round_mode: str) -> np.ndarray:
    """E8M0: the byte k stands for 2 to the power of k - 127, and 255 for NaN. It has no sign and no zero."""
    size = np.abs(x.astype(np.float64))
    fraction, exponent = np.frexp(size)  # size = fraction * 2**exponent, fraction in [0.5, 1)
    up = {"up": fraction > 0.5, "down": np.zeros(x.shape, bool), "nearest": fraction >= 0.75}[round_mode]
    code = exponent.astype(np.int64) + 126 + up
    code = np.where(size == 0, -1, np.where(np.isinf(size), 255, code))
    code = np.clip(code, 0, 254) if saturate else np.where((code < 0) | (code > 254), 255, code)
    return np.where(np.isnan(size), 255, code).astype(np.uint8).view(to)


def width(dtype: np.dtype) -> int:
    """Number of bits of an element."""
    return BITS.get(dtype.name, 8 * dtype.itemsize)


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bits of 4-bit or 2-bit elements, one byte each."""
    whole = x.astype(np.int8) if x.dtype.name.startswith("int") else x
    return np.ascontiguousarray(whole).reshape(x.shape).view(np.uint8) & np.uint8((1 << width(x.dtype)) - 1)


def from_bits(bits: np.ndarray, to: np.dtype) -> np.ndarray:
    """4-bit or 2-bit elements with the given bits."""
    if not to.name.startswith("int"):
        return bits.view(to)
    sign = 1 << (BITS[to.name] - 1)
    return ((bits.astype(np.int8) ^ sign) - sign).astype(to)
