"""Attention and its gradient: the values, weighted by the softmax of the products of queries and keys.

The C kernels hold only the scores of a block of rows and some hundred keys at a time; the gradient recomputes the weights from the
logarithm of each row's sum. The parts hold all scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ... import native
from ...ir import ANY, Arithmetic, Autocast, Native, OpDef, ProgramError, Required, Sample, Storage, TensorType
from ...ir.axis_letters import letters
from ...ir.decomposition import Decomposition
from ...ir.dtypes import HALVES
from ...ir.parts import Part
from ..parts_kernel import by_parts
from ..shared.broadcast import reduced
from ..shared.native import FLOATS
from ..shared.samples import bits, f32
from ..shared.types import meet, merge_size, need_float, same_dtype
from .norm_shared import stat_dtype

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


def _axis_words(q: TensorType, k: TensorType, mask: TensorType | None) -> tuple[str, str, str, dict[str, int]]:
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


# -- in simpler operators -------------------------------------------------------------------------------------------------------------

# the largest finite number of each dtype
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}
_LEAST = -_LARGEST["float32"]
_LAST: dict[str, Any] = {"dim": (-1,), "keep_dim": True}


class _AttentionParts:
    """Parts of attention and its gradient. Scores of hidden positions are -infinity."""

    def __init__(self, d: Decomposition):
        self.d, q, k = d, d.type(d["Q"]), d.type(d["K"])
        self.many, self.few = _heads(q, k)
        self.ndim, self.dtype, self.keys = q.ndim, q.dtype, k.shape[-2]
        self.masked = bool(d["Mask"]) or d.attrs["causal"]
        self.largest = _LARGEST[q.dtype]

    def number(self, value: float) -> str:
        return self.d("fill_constant", shape=(1,), dtype=self.dtype, value=value)

    def finite(self, value: str) -> str:
        """The least finite number for -infinity, so that -infinity minus it is not NaN."""
        return self.d("clip", value, min=-self.largest, max=np.inf)

    def for_heads(self, slot: str) -> str:
        """K or V with its heads repeated to match those of Q."""
        if self.many == self.few:
            return self.d[slot]
        heads = tuple(k * self.few // self.many for k in range(self.many))
        index = self.d("assign_value", shape=(self.many,), dtype="int64", values=heads)
        return self.d("index_select", self.d[slot], index, dim=self.ndim - 3)

    def of_heads(self, a: str, b: str, slot: str) -> None:
        """The gradient of K or V, a' @ b: the gradients of repeated heads added up."""
        out, shape = self.d.out(f"{slot}@GRAD"), self.d.type(self.d[slot]).shape
        if out and self.many == self.few:
            self.d("matmul", a, b, out=out, transpose_x=True)
        elif out and 0 in shape[-2:]:
            self.d("fill_any_like", self.d[slot], value=0.0, dtype=self.dtype, out=out)
        elif out:
            apart = {"shape": (*[0] * (self.ndim - 3), self.few, self.many // self.few, *shape[-2:])}
            product = self.d("matmul", a, b, transpose_x=True)
            self.d.chain(product, ("reshape", apart), ("reduce_sum", {"dim": (self.ndim - 2,)}), out=out)

    def scores(self, keys: str) -> str:
        d = self.d
        found = d("matmul", d["Q"], keys, transpose_y=True, alpha=d.attrs["scale"])
        if d["Mask"] and d.type(d["Mask"]).dtype != "bool":
            found = d("elementwise_add", found, d["Mask"])
        elif d["Mask"]:
            found = d("where", d["Mask"], found, self.number(-np.inf))
        if d.attrs["causal"] and self.keys:  # row i sees the first i + 1 keys
            first = 0 if d.part is None else d.part.start
            row = d("scale", self.places(found, 0), bias=float(first)) if first else self.places(found, 0)
            found = d("where", d("greater_equal", row, self.places(found, 1)), found, self.number(-np.inf))
        return found

    def places(self, scores: str, axis: int) -> str:
        """1, 2, ... for the rows (`axis` 0) or the columns of the scores, with the other axis of size 1."""
        lead = tuple(range(self.ndim - 2))
        line = (*lead, self.ndim - 1 - axis)
        cut = {"axes": line, "starts": (0,) * len(line), "ends": (1,) * len(line), "decrease_axis": lead}
        return self.d.chain(scores, ("slice", cut), ("fill_any_like", {"value": 1.0, "dtype": "int64"}), ("cumsum", {"axis": axis}))

    def averaged(self, scores: str, values: str) -> None:
        """Out and Lse; a row that sees no position gives zeros."""
        d = self.d
        shift = self.finite(d("reduce_max", scores, **_LAST))
        e = d("exp", d("elementwise_sub", scores, shift))
        total = d("reduce_sum", e, **_LAST)
        one = d("clip", total, min=1.0, max=np.inf)  # the largest score adds 1, unless the row sees no position
        d("elementwise_div", d("matmul", e, values), one, out=d.out("Out"))
        if d.out("Lse"):
            stats = ("cast", {"dtype": stat_dtype(d.type(d["Q"]))}) if self.dtype in HALVES else None
            d.chain(total, ("log", {}), ("elementwise_add", shift, {}), ("squeeze", {"axes": (-1,)}), stats, out=d.out("Lse"))


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


def _mask_numbers(mask: Any, scores: tuple[int, ...]) -> list[int] | None:
    """(address, 0 for no mask, 1 for numbers or 2 for bool, strides of batch, heads, rows and columns)."""
    if mask is None:
        return [0] * 6
    steps = _steps(np.broadcast_to(mask, scores))
    if steps is None or steps[3] not in (0, 1):
        return None
    return [native.address(mask), 2 if mask.dtype == bool else 1, *steps]


def _calls(name: str, ins: Sequence[Any], more: Sequence[Any], flat: Sequence[Any], attrs: Any, part: Part | None, dry: bool) -> Any:
    """Calls of attention.h on Q, K, V, Mask; `more` are matrices with contiguous rows, `flat` are contiguous arrays."""
    (q, k, v, mask), (lse, scores) = ins, flat
    kind = "16" if q.dtype.name == "bfloat16" and native.multiplies_pairs() and scores is None else FLOATS.get(q.dtype.name)
    arrays = [a for a in (*ins, *more, *flat) if a is not None]
    if kind is None or not native.has_products() or not all(a.size for a in arrays):
        return None
    summed = np.float32 if kind == "16" else q.dtype
    if any(a.dtype not in (q.dtype, bool) for a in arrays if a is not lse) or lse is not None and lse.dtype != summed:
        return None
    matrices = [_matrices(x) for x in (q, k, v, *more)]
    masked = _mask_numbers(mask, (*q.shape[:-1], k.shape[-2]))
    if masked is None or None in matrices or not all(a is None or a.flags.c_contiguous for a in flat):
        return None
    if dry:
        return []
    heads, group = (q.shape[-3], q.shape[-3] // k.shape[-3]) if q.ndim > 2 else (1, 1)
    sizes = (prod(q.shape[:-3]), heads, group, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    how = (int(attrs["causal"]), 0 if part is None else part.start, float(attrs["scale"]))
    words = (*sizes, *how, *masked, *(0 if a is None else native.address(a) for a in flat), *(w for x in matrices for w in x or ()))
    words += (native.HOLDS[q.dtype.name],) if kind == "16" else ()
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
        q, k, mask, sizes = _axis_words(ins[0], ins[1], ins[3])
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
    def decompose(d):
        parts = _AttentionParts(d)
        scores, values = parts.scores(parts.for_heads("K")), parts.for_heads("V")
        if not parts.keys:  # empty scores have no maximum
            d("matmul", scores, values, out=d.out("Out"))
            if d.out("Lse"):
                d.chain(scores, ("reduce_sum", {"dim": (-1,)}), ("scale", {"bias": -np.inf}), out=d.out("Lse"))
        elif parts.masked or d.out("Lse"):
            parts.averaged(scores, values)
        else:
            d("matmul", d("softmax", scores), values, out=d.out("Out"))

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        return _calls("attention", ins, (outs[0], *[None] * 4), (outs[1], None), attrs, part, dry)

    native = Native(calls=_calls, halves=True, any_size=True)

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
        # the first row sees no position, the second one only by the least number, which hides three positions of the last one
        mask = np.array([[-np.inf] * 5, [_LEAST, *[-np.inf] * 4], [0, _LEAST, _LEAST, 1, _LEAST]], "float32")
        yield Sample.of(f32(3, 4), f32(5, 4, seed=1), f32(5, 2, seed=2), mask, scale=0.5, grad=("Q", "K", "V"), why="Mask is a constant")


class ScaledDotProductAttentionGrad(OpDef):
    """Gradients of scaled_dot_product_attention with respect to Q, K, V and the masked scores; the last may be absent.

    The gradient of a float Mask is that of the scores, summed to its shape. Weights follow from Lse, of which scores of 1e9 and more leave
    no room for the logarithm of how many are equal: where a mask puts such numbers on all positions of a row, each of them weighs 1.
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
        q, k, mask, sizes = _axis_words(ins[0], ins[1], ins[3])
        values, result = f"{k} t e", f"{q} s e"
        # the weights follow from Lse, so only sums of products remain
        rest = f"d! s:+ e:+ m?:+ L(6) {'s@ t!' if attrs['causal'] else 't:+'}"
        return f"{q} s d, {k} t d, {values}, {mask}, {result}, {q} s, {result} -> {q} s d, {k} t d, {values}, {q} s t | {rest}", sizes

    @staticmethod
    def decompose(d):
        parts, g = _AttentionParts(d), d["Out@GRAD"]
        keys, values = parts.for_heads("K"), parts.for_heads("V")
        lse = d("cast", d["Lse"], dtype=parts.dtype) if parts.dtype in HALVES else d["Lse"]
        shift = d("unsqueeze", parts.finite(lse), axes=(-1,))
        weights = d("exp", d("elementwise_sub", parts.scores(keys), shift))
        parts.of_heads(weights, g, "V")
        along = d("reduce_sum", d("elementwise_mul", g, d["Out"]), **_LAST)
        through = d("elementwise_sub", d("matmul", g, values, transpose_y=True), along)
        scores = d("elementwise_mul", weights, through, out=d.out("Scores@GRAD"))
        scaled = d("scale", scores, scale=d.attrs["scale"])
        if d.out("Q@GRAD"):
            d("matmul", scaled, keys, out=d.out("Q@GRAD"))
        parts.of_heads(scaled, d["Q"], "K")

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        *operands, to, lse, g = ins
        return _calls("attention_grad", operands, (to, g, *outs[:3]), (lse, outs[3]), attrs, part, dry)

    native = Native(calls=_calls, halves=True, any_size=True)

    @staticmethod
    def samples():
        why = "a gradient itself"
        for s in ScaledDotProductAttention.samples():
            q, k, v, mask = s.args
            out, lse = np.empty((*q.shape[:-1], v.shape[-1]), "float32"), np.empty(q.shape[:-1], "float32")
            attrs = ScaledDotProductAttention.complete_attrs(s.attrs)
            ScaledDotProductAttention.kernel(np, q, k, v, mask, out=(out, lse), **attrs)
            yield Sample.of(q, k, v, mask, out, lse, f32(*out.shape, seed=4), grad=(), why=why, **s.attrs)
