"""`ModelProto.training_info`: one training step stored in a model, whose algorithm computes the loss, its gradients and the new parameters.

The standard runs graph and algorithm as one graph: the algorithm may read values of the graph, and no name is defined twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..ir import Program, flow
from .errors import OnnxError
from .read import parse_model


def training_info(program: Program, loss: str, inference: Any, graph_of: Callable[[Program], Any]) -> Any:
    """The TrainingInfoProto of a minimized program, beside the graph of its inference form."""
    from onnx import TrainingInfoProto, helper

    step, moved = _step(program, loss)
    graph = graph_of(step)
    shared = {t.name for t in inference.initializer} | {i.name for i in inference.input}
    made = {name for node in inference.node for name in node.output}
    graph.taken |= made | shared
    block, needed = step.global_block(), [n for n in flow.needs(step) if n not in shared]
    feeds = [n for n in needed if block.desc(n).is_data]
    results = graph.write([loss, *moved], made)
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
    """The program reduced to its loss and the updates of state variables, and the names of those variables."""
    block = program.global_block()
    block.desc(loss)
    written = dict.fromkeys(n for op in block.oplist for n in op.output_arg_names)
    moved = [n for n in written if block.has_var(n) and block.desc(n).persistable]
    if not any(block.desc(n).is_parameter for n in moved):
        raise OnnxError(f"save: {program.label()} updates no parameter, so it has no training step; call minimize first")
    step = program.clone()
    target = step.global_block()
    target.oplist[:] = flow.live_ops(step, [loss, *moved], given=set())
    step._touch()
    return step, moved


def _reuse(nodes: list[Any], others: Sequence[Any]) -> dict[str, str]:
    """Remove nodes that compute the same as `others`. Returns their outputs -> the equal outputs of the others."""
    known, same, kept = {_meaning(node): node for node in others}, dict[str, str](), []
    for node in nodes:
        node.input[:] = [same.get(n, n) for n in node.input]
        found = known.get(_meaning(node))
        if found is None:
            kept.append(node)
        else:
            same.update(zip(node.output, found.output, strict=True))
    nodes[:] = kept
    return same


def _meaning(node: Any) -> tuple[Any, ...]:
    attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return node.domain, node.op_type, tuple(node.input), len(node.output), tuple(attributes)


def training_step(source: Any) -> Any:
    """The training step of a model, given as a path, bytes or a ModelProto, as a model of its own that any runtime can run.

    It joins graph and algorithm in one graph, with the inputs and outputs of both. Each `update_binding` becomes metadata: `update:NAME` is
    the output with the new value of initializer NAME. Raises OnnxError for a model without a training step.
    """
    model = parse_model(source)
    if not model.training_info:
        raise OnnxError("the model has no training_info; fx.onnx.save(..., loss=) writes it")
    return joined_step(model)


def joined_step(model: Any) -> Any:
    """The training step of a model that has one."""
    import onnx

    info, step = model.training_info[0], onnx.ModelProto()
    step.CopyFrom(model)
    del step.training_info[:]
    for field in ("node", "initializer", "input", "output", "value_info"):
        getattr(step.graph, field).extend(getattr(info.algorithm, field))
    for binding in info.update_binding:
        step.metadata_props.add(key=f"update:{binding.key}", value=binding.value)
    return step
