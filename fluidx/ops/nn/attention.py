"""Attention and its gradient: the values, weighted by the softmax of the products of queries and keys.

The C kernels hold only the scores of a block of rows and some hundred keys at a time; the gradient recomputes the weights from the
logarithm of each row's sum. The NumPy kernels hold all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ... import native
from ...ir import ANY, Arithmetic, Autocast, Native, OpDef, ProgramError, Required, Sample, Storage, TensorType
from ...ir.axis_letters import letters
from ...ir.parts import Part
from ..shared.broadcast import reduced
from ..shared.native import FLOATS
from ..shared.samples import bits, f32
from ..shared.types import meet, merge_size, need_float, same_dtype
from .norm_shared import put, stat_dtype

NAME = "scaled_dot_product_attention"


# -- types and patterns -------------------------------------------------------------------------------------------------------------


def _heads(q: TensorType, k: TensorType) -> tuple[int, int]:
    """The number of heads of Q, and that of K and V. Neighbouring heads of Q share one of K and V. An open number counts as equal to the
    other one.
    """
    if q.ndim < 3:
        return 1, 1
    many, few = q.shape[-3], k.shape[-3]
    if ANY in (many, few):
        return (many, few) if few == 1 else (max(many, few),) * 2
    if many != few and (not few or many % few):
        raise ProgramError(f"op {NAME}: the {many} heads of Q {q} must be a multiple of the {few} heads of K {k}")
    return many, few


def _scores(q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None) -> TensorType:
    """The type of the scores, [..., rows of Q, rows of K]."""
    for slot, t in (("Q", q), ("K", k), ("V", v)):
        need_float(NAME, slot, t)
        if t.ndim != q.ndim or t.ndim < 2:
            raise ProgramError(f"op {NAME} needs Q, K and V with the same number of axes, 2 or more, got {q}, {k} and {v}")
    same_dtype(NAME, Q=q, K=k, V=v)
    lead = [merge_size(NAME, f"axis {i} of Q, K and V", q.shape[i], max(k.shape[i], v.shape[i])) for i in range(q.ndim - 3)]
    heads = [_heads(q, k)[0]] if q.ndim > 2 else []
    if not meet(q.shape[-1], k.shape[-1]):
        raise ProgramError(f"op {NAME}: Q {q} and K {k} must have the same last axis, found {q.shape[-1]} and {k.shape[-1]}")
    if not all(map(meet, k.shape[:-1], v.shape[:-1])):
        raise ProgramError(f"op {NAME}: K {k} and V {v} must be equal in all axes but the last")
    scores = q.with_shape((*lead, *heads, q.shape[-2], max(k.shape[-2], v.shape[-2])))
    if mask is not None:
        if mask.dtype not in ("bool", q.dtype):
            raise ProgramError(f"op {NAME}: Mask must be bool or have the dtype of Q, {q.dtype}, found {mask.dtype}")
        fits = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
        if mask.ndim > scores.ndim or not all(a == 1 or meet(a, b) for a, b in fits):
            raise ProgramError(f"op {NAME}: Mask {mask} does not broadcast to the scores of shape {list(scores.shape)}")
    return scores


def _words(q: TensorType, k: TensorType, mask: TensorType | None) -> tuple[str, str, str, dict[str, int]]:
    """The words for the leading axes of Q and of K, the words for Mask, and sizes. A head of Q is (head of K, index in its group)."""
    lead = letters(max(q.ndim - 3, 0), "b")
    many, few = _heads(q, k)
    sizes: dict[str, int] = {}
    left = right = "" if q.ndim < 3 else "h"
    if many != few:
        left, right = ("(h m0)", "h") if few > 1 else ("m0", ".")
        sizes = {"h": few, "m0": many // few} if few > 1 else {}
    words = [*lead.split(), *([left] if left else []), "s", "t"]
    return f"{lead} {left}", f"{lead} {right}", " ".join(words[len(words) - mask.ndim :]) if mask is not None else ".", sizes


def _flops(products: int):
    """The operations of `products` matrix products with the scores; `causal` needs half of them."""

    def flops(ins, outs, attrs):
        q, k, v = ins[:3]
        each = products * (q.shape[-1] + v.shape[-1]) + 5
        return prod(q.shape[:-1]) * k.shape[-2] * each // (2 if attrs["causal"] else 1)

    return staticmethod(flops)


# -- kernels for any array module ---------------------------------------------------------------------------------------------------------


def _for_heads(xp: Any, x: Any, q: Any) -> Any:
    """K or V with its heads repeated to match those of Q."""
    if q.ndim < 3 or x.shape[-3] == q.shape[-3]:
        return x
    return xp.repeat(x, q.shape[-3] // max(x.shape[-3], 1), axis=-3)


def _of_heads(g: Any, x: Any) -> Any:
    """The gradient of `x` from the gradient of the result of `_for_heads`."""
    if g.shape == x.shape:
        return g
    return g.reshape(*x.shape[:-2], -1, *x.shape[-2:]).sum(axis=-3)


def _seen_scores(xp: Any, q: Any, k: Any, mask: Any, causal: bool, scale: float, part: Part | None) -> Any:
    """The scores, -infinity where the mask hides a position."""
    scores = xp.matmul(q, k.swapaxes(-1, -2))
    scores *= scores.dtype.type(scale)
    if mask is not None:
        scores = scores + mask if mask.dtype != bool else xp.where(mask, scores, scores.dtype.type(-np.inf))
    if causal:
        first = 0 if part is None else part.start
        seen = xp.arange(first, first + q.shape[-2])[:, None] >= xp.arange(k.shape[-2])
        scores = xp.where(seen, scores, scores.dtype.type(-np.inf))
    return scores


def _shift(xp: Any, top: Any) -> Any:
    """The number to subtract before exp: 0 where everything is hidden from a row, so that its weights are 0."""
    return xp.where(top == -np.inf, top.dtype.type(0), top)


# -- native ------------------------------------------------------------------------------------------------------------------------------


def _steps(x: Any) -> tuple[int, ...] | None:
    """The strides, in elements, of batch, heads, rows and columns; None if the batch axes have no common stride."""
    strides = [s // x.itemsize for s in x.strides]
    if any(s % x.itemsize for s in x.strides):
        return None
    shape, strides = (1,) * (4 - x.ndim) + x.shape, [0] * (4 - x.ndim) + strides
    batch = [(n, s) for n, s in zip(shape[:-3], strides[:-3], strict=True) if n > 1]
    if any(s != n * inner for (_, s), (n, inner) in zip(batch, batch[1:], strict=False)):
        return None
    return (batch[-1][1] if batch else 0, *strides[-3:])


def _distances(x: Any) -> tuple[int, int, int] | None:
    """The strides of batch, heads and rows, for matrices with contiguous rows; otherwise None."""
    steps = _steps(x)
    if steps is None or steps[3] != 1 and x.shape[-1] > 1 or steps[2] < x.shape[-1] and x.shape[-2] > 1:
        return None
    return *steps[:2], max(steps[2], x.shape[-1])


def _matrices(x: Any) -> list[int] | None:
    """(address, strides) of such matrices; zeros for None."""
    if x is None:
        return [0] * 4
    distances = _distances(x)
    return None if distances is None else [native.address(x), *distances]


def _strided(slot: str, x: Any) -> bool:
    return slot in ("Q", "K", "V", "Out", "Out@GRAD", "Q@GRAD", "K@GRAD", "V@GRAD") and _distances(x) is not None


def _mask_words(mask: Any, scores: tuple[int, ...]) -> list[int] | None:
    """(address, 0 for no mask, 1 for numbers or 2 for bool, strides of batch, heads, rows and columns)."""
    if mask is None:
        return [0] * 6
    steps = _steps(np.broadcast_to(mask, scores))
    if steps is None or steps[3] not in (0, 1):
        return None
    return [native.address(mask), 2 if mask.dtype == bool else 1, *steps]


def _calls(name: str, ins: Sequence[Any], more: Sequence[Any], flat: Sequence[Any], attrs: Any, part: Part | None, dry: bool) -> Any:
    """Calls of attention.h on Q, K, V, Mask; `more` are matrices with contiguous rows, `flat` are contiguous arrays."""
    (q, k, v, mask), kind = ins, FLOATS.get(ins[0].dtype.name)
    arrays = [a for a in (*ins, *more, *flat) if a is not None]
    if kind is None or not native.has_products() or any(a.dtype not in (q.dtype, bool) or not a.size for a in arrays):
        return None
    matrices = [_matrices(x) for x in (q, k, v, *more)]
    masked = _mask_words(mask, (*q.shape[:-1], k.shape[-2]))
    if masked is None or None in matrices or not all(a is None or a.flags.c_contiguous for a in flat):
        return None
    if dry:
        return []
    heads, group = (q.shape[-3], q.shape[-3] // k.shape[-3]) if q.ndim > 2 else (1, 1)
    sizes = (prod(q.shape[:-3]), heads, group, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    how = (int(attrs["causal"]), 0 if part is None else part.start, float(attrs["scale"]))
    words = (*sizes, *how, *masked, *(0 if a is None else native.address(a) for a in flat), *(w for x in matrices for w in x or ()))
    return [native.NativeCall(f"{name}_{kind}", words, tuple(arrays))]


# -- the ops -----------------------------------------------------------------------------------------------------------------------------


class ScaledDotProductAttention(OpDef):
    """softmax(Q @ K' * scale + Mask) @ V: for each row of Q the mean of the values in V, weighted by how well the rows of K match it.

    Q is [..., heads, s, d], K [..., heads, t, d] and V [..., heads, t, e]; all axes before s may be absent. The number of heads of Q may be
    a multiple of that of K and V: neighbouring heads of Q share one. Mask broadcasts to the scores [..., heads, s, t]. A float mask is
    added to the scores; False in a bool mask hides the position. With `causal`, row i sees the first i + 1 rows of K, for any s and t. A
    row that sees no position gives zeros, as in PyTorch; softmax in separate operators gives NaN. Lse is the logarithm of each row's sum of
    exponentials.

    Source: Vaswani et al. 2017, Dao et al. 2022 (blocks of scores); PyTorch's function of this name.
    """

    name = NAME
    autocast = Autocast(mixed="half")
    arithmetic = Arithmetic(flops=_flops(2), sums_products="attention")
    inputs, outputs = ("Q", "K", "V", "Mask?"), ("Out", "Lse?")
    attrs = {"scale": Required(float), "causal": False}
    storage = Storage(strided=_strided)

    @staticmethod
    def infer(q, k, v, mask, *, scale, causal):
        scores = _scores(q, k, v, mask)
        return scores.with_shape((*scores.shape[:-1], v.shape[-1])), TensorType(stat_dtype(q), scores.shape[:-1])

    @staticmethod
    def pattern(ins, outs, attrs):
        q, k, mask, sizes = _words(ins[0], ins[1], ins[3])
        return f"{q} s d, {k} t d, {k} t e, {mask} -> {q} s e, {q} s | d! t! e:= L(2>0) {'s@' if attrs['causal'] else ''}", sizes

    @staticmethod
    def grad(b, op, g):
        if g[1] is not None:
            raise ProgramError(f"op {NAME} has a gradient through its first output only; Lse cannot be differentiated")
        if op["Lse"] is None:
            raise ProgramError(f"op {NAME}: its gradient needs output 'Lse', which is absent")
        skip = {f"{slot}@GRAD": None for slot in ("Q", "K", "V") if not op.needs(slot)}
        if not op.needs("Mask"):
            skip["Scores@GRAD"] = None
        mask = op["Mask"]
        *made, scores = b.emit(f"{NAME}_grad", op["Q"], op["K"], op["V"], mask, op["Out"], op["Lse"], g[0], out=skip, **op.attrs)
        return *made, None if scores is None else reduced(b, scores, mask, scores, scores)

    @staticmethod
    def kernel(xp, q, k, v, mask, *, out, scale, causal, part=None):
        to, lse = out
        scores = _seen_scores(xp, q, _for_heads(xp, k, q), mask, causal, scale, part)
        if not scores.size:  # empty scores have no maximum
            to[...] = 0
            put(lse, -np.inf)
            return
        shift = _shift(xp, scores.max(axis=-1, keepdims=True))
        scores = xp.exp(scores - shift)
        total = scores.sum(axis=-1, keepdims=True)
        none = total == 0
        full = xp.where(none, total.dtype.type(1), total)
        to[...] = xp.matmul(scores, _for_heads(xp, v, q)) / full
        put(lse, xp.where(none, total.dtype.type(-np.inf), xp.log(full) + shift)[..., 0])

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        return _calls("attention", ins, (outs[0], *[None] * 4), (outs[1], None), attrs, part, dry)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3, 5, 4), f32(2, 3, 6, 4, seed=1), f32(2, 3, 6, 7, seed=2), None, scale=0.5)
        yield Sample.of(f32(5, 4), f32(6, 4, seed=1), f32(6, 3, seed=2), f32(5, 6, seed=3), scale=0.7)
        yield Sample.of(f32(2, 5, 4), f32(2, 6, 4, seed=1), f32(2, 6, 3, seed=2), bits(6, seed=2) > 0, scale=-0.7)
        q, k, v = f32(4, 6, 5, 2), f32(4, 2, 7, 2, seed=1), f32(4, 2, 7, 3, seed=2)
        yield Sample.of(q, k, v, f32(4, 1, 1, 7, seed=3), scale=1.0)
        yield Sample.of(q, k, v, None, scale=0.6, causal=True)
        yield Sample.of(f32(3, 7, 2), f32(1, 5, 2, seed=1), f32(1, 5, 3, seed=2), f32(3, 1, 5, seed=3), scale=0.6, causal=True)
        yield Sample.of(f32(2, 3, 2, 5, 4), f32(2, 3, 2, 6, 4, seed=1), f32(2, 3, 2, 6, 3, seed=2), f32(3, 1, 5, 1, seed=3), scale=0.5)
        yield Sample.of(f32(2, 1, 3), f32(2, 1, 3, seed=1), f32(2, 1, 2, seed=2), None, scale=0.5)
        # the first row sees no position
        yield Sample.of(f32(3, 4), f32(5, 4, seed=1), f32(5, 2, seed=2), np.arange(15).reshape(3, 5) % 5 < [[0], [3], [4]], scale=0.5)


class ScaledDotProductAttentionGrad(OpDef):
    """Gradients of scaled_dot_product_attention with respect to Q, K, V and the masked scores; the last may be absent.

    The gradient of a float Mask is that of the scores, summed to its shape.
    """

    name = f"{NAME}_grad"
    arithmetic = Arithmetic(flops=_flops(5), sums_products="attention")
    inputs, outputs = ("Q", "K", "V", "Mask?", "Out", "Lse", "Out@GRAD"), ("Q@GRAD?", "K@GRAD?", "V@GRAD?", "Scores@GRAD?")
    attrs = {"scale": Required(float), "causal": False}
    storage = Storage(strided=_strided)

    @staticmethod
    def infer(q, k, v, mask, out, lse, g, *, scale, causal):
        return q, k, v, _scores(q, k, v, mask)

    @staticmethod
    def pattern(ins, outs, attrs):
        q, k, mask, sizes = _words(ins[0], ins[1], ins[3])
        values, result = f"{k} t e", f"{q} s e"
        # the weights follow from Lse, so only sums of products remain
        rest = f"d! s:+ e:+ m?:+ L(6) {'s@ t!' if attrs['causal'] else 't:+'}"
        return f"{q} s d, {k} t d, {values}, {mask}, {result}, {q} s, {result} -> {q} s d, {k} t d, {values}, {q} s t | {rest}", sizes

    @staticmethod
    def kernel(xp, q, k, v, mask, to, lse, g, *, out, scale, causal, part=None):
        dq, dk, dv, ds = out
        keys, values = _for_heads(xp, k, q), _for_heads(xp, v, q)
        lse = _shift(xp, lse)[..., None]
        weights = xp.exp(_seen_scores(xp, q, keys, mask, causal, scale, part) - lse)
        if dv is not None:
            dv[...] = _of_heads(xp.matmul(weights.swapaxes(-1, -2), g), v)
        weights *= xp.matmul(g, values.swapaxes(-1, -2)) - (g * to).sum(axis=-1, keepdims=True)
        put(ds, weights)
        weights *= weights.dtype.type(scale)
        if dq is not None:
            dq[...] = xp.matmul(weights, keys)
        if dk is not None:
            dk[...] = _of_heads(xp.matmul(weights.swapaxes(-1, -2), q), k)

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        *operands, to, lse, g = ins
        return _calls("attention_grad", operands, (to, g, *outs[:3]), (lse, outs[3]), attrs, part, dry)

    native = Native(calls=_calls, any_size=True)

    @staticmethod
    def samples():
        why = "a gradient itself"
        for s in ScaledDotProductAttention.samples():
            q, k, v, mask = s.args
            out, lse = np.empty((*q.shape[:-1], v.shape[-1]), "float32"), np.empty(q.shape[:-1], "float32")
            attrs = ScaledDotProductAttention.complete_attrs(s.attrs)
            ScaledDotProductAttention.kernel(np, q, k, v, mask, out=(out, lse), **attrs)
            yield Sample.of(q, k, v, mask, out, lse, f32(*out.shape, seed=4), grad=(), why=why, **s.attrs)
