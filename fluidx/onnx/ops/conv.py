"""Conv and ConvTranspose. At import they may have any number of axes: a third axis is a sum over its taps, each a convolution of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from ...ir.types import ANY
from ...ops.nn.windows import four_pads, pair
from ..export_graph import Op
from ..node import Node
from ..table import exports, imports
from ..window_geometry import AxisWindows, extent, identity_window, pad_pairs, paddings_of, require_sizes, windows


@imports("Conv")
def conv(n: Node) -> object:
    x, w = n.x(0), n.x(1)
    if n.rank() > 4:
        require_sizes(n, "a convolution over more than two axes", n.shape(0)[2:])
    y = convolved(n.b, x, w, windows(n, w.shape[2:]), n.attr("group", 1))
    return n.b.elementwise_add(y, n.x(2), axis=1) if n.has(2) else y


def convolved(b: Any, x: Any, w: Any, at: Sequence[AxisWindows], groups: int) -> Any:
    """The convolution of images with filters, with windows `at` each axis."""
    if len(at) == 1:
        return b.squeeze(convolved(b, _row(b, x), _row(b, w), [identity_window(1), *at], groups), axes=(2,))
    if len(at) == 2:
        strides, dilations = tuple(a.stride for a in at), tuple(a.dilation for a in at)
        return b.conv2d(x, w, strides=strides, **paddings_of(at), dilations=dilations, groups=groups)
    first, rest = at[0], at[1:]
    x = _slices_first(b, x)
    if first.before or first.after:
        x = b.pad(x, paddings=(0, 0, first.before, first.after, *[0] * (2 * x.ndim - 4)))
    last = (first.out - 1) * first.stride + 1
    taps = []
    for k in range(first.kernel):
        start = k * first.dilation
        read = b.strided_slice(x, axes=(1,), starts=(start,), ends=(start + last,), strides=(first.stride,))
        taps.append(convolved(b, _depth_into_batch(b, read), _tap(b, w, k), rest, groups))
    return _slices_third(b, reduce(b.elementwise_add, taps), first.out)


def _row(b: Any, x: Any) -> Any:
    return b.unsqueeze(x, axes=(2,))


def _tap(b: Any, w: Any, k: int) -> Any:
    """The filter at tap k of its first spatial axis."""
    return b.slice(w, axes=(2,), starts=(k,), ends=(k + 1,), decrease_axis=(2,))


def _slices_first(b: Any, x: Any) -> Any:
    """[N, C, D, ...] as [N, D, C, ...]."""
    return b.transpose(x, axis=(0, 2, 1, *range(3, x.ndim)))


def _depth_into_batch(b: Any, x: Any) -> Any:
    """[N, D, ...] as [N * D, ...]."""
    return b.reshape(x, shape=(-1, *x.shape[2:]))


def _slices_third(b: Any, x: Any, depth: int) -> Any:
    """[N * D, C, ...] as [N, C, D, ...]."""
    x = b.reshape(x, shape=(-1, depth, *x.shape[1:]))
    return b.transpose(x, axis=(0, 2, 1, *range(3, x.ndim)))


# -- transposed -----------------------------------------------------------------------------------------------------------------------


@imports("ConvTranspose")
def conv_transpose(n: Node) -> object:
    x, w, rank = n.x(0), n.x(1), n.rank() - 2
    if rank > 2:
        require_sizes(n, "a convolution over more than two axes", n.shape(0)[2:])
    strides, dilations = n.attr("strides", [1] * rank), n.attr("dilations", [1] * rank)
    y = _transposed(n.b, x, w, strides, dilations, n.attr("group", 1))
    y = _cropped(n.b, y, _transposed_pads(n, w.shape[2:], strides, dilations))
    return n.b.elementwise_add(y, n.x(2), axis=1) if n.has(2) else y


def _transposed_pads(n: Node, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> list[tuple[int, int]]:
    """The number of elements to cut off before and after each axis of the full result; negative numbers are zeros to add."""
    rank, auto, asked = len(kernel), n.attr("auto_pad", "NOTSET"), n.attr("output_shape")
    extra = n.attr("output_padding", [0] * rank)
    if asked is None and not auto.startswith("SAME"):
        pads = pad_pairs(n.attr("pads", [0] * (2 * rank))) if auto == "NOTSET" else [(0, 0)] * rank
        return [(before, after - more) for (before, after), more in zip(pads, extra)]
    require_sizes(n, "auto_pad or output_shape", n.shape(0)[2:])
    found = []
    for k, size in enumerate(n.shape(0)[2:]):
        wanted = size * strides[k] if asked is None else asked[k - rank]  # some models list the batch and the channels too
        total = strides[k] * (size - 1) + extra[k] + extent(kernel[k], dilations[k]) - wanted
        before = total // 2 if auto == "SAME_UPPER" else total - total // 2
        found.append((before, total - before - extra[k]))
    return found


def _transposed(b: Any, x: Any, w: Any, strides: Sequence[int], dilations: Sequence[int], groups: int) -> Any:
    """The full result: each element of `x` adds the filter multiplied by it."""
    if len(strides) == 1:
        return b.squeeze(_transposed(b, _row(b, x), _row(b, w), (1, *strides), (1, *dilations), groups), axes=(2,))
    if len(strides) == 2:
        return b.conv2d_transpose(x, w, strides=tuple(strides), dilations=tuple(dilations), groups=groups)
    depth, stride, span = x.shape[2], strides[0], extent(w.shape[2], dilations[0])
    flat, taps = _depth_into_batch(b, _slices_first(b, x)), []
    for k in range(w.shape[2]):
        y = _slices_third(b, _transposed(b, flat, _tap(b, w, k), strides[1:], dilations[1:], groups), depth)
        behind = [0] * (2 * y.ndim - 6)
        if stride > 1:
            y = b.pad(b.unsqueeze(y, axes=(3,)), paddings=(0, 0, 0, 0, 0, 0, 0, stride - 1, *behind))
            y = b.reshape(y, shape=(-1, y.shape[1], depth * stride, *y.shape[4:]))
            y = b.slice(y, axes=(2,), starts=(0,), ends=((depth - 1) * stride + 1,))
        start = k * dilations[0]
        taps.append(b.pad(y, paddings=(0, 0, 0, 0, start, span - 1 - start, *behind)))
    return reduce(b.elementwise_add, taps)


_END = 1 << 40  # slices end at the end of the axis


def _cropped(b: Any, y: Any, pads: Sequence[tuple[int, int]]) -> Any:
    """`y` without that many elements before and after each axis from 2 on, or with zeros added there."""
    off = [(k + 2, before, after) for k, (before, after) in enumerate(pads) if before > 0 or after > 0]
    if off:
        starts, ends = [max(before, 0) for _, before, _ in off], [-after if after > 0 else _END for _, _, after in off]
        y = b.slice(y, axes=tuple(k for k, _, _ in off), starts=tuple(starts), ends=tuple(ends))
    put = [max(-p, 0) for pair in pads for p in pair]
    return b.pad(y, paddings=(0, 0, 0, 0, *put)) if any(put) else y


def channels_first(op: Op, slot: str, layout: str, emit: Callable[[str], str]) -> str:
    """The result of `emit` for an image in channels-first layout, in the layout of the image."""
    made, ndim = emit(first(op, slot, layout)), op.type_of(slot).ndim
    return made if _is_first(layout) else op.emit("Transpose", made, perm=[0, *range(2, ndim), 1])


def first(op: Op, slot: str, layout: str) -> str:
    """An image in channels-first layout."""
    ndim = op.type_of(slot).ndim
    return op[slot] if _is_first(layout) else op.emit("Transpose", op[slot], perm=[0, ndim - 1, *range(1, ndim - 1)])


def _is_first(layout: str) -> bool:
    return layout in ("NCHW", "NCW", "NCDHW")


# -- export -------------------------------------------------------------------------------------------------------------------------


def pads_of(op: Op) -> dict[str, Any]:
    algorithm = op.attrs["padding_algorithm"]
    if algorithm != "EXPLICIT":
        return {"auto_pad": {"SAME": "SAME_UPPER", "VALID": "VALID"}[algorithm]}
    top, bottom, left, right = four_pads(op.type, op.attrs["paddings"])
    return {"pads": [top, left, bottom, right]}


def steps_of(op: Op, *names: str) -> dict[str, list[int]]:
    return {name: list(pair(op.type, name, op.attrs[name], 1)) for name in names}


@exports("conv2d", "depthwise_conv2d")
def export_conv(op: Op) -> str:
    kernel = list(op.type_of("Filter").shape[2:])
    attrs = {**steps_of(op, "strides", "dilations"), **pads_of(op), "group": op.attrs["groups"], "kernel_shape": kernel}
    return channels_first(op, "Input", op.attrs["data_format"], lambda x: op.emit("Conv", x, op["Filter"], **attrs))


@exports("conv2d_transpose")
def export_conv_transpose(op: Op) -> str:
    a = op.attrs
    kernel = list(op.type_of("Filter").shape[2:])
    attrs = {**steps_of(op, "strides", "dilations"), **pads_of(op), "group": a["groups"], "kernel_shape": kernel}
    if a["output_size"]:
        if "pads" not in attrs:
            raise op.wrong("ONNX has no output_size together with padding_algorithm; give paddings")
        attrs["output_padding"] = _extra_elements(op, attrs)
    return channels_first(op, "Input", a["data_format"], lambda x: op.emit("ConvTranspose", x, op["Filter"], **attrs))


def _extra_elements(op: Op, attrs: dict[str, Any]) -> list[int]:
    """The extra elements of the result beyond the smallest possible size."""
    image = image_of(op, "Input")
    if ANY in image:
        raise op.wrong("output_size needs an image of known size")
    wanted, pads = pair(op.type, "output_size", op.attrs["output_size"], 1), attrs["pads"]
    least = [
        (d - 1) * attrs["strides"][k] + (attrs["kernel_shape"][k] - 1) * attrs["dilations"][k] + 1 - pads[k] - pads[k + 2]
        for k, d in enumerate(image)
    ]
    return [w - d for w, d in zip(wanted, least, strict=True)]


def image_of(op: Op, slot: str) -> tuple[int, ...]:
    shape = op.type_of(slot).shape
    return shape[2:] if op.attrs["data_format"] == "NCHW" else shape[1:3]
