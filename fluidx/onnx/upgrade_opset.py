"""Operators of older opsets that onnx's converter cannot bring to the newest one, or makes something else of: they are brought there here.

The converter leaves nodes of domains that it does not know alone. While it works, nodes that are the newest already have such a domain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..ir.unique_name import unused
from .errors import OnnxError
from .normalize import domain_of, graphs_of
from .values import array_of

_MEANWHILE = "fluidx.newest"


class _Node:
    """A node of an older opset, and what is written in its place."""

    def __init__(self, model: _Model, node: Any, opset: int):
        from onnx import helper

        self.model, self.node, self.opset = model, node, opset
        self.input, self.output = list(node.input), list(node.output)
        self.attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.made: list[Any] = []

    def emit(self, op_type: str, inputs: Sequence[str], **attrs: Any) -> str:
        """Write a node; the name of its output."""
        return self._write(op_type, inputs, [self.model.fresh(f"{self.output[0]}_{op_type}")], attrs)

    def const(self, value: Any, dtype: Any) -> str:
        from onnx import numpy_helper

        return self.emit("Constant", [], value=numpy_helper.from_array(np.array(value, dtype)))

    def last(self, op_type: str, inputs: Sequence[str], **attrs: Any) -> None:
        """Write the node that has the outputs of the old one."""
        self._write(op_type, inputs, self.output, attrs)
        self.made[-1].name = self.node.name

    def kept(self, *names: str) -> dict[str, Any]:
        """Those of its attributes, where it has them."""
        return {n: self.attrs[n] for n in names if n in self.attrs}

    def rank(self, name: str) -> int:
        """How many axes a value has. Raises OnnxError where the model does not say."""
        found = self.model.ranks.get(name)
        if found is None:
            raise self.wrong(f"what it does depends on how many axes {name!r} has, and the model does not say; give its inputs shapes")
        return found

    def wrong(self, what: str) -> OnnxError:
        return OnnxError(f"node {self.node.name or self.node.op_type!r} ({self.node.op_type} of opset {self.opset}): {what}")

    def _write(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attrs: dict[str, Any]) -> str:
        from onnx import helper

        self.made.append(helper.make_node(op_type, inputs, outputs, domain=_MEANWHILE, **attrs))
        return outputs[0]


class _Model:
    """What a rewrite may ask of the model that a node stands in."""

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
        """The value of an initializer or a Constant."""
        return array_of(self.arrays[name]) if name in self.arrays else None


# operator -> the first and the last opset in which it is rewritten, and how; False: this one may stay, the converter knows it
_OLD: dict[str, list[tuple[int, int, Callable[[_Node], bool | None]]]] = {}


def _until(last: int, *op_types: str, first: int = 1) -> Callable[[Any], Any]:
    def enter(rewrite: Any) -> Any:
        for op_type in op_types:
            _OLD.setdefault(op_type, []).append((first, last, rewrite))
        return rewrite

    return enter


def brought_up(model: Any, opset: int) -> Any:
    """The model with such nodes in the form of the newest opset, hidden from the converter; the model itself where it has none."""
    import onnx

    rules = {t: rule for t, found in _OLD.items() for first, last, rule in found if first <= opset <= last}
    if not any(p.op_type in rules and not domain_of(p.domain) for g in _graphs(model.graph) for p in g.node):
        return model
    try:
        changed = onnx.shape_inference.infer_shapes(model)  # the converter asks for shapes behind the hidden nodes, too
    except Exception as e:  # of its C++ side
        raise OnnxError(f"the shapes of the model, which is of opset {opset}, do not fit together: {e}") from None
    known = _Model(changed)
    for graph in list(_graphs(changed.graph)):
        nodes = [new for p in graph.node for new in _rewritten(_Node(known, p, opset), rules)]
        del graph.node[:]
        graph.node.extend(nodes)
    changed.opset_import.append(onnx.helper.make_opsetid(_MEANWHILE, 1))
    return changed


def show(model: Any) -> None:
    """Give the nodes that were hidden their domain."""
    for graph in _graphs(model.graph):
        for node in graph.node:
            if node.domain == _MEANWHILE:
                node.domain = ""


def _rewritten(n: _Node, rules: dict[str, Callable[[_Node], bool | None]]) -> list[Any]:
    rule = rules.get(n.node.op_type) if not domain_of(n.node.domain) else None
    try:
        return [n.node] if rule is None or rule(n) is False else n.made
    except OnnxError:
        raise
    except Exception as e:  # operands and attributes are what anybody wrote
        raise n.wrong(f"{type(e).__name__}: {e}") from e


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for inner in graphs_of(node):
            yield from _graphs(inner)


# -- the operators -------------------------------------------------------------------------------------------------------------


@_until(6, "Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Greater", "Less", "Equal")
def _along_an_axis(n: _Node) -> None:
    """The second operand lies along the last axes of the first, or along those from `axis` on."""
    a, b = n.input
    if n.attrs.get("broadcast") and "axis" in n.attrs:
        axis = n.attrs["axis"] + (n.rank(a) if n.attrs["axis"] < 0 else 0)
        behind = n.rank(a) - axis - n.rank(b)
        if behind > 0:
            b = n.emit("Unsqueeze", [b, n.const([n.rank(b) + k for k in range(behind)], np.int64)])
    n.last(n.node.op_type, [a, b])


@_until(6, "Gemm")
def _gemm(n: _Node) -> None:
    n.last("Gemm", n.input, **n.kept("alpha", "beta", "transA", "transB"))


@_until(12, "Hardmax")
def _hardmax(n: _Node) -> None:
    """Of the axes from `axis` on as of one."""
    flat = n.emit("Flatten", n.input, axis=n.attrs.get("axis", 1))
    n.last("Reshape", [n.emit("Hardmax", [flat], axis=-1), n.emit("Shape", n.input)])


@_until(1, "Pad")
def _pad(n: _Node) -> None:
    n.last("Pad", [n.input[0], n.const(n.attrs["paddings"], np.int64), _like(n, n.attrs.get("value", 0.0))], **n.kept("mode"))


@_until(1, "Split")
def _split(n: _Node) -> None:
    """Sizes are an operand, or an attribute, or all alike."""
    sizes = n.model.array(n.input[1]) if len(n.input) == 2 else n.attrs.get("split")
    if sizes is not None:
        n.last("Split", [n.input[0], n.const(sizes, np.int64)], **n.kept("axis"))
    elif len(n.input) == 2:
        raise n.wrong("its sizes are computed; fluidx takes them as numbers that the file has")
    else:
        n.last("Split", n.input, num_outputs=len(n.output), **n.kept("axis"))


@_until(5, "Cast")
def _cast(n: _Node) -> None:
    from onnx import TensorProto

    to = n.attrs["to"].decode("utf-8", "replace").upper()
    if to not in TensorProto.DataType.keys():
        raise n.wrong(f"there is no type {to!r}; there are: {', '.join(TensorProto.DataType.keys()[1:])}")
    n.last("Cast", n.input, to=TensorProto.DataType.Value(to))


@_until(1, "LpPool", "GlobalLpPool")
def _norm_of_windows(n: _Node) -> None:
    n.last(n.node.op_type, n.input, p=int(n.attrs.get("p", 2)), **n.kept("auto_pad", "kernel_shape", "pads", "strides"))


@_until(6, "RNN", "GRU", "LSTM")
def _recurrent(n: _Node) -> None:
    """Whether it gives all steps, an attribute says: so does whether the output has a name."""
    n.last(n.node.op_type, n.input, **{k: v for k, v in n.attrs.items() if k != "output_sequence"})


@_until(6, "Dropout")
def _dropout(n: _Node) -> bool:
    _refuse_training(n)
    return False


@_until(13, "BatchNormalization")
def _batch_normalization(n: _Node) -> bool | None:
    """Where it is not spatial, each element has statistics of its own."""
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
        raise n.wrong("its is_test is 0, which asks for training; models are read for inference: set it to 1, and see fx.onnx.set_training")


@_until(9, "Upsample")
def _upsample(n: _Node) -> None:
    scales = n.attrs.get("scales") or [1.0, 1.0, n.attrs.get("height_scale"), n.attrs.get("width_scale")]
    given = n.input[1] if len(n.input) > 1 else n.const(scales, np.float32)
    mode = n.attrs.get("mode", b"nearest").decode()
    _resize_from_corners(n, [n.input[0], "", given], "linear" if mode == "bilinear" else mode, "floor")


@_until(10, "Resize", first=10)
def _resize(n: _Node) -> None:
    """The nearest element is the one before where an axis grows, and the one behind where it shrinks."""
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


@_until(12, "Resize", first=11)
def _resize_of_half_pixels(n: _Node) -> bool | None:
    """tf_half_pixel_for_nn lies half a pixel beyond half_pixel, so that other neighbours are the nearest."""
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
    """A number in the type of the first operand."""
    return n.emit("CastLike", [n.const(value, np.float32), n.input[0]])
