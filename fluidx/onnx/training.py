"""`set_training` prepares a loaded model for training: models are written for inference."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

from ..ir import Program, ProgramPair, Role, Variable, flow, program_guard
from .adapter_files import add_adapters
from .errors import OnnxError
from .half_precision import WidenHalves, has_halves
from .lora import Lora
from .losses import Loss, scores_of
from .model import OnnxModel
from .roles import sharing
from .training_passes import ActivateBatchNorms, ActivateDropouts, FreezeParameters, KeepNeeded

Patterns = bool | str | Sequence[str]


def set_training(
    model: OnnxModel | Program,
    batch_norm: Patterns | None = None,
    dropout: bool | float = True,
    freeze: str | Sequence[str] = (),
    head: Callable[[OnnxModel], Variable] | None = None,
    loss: str | Loss | Callable[[Variable], Variable] | None = None,
    lora: Lora | str | os.PathLike | None = None,
    startup: Program | None = None,
    scores: str | None = None,
) -> Variable | None:
    """Prepare a loaded model for training, before a loss is built on it or together with it. Returns the loss if `loss` is given.

    `batch_norm`: normalizations whose output or a parameter matches one of the patterns (True: all, the default without `lora`) use the
    statistics of the batch and update the running ones. `dropout`: Dropout nodes drop again, at the model's rate (True) or at the given
    one. `freeze`: parameters that match one of the patterns (`layer1.*`) are not trained.

    `head` is called under the guard of the model's programs and returns the new output, built on a value such as `model["flatten"]`;
    operators that only the old outputs needed are removed. `loss` is a function of the output, the name of a `Loss`, or a `Loss` with
    options, and takes labels that are fed as "label": "softmax_with_cross_entropy" (int64[-1, 1]), "token_classification",
    "causal_language_model", "segmentation", "sigmoid_cross_entropy_with_logits", "square_error_cost", "absolute_error" or "huber_loss".

    `scores` names the output, or another value, that the loss takes; by default the only output, or the only one of floats.

    `lora`: products with weights get low-rank adapters, and only these, a new head and `Lora.also_train` are trained. A folder that
    `save_adapters` or PEFT wrote gives adapters with its values. Of a Program, `startup` is its startup program.

    A model in float16 or bfloat16 becomes a program of float32, but with `lora` its frozen weights keep their dtype;
    `model.in_own_precision(optimizer)` lets its products work in 16 bits.

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
    batch_norm = lora is None if batch_norm is None else batch_norm
    norms = ("*",) if batch_norm is True else () if batch_norm is False else _patterns("batch_norm", batch_norm)
    frozen = _patterns("freeze", freeze)
    if dropout is not True and not _is_rate(dropout):
        raise OnnxError(f"set_training: dropout must be True, False or a rate of at least 0 and below 1, got {dropout!r}")
    if lora is None:
        _widen(program, model.startup if isinstance(model, OnnxModel) else startup)
    made = ActivateBatchNorms(norms).run(program)
    if dropout is not False:
        made = ActivateDropouts(None if dropout is True else float(dropout)).run(made)
    program.become(FreezeParameters(frozen).run(made))
    before = {p.name for p in program.all_parameters()}
    if isinstance(model, OnnxModel) and head is not None:
        _replace_head(model, head)
    if lora is not None:
        _adapt(model, startup, lora, [p.name for p in program.all_parameters() if p.name not in before])
    if isinstance(model, OnnxModel):
        trained = {p.name for p in model.parameters if p.trainable}
        if shared := sharing(model.proto.graph, [n for n, own in model.trained_names.items() if own in trained]):
            warnings.warn(f"set_training: {shared}", stacklevel=2)
    if not isinstance(model, OnnxModel) or loss is None:
        return None
    result = _built_loss(model, loss, scores)
    _check_reached(program, result)
    return result


def _widen(program: Program, startup: Program | None) -> None:
    """Make parameters in 16 bits float32, in place."""
    if startup is not None and has_halves(program):
        made = WidenHalves().run(ProgramPair(program, startup))
        program.become(made.main)
        startup.become(made.startup)


def _is_rate(value: Any) -> bool:
    return isinstance(value, Real) and 0.0 <= float(value) < 1.0


def _patterns(option: str, patterns: Any) -> tuple[str, ...]:
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    if wrong := [p for p in found if not isinstance(p, str)]:
        raise OnnxError(f"set_training: {option} must be a pattern of names or a list of them, got {wrong[0]!r}")
    return found


def _adapt(model: OnnxModel | Program, startup: Program | None, lora: Any, new: Sequence[str]) -> None:
    """Add adapters; `new` are the parameters of a new head."""
    if not isinstance(lora, (Lora, str, os.PathLike)):
        raise OnnxError(f"set_training: lora must be fx.onnx.Lora(rank=8, targets=...) or a folder of adapters, got {lora!r}")
    if isinstance(model, OnnxModel):
        add_adapters(ProgramPair(model.program, model.startup), lora, model.parameter_modules, new)
    elif isinstance(startup, Program):
        add_adapters(ProgramPair(model, startup), lora, {}, new)
    else:
        raise OnnxError("set_training: adapters of a Program need startup=, its startup program, which fills them")


# -- heads and losses ---------------------------------------------------------------------------------------------------------


def _replace_head(model: OnnxModel, head: Callable[[OnnxModel], Variable]) -> None:
    with program_guard(model.program, model.startup):
        made = head(model)
    if not isinstance(made, Variable) or made.block.program is not model.program:
        raise OnnxError(f"set_training: head must return a Variable of the model's program, got {made!r}")
    model.fetches, model.outputs = [made], {made.name: made}
    kept = KeepNeeded((made.name,)).run(ProgramPair(model.program, model.startup))
    model.program.become(kept.main)
    model.startup.become(kept.startup)


def _built_loss(model: OnnxModel, loss: str | Loss | Callable[[Variable], Variable], scores: str | None) -> Variable:
    y = scores_of(model, scores)
    with program_guard(model.program, model.startup):
        if callable(loss):
            return loss(y)
        return (loss if isinstance(loss, Loss) else Loss(loss)).build(model.program, y)


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
