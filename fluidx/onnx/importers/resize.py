"""Import of Resize: its sizes from operands and attributes, and the conversion of its result to the dtype of the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import Variable
from ...ir.dtypes import FLOATS
from ...ops.nn.resize import size_scaled
from ..import_tables import imports
from ..limits import checked_shape
from ..node import Node


@imports("Resize")
def resize(n: Node) -> object:
    mode, dtype = n.attr("mode", "nearest"), n.dtype()
    y = n.x()
    work = dtype
    if mode != "nearest" and dtype not in ("float32", "float64"):
        work = "float32" if dtype in FLOATS else "float64"
    if work != dtype:
        y = n.b.cast(y, dtype=work)
    y = n.b.resize(
        y,
        mode=mode,
        coordinates=n.attr("coordinate_transformation_mode", "half_pixel"),
        nearest=n.attr("nearest_mode", "round_prefer_floor"),
        cubic_coeff_a=n.attr("cubic_coeff_a", -0.75),
        antialias=bool(n.attr("antialias", 0)),
        exclude_outside=bool(n.attr("exclude_outside", 0)),
        extrapolation_value=n.attr("extrapolation_value", 0.0),
        **_sizes(n),
    )
    return _as_dtype(n, y, dtype)


def _sizes(n: Node) -> dict[str, Any]:
    """The axes to resize, with sizes, scales and regions of interest."""
    shape = n.shape()
    axes = [a % len(shape) for a in n.attr("axes", range(len(shape)))]
    spans = [float(v) for v in np.asarray(n.value(1)).ravel()] if n.has(1) else []
    sizes = n.ints(3) or []
    scales: list[float] = []
    if not sizes:
        given = np.asarray(n.value(2), np.float32).ravel()
        if len(given) != len(axes):
            raise n.wrong(f"expected {len(axes)} scales, one for each axis, found {len(given)}; or sizes")
        scales = given.tolist()
    elif (policy := n.attr("keep_aspect_ratio_policy", "stretch")) != "stretch":
        ratios = [s / shape[a] for a, s in zip(axes, sizes)]
        scale = min(ratios) if policy == "not_larger" else max(ratios)
        scales, sizes = [scale] * len(axes), [int(scale * shape[a] + 0.5) for a in axes]
    outs = sizes or [size_scaled(shape[a], s) for a, s in zip(axes, scales)]
    checked_shape([max(outs, default=0), max(shape, default=0)])  # an interpolation matrix has these sizes
    crops = n.attr("coordinate_transformation_mode") == "tf_crop_and_resize"
    return {"axes": tuple(axes), "sizes": tuple(sizes), "scales": tuple(scales), "spans": tuple(spans) if crops else ()}


def _as_dtype(n: Node, y: Variable, dtype: str) -> Variable:
    """y in the dtype of the input; integers are rounded and clipped to its range."""
    if y.dtype == dtype:
        return y
    if dtype not in FLOATS:
        info = np.iinfo(dtype)
        y = n.b.clip(n.b.round(y, ties_to_even=True), min=float(info.min), max=float(info.max))
    return n.b.cast(y, dtype=dtype)
