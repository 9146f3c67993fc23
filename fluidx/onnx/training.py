"""`set_training` prepares a loaded model for training: models are written for inference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from ..ir import Operator, Program, ProgramPair, Role, Variable, flow, program_guard
from ..ir.errors import nearest
from ..ir.sizes import StandInShapes
from .errors import OnnxError
from .model import OnnxModel
from .roles import sharing
from .training_passes import ActivateBatchNorms, ActivateDropouts, FreezeParameters, KeepNeeded

Patterns = bool | str | Sequence[str]


def set_training(
    model: OnnxModel | Program,
    batch_norm: Patterns = True,
    dropout: bool | float = True,
    freeze: str | Sequence[str] = (),
    head: Callable[[OnnxModel], Variable] | None = None,
    loss: str | Callable[[Variable], Variable] | None = None,
) -> Variable | None:
    """Prepare a loaded model for training, before a loss is built on it or together with it. Returns the loss if `loss` is given.

    `batch_norm`: normalizations whose output or a parameter matches one of the patterns (True: all) use the statistics of the batch and
    update the running ones. `dropout`: Dropout nodes drop again, at the model's rate (True) or at the given one. `freeze`: parameters that
    match one of the patterns (`layer1.*`) are not trained.

    `head` is called under the guard of the model's programs and returns the new output, built on a value such as `model["flatten"]`;
    operators that only the old outputs needed are removed. `loss` is a function of the output, or one of these names, and the result is its
    mean: "softmax_with_cross_entropy" (of labels fed as "label": int64[-1, 1]), "square_error_cost" or "sigmoid_cross_entropy_with_logits"
    (of "label", shaped like the output). If the model ends in a softmax, the cross entropy takes the input of the softmax.

    Warns of trained weights that several nodes read. Raises OnnxError for a pattern without a match, and for parameters whose values are
    converted to integers before the loss, so that no gradient reaches them, as in quantized models.
    """
    program = model.program if isinstance(model, OnnxModel) else model
    if not isinstance(program, Program):
        raise OnnxError(f"set_training: expected an OnnxModel of fx.onnx.load, or a Program, got {type(model).__name__}")
    for op in program.ops:
        if op.role in (Role.BACKWARD, Role.OPTIMIZE):
            raise OnnxError(f"{program.label()} already computes gradients; call set_training before minimize")
    if not isinstance(model, OnnxModel) and (head or loss):
        raise OnnxError("set_training: head and loss need an OnnxModel of fx.onnx.load; on a Program, build them with layers")
    if head is not None and not callable(head):
        raise OnnxError(f"set_training: head must be a function of the model that returns the new output, got {head!r}")
    norms = ("*",) if batch_norm is True else () if batch_norm is False else _patterns("batch_norm", batch_norm)
    frozen = _patterns("freeze", freeze)
    if dropout is not True and not _is_rate(dropout):
        raise OnnxError(f"set_training: dropout must be True, False or a rate of at least 0 and below 1, got {dropout!r}")
    made = ActivateBatchNorms(norms).run(program)
    if dropout is not False:
        made = ActivateDropouts(None if dropout is True else float(dropout)).run(made)
    program.become(FreezeParameters(frozen).run(made))
    if isinstance(model, OnnxModel) and head is not None:
        _replace_head(model, head)
    if isinstance(model, OnnxModel):
        trained = {p.name for p in model.parameters if p.trainable}
        if shared := sharing(model.proto.graph, [n for n, own in model.trained_names.items() if own in trained]):
            warnings.warn(f"set_training: {shared}", stacklevel=2)
    if not isinstance(model, OnnxModel) or loss is None:
        return None
    result = _built_loss(model, loss)
    _check_reached(program, result)
    return result


def _is_rate(value: Any) -> bool:
    return isinstance(value, Real) and 0.0 <= float(value) < 1.0


def _patterns(option: str, patterns: Any) -> tuple[str, ...]:
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    if wrong := [p for p in found if not isinstance(p, str)]:
        raise OnnxError(f"set_training: {option} must be a pattern of names or a list of them, got {wrong[0]!r}")
    return found


# -- heads and losses ---------------------------------------------------------------------------------------------------------


def _replace_head(model: OnnxModel, head: Callable[[OnnxModel], Variable]) -> None:
    with program_guard(model.program, model.startup):
        made = head(model)
    if not isinstance(made, Variable) or made.block.program is not model.program:
        raise OnnxError(f"set_training: head must return a Variable of the model's program, got {made!r}")
    model.fetches = [made]
    kept = KeepNeeded((made.name,)).run(ProgramPair(model.program, model.startup))
    model.program.become(kept.main)
    model.startup.become(kept.startup)


_LOSSES = ("softmax_with_cross_entropy", "square_error_cost", "sigmoid_cross_entropy_with_logits")
_OTHER_NAMES = {
    **dict.fromkeys(("cross_entropy", "cross_entropy_loss", "CrossEntropyLoss", "categorical_crossentropy", "nll_loss"), _LOSSES[0]),
    **dict.fromkeys(("mse", "mse_loss", "MSELoss", "mean_squared_error", "l2_loss"), _LOSSES[1]),
    **dict.fromkeys(("bce", "bce_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "BCEWithLogitsLoss"), _LOSSES[2]),
}  # names of other frameworks


def _built_loss(model: OnnxModel, loss: str | Callable[[Variable], Variable]) -> Variable:
    from .. import layers
    from ..layers.declare import fluid_data

    if len(model.fetches) != 1:
        has = ", ".join(v.name for v in model.fetches)
        raise OnnxError(f"set_training: loss takes one output, but the model has {has}; give a head that returns one")
    (y,) = model.fetches
    with program_guard(model.program, model.startup):
        if callable(loss):
            return loss(y)
        if loss not in _LOSSES:
            near = f"did you mean {_OTHER_NAMES[loss]!r}?" if loss in _OTHER_NAMES else nearest(loss, _LOSSES, "there are")
            raise OnnxError(f"set_training: there is no loss {loss!r}; {near}; or give a function")
        if loss == "softmax_with_cross_entropy":
            y = _before_softmax(model.program, y)
            label = fluid_data("label", [*y.shape[:-1], 1], "int64")
            return layers.mean(layers.softmax_with_cross_entropy(y, label))
        label = fluid_data("label", list(y.shape), y.dtype)
        return layers.mean(getattr(layers, loss)(y, label))


def _before_softmax(program: Program, y: Variable) -> Variable:
    """The input of the softmax over the last axis that computes y; y if there is none. Below opset 13, softmax has two axes and a reshape
    around it."""
    block, sizes = program.global_block(), StandInShapes(program.global_block())
    made = _maker(program, y)
    inner = _maker(program, block.var(made.inputs["X"][0])) if made is not None and made.type == "reshape" else made
    if inner is None or inner.type != "softmax":
        return y
    x = block.var(inner.inputs["X"][0])
    if inner.attrs["axis"] not in (-1, x.ndim - 1):
        return y
    flat = _maker(program, x) if inner is not made else None
    before = block.var(flat.inputs["X"][0]) if flat is not None and flat.type == "flatten" else x
    return before if before.shape[-1:] == x.shape[-1:] and sizes.equal(before, y) else y


def _maker(program: Program, v: Variable) -> Operator | None:
    return next((op for op in reversed(program.ops) if v.name in op.output_arg_names), None)


def _check_reached(program: Program, loss: Variable) -> None:
    """Refuse parameters that the loss depends on but that no gradient reaches: they would silently keep their values."""
    from ..backward import gradients

    if not isinstance(loss, Variable) or loss.block.program is not program:
        raise OnnxError(f"set_training: loss must return a Variable of the model's program, got {loss!r}")
    block, live = program.global_block(), flow.live_ops(program, [loss.name], given=set())
    read = {n for op in live for n in flow.reads(program, op)}
    wanted = [p.name for p in program.all_parameters() if p.name in read and not p.stop_gradient]
    if not wanted:
        return
    twin = program.clone().global_block()
    found = gradients(twin.var(loss.name), [twin.var(n) for n in wanted])
    stuck = [n for n, g in zip(wanted, found, strict=True) if g is None]
    if not stuck:
        return
    behind, whole = set(stuck), ""
    for op in live:
        if behind.intersection(flow.reads(program, op)):
            behind.update(flow.writes(program, op))
            whole = whole or next((n for n in flow.writes(program, op) if not block.desc(n).type.is_float), "")
    why = f"; {whole!r}, computed from them, is {block.desc(whole).type.dtype}" if whole else ""
    some = ", ".join(stuck[:5]) + ", ..." * (len(stuck) > 5)
    raise OnnxError(
        f"set_training: no gradient reaches {len(stuck)} of {len(wanted)} parameters ({some}){why}. "
        "Train the model that it was quantized from, or name them in freeze="
    )
