"""Functions that schemas define for operators, filled with the attributes of the node that is expanded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..ir import Variable
from ..ir.errors import nearest
from .node import Node
from .normalize import domain_of
from .table import imported
from .types import type_proto_of
from .values import ABSENT, type_proto

if TYPE_CHECKING:
    from .importer import Importer


def function_of(importer: Importer, n: Node) -> tuple[Any, Any]:
    """The FunctionProto for a node, and its schema. Raises OnnxError if there is none."""
    import onnx

    domain = domain_of(n.proto.domain)
    opset = importer.opsets.get(domain, 1)
    try:
        schema = onnx.defs.get_schema(n.op_type, opset, domain)
    except onnx.defs.SchemaError:
        known = sorted(op for d, op in imported() if d == domain)
        where = f" of domain {domain!r}" if domain else ""
        raise n.wrong(f"there is no operator {n.op_type}{where} in opset {opset}; {nearest(n.op_type, known, 'fluidx has')}") from None
    if schema.has_context_dependent_function:
        types = [_type_of(importer, v).SerializeToString() for v in n.operands]
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= opset)
        body = schema.get_context_dependent_function_with_opset_version(version, n.proto.SerializeToString(), types)
    elif schema.has_function:
        body = schema.get_function_with_opset_version(max(v for v in schema.function_opset_versions if v <= opset))
    else:
        raise n.wrong("fluidx does not support this operator yet")
    function = onnx.FunctionProto()
    function.ParseFromString(body)
    if not function.node:
        raise n.wrong(f"its schema has no body for operands of {', '.join(n.dtype(k) for k in range(len(n.operands)) if n.has(k))}")
    return function, schema


def _type_of(importer: Importer, value: Any) -> Any:
    """The TypeProto of a value, on the host or in the program; an empty one for an absent value."""
    from onnx import TypeProto, helper

    if value is None or value is ABSENT:
        return TypeProto()
    if isinstance(value, Variable):
        return type_proto_of(value.desc.type, lambda t: [None if d < 0 else d for d in t.shape])
    if isinstance(value, list) and value:
        return helper.make_sequence_type_proto(_type_of(importer, value[0]))
    return type_proto(importer.array(value))


def output_names(function: Any, outputs: Sequence[str]) -> dict[str, str]:
    """Names of a function's outputs -> names of the node's outputs, for names that the body does not use inside."""
    if any(a.HasField("g") for p in function.node for a in p.attribute):
        return {}  # a sub-graph may read them
    inside = {*function.input, *(name for p in function.node for name in (*p.input, *p.output))}
    return {name: given for name, given in zip(function.output, outputs) if given and given not in inside}


def with_attributes(proto: Any, n: Node, schema: Any, names: Mapping[str, str]) -> Any:
    """A copy of a node of a function body, with attributes taken from the calling node and with output names replaced by `names`."""
    import onnx

    new = onnx.NodeProto()
    new.CopyFrom(proto)
    new.input[:], new.output[:] = ([names.get(v, v) for v in side] for side in (proto.input, proto.output))
    del new.attribute[:]
    for a in proto.attribute:
        given = a
        if a.ref_attr_name:
            given = n._attrs.get(a.ref_attr_name)
            if given is None and a.ref_attr_name in schema.attributes:
                given = schema.attributes[a.ref_attr_name].default_value
            if given is None or not given.type:
                continue
        copied = new.attribute.add()
        copied.CopyFrom(given)
        copied.name = a.name
    return new
