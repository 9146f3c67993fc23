"""C kernels of convolutions: the choice between the algorithms of native/src/conv.h, their scratch memory, and the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ... import config, native
from ...ir.dtypes import HALVES, as_dtype, dtype_name, np_dtype
from ...ir.types import TensorType
from ..shared.types import empty_arrays
from .windows import Windows

WINOGRAD, WINOGRAD_4, SHIFTED, PIXEL, COLUMNS, DIRECT, FEW = range(7)
MOST_TAPS, MOST_GRIDS, SPREAD, LEAST_CHANNELS, LANES = 128, 16, 80, 16, 16
LEAST_TILES = 128  # least number of 4x4 output tiles in a batch: for fewer, transforming the filters costs more than smaller tiles
PASSING = {WINOGRAD: (2, 128), WINOGRAD_4: (4, 64)}  # the side of a tile; for up to so many in a batch the transformed filters are not kept
FORWARD, BACK, FILTER = "conv", "conv_back", "conv_filter"
_KINDS = {"float32": "f32", "float64": "f64", "bfloat16": "16"}


def way(win: Windows, channels: int, outputs: int, groups: int, fmt: str) -> int:
    """The algorithms for the products of a convolution, chosen by its shape and FLUIDX_WINOGRAD."""
    if groups > 1 and groups == channels:
        return DIRECT if fmt == "NCHW" else COLUMNS
    if win.kernel == (1, 1) and not any(win.pad):
        return PIXEL
    if groups > 1 or min(channels, outputs) < LEAST_CHANNELS:
        return COLUMNS
    if win.kernel == (3, 3) and win.stride == win.dilation == (1, 1) and config.winograd():
        return WINOGRAD
    taps, grids = win.kernel[0] * win.kernel[1], win.stride[0] * win.stride[1]
    return SHIFTED if taps <= MOST_TAPS and grids <= MOST_GRIDS else COLUMNS


def _takes_16_bit(win: Windows, groups: int, fmt: str, how: int) -> bool:
    """Are images of bfloat16 multiplied as they are (conv_16.h)? Otherwise they get float32 copies. AMX multiplies so much faster that even
    Winograd in float32 takes longer.
    """
    taps, grids = win.kernel[0] * win.kernel[1], win.stride[0] * win.stride[1]
    reach = [(k - 1) * d for k, d in zip(win.kernel, win.dilation, strict=True)]  # padding beyond it would be outputs of nothing
    fits = groups == 1 and fmt == "NCHW" and taps <= MOST_TAPS and grids <= MOST_GRIDS
    fits = fits and max(win.pad[:2]) <= reach[0] and max(win.pad[2:]) <= reach[1]
    return fits and native.multiplies_pairs() and (native.level() == "amx" or how not in PASSING)


def _parts(batch: int, nbytes: int) -> int:
    """The number of parts of the batch with a separate filter gradient each, as conv_parts in native/src/conv.h computes it."""
    return min(2 if nbytes > 8 << 20 else 4 if nbytes > 2 << 20 else 8, max(batch, 1))


def _tiled_size(product: str, win: Windows) -> Sequence[int]:
    """The size of the images that tiles cover."""
    return win.image if product == BACK else win.out


def _tiles(batch: int, size: Sequence[int], side: int) -> int:
    return batch * -(-size[0] // side) * -(-size[1] // side)


def _winograd_pays(product: str, batch: int, win: Windows, filters: int) -> bool:
    """Does Winograd save more products than its transforms cost, for filters of so many bytes? In the forward pass this needs about four
    tiles. The filter gradient reads sums 16/9 as long, for each part of the batch: the fewer pixels a part has, the smaller the filters
    must be. The limits are measured.
    """
    if product != FILTER:
        return product == BACK or _tiles(batch, win.out, 2) >= 4
    sums = filters * 16 // 9
    parts = _parts(batch, sums)
    pixels = batch * win.out[0] * win.out[1] // parts
    return pixels >= 64 or parts * sums <= pixels * (170 << 10)


def _way(product: str, batch: int, channels: int, w: Any, win: Windows, groups: int, fmt: str) -> int:
    """The algorithm of one of the products. In the forward pass, im2col is faster than shifted images that need a transpose. With few
    channels it is faster than direct convolution if a column is long and is used for many outputs. The limits are measured.
    """
    how, depth = way(win, channels, w.shape[0], groups, fmt), channels * win.kernel[0] * win.kernel[1]
    if how == WINOGRAD:
        if product != FILTER and config.winograd() == 4 and _tiles(batch, _tiled_size(product, win), 4) >= LEAST_TILES:
            return WINOGRAD_4
        if _winograd_pays(product, batch, win, w.shape[0] * depth * np_dtype(as_dtype(w.dtype)).itemsize):
            return WINOGRAD
        how = SHIFTED
    if product != FORWARD or groups > 1:
        return how
    if how == COLUMNS:
        dear = depth < (64 if win.stride[1] == 1 else 16) if fmt == "NCHW" else depth < 512
        return FEW if w.shape[0] < 2 * LEAST_CHANNELS or dear else COLUMNS
    return COLUMNS if how == SHIFTED and fmt == "NCHW" else how


def _along_rows(win: Windows) -> Windows:
    """A convolution of columns as one of rows, which lie in memory as they do: kernels read pixels of a row together."""
    if win.image[1] != 1 or win.kernel[1] != 1 or win.out[1] != 1 or any(win.pad[2:]):
        return win
    pad = (*win.pad[2:], *win.pad[:2])
    return Windows(win.image[::-1], win.kernel[::-1], win.stride[::-1], win.dilation[::-1], pad, win.out[::-1])


def _wide(dtype: str) -> str:
    return "float32" if dtype in HALVES else dtype


def scratch_size(product: str, batch: int, w: Any, itemsize: int, win: Windows, how: int) -> int:
    """Number of elements of scratch memory for one product of a convolution with the filter `w`, besides the memory of the threads."""
    o, c, kh, kw = w.shape
    if itemsize == 2:  # in elements of float32: the filter for the image's gradient, or sums
        return {FORWARD: 0, BACK: -(-o * c * kh * kw // 2), FILTER: o * c * kh * kw * _parts(batch, o * c * kh * kw * 4)}[product]
    if how == FEW:
        return -(-o // LANES) * LANES * c * kh * kw
    side, few = PASSING.get(how, (0, 0))
    size = (side + 2) ** 2 * (o * c + SPREAD) if side else o * c * kh * kw
    if product == FILTER:
        return 0 if how == DIRECT else size * _parts(batch, size * itemsize)
    if side and _tiles(batch, _tiled_size(product, win), side) <= few:
        return 0
    return size if side or how == SHIFTED else 0


def scratch_types(
    products: Sequence[str], batch: int, channels: int, w: TensorType, win: Windows, groups: int, fmt: str
) -> list[TensorType]:
    """The scratch memory of products that run one after the other: one shared array."""
    if w.dtype not in _KINDS:
        return []
    itemsize, win = np_dtype(w.dtype).itemsize, _along_rows(win)
    size = max((scratch_size(p, batch, w, itemsize, win, _way(p, batch, channels, w, win, groups, fmt)) for p in products), default=0)
    return [TensorType(_wide(w.dtype), (size,))] if size else []


def any_size(attrs: Mapping[str, Any]) -> bool:
    """Do the kernels support every size in float32 and float64? Without AVX and BLAS the answer depends on the algorithm."""
    return native.has_products()


def calls(
    products: Sequence[tuple[str, Any, Any, Any]], win: Windows, groups: int, fmt: str, scratch: Sequence[Any], dry: bool
) -> list[native.NativeCall] | None:
    """The calls of products (which, image, filter, outputs) of one convolution, or None if they are not supported. Images and outputs have
    the layout `fmt`.
    """
    found, win = [], _along_rows(win)
    for product, x, w, y in products:
        arrays, dtype = (x, w, y), dtype_name(x.dtype)
        kind = _KINDS.get(dtype)
        if kind is None or any(a.dtype != x.dtype or not a.flags.c_contiguous for a in arrays):
            return None
        (n, c), o = (x.shape[0], x.shape[1 if fmt == "NCHW" else 3]), w.shape[0]
        how = _way(product, n, c, w, win, groups, fmt)
        if not all(a.size for a in arrays) or not native.has_products() and how not in (DIRECT, FEW):
            return None
        if kind == "16" and not _takes_16_bit(win, groups, fmt, how):
            return None
        size = scratch_size(product, n, w, x.itemsize, win, how)
        room = [w] if dry else scratch or empty_arrays([TensorType(_wide(dtype), (size,))] if size else [])
        assert dry or not size or room[0].size >= size, "the plan has allocated other scratch memory than this convolution needs"
        sizes = (*win.image, *win.kernel, *win.stride, *win.dilation, win.pad[0], win.pad[2], *win.out, int(fmt == "NHWC"), how)
        words = (*map(native.address, arrays), n, c, o, groups, *sizes, native.address(room[0]) if size else 0)
        words += (native.HOLDS[dtype],) if kind == "16" else ()
        tail = product != FILTER
        found.append(native.NativeCall(f"{product}_{kind}", (*words, 0) if tail else words, (*arrays, *room), tail))
    return found
