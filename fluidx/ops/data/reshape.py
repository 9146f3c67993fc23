"""Ops that change the axes of a value and keep its elements: reshape, flatten, squeeze, unsqueeze, transpose; and `shape`, which reads
sizes.

If NumPy can express the result as a view, it costs nothing at run time; `view` returns None if a copy is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ir.axis_letters import but, fold, letters, match_axes
from ...ir.dtypes import dtype_name
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic, Autocast, Comm, Control, Native, Rewrite, Storage
from ...ir.opdef import OpDef, Required, Sample
from ...ir.types import ANY, TensorType
from ...ir.valuetypes import is_ranked
from ..shared.native import copy_calls
from ..shared.samples import f32
from ..shared.types import mul_sizes, need_ids, norm_axes, norm_axis, same_elements


def _reshaped(x: Any, shape: Sequence[int]) -> Any:
    """`x.reshape(shape)` if that is a view, otherwise None."""
    if isinstance(x, np.ndarray):
        try:
            return x.reshape(shape, copy=False)
        except ValueError:
            return None
    y = x.reshape(shape)
    return y if y.base is not None else None  # cupy: a copy has no base


def _unshaped(y: Any, shapes: Sequence[Sequence[int]], **attrs: Any) -> list[Any]:
    """The view of the operand in a result with the same elements in the same order."""
    return [_reshaped(y, shapes[0])]


def _fill_reshaped(xp: Any, out: Any, x: Any) -> None:
    """Copy the elements of `x` in order into `out`, which is contiguous."""
    out.reshape(x.shape)[...] = x


def _native_fill(ins: Any, outs: Any, attrs: Any, dry: bool = False) -> Any:
    """Calls of C kernels that copy the elements of the first input in order into the output."""
    x, out = ins[0], outs[0]
    return copy_calls(out.reshape(x.shape), x, dry) if out.flags.c_contiguous else None


def _resolve(op: str, x: TensorType, shape: Sequence[int]) -> tuple[int, ...]:
    """The result shape of `shape` (0 copies a size, one -1 is computed) for `x`; sizes that depend on open axes stay open."""
    dims, rest = [], list(x.shape)
    for i, s in enumerate(shape):
        if s == 0:
            if i >= x.ndim:
                raise ProgramError(f"op {op}: shape {list(shape)} copies axis {i} of X, which has {x.ndim} axes: {x}")
            dims.append(x.shape[i])
            rest.remove(x.shape[i])  # a copied size cancels out, known or open
        elif s < -1:
            raise ProgramError(f"op {op}: shape {list(shape)} holds {s}; sizes are positive, 0 (copy from X) or -1 (computed)")
        else:
            dims.append(s)
    if list(shape).count(-1) > 1:
        raise ProgramError(f"op {op}: shape {list(shape)} holds -1 more than once; only one size can be computed")
    given = mul_sizes([s for s in shape if s > 0])
    held = mul_sizes(rest)
    if held == ANY:
        return tuple(dims)
    if -1 in shape:
        if given == 0 or held % given:
            raise ProgramError(f"op {op}: {x} has {held} elements to distribute over {list(shape)}; {held} does not divide by {given}")
        dims[list(shape).index(-1)] = held // given
    elif held != given and mul_sizes(dims) != x.numel:  # an empty value stays empty in either case
        raise ProgramError(f"op {op}: {x} cannot be reshaped to {list(shape)}: expected {given} elements, found {held}")
    return tuple(dims)


def _reshape_back(b: Any, x: Any, g: Any) -> Any:
    """`g` in the shape of `x`: a plain reshape that leaves the first size open if the others are known, so that the batch size may vary."""
    if not is_ranked(x.desc.type):
        return b.reshape_grad(g, x)
    if x.ndim == 0:
        return b.reshape(g, shape=())
    if all(d > 0 for d in x.shape[1:]):
        return b.reshape(g, shape=(-1, *x.shape[1:]))
    return b.reshape_grad(g, x)


def _same_elements(ins, outs, attrs):
    """The access pattern of an op that keeps all elements in order, for any axes."""
    x, y, sizes, whole = match_axes(ins[0].shape, outs[0].shape)
    return f"{x} -> {y} | {whole} L(0) U(0)", sizes


def _reshape_words(ins, outs, attrs):
    """The access pattern of `reshape`. With several open axes, axes at both ends that keep their size and position are the same axes."""
    x, y, shape = ins[0].shape, outs[0].shape, attrs["shape"]
    if len(x) != len(y) or x.count(ANY) < 2:
        return _same_elements(ins, outs, attrs)
    kept = [s == 0 or ANY != d == e for s, d, e in zip(shape, x, y, strict=True)]
    first = kept.index(False) if False in kept else len(kept)
    last = len(kept) - kept[::-1].index(False) if False in kept else len(kept)
    a, b, sizes, whole = match_axes(x[first:last], y[first:last])
    front, back = letters(first, "f"), letters(len(x) - last, "e")
    return f"{front} {a} {back} -> {front} {b} {back} | {whole} L(0) U(0)", sizes


def _laid_out(a, ins, outs, **_):
    """For the proof: the same elements in another shape."""
    return [a.shaped(ins[0], outs[0].shape)]


class Reshape(OpDef):
    """X's elements in the same order with the shape `shape`: 0 copies X's size, one -1 is computed from the others.

    Raises ProgramError if the numbers of elements differ. A sharded axis stays sharded if it is written as 0 or -1.
    """

    name = "reshape"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    rewrite = Rewrite(
        identity_if=same_elements, merge_two=lambda first, second: second if 0 not in second["shape"] else None, meaning=_laid_out
    )  # fmt: skip
    inputs = ("X",)
    attrs = {"shape": Required(tuple)}
    pattern = staticmethod(_reshape_words)

    @staticmethod
    def _local_attrs(attrs, ins, outs):
        # 0 would copy: an empty axis that X does not have at the same position is computed
        x, made = ins[0], outs[0]
        return {**attrs, "shape": tuple([-1 if d == 0 and (k >= len(x) or x[k]) else d for k, d in enumerate(made)])}

    comm = Comm(local_attrs=_local_attrs)

    @staticmethod
    def infer(x, *, shape):
        return x.with_shape(_resolve("reshape", x, shape))

    @staticmethod
    def grad(b, op, g):
        x, shape = op["X"], op.attrs["shape"]
        if is_ranked(x.desc.type) and x.shape.count(ANY) > 1:
            back = [0 if shape[k : k + 1] == (0,) else d for k, d in enumerate(x.shape)]
            if back.count(ANY) < 2:
                return b.reshape(g, shape=back)
        return _reshape_back(b, x, g)

    @staticmethod
    def _view(x, *, shape):
        return _reshaped(x, _resolve("reshape", TensorType(dtype_name(x.dtype), x.shape), shape))

    storage = Storage(view=_view, operand_views=_unshaped)

    @staticmethod
    def kernel(xp, x, *, out, shape):
        _fill_reshaped(xp, out, x)

    native = Native(calls=_native_fill)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 6), shape=(2, 3, 2))
        yield Sample.of(f32(2, 3, 4), shape=(0, -1))
        yield Sample.of(f32(5, 3, 4), shape=(-1, 4))
        yield Sample.of(f32(15, 8), shape=(5, 3, 2, 4))
        yield Sample.of(f32(5, 1, 6), shape=(5, 2, 1, 3))
        yield Sample.of(f32(4, 2), shape=(4, 1, 2, 1))
        yield Sample.of(f32(4, 3), shape=(6, 2))
        yield Sample.of(f32(3, 0, 2), shape=(0, 0, 2))
        yield Sample.of(f32(1), shape=())


class ReshapeGrad(OpDef):
    """The gradient `Out@GRAD` in the shape of X; only X's shape is read."""

    name = "reshape_grad"
    arithmetic = Arithmetic(flops=0)
    rewrite = Rewrite(identity_if=same_elements, meaning=_laid_out)
    inputs, outputs = ("Out@GRAD", "X"), ("X@GRAD",)

    @staticmethod
    def pattern(ins, outs, attrs):
        g, x, sizes, whole = match_axes(ins[0].shape, ins[1].shape)
        return f"{g}, ~{x} -> {x} | {whole} L(0) U(0)", sizes

    @staticmethod
    def infer(g, x):
        if ANY not in (g.numel, x.numel) and g.numel != x.numel:
            raise ProgramError(f"op reshape_grad: Out@GRAD has {g.numel} elements, X has {x.numel}: {g} and {x}")
        return g.with_shape(x.shape)

    @staticmethod
    def grad(b, op, g):
        return b.reshape_grad(g, op["Out@GRAD"]), None

    @staticmethod
    def kernel(xp, g, x, *, out):
        _fill_reshaped(xp, out, g)

    native = Native(calls=_native_fill)

    @staticmethod
    def samples():
        yield Sample.of(f32(6, 2), f32(2, 6), grad=("Out@GRAD",))
        yield Sample.of(f32(15, 4), f32(5, 3, 4), grad=("Out@GRAD",))


class Flatten(OpDef):
    """X as a matrix: the axes before `axis` become the rows, the others the columns."""

    name = "flatten"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    rewrite = Rewrite(identity_if=same_elements, meaning=_laid_out)
    inputs = ("X",)
    attrs = {"axis": 1}

    @staticmethod
    def pattern(ins, outs, attrs):
        (x,), k = ins, attrs["axis"]
        rows, columns = letters(k, "a"), letters(x.ndim - k, "b")
        return f"{rows} {columns} -> {fold(rows, x.shape[:k])} {fold(columns, x.shape[k:])} | L(0) U(0)"

    @staticmethod
    def infer(x, *, axis):
        if not 0 <= axis <= x.ndim:
            raise ProgramError(f"op flatten: axis {axis} is out of range; expected 0 to {x.ndim} for {x}")
        return x.with_shape((mul_sizes(x.shape[:axis]), mul_sizes(x.shape[axis:])))

    @staticmethod
    def grad(b, op, g):
        return _reshape_back(b, op["X"], g)

    @staticmethod
    def _view(x, *, axis):
        return _reshaped(x, (mul_sizes(x.shape[:axis]), mul_sizes(x.shape[axis:])))

    storage = Storage(view=_view, operand_views=_unshaped)

    @staticmethod
    def kernel(xp, x, *, out, axis):
        _fill_reshaped(xp, out, x)

    native = Native(calls=_native_fill)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3, 4))
        yield Sample.of(f32(2, 3, 4), axis=0)
        yield Sample.of(f32(5, 3, 4), axis=2)
        yield Sample.of(f32(2, 3), axis=2)


def _squeezed(x: TensorType, axes: Sequence[int]) -> tuple[int, ...]:
    """The axes that squeeze removes, counted from the front. Without `axes`: every axis of size 1."""
    if not axes:
        return tuple(i for i, d in enumerate(x.shape) if d == 1)
    drop = norm_axes("squeeze", axes, x.ndim)
    for a in drop:
        if x.shape[a] not in (1, ANY):
            raise ProgramError(f"op squeeze: axis {a} of {x} has size {x.shape[a]}; expected 1")
    return drop


class Squeeze(OpDef):
    """X without the given axes of size 1; without `axes`, without every axis of size 1.

    Raises ProgramError if a given axis has another size.
    """

    name = "squeeze"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    rewrite = Rewrite(identity_if=same_elements, meaning=_laid_out)
    inputs = ("X",)
    attrs = {"axes": ()}

    @staticmethod
    def pattern(ins, outs, attrs):
        drop, words = _squeezed(ins[0], attrs["axes"]), letters(ins[0].ndim, "e").split()
        kept = [w for k, w in enumerate(words) if k not in drop]
        return f"{but(drop, len(words)) if words else ''} -> {' '.join(kept)} | L(0) U(0)"

    @staticmethod
    def _local_attrs(attrs, ins, outs):
        """Without `axes`, a part of one row must keep its row axis: any axes of size 1 whose removal gives the right shape are correct."""
        drop, j = [], 0
        for k, d in enumerate(ins[0]):
            if j < len(outs[0]) and outs[0][j] == d:
                j += 1
            else:
                drop.append(k)
        return attrs if attrs["axes"] or not drop else {**attrs, "axes": tuple(drop)}

    comm = Comm(local_attrs=_local_attrs)

    @staticmethod
    def infer(x, *, axes):
        drop = _squeezed(x, axes)
        return x.with_shape(d for i, d in enumerate(x.shape) if i not in drop)

    @staticmethod
    def grad(b, op, g):
        return b.unsqueeze(g, axes=sorted(_squeezed(op["X"].desc.type, op.attrs["axes"])))

    @staticmethod
    def _view(x, *, axes):
        drop = _squeezed(TensorType(dtype_name(x.dtype), x.shape), axes)
        return x[tuple(0 if i in drop else slice(None) for i in range(x.ndim)) + (...,)]

    storage = Storage(view=_view, operand_views=_unshaped)

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 1, 5, 1))
        yield Sample.of(f32(3, 4, 5, 1), axes=(-1,))
        yield Sample.of(f32(1), axes=(0,))


def _unsqueezed(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    """The positions of the new axes in the result. fluid inserts them one after another, so each position counts the earlier ones."""
    at: list[int] = []
    for k, axis in enumerate(axes):
        a = norm_axis("unsqueeze", axis, ndim + k, extra=1)
        at = [p + (p >= a) for p in at] + [a]
    return tuple(at)


class Unsqueeze(OpDef):
    """X with axes of size 1 inserted at `axes`, one after another."""

    name = "unsqueeze"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    rewrite = Rewrite(identity_if=same_elements, meaning=_laid_out)
    inputs = ("X",)
    attrs = {"axes": Required(tuple)}

    @staticmethod
    def pattern(ins, outs, attrs):
        new, words = set(_unsqueezed(ins[0].ndim, attrs["axes"])), letters(ins[0].ndim, "e")
        old = iter(words.split())
        return f"{words} -> {' '.join('.' if k in new else next(old) for k in range(outs[0].ndim))} | L(0) U(0)"

    @staticmethod
    def infer(x, *, axes):
        new, old = set(_unsqueezed(x.ndim, axes)), iter(x.shape)
        return x.with_shape(1 if i in new else next(old) for i in range(x.ndim + len(new)))

    @staticmethod
    def grad(b, op, g):
        axes = _unsqueezed(op["X"].ndim, op.attrs["axes"])
        return b.squeeze(g, axes=axes) if axes else g

    @staticmethod
    def _view(x, *, axes):
        new = set(_unsqueezed(x.ndim, axes))
        return x[tuple(None if i in new else slice(None) for i in range(x.ndim + len(new))) + (...,)]

    storage = Storage(view=_view, operand_views=_unshaped)

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 3), axes=(0, 2))
        yield Sample.of(f32(2, 3), axes=(-1,))
        yield Sample.of(f32(3), axes=(1, 0))


class Transpose(OpDef):
    """X with its axes in the order `axis`: axis i of the result is axis `axis[i]` of X."""

    name = "transpose"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    inputs = ("X",)
    attrs = {"axis": Required(tuple)}

    @staticmethod
    def _identity_if(x, attrs, count):
        return norm_axes("transpose", attrs["axis"], x.ndim) == tuple(range(x.ndim))

    @staticmethod
    def _merge_two(first, second):
        inner = norm_axes("transpose", first["axis"], len(first["axis"]))
        return {"axis": tuple([inner[a] for a in norm_axes("transpose", second["axis"], len(inner))])}

    rewrite = Rewrite(identity_if=_identity_if, merge_two=_merge_two)

    @staticmethod
    def pattern(ins, outs, attrs):
        words = letters(ins[0].ndim, "e").split()
        return f"{' '.join(words)} -> {' '.join(words[a] for a in attrs['axis'])} | L(0) U(0)"

    @staticmethod
    def infer(x, *, axis):
        if len(axis) != x.ndim:
            raise ProgramError(f"op transpose: axis {list(axis)} must order the {x.ndim} axes of {x}, found {len(axis)} entries")
        return x.with_shape(x.shape[a] for a in norm_axes("transpose", axis, x.ndim))

    @staticmethod
    def grad(b, op, g):
        order = norm_axes("transpose", op.attrs["axis"], len(op.attrs["axis"]))
        return b.transpose(g, axis=tuple(order.index(i) for i in range(len(order))))

    @staticmethod
    def _view(x, *, axis):
        return x.transpose(axis)

    @staticmethod
    def _operand_views(y, shapes, *, axis):
        order = norm_axes("transpose", axis, y.ndim)
        return [y.transpose([order.index(i) for i in range(y.ndim)])]

    storage = Storage(view=_view, operand_views=_operand_views)

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 3, 4), axis=(2, 0, 1))
        yield Sample.of(f32(2, 3), axis=(-1, 0))
        yield Sample.of(f32(1), axis=(0,))


class Shape(OpDef):
    """The sizes of Input as a vector of `dtype`, int32 or int64, read at run time."""

    name = "shape"
    arithmetic = Arithmetic(flops=0)
    autocast = Autocast(takes_low_bit=True)
    control = Control(beyond_tensors=("string",))
    rewrite = Rewrite(constant=True)
    inputs = ("Input",)
    attrs = {"dtype": "int32"}

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"~{but(range(ins[0].ndim), ins[0].ndim)} -> ."  # no axis may be sharded: the op reads the shape of the whole value

    @staticmethod
    def infer(x, *, dtype):
        need_ids("shape", "dtype", TensorType(dtype, ()))
        return TensorType(dtype, (x.ndim,))

    @staticmethod
    def kernel(xp, x, *, out, dtype):
        for i, d in enumerate(x.shape):
            out[i] = d

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 0, 3))
        yield Sample.of(f32(4), dtype="int64")
