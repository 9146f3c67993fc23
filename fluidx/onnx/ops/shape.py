"""Operators that read or change shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod

import numpy as np

from ...ir import Variable
from ...ir.types import ANY
from ..export_graph import Op
from ..node import Node
from ..table import EXPORT, entry, exports, imports, on_numpy


def as_int64(op: Op, slot: str) -> str:
    """An operand as int64, which is the only dtype that ONNX has for sizes."""
    return op.cast(slot, "int64")


entry("Flatten", "flatten", way=EXPORT, axis=1)
entry("Reshape", "reshape_by", computed=(1,), operands={"Shape": as_int64}, allowzero=("zeros", False))


@on_numpy("Shape")
def shape(n: Node) -> object:
    found = np.array(n.shape(), np.int64)
    end = n.attr("end")
    return found[n.attr("start", 0) : len(found) if end is None else end]


@on_numpy("Size")
def size(n: Node) -> object:
    return np.array(np.prod(n.shape(), dtype=np.int64), np.int64)


def reshaped(n: Node, x: Variable, shape: Sequence[int]) -> Variable:
    """`x` reshaped. The sizes are those of the result, and one may be open; a size of 0 would have another meaning in `reshape`."""
    if tuple(x.shape) == tuple(shape):
        return x
    return n.b.fill_constant(shape=tuple(shape), dtype=x.dtype, value=0.0) if 0 in shape else n.b.reshape(x, shape=tuple(shape))


def known_sizes(n: Node, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes that must be known. Raises OnnxError if one is open."""
    if ANY in sizes:
        raise n.wrong(f"fluidx must know these sizes, but some are open: {list(sizes)}; give the inputs of the model fixed sizes")
    return tuple(sizes)


def axes_of(axes: Sequence[int], ndim: int) -> list[int]:
    """Axes with negative ones made positive, sorted."""
    return sorted(a % ndim for a in axes)


def _target(n: Node) -> list[int]:
    """The shape of Reshape's result. 0 copies the operand's size, unless `allowzero`, and -1 is computed."""
    given, old = n.ints(1) or [], n.shape()
    if not n.attr("allowzero", 0):
        given = [old[k] if d == 0 and k < len(old) else d for k, d in enumerate(given)]
    if -1 in given and ANY not in old:
        at = given.index(-1)
        rest = prod(d for k, d in enumerate(given) if k != at)
        given[at] = prod(old) // rest if rest else 0
    if ANY not in old and prod(given) != prod(old):
        raise n.wrong(f"{prod(old)} elements, of shape {list(old)}, do not fill the shape {n.ints(1)}")
    return given


@imports("Reshape")
def reshape(n: Node) -> object:
    if ANY in n.shape():  # the operator handles open axes
        return n.b.reshape(n.x(0), shape=tuple(n.ints(1) or []))
    return reshaped(n, n.x(0), _target(n))


@imports("Flatten")
def flatten(n: Node) -> object:
    axis = n.attr("axis", 1)
    return n.b.flatten(n.x(0), axis=axis + n.rank() if axis < 0 else axis)


@imports("Squeeze")
def squeeze(n: Node) -> object:
    axes = n.ints(1)
    return n.x() if axes == [] else n.b.squeeze(n.x(), axes=tuple(axes_of(axes or (), n.rank())))


@imports("Unsqueeze")
def unsqueeze(n: Node) -> object:
    axes = n.ints(1) or []
    return n.b.unsqueeze(n.x(), axes=tuple(axes_of(axes, n.rank() + len(axes))))


@imports("Transpose")
def transpose(n: Node) -> object:
    return n.b.transpose(n.x(0), axis=tuple(n.attr("perm", range(n.rank())[::-1])))


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("reshape")
def export_reshape(op: Op) -> str:
    return op.emit("Reshape", op["X"], op.ints(op.attrs["shape"]))


@exports("squeeze")
def export_squeeze(op: Op) -> str:
    axes = op.attrs["axes"] or [k for k, d in enumerate(op.type_of("X").shape) if d == 1]
    return op.emit("Squeeze", op["X"], op.ints(axes)) if axes else op.emit("Identity", op["X"])


@exports("unsqueeze")
def export_unsqueeze(op: Op) -> str:
    """Each axis counts axes inserted before it, but in ONNX all inserted axes. Both are the same if the axes rise."""
    axes = op.attrs["axes"]
    if axes and min(axes) >= 0 and all(a < b for a, b in zip(axes, axes[1:])):
        return op.emit("Unsqueeze", op["X"], op.ints(axes))
    return reduce(lambda x, axis: op.emit("Unsqueeze", x, op.ints([axis])), axes, op["X"])


@exports("transpose")
def export_transpose(op: Op) -> str:
    ndim = op.type_of("X").ndim
    return op.emit("Transpose", op["X"], perm=[a % ndim for a in op.attrs["axis"]])


@exports("shape")
def export_shape(op: Op) -> str:
    found = op.emit("Shape", op["Input"])
    return found if op.attrs["dtype"] == "int64" else op.emit("Cast", found, to=op.code(op.attrs["dtype"]))


@exports("axis_size")
def axis_size(op: Op) -> str:
    axis = op.attrs["axis"] % op.type_of("Input").ndim
    found = op.emit("Squeeze", op.sizes(op["Input"], axis, axis + 1), op.ints([0]))
    return found if op.attrs["dtype"] == "int64" else op.emit("Cast", found, to=op.code(op.attrs["dtype"]))
