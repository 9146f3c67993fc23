"""Dropout: elements set to 0 by counter-based random numbers, so that the shards of all ranks equal the result of one device."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import native
from ...ir.dtypes import dtype_name
from ...ir.errors import ProgramError
from ...ir.op_facets import Autocast, Native, Rewrite, Storage
from ...ir.opdef import OpDef, Required, Sample
from ..data.random import Drawing, float_dtype
from ..expr.native import expression_calls
from ..expr.nodes import const, make_node, sym
from ..shared.native import NARROW_FLOATS
from ..shared.random_numbers import Source, draw_part, flat_start, lanes
from ..shared.samples import bits, f32


def _check(p: float, implementation: str) -> None:
    if not 0.0 <= p <= 1.0:
        raise ProgramError(f"op dropout: dropout_prob must be from 0 to 1, found {p}")
    if implementation not in ("downgrade_in_infer", "upscale_in_train"):
        raise ProgramError(f"op dropout: dropout_implementation must be downgrade_in_infer or upscale_in_train, found {implementation!r}")


def _kept_scale(p: float, implementation: str) -> float:
    """The factor of a kept element in training."""
    return 1.0 / (1.0 - p) if implementation == "upscale_in_train" and p < 1.0 else 1.0


def _apply(xp: Any, x: Any, mask: Any, out: Any, scale: float) -> None:
    """`out = x * mask * scale`; `mask` is bool."""
    xp.multiply(x, mask, out=out)
    if scale != 1.0:
        out *= out.dtype.type(scale)


def _signed(seed: int) -> int:
    """The low 64 bits as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


class Dropout(Drawing):
    """X with each element set to 0 with probability `dropout_prob`, newly drawn in each run and iteration; Mask (uint8) is 1 for kept
    elements.

    With `downgrade_in_infer`, kept elements stay unchanged and inference multiplies by 1 - dropout_prob. With `upscale_in_train`, kept
    elements are divided by 1 - dropout_prob and inference changes nothing. The probability is rounded to a multiple of 1/65536: element i
    is dropped if the 16-bit lane i of the stream of (seed, step) is below it.
    """

    name = "dropout"
    autocast = Autocast(mixed="any")
    inputs, outputs = ("X",), ("Out", "Mask?")
    attrs = {"dropout_prob": Required(float), "is_test": False, "seed": 0, "dropout_implementation": "downgrade_in_infer"}
    storage = Storage(inplace=(("X", "Out"),))
    rewrite = Rewrite(identity_if=lambda x, attrs, count: attrs["is_test"] and attrs["dropout_implementation"] == "upscale_in_train")

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"* -> *, * | L(0>0) {'' if attrs['is_test'] else 'K'}"

    @staticmethod
    def infer(x, *, dropout_prob, is_test, seed, dropout_implementation):
        _check(dropout_prob, dropout_implementation)
        float_dtype("dropout", x.dtype)
        return x, x.with_dtype("uint8")

    @staticmethod
    def grad(b, op, g):
        g = g[0] if isinstance(g, (tuple, list)) else g
        a = op.attrs
        if a["is_test"]:
            return g if a["dropout_implementation"] == "upscale_in_train" else b.scale(g, scale=1.0 - a["dropout_prob"])
        if op["Mask"] is None:
            raise ProgramError("op dropout: its gradient needs output 'Mask', which is absent")
        return b.dropout_grad(op["Mask"], g, dropout_prob=a["dropout_prob"], dropout_implementation=a["dropout_implementation"])

    @staticmethod
    def fill(source: Source, x, *, out, ctx, part, dropout_prob, is_test, seed, dropout_implementation):
        xp, (y, mask) = source.xp, out
        if is_test:
            factor = 1.0 - dropout_prob if dropout_implementation == "downgrade_in_infer" else 1.0
            xp.multiply(x, y.dtype.type(factor), out=y)
            if mask is not None:
                mask.fill(1)
            return
        limit = round(dropout_prob * 65536)
        scale = _kept_scale(dropout_prob, dropout_implementation)
        if mask is None:
            mask = xp.empty(x.shape, xp.uint8)

        def draw(first: int, kept: Any) -> None:
            if limit > 65535:
                kept.fill(False)
            else:
                xp.greater_equal(lanes(source, seed, ctx.key, first, kept.size, 16), xp.uint16(limit), out=kept)

        start = flat_start(part) if part is not None else 0
        if start is None:
            draw_part(source, mask.view(bool), part, 0, draw)
        line, target, kept = x.reshape(-1), y.reshape(-1), mask.reshape(-1).view(bool)
        size = source.chunk // 2  # the values need memory besides the words and the mask
        for k in range(0, x.size, size):
            chunk = kept[k : k + size]
            if start is not None:
                draw(start + k, chunk)
            _apply(xp, line[k : k + size], chunk, target[k : k + size], scale)

    @staticmethod
    def _calls(ins, outs, attrs, ctx, dry=False, part=None):
        """The same random numbers; NumPy draws them if the part of the value is not contiguous."""
        (x,), (y, mask), p = ins, outs, attrs["dropout_prob"]
        kind, start = NARROW_FLOATS.get(dtype_name(x.dtype)), flat_start(part) if part is not None else 0
        dense = all(a is None or a.flags.c_contiguous for a in (x, y, mask))
        if kind is None or y.dtype != x.dtype or start is None or not dense or attrs["is_test"]:
            return None
        if dry:
            return []
        words = [native.address(x), native.address(y), 0 if mask is None else native.address(mask), x.size, start]
        words += [_signed(attrs["seed"]), native.address(ctx.cell), round(p * 65536), _kept_scale(p, attrs["dropout_implementation"])]
        return [native.NativeCall(f"dropout_{kind}", tuple(words), (x, y, mask, ctx.cell))]

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        why = "newly drawn in every run; the gradient is tested with a fixed mask"
        yield Sample.of(f32(3, 5), dropout_prob=0.5, seed=3, grad=(), why=why)
        yield Sample.of(f32(3, 5, 7), dropout_prob=0.3, seed=4, grad=(), why=why)
        yield Sample.of(f32(7), dropout_prob=0.25, seed=3, dropout_implementation="upscale_in_train", grad=(), why=why)
        yield Sample.of(f32(2, 3), dropout_prob=1.0, seed=1, dropout_implementation="upscale_in_train", grad=(), why=why)
        yield Sample.of(f32(2, 3), dropout_prob=0.0, seed=1)
        yield Sample.of(f32(2, 3), dropout_prob=0.25, is_test=True)
        yield Sample.of(f32(2, 3), dropout_prob=0.25, is_test=True, dropout_implementation="upscale_in_train")


class DropoutGrad(OpDef):
    """The gradient where Mask kept an element, with the same factor; 0 elsewhere."""

    name = "dropout_grad"
    inputs, outputs = ("Mask", "Out@GRAD"), ("X@GRAD",)
    attrs = {"dropout_prob": Required(float), "dropout_implementation": "downgrade_in_infer"}
    pattern = "*, * -> * | L(1)"
    storage = Storage(inplace=(("Out@GRAD", "X@GRAD"),))

    @staticmethod
    def infer(mask, g, **attrs):
        return g

    @staticmethod
    def kernel(xp, mask, g, *, out, dropout_prob, dropout_implementation):
        _apply(xp, g, mask.view(bool), out, _kept_scale(dropout_prob, dropout_implementation))

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        mask, g = ins
        computed = np.promote_types(g.dtype, np.float32).type
        scale = float(computed(_kept_scale(attrs["dropout_prob"], attrs["dropout_implementation"])))
        e = make_node("mul", sym("g"), sym("kept"))
        e = e if scale == 1.0 else make_node("mul", e, const(scale))
        return expression_calls(e, {"g": g, "kept": mask.view(bool)}, outs[0], dry)

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        mask = bits(5, 3).astype("uint8")
        yield Sample.of(mask, f32(5, 3), dropout_prob=0.5, dropout_implementation="upscale_in_train", grad=(), why="a gradient op")
