"""Export of resizing, and of operators that read images at computed positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir.dtypes import np_dtype
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op


@exports("resize")
def resize(op: Op) -> str:
    a = op.attrs
    if a["sizes"] and a["scales"]:
        raise op.wrong("ONNX has no Resize with both sizes and scales; give one of them")
    spans = op.const(np.array(a["spans"], np.float32)) if a["spans"] else ""
    lengths = ["", op.ints(a["sizes"])] if a["sizes"] else [op.const(np.array(a["scales"], np.float32))]
    attrs: dict[str, Any] = {"mode": a["mode"], "coordinate_transformation_mode": a["coordinates"], "axes": list(a["axes"])}
    if a["mode"] == "nearest":
        attrs["nearest_mode"] = a["nearest"]
    if a["mode"] == "cubic":
        attrs["cubic_coeff_a"] = a["cubic_coeff_a"]
    if a["extrapolation_value"]:
        attrs["extrapolation_value"] = a["extrapolation_value"]
    flags = {name: 1 for name in ("antialias", "exclude_outside") if a[name]}
    return op.emit("Resize", op["X"], spans, *lengths, **attrs, **flags)


@exports("grid_sample")
def grid_sample(op: Op) -> str:
    a = op.attrs
    attrs = {"mode": a["mode"], "padding_mode": a["padding_mode"], "align_corners": int(a["align_corners"])}
    return op.emit("GridSample", op["X"], op["Grid"], **attrs)


@exports("roi_align")
def roi_align(op: Op) -> str:
    a = op.attrs
    attrs = {"output_height": a["pooled_height"], "output_width": a["pooled_width"], "spatial_scale": a["spatial_scale"], "mode": a["mode"]}
    seen = "half_pixel" if a["aligned"] else "output_half_pixel"
    images = op.cast("BatchIndices", "int64")
    ratio = max(a["sampling_ratio"], 0)
    return op.emit("RoiAlign", op["X"], op["Rois"], images, coordinate_transformation_mode=seen, sampling_ratio=ratio, **attrs)


@exports("roi_pool")
def roi_pool(op: Op) -> str:
    """Each region begins with the index of its image."""
    a = op.attrs
    images = op.emit("Cast", op["BatchIndices"], to=op.code(np_dtype(op.dtype("Rois")).name))
    rois = op.emit("Concat", op.emit("Unsqueeze", images, op.ints([1])), op["Rois"], axis=1)
    return op.emit("MaxRoiPool", op["X"], rois, pooled_shape=[a["pooled_height"], a["pooled_width"]], spatial_scale=a["spatial_scale"])
