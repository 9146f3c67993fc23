"""C kernel calls of pooling and its gradient (native/src/pool2d.h)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import native
from ...ir.dtypes import dtype_name
from .windows import Windows, split_image

_SUFFIX = {"float32": "f32", "float64": "f64"}


def call(x: Any, y: Any, g: Any, dx: Any, win: Windows, attrs: Mapping[str, Any]) -> list[native.NativeCall] | None:
    """The call that pools `x` into `y`, or with `g` the call that writes the gradient into `dx`; None if the operands are not supported."""
    arrays = [a for a in (x, y, g, dx) if a is not None]
    if dtype_name(x.dtype) not in _SUFFIX or any(a.dtype != x.dtype or not a.flags.c_contiguous or not a.size for a in arrays):
        return None
    fmt = attrs["data_format"]
    n, c, _ = split_image(x, fmt)
    places = [0 if a is None else native.address(a) for a in (x, y, g, dx)]
    kind = (int(fmt == "NHWC"), int(attrs["pooling_type"] == "avg"), int(attrs["exclusive"]))
    words = (*places, n, c, *win.image, *win.kernel, *win.stride, win.pad[0], win.pad[2], *win.out, *kind)
    return [native.NativeCall(f"pool{'' if g is None else '_grad'}_{_SUFFIX[dtype_name(x.dtype)]}", words, tuple(arrays))]
