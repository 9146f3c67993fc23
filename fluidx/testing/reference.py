"""A slow reference interpreter, independent of the executor: it runs operators in order and keeps every value by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..executor.context import RunContext
from ..ir import ExecutionError, OpDef, Program, TensorType, np_dtype, opdef
from ..ir.dtypes import dtype_name
from ..ir.parts import Part
from ..ops import kernels


def type_of(value: Any) -> Any:
    """The TensorType of an array, of each array in a list, or None for None."""
    if isinstance(value, list):
        return [type_of(v) for v in value]
    return None if value is None else TensorType(dtype_name(value.dtype), value.shape)


def run_op(
    definition: type[OpDef],
    ins: Sequence[Any],
    attrs: Mapping[str, Any],
    ctx: RunContext | None = None,
    present: Sequence[bool] | None = None,
    body: str = "any",
    outs: Sequence[Any] | None = None,
    part: Part | None = None,
) -> list[Any]:
    """Run one operator; return its outputs in slot order, as new arrays (None for an output that `present` leaves out).

    `ins` are arrays in slot order; `attrs` are complete. `body` is the preferred row of the op's table of kernels (`ops/kernels.py`).
    `outs` are arrays to write into. `part` describes the global value whose slices the operands are. Raises ExecutionError for an op
    without a body.
    """
    with np.errstate(all="ignore"):  # as in a run of the executor
        if outs is None:
            results = definition.infer(*map(type_of, ins), **attrs)
            results = [results] if len(definition.out_slots) == 1 else list(results)
            present = [True] * len(results) if present is None else present
            if definition.control.sized_by_values:  # the kernel allocates results, whose sizes depend on values
                return _sized(definition, ins, attrs, present)
            outs = [_empty(t) if p else None for t, p in zip(results, present, strict=True)]
        given, memory = kernels.wide(definition, np, ins, outs)
        return kernels.narrow(np, outs, _run(definition, given, attrs, ctx or RunContext(), body, memory, part))


def _run(
    definition: type[OpDef], ins: list[Any], attrs: Mapping[str, Any], ctx: RunContext, body: str, outs: list[Any], part: Part | None
) -> list[Any]:
    """Run a body; the outputs are in `outs`, unless the kernel allocates its own arrays."""
    for one in kernels.bodies(definition, natively=body == "native"):
        bound_only = one.name == "numpy" and definition.kernel is None and definition.storage.view is None
        if one.name != "any" and (one.name == body or bound_only):
            step = one.bind(np, ins, outs, attrs, ctx, part, ())
            if step is not None:
                step()
                return outs
    if definition.kernel is None:
        if definition.storage.view is None:
            raise ExecutionError(f"op {definition.name} has no kernel, view or bind")
        return [np.array(definition.storage.view(ins[0], **attrs))]
    extra: dict[str, Any] = {"ctx": ctx} if definition.takes_ctx else {}
    if definition.takes_part:
        extra["part"] = part
    if definition.takes_out:
        definition.kernel(np, *ins, out=outs[0] if len(outs) == 1 else tuple(outs), **attrs, **extra)
        return outs
    got = definition.kernel(np, *ins, **attrs, **extra)
    got = [got] if len(definition.out_slots) == 1 and not isinstance(got, tuple) else list(got)
    return [None if o is None else g for o, g in zip(outs, got, strict=True)]


def _sized(definition: type[OpDef], ins: Sequence[Any], attrs: Mapping[str, Any], present: Sequence[bool]) -> list[Any]:
    assert definition.kernel is not None
    got = definition.kernel(np, *ins, **attrs)
    return [g if p else None for g, p in zip(got if len(present) > 1 else [got], present, strict=True)]


def _empty(type_: Any) -> Any:
    if isinstance(type_, list | tuple):
        return [_empty(t) for t in type_]
    # a fill value shows where a kernel does not write
    return np.full(type_.shape, 77, np_dtype(type_.dtype))


def interpret(
    program: Program, feed: Mapping[str, Any], state: Mapping[str, Any] | None = None, ctx: RunContext | None = None
) -> dict[str, np.ndarray]:
    """Run a program; return every value by name: the feed, the state and the results of the operators.

    Operators run in the order of the program. An operator that writes a name again replaces its value. `state` has the values of
    persistable variables and is not changed. Raises ExecutionError, naming the operator, for a name without a value.

    >>> p = Program("twice")
    >>> _ = p.global_block().create_var("x", (2,), "float32", is_data=True)
    >>> _ = p.global_block().append_op("scale", {"X": "x"}, {"Out": "y"}, {"scale": 2.0})
    >>> interpret(p, {"x": np.float32([1, 2])})["y"]
    array([2., 4.], dtype=float32)
    """
    env: dict[str, Any] = {k: np.array(v) for k, v in (*(state or {}).items(), *feed.items())}
    ctx = ctx or RunContext()

    def run_block(index: int) -> None:
        for op in program.blocks[index].ops:
            definition = opdef(op.type)
            custom = definition.control.run_reference
            if custom is not None:
                custom(op, env, run_block, ctx)
                continue
            for name in op.input_arg_names:
                if name not in env:
                    raise ExecutionError(f"op {op.type} reads {name!r}, which has no value: feed it, put it into the state or compute it")
            ins = definition.arrange({slot: [env[n] for n in names] for slot, names in op.inputs.items()})
            present = [bool(op.outputs.get(s.name)) for s in definition.out_slots]
            results = run_op(definition, ins, op.attrs, ctx, present)
            for slot, value in zip(definition.out_slots, results, strict=True):
                names = op.outputs.get(slot.name, ())
                for name, v in zip(names, value if slot.many else [value], strict=False):
                    env[name] = np.asarray(v)

    run_block(0)
    return env
