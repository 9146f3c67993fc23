"""Means in decompositions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...ir import ANY
from ...ir.decomposition import Decomposition


def per_element(d: Decomposition, total: str, x: str, axes: Sequence[int], out: str = "") -> str:
    """Append `total` divided by the number of elements of `x` along `axes`: of the whole value, of which `x` may be a part."""
    t = d.type(x)
    sizes = [t.shape[k] for k in axes]
    if d.part is not None or ANY not in sizes:
        return d("scale", total, out=out, scale=1 / max(1, prod(sizes) if d.part is None else d.part.count))
    others = prod(size for k, size in enumerate(t.shape) if k not in axes)
    steps = ("shape", {"dtype": "int64"}), ("reduce_prod", {"keep_dim": True}), ("cast", {"dtype": d.type(total).dtype})
    return d("elementwise_div", total, d.chain(x, *steps, ("scale", {"scale": 1 / others})), out=out)
