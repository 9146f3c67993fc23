"""Export of data movement, look-ups and constants."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir.dtypes import np_dtype
from ...ir.types import ANY
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op


# -- shapes -------------------------------------------------------------------------------------------------------------------


@exports("reshape")
def reshape(op: Op) -> str:
    return op.emit("Reshape", op["X"], op.ints(op.attrs["shape"]))


@exports("flatten")
def flatten(op: Op) -> str:
    return op.emit("Flatten", op["X"], axis=op.attrs["axis"])


@exports("squeeze")
def squeeze(op: Op) -> str:
    axes = op.attrs["axes"] or [k for k, d in enumerate(op.type_of("X").shape) if d == 1]
    return op.emit("Squeeze", op["X"], op.ints(axes)) if axes else op.emit("Identity", op["X"])


@exports("unsqueeze")
def unsqueeze(op: Op) -> str:
    """Each axis counts axes inserted before it, but in ONNX all inserted axes. Both are the same if the axes rise."""
    axes = op.attrs["axes"]
    if axes and min(axes) >= 0 and all(a < b for a, b in zip(axes, axes[1:])):
        return op.emit("Unsqueeze", op["X"], op.ints(axes))
    return reduce(lambda x, axis: op.emit("Unsqueeze", x, op.ints([axis])), axes, op["X"])


@exports("transpose")
def transpose(op: Op) -> str:
    ndim = op.type_of("X").ndim
    return op.emit("Transpose", op["X"], perm=[a % ndim for a in op.attrs["axis"]])


@exports("shape")
def shape(op: Op) -> str:
    found = op.emit("Shape", op["Input"])
    return found if op.attrs["dtype"] == "int64" else op.emit("Cast", found, to=op.code(op.attrs["dtype"]))


# -- joining, cutting, repeating ----------------------------------------------------------------------------------------------


@exports("concat")
def concat(op: Op) -> str:
    return op.emit("Concat", *op.many("X"), axis=op.attrs["axis"])


@exports("stack")
def stack(op: Op) -> str:
    axis = op.attrs["axis"]
    return op.emit("Concat", *(op.emit("Unsqueeze", x, op.ints([axis])) for x in op.many("X")), axis=axis)


@exports("split")
def split(op: Op) -> dict[str, Any]:
    axis, parts = op.attrs["axis"], op.op.outputs["Out"]
    sizes = [op.block.desc(n).type.shape[axis] for n in parts]
    if ANY in sizes:
        return {"Out": _even_split(op, axis, len(parts))}
    return {"Out": op.emit_many("Split", len(parts), op["X"], op.ints(sizes), axis=axis)}


def _even_split(op: Op, axis: int, count: int) -> list[str]:
    return op.emit_many("Split", count, op["X"], axis=axis, **({"num_outputs": count} if op.opset >= 18 else {}))


@exports("unstack")
def unstack(op: Op) -> dict[str, Any]:
    axis, count = op.attrs["axis"], len(op.op.outputs["Out"])
    parts = _even_split(op, axis, count)
    return {"Out": [op.emit("Squeeze", p, op.ints([axis])) for p in parts]}


@exports("slice", "strided_slice")
def cut(op: Op) -> str:
    a = op.attrs
    steps = a.get("strides") or (1,) * len(a["axes"])
    x = op.emit("Slice", op["Input"], op.ints(a["starts"]), op.ints(a["ends"]), op.ints(a["axes"]), op.ints(steps))
    return op.emit("Squeeze", x, op.ints(a["decrease_axis"])) if a.get("decrease_axis") else x


@exports("index_select")
def index_select(op: Op) -> str:
    return op.emit("Gather", op["X"], op["Index"], axis=op.attrs["dim"])


@exports("flip", "reverse")
def flip(op: Op) -> str:
    """A slice with step -1. Its end is the least int64, because -1 would mean the last element."""
    dims = op.attrs["dims" if op.type == "flip" else "axis"]
    least, ones = [np.iinfo(np.int64).min] * len(dims), [-1] * len(dims)
    return op.emit("Slice", op["X"], op.ints(ones), op.ints(least), op.ints(dims), op.ints(ones))


@exports("roll")
def roll(op: Op) -> str:
    """AxisWindows each axis, or flattened, the end moves to the front."""
    t, dims = op.type_of("X"), op.attrs["dims"]
    sizes = [t.shape[d] for d in dims] or [t.numel]
    if any(size < 0 for size in sizes):
        raise op.wrong("a rolled axis is open")
    x = op["X"] if dims else op.emit("Reshape", op["X"], op.ints([-1]))
    for axis, shift, size in zip(dims or (0,), op.attrs["shifts"], sizes, strict=True):
        if size and shift % size:
            end, start = op.emit_many("Split", 2, x, op.ints([size - shift % size, shift % size]), axis=axis)[::-1]
            x = op.emit("Concat", end, start, axis=axis)
    return x if dims else op.emit("Reshape", x, op.ints(t.shape))


@exports("expand")
def expand(op: Op) -> str:
    return op.emit("Tile", op["X"], op.ints(op.attrs["expand_times"]))


@exports("expand_as")
def expand_as(op: Op) -> str:
    have, want = op.emit("Shape", op["X"]), op.emit("Shape", op["target_tensor"])
    return op.emit("Tile", op["X"], op.emit("Div", want, have))


@exports("pad")
def pad(op: Op) -> str:
    pads = op.attrs["paddings"]
    return op.emit("Pad", op["X"], op.ints([*pads[::2], *pads[1::2]]), _value(op, op.attrs["pad_value"]))


@exports("pad2d")
def pad2d(op: Op) -> str:
    (top, bottom, left, right), mode = op.attrs["paddings"], op.attrs["mode"]
    before, behind = (0, 0, top, left), (0, 0, bottom, right)
    if op.attrs["data_format"] == "NHWC":
        before, behind = (0, top, left, 0), (0, bottom, right, 0)
    value = [_value(op, op.attrs["pad_value"])] if mode == "constant" else []
    return op.emit("Pad", op["X"], op.ints([*before, *behind]), *value, mode=mode)


@exports("tril_triu")
def tril_triu(op: Op) -> str:
    return op.emit("Trilu", op["X"], op.const(np.array(op.attrs["diagonal"], np.int64)), upper=int(not op.attrs["lower"]))


@exports("cumsum")
def cumsum(op: Op) -> str:
    a, x = op.attrs, op["X"]
    x = op.emit("Reshape", x, op.ints([-1])) if a["flatten"] else x
    axis = op.const(np.array(0 if a["flatten"] else a["axis"], np.int64))
    return op.emit("CumSum", x, axis, exclusive=int(a["exclusive"]), reverse=int(a["reverse"]))


# -- looking up ---------------------------------------------------------------------------------------------------------------


@exports("lookup_table", "lookup_table_v2")
def lookup(op: Op) -> str:
    ids, pad = op["Ids"], op.attrs["padding_idx"]
    if op.type == "lookup_table":
        ids = op.emit("Squeeze", ids, op.ints([-1]))
    rows = op.emit("Gather", op["W"], ids, axis=0)
    if pad == -1:
        return rows
    kept = op.emit("Not", op.emit("Equal", ids, op.const(np.array(pad, np_dtype(op.dtype("Ids"))))))
    return op.emit("Mul", rows, op.emit("Unsqueeze", op.emit("Cast", kept, to=op.code(op.dtype("W"))), op.ints([-1])))


@exports("gather")
def gather(op: Op) -> str:
    flat = op.type_of("Index").ndim == 1
    return op.emit("Gather", op["X"], op["Index"] if flat else op.emit("Reshape", op["Index"], op.ints([-1])), axis=0)


@exports("take_along_axis")
def take_along_axis(op: Op) -> str:
    return op.emit("GatherElements", op["X"], op["Index"], axis=op.attrs["axis"])


@exports("gather_nd")
def gather_nd(op: Op) -> str:
    return op.emit("GatherND", op["X"], op.emit("Cast", op["Index"], to=op.code("int64")))


@exports("one_hot", "one_hot_v2")
def one_hot(op: Op) -> str:
    """In ONNX a negative id counts from the end, and one that is too large gives zeros."""
    x, number = op.emit("Squeeze", op["X"], op.ints([-1])) if op.type == "one_hot" else op["X"], np_dtype(op.dtype("X")).type
    depth, both = op.attrs["depth"], op.const(np.array([0, 1], np_dtype(op.attrs["dtype"])))
    if op.attrs["allow_out_of_range"]:
        x = op.emit("Where", op.emit("Less", x, op.const(np.array(0, number))), op.const(np.array(depth, number)), x)
    return op.emit("OneHot", x, op.const(np.array(depth, np.int64)), both, axis=-1)


@exports("arg_max", "arg_min")
def arg(op: Op) -> str:
    kind = {"arg_max": "ArgMax", "arg_min": "ArgMin"}[op.type]
    found = op.emit(kind, op["X"], axis=op.attrs["axis"], keepdims=int(op.attrs["keepdims"]))
    return found if op.attrs["dtype"] == "int64" else op.emit("Cast", found, to=op.code(op.attrs["dtype"]))


@exports("top_k")
def top_k(op: Op) -> dict[str, Any]:
    return top_k_nodes(op, op.ints([op.attrs["k"]]))


def top_k_nodes(op: Op, k: str) -> dict[str, Any]:
    """The k largest or smallest elements along an axis, and their positions."""
    values, places = op.emit_many("TopK", 2, op["X"], k, axis=op.attrs["axis"], largest=int(op.attrs["largest"]))
    return {"Out": values, "Indices": places}


@exports("argsort")
def argsort(op: Op) -> dict[str, Any]:
    axis = op.attrs["axis"] % op.type_of("X").ndim
    count = op.sizes(op["X"], axis, axis + 1)
    values, places = op.emit_many("TopK", 2, op["X"], count, axis=axis, largest=int(op.attrs["descending"]))
    return {"Out": values, "Indices": places}


# -- constants --------------------------------------------------------------------------------------------------------------------


@exports("fill_constant")
def fill_constant(op: Op) -> str:
    a = op.attrs
    return op.emit("Constant", value=op.tensor(np.full(a["shape"], a["value"], np_dtype(a["dtype"]))))


@exports("assign_value")
def assign_value(op: Op) -> str:
    a = op.attrs
    return op.emit("Constant", value=op.tensor(np.array(a["values"], np_dtype(a["dtype"])).reshape(a["shape"])))


@exports("range", "linspace", "eye")
def numbers(op: Op) -> str:
    a = op.attrs
    if op.type == "range":
        value = np.arange(a["start"], a["end"], a["step"])
    elif op.type == "linspace":
        value = np.linspace(a["start"], a["stop"], a["num"])
    else:
        rows, columns = op.out_type("Out").shape
        value = np.eye(rows, columns)
    return op.emit("Constant", value=op.tensor(value.astype(np_dtype(a["dtype"]))))


@exports("diag")
def diag(op: Op) -> str:
    size, zero = op.type_of("Diagonal").shape[0], op.const(np.zeros((), np_dtype(op.dtype("Diagonal"))))
    if size == ANY:
        raise op.wrong("the size of the matrix is open")
    return op.emit("Where", op.const(np.eye(size, dtype=bool)), op.emit("Unsqueeze", op["Diagonal"], op.ints([1])), zero)


@exports("fill_zeros_like", "fill_any_like")
def like(op: Op) -> str:
    value = np.array([op.attrs.get("value", 0)], np_dtype(op.out_type("Out").dtype))
    return op.emit("ConstantOfShape", op.emit("Shape", op["X"]), value=op.tensor(value))


@exports("fill_constant_batch_size_like")
def batch_like(op: Op) -> str:
    a = op.attrs
    source, target = a["input_dim_idx"] % op.type_of("Input").ndim, a["output_dim_idx"] % len(a["shape"])
    size = op.sizes(op["Input"], source, source + 1)
    before, behind = a["shape"][:target], a["shape"][target + 1 :]
    parts = [*([op.ints(before)] if before else []), size, *([op.ints(behind)] if behind else [])]
    sizes = op.emit("Concat", *parts, axis=0) if len(parts) > 1 else size
    return op.emit("ConstantOfShape", sizes, value=op.tensor(np.array([a["value"]], np_dtype(a["dtype"]))))


def _value(op: Op, value: float) -> str:
    return op.const(np.array(value, np_dtype(op.dtype("X"))))
