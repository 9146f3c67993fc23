"""Operators of ONNX Runtime's domain `com.microsoft` that its tools write into models."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ir import Variable
from ..node import Node
from ..table import imports
from ..values import as_outputs
from .recurrent import unrolled


@imports("DynamicQuantizeLSTM", domain="com.microsoft")
def dynamic_quantize_lstm(n: Node) -> object:
    """An LSTM with 8-bit weights, transposed compared with LSTM. Its products round the input, and the state at each step, to 8 bits."""
    import onnx

    proto = onnx.NodeProto()
    proto.CopyFrom(n.proto)
    proto.op_type, proto.domain = "LSTM", ""
    operands = [n.operands[0], _weights(n, 1, 8), _weights(n, 2, 10), *n.operands[3:8]]
    return unrolled(Node(n.importer, proto, operands), lambda v: _in_8_bits(n, v))


def _weights(n: Node, k: int, scale: int) -> np.ndarray:
    """Operand k dequantized to float32. Scale and zero point have one number for each direction, or for each of its columns."""
    by, zero = (_over_rows(n.value(at)) for at in (scale, scale + 1))
    real = (n.value(k).astype("float32") - zero.astype("float32")) * by
    return np.ascontiguousarray(real.transpose(0, 2, 1))


def _over_rows(v: np.ndarray) -> np.ndarray:
    return v.reshape(v.shape[0], 1, -1)


def _in_8_bits(n: Node, v: Variable) -> Variable:
    """v quantized to 8 bits over its range, and back."""
    return _written(n, "DequantizeLinear", *_written(n, "DynamicQuantizeLinear", v))[0]


def _written(n: Node, op_type: str, *operands: Any) -> list[Any]:
    import onnx

    names = ["1", "2", "3"] if op_type == "DynamicQuantizeLinear" else ["1"]
    q = Node(n.importer, onnx.helper.make_node(op_type, [f"x{k}" for k in range(len(operands))], names), list(operands))
    return as_outputs(n.importer.outputs_of(q))
