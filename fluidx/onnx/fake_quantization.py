"""Quantized weights and values of a model as floats that are rounded to what their integers can be, so that gradients pass.

A DequantizeLinear of a known array becomes `fake_quantize` of a parameter, and a QuantizeLinear with the DequantizeLinear behind it becomes
`fake_quantize` of the value. Export writes both back.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..ir import Variable
from .values import Weight

if TYPE_CHECKING:
    from .importer import Importer
    from .node import Node

RANGES = {np.dtype(t): (float(np.iinfo(t).min), float(np.iinfo(t).max)) for t in ("int8", "uint8", "int16", "uint16", "int32")}
DTYPES = {r: t for t, r in RANGES.items()}


class _Quantized(NamedTuple):
    """The operands of a QuantizeLinear: a value of the program, scale, zero point and the integer dtype."""

    x: Variable
    scale: np.ndarray
    zero: np.ndarray
    dtype: np.dtype


class FakeQuantization:
    """The quantized values of an import, and what stands for them."""

    def __init__(self) -> None:
        self._values: dict[str, _Quantized] = {}
        # ids of the operands of a DequantizeLinear, and its axis -> the operands, kept alive, and what stands for its output
        self._weights: dict[tuple[int, ...], tuple[Any, Variable]] = {}

    def output(self, n: Node) -> Variable | None:
        """What stands for the output of a DequantizeLinear; None if nothing does. A QuantizeLinear is noted."""
        if n.proto.domain or n.op_type not in ("QuantizeLinear", "DequantizeLinear") or n.b.block.idx or n.attr("block_size", 0):
            return None
        if any(isinstance(v, Variable) for v in n.operands[1:]) or n.dtype(1) != "float32" or n.attr("output_dtype", 1) != 1:
            return None
        scale, zero = n.value(1), n.value(2) if n.has(2) else np.zeros((), np.float32)
        if n.op_type == "DequantizeLinear":
            return self._dequantized(n, scale, zero)
        self._note(n, scale, zero)
        return None

    def _note(self, n: Node, scale: np.ndarray, zero: np.ndarray) -> None:
        dtype = zero.dtype if n.has(2) else np.dtype(np.uint8)
        plain = not n.attr("output_dtype", 0) and not n.attr("precision", 0)
        if plain and isinstance(n.operands[0], Variable) and n.dtype(0) == "float32" and dtype in RANGES:
            self._values[n.proto.output[0]] = _Quantized(n.operands[0], scale, zero, dtype)

    def _dequantized(self, n: Node, scale: np.ndarray, zero: np.ndarray) -> Variable | None:
        q, key = n.operands[0], (*map(id, n.operands), n.attr("axis", 1))
        if isinstance(q, np.ndarray) and q.dtype in RANGES and q.size > 1:
            if key not in self._weights:
                real = (q.astype(np.float64) - _aligned(n, zero)) * _aligned(n, scale)
                weight = n.importer.variable(Weight(n.proto.input[0], real.astype(np.float32)))
                self._weights[key] = n.operands, self._rounded(n, weight, scale, zero, q.dtype)
            return self._weights[key][1]
        made = self._values.get(n.proto.input[0])
        if made is None or n.importer.env.get(n.proto.input[0]) is not q:
            return None
        same = np.array_equal(made.scale, scale) and np.array_equal(made.zero, zero)
        return self._rounded(n, made.x, scale, zero, made.dtype) if same else None

    @staticmethod
    def _rounded(n: Node, x: Variable, scale: np.ndarray, zero: np.ndarray, dtype: np.dtype) -> Variable:
        lowest, highest = RANGES[dtype]
        factor, shift = (n.const(_aligned(n, v).astype(np.float32)) for v in (scale, zero))
        found: Variable = n.b.fake_quantize(x, factor, shift, lowest=lowest, highest=highest)
        return found

    def drop_unread(self, importer: Importer, outputs: list[str]) -> None:
        """Remove the operators of integers that nothing reads."""
        block = importer.main.global_block()
        kept = {v.name for v in map(importer.env.get, outputs) if isinstance(v, Variable)}
        names = [(name, importer.env.get(name)) for name in self._values]
        wanted = {v.name for _, v in names if isinstance(v, Variable)}
        reads = Counter(n for b in importer.main.blocks for op in b.oplist for n in op.input_arg_names) + Counter(kept)
        left = []
        for op in reversed(block.oplist):
            outs = op.output_arg_names
            if wanted.issuperset(outs) and not any(reads[n] for n in outs):
                reads.subtract(op.input_arg_names)
                wanted.update(op.input_arg_names)
                for n in outs:
                    del block.descs[n]
            else:
                left.append(op)
        block.oplist = left[::-1]
        importer.b.sizes.forget([v.name for _, v in names if isinstance(v, Variable) and v.name not in block.descs])
        for name, v in names:
            if isinstance(v, Variable) and v.name not in block.descs:
                del importer.env[name]


def _aligned(n: Node, v: np.ndarray) -> np.ndarray:
    """A scale or zero point in a shape that broadcasts to operand 0."""
    if v.size == 1:
        return v.reshape(())
    axis = n.attr("axis", 1) % n.rank()
    return v.reshape([-1 if k == axis else 1 for k in range(n.rank())])
