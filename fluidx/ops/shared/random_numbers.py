"""Counter-based random numbers: the stream of words, distributions, and the part of a draw that a rank holds.

Element i of a draw depends on (seed, step, i) alone: a rank with a slice of a value draws exactly this slice of the result of one device,
for any number of ranks. Each iteration of a loop has its own step (`round_key`). The generator is Philox4x64-10 (Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the key (seed, step); word w of its stream is in block w // 4 + 1, as in
NumPy's `Philox`. NumPy's generator makes the words for NumPy arrays (`PHILOX`); the same algorithm in array arithmetic makes them on any
device (`rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import erf, prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from ...ir.parts import Part

_MASK = (1 << 64) - 1


# -- the stream -------------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """A source of random words: an array module, and the function that makes the words."""

    xp: Any
    words: Callable[[int, int, int, int], Any]  # (seed, step, first, count) -> words of the stream of (seed, step), as uint64 [count]
    chunk: int  # number of elements drawn at a time, even


def _numpy_words(seed: int, step: int, first: int, count: int) -> Any:
    block, skip = divmod(first, 4)
    # a counter given as one integer would be converted through Python's big integers, which is slower
    bits = np.random.Philox(key=np.array([seed & _MASK, step & _MASK], np.uint64), counter=np.array([block, 0, 0, 0], np.uint64))
    # unlike random_raw, a Generator releases the GIL; over the full range it returns the words unchanged
    return np.random.Generator(bits).integers(0, _MASK, skip + count, dtype=np.uint64, endpoint=True)[skip:]


def _mul(xp: Any, a: int, b: Any) -> tuple[Any, Any]:
    """The high and the low word of the 128-bit product a * b, from products of 32-bit halves."""
    u, half = xp.uint64, xp.uint64(32)
    low = u(0xFFFFFFFF)
    a0, a1 = u(a & 0xFFFFFFFF), u(a >> 32)
    b0, b1 = b & low, b >> half
    t = a0 * b0
    mid = a1 * b0 + (t >> half)
    mid2 = a0 * b1 + (mid & low)
    return a1 * b1 + (mid >> half) + (mid2 >> half), (mid2 << half) | (t & low)


def philox_words(xp: Any, seed: int, step: int, first: int, count: int) -> Any:
    """Words of a stream by ten rounds of Philox4x64 over uint64 arrays: for array modules without a Philox generator."""
    start = first // 4
    blocks = (first + count + 3) // 4 - start
    c0 = xp.arange(start + 1, start + 1 + blocks, dtype=xp.uint64)
    c1, c2, c3 = xp.zeros_like(c0), xp.zeros_like(c0), xp.zeros_like(c0)
    k0, k1 = seed & _MASK, step & _MASK
    for _ in range(10):
        hi0, lo0 = _mul(xp, 0xD2E7470EE14C6C93, c0)
        hi1, lo1 = _mul(xp, 0xCA5A826395121157, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ xp.uint64(k0), lo1, hi0 ^ c3 ^ xp.uint64(k1), lo0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return xp.stack([c0, c1, c2, c3], axis=1).reshape(-1)[first % 4 : first % 4 + count]


# the words and temporaries of a chunk stay in the cache
PHILOX = Source(np, _numpy_words, 1 << 18)


def rounds(xp: Any) -> Source:
    """The stream of `PHILOX` for any array module.

    >>> whole = PHILOX.words(7, 0, 0, 12)
    >>> (PHILOX.words(7, 0, 5, 7) == whole[5:]).all(), (rounds(np).words(7, 0, 5, 7) == whole[5:]).all()
    (np.True_, np.True_)
    """
    return Source(xp, partial(philox_words, xp), 1 << 24)


def lanes(source: Source, seed: int, step: int, offset: int, count: int, bits: int) -> Any:
    """Numbers `offset` to `offset + count` of the stream divided into lanes of `bits` (16, 32 or 64) bits, the low bits of a word first."""
    per = 64 // bits
    first = offset // per
    drawn = source.words(seed, step, first, (offset + count + per - 1) // per - first)
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    return drawn.view(dtype)[offset - first * per : offset - first * per + count]


# -- distributions: draw(source, seed, step, offset, count, wide) -> float32 [count], float64 when wide ------------------------------

Draw = Callable[[Any, int, int, int, int, bool], Any]


def draw_uniform(source: Source, seed: int, step: int, offset: int, count: int, wide: bool) -> Any:
    """In [0, 1): the top 24 bits of a 32-bit lane, or the top 53 bits of a word."""
    xp = source.xp
    if wide:
        return (lanes(source, seed, step, offset, count, 64) >> xp.uint64(11)).astype(xp.float64) * 2.0**-53
    u = (lanes(source, seed, step, offset, count, 32) >> xp.uint32(8)).astype(xp.float32)
    u *= xp.float32(2.0**-24)
    return u


def draw_normal(source: Source, seed: int, step: int, offset: int, count: int, wide: bool) -> Any:
    """Standard normal by Box and Muller (1958): lanes 2j and 2j + 1 give elements 2j and 2j + 1."""
    xp, first = source.xp, offset // 2 * 2
    n = (offset + count + 1) // 2 * 2 - first
    f, bits = (xp.float64, 64) if wide else (xp.float32, 32)
    lane = lanes(source, seed, step, first, n, bits)
    radius, angle = lane[0::2].astype(f), lane[1::2].astype(f)
    radius += f(1)  # (0, 1]: the logarithm stays finite
    radius *= f(2.0**-bits)
    xp.log(radius, out=radius)
    radius *= f(-2)
    xp.sqrt(radius, out=radius)
    angle *= f(2.0 ** (1 - bits) * np.pi)
    z = xp.empty(n, f)
    xp.multiply(radius, xp.cos(angle), out=z[0::2])
    xp.multiply(radius, xp.sin(angle), out=z[1::2])
    return z[offset - first : offset - first + count]


# Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011), the single-precision branch for |x| < 0.9966
_ERFINV = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
           -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip


def draw_truncated_normal(source: Source, seed: int, step: int, offset: int, count: int, wide: bool) -> Any:
    """Standard normal within two standard deviations, by the inverse of its distribution function: one uniform number per element."""
    xp = source.xp
    f = xp.float64 if wide else xp.float32
    x = draw_uniform(source, seed, step, offset, count, wide)
    x *= f(2)
    x -= f(1)
    x *= f(erf(sqrt(2.0)))
    w = -xp.log((f(1) - x) * (f(1) + x)) - f(2.5)
    p = xp.full_like(w, _ERFINV[0])
    for c in _ERFINV[1:]:
        p *= w
        p += f(c)
    x *= p
    x *= f(sqrt(2.0))
    return xp.clip(x, f(-2), f(2), out=x)


def _draw(draw: Draw, source: Source, seed: int, step: int, offset: int, shape: Sequence[int], dtype: Any) -> Any:
    return draw(source, seed, step, offset, prod(shape), np.dtype(dtype) == np.float64).reshape(shape).astype(dtype, copy=False)


def uniform(source: Source, seed: int, step: int, offset: int, shape: Sequence[int], dtype: Any = "float32") -> Any:
    """Uniform numbers in [0, 1): elements `offset` onwards of the draw of (seed, step). `dtype` is float32 or float64.

    >>> uniform(PHILOX, 1, 0, 2, (3,)).tolist() == uniform(rounds(np), 1, 0, 0, (5,)).tolist()[2:]
    True
    """
    return _draw(draw_uniform, source, seed, step, offset, shape, dtype)


def normal(source: Source, seed: int, step: int, offset: int, shape: Sequence[int], dtype: Any = "float32") -> Any:
    """Standard normal numbers: elements `offset` onwards of the draw of (seed, step). `dtype` is float32 or float64."""
    return _draw(draw_normal, source, seed, step, offset, shape, dtype)


def truncated_normal(source: Source, seed: int, step: int, offset: int, shape: Sequence[int], dtype: Any = "float32") -> Any:
    """Standard normal numbers within [-2, 2]: elements `offset` onwards of the draw of (seed, step)."""
    return _draw(draw_truncated_normal, source, seed, step, offset, shape, dtype)


# -- a part of a draw -------------------------------------------------------------------------------------------------------

_WHOLE_ROWS = 1 << 14  # up to this length of a row, drawing all of it and slicing costs less than a separate draw for every run


def flat_start(part: Part) -> int | None:
    """The flat index of a part's first element in the whole value; None if the part is not contiguous in it."""
    start, inner, runs = 0, 1, True
    for (a, b), d in zip(reversed(part.box), reversed(part.shape), strict=True):
        if not runs and b - a > 1:
            return None
        runs = runs and (a, b) == (0, d)
        start, inner = start + a * inner, inner * d
    return start


def draw_part(source: Source, out: Any, part: Part | None, first: int, draw: Callable[[int, Any], None]) -> None:
    """Fill a contiguous `out`, which is a part of a draw: `draw(i, flat)` fills a vector with elements i, i + 1, ...

    `first` is the index of the first element of the whole value. Without `part`, `out` is the whole value.
    """
    start = 0 if part is None else flat_start(part)
    if start is not None:
        draw(first + start, out.reshape(-1))
        return
    assert part is not None
    (top, bottom), inner = part.box[0], prod(part.shape[1:])
    if inner > _WHOLE_ROWS:
        below = replace(part, box=part.box[1:], shape=part.shape[1:])
        for k in range(top, bottom):
            draw_part(source, out[k - top], below, first + k * inner, draw)
        return
    rows = max(1, source.chunk // inner)
    window = tuple(slice(a, b) for a, b in part.box[1:])
    for k in range(top, bottom, rows):
        whole = source.xp.empty((min(rows, bottom - k), *part.shape[1:]), out.dtype)
        draw(first + k * inner, whole.reshape(-1))
        out[k - top : k - top + len(whole)] = whole[(slice(None), *window)]


def fill_draw(
    source: Source, out: Any, part: Part | None, draw: Draw, seed: int, step: int, offset: int, scale: float, shift: float
) -> None:
    """`out = draw * scale + shift`, chunk by chunk, for a contiguous `out`."""
    wide = out.dtype == np.float64
    f = np.float64 if wide else np.float32

    def fill(first: int, flat: Any) -> None:
        for k in range(0, flat.size, source.chunk):
            chunk = flat[k : k + source.chunk]
            z = draw(source, seed, step, first + k, chunk.size, wide)
            z *= f(scale)
            z += f(shift)
            chunk[...] = z

    draw_part(source, out, part, offset, fill)


def draw_key(per_run: bool, ctx: Any) -> int:
    """The step of a draw: the key of the context, or 0 for values that are equal in every run and in every iteration of loops."""
    return ctx.key if per_run else 0


def round_key(key: int, k: int) -> int:
    """The key of iteration `k`, counted from 0, of a loop that starts with `key`: SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014). The hash makes the iterations of nested loops draw different numbers.

    >>> len({round_key(round_key(step, i), j) for step in range(4) for i in range(9) for j in range(9)})
    324
    """
    z = (key + (k + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def integers(source: Source, seed: int, step: int, offset: int, count: int, low: int, high: int) -> Any:
    """int64 numbers from [low, high). In a range of n values, no probability is off by more than n / 2**32 (n / 2**64 beyond 2**32)."""
    xp, span = source.xp, high - low
    if span <= 1 << 32:
        scaled = lanes(source, seed, step, offset, count, 32).astype(xp.uint64) * xp.uint64(span) >> xp.uint64(32)
    else:
        scaled = lanes(source, seed, step, offset, count, 64) % xp.uint64(span)
    return scaled.astype(xp.int64) + xp.int64(low)
