"""C kernels of batch_norm and its gradient (native/src/batch_norm.h): the layout of an array, the scratch memory, and the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ... import native
from ...ir.dtypes import HALVES, dtype_name
from ...ir.types import TensorType
from ..shared.native import NARROW_FLOATS
from ..shared.types import empty_arrays


def _sizes(x: Any, layout: str) -> tuple[int, int, int]:
    """(images, channels, pixels), or (rows, channels, 0) if the channels are the last axis."""
    if x.ndim == 2 or layout == "NHWC":
        return prod(x.shape[:-1]), x.shape[-1], 0
    n, c, *rest = x.shape
    return n, c, 0 if prod(rest) == 1 else prod(rest)


def scratch_types(ins: Sequence[Any], outs: Sequence[Any], attrs: Mapping[str, Any]) -> list[TensorType]:
    """Three doubles for each channel and each of 16 parts of the rows, as in the header, and two for the whole."""
    rows, c, pixels = _sizes(ins[0], attrs["data_layout"])
    return [] if pixels or ins[0].dtype not in NARROW_FLOATS else [TensorType("float64", ((3 * 16 + 2) * c,))]


def _covers(whole: Sequence[Any], vectors: Sequence[Any]) -> bool:
    """Are all contiguous, arrays like X in one type of floats, and vectors of channels in that in which the kernel computes?"""
    dtype = whole[0].dtype
    computed = "float32" if dtype_name(dtype) in HALVES else dtype
    return (
        dtype_name(dtype) in NARROW_FLOATS
        and all(a.dtype == dtype and a.flags.c_contiguous and a.size for a in whole)
        and all(v.dtype == computed and v.flags.c_contiguous for v in vectors if v is not None)
    )


def _sizes_and_scratch(x: Any, attrs: Mapping[str, Any], scratch: Sequence[Any], dry: bool) -> tuple[tuple[int, int, int], Any]:
    """The last arguments of a call: the sizes, and the scratch memory if there is any."""
    sizes = _sizes(x, attrs["data_layout"])
    if dry or sizes[2]:
        return sizes, None
    return sizes, scratch[0] if scratch else empty_arrays([TensorType("float64", ((3 * 16 + 2) * sizes[1],))])[0]


def forward(
    ins: Sequence[Any], outs: Sequence[Any], attrs: Mapping[str, Any], dry: bool = False, scratch: Sequence[Any] = ()
) -> list[native.NativeCall] | None:
    (x, *weights), (y, *stats) = ins, outs
    if not _covers((x, y), (*weights, *stats)):
        return None
    sizes, room = _sizes_and_scratch(x, attrs, scratch, dry)
    given = int(attrs["is_test"] or attrs["use_global_stats"])
    places = [0 if a is None else native.address(a) for a in (x, y, *weights, *stats)]
    numbers = (float(attrs["momentum"]), float(attrs["epsilon"]), 0 if room is None else native.address(room))
    words = (*places, *sizes, given, *numbers, 0)
    return [native.NativeCall(f"batch_norm_{NARROW_FLOATS[dtype_name(x.dtype)]}", words, (*ins, *outs, room), tail=True)]


def backward(
    ins: Sequence[Any], outs: Sequence[Any], attrs: Mapping[str, Any], dry: bool = False, scratch: Sequence[Any] = ()
) -> list[native.NativeCall] | None:
    (x, scale, mean, inv, g), (dx, dscale, dbias) = ins, outs
    if any(o is None for o in outs) or not _covers((x, g, dx), (scale, mean, inv, dscale, dbias)):
        return None
    sizes, room = _sizes_and_scratch(x, attrs, scratch, dry)
    places = [native.address(a) for a in (x, g, dx, scale, mean, inv, dscale, dbias)]
    words = (*places, *sizes, int(attrs["use_global_stats"]), 0 if room is None else native.address(room))
    return [native.NativeCall(f"batch_norm_grad_{NARROW_FLOATS[dtype_name(x.dtype)]}", words, (*ins, *outs, room))]
