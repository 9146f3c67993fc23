"""ONNX files as others: with weights that are moved, or in float64. Nothing of fluidx takes part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

_ODD = re.compile(r"[^A-Za-z0-9_.@/\-]")  # what parameters are called: docs/onnx.md


class Moved(NamedTuple):
    """A model as bytes, and the weights that it has, called as parameters are."""

    model: bytes
    weights: dict[str, np.ndarray]


def _tensors(graph: Any) -> Iterator[tuple[str, Any]]:
    """(name, TensorProto) of initializers and of what nodes hold."""
    yield from ((t.name, t) for t in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")


def moved(data: bytes, by: Mapping[str, np.ndarray]) -> Moved:
    """The model with something added to weights, by the names of parameters."""
    model, weights = onnx.load_from_string(data), {}
    for name, tensor in _tensors(model.graph):
        if tensor.data_type != TensorProto.FLOAT:
            continue
        name = _ODD.sub("_", name)
        weights[name] = numpy_helper.to_array(tensor)
        if name in by:
            tensor.CopyFrom(numpy_helper.from_array((weights[name] + by[name]).astype("float32"), tensor.name))
    return Moved(model.SerializeToString(), weights)


def cut(data: bytes, output: str) -> bytes:
    """The model that gives one of its values, of inputs of any size."""
    model = onnx.load_from_string(data)
    del model.graph.value_info[:]
    given = {t.name for t in model.graph.initializer}
    for value in model.graph.input:
        for k, dim in enumerate(value.type.tensor_type.shape.dim if value.name not in given else ()):
            dim.dim_param = f"{value.name}_{k}"
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
    return model.SerializeToString()


def in_float64(data: bytes) -> Any:
    """The model with float64 wherever it has float32."""
    model = onnx.load_from_string(data)
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for _, tensor in _tensors(model.graph):
        _widen(tensor)
    for node in model.graph.node:
        for a in node.attribute:
            if node.op_type == "Cast" and a.name == "to" and a.i == TensorProto.FLOAT:
                a.i = TensorProto.DOUBLE
            if node.op_type == "ConstantOfShape" and a.name == "value":
                _widen(a.t)
    return model


def _widen(tensor: Any) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float64"), tensor.name))
