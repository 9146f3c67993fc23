"""Ops that cut a window out of a value or add a border around it: slice, strided_slice, pad, pad2d."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...ir.axis_letters import but
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Control, Native, Rewrite, Storage
from ...ir.opdef import OpDef, Required, Sample
from ...ir.types import ANY, TensorType
from ..shared.native import copy_calls, fill_calls
from ..shared.samples import f32
from ..shared.types import need_ndim, norm_axes

INT_MAX = 2**31 - 1  # fluid's "to the end" in slice attributes


# -- slice ------------------------------------------------------------------------------------------------------------------


def _window(
    op: str, shape: Sequence[int], axes: Sequence[int], starts: Sequence[int], ends: Sequence[int], strides: Sequence[int]
) -> tuple[slice, ...]:
    """The Python slice of every axis. Raises ProgramError if the attributes do not match."""
    if not len(axes) == len(starts) == len(ends) == len(strides):
        raise ProgramError(f"op {op}: axes, starts and ends must have one length, found {len(axes)}, {len(starts)} and {len(ends)}")
    out = [slice(None)] * len(shape)
    for a, s, e, k in zip(norm_axes(op, axes, len(shape)), starts, ends, strides, strict=True):
        if k == 0:
            raise ProgramError(f"op {op}: the stride along axis {a} is 0; expected another integer")
        # "before the first element" is None in Python, which would read a negative end from the back; "to the end" applies to every size,
        # even to larger ones: the numbers that stand for open sizes are larger
        out[a] = slice(s, None if (e < -INT_MAX if k < 0 else e >= INT_MAX) else e, k)
    return tuple(out)


def _window_size(d: int, s: slice) -> int:
    """The size of a slice of an axis of size `d`; an open axis stays open."""
    if d == ANY:
        return d if _keeps_all(d, s) else ANY
    start, stop, step = s.indices(d)
    return max(0, -((start - stop) // step))  # len(range(...)) fails for products of the numbers that stand for open sizes


def _sliced(x: TensorType, attrs: Mapping[str, Any]) -> str:
    """The axis words for a value and for a window of it: an axis of which only a part is read must not be sharded."""
    window = _window("slice", x.shape, attrs["axes"], attrs["starts"], attrs["ends"], attrs.get("strides") or (1,) * len(attrs["axes"]))
    return but([k for k, (d, s) in enumerate(zip(x.shape, window, strict=True)) if not _keeps_all(d, s)], x.ndim)


def _keeps_all(d: int, s: slice) -> bool:
    if d == ANY:
        return s.start in (None, 0) and s.stop is None and s.step in (None, 1)
    return s.indices(d) == (0, d, 1)


class Slice(OpDef):
    """The part of Input from `starts[k]` up to `ends[k]` along axis `axes[k]`, as in Python slices; axes in `decrease_axis` are removed.

    Ends beyond the size are cut to it. Raises ProgramError if an axis to remove does not have size 1.
    """

    name = "slice"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("Input",)
    attrs = {"axes": Required(tuple), "starts": Required(tuple), "ends": Required(tuple), "decrease_axis": ()}

    @staticmethod
    def pattern(ins, outs, attrs):
        x, drop = _sliced(ins[0], attrs), norm_axes("slice", attrs["decrease_axis"], ins[0].ndim)
        return f"{x} -> {' '.join(w for k, w in enumerate(x.split()) if k not in drop)} | L(0) U(0)"

    @staticmethod
    def _meaning(a, ins, outs, *, axes, starts, ends, decrease_axis):
        x = a.type(ins[0])
        window = _window("slice", x.shape, axes, starts, ends, (1,) * len(axes))
        if x.numel == ANY:
            return [a.unknown()]
        kept = [range(*s.indices(d)) for d, s in zip(x.shape, window, strict=True)]
        return [a.shaped(a.strided.cut(ins[0], [(r.start, r.start + len(r)) for r in kept]), outs[0].shape)]

    rewrite = Rewrite(meaning=_meaning)

    @staticmethod
    def infer(x, *, axes, starts, ends, decrease_axis):
        window = _window("slice", x.shape, axes, starts, ends, (1,) * len(axes))
        shape = [_window_size(d, s) for d, s in zip(x.shape, window, strict=True)]
        drop = norm_axes("slice", decrease_axis, x.ndim)
        for a in drop:
            if shape[a] not in (1, ANY):
                raise ProgramError(f"op slice: axis {a} of {x} is cut to size {shape[a]}; to remove it, size 1 is needed")
        return x.with_shape(d for i, d in enumerate(shape) if i not in drop)

    @staticmethod
    def grad(b, op, g):
        a = op.attrs
        if a["decrease_axis"]:
            g = b.unsqueeze(g, axes=sorted(norm_axes("slice", a["decrease_axis"], op["Input"].ndim)))
        return b.slice_grad(op["Input"], g, axes=a["axes"], starts=a["starts"], ends=a["ends"], strides=(1,) * len(a["axes"]))

    @staticmethod
    def _view(x, *, axes, starts, ends, decrease_axis):
        part = x[_window("slice", x.shape, axes, starts, ends, (1,) * len(axes))]
        drop = norm_axes("slice", decrease_axis, x.ndim)
        # without the ellipsis, a single number would be a copy
        return part[(*(0 if i in drop else slice(None) for i in range(x.ndim)), ...)] if drop else part

    storage = Storage(view=_view)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), axes=(0,), starts=(1,), ends=(3,))
        yield Sample.of(f32(4, 3, 2), axes=(0, -1), starts=(-3, 0), ends=(INT_MAX, -1))
        yield Sample.of(f32(4, 3), axes=(1,), starts=(2,), ends=(3,), decrease_axis=(1,))
        yield Sample.of(f32(4), axes=(0,), starts=(1,), ends=(2,), decrease_axis=(0,))
        yield Sample.of(f32(4), axes=(0,), starts=(3,), ends=(3,), grad=(), why="the result is empty")
        yield Sample.of(f32(5, 4, 3), axes=(1, 0), starts=(2, -5), ends=(3, 5), decrease_axis=(1,))


class StridedSlice(OpDef):
    """The elements of Input from `starts[k]` to `ends[k]` in steps of `strides[k]` along axis `axes[k]`; a stride may be negative."""

    name = "strided_slice"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("Input",)
    attrs = {"axes": Required(tuple), "starts": Required(tuple), "ends": Required(tuple), "strides": Required(tuple)}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = _sliced(ins[0], attrs)
        return f"{x} -> {x} | L(0) U(0)"

    @staticmethod
    def infer(x, *, axes, starts, ends, strides):
        window = _window("strided_slice", x.shape, axes, starts, ends, strides)
        return x.with_shape(_window_size(d, s) for d, s in zip(x.shape, window, strict=True))

    @staticmethod
    def grad(b, op, g):
        return b.slice_grad(op["Input"], g, **op.attrs)

    @staticmethod
    def _view(x, *, axes, starts, ends, strides):
        return x[_window("strided_slice", x.shape, axes, starts, ends, strides)]

    storage = Storage(view=_view)

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 3), axes=(0,), starts=(0,), ends=(5,), strides=(2,))
        yield Sample.of(f32(5, 3), axes=(0, 1), starts=(INT_MAX, 1), ends=(-(2**31), 3), strides=(-2, 1))
        yield Sample.of(f32(5), axes=(0,), starts=(3,), ends=(0,), strides=(-1,))
        yield Sample.of(f32(3, 5, 4), axes=(1, 2), starts=(4, 0), ends=(0, INT_MAX), strides=(-2, 1))


class SliceGrad(OpDef):
    """Zeros in the shape of Input with the gradient at the positions that slice or strided_slice read; only Input's shape is read."""

    name = "slice_grad"
    arithmetic = Arithmetic(flops=0)
    inputs, outputs = ("Input", "Out@GRAD"), ("Input@GRAD",)
    attrs = StridedSlice.attrs

    @staticmethod
    def pattern(ins, outs, attrs):
        x = _sliced(ins[0], attrs)
        return f"~{x}, {x} -> {x} | L(1)"

    @staticmethod
    def infer(x, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, g, *, out, axes, starts, ends, strides):
        out.fill(0)
        out[_window("slice_grad", x.shape, axes, starts, ends, strides)] = g

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, g), out = ins, outs[0]
        clear = fill_calls(out, 0, dry)
        put = copy_calls(out[_window("slice_grad", x.shape, *(attrs[k] for k in ("axes", "starts", "ends", "strides")))], g, dry)
        return None if clear is None or put is None else [*clear, *put]

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), f32(2, 3), axes=(0,), starts=(1,), ends=(3,), strides=(1,), grad=(), why="a gradient op")
        yield Sample.of(f32(3, 5, 4), f32(3, 2, 4), axes=(1, 2), starts=(4, 0), ends=(0, 9), strides=(-2, 1), grad=(), why="a gradient op")


# -- padding ----------------------------------------------------------------------------------------------------------------


def _borders(op: str, paddings: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    if len(paddings) != 2 * ndim or any(p < 0 for p in paddings):
        raise ProgramError(f"op {op}: paddings {list(paddings)} must hold {2 * ndim} sizes of 0 or more, two for each of {ndim} axes")
    return [(paddings[2 * i], paddings[2 * i + 1]) for i in range(ndim)]


def _bordered(d: int, lo: int, hi: int) -> int:
    """The size of an axis with a border."""
    if d == ANY:
        return d if lo == hi == 0 else ANY
    return lo + d + hi


def _inside(borders: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(lo, lo + d) for (lo, _), d in zip(borders, shape, strict=True))


class Pad(OpDef):
    """X with `paddings` (before and after each axis, flat) elements of `pad_value` around it."""

    name = "pad"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    inputs = ("X",)
    attrs = {"paddings": Required(tuple), "pad_value": 0.0}

    @staticmethod
    def pattern(ins, outs, attrs):
        borders = _borders("pad", attrs["paddings"], ins[0].ndim)
        x = but([k for k, b in enumerate(borders) if any(b)], ins[0].ndim)
        return f"{x} -> {x} | U(0) {'' if attrs['pad_value'] else 'L(0)'}"

    @staticmethod
    def infer(x, *, paddings, pad_value):
        return x.with_shape(_bordered(d, lo, hi) for d, (lo, hi) in zip(x.shape, _borders("pad", paddings, x.ndim), strict=True))

    @staticmethod
    def grad(b, op, g):
        borders = _borders("pad", op.attrs["paddings"], op["X"].ndim)
        axes = [i for i, (lo, hi) in enumerate(borders) if lo or hi]
        ends = [-borders[i][1] or INT_MAX for i in axes]
        return b.slice(g, axes=axes, starts=[borders[i][0] for i in axes], ends=ends) if axes else g

    @staticmethod
    def kernel(xp, x, *, out, paddings, pad_value):
        out.fill(pad_value)
        out[_inside(_borders("pad", paddings, x.ndim), x.shape)] = x

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), paddings=(1, 0, 0, 2), pad_value=1.5)
        yield Sample.of(f32(3), paddings=(0, 0))
        yield Sample.of(f32(3, 2, 5), paddings=(0, 0, 2, 1, 0, 0))


def _source_rows(n: int, before: int, after: int, mode: Any) -> np.ndarray:
    """The row, of `n`, that each padded row repeats."""
    return np.pad(np.arange(n), (before, after), mode=mode)


def _image_axes(data_format: str) -> tuple[int, int]:
    return (2, 3) if data_format == "NCHW" else (1, 2)


class Pad2d(OpDef):
    """An image batch X with `paddings` = [top, bottom, left, right] pixels around each image.

    `mode` is constant (`pad_value`), reflect (mirrored, the border pixel not repeated) or edge (the border pixel repeated).
    """

    name = "pad2d"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    attrs = {"paddings": Required(tuple), "mode": "constant", "pad_value": 0.0, "data_format": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = but(_image_axes(attrs["data_format"]), 4)
        return f"{x} -> {x} | U(0) {'L(0)' if attrs['mode'] != 'constant' or not attrs['pad_value'] else ''}"

    @staticmethod
    def infer(x, *, paddings, mode, pad_value, data_format):
        need_ndim("pad2d", "X", x, 4)
        if mode not in ("constant", "reflect", "edge"):
            raise ProgramError(f"op pad2d: mode must be constant, reflect or edge, found {mode!r}")
        if data_format not in ("NCHW", "NHWC"):
            raise ProgramError(f"op pad2d: data_format must be NCHW or NHWC, found {data_format!r}")
        shape = list(x.shape)
        for axis, (lo, hi) in zip(_image_axes(data_format), _borders("pad2d", paddings, 2), strict=True):
            if mode == "reflect" and ANY != shape[axis] <= max(lo, hi):
                raise ProgramError(f"op pad2d: reflecting {max(lo, hi)} pixels needs more than that along axis {axis}, found {shape[axis]}")
            shape[axis] = _bordered(shape[axis], lo, hi)
        return x.with_shape(shape)

    @staticmethod
    def grad(b, op, g):
        return b.pad2d_grad(op["X"], g, **op.attrs)

    @staticmethod
    def kernel(xp, x, *, out, paddings, mode, pad_value, data_format):
        (top, bottom), (left, right) = _borders("pad2d", paddings, 2)
        if mode == "constant":
            border = [(0, 0)] * 4
            border[_image_axes(data_format)[0]], border[_image_axes(data_format)[1]] = (top, bottom), (left, right)
            out.fill(pad_value)
            out[_inside(border, x.shape)] = x
            return
        h, w = _image_axes(data_format)
        rows = xp.take(x, xp.asarray(_source_rows(x.shape[h], top, bottom, mode)), axis=h)
        out[...] = xp.take(rows, xp.asarray(_source_rows(x.shape[w], left, right, mode)), axis=w)

    @staticmethod
    def samples():
        yield Sample.of(f32(1, 2, 3, 2), paddings=(1, 0, 2, 1), pad_value=-1.0)
        yield Sample.of(f32(1, 2, 3, 4), paddings=(2, 1, 1, 3), mode="reflect")
        yield Sample.of(f32(1, 2, 2, 3), paddings=(1, 2, 3, 0), mode="edge")
        yield Sample.of(f32(5, 3, 2, 4), paddings=(1, 2, 3, 0))
        yield Sample.of(f32(1, 3, 3, 2), paddings=(1, 1, 0, 1), mode="reflect", data_format="NHWC")


class Pad2dGrad(OpDef):
    """The gradient of pad2d: every pixel gets the sum of the gradients of all its copies; only X's shape is read."""

    name = "pad2d_grad"
    arithmetic = Arithmetic(flops=0)
    # the gradients of an element that padding repeats are added
    autocast = Autocast(takes_16_bit=False)
    inputs, outputs = ("X", "Out@GRAD"), ("X@GRAD",)
    attrs = Pad2d.attrs

    @staticmethod
    def pattern(ins, outs, attrs):
        x = but(_image_axes(attrs["data_format"]), 4)
        return f"~{x}, {x} -> {x} | L(1)"

    @staticmethod
    def infer(x, g, **attrs):
        return x

    @staticmethod
    def kernel(xp, x, g, *, out, paddings, mode, pad_value, data_format):
        h, w = _image_axes(data_format)
        borders = _borders("pad2d", paddings, 2)
        for axis, (lo, hi) in zip((h, w), borders, strict=True):
            n = x.shape[axis]
            before = (slice(None),) * axis
            part = g[(*before, slice(lo, lo + n))]
            if mode != "constant" and lo + hi:
                part = part.copy()
                source = _source_rows(n, lo, hi, mode)
                for i in (*range(lo), *range(lo + n, lo + n + hi)):
                    part[(*before, int(source[i]))] += g[(*before, i)]
            g = part
        out[...] = g

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4, 2, 5), f32(3, 4, 3, 7), paddings=(1, 0, 1, 1), mode="edge", grad=(), why="a gradient op")
        yield Sample.of(f32(3, 4, 2, 5), f32(3, 5, 5, 5), paddings=(1, 0, 1, 2), data_format="NHWC", grad=(), why="a gradient op")
