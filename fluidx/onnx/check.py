"""Checks of a model before it is imported: the standard's checker, damaged names, and operators that fluidx does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ir.errors import nearest
from . import limits
from .errors import OnnxError
from .file_parts import copied
from .normalize import all_graphs, domain_of, opsets_of
from .table import imported, load_all

_MOST = 20  # nodes that a message lists


def check_valid(model: Any) -> None:
    """Raise OnnxError if the standard's checker refuses the model. Inputs and outputs without a shape are allowed, because real files have
    them."""
    import onnx

    try:
        onnx.checker.check_model(_with_shapes(model))
    except onnx.checker.ValidationError as e:
        raise OnnxError(f"not a valid ONNX model: {e}") from None
    except Exception as e:  # raised in C++: a model that cannot be serialised, text that is not UTF-8
        raise OnnxError(f"not a valid ONNX model: {type(e).__name__}: {e}") from None


def without_large_tensors(model: Any) -> Any:
    """The model with inputs in place of large initializers, for the standard's checker, which takes a model as bytes, at most 2 GB."""
    large = {k for k, t in enumerate(model.graph.initializer) if t.data_location == t.EXTERNAL or t.ByteSize() >= limits.MAPPED_TENSOR}
    if not large:
        return model
    made = copied(model, but="graph")
    graph, inputs = made.graph, {i.name for i in model.graph.input}
    graph.CopyFrom(copied(model.graph, but="initializer"))
    graph.initializer.extend(t for k, t in enumerate(model.graph.initializer) if k not in large)
    for k in sorted(large):
        t = model.graph.initializer[k]
        if t.name not in inputs:
            shape = graph.input.add(name=t.name).type.tensor_type
            shape.elem_type = t.data_type
            for d in t.dims:
                shape.shape.dim.add(dim_value=d)
    return made


def _with_shapes(model: Any) -> Any:
    """The model as the checker gets it: without large tensors, and with a shape of each input and output that has none."""

    def without(m: Any) -> list[Any]:
        tensors = [v.type.tensor_type for v in (*m.graph.input, *m.graph.output) if v.type.HasField("tensor_type")]
        return [t for t in tensors if not t.HasField("shape")]

    model = without_large_tensors(model)
    if not without(model):
        return model
    changed = type(model)()
    changed.CopyFrom(model)
    for t in without(changed):
        t.shape.SetInParent()
    return changed


def check_names(model: Any) -> None:
    """Raise OnnxError if a name is not text, as in a damaged file: protobuf returns such names as bytes."""
    tops = (model.graph, *model.functions)
    said = (model.producer_name, model.producer_version, *(o.domain for top in (model, *model.functions) for o in top.opset_import))
    for top in tops:
        for owner in all_graphs(top):
            named = [*owner.input, *owner.output, *getattr(owner, "value_info", ())]
            named += [*getattr(owner, "initializer", ()), *(t.values for t in getattr(owner, "sparse_initializer", ()))]
            tensors = [n.type.tensor_type for n in named if hasattr(n, "type")]
            names = [owner.name, *(n if isinstance(n, (str, bytes)) else n.name for n in named)]
            names += [d.dim_param for t in tensors for d in t.shape.dim]
            for p in owner.node:
                names += [p.op_type, p.domain, p.name, *p.input, *p.output, *(a.name for a in p.attribute)]
            odd = next((n for n in (*said, *names) if isinstance(n, bytes)), None)
            if odd is not None:
                raise OnnxError(f"not a valid ONNX model: {odd!r:.80} is not UTF-8 text, as names must be; the file is damaged")


def check_supported(model: Any) -> None:
    """Raise an OnnxError that lists each node without a supported operator, with the nearest supported name."""
    load_all()
    opsets = opsets_of(model)
    own = {(domain_of(f.domain), f.name) for f in model.functions}
    bodies = [g for top in (model.graph, *model.functions) for g in all_graphs(top)]
    lacking = [p for g in bodies for p in g.node if not _has(p, opsets, own)]
    wrong = [_missing(p) for p in lacking]
    if wrong:
        more = f"\n  and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        count = "one node" if len(wrong) == 1 else f"{len(wrong)} nodes"
        other = next((p for p in lacking if domain_of(p.domain)), None)
        raise OnnxError(f"fluidx has no operator for {count} of the model:\n  " + "\n  ".join(wrong[:_MOST]) + more + _way_out(other))


def _has(p: Any, opsets: Mapping[str, int], own: set[tuple[str, str]]) -> bool:
    import onnx

    domain = domain_of(p.domain)
    key = domain, p.op_type
    if key in own or key in imported():
        return True
    try:
        schema = onnx.defs.get_schema(p.op_type, opsets.get(domain, 1), domain)
        newest = onnx.defs.get_schema(p.op_type, onnx.defs.onnx_opset_version(), domain) if not domain else schema
    except onnx.defs.SchemaError:
        return False
    # the converter replaces an operator that the standard deprecated
    return schema.has_function or schema.has_context_dependent_function or (newest.deprecated and not schema.deprecated)


def _way_out(p: Any) -> str:
    """How one writes an importer for an operator of another domain than the standard's."""
    if p is None:
        return ""
    example = f'@fx.onnx.face("{p.op_type}", domain="{p.domain}")\n    def imported(n):\n        return n.b.relu(n.x(0))'
    return f"\nWrite an importer for it, which returns its outputs by operators of fluidx, before you load the model:\n    {example}"


def _missing(p: Any) -> str:
    domain = domain_of(p.domain)
    known = sorted(op for d, op in imported() if d == domain)
    where = f" of domain {domain!r}" if domain else ""
    name = p.name or (p.output[0] if p.output else "")
    hint = nearest(p.op_type, known, "fluidx has") if known else "fluidx has no operator of that domain"
    return f"{name or 'a node without name'} ({p.op_type}{where}): {hint}"
