"""`save` writes a program as an ONNX model: the part that computes some fetches, in inference form, with the values of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from .._version import __version__
from ..files.state import made_by_all, state_of
from ..io import prune
from ..ir import Program, Variable, flow
from ..ir.pass_base import Job
from .adapter_files import adapters_in
from .adapters import RemoveAdapters, adapters_of, has_integer_weights
from .check import without_large_tensors
from .errors import OnnxError, need_onnx
from .export_graph import ExportGraph
from .external_data import external_tensors
from .half_precision import InFileDtypes
from .merge import merged
from .rank_models import describe, rank_model
from .stored_values import ModelFile, ValueOf, fill
from .training_info import joined_step, training_info

_OPSET, _IR = 21, 10  # runtimes of recent years read these; operators of opset 21 need IR 10
_OPSETS = range(13, 27)  # 13 is the first opset in which axes are operands and Softmax has a single axis
_VERSIONS = {"ai.onnx.ml": 4}  # versions of other domains: LabelEncoder accepts NaN as a key from version 4 on


def save(
    program: Program,
    path: Any,
    feeds: Sequence[Any] | None = None,
    fetches: Sequence[Any] | Mapping[str, Any] = (),
    executor: Any = None,
    scope: Any = None,
    opset: int = _OPSET,
    ir_version: int = _IR,
    loss: Any = None,
    merge: bool = False,
    external_data: bool | str = "auto",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the part of a program that computes `fetches` as an ONNX model, in its inference form. A dict of fetches names the outputs of
    the model; `metadata` are texts that the file has beside it.

    `feeds` are its inputs in order, by default all data that the fetches need. Parameters have their values in `scope` (by default the
    global one), or on the ranks of `executor`, a ParallelExecutor. Ranks that are processes of one script all call this, and rank 0 writes.
    An older file is replaced when the model is complete. Raises OnnxError that lists every operator without an ONNX form, and
    NotInitializedError if a parameter has no value.

    The nodes are those of `opset`, 13 to 26. An operator that this opset lacks is written as other nodes, or listed in the error.
    `ir_version` is that of the file: runtimes refuse files of a newer version than theirs, whatever the opset.

    `external_data`: True writes values of parameters to a second file beside the model, named as the model with ".data" at the end; a text
    is the name of that file; "auto" does so for models above 2 GB, which protobuf cannot write as one file. Values are written one by one.
    Both files are complete before either replaces an older one.

    A program of a model in 16 bits that `set_training` prepared is written in the dtypes of its file again, but with `loss` in float32.

    With the `loss` that the program was minimized for, the model also has a training step, `training_info`: loss, gradients and updates as
    nodes, and the optimizer state with its values. `fx.onnx.training_step` extracts it as a model.

    Adapters of `set_training(lora=...)` are nodes of the model; with `merge` they are added to the weights instead.

    A rank program is written whole and without values, to look at: operators without an ONNX form become nodes of the domain `ai.fluidx`.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("net"), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     y = fx.layers.softmax(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2))
    >>> exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    >>> _ = exe.run(startup, scope=scope)
    >>> fx.onnx.save(main, "net.onnx", fetches=[y], scope=scope)
    >>> [op.type for op in fx.onnx.load("net.onnx").program.ops]
    ['matmul', 'elementwise_add', 'softmax']
    """
    model, value_of = _with_placeholders(program, feeds, fetches, executor, scope, opset, ir_version, loss, merge)
    for key, value in (metadata or {}).items():
        model.metadata_props.add(key=key, value=value)
    file = ModelFile(model, path, external_data)
    made_by_all(executor, "write a model", lambda: file.write(value_of, state_of(executor).script.is_first))


def to_onnx(
    program: Program,
    feeds: Sequence[Any] | None = None,
    fetches: Sequence[Any] | Mapping[str, Any] = (),
    executor: Any = None,
    scope: Any = None,
    opset: int = _OPSET,
    ir_version: int = _IR,
    loss: Any = None,
    merge: bool = False,
) -> Any:
    """The ModelProto that `save` writes."""
    model, value_of = _with_placeholders(program, feeds, fetches, executor, scope, opset, ir_version, loss, merge)
    _fill_all(model, value_of)
    return model


def _fill_all(model: Any, value_of: ValueOf) -> None:
    for tensor in external_tensors(model):
        fill(tensor, value_of(tensor.name))


def _with_placeholders(
    program: Program, feeds: Any, fetches: Any, executor: Any, scope: Any, opset: int, ir_version: int, loss: Any, merge: bool
) -> tuple[Any, ValueOf]:
    """The model without the values of its large parameters, and the function that gives them."""
    need_onnx()
    _check_versions(opset, ir_version)
    _check_program(program)
    named = dict(fetches) if isinstance(fetches, Mapping) else {}
    fetches = [*named.values()] if named else [fetches] if isinstance(fetches, (str, Variable)) else fetches
    targets = [_name(v) for v in fetches]
    if program.rank is not None:
        if loss is not None:
            raise OnnxError(f"save: {program.label()} is exported whole; give loss with the program that it was made from")
        graph = ExportGraph(program, executor, scope, opset, opaque=True)
        return _model(rank_model(program, targets, graph), [], opset, ir_version, program), graph.value
    if merge and loss is not None:
        raise OnnxError("save: merge=True leaves no adapters that a training step of loss= could train; give only one of them")
    if not targets:
        raise OnnxError("save: name at least one variable to compute in `fetches`")
    if twice := [n for n, times in Counter(targets).items() if times > 1]:
        raise OnnxError(f"save: {twice[0]!r} is fetched twice, but outputs of a model must have different names")
    if program.strategy:
        raise OnnxError(
            f"{program.label()} is the result of transpiling; save the program that it was made from, with executor=the ParallelExecutor"
        )
    if merge and has_integer_weights(program):
        how = "write save_adapters(...), and fx.onnx.merge(...) with the file that has the float weights"
        raise OnnxError(f"save: merge=True needs the float weights, and they are integers here; {how}")
    if merge:
        whole, program = program, RemoveAdapters().run(program, Job(fetch=tuple(targets)))
    names = _needed(program, targets) if feeds is None else [_name(v) for v in feeds]
    pruned = prune(program, names, targets)
    graph = ExportGraph(InFileDtypes().run(pruned) if loss is None else pruned, executor, scope, opset, infers=loss is None)
    proto = graph.to_proto(names, targets)
    _rename_outputs(proto, [*named])
    step = None if loss is None else training_info(program, _name(loss), proto, lambda p: ExportGraph(p, executor, scope, opset))
    model = _model(proto, [step] if step else [], opset, ir_version, program)
    if merge:
        _fill_all(model, graph.value)
        model = merged(model, adapters_in(whole, executor, scope), {a.weight: a.module for a in adapters_of(whole)})
    return model, graph.value


def _rename_outputs(graph: Any, names: Sequence[str]) -> None:
    """Give the outputs these names, by Identity nodes, where they have others."""
    taken = {n for p in graph.node for n in (*p.input, *p.output)} | {v.name for v in (*graph.input, *graph.initializer)}
    for output, name in zip(graph.output, names):
        if output.name == name:
            continue
        if name in taken:
            raise OnnxError(f"save: {name!r} cannot be the name of the output {output.name!r}: another value of the model has it")
        graph.node.add(op_type="Identity", input=[output.name], output=[name])
        output.name = name


def _model(graph: Any, steps: list[Any], opset: int, ir_version: int, program: Program) -> Any:
    from onnx import helper

    nodes = [*graph.node, *(n for step in steps for n in step.algorithm.node)]
    model = helper.make_model(
        graph,
        producer_name="fluidx",
        producer_version=__version__,
        ir_version=ir_version,
        opset_imports=opset_imports(nodes, opset),
    )
    model.training_info.extend(steps)
    if program.rank is not None:
        describe(model, program)
    _check(without_large_tensors(joined_step(model) if steps else model), program)
    return model


def _check_program(program: Any) -> None:
    if not isinstance(program, Program):
        hint = "; give its .program" if hasattr(program, "program") else ""
        hint = "; the program comes first, save(program, path, fetches=...)" if isinstance(program, (str, PathLike)) else hint
        raise OnnxError(f"save: expected a Program, got {type(program).__name__}{hint}")


def _check_versions(opset: int, ir_version: int) -> None:
    from onnx import IR_VERSION
    from onnx.defs import onnx_opset_version

    opsets = range(_OPSETS.start, min(_OPSETS.stop, onnx_opset_version() + 1))
    for what, found, known in (("opset", opset, opsets), ("ir_version", ir_version, range(7, IR_VERSION + 1))):
        if found not in known:
            raise OnnxError(f"save: {what} must be one of {known[0]} to {known[-1]}, got {found!r}")


def opset_imports(nodes: Iterable[Any], opset: int) -> list[Any]:
    """The opset imports of a model: that of the standard, and those of other domains in the nodes."""
    from onnx import helper

    return [
        helper.make_opsetid("", opset),
        *(helper.make_opsetid(d, _VERSIONS.get(d, 1)) for d in sorted({n.domain for n in nodes} - {""})),
    ]


def _check(model: Any, program: Program) -> None:
    """Check the model. ONNX may have an operator, but not for these types."""
    import onnx

    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        raise OnnxError(f"{program.label()} cannot be written as ONNX: {e}") from None


def _name(v: Any) -> str:
    return v.name if isinstance(v, Variable) else v


def _needed(program: Program, targets: Sequence[str]) -> list[str]:
    """The data variables that targets need, in the order of declaration."""
    source = program.clone(for_test=True)
    for name in targets:
        program.global_block().desc(name)
    kept = flow.live_ops(source, targets, given=set())
    used = {*flow.needs(source, kept), *targets}
    return [n for n, d in source.global_block().descs.items() if d.is_data and n in used]
