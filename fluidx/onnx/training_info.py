"""A training step in a model: `ModelProto.training_info`, whose algorithm computes the loss, its gradients and the new parameters.

The standard runs graph and algorithm as one graph: values of the first may be read in the second, and no name is made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir import Program, flow
from .errors import OnnxError
from .read import parsed


def training_info(program: Program, loss: str, inference: Any, graph_of: Callable[[Program], Any]) -> Any:
    """The TrainingInfoProto of a program that was minimized, beside the graph of its inference form."""
    from onnx import TrainingInfoProto, helper

    step, moved = _step(program, loss)
    graph = graph_of(step)
    shared = {t.name for t in inference.initializer} | {i.name for i in inference.input}
    made = {name for node in inference.node for name in node.output}
    graph.taken |= made | shared
    block, needed = step.global_block(), [n for n in flow.needs(step) if n not in shared]
    feeds = [n for n in needed if block.desc(n).is_data]
    results = graph.computed([loss, *moved], made)
    same = _reuse(graph.nodes, inference.node)
    results = [same.get(r, r) for r in results]
    own = {name for node in graph.nodes for name in node.output}
    algorithm = helper.make_graph(
        graph.nodes,
        f"{program.name}_step",
        [graph.info(n, n) for n in feeds],
        [graph.info(n, r) for n, r in zip([loss, *moved], results, strict=True) if r in own],
        initializer=[graph.stored(n) for n in needed if block.desc(n).persistable],
    )
    info = TrainingInfoProto(algorithm=algorithm)
    for name, result in zip(moved, results[1:], strict=True):
        info.update_binding.add(key=name, value=result)
    return info


def _step(program: Program, loss: str) -> tuple[Program, list[str]]:
    """What a run of the program does to its loss and to what lasts, and the names of what lasts."""
    block = program.global_block()
    block.desc(loss)
    written = dict.fromkeys(n for op in block.oplist for n in op.output_arg_names)
    moved = [n for n in written if block.has_var(n) and block.desc(n).persistable]
    if not any(block.desc(n).is_parameter for n in moved):
        raise OnnxError(f"save: {program.label()} moves no parameter, and a step of its training is asked for; call minimize first")
    step = program.clone()
    target = step.global_block()
    target.oplist[:] = flow.live_ops(step, [loss, *moved], given=set())
    step._touch()
    return step, moved


def _reuse(nodes: list[Any], others: Sequence[Any]) -> dict[str, str]:
    """Take away nodes that do what others do; the names that stand for what they made."""
    known, same, kept = {_what(node): node for node in others}, dict[str, str](), []
    for node in nodes:
        node.input[:] = [same.get(n, n) for n in node.input]
        found = known.get(_what(node))
        if found is None:
            kept.append(node)
        else:
            same.update(zip(node.output, found.output, strict=True))
    nodes[:] = kept
    return same


def _what(node: Any) -> tuple[Any, ...]:
    attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return node.domain, node.op_type, tuple(node.input), len(node.output), tuple(attributes)


def training_step(source: Any) -> Any:
    """The training step of a model, of a path, bytes or a ModelProto, as a model of its own that any runtime can run.

    It holds graph and algorithm as one graph, whose inputs and outputs are those of both; what its `update_binding` says is in
    metadata: `update:NAME` is the output that the initializer NAME becomes. Raises OnnxError for a model without a training step.
    """
    import onnx

    model = parsed(source)
    if not model.training_info:
        raise OnnxError("the model has no training_info; fx.onnx.save(..., loss=) writes it")
    info, step = model.training_info[0], onnx.ModelProto()
    step.CopyFrom(model)
    del step.training_info[:]
    for field in ("node", "initializer", "input", "output", "value_info"):
        getattr(step.graph, field).extend(getattr(info.algorithm, field))
    for binding in info.update_binding:
        step.metadata_props.add(key=f"update:{binding.key}", value=binding.value)
    return step
