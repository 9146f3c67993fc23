"""Attention of ONNX Runtime's domain `com.microsoft`, as `scaled_dot_product_attention`, which does not store the scores.

Q, K and V are [batch, heads, rows, width]. Masks become one that is added to the scores. Positions are sizes, so axes may be open.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...ir import Variable
from ...ir.types import ANY
from ..node import Node
from ..normalize import MICROSOFT
from ..table import imports
from .microsoft_quantized import dequantized

microsoft = partial(imports, domain=MICROSOFT)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _size(n: Node, x: Any, axis: int) -> Any:
    """The size of an axis, which may be open, as an array without axes."""
    return n.apply("Squeeze", n.apply("Shape", x, start=axis, end=axis + 1), _ints(0))


def _places(n: Node, count: Any, first: Any = None) -> Any:
    """`first`, `first` + 1, ...: `count` integers."""
    start = np.array(0, np.int64) if first is None else first
    return n.apply("Range", start, count if first is None else n.apply("Add", first, count), np.array(1, np.int64))


def _by_heads(n: Node, x: Any, heads: int) -> Any:
    """[batch, rows, heads * width] as [batch, heads, rows, width]."""
    return n.apply("Transpose", n.apply("Reshape", x, _ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def _refuse(n: Node, *names: str) -> None:
    """Raise OnnxError if a node has one of these attributes, not 0."""
    if wrong := next((name for name in names if n.attr(name, 0)), None):
        raise n.wrong(f"fluidx does not support attribute {wrong}={n.attr(wrong)!r}")


def _refuse_operands(n: Node, **operands: int) -> None:
    if wrong := next((name for name, k in operands.items() if n.has(k)), None):
        raise n.wrong(f"fluidx does not support operand {wrong!r}")


# -- masks --------------------------------------------------------------------------------------------------------------------------------


class _Scores(NamedTuple):
    """The mask of the scores of `rows` queries and `columns` keys, as a sum of terms."""

    n: Node
    dtype: str
    rows: Any
    columns: Any
    terms: list[Any]

    def hide(self, shown: Any, value: float) -> None:
        """Add a number to the scores that are not shown."""
        numbers = (np.array(v, self.dtype) for v in (0, value))
        self.terms.append(self.n.apply("Where", shown, *numbers))

    def mask(self, k: int, batch: int) -> None:
        """Hide what operand k says: a mask for keys, or for queries and keys, or the lengths of the sequences, or their ends and starts."""
        n, m = self.n, self.n.operands[k]
        filler = n.attr("mask_filter_value", -10000.0)
        if n.rank(k) in (2, 3):
            shown = n.apply("Greater", m, np.zeros((), n.dtype(k)))
            return self.hide(n.apply("Unsqueeze", shown, _ints(1, 2) if n.rank(k) == 2 else _ints(1)), filler)
        length = n.shape(k)[0]
        if n.rank(k) != 1 or length not in (batch, 2 * batch):
            shapes = "[batch], [2 * batch], [batch, keys] or [batch, rows, keys]"
            raise n.wrong(f"expected a mask of {shapes}, found shape {list(n.shape(k))} and batch {batch}")
        ends, *starts = n.apply("Split", m, outputs=2, axis=0, num_outputs=2) if length != batch else [m]
        at = n.apply("Cast", _places(n, self.columns), to=_INTEGERS[n.dtype(k)])
        shown = n.apply("Less", at, n.apply("Unsqueeze", ends, _ints(1, 2, 3)))
        for start in starts:
            shown = n.apply("And", shown, n.apply("GreaterOrEqual", at, n.apply("Unsqueeze", start, _ints(1, 2, 3))))
        self.hide(shown, filler)

    def causal(self) -> None:
        """The last query sees all keys, the one before all but the last, and so on."""
        first = self.n.apply("Sub", self.columns, self.rows)
        rows = self.n.apply("Unsqueeze", _places(self.n, self.rows, first), _ints(1))
        self.hide(self.n.apply("GreaterOrEqual", rows, _places(self.n, self.columns)), float(np.finfo(self.dtype).min))

    def total(self) -> Any:
        found, *more = self.terms or [None]
        for term in more:
            found = self.n.apply("Add", found, term)
        return found


_INTEGERS = {"int32": 6, "int64": 7}


def _attended(n: Node, q: Any, k: Any, v: Any, mask: Any, causal: bool = False) -> Variable:
    """The result, [batch, rows, heads * width]. `causal`: query i sees the first i + 1 keys."""
    q, k, v = (n.importer.variable(x) for x in (q, k, v))
    mask = mask if mask is None else n.importer.variable(mask)
    scale = n.attr("scale", 0.0) or q.shape[-1] ** -0.5
    if cap := n.attr("softcap", 0.0):
        y = _capped(n, (q, k, v), mask, scale, cap)
    else:
        y = n.b.scaled_dot_product_attention(q, k, v, mask, scale=scale, causal=causal)[0]
    return n.b.reshape(n.b.transpose(y, axis=(0, 2, 1, 3)), shape=(0, 0, y.shape[1] * y.shape[3]))


def _capped(n: Node, qkv: Any, mask: Any, scale: float, cap: float) -> Variable:
    """Attention with scores limited to -cap to cap by tanh before the mask is added (softcap)."""
    q, k, v = qkv
    if times := q.shape[1] // k.shape[1] - 1:
        heads = n.const(np.repeat(np.arange(k.shape[1]), times + 1))
        k, v = (n.b.index_select(x, heads, dim=1) for x in (k, v))
    scores = n.b.scale(n.b.tanh(n.b.matmul(q, k, transpose_y=True, alpha=scale / cap)), scale=cap)
    return n.b.matmul(n.b.softmax(scores if mask is None else n.b.elementwise_add(scores, mask)), v)


# -- Attention --------------------------------------------------------------------------------------------------------------------------


@microsoft("Attention")
def attention(n: Node) -> object:
    return _self_attention(n, *n.operands[:3], *(k if n.has(k) else None for k in (3, 4, 5)))


@microsoft("QAttention")
def quantized_attention(n: Node) -> object:
    x, weights = dequantized(n, 0, 3, 6), dequantized(n, 1, 4, 7, axis=1)
    return _self_attention(n, x, weights, n.operands[2], *(k if n.has(k) else None for k in (5, 8)))


def _self_attention(n: Node, x: Any, weights: Any, bias: Any = None, mask: Any = None, past: Any = None, extra: Any = None) -> object:
    """`mask`, `past` and `extra` are numbers of operands."""
    _refuse(n, "do_rotary", "past_present_share_buffer")
    heads, width = n.attr("num_heads"), n.shape(1)[1]
    sizes = n.attr("qkv_hidden_sizes", [width // 3] * 3)
    y = n.apply("MatMul", x, weights)
    y = y if bias is None else n.apply("Add", y, bias)
    q, k, v = (_by_heads(n, part, heads) for part in n.apply("Split", y, _ints(*sizes), outputs=3, axis=2))
    if past is not None:
        k, v = (n.apply("Concat", n.apply("Gather", n.operands[past], np.array(i)), new, axis=2) for i, new in enumerate((k, v)))
    scores = _Scores(n, n.dtype(2) if bias is not None else n.dtype(0), _size(n, q, 2), _size(n, k, 2), [])
    if mask is not None:
        scores.mask(mask, n.shape(0)[0])
    if extra is not None:
        scores.terms.append(n.operands[extra])
    causal = bool(n.attr("unidirectional", 0))
    if causal and past is not None:
        scores.causal()
    y = _attended(n, q, k, v, scores.total(), causal=causal and past is None)
    if not n.wants(1):
        return y
    return y, n.apply("Concat", *(n.apply("Unsqueeze", x, _ints(0)) for x in (k, v)), axis=0)


@microsoft("MultiHeadAttention")
def multi_head_attention(n: Node) -> object:
    _refuse_operands(n, past_sequence_length=8, cache_indirection=9)
    if n.wants(3):
        raise n.wrong("fluidx does not compute its output 'qk'; leave it out")
    q, k, v = _projected(n)
    past = n.has(6)
    if past:
        k, v = (n.apply("Concat", n.operands[at], new, axis=2) for at, new in ((6, k), (7, v)))
    scores = _Scores(n, n.dtype(0), _size(n, q, 2), _size(n, k, 2), [])
    if n.has(4):
        scores.mask(4, n.shape(0)[0])
    if n.has(5):
        scores.terms.append(n.operands[5])
    causal = bool(n.attr("unidirectional", 0))
    if causal and past:
        scores.causal()
    y = _attended(n, q, k, v, scores.total(), causal=causal and not past)
    return (y, k, v) if n.wants(1) else y


def _projected(n: Node) -> list[Any]:
    """Q, K and V of MultiHeadAttention plus their parts of the bias, from one, two or three operands."""
    heads = n.attr("num_heads")
    if n.rank(0) == 5:  # [batch, rows, heads, 3, width]
        parts = _unpacked(n, n.operands[0], 3)
    elif n.rank(1) == 5:
        parts = [n.operands[0], *_unpacked(n, n.operands[1], 2)]
    else:
        parts = n.operands[:3]
    by_heads = n.rank(0) != 5 and n.rank(1) == 4  # K and V are [batch, heads, rows, width], and have their bias
    if n.has(3):
        width = n.shape(0)[-1] if n.rank(0) == 3 else heads * n.shape(0)[-1]
        bias = n.apply("Split", n.operands[3], _ints(width, width, n.shape(3)[0] - 2 * width), outputs=3, axis=0)
        parts = [x if by_heads and k else n.apply("Add", x, b) for k, (x, b) in enumerate(zip(parts, bias, strict=True))]
    return [x if by_heads and k else _by_heads(n, x, heads) for k, x in enumerate(parts)]


def _unpacked(n: Node, x: Any, many: int) -> list[Any]:
    """[batch, rows, heads, many, width] as that many of [batch, rows, heads * width]."""
    parts = n.apply("Split", x, outputs=many, axis=3, num_outputs=many)
    return [n.apply("Reshape", part, _ints(0, 0, -1)) for part in parts]


# -- rotations ----------------------------------------------------------------------------------------------------------------------------


@microsoft("RotaryEmbedding")
def rotary_embedding(n: Node) -> object:
    """Positions are one for each row, or that of the first row."""
    _refuse(n, "is_packed_batching")
    if n.attr("scale", 1.0) != 1.0:
        raise n.wrong(f"fluidx supports scale 1, found {n.attr('scale')}")
    at = n.operands[1]
    if n.rank(1) == 1:
        count = _size(n, n.operands[0], 2 if n.rank() == 4 else 1)
        at = n.apply("Unsqueeze", n.apply("Add", _places(n, count), at), _ints(0))
    heads = n.attr("num_heads", 0) or (n.shape(0)[-1] // (2 * n.shape(2)[-1]) if n.rank() == 3 else 0)
    return _rotated(n, n.operands[0], at, 2, n.attr("interleaved", 0), heads, n.attr("rotary_embedding_dim", 0))


def _rotated(n: Node, x: Any, at: Any, table: int, interleaved: int, heads: int = 0, width: int = 0) -> Any:
    """x rotated by the angles of positions `at` [batch or 1, rows] (rotary embedding). Operands `table` and the next are cosines and
    sines, which are not trained."""
    tables = (n.operands[k] if isinstance(n.operands[k], Variable) else n.value(k) for k in (table, table + 1))
    angles = (n.apply("Gather", t, at) for t in tables)
    return n.apply("RotaryEmbedding", x, *angles, interleaved=interleaved, num_heads=heads, rotary_embedding_dim=width)


# -- GroupQueryAttention ----------------------------------------------------------------------------------------------------------------


@microsoft("GroupQueryAttention")
def group_query_attention(n: Node) -> object:
    """Without a known total length, the cache grows: K and V have the rows of the cache and the new ones."""
    _refuse(n, "smooth_softmax", "sliding_window_cache", "qk_output", "kv_cache_bit_width")
    _refuse_operands(n, head_sink=11, k_scale=12, v_scale=13, query_seqlens=16)
    heads, few = n.attr("num_heads"), n.attr("kv_num_heads")
    q, k, v = n.operands[:3]
    if k is None:
        width = n.shape(0)[-1] // (heads + 2 * few)
        q, k, v = n.apply("Split", q, _ints(heads * width, few * width, few * width), outputs=3, axis=2)
    q, k, v = (_by_heads(n, x, h) for x, h in ((q, heads), (k, few), (v, few)))
    for at, name in ((14, "q"), (15, "k")):
        if n.has(at):
            epsilon = n.attr(f"{name}_norm_epsilon", n.attr("qk_norm_epsilon", 1e-6))
            x = n.apply("RMSNormalization", q if name == "q" else k, n.operands[at], axis=-1, epsilon=epsilon)
            q, k = (x, k) if name == "q" else (q, x)
    cache = _Cache.of(n, q)
    if n.attr("do_rotary", 0):
        at, width = n.operands[9] if n.has(9) else cache.rows(), 2 * n.shape(7)[-1]
        q, k = (_rotated(n, x, at, 7, n.attr("rotary_interleaved", 0), width=width) for x in (q, k))
    k, v = cache.with_new(3, k), cache.with_new(4, v)
    mask = cache.mask()
    return _attended(n, q, k, v, mask, causal=mask is None), k, v


class _Cache(NamedTuple):
    """Where the `new` rows of K and V stand in the cache.

    Afterwards it has `columns` rows, of which a sequence uses `ends` [batch, 1]; the new ones of a sequence begin at `starts` [batch or 1,
    1]. With `apart`, they are not the last of the cache in each sequence.
    """

    n: Node
    new: Any
    columns: Any
    starts: Any
    ends: Any
    apart: bool = False

    @classmethod
    def of(cls, n: Node, q: Any) -> _Cache:
        new, ends = _size(n, q, 2), n.apply("Unsqueeze", n.apply("Add", n.apply("Cast", n.operands[5], to=7), _ints(1)), _ints(1))
        if not n.has(3) or n.shape(3)[2] == 0:
            return cls(n, new, new, np.zeros((1, 1), np.int64), ends)
        past, held, added = _size(n, n.operands[3], 2), n.shape(3)[2], n.shape(0)[1]
        total = None if isinstance(n.operands[6], Variable) or ANY in (held, added) else int(n.value(6).reshape(()))
        if total is None or total > held:
            columns = n.apply("Add", past, new)
            if n.shape(0)[0] == 1 and total is not None:
                return cls(n, new, columns, n.apply("Reshape", past, _ints(1, 1)), ends)
        else:
            columns = past
        starts = np.zeros((1, 1), np.int64) if total == added else n.apply("Sub", ends, new)
        return cls(n, new, columns, starts, ends, apart=True)

    def rows(self) -> Any:
        """The positions of the new rows, [batch or 1, rows]."""
        return self.n.apply("Add", _places(self.n, self.new), self.starts)

    def with_new(self, k: int, x: Any) -> Any:
        """Operand k, the cache, with new rows."""
        n = self.n
        if not n.has(k) or n.shape(k)[2] == 0:
            return x
        longer = n.apply("Concat", n.operands[k], x, axis=2)
        if not self.apart:
            return longer
        at = _places(n, self.columns)
        back = n.apply("Sub", at, self.starts)
        last = n.apply("Sub", self.new, _ints(1))
        index = n.apply("Unsqueeze", n.apply("Min", n.apply("Max", back, _ints(0)), last), _ints(1, 3))
        width = np.zeros((1, n.shape(k)[1], 1, n.shape(k)[3]), np.int64)
        moved = n.apply("GatherElements", x, n.apply("Add", index, width), axis=2)
        is_new = n.apply("And", n.apply("GreaterOrEqual", back, _ints(0)), n.apply("Less", at, self.ends))
        old = n.apply("Slice", longer, _ints(0), n.apply("Reshape", self.columns, _ints(1)), _ints(2))
        return n.apply("Where", n.apply("Unsqueeze", is_new, _ints(1, 3)), moved, old)

    def mask(self) -> Any:
        """The mask of the scores; None if each row sees the rows up to itself."""
        n = self.n
        causal, window = bool(n.attr("causal", 1)), n.attr("local_window_size", -1)
        if causal and window < 0 and not n.has(3) and not n.has(10):
            return None
        scores = _Scores(n, n.dtype(0), self.new, self.columns, [])
        at, rows = _places(n, self.columns), n.apply("Unsqueeze", self.rows(), _ints(2))
        shown = n.apply("LessOrEqual", at, rows) if causal else n.apply("Less", at, n.apply("Unsqueeze", self.ends, _ints(2)))
        if window >= 0:
            shown = n.apply("And", shown, n.apply("Greater", at, n.apply("Sub", rows, _ints(window))))
        scores.hide(n.apply("Unsqueeze", shown, _ints(1)), float(np.finfo(n.dtype(0)).min))
        if n.has(10):
            scores.terms.append(n.operands[10])
        return scores.total()
