"""Ops that draw random numbers: uniform, normal, integers, permutations, classes. They use ops/shared/random_numbers.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...ir.dtypes import as_dtype
from ...ir.errors import ProgramError
from ...ir.op_facets import Native, Rewrite
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import TensorType
from ..shared.random_numbers import (
    PHILOX,
    draw_key,
    draw_normal,
    draw_part,
    draw_truncated_normal,
    draw_uniform,
    fill_draw,
    integers,
    lanes,
    rounds,
)
from ..shared.samples import probabilities
from ..shared.types import need_ndim, need_size
from .fill import batch_shape, batch_words, fixed_shape


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
    def _bind(cls, ins, outs, attrs, ctx, part=None):
        return partial(cls.fill, PHILOX, *ins, out=outs[0] if len(outs) == 1 else tuple(outs), ctx=ctx, part=part, **attrs)

    native = Native(bind=_bind)


_SHAPED = {"shape": Required(tuple), "dtype": "float32"}
# per_run: a new draw in every run and iteration, as in a main program; otherwise always the same draw
_SEEDED = {"seed": 0, "per_run": False}


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
        fill_draw(source, out, part, draw_uniform, seed, draw_key(per_run, ctx), offset, max - min, min)

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
    rewrite = Rewrite(constant=True)

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"{batch_words(ins, outs, attrs)} | K"

    @staticmethod
    def infer(x, *, shape, dtype, min, max, seed, per_run, input_dim_idx, output_dim_idx):
        op = "uniform_random_batch_size_like"
        return TensorType(float_dtype(op, dtype), batch_shape(op, x, shape, input_dim_idx, output_dim_idx))

    @staticmethod
    def fill(source, x, *, out, ctx, shape, dtype, min, max, seed, per_run, input_dim_idx, output_dim_idx, part):
        fill_draw(source, out, part, draw_uniform, seed, draw_key(per_run, ctx), 0, max - min, min)

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
        fill_draw(source, out, part, cls.draw, seed, draw_key(per_run, ctx), offset, std, mean)


class GaussianRandomBatchSizeLike(Drawing):
    """`gaussian_random` whose size at `output_dim_idx` is Input's at `input_dim_idx`."""

    name = "gaussian_random_batch_size_like"
    inputs = ("Input",)
    attrs = {**_SHAPED, "mean": 0.0, "std": 1.0, **_SEEDED, "input_dim_idx": 0, "output_dim_idx": 0}
    rewrite = Rewrite(constant=True)
    pattern = UniformRandomBatchSizeLike.pattern

    @staticmethod
    def infer(x, *, shape, dtype, mean, std, seed, per_run, input_dim_idx, output_dim_idx):
        op = "gaussian_random_batch_size_like"
        return TensorType(float_dtype(op, dtype), batch_shape(op, x, shape, input_dim_idx, output_dim_idx))

    @staticmethod
    def fill(source, x, *, out, ctx, shape, dtype, mean, std, seed, per_run, input_dim_idx, output_dim_idx, part):
        fill_draw(source, out, part, draw_normal, seed, draw_key(per_run, ctx), 0, std, mean)

    @staticmethod
    def samples():
        yield Sample.of(np.zeros((4, 2), "float32"), shape=(-1, 3), seed=2, grad=(), why="the values do not depend on Input")
        yield Sample.of(np.zeros((4, 5), "float32"), shape=(3, -1, 2), mean=1.0, std=0.5, seed=2, input_dim_idx=1, output_dim_idx=1,
                        grad=(), why="the values do not depend on Input")  # fmt: skip


class GaussianRandom(_Normal):
    """Numbers drawn from the normal distribution with `mean` and `std`; `offset` is the index of the first one in the draw of `seed`."""

    name = "gaussian_random"
    draw = staticmethod(draw_normal)

    @staticmethod
    def samples():
        yield Sample.of(shape=(3, 5), seed=1)
        yield Sample.of(shape=(1,), mean=3.0, std=0.5, seed=4, dtype="float64", offset=1)
        yield Sample.of(shape=(3, 5, 7), seed=1)


class TruncatedGaussianRandom(_Normal):
    """Numbers drawn from the normal distribution with `mean` and `std`, within two standard deviations of the mean."""

    name = "truncated_gaussian_random"
    draw = staticmethod(draw_truncated_normal)

    @staticmethod
    def samples():
        yield Sample.of(shape=(3, 5), seed=1)
        yield Sample.of(shape=(2, 2), mean=1.0, std=2.0, seed=9, dtype="float64")
        yield Sample.of(shape=(4, 3, 5), seed=1)


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
        fill_draw(source, u, part, draw_uniform, seed, draw_key(per_run, ctx), 0, 1.0, 0.0)
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
        fill_draw(source, u[:, 0], part, draw_uniform, seed, draw_key(per_run, ctx), 0, 1.0, 0.0)
        upper = xp.cumsum(x, axis=1, dtype=xp.float64)
        # rounding errors fall to the last class; a class of probability 0 is never the first above u * total
        out[...] = xp.minimum((upper <= u * upper[:, -1:]).sum(axis=1), x.shape[1] - 1)

    @staticmethod
    def samples():
        yield Sample.of(np.array([[0, 1, 0], [0.5, 0, 0.5]], "float32"), seed=5, grad=(), why="the result is an id")
        yield Sample.of(probabilities(7, 4), seed=5, grad=(), why="the result is an id")
