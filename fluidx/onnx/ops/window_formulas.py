"""Gradients of convolution and pooling exported as convolutions, and by the positions of maxima that MaxPool outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from ...ops.nn.windows import four_pads, pair, place_windows
from ..export_graph import Op
from ..table import exports
from .conv import first, image_of


def _in_layout(op: Op, value: str, layout: str) -> str:
    return value if layout == "NCHW" else op.emit("Transpose", value, perm=[0, 2, 3, 1])


def _sizes(op: Op, slot: str) -> tuple[int, ...]:
    image = image_of(op, slot)
    if ANY in image:
        raise op.wrong("the sizes of the image are open")
    return image


def _extra_elements(image: Any, cells: Any, size: Any, strides: Any, dilations: Any, pads: Any) -> list[int]:
    """The number of elements of an image that its windows do not reach."""
    return [
        d - ((n - 1) * strides[k] + (size[k] - 1) * dilations[k] + 1 - pads[2 * k] - pads[2 * k + 1])
        for k, (d, n) in enumerate(zip(image, cells, strict=True))
    ]


@exports("conv2d_grad")
def conv_grad(op: Op) -> dict[str, str]:
    a, size = op.attrs, op.type_of("Filter").shape[2:]
    strides, dilations = (pair(op.type, n, a[n], 1) for n in ("strides", "dilations"))
    image, cells = _sizes(op, "Input"), _sizes(op, "Output@GRAD")
    if a["padding_algorithm"] == "EXPLICIT":
        pads = four_pads(op.type, a["paddings"])
    else:
        pads = place_windows(op.type, image, size, strides, a["paddings"], dilations, a["padding_algorithm"], False).pad
    found, g = {}, first(op, "Output@GRAD", a["data_format"])
    around = [pads[0], pads[2], pads[1], pads[3]]
    if op.op.outputs.get("Input@GRAD"):
        more = _extra_elements(image, cells, size, strides, dilations, pads)
        dx = op.emit("ConvTranspose", g, op["Filter"], strides=[*strides], dilations=[*dilations], pads=around, group=a["groups"],
                     kernel_shape=[*size], output_padding=more)  # fmt: skip
        found["Input@GRAD"] = _in_layout(op, dx, a["data_format"])
    if op.op.outputs.get("Filter@GRAD"):
        x = first(op, "Input", a["data_format"])
        found["Filter@GRAD"] = _filter_grad(op, x, g, image, cells, {"pads": around, "strides": [*dilations], "dilations": [*strides]})
    return found


def _filter_grad(op: Op, x: str, g: str, image: Any, cells: Any, attrs: dict[str, Any]) -> str:
    """The gradient of filters: a convolution of the images with the output gradients as filters, where channels and examples change places.
    """
    groups, (_, channels, *size) = op.attrs["groups"], op.type_of("Filter").shape
    if groups == 1:
        turned = op.emit("Transpose", x, perm=[1, 0, 2, 3])
    else:
        split = op.emit("Reshape", x, op.ints([0, groups, channels, *image]))
        turned = op.emit("Transpose", split, perm=[2, 1, 0, 3, 4])
        turned = op.emit("Reshape", turned, op.ints([channels, -1, *image]))
    dw = op.emit("Conv", turned, op.emit("Transpose", g, perm=[1, 0, 2, 3]), group=groups, kernel_shape=[*cells], **attrs)
    dw = op.emit("Slice", dw, op.ints([0, 0]), op.ints(size), op.ints([2, 3]))  # strides may leave extra rows
    return op.emit("Transpose", dw, perm=[1, 0, 2, 3])


@exports("conv2d_transpose_grad")
def conv_transpose_grad(op: Op) -> dict[str, str]:
    """A convolution of the gradient. For the filter's gradient the two images change places."""
    a, size = op.attrs, op.type_of("Filter").shape[2:]
    if a["padding_algorithm"] == "SAME":
        raise op.wrong("padding_algorithm SAME, which depends on the size of the image; give paddings")
    strides, dilations = (pair(op.type, n, a[n], 1) for n in ("strides", "dilations"))
    pads = four_pads(op.type, a["paddings"]) if a["padding_algorithm"] == "EXPLICIT" else (0, 0, 0, 0)
    around, found = [pads[0], pads[2], pads[1], pads[3]], {}
    x, g = (first(op, slot, a["data_format"]) for slot in ("Input", "Output@GRAD"))
    if op.op.outputs.get("Input@GRAD"):
        steps = {"pads": around, "strides": [*strides], "dilations": [*dilations]}
        dx = op.emit("Conv", g, op["Filter"], group=a["groups"], kernel_shape=[*size], **steps)
        found["Input@GRAD"] = _in_layout(op, dx, a["data_format"])
    if op.op.outputs.get("Filter@GRAD"):
        steps = {"pads": around, "strides": [*dilations], "dilations": [*strides]}
        found["Filter@GRAD"] = _filter_grad(op, g, x, _sizes(op, "Output@GRAD"), _sizes(op, "Input"), steps)
    return found


@exports("pool2d_grad")
def pool_grad(op: Op) -> str:
    a, layout = op.attrs, op.attrs["data_format"]
    image, cells = _sizes(op, "X"), _sizes(op, "Out@GRAD")
    if a["global_pooling"] or a["adaptive"]:
        if any(d % n for d, n in zip(image, cells, strict=True)):
            raise op.wrong(
                f"adaptive pooling of an image of {list(image)} to {list(cells)} has windows of several sizes, which ONNX has not"
            )
        size = strides = tuple(d // n for d, n in zip(image, cells, strict=True))
        pads: tuple[int, ...] = (0, 0, 0, 0)
    else:
        size, strides = (pair(op.type, n, a[n], 1) for n in ("ksize", "strides"))
        pads = place_windows(op.type, image, size, strides, a["paddings"], (1, 1), a["padding_algorithm"], a["ceil_mode"]).pad
    attrs = {"kernel_shape": [*size], "strides": [*strides], "pads": [pads[0], pads[2], pads[1], pads[3]]}
    x, g = first(op, "X", layout), first(op, "Out@GRAD", layout)
    shape = op.emit("Shape", x)
    if a["pooling_type"] == "max":
        return _in_layout(op, op.emit("Reshape", _scatter_to_maxima(op, x, g, attrs), shape), layout)
    more = _extra_elements(image, cells, size, strides, (1, 1), pads)
    shares = op.emit("Div", g, op.const(_counts(op, image, cells, size, strides, pads)))
    alone = op.emit("Reshape", shares, op.ints([-1, 1, *cells]))
    ones = op.const(np.ones((1, 1, *size), np_dtype(op.dtype("X"))))
    if min(more) < 0:  # the last windows extend beyond the image
        raise op.wrong("its last windows end after the padding; give paddings for ceil_mode")
    dx = op.emit("ConvTranspose", alone, ones, output_padding=more, **attrs)
    return _in_layout(op, op.emit("Reshape", dx, shape), layout)


def _scatter_to_maxima(op: Op, x: str, g: str, attrs: dict[str, Any]) -> str:
    if op.opset < 16:
        raise op.wrong("its ScatterElements adds from opset 16 on")
    _, places = op.emit_many("MaxPool", 2, x, **attrs)
    zeros = op.emit(
        "ConstantOfShape", op.emit("Reshape", op.emit("Size", x), op.ints([1])), value=op.tensor(np.zeros(1, np_dtype(op.dtype("X"))))
    )
    flat = op.ints([-1])
    return op.emit("ScatterElements", zeros, op.emit("Reshape", places, flat), op.emit("Reshape", g, flat), axis=0, reduction="add")


def _counts(op: Op, image: Any, cells: Any, size: Any, strides: Any, pads: Any) -> np.ndarray:
    """The divisor of each window: the number of its elements in the image if `exclusive`."""
    if not op.attrs["exclusive"]:
        return np.array(size[0] * size[1], np_dtype(op.dtype("X")))
    starts = [np.arange(n) * strides[k] - pads[2 * k] for k, n in enumerate(cells)]
    lengths = [np.minimum(s + size[k], image[k]) - np.maximum(s, 0) for k, s in enumerate(starts)]
    return np.multiply.outer(*lengths).astype(np_dtype(op.dtype("X")))
