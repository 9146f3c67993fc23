"""Attention: imported as `scaled_dot_product_attention`, which does not store the scores. Other cases use the schema's function body."""

from __future__ import annotations

from ...ir import ANY
from ...ir.dtypes import HALVES, np_dtype
from ..node import Node
from ..table import imports
from ..values import dtype_code

_SUPPORTED = {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision"}


@imports("Attention")
def attention(n: Node) -> object:
    if not _is_common(n):
        return n.by_body()
    q, k, v = (n.x(i) for i in range(3))
    if split := n.rank() == 3:  # [batch, rows, heads * width]
        heads = [n.attr(name) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
        cut = [n.b.reshape(x, shape=(0, 0, h, -1)) for x, h in zip((q, k, v), heads, strict=True)]
        q, k, v = (n.b.transpose(x, axis=(0, 2, 1, 3)) for x in cut)
    scale = n.attr("scale") or q.shape[-1] ** -0.5
    y = n.b.scaled_dot_product_attention(q, k, v, n.x(3), scale=scale, causal=bool(n.attr("is_causal", 0)))[0]
    return n.b.reshape(n.b.transpose(y, axis=(0, 2, 1, 3)), shape=(0, 0, -1)) if split else y


def _is_common(n: Node) -> bool:
    """Can `scaled_dot_product_attention` compute it? It needs one dtype of 32 bits or more, plain scores, no cache, and no other outputs.
    """
    dtype, (q, k, v) = n.dtype(), (n.shape(i) for i in range(3))
    own = dtype_code(np_dtype(dtype))
    if dtype in HALVES or n.attr("softmax_precision", own) != own or n.attr("softcap", 0.0) or not n.attributes <= _SUPPORTED:
        return False
    if any(n.has(i) for i in range(4, 7)) or any(n.wants(i) for i in range(1, 4)) or any(n.dtype(i) != dtype for i in (1, 2)):
        return False
    if any(ANY in s or len(s) != len(q) for s in (q, k, v)):
        return False
    return not n.has(3) or (n.dtype(3) in ("bool", dtype) and n.shape(3)[-2:] == (q[-2], k[-2]))
