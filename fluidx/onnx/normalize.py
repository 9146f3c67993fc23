"""Checks of a model against operator schemas: names, operands and attributes. onnx's converter assumes them, and crashes otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ..ir.errors import ProgramError, nearest
from .errors import OnnxError
from .limits import AXES
from .values import numpy_dtype

NEWEST = 28  # the opset that the import functions are written for
MICROSOFT = "com.microsoft"  # ONNX Runtime's own domain
_SINCE = {"LayerNormalization": 17, "SimplifiedLayerNormalization": NEWEST + 1}  # the first opset of operators that ONNX Runtime always has
_DEPTH = 64  # of nested sub-graphs; protobuf reads less than half as many


# Attributes that onnx's shape inference does not check, so that a wrong value crashes the process: the requirement and its test.
_TRUSTED: dict[tuple[str, str], tuple[str, Callable[[Any, int], bool]]] = {
    ("Split", "num_outputs"): ("the number of its outputs", lambda node, value: value == len(node.output)),
    ("GatherND", "batch_dims"): ("not negative", lambda node, value: value >= 0),
}


def domain_of(name: str) -> str:
    """A domain as schemas name it: "" is the standard's own."""
    return "" if name == "ai.onnx" else name


def opsets_of(owner: Any) -> dict[str, int]:
    """The opset of each domain that a model or a function imports. If a domain is imported twice, the last import counts, as in ONNX
    Runtime and onnx's checker.

    Raises OnnxError for an impossible number, and for an opset newer than the installed onnx supports.
    """
    newest = _newest_opsets()
    for o in owner.opset_import:
        domain = domain_of(o.domain)
        if not 0 < o.version < 2**31:  # onnx looks up 32-bit numbers
            raise OnnxError(f"the model is of opset {o.version} of {o.domain or 'ai.onnx'}, and there is no such opset")
        if o.version > newest.get(domain, o.version):
            raise OnnxError(
                f"the model is of opset {o.version} of {o.domain or 'ai.onnx'}; fluidx with the installed onnx reads opsets up to "
                f"{newest[domain]}: export it with an opset of at most {newest[domain]}, or update onnx (pip install -U onnx) and fluidx"
            )
    return {domain_of(o.domain): o.version for o in owner.opset_import}


@cache
def _newest_opsets() -> dict[str, int]:
    """The newest opset of each domain that onnx defines."""
    from onnx import defs

    found: dict[str, int] = {}
    for s in defs.get_all_schemas_with_history():
        found[s.domain] = max(found.get(s.domain, 0), s.since_version)
    return {**found, "": min(NEWEST, defs.onnx_opset_version())}


def with_one_opset(model: Any) -> Any:
    """The model with one opset import for each domain: onnx's converter changes only the first of several."""
    owners = (model, *model.functions)
    if all(len(opsets_of(o)) == len(o.opset_import) for o in owners):
        return model
    changed = type(model)()
    changed.CopyFrom(model)
    for owner in (changed, *changed.functions):
        opsets = opsets_of(owner)
        del owner.opset_import[:]
        for domain, version in opsets.items():
            owner.opset_import.add(domain=domain, version=version)
    return changed


def with_runtime_domain(model: Any) -> Any:
    """The model with the operators that ONNX Runtime writes in the standard's domain, but the standard lacks in this opset, moved to
    `com.microsoft`."""
    opset = opsets_of(model).get("", NEWEST)

    def moved(m: Any) -> list[Any]:
        nodes = (p for top in (m.graph, *m.functions) for g in all_graphs(top) for p in g.node)
        return [p for p in nodes if not domain_of(p.domain) and opset < _SINCE.get(p.op_type, 0)]

    if not moved(model):
        return model
    changed = type(model)()
    changed.CopyFrom(model)
    for node in moved(changed):
        node.domain = MICROSOFT
    for owner in (changed, *changed.functions):
        if MICROSOFT not in opsets_of(owner):
            owner.opset_import.add(domain=MICROSOFT, version=1)
    return changed


def initialized(graph: Any) -> set[str]:
    """The names of a graph's initializers, which some exporters list as inputs too."""
    return {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}


def fed_names(graph: Any) -> list[str]:
    """The names of a graph's inputs that are no initializers, in order."""
    held = initialized(graph)
    return [i.name for i in graph.input if i.name not in held]


class _Signature(NamedTuple):
    """The numbers of operands and outputs that an operator may have, its required operands, and the types of its attributes."""

    operands: tuple[int, int]
    outputs: tuple[int, int]
    single: tuple[bool, ...]
    attributes: dict[str, int]
    required: tuple[str, ...]


def check_signatures(model: Any) -> None:
    """Raise OnnxError for names that are defined twice or not at all, and for nodes that do not match the schema of their operator."""
    opsets = opsets_of(model)
    _check_graph(model.graph, opsets, set(), 0)
    for f in model.functions:
        own = {**opsets, **opsets_of(f)}
        _check_nodes(f.node, own, set(f.input), 0)


def _check_graph(graph: Any, opsets: Mapping[str, int], outer: set[str], depth: int) -> None:
    if depth > _DEPTH:
        raise OnnxError(f"graphs are nested {_DEPTH} deep or deeper")
    given = [i.name for i in graph.input], [t.name for t in graph.initializer], [s.values.name for s in graph.sparse_initializer]
    for names in given:
        twice = next((name for k, name in enumerate(names) if name in names[:k]), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise OnnxError(f"two inputs or two initializers are called {twice!r}")
    for v in (*graph.input, *graph.output):
        _check_type(v)
    made = _check_nodes(graph.node, opsets, outer.union(*given), depth)
    lost = next((o.name for o in graph.output if o.name not in made), None)
    if lost is not None:
        raise OnnxError(f"the graph {graph.name!r} has the output {lost!r}, which no node computes")


def _check_type(value: Any) -> None:
    code = value.type.tensor_type.elem_type
    if code:
        try:
            numpy_dtype(code)
        except ProgramError as e:
            raise OnnxError(f"value {value.name!r}: {e}") from None


def _check_nodes(nodes: Sequence[Any], opsets: Mapping[str, int], known: set[str], depth: int) -> set[str]:
    """All names that are defined after the nodes."""
    known, made = set(known), set[str]()
    for node in nodes:
        who = f"node {node.name or node.op_type!r} ({node.op_type})"
        for name in node.input:
            if name and name not in known:
                raise OnnxError(f"{who} reads {name!r}, which no node before it computes; nodes must be in execution order")
        for graph in graphs_of(node):
            _check_graph(graph, opsets, known, depth + 1)
        for name in filter(None, node.output):
            if name in made:
                raise OnnxError(f"{who} defines {name!r}, which an earlier node defines too")
            made.add(name)
        known.update(node.output)
        form = _signature(node, who, opsets)
        if form is not None and (what := _mismatch(node, form)):
            raise OnnxError(f"{who}: {what}")
    return known


def graphs_of(node: Any) -> Iterator[Any]:
    """The sub-graphs of a node."""
    for a in node.attribute:
        if a.HasField("g"):
            yield a.g
        yield from a.graphs


def all_graphs(graph: Any) -> Iterator[Any]:
    """A graph or a function, and all sub-graphs in it."""
    yield graph
    for p in graph.node:
        for g in graphs_of(p):
            yield from all_graphs(g)


def _signature(node: Any, who: str, opsets: Mapping[str, int]) -> _Signature | None:
    """The form of a node's operator; None if the model defines it as a function, or if its domain is unknown."""
    domain = domain_of(node.domain)
    form = _signature_of(node.op_type, domain, opsets[domain]) if domain in opsets else None
    if form is None and not domain:
        from onnx import defs

        schemas = [s for s in defs.get_all_schemas_with_history() if not s.domain]
        first = min((s.since_version for s in schemas if s.name == node.op_type), default=0)
        if domain not in opsets:
            raise OnnxError(f"{who}: the model names no opset of ai.onnx; add one to its opset_import")
        opset = opsets[domain]
        way_out = f"it came with opset {first}" if first > opset else nearest(node.op_type, {s.name for s in schemas}, "there are")
        raise OnnxError(f"{who}: there is no such operator in opset {opset}; {way_out}")
    return form


@cache
def _signature_of(op_type: str, domain: str, opset: int) -> _Signature | None:
    from onnx import defs

    try:
        schema = defs.get_schema(op_type, opset, domain)
    except defs.SchemaError:
        return None
    single = tuple(p.option == defs.OpSchema.FormalParameterOption.Single for p in schema.inputs)
    attributes = {name: int(a.type.value) for name, a in schema.attributes.items()}
    required = tuple(name for name, a in schema.attributes.items() if a.required)
    return _Signature((schema.min_input, schema.max_input), (schema.min_output, schema.max_output), single, attributes, required)


def _mismatch(node: Any, form: _Signature) -> str:
    """How a node differs from the form of its operator; "" if it matches."""
    from onnx import AttributeProto

    for what, found, (least, most) in (("operands", len(node.input), form.operands), ("outputs", len(node.output), form.outputs)):
        if not least <= found <= most:
            return f"expected {least} to {most} {what}, found {found}" if least < most else f"expected {least} {what}, found {found}"
    for k, (name, needed) in enumerate(zip(node.input, form.single)):
        if needed and not name:
            return f"operand {k} is left out, but it is required"
    given = set()
    for a in node.attribute:
        wanted = form.attributes.get(a.name)
        if wanted is None:
            known = nearest(a.name, form.attributes, "there are") if form.attributes else "there are none"
            return f"its operator has no attribute {a.name!r} in this opset; {known}"
        if a.type and a.type != wanted:
            kinds = AttributeProto.AttributeType
            return f"attribute {a.name!r} is of type {kinds.Name(wanted)}, found {kinds.Name(a.type)}"
        given.add(a.name)
        far = next((v for v in (a.i, *a.ints) if abs(v) > AXES), None) if a.name in ("axis", "axes") else None
        if far is not None:  # onnx's shape inference casts axes to 32 bits, and would write outside of its arrays
            return f"attribute {a.name!r} names axis {far}, and no array has more than {AXES} axes"
        trusted = _TRUSTED.get((node.op_type, a.name))
        if trusted is not None and not trusted[1](node, a.i):
            return f"attribute {a.name!r} has to be {trusted[0]}, found {a.i}"
    missing = next((name for name in form.required if name not in given), None)
    return f"it has no attribute {missing!r}" if missing is not None else ""
