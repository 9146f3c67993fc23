"""Fold batch normalization with fixed statistics into the filters before it, for inference: it is a product and a sum per channel."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir import flow
from ..ir.dtypes import np_dtype
from ..ir.errors import ProgramError
from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator, Role
from ..ir.program import Program
from .base import with_ops

_TRAINS = (Role.BACKWARD, Role.OPTIMIZE)


@dataclass(frozen=True)
class Folded:
    """The result of folding: the program, the new values of its parameters, and the reasons for operators that were not folded."""

    program: Program
    values: dict[str, np.ndarray]
    log: tuple[str, ...]


def fold_batch_norms(program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str] = ()) -> Folded:
    """Fold every batch_norm that follows an operator linear in a parameter (a convolution, a product), with or without a bias. `value`
    gives the value of a parameter. If there is no bias, the bias of the normalization becomes one. Values in `fetched` are not changed.
    Raises ProgramError for a program that trains.
    """
    if (found := what_trains(program)) is not None:
        op, what = found
        where = f"\n  written at {op.site}" if op.site else ""
        raise ProgramError(
            f"{program.label()} trains: op {op.type} {what}; filters can be rescaled for inference only, in "
            f"program.clone(for_test=True)\n  in {op.to_string()}{where}"
        )
    folder = Folder(program, value, fetched)
    for op in program.global_block().oplist:
        if op.type == "batch_norm":
            reason = folder.fold(op)
            if reason:
                folder.log.append(f"kept {op.to_string()}: {reason}")
    ops = [new for op in program.global_block().oplist for new in folder.instead.get(id(op), (op,))]
    new = with_ops(program, ops, drop_state=folder.freed)
    return Folded(new, folder.values, tuple(folder.log))


def what_trains(program: Program) -> tuple[Operator, str] | None:
    """The first operator that only a training program has, and what it does; None if there is none."""
    for block in program.blocks:
        for op in block.oplist:
            if op.role in _TRAINS:
                return op, "computes gradients" if op.role is Role.BACKWARD else "updates parameters"
            if op.type == "batch_norm" and not (op.attrs["is_test"] or op.attrs["use_global_stats"]):
                return op, "takes statistics over the batch"
    return None


class Folder:
    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str]):
        self.program, self.value, self.fetched = program, value, fetched
        self.descs = program.global_block().descs
        ops = program.global_block().oplist
        self.uses, self.makers = flow.uses(program), flow.definitions(program)
        self.ops = ops
        self.values: dict[str, np.ndarray] = {}
        self.instead: dict[int, tuple[Operator, ...]] = {}  # replacements, by the id of the replaced operator
        self.freed: set[str] = set()  # parameters that no operator reads any more
        self.log: list[str] = []

    def fold(self, norm: Operator) -> str:
        """Fold one normalization; returns the reason if it cannot be folded."""
        scale, shift, mean, variance = (norm.inputs[slot][0] for slot in ("Scale", "Bias", "Mean", "Variance"))
        if made := [n for n in (scale, shift, mean, variance) if n in self.makers and n not in norm.output_arg_names]:
            return f"%{made[0]} is computed"
        if read := [n for n in norm.output_arg_names[1:] if n not in (mean, variance) and self.uses.get(n)]:
            return f"its statistics %{read[0]} are read"
        (x,) = norm.inputs["X"]
        before, reason = self._only_maker(x, norm)
        if before is None:
            return reason
        axis, add = self._channel_axis(norm), None
        if before.type == "elementwise_add":
            add = before
            if not self._is_bias(add, axis):
                return f"%{add.inputs['Y'][0]} is not a per-channel bias that only this operator reads"
            before, reason = self._only_maker(add.inputs["X"][0], add)
            if before is None:
                return reason
        found = self._weight(before, axis)
        if isinstance(found, str):
            return found
        weight, along = found
        bias = add.inputs["Y"][0] if add is not None else shift
        if add is None and not self._read_once(shift):
            return f"%{shift} is read elsewhere"
        if self.descs[bias].type.dtype != self.descs[x].type.dtype:
            return f"%{bias} is {self.descs[bias].type}, which cannot be added to %{x}, {self.descs[x].type}"
        if any(self.descs[n].placement for n in (weight, bias, scale, shift, mean, variance)):
            return "its parameters are sharded over several ranks"
        rate = self.value(scale).astype("float64") / np.sqrt(self.value(variance).astype("float64") + norm.attrs["epsilon"])
        old = self._now(bias) if add is not None else 0.0
        w = self._now(weight)
        self._put(weight, w * rate.reshape([-1 if k == along else 1 for k in range(w.ndim)]))
        self._put(bias, (old - self.value(mean)) * rate + self.value(shift))
        if add is None:
            attrs = opdef("elementwise_add").complete_attrs({"axis": axis})
            ins, outs = {"X": (x,), "Y": (shift,)}, {"Out": norm.outputs["Y"]}
            self.instead[id(norm)] = (norm.replace(type="elementwise_add", inputs=ins, outputs=outs, attrs=attrs),)
        else:
            self.instead[id(add)] = ()
            self.instead[id(norm)] = (add.replace(outputs={"Out": norm.outputs["Y"]}),)
        self.freed.update({scale, shift, mean, variance} - {bias})
        return ""

    def _now(self, name: str) -> Any:
        return self.values[name] if name in self.values else self.value(name).astype("float64")

    def _put(self, name: str, value: np.ndarray) -> None:
        self.values[name] = value.astype(np_dtype(self.descs[name].type.dtype))

    def _only_maker(self, name: str, reader: Operator) -> tuple[Operator | None, str]:
        """The operator that makes a value which only `reader` reads; or None and the reason."""
        d, made = self.descs.get(name), self.makers.get(name, [])
        if len(made) != 1 or d is None or d.persistable:
            return None, f"%{name} is made by {'several operators' if made else 'no operator'}"
        if name in self.fetched:
            return None, f"%{name} is fetched"
        if len(self.uses[name]) > 1 or reader.input_arg_names.count(name) > 1:
            return None, f"%{name} is read elsewhere"
        return self.ops[made[0]], ""

    def _channel_axis(self, norm: Operator) -> int:
        ndim = self.descs[norm.inputs["X"][0]].type.ndim
        return ndim - 1 if norm.attrs["data_layout"] == "NHWC" or ndim == 2 else 1

    def _is_bias(self, add: Operator, axis: int) -> bool:
        (x,), (b,) = add.inputs["X"], add.inputs["Y"]
        vector = self._is_parameter(b) and self.descs[b].type.ndim == 1 and self._read_once(b)
        at = add.attrs["axis"] if add.attrs["axis"] >= 0 else self.descs[x].type.ndim - 1
        return vector and at == axis

    def _is_parameter(self, name: str) -> bool:
        return (d := self.descs.get(name)) is not None and d.persistable and name not in self.makers

    def _read_once(self, name: str) -> bool:
        return len(self.uses.get(name, ())) == 1

    def _weight(self, op: Operator, axis: int) -> tuple[str, int] | str:
        """The parameter in which the results of `op` are linear, and its axis that becomes axis `axis` of the results, by the access
        pattern; or the reason why there is none."""
        definition = opdef(op.type)
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        if definition.effect is not Effect.PURE or len(outs) != 1:
            return f"op {op.type} is not a plain product"
        types = [[None if n is None else self.descs[n].type for n in names] for names in (ins, outs)]
        p = definition.pattern_of(types[0], types[1], op.attrs)
        channels = p.outs[0][axis] if p.outs[0] is not None else ()
        for (k, *rest), _ in p.linear:
            name, axes = ins[k], p.ins[k]
            if rest or name is None or axes is None or not self._is_parameter(name) or not channels or axes.count(channels) != 1:
                continue
            return (name, axes.index(channels)) if self._read_once(name) else f"%{name} is read elsewhere"
        return f"op {op.type} has no parameter with an axis for the channels"
