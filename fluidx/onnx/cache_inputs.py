"""Models with a cache: a node appends rows to an input, and its result is an output. The shapes of their next feeds follow from the
model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Shapes = dict[str, list[int | str]]
_ROWS, _ALL, _NEW = "past", "total", "new"  # names of open axes


def likely_shapes(graph: Any, initialized: Collection[str]) -> list[Shapes]:
    """The shapes with which a model that has a cache is most likely run, for one sequence: one new row at a time and a cache of any length;
    and any number of new rows with an empty cache. [] for a model without a cache, and for one whose axes have neither sizes nor names."""
    inputs = {i.name: i.type.tensor_type for i in graph.input if i.name not in initialized}
    labels = {n: [d.dim_value if d.HasField("dim_value") else d.dim_param for d in t.shape.dim] for n, t in inputs.items()}
    caches, grown = _caches(graph, labels)
    if not caches or any(not t.elem_type or "" in labels[n] for n, t in inputs.items()):
        return []
    before = {labels[n][axis] for n, axis in caches.items()}
    sequences = {d for n, axis in caches.items() for k, d in enumerate(labels[n]) if k != axis}
    step, start = Shapes(), Shapes()
    for n, found in labels.items():
        step[n] = [d if isinstance(d, int) else _ROWS if d in before else _ALL if d in grown else 1 for d in found]
        start[n] = [d if isinstance(d, int) else 0 if d in before else 1 if d in sequences else _NEW for d in found]
    return [step, start]


def _caches(graph: Any, labels: Mapping[str, list[int | str]]) -> tuple[dict[str, int], set[Any]]:
    """The inputs that are caches, with the axis that grows, and the labels of that axis after it has grown."""
    outputs = {o.name: o.type.tensor_type.shape.dim for o in graph.output}
    caches, grown = dict[str, int](), set()
    for node in graph.node:
        if node.op_type != "Concat" or len(node.input) != 2 or node.input[0] not in labels or node.output[0] not in outputs:
            continue
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        shape, whole = labels[node.input[0]], outputs[node.output[0]]
        if -len(shape) <= axis < len(shape) == len(whole) and isinstance(shape[axis], str):
            caches[node.input[0]] = axis % len(shape)
            grown.add(whole[axis].dim_param)
    return caches, grown - {""}
