"""Positions of windows over images: the arithmetic for convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...ir import ANY, ProgramError, TensorType
from ..shared.types import need_float

MOST = 2**31 - 1  # of a stride, a size, a dilation or a padding: the product of two fits in 64 bits


@dataclass(frozen=True, slots=True)
class Windows:
    """The positions of windows over an image: sizes as (height, width), `pad` as (top, bottom, left, right)."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pad: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, int]:
        t, b, left, right = self.pad
        return self.image[0] + t + b, self.image[1] + left + right

    @property
    def taps(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.kernel[0]) for j in range(self.kernel[1])]

    def tap(self, i: int, j: int) -> tuple[slice, slice]:
        """The padded rows and columns that tap (i, j) of all windows reads."""
        r, c = i * self.dilation[0], j * self.dilation[1]
        return (slice(r, r + (self.out[0] - 1) * self.stride[0] + 1, self.stride[0]),
                slice(c, c + (self.out[1] - 1) * self.stride[1] + 1, self.stride[1]))  # fmt: skip

    @property
    def is_pixel(self) -> bool:
        """A 1x1 window at stride 1 without padding: the columns are the image itself."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.pad == (0, 0, 0, 0)


def pair(op: str, name: str, value: Sequence[int], least: int) -> tuple[int, int]:
    """An attribute of one or two integers as (height, width)."""
    if len(value) not in (1, 2) or any(not isinstance(v, int) or not least <= v <= MOST for v in value):
        raise ProgramError(f"op {op}: {name} must be one or two integers from {least} to {MOST}, got {list(value)}")
    return (value[0], value[-1])


def four_pads(op: str, paddings: Sequence[int]) -> tuple[int, ...]:
    """`paddings` of 1, 2 (height, width) or 4 (top, bottom, left, right) integers as 4 integers."""
    if len(paddings) not in (1, 2, 4) or any(not isinstance(p, int) or not 0 <= p <= MOST for p in paddings):
        raise ProgramError(f"op {op}: paddings must be 1, 2 or 4 integers from 0 to {MOST}, got {list(paddings)}")
    if len(paddings) == 4:
        return tuple(paddings)
    return paddings[0], paddings[0], paddings[-1], paddings[-1]


@lru_cache(maxsize=4096)
def place_windows(op: str, image: Sequence[int], kernel: Sequence[int], strides: Sequence[int], paddings: Sequence[int],
                  dilations: Sequence[int] = (1, 1), algorithm: str = "EXPLICIT", ceil_mode: bool = False) -> Windows:  # fmt: skip
    """The windows of a convolution or a pooling; an open image size gives an open result size.

    `algorithm` SAME pads so that the result has ceil(size / stride), the odd element at the end; VALID does not pad. Raises ProgramError
    for attributes out of range and for a window larger than the padded image.
    """
    stride, dilation = pair(op, "strides", strides, 1), pair(op, "dilations", dilations, 1)
    if algorithm not in ("EXPLICIT", "SAME", "VALID"):
        raise ProgramError(f"op {op}: padding_algorithm must be EXPLICIT, SAME or VALID, got {algorithm!r}")
    pads = list(four_pads(op, paddings)) if algorithm == "EXPLICIT" else [0, 0, 0, 0]
    out = []
    for a in (0, 1):
        size, reach = image[a], (kernel[a] - 1) * dilation[a] + 1
        if size == ANY or kernel[a] == ANY:
            out.append(ANY)
            continue
        if algorithm == "SAME":
            need = max((-(-size // stride[a]) - 1) * stride[a] + reach - size, 0)
            pads[2 * a], pads[2 * a + 1] = need // 2, need - need // 2
        room = size + pads[2 * a] + pads[2 * a + 1] - reach
        if room < 0:
            side, around = ("height", "width")[a], f"{pads[2 * a]} and {pads[2 * a + 1]}"
            raise ProgramError(f"op {op}: a window of {reach} does not fit {side} {size} with padding {around}")
        count = (room + (stride[a] - 1 if ceil_mode else 0)) // stride[a] + 1
        # a window that is in the padding alone has no elements
        out.append(count - 1 if ceil_mode and (count - 1) * stride[a] >= size + pads[2 * a] else count)
    return Windows(tuple(image), tuple(kernel), stride, dilation, tuple(pads), tuple(out))


def need_image(op: str, x: TensorType, data_format: str) -> None:
    """Raise ProgramError unless the type is a float image batch and the layout is known."""
    if data_format not in ("NCHW", "NHWC"):
        raise ProgramError(f"op {op}: data_format must be NCHW or NHWC, got {data_format!r}")
    if x.ndim != 4:
        raise ProgramError(f"op {op} needs an input of 4 axes ({data_format}), got {x}")
    need_float(op, "input", x)


def split_image(x: Any, data_format: str) -> tuple[int, int, tuple[int, int]]:
    """(batch, channels, (height, width)) of a type or an array."""
    n, a, b, c = x.shape
    return (n, a, (b, c)) if data_format == "NCHW" else (n, c, (a, b))


def join_image(n: Any, channels: Any, size: Sequence[Any], data_format: str) -> tuple[Any, ...]:
    return (n, channels, *size) if data_format == "NCHW" else (n, *size, channels)


def image_words(channels: str, data_format: str) -> str:
    """The axis words of an image batch in an access pattern: the pixels are whole."""
    return " ".join(join_image("n", channels, (".", "."), data_format))


def channels_first(x: Any, data_format: str) -> Any:
    """The array as an NCHW view."""
    return x if data_format == "NCHW" else x.transpose(0, 3, 1, 2)
