"""Stochastic rounding of float32 to bfloat16, by counter-based random numbers: the mean of many roundings is the value."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import ProgramError, Sample
from ...ir.op_facets import Autocast
from ..data.random import Drawing
from ..shared.random_numbers import Source, draw_part, lanes
from ..shared.samples import f32
from .base import WHY


class StochasticRound(Drawing):
    """X (float32) in bfloat16: one of the two neighbours, the nearer one with the higher probability, so that the expected result is X.

    The probability of the neighbour further from 0 is the distance of X from the other one, divided by the distance of the two. Values of
    bfloat16 and infinities stay; NaN stays NaN. Beyond the largest finite value the neighbour is infinity. Newly drawn in each run and
    iteration: element i takes the 16-bit lane i of the stream of (seed, step). It is added to the low half of X, which is then cut off.
    """

    name = "stochastic_round"
    inputs, outputs = ("X",), ("Out",)
    attrs = {"seed": 0}
    pattern = "* -> * | K"
    autocast = Autocast(takes_16_bit=lambda device, outs: True)

    @staticmethod
    def infer(x, *, seed):
        if x.dtype != "float32":
            raise ProgramError(f"op stochastic_round: X must be float32, found {x}")
        return x.with_dtype("bfloat16")

    @staticmethod
    def fill(source: Source, x, *, out, ctx, part, seed):
        xp = source.xp
        size = source.chunk // 16  # the words and four temporaries stay in the cache
        drawn = out.view(xp.uint16)

        def draw(first: int, flat: Any) -> None:
            for k in range(0, flat.size, size):
                chunk = flat[k : k + size]
                chunk[...] = lanes(source, seed, ctx.key, first + k, chunk.size, 16)

        draw_part(source, drawn, part, 0, draw)
        line, target = x.reshape(-1), drawn.reshape(-1)
        for k in range(0, line.size, size):
            value, chunk = line[k : k + size], target[k : k + size]
            bits = value.view(xp.uint32) + chunk
            bits >>= xp.uint32(16)
            bits[xp.isnan(value)] = 0x7FC0
            chunk[...] = bits

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 5), seed=3, grad=(), why=WHY)
        yield Sample.of(f32(3, 4, 7), seed=4, grad=(), why=WHY)
        yield Sample.of(np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, 1e-41], "float32"), seed=5, grad=(), why=WHY)
