"""`Node`: the view of one ONNX node that import functions get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir import Builder, TensorType, Variable
from ..ir.dtypes import as_dtype
from .errors import OnnxError
from .values import array_of, as_outputs, in_float

if TYPE_CHECKING:
    from .importer import Importer


class Node:
    """One node of a graph: its operands as variables or known values, its attributes, and a builder."""

    def __init__(self, importer: Importer, proto: Any, operands: list[Any]):
        self.importer, self.proto, self.operands = importer, proto, operands
        self.op_type: str = proto.op_type
        self.b: Builder = importer.b

    @cached_property
    def _attrs(self) -> dict[str, Any]:
        return {a.name: a for a in self.proto.attribute}

    # -- operands ---------------------------------------------------------------------------------------------------------------

    def has(self, k: int) -> bool:
        """Is operand k given?"""
        return k < len(self.operands) and self.operands[k] is not None

    def x(self, k: int = 0) -> Any:
        """Operand k as a variable of the program; None if it is left out."""
        return self.importer.variable(self.operands[k]) if self.has(k) else None

    def frozen(self, k: int, shape: Sequence[int]) -> Any:
        """Operand k, a known part of a quantized weight, as a parameter that is not trained; None if it is left out. Files may write its
        elements in another shape."""
        return self.importer.frozen(self.proto.input[k], self.importer.array(self.operands[k]), shape) if self.has(k) else None

    def xs(self, start: int = 0) -> list[Variable]:
        """All operands from `start` on, as variables."""
        return [self.x(k) for k in range(start, len(self.operands))]

    def value(self, k: int = 0) -> Any:
        """Operand k as a value on the host, computed now if necessary; None if it is left out."""
        return self.importer.value(self.operands[k], self) if self.has(k) else None

    def values(self, start: int = 0) -> list[Any]:
        """All operands from `start` on, as values on the host."""
        return list(self.importer.value(self.operands[start:], self))

    def ints(self, k: int) -> list[int] | None:
        """The integers of operand k: sizes, axes or the like. None if it is left out."""
        found = self.value(k)
        return None if found is None else [int(v) for v in np.asarray(found).ravel()]

    def type(self, k: int = 0) -> TensorType:
        """The type of operand k."""
        v = self.operands[k]
        if isinstance(v, Variable):
            return v.desc.type
        v = self.importer.array(v)
        return TensorType(as_dtype(v.dtype), v.shape)

    def shape(self, k: int = 0) -> tuple[int, ...]:
        """The shape of operand k, even if a program cannot hold it."""
        return tuple(self.importer.array(self.operands[k]).shape)

    def rank(self, k: int = 0) -> int:
        return len(self.shape(k))

    def dtype(self, k: int = 0) -> str:
        return self.type(k).dtype

    def const(self, value: Any, dtype: Any = None) -> Variable:
        """A constant of the program."""
        return self.importer.variable(np.asarray(value, dtype))

    def cast(self, x: Variable, dtype: str) -> Variable:
        """x in a dtype: x itself if it has that dtype."""
        return x if x.desc.type.dtype == dtype else self.b.cast(x, dtype=dtype)

    def filler(self, value: np.ndarray) -> float:
        """The number of a fill operator: the first element of an array."""
        number = value.flat[0]
        if not in_float(number):
            raise self.wrong(f"it fills with {number}, which a 64-bit float cannot hold exactly, so a program cannot; fx.onnx.session can")
        return float(number)

    def constant(self, array: np.ndarray) -> Any:
        """An array that the node itself holds, as its output."""
        return self.importer.node_constant(self.proto.output[0], array)

    # -- attributes, outputs --------------------------------------------------------------------------------------------------------

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute: a number, text, a list, an array, or a graph."""
        from onnx import AttributeProto as A
        from onnx import helper

        a = self._attrs.get(name)
        if a is None:
            return default
        found = helper.get_attribute_value(a)
        if a.type == A.STRING:
            return found.decode("utf-8", "replace")
        if a.type == A.STRINGS:
            return [s.decode("utf-8", "replace") for s in found]
        if a.type == A.TENSOR:
            return array_of(found)
        if a.type in (A.FLOAT, A.FLOATS):  # the file has the float32 value of a number that was written as 1e-5
            return _shortest(found) if a.type == A.FLOAT else [_shortest(v) for v in found]
        return list(found) if a.type == A.INTS else found

    def floats(self, name: str) -> np.ndarray:
        """The numbers of an attribute that lists floats, as the file has them; none if the node does not have it."""
        from onnx import AttributeProto as A

        a = self._attrs.get(name)
        return np.asarray(self.attr(name, []), np.float32) if a is None or a.type != A.FLOATS else np.array(a.floats, np.float32)

    @property
    def attributes(self) -> set[str]:
        """The names of the attributes that the node has."""
        return set(self._attrs)

    def cached(self, make: Callable[[], Any]) -> Any:
        """The result of `make`, which depends only on the attributes. It is called in the first run of this node and then cached."""
        kept = self.importer.node_cache
        if id(self.proto) not in kept:
            kept[id(self.proto)] = self.proto, make()
        return kept[id(self.proto)][1]

    @property
    def outputs(self) -> list[str]:
        return list(self.proto.output)

    def wants(self, k: int) -> bool:
        """Does a node read output k?"""
        return k < len(self.proto.output) and self.proto.output[k] != ""

    def wrong(self, what: str) -> OnnxError:
        return OnnxError(f"node {self.proto.name or self.op_type!r} ({self.op_type}): {what}")

    def by_body(self) -> Any:
        """The outputs by the function body of the schema, for an import function that covers common cases only."""
        return self.importer.by_body(self)

    def apply(self, op_type: str, *operands: Any, outputs: int = 1, named: str = "", **attrs: Any) -> Any:
        """The output of an operator of the standard for these operands, or a list of several. `named` is the name of the first."""
        from onnx import helper

        known = {id(v): name for name, v in zip(self.proto.input, self.operands)}
        base = named or f"{self.proto.output[0]}/{op_type}"
        reads = [known.get(id(v), f"{base}/{k}") if v is not None else "" for k, v in enumerate(operands)]
        makes = [base, *(f"{base}/{k}" for k in range(1, outputs))]
        proto = helper.make_node(op_type, reads, makes, self.proto.name or self.op_type, **attrs)
        found = as_outputs(self.importer.outputs_of(Node(self.importer, proto, list(operands))))
        return found if outputs > 1 else found[0]

    def as_standard(self, *names: str) -> Any:
        """The outputs of the operator of the standard that has the same name, with the named attributes, by default all."""
        kept = names or self._attrs
        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        proto.domain = ""
        del proto.attribute[:]
        proto.attribute.extend(a for a in self.proto.attribute if a.name in kept)
        return self.importer.outputs_of(Node(self.importer, proto, self.operands))

    # -- graphs ------------------------------------------------------------------------------------------------------------------

    def inline(self, graph: Any, feeds: list[Any], own: Mapping[str, Any] | None = None) -> list[Any]:
        """Write the nodes of a sub-graph here, with inputs `feeds` and weights `own` if given. Returns the values of its outputs."""
        return self.importer.inline(graph, feeds, own)


def _shortest(value: float) -> float:
    """The number with the fewest digits that rounds to this value in float32."""
    return float(str(np.float32(value)))
