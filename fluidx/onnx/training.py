"""set_training: models are written for inference, and this makes of one what is to be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ..initializer import derive_seed
from ..ir import Operator, Program, Role, Variable, flow, program_guard
from ..ir.errors import nearest
from .errors import OnnxError
from .model import OnnxModel

Patterns = bool | str | Sequence[str]


def set_training(
    model: OnnxModel | Program,
    batch_norm: Patterns = True,
    dropout: bool | float = True,
    freeze: str | Sequence[str] = (),
    head: Callable[[OnnxModel], Variable] | None = None,
    loss: str | Callable[[Variable], Variable] | None = None,
) -> Variable | None:
    """Prepare a loaded model for training, before a loss is built on it or as one is; returns the loss where `loss` asks for one.

    `batch_norm`: those whose output or a parameter has a name like one of the patterns (True: all) take the statistics of the batch and
    update the running ones. `dropout`: Dropout nodes drop again, at the model's rate (True) or at another one. `freeze`: parameters whose
    names are like one of the patterns (`layer1.*`) are not trained.

    `head` is called under the guard of the model's programs and gives the new output, built on a value such as `model["flatten"]`; what
    only the old outputs needed goes away. `loss` is a function of the output, or "softmax_with_cross_entropy" (of labels that are fed as
    "label": int64[-1, 1]), "square_error_cost" or "sigmoid_cross_entropy_with_logits" (of "label", like the output): its mean. Where a
    model ends in a softmax, the cross entropy takes what lies before it.
    """
    program = model.program if isinstance(model, OnnxModel) else model
    if not isinstance(program, Program):
        raise OnnxError(f"set_training: expected what fx.onnx.load gave, or a Program, got {type(model).__name__}")
    for op in program.ops:
        if op.role in (Role.BACKWARD, Role.OPTIMIZE):
            raise OnnxError(f"{program.label()} computes gradients already, of the model as it was; call set_training before minimize")
    if not isinstance(model, OnnxModel) and (head or loss):
        raise OnnxError("set_training: head and loss are for what fx.onnx.load gave; on a Program, build them with layers")
    if batch_norm is not False:
        _wake_batch_norms(program, ("*",) if batch_norm is True else _several(batch_norm))
    if dropout is not False:
        _wake_dropouts(program, None if dropout is True else float(dropout))
    _freeze(program, _several(freeze))
    if isinstance(model, OnnxModel) and head is not None:
        _replace_head(model, head)
    return _built_loss(model, loss) if isinstance(model, OnnxModel) and loss is not None else None


def _several(patterns: Any) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _like(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(n, p) for n in names for p in patterns)


def _rewritten(program: Program, change: Callable[[Operator], Operator]) -> None:
    block = program.global_block()
    block.oplist[:] = [change(op) for op in block.oplist]
    program._touch()


def _wake_batch_norms(program: Program, patterns: Sequence[str]) -> None:
    block = program.global_block()
    known = [n for op in program.ops if op.type == "batch_norm" for n in (*op.outputs["Y"], *op.input_arg_names[1:])]
    _all_used(patterns, known, "batch_norm", "values and parameters of batch normalizations are")

    def change(op: Operator) -> Operator:
        if op.type != "batch_norm" or not _like((*op.outputs["Y"], *op.input_arg_names[1:]), patterns):
            return op
        running = {slot: op.inputs[slot] for slot in ("Mean", "Variance")}
        for slot, (name,) in running.items():
            desc = block.desc(name)
            if not desc.is_parameter:
                raise OnnxError(f"{op.to_string()}: {slot} is computed in the model, and cannot be updated; leave it out of batch_norm=")
            block.declare(desc.changed(stop_gradient=True, attrs={**desc.attrs, "trainable": False}))
        for slot in ("MeanOut", "VarianceOut"):
            block.descs.pop(op.outputs[slot][0], None)
        outs = {**op.outputs, "MeanOut": running["Mean"], "VarianceOut": running["Variance"]}
        return op.replace(outputs=outs, attrs={**op.attrs, "is_test": False})

    _rewritten(program, change)


def _wake_dropouts(program: Program, rate: float | None) -> None:
    if rate is not None and not 0.0 <= rate < 1.0:
        raise OnnxError(f"set_training: dropout must be True, False or a rate of at least 0 and below 1, got {rate}")
    block = program.global_block()

    def change(op: Operator) -> Operator:
        if op.type != "dropout":
            return op
        (x,), (y,) = op.inputs["X"], op.outputs["Out"]
        mask = op.outputs.get("Mask") or (f"{y}.mask",)
        block.create_var(mask[0], block.desc(x).type.shape, "uint8", stop_gradient=True)
        p = op.attrs["dropout_prob"] if rate is None else rate
        attrs = {**op.attrs, "is_test": False, "dropout_prob": p, "seed": op.attrs["seed"] or derive_seed(program, y)}
        return op.replace(outputs={**op.outputs, "Mask": mask}, attrs=attrs)

    _rewritten(program, change)


def _freeze(program: Program, patterns: Sequence[str]) -> None:
    block = program.global_block()
    parameters = [p.desc for p in program.all_parameters()]
    _all_used(patterns, [d.name for d in parameters], "freeze", "the parameters are")
    for desc in parameters:
        if _like((desc.name,), patterns):
            block.declare(desc.changed(stop_gradient=True, attrs={**desc.attrs, "trainable": False}))


def _all_used(patterns: Sequence[str], names: Sequence[str], option: str, what: str) -> None:
    for p in patterns:
        if p != "*" and not _like(names, (p,)):
            raise OnnxError(f"set_training: {option} names {p!r}, and nothing is called so; {nearest(p, set(names), what)}")


# -- heads and losses ---------------------------------------------------------------------------------------------------------


def _replace_head(model: OnnxModel, head: Callable[[OnnxModel], Variable]) -> None:
    with program_guard(model.program, model.startup):
        made = head(model)
    if not isinstance(made, Variable) or made.block.program is not model.program:
        raise OnnxError(f"set_training: head must return a Variable of the model's program, got {made!r}")
    model.fetches = [made]
    _keep(model, [made.name])


def _keep(model: OnnxModel, targets: Sequence[str]) -> None:
    """Drop operators and parameters that only others than `targets` need."""
    main, startup = model.program.global_block(), model.startup.global_block()
    kept = flow.live_ops(model.program, targets, given=set())
    used = {n for op in kept for n in (*flow.reads(model.program, op), *flow.writes(model.program, op))} | set(targets)
    main.oplist[:] = kept
    dead = [n for n, d in main.descs.items() if n not in used and not d.is_data]
    for name in dead:
        del main.descs[name]
        startup.descs.pop(name, None)
    startup.oplist[:] = [op for op in startup.oplist if not set(op.output_arg_names) <= set(dead)]
    model.program._touch()
    model.startup._touch()


_LOSSES = ("softmax_with_cross_entropy", "square_error_cost", "sigmoid_cross_entropy_with_logits")


def _built_loss(model: OnnxModel, loss: str | Callable[[Variable], Variable]) -> Variable:
    from .. import layers
    from ..layers.tensor import fluid_data

    if len(model.fetches) != 1:
        has = ", ".join(v.name for v in model.fetches)
        raise OnnxError(f"set_training: loss is of one output, and the model has {has}; give a head that returns one")
    (y,) = model.fetches
    with program_guard(model.program, model.startup):
        if callable(loss):
            return loss(y)
        if loss not in _LOSSES:
            raise OnnxError(f"set_training: there is no loss {loss!r}; {nearest(loss, _LOSSES, 'there are')}; or give a function")
        if loss == "softmax_with_cross_entropy":
            y = _before_softmax(model.program, y)
            label = fluid_data("label", [*y.shape[:-1], 1], "int64")
            return layers.mean(layers.softmax_with_cross_entropy(y, label))
        label = fluid_data("label", list(y.shape), y.dtype)
        return layers.mean(getattr(layers, loss)(y, label))


def _before_softmax(program: Program, y: Variable) -> Variable:
    maker = next((op for op in reversed(program.ops) if y.name in op.output_arg_names), None)
    if maker is None or maker.type != "softmax" or maker.attrs["axis"] not in (-1, y.ndim - 1):
        return y
    return program.global_block().var(maker.inputs["X"][0])
