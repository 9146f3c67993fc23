"""Export of convolution and pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...ir.types import ANY
from ...ops.nn.windows import four_pads, pair, place_windows
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op


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


def _pads(op: Op) -> dict[str, Any]:
    algorithm = op.attrs["padding_algorithm"]
    if algorithm != "EXPLICIT":
        return {"auto_pad": {"SAME": "SAME_UPPER", "VALID": "VALID"}[algorithm]}
    top, bottom, left, right = four_pads(op.type, op.attrs["paddings"])
    return {"pads": [top, left, bottom, right]}


def _steps(op: Op, *names: str) -> dict[str, list[int]]:
    return {name: list(pair(op.type, name, op.attrs[name], 1)) for name in names}


@exports("conv2d", "depthwise_conv2d")
def conv(op: Op) -> str:
    kernel = list(op.type_of("Filter").shape[2:])
    attrs = {**_steps(op, "strides", "dilations"), **_pads(op), "group": op.attrs["groups"], "kernel_shape": kernel}
    return channels_first(op, "Input", op.attrs["data_format"], lambda x: op.emit("Conv", x, op["Filter"], **attrs))


@exports("conv2d_transpose")
def conv_transpose(op: Op) -> str:
    a = op.attrs
    attrs = {**_steps(op, "strides", "dilations"), **_pads(op), "group": a["groups"], "kernel_shape": list(op.type_of("Filter").shape[2:])}
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


@exports("pool2d")
def pool(op: Op) -> str:
    a, layout = op.attrs, op.attrs["data_format"]
    kind = {"max": "Max", "avg": "Average"}[a["pooling_type"]]
    if a["global_pooling"] or (a["adaptive"] and tuple(pair(op.type, "ksize", a["ksize"], 1)) == (1, 1)):
        return channels_first(op, "X", layout, lambda x: op.emit(f"Global{kind}Pool", x))
    attrs: dict[str, Any] = {"count_include_pad": int(not a["exclusive"])} if kind == "Average" else {}
    size = pair(op.type, "ksize", a["ksize"], 1)
    attrs |= _adaptive_windows(op) if a["adaptive"] else {"kernel_shape": list(size), **_steps(op, "strides"), **_pads(op)}
    if a["ceil_mode"]:
        attrs |= _last_windows(op)
    return channels_first(op, "X", layout, lambda x: op.emit(f"{kind}Pool", x, **attrs))


def _last_windows(op: Op) -> dict[str, Any]:
    """A window that begins after the image does not count. ceil_mode has this meaning from opset 22 on; explicit padding has it in all
    opsets."""
    a, image = op.attrs, image_of(op, "X")
    if ANY in image:
        return {"ceil_mode": 1}
    size = pair(op.type, "ksize", a["ksize"], 1)
    win = place_windows(op.type, image, size, a["strides"], a["paddings"], (1, 1), a["padding_algorithm"], True)
    top, bottom, left, right = win.pad
    return {"pads": [top, left, bottom, right], "auto_pad": "NOTSET"}


def image_of(op: Op, slot: str) -> tuple[int, ...]:
    shape = op.type_of(slot).shape
    return shape[2:] if op.attrs["data_format"] == "NCHW" else shape[1:3]


def _adaptive_windows(op: Op) -> dict[str, Any]:
    """Adaptive pooling whose windows all have the same size."""
    image = image_of(op, "X")
    cells = pair(op.type, "ksize", op.attrs["ksize"], 1)
    if ANY in image or any(d % n for d, n in zip(image, cells)):
        raise op.wrong(f"adaptive pooling of an image of {list(image)} to {list(cells)} has windows of several sizes, which ONNX lacks")
    size = [d // n for d, n in zip(image, cells)]
    return {"kernel_shape": size, "strides": size}
