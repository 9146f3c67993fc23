"""Operators of ONNX Runtime's domain `com.microsoft` that its tools write into models, by operators of the standard: activations, layer
normalizations, embeddings, products and convolutions with what follows them, and an LSTM with 8-bit weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...ir import Builder, Variable
from ...ops.quantized.packing import as_int8, packed
from ...ops.quantized.products import BYTES
from ..node import Node
from ..normalize import MICROSOFT
from ..table import IMPORT, entry, imports, on_numpy
from .microsoft_quantized import dequantized
from .recurrent import Product, of_floats, unrolled

microsoft = partial(imports, domain=MICROSOFT)

# -- the same as in the standard ----------------------------------------------------------------------------------------------------

for _name in ("DequantizeLinear", "GatherND", "GridSample", "LayerNormalization", "Pad", "QuantizeLinear", "Trilu"):
    microsoft(_name)(Node.as_standard)


@microsoft("Range")
def range_of(n: Node) -> object:
    return n.apply("Range", *n.operands[:2], n.operands[2] if n.has(2) else np.ones((), n.dtype(0)))


@microsoft("ExpandDims")
def expand_dims(n: Node) -> object:
    return n.apply("Unsqueeze", n.operands[0], np.array(n.ints(1), np.int64))


# -- activations --------------------------------------------------------------------------------------------------------------------

entry("Gelu", "gelu", way=IMPORT, domain=MICROSOFT)
entry("QuickGelu", "swish", way=IMPORT, domain=MICROSOFT, alpha=("beta", 1.702))


@microsoft("BiasGelu", "FastGelu")
def gelu_of_sum(n: Node) -> object:
    x = n.apply("Add", *n.operands) if n.has(1) else n.operands[0]
    return n.apply("Gelu", x, approximate="tanh" if n.op_type == "FastGelu" else "none")


@microsoft("BiasSplitGelu")
def bias_split_gelu(n: Node) -> object:
    """The first half of the columns times the gelu of the second."""
    factors, gates = n.apply("Split", n.apply("Add", *n.operands), outputs=2, axis=-1, num_outputs=2)
    return n.apply("Mul", factors, n.apply("Gelu", gates))


@microsoft("BiasAdd")
def bias_add(n: Node) -> object:
    return n.apply("Add", n.apply("Add", n.operands[0], n.operands[1]), n.operands[2])


# -- normalizations -------------------------------------------------------------------------------------------------------------------


@microsoft("SimplifiedLayerNormalization")
def simplified_layer_norm(n: Node) -> object:
    if n.wants(1):
        raise n.wrong("fluidx does not compute its output 'inv_std_var'; leave it out")
    return n.apply("RMSNormalization", *n.operands, axis=n.attr("axis", -1), **_precision(n, 1e-5))


@microsoft("SkipLayerNormalization")
def skip_layer_norm(n: Node) -> object:
    total = _skip_sum(n, 4)
    weights = [n.operands[k] for k in (2, 3) if n.has(k)]
    return *n.apply("LayerNormalization", total, *weights, outputs=3, axis=-1, **_precision(n)), total


@microsoft("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_norm(n: Node) -> object:
    total = _skip_sum(n, 3)
    if n.wants(2):
        raise n.wrong("fluidx does not compute its output 'inv_std_var'; leave it out")
    return n.apply("RMSNormalization", total, n.operands[2], axis=-1, **_precision(n)), None, None, total


def _precision(n: Node, epsilon: float = 1e-12) -> dict[str, Any]:
    """The attributes of a normalization: float64 is computed in itself, all else in float32."""
    return {"epsilon": n.attr("epsilon", epsilon), "stash_type": 11 if n.dtype(0) == "float64" else 1}


def _skip_sum(n: Node, bias: int) -> Any:
    total = n.apply("Add", n.operands[0], n.operands[1])
    return n.apply("Add", total, n.operands[bias]) if n.has(bias) else total


@microsoft("EmbedLayerNormalization")
def embed_layer_norm(n: Node) -> object:
    ids, segments, *tables, mask, at = [*n.operands, *[None] * 9][:9]
    return _embedded(n, ids, segments, tables, mask, at)


@microsoft("QEmbedLayerNormalization")
def quantized_embed_layer_norm(n: Node) -> object:
    """The tables are operands 2 to 6, followed behind the mask by their scales and their zero points."""
    tables = [dequantized(n, k, k + 6, k + 11) if n.has(k) else None for k in range(2, 7)]
    return _embedded(n, n.operands[0], n.operands[1], tables, n.operands[7], None)


def _embedded(n: Node, ids: Any, segments: Any, tables: list[Any], mask: Any, at: Any) -> object:
    """The normalized sum of embeddings, the number of words that the mask shows, and the sum."""
    words, places, kinds, scale, bias = tables
    if at is None:
        length = n.apply("Shape", ids, start=1, end=2)
        rows = n.apply("Slice", places, np.zeros(1, np.int64), length, np.zeros(1, np.int64))
    else:
        rows = n.apply("Gather", places, at)
    total = n.apply("Add", n.apply("Gather", words, ids), rows)
    if segments is not None:
        total = n.apply("Add", total, n.apply("Gather", kinds, segments))
    y = n.apply("LayerNormalization", total, scale, bias, axis=-1, epsilon=n.attr("epsilon", 1e-12))
    if not n.wants(1):
        return y, None, total
    counted = mask if mask is not None else n.apply("Mul", ids, np.zeros((), n.dtype(0)))
    return y, n.apply("ReduceSum", counted, np.ones(1, np.int64), keepdims=0), total


# -- products and convolutions ----------------------------------------------------------------------------------------------------------


@microsoft("FusedMatMul", "TransposeMatMul")
def fused_matmul(n: Node) -> object:
    y = n.apply("MatMul", *(_turned(n, k, side) for k, side in enumerate("AB")))
    alpha = n.attr("alpha", 1.0)
    return y if alpha == 1.0 else n.apply("Mul", y, np.array(alpha, n.dtype(0)))


def _turned(n: Node, k: int, side: str) -> Any:
    """Operand k with the first axis moved behind the batch, and with the last two axes swapped, as the attributes say."""
    axes = [*range(n.rank(k))]
    if n.attr(f"transBatch{side}", 0):
        axes = [*axes[1:-1], 0, axes[-1]]
    if n.attr(f"trans{side}", 0) and len(axes) > 1:
        axes[-2:] = axes[:-3:-1]
    return n.operands[k] if axes == sorted(axes) else n.apply("Transpose", n.operands[k], perm=axes)


@microsoft("FusedGemm")
def fused_gemm(n: Node) -> object:
    kept = {name: n.attr(name) for name in ("alpha", "beta", "transA", "transB") if name in n.attributes}
    params = [n.attr(f"activation_{name}") for name in ("alpha", "beta") if f"activation_{name}" in n.attributes]
    return _activated(n, n.apply("Gemm", *n.operands, **kept), params)


@microsoft("GemmFastGelu")
def gemm_fast_gelu(n: Node) -> object:
    y = n.apply("MatMul", *n.operands[:2])
    return n.apply("Gelu", n.apply("Add", y, n.operands[2]) if n.has(2) else y, approximate="tanh")


@microsoft("FusedConv")
def fused_conv(n: Node) -> object:
    kept = {name: n.attr(name) for name in n.attributes - {"activation", "activation_params"}}
    y = n.apply("Conv", *n.operands[:3], **kept)
    return _activated(n, n.apply("Add", y, n.operands[3]) if n.has(3) else y, n.attr("activation_params", []))


_PARAMETERS = {"Relu": (), "Tanh": (), "Sigmoid": (), "Elu": ("alpha",), "LeakyRelu": ("alpha",), "ThresholdedRelu": ("alpha",),
               "HardSigmoid": ("alpha", "beta"), "Selu": ("alpha", "gamma"), "Softplus": (), "Softsign": (), "HardSwish": ()}  # fmt: skip


def _activated(n: Node, y: Any, numbers: list[float]) -> Any:
    """The activation that a node names, with its parameters."""
    name = n.attr("activation", "")
    if not name:
        return y
    if name == "Clip":
        return n.apply("Clip", y, *(np.array(v, n.dtype(0)) for v in numbers))
    if name not in _PARAMETERS:
        raise n.wrong(f"activation must be one of Clip, {', '.join(_PARAMETERS)}, found {name!r}")
    given: dict[str, Any] = dict(zip(_PARAMETERS[name], numbers, strict=False))
    return n.apply(name, y, **given)


@microsoft("CDist")
def distances(n: Node) -> object:
    """The distance of each row of A to each row of B."""
    metric = n.attr("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise n.wrong(f"metric must be euclidean or sqeuclidean, found {metric!r}")
    apart = n.apply("Sub", *(n.apply("Unsqueeze", v, np.array([1 - k])) for k, v in enumerate(n.operands)))
    found = n.apply("ReduceSumSquare", apart, np.array([2]), keepdims=0)
    return found if metric == "sqeuclidean" else n.apply("Sqrt", found)


@on_numpy("Inverse", domain=MICROSOFT, pure=True)
def inverse(n: Node) -> object:
    return np.linalg.inv(n.value())


# -- recurrent --------------------------------------------------------------------------------------------------------------------------


@microsoft("DynamicQuantizeLSTM")
def dynamic_quantize_lstm(n: Node) -> object:
    """An LSTM with 8-bit weights, transposed compared with LSTM. Its products round the input, and the state at each step, to 8 bits. In a
    program for inference alone they are products of integers."""
    import onnx

    proto = onnx.NodeProto()
    proto.CopyFrom(n.proto)
    proto.op_type, proto.domain = "LSTM", ""
    made: dict[str, Any] = {}  # value -> the same, rounded: both directions read the input
    whole = n.importer.integers and n.dtype(0) == "float32" and {n.dtype(1), n.dtype(2)} <= BYTES.keys()
    weights = [n.value(k).transpose(0, 2, 1) for k in (1, 2)] if whole else [_weights(n, 1, 8), _weights(n, 2, 10)]
    lstm = Node(n.importer, proto, [n.operands[0], *weights, *n.operands[3:8]])

    def rounded(v: Variable) -> Variable:
        return made.get(v.name) or made.setdefault(v.name, in_8_bits(n, v))

    if whole:
        return unrolled(lstm, lambda k, direction: _of_integers(n, k, direction, made))
    return unrolled(lstm, lambda k, direction: of_floats(lstm, k, direction, rounded))


def _of_integers(n: Node, k: int, direction: int, made: dict[str, Any]) -> Product:
    """The product of a value, rounded to 8 bits over its range, with the weights of a direction, in integers."""
    scale, zero = (n.value(at)[direction].reshape(-1) for at in ((8, 9) if k == 1 else (10, 11)))
    w, less = as_int8(n.value(k)[direction], zero, 1)
    weight, scales = n.const(packed(np.ascontiguousarray(w.T)[None])), n.const(scale, np.float32)
    left = None if less is None else n.const(less)

    def product(b: Builder, v: Variable) -> Variable:
        q, step, zero = made.get(v.name) or made.setdefault(v.name, tuple(b.dynamic_quantize_linear(v)))
        found: Variable = b.quantized_matmul(q, weight, None, scales, None, None, zero, step, left, outputs=w.shape[1], dtype="float32")
        return found

    return product


def _weights(n: Node, k: int, scale: int) -> np.ndarray:
    """Operand k dequantized to float32. Scale and zero point have one number for each direction, or for each of its columns."""
    by, zero = (_over_rows(n.value(at)) for at in (scale, scale + 1))
    real = (n.value(k).astype("float32") - zero.astype("float32")) * by
    return np.ascontiguousarray(real.transpose(0, 2, 1))


def _over_rows(v: np.ndarray) -> np.ndarray:
    return v.reshape(v.shape[0], 1, -1)


def in_8_bits(n: Node, v: Variable) -> Variable:
    """v quantized to 8 bits over its range, and back."""
    found: Variable = n.apply("DequantizeLinear", *n.apply("DynamicQuantizeLinear", v, outputs=3))
    return found
