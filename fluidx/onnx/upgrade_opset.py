"""Rewrites of operators of older opsets that onnx's converter cannot convert to the newest one, or converts wrongly.

The converter leaves nodes of unknown domains alone. Nodes that are rewritten have such a domain while the converter runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..ir.unique_name import unused
from .errors import OnnxError
from .normalize import domain_of, graphs_of
from .values import array_of

_HIDDEN = "fluidx.newest"


class _Node:
    """A node of an older opset, and the nodes written in its place."""

    def __init__(self, model: _Model, node: Any, opset: int):
        from onnx import helper

        self.model, self.node, self.opset = model, node, opset
        self.input, self.output = list(node.input), list(node.output)
        self.attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.made: list[Any] = []

    def emit(self, op_type: str, inputs: Sequence[str], **attrs: Any) -> str:
        """Write a node. Returns the name of its output."""
        return self._write(op_type, inputs, [self.model.fresh(f"{self.output[0]}_{op_type}")], attrs)

    def const(self, value: Any, dtype: Any) -> str:
        from onnx import numpy_helper

        return self.emit("Constant", [], value=numpy_helper.from_array(np.array(value, dtype)))

    def last(self, op_type: str, inputs: Sequence[str], **attrs: Any) -> None:
        """Write the node with the outputs of the old one."""
        self._write(op_type, inputs, self.output, attrs)
        self.made[-1].name = self.node.name

    def kept(self, *names: str) -> dict[str, Any]:
        """The named attributes that the node has."""
        return {n: self.attrs[n] for n in names if n in self.attrs}

    def rank(self, name: str) -> int:
        """The number of axes of a value. Raises OnnxError if the model does not declare it."""
        found = self.model.ranks.get(name)
        if found is None:
            raise self.wrong(f"it depends on the number of axes of {name!r}, which the model does not declare; give its inputs shapes")
        return found

    def wrong(self, what: str) -> OnnxError:
        return OnnxError(f"node {self.node.name or self.node.op_type!r} ({self.node.op_type} of opset {self.opset}): {what}")

    def _write(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attrs: dict[str, Any]) -> str:
        from onnx import helper

        self.made.append(helper.make_node(op_type, inputs, outputs, domain=_HIDDEN, **attrs))
        return outputs[0]


class _Model:
    """Facts about the model that rewrites use."""

    def __init__(self, model: Any):
        graphs = list(_graphs(model.graph))
        self.taken = {name for g in graphs for p in g.node for name in (*p.input, *p.output)}
        self.taken |= {v.name for g in graphs for v in (*g.input, *g.initializer, *g.output)}
        self.arrays = {t.name: t for g in graphs for t in g.initializer}
        constants = [p for g in graphs for p in g.node if p.op_type == "Constant"]
        self.arrays |= {p.output[0]: a.t for p in constants for a in p.attribute if a.HasField("t")}
        self.ranks = {name: len(t.dims) for name, t in self.arrays.items()}
        for v in (v for g in graphs for v in (*g.input, *g.output, *g.value_info)):
            if v.type.tensor_type.HasField("shape"):
                self.ranks[v.name] = len(v.type.tensor_type.shape.dim)

    def fresh(self, base: str) -> str:
        name = unused(base, self.taken, "_{}".format)
        self.taken.add(name)
        return name

    def array(self, name: str) -> np.ndarray | None:
        """The value of an initializer or a Constant; None for other names."""
        return array_of(self.arrays[name]) if name in self.arrays else None


# operator -> (first opset, last opset, rewrite) of each rewrite. A rewrite that returns False leaves the node to the converter.
_REWRITES: dict[str, list[tuple[int, int, Callable[[_Node], bool | None]]]] = {}


def _rewrites_until(last: int, *op_types: str, first: int = 1) -> Callable[[Any], Any]:
    def enter(rewrite: Any) -> Any:
        for op_type in op_types:
            _REWRITES.setdefault(op_type, []).append((first, last, rewrite))
        return rewrite

    return enter


def upgraded(model: Any, opset: int) -> Any:
    """The model with old operators rewritten to the newest opset and hidden from the converter; the same model if it has none."""
    import onnx

    rules = {t: rule for t, found in _REWRITES.items() for first, last, rule in found if first <= opset <= last}
    if not any(p.op_type in rules and not domain_of(p.domain) for g in _graphs(model.graph) for p in g.node):
        return model
    try:
        changed = onnx.shape_inference.infer_shapes(model)  # the converter also needs the shapes of results of hidden nodes
    except Exception as e:  # raised in C++
        raise OnnxError(f"the shapes of the model, of opset {opset}, are inconsistent: {e}") from None
    known = _Model(changed)
    for graph in list(_graphs(changed.graph)):
        nodes = [new for p in graph.node for new in _rewritten(_Node(known, p, opset), rules)]
        del graph.node[:]
        graph.node.extend(nodes)
    changed.opset_import.append(onnx.helper.make_opsetid(_HIDDEN, 1))
    return changed


def reveal(model: Any) -> None:
    """Return hidden nodes to the standard's domain."""
    for graph in _graphs(model.graph):
        for node in graph.node:
            if node.domain == _HIDDEN:
                node.domain = ""


def _rewritten(n: _Node, rules: dict[str, Callable[[_Node], bool | None]]) -> list[Any]:
    rule = rules.get(n.node.op_type) if not domain_of(n.node.domain) else None
    try:
        return [n.node] if rule is None or rule(n) is False else n.made
    except OnnxError:
        raise
    except Exception as e:  # the operands and attributes are not checked before
        raise n.wrong(f"{type(e).__name__}: {e}") from e


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for inner in graphs_of(node):
            yield from _graphs(inner)


# -- the operators -------------------------------------------------------------------------------------------------------------


@_rewrites_until(6, "Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Greater", "Less", "Equal")
def _along_an_axis(n: _Node) -> None:
    """The second operand is broadcast along the last axes of the first, or along those from `axis` on."""
    a, b = n.input
    if n.attrs.get("broadcast") and "axis" in n.attrs:
        axis = n.attrs["axis"] + (n.rank(a) if n.attrs["axis"] < 0 else 0)
        behind = n.rank(a) - axis - n.rank(b)
        if behind > 0:
            b = n.emit("Unsqueeze", [b, n.const([n.rank(b) + k for k in range(behind)], np.int64)])
    n.last(n.node.op_type, [a, b])


@_rewrites_until(6, "Gemm")
def _gemm(n: _Node) -> None:
    n.last("Gemm", n.input, **n.kept("alpha", "beta", "transA", "transB"))


@_rewrites_until(12, "Hardmax")
def _hardmax(n: _Node) -> None:
    """Hardmax over all axes from `axis` on as one axis."""
    flat = n.emit("Flatten", n.input, axis=n.attrs.get("axis", 1))
    n.last("Reshape", [n.emit("Hardmax", [flat], axis=-1), n.emit("Shape", n.input)])


@_rewrites_until(1, "Pad")
def _pad(n: _Node) -> None:
    n.last("Pad", [n.input[0], n.const(n.attrs["paddings"], np.int64), _like(n, n.attrs.get("value", 0.0))], **n.kept("mode"))


@_rewrites_until(1, "Split")
def _split(n: _Node) -> None:
    """Sizes are an operand, an attribute, or all equal."""
    sizes = n.model.array(n.input[1]) if len(n.input) == 2 else n.attrs.get("split")
    if sizes is not None:
        n.last("Split", [n.input[0], n.const(sizes, np.int64)], **n.kept("axis"))
    elif len(n.input) == 2:
        raise n.wrong("its sizes are computed, but fluidx needs them as constants in the file")
    else:
        n.last("Split", n.input, num_outputs=len(n.output), **n.kept("axis"))


@_rewrites_until(5, "Cast")
def _cast(n: _Node) -> None:
    from onnx import TensorProto

    to = n.attrs["to"].decode("utf-8", "replace").upper()
    if to not in TensorProto.DataType.keys():
        raise n.wrong(f"there is no type {to!r}; there are: {', '.join(TensorProto.DataType.keys()[1:])}")
    n.last("Cast", n.input, to=TensorProto.DataType.Value(to))


@_rewrites_until(1, "LpPool", "GlobalLpPool")
def _norm_of_windows(n: _Node) -> None:
    n.last(n.node.op_type, n.input, p=int(n.attrs.get("p", 2)), **n.kept("auto_pad", "kernel_shape", "pads", "strides"))


@_rewrites_until(6, "RNN", "GRU", "LSTM")
def _recurrent(n: _Node) -> None:
    """`output_sequence` says whether all steps are an output; in newer opsets a named output says it."""
    n.last(n.node.op_type, n.input, **{k: v for k, v in n.attrs.items() if k != "output_sequence"})


@_rewrites_until(6, "Dropout")
def _dropout(n: _Node) -> bool:
    _refuse_training(n)
    return False


@_rewrites_until(13, "BatchNormalization")
def _batch_normalization(n: _Node) -> bool | None:
    """If it is not spatial, each element has its own statistics."""
    _refuse_training(n)
    if len([name for name in n.output if name]) > 1:
        raise n.wrong("its statistics are outputs, so it uses those of the batch, as in training; export the model for inference")
    if n.attrs.get("spatial", 1):
        return False
    x, scale, bias, mean, variance = n.input
    root = n.emit("Sqrt", [n.emit("Add", [variance, _like(n, n.attrs.get("epsilon", 1e-5))])])
    n.last("Add", [n.emit("Mul", [n.emit("Div", [n.emit("Sub", [x, mean]), root]), scale]), bias])
    return None


def _refuse_training(n: _Node) -> None:
    if n.attrs.get("is_test") == 0:
        raise n.wrong("its is_test is 0, which means training; models are imported for inference: set it to 1 and see fx.onnx.set_training")


@_rewrites_until(9, "Upsample")
def _upsample(n: _Node) -> None:
    scales = n.attrs.get("scales") or [1.0, 1.0, n.attrs.get("height_scale"), n.attrs.get("width_scale")]
    given = n.input[1] if len(n.input) > 1 else n.const(scales, np.float32)
    mode = n.attrs.get("mode", b"nearest").decode()
    _resize_from_corners(n, [n.input[0], "", given], "linear" if mode == "bilinear" else mode, "floor")


@_rewrites_until(10, "Resize", first=10)
def _resize(n: _Node) -> None:
    """In opset 10 the nearest element is the one before if an axis grows, and the one after if it shrinks."""
    x, given = n.input
    mode, scales = n.attrs.get("mode", b"nearest").decode(), n.model.array(given)
    if mode != "nearest" or scales is None or (scales >= 1).all():
        return _resize_from_corners(n, [x, "", given], mode, "floor")
    if (scales > 1).any():
        up = n.const(np.maximum(scales, 1), np.float32)
        x = n.emit("Resize", [x, "", up], mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    return _resize_from_corners(n, [x, "", n.const(np.minimum(scales, 1), np.float32)], mode, "ceil")


def _resize_from_corners(n: _Node, inputs: list[str], mode: str, nearest: str) -> None:
    n.last("Resize", inputs, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode=nearest)


@_rewrites_until(12, "Resize", first=11)
def _resize_of_half_pixels(n: _Node) -> bool | None:
    """tf_half_pixel_for_nn is half a pixel beyond half_pixel, so the nearest neighbours differ."""
    same = {b"floor": "round_prefer_ceil", b"round_prefer_floor": "ceil"}.get(n.attrs.get("nearest_mode", b"round_prefer_floor"))
    if (
        n.attrs.get("coordinate_transformation_mode") != b"tf_half_pixel_for_nn"
        or n.attrs.get("mode", b"nearest") != b"nearest"
        or not same
    ):
        return False
    n.last("Resize", n.input, mode="nearest", coordinate_transformation_mode="half_pixel", nearest_mode=same)
    return None


def _like(n: _Node, value: float) -> str:
    """A number in the dtype of the first operand."""
    return n.emit("CastLike", [n.const(value, np.float32), n.input[0]])
