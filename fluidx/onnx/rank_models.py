"""Rank programs exported as ONNX models to look at. Operators without an ONNX form become nodes of the domain `ai.fluidx`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir import Operator, Program
from .errors import OnnxError

DOMAIN = "ai.fluidx"
_PREFIX = "fluidx."  # keys of metadata about a rank program


def rank_model(program: Program, targets: Sequence[str], graph: Any) -> Any:
    """The GraphProto of a whole rank program. State variables are inputs, and outputs with their new values."""
    from onnx import helper

    block = program.global_block()
    written = dict.fromkeys(n for op in block.oplist for n in op.output_arg_names if block.has_var(n))
    for name in targets:
        block.desc(name)
    results = list(dict.fromkeys([*targets, *(n for n in written if block.desc(n).persistable)]))
    values = graph.write(results, set())
    inputs = [graph.info(n, n) for n, d in block.descs.items() if d.is_data or d.persistable]
    outputs = [graph.info(n, v) for n, v in zip(results, values, strict=True)]
    opaque = {name for node in graph.nodes if node.domain == DOMAIN for name in node.output} - set(values)
    known = [graph.info(n, n) for n in block.descs if n in opaque]
    return helper.make_graph(graph.nodes, program.name, inputs, outputs, value_info=known)


def describe(model: Any, program: Program) -> None:
    """Record in the metadata which rank of which program the model is."""
    said = {
        "rank": program.rank,
        "world_size": program.world_size,
        "strategy": program.strategy,
        "groups": "; ".join(f"{name} = {sets}" for name, sets in program.groups.items()),
        "program": program,
    }
    for key, value in said.items():
        model.metadata_props.add(key=_PREFIX + key, value=str(value))


def refuse_rank_model(model: Any) -> None:
    """Raise OnnxError for a model that `describe` marked as a rank program."""
    said = {p.key: p.value for p in model.metadata_props if p.key.startswith(_PREFIX)}
    if said:
        raise OnnxError(
            f"the model is the program of rank {said.get('fluidx.rank')} of {said.get('fluidx.world_size')}, exported to look at, without "
            "weights; fx.Program.parse_from_string reads its metadata 'fluidx.program'"
        )


def opaque_node(op: Operator, inputs: list[str], outputs: list[str]) -> Any:
    """An operator as a node of the same name. The attribute `slots` gives the input slot of each operand."""
    from onnx import helper

    slots = [slot for slot, names in op.inputs.items() for _ in names]
    attrs = {k: _attribute(v) for k, v in op.attrs.items() if v not in ("", ())}
    return helper.make_node(op.type, inputs, outputs, name=outputs[0], domain=DOMAIN, **attrs, **({"slots": slots} if slots else {}))


def _attribute(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    plain = isinstance(value, (int, float, str)) or (isinstance(value, tuple) and len({type(v) for v in value} & {int, float, str}) == 1)
    return value if plain else str(value)
