"""Counter-based random numbers, and the ops that draw them.

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
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...ir.dtypes import as_dtype
from ...ir.errors import ProgramError
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.parts import Part
from ...ir.types import TensorType
from ..shared.samples import probabilities
from ..shared.types import need_ndim, need_size
from .fill import batch_shape, batch_words, fixed_shape

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


def _uniform(source: Source, seed: int, step: int, offset: int, count: int, wide: bool) -> Any:
    """In [0, 1): the top 24 bits of a 32-bit lane, or the top 53 bits of a word."""
    xp = source.xp
    if wide:
        return (lanes(source, seed, step, offset, count, 64) >> xp.uint64(11)).astype(xp.float64) * 2.0**-53
    u = (lanes(source, seed, step, offset, count, 32) >> xp.uint32(8)).astype(xp.float32)
    u *= xp.float32(2.0**-24)
    return u


def _normal(source: Source, seed: int, step: int, offset: int, count: int, wide: bool) -> Any:
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


def _truncated_normal(source: Source, seed: int, step: int, offset: int, count: int, wide: bool) -> Any:
    """Standard normal within two standard deviations, by the inverse of its distribution function: one uniform number per element."""
    xp = source.xp
    f = xp.float64 if wide else xp.float32
    x = _uniform(source, seed, step, offset, count, wide)
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
    return _draw(_uniform, source, seed, step, offset, shape, dtype)


def normal(source: Source, seed: int, step: int, offset: int, shape: Sequence[int], dtype: Any = "float32") -> Any:
    """Standard normal numbers: elements `offset` onwards of the draw of (seed, step). `dtype` is float32 or float64."""
    return _draw(_normal, source, seed, step, offset, shape, dtype)


def truncated_normal(source: Source, seed: int, step: int, offset: int, shape: Sequence[int], dtype: Any = "float32") -> Any:
    """Standard normal numbers within [-2, 2]: elements `offset` onwards of the draw of (seed, step)."""
    return _draw(_truncated_normal, source, seed, step, offset, shape, dtype)


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


def _fill(source: Source, out: Any, part: Part | None, draw: Draw, seed: int, step: int, offset: int, scale: float, shift: float) -> None:
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


# -- shared by the ops ---------------------------------------------------------------------------------------------------------


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


def float_dtype(op: str, dtype: str) -> str:
    """The full dtype name, which must be a float's. Raises ProgramError otherwise."""
    if not TensorType(as_dtype(dtype), ()).is_float:
        raise ProgramError(f"op {op}: dtype must be a float type, found {dtype}")
    return as_dtype(dtype)


class Drawing(OpDef):
    """Base of the ops that draw: `fill(source, *ins, out=, ctx=, part=, **attrs)` is the kernel for every array module."""

    effect = Effect.RANDOM
    fill: ClassVar[Callable[..., None]]

    @classmethod
    def kernel(cls, xp, *ins, out, ctx, part=None, **attrs):
        cls.fill(rounds(xp), *ins, out=out, ctx=ctx, part=part, **attrs)

    @classmethod
    def bind(cls, ins, outs, attrs, ctx, part=None):
        return partial(cls.fill, PHILOX, *ins, out=outs[0] if len(outs) == 1 else tuple(outs), ctx=ctx, part=part, **attrs)


_SHAPED = {"shape": Required(tuple), "dtype": "float32"}
_SEEDED = {
    "seed": 0,
    "per_run": False,
}  # per_run: a new draw in every run and iteration, as in a main program; otherwise always the same draw


class UniformRandom(Drawing):
    """Numbers drawn uniformly from [min, max), with `shape` and `dtype`; `offset` is the index of the first one in the draw of `seed`."""

    name = "uniform_random"
    attrs = {**_SHAPED, "min": -1.0, "max": 1.0, **_SEEDED, "offset": 0}
    pattern = "-> * | K"

    @staticmethod
    def infer(*, shape, dtype, min, max, seed, per_run, offset):
        need_size("uniform_random", "offset", offset, 0)
        if min > max:
            raise ProgramError(f"op uniform_random: min is {min}, above max, which is {max}")
        return TensorType(float_dtype("uniform_random", dtype), fixed_shape("uniform_random", shape))

    @staticmethod
    def fill(source, *, out, ctx, shape, dtype, min, max, seed, per_run, offset, part):
        _fill(source, out, part, _uniform, seed, draw_key(per_run, ctx), offset, max - min, min)

    @staticmethod
    def samples():
        yield Sample.of(shape=(3, 5), seed=1)
        yield Sample.of(shape=(7,), min=0.0, max=2.0, seed=-5, dtype="float64", per_run=True, offset=3)
        yield Sample.of(shape=(3, 4, 5), seed=1, offset=1)


class UniformRandomBatchSizeLike(Drawing):
    """`uniform_random` whose size at `output_dim_idx` is Input's at `input_dim_idx`."""

    name = "uniform_random_batch_size_like"
    inputs = ("Input",)
    attrs = {**_SHAPED, "min": -1.0, "max": 1.0, **_SEEDED, "input_dim_idx": 0, "output_dim_idx": 0}
    constant = True

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"{batch_words(ins, outs, attrs)} | K"

    @staticmethod
    def infer(x, *, shape, dtype, min, max, seed, per_run, input_dim_idx, output_dim_idx):
        op = "uniform_random_batch_size_like"
        return TensorType(float_dtype(op, dtype), batch_shape(op, x, shape, input_dim_idx, output_dim_idx))

    @staticmethod
    def fill(source, x, *, out, ctx, shape, dtype, min, max, seed, per_run, input_dim_idx, output_dim_idx, part):
        _fill(source, out, part, _uniform, seed, draw_key(per_run, ctx), 0, max - min, min)

    @staticmethod
    def samples():
        yield Sample.of(np.zeros((4, 2), "float32"), shape=(-1, 3), seed=2, grad=(), why="the values do not depend on Input")
        yield Sample.of(np.zeros((4, 5), "float32"), shape=(3, -1, 2), seed=2, input_dim_idx=1, output_dim_idx=1, grad=(),
                        why="the values do not depend on Input")  # fmt: skip


class _Normal(Drawing):
    """Base of the draws from a normal distribution."""

    attrs = {**_SHAPED, "mean": 0.0, "std": 1.0, **_SEEDED, "offset": 0}
    pattern = "-> * | K"
    draw: ClassVar[Any]

    @classmethod
    def infer(cls, *, shape, dtype, offset, **_):
        need_size(cls.name, "offset", offset, 0)
        return TensorType(float_dtype(cls.name, dtype), fixed_shape(cls.name, shape))

    @classmethod
    def fill(cls, source, *, out, ctx, shape, dtype, mean, std, seed, per_run, offset, part):
        _fill(source, out, part, cls.draw, seed, draw_key(per_run, ctx), offset, std, mean)


class GaussianRandomBatchSizeLike(Drawing):
    """`gaussian_random` whose size at `output_dim_idx` is Input's at `input_dim_idx`."""

    name = "gaussian_random_batch_size_like"
    inputs = ("Input",)
    attrs = {**_SHAPED, "mean": 0.0, "std": 1.0, **_SEEDED, "input_dim_idx": 0, "output_dim_idx": 0}
    constant = True
    pattern = UniformRandomBatchSizeLike.pattern

    @staticmethod
    def infer(x, *, shape, dtype, mean, std, seed, per_run, input_dim_idx, output_dim_idx):
        op = "gaussian_random_batch_size_like"
        return TensorType(float_dtype(op, dtype), batch_shape(op, x, shape, input_dim_idx, output_dim_idx))

    @staticmethod
    def fill(source, x, *, out, ctx, shape, dtype, mean, std, seed, per_run, input_dim_idx, output_dim_idx, part):
        _fill(source, out, part, _normal, seed, draw_key(per_run, ctx), 0, std, mean)

    @staticmethod
    def samples():
        yield Sample.of(np.zeros((4, 2), "float32"), shape=(-1, 3), seed=2, grad=(), why="the values do not depend on Input")
        yield Sample.of(np.zeros((4, 5), "float32"), shape=(3, -1, 2), mean=1.0, std=0.5, seed=2, input_dim_idx=1, output_dim_idx=1,
                        grad=(), why="the values do not depend on Input")  # fmt: skip


class GaussianRandom(_Normal):
    """Numbers drawn from the normal distribution with `mean` and `std`; `offset` is the index of the first one in the draw of `seed`."""

    name = "gaussian_random"
    draw = staticmethod(_normal)

    @staticmethod
    def samples():
        yield Sample.of(shape=(3, 5), seed=1)
        yield Sample.of(shape=(1,), mean=3.0, std=0.5, seed=4, dtype="float64", offset=1)
        yield Sample.of(shape=(3, 5, 7), seed=1)


class TruncatedGaussianRandom(_Normal):
    """Numbers drawn from the normal distribution with `mean` and `std`, within two standard deviations of the mean."""

    name = "truncated_gaussian_random"
    draw = staticmethod(_truncated_normal)

    @staticmethod
    def samples():
        yield Sample.of(shape=(3, 5), seed=1)
        yield Sample.of(shape=(2, 2), mean=1.0, std=2.0, seed=9, dtype="float64")
        yield Sample.of(shape=(4, 3, 5), seed=1)


def integers(source: Source, seed: int, step: int, offset: int, count: int, low: int, high: int) -> Any:
    """int64 numbers from [low, high). In a range of n values, no probability is off by more than n / 2**32 (n / 2**64 beyond 2**32)."""
    xp, span = source.xp, high - low
    if span <= 1 << 32:
        scaled = lanes(source, seed, step, offset, count, 32).astype(xp.uint64) * xp.uint64(span) >> xp.uint64(32)
    else:
        scaled = lanes(source, seed, step, offset, count, 64) % xp.uint64(span)
    return scaled.astype(xp.int64) + xp.int64(low)


class Randint(Drawing):
    """Integers drawn from [low, high), with `shape` and `dtype` (int32 or int64)."""

    name = "randint"
    attrs = {"shape": Required(tuple), "dtype": "int64", "low": Required(int), "high": Required(int), **_SEEDED, "offset": 0}
    pattern = "-> * | K"

    @staticmethod
    def infer(*, shape, dtype, low, high, seed, per_run, offset):
        need_size("randint", "offset", offset, 0)
        if as_dtype(dtype) not in ("int32", "int64"):
            raise ProgramError(f"op randint: dtype must be int32 or int64, found {dtype}")
        bits = 8 * np.dtype(as_dtype(dtype)).itemsize - 1
        if not -(1 << bits) <= low < high <= 1 << bits:
            raise ProgramError(f"op randint: low {low} must be below high {high}, both within {dtype}")
        return TensorType(as_dtype(dtype), fixed_shape("randint", shape))

    @staticmethod
    def fill(source, *, out, ctx, shape, dtype, low, high, seed, per_run, offset, part):
        def fill(first: int, flat: Any) -> None:
            flat[...] = integers(source, seed, draw_key(per_run, ctx), first, flat.size, low, high)

        draw_part(source, out, part, offset, fill)

    @staticmethod
    def samples():
        yield Sample.of(shape=(3, 4), low=0, high=10, seed=3)
        yield Sample.of(shape=(5,), low=-(2**40), high=2**40, seed=3)
        yield Sample.of(shape=(5,), low=-1, high=0, dtype="int32")


class Randperm(Drawing):
    """The numbers 0 to n - 1 in random order."""

    name = "randperm"
    attrs = {"n": Required(int), "dtype": "int64", **_SEEDED}
    pattern = "-> n | n@"

    @staticmethod
    def infer(*, n, dtype, seed, per_run):
        need_size("randperm", "n", n, 1)
        return TensorType(as_dtype(dtype), (n,))

    @staticmethod
    def fill(source, *, out, ctx, n, dtype, seed, per_run, part):
        start = part.start if part is not None else 0
        out[...] = source.xp.argsort(lanes(source, seed, draw_key(per_run, ctx), 0, n, 64))[start : start + out.size]

    @staticmethod
    def samples():
        yield Sample.of(n=6, seed=3)
        yield Sample.of(n=1, dtype="int32")


class Bernoulli(Drawing):
    """1 with the probability in X, otherwise 0, element by element."""

    name = "bernoulli"
    inputs = ("X",)
    attrs = _SEEDED
    pattern = "* -> * | K"

    @staticmethod
    def infer(x, **_):
        float_dtype("bernoulli", x.dtype)
        return x

    @staticmethod
    def fill(source, x, *, out, ctx, seed, per_run, part):
        u = source.xp.empty(x.shape, "float32")
        _fill(source, u, part, _uniform, seed, draw_key(per_run, ctx), 0, 1.0, 0.0)
        out[...] = u < x

    @staticmethod
    def samples():
        yield Sample.of(np.array([[0, 1, 0.5], [0.2, 0.8, 1]], "float32"), seed=5, grad=(), why="a step function")
        yield Sample.of(np.linspace(0, 1, 60, dtype="float32").reshape(3, 5, 4), seed=6, grad=(), why="a step function")


class SamplingId(Drawing):
    """For each row of probabilities X [n, classes] one class, drawn with them."""

    name = "sampling_id"
    inputs = ("X",)
    attrs = {"seed": 0, "per_run": True}
    pattern = "n c -> n | c! K"

    @staticmethod
    def infer(x, **_):
        need_ndim("sampling_id", "X", x, 2)
        float_dtype("sampling_id", x.dtype)
        return TensorType("int64", x.shape[:1])

    @staticmethod
    def fill(source, x, *, out, ctx, seed, per_run, part):
        xp = source.xp
        u = xp.empty((x.shape[0], 1), "float64")
        _fill(source, u[:, 0], part, _uniform, seed, draw_key(per_run, ctx), 0, 1.0, 0.0)
        upper = xp.cumsum(x, axis=1, dtype=xp.float64)
        # rounding errors fall to the last class; a class of probability 0 is never the first above u * total
        out[...] = xp.minimum((upper <= u * upper[:, -1:]).sum(axis=1), x.shape[1] - 1)

    @staticmethod
    def samples():
        yield Sample.of(np.array([[0, 1, 0], [0.5, 0, 0.5]], "float32"), seed=5, grad=(), why="the result is an id")
        yield Sample.of(probabilities(7, 4), seed=5, grad=(), why="the result is an id")
