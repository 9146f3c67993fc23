"""Constant folding: values that depend on attributes and known sizes alone are computed once, when the program is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import repeat
from typing import Any

import numpy as np

from ..ir import flow
from ..ir.constants import elements
from ..ir.dtypes import np_dtype
from ..ir.opdef import OPS, Effect, OpDef
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.types import ANY, TensorType
from ..ops.kernels import bodies, narrow, wide, wide_type
from .walk import Answer, NameFacts, most_bytes

MOST_BYTES = 64 * 1024  # the limit for a folded value and its operands: attributes hold the value, and every run copies it


class Constants:
    """The rule: an operator without effects, all of whose operands are known, becomes an operator that fills in its result. `natively`: use
    the C kernels that a run would use, so that a folded value has the bits of a computed one. Random numbers and values that depend on
    state or a feed are not constants. A result with a NaN is not folded, because an attribute does not keep the bits of a NaN.
    """

    def __init__(self, walk: NameFacts, natively: bool = False, most_bytes: int = MOST_BYTES):
        self.walk, self.natively, self.most_bytes = walk, natively, most_bytes
        self.known: dict[str, Any] = {}  # by name: the array, None if it cannot be computed, or the operator that makes it

    def __call__(self, op: Operator, definition: type[OpDef]) -> Answer:
        reads = op.input_arg_names
        if reads and reads[0] not in self.known and not definition.rewrite.constant:
            return None
        if not self.follows(op, definition):
            return None
        if not reads or definition.storage.view is not None:  # a view is free, and a kernel may add up strided values in another order
            self.know(op, op)
            return None
        values = self._computed(op, definition)
        if values is None or not all(_has_bits(v) for v in values):
            return None
        for n, v in zip(op.output_arg_names, values, strict=True):
            self.know(op, v, n)
        return tuple([_filling(op, n, self.walk.type_of(n), v) for n, v in zip(op.output_arg_names, values, strict=True)])

    def note(self, op: Operator, definition: type[OpDef]) -> Answer:
        """Fold nothing, but remember values that depend on attributes alone."""
        if not op.input_arg_names and self.follows(op, definition):
            self.know(op, op)
        return None

    def follows(self, op: Operator, definition: type[OpDef]) -> bool:
        """Are all values that the operator's results depend on known and small?"""
        if definition.effect is not Effect.PURE or definition.takes_ctx or definition.storage.view_ctx or definition.native_takes_ctx:
            return False
        if definition.control.bind is not None:  # it does more than compute its result
            return False
        return (definition.rewrite.constant or all(n in self.known for n in op.input_arg_names)) and self._is_small(op)

    def know(self, op: Operator, value: Any, name: str = "") -> None:
        """Remember the value of the operator's results, or of one of them: an array, or the operator that makes it."""
        for n in (name,) if name else op.output_arg_names:
            if n not in self.walk.changing:
                self.known[n] = value

    def _is_small(self, op: Operator) -> bool:
        walk = self.walk
        names = (*op.input_arg_names, *op.output_arg_names)
        return walk.ask(_sizes_known, names) and walk.whole(names) and walk.ask(most_bytes, op.output_arg_names, self.most_bytes)

    def value(self, name: str) -> np.ndarray | None:
        """The value of a known name, computed at the first call; None if it cannot be computed."""
        found = self.known[name]
        if isinstance(found, Operator):
            values = self._computed(found, OPS[found.type]) or repeat(None)
            self.known.update(zip(found.output_arg_names, values))
            found = self.known[name]
        return found

    def _computed(self, op: Operator, definition: type[OpDef]) -> list[np.ndarray] | None:
        """The results of the op's kernel, in the order of the outputs; None if the kernel raises: then the run will raise the error."""
        types = {n: self.walk.type_of(n) for n in (*op.input_arg_names, *op.output_arg_names)}
        if definition.rewrite.constant:
            ins: dict[str, Any] = {n: np.broadcast_to(np.zeros((), np_dtype(types[n].dtype)), types[n].shape) for n in op.input_arg_names}
        else:
            ins = {n: self.value(n) for n in op.input_arg_names}
        if any(v is None for v in ins.values()):
            return None
        if definition.storage.view is not None and (views := definition.views_of(ins[op.input_arg_names[0]], None, op.attrs)) is not None:
            return views
        outs = {n: np.empty(types[n].shape, np_dtype(types[n].dtype)) for n in op.output_arg_names}
        try:
            with np.errstate(all="ignore"):
                self._call(op, definition, ins, outs, types)
        except Exception:  # such as an index out of range: the run reports it, with the line
            return None
        return [outs[n] for n in op.output_arg_names]

    def _call(self, op: Operator, definition: type[OpDef], ins: dict[str, Any], outs: dict[str, Any], types: dict[str, TensorType]) -> None:
        inputs, outputs = definition.operands(op, ins.__getitem__, outs.__getitem__)
        args, results = wide(definition, np, inputs, outputs)
        widens = definition.widens("cpu", [types[n] for n in op.output_arg_names])

        def seen(name: str) -> TensorType:
            return wide_type(types[name]) if widens else types[name]

        for body in bodies(definition, "cpu", self.natively):
            if body.covers(args, results, op.attrs, None, None):
                asked = () if body.scratch is None else body.scratch(*definition.operands(op, seen, seen), op.attrs)
                scratch = [np.empty(t.shape, np_dtype(t.dtype)) for t in asked]
                if (step := body.bind(np, args, results, op.attrs, None, None, scratch)) is not None:
                    step()
                    narrow(np, outputs, results)
                    return


class ParameterValues:
    """The values of block 0 that depend only on its parameters, which inference does not change, and on constants; `value` gives the value
    of a parameter."""

    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str], natively: bool):
        self.program, self.fetched, block = program, fetched, program.global_block()
        self.ops, self.descs = block.oplist, block.descs
        self.walk = NameFacts(program, self.ops, {n: d.type for n, d in self.descs.items()}, fetched, ())
        self.constants = Constants(self.walk, natively, most_bytes=1 << 62)
        self.uses, changing = flow.uses(program), self.walk.changing
        self.parameters = {n for n, d in self.descs.items() if d.persistable and n in self.uses and n not in changing}
        self.constants.known.update({n: value(n) for n in self.parameters})

    def follows(self, op: Operator, definition: type[OpDef]) -> bool:
        """Do all results of an operator depend on parameters and constants only, and does each keep its value?"""
        return self.constants.follows(op, definition) and self.walk.changing.isdisjoint(op.output_arg_names)


def _sizes_known(types: Mapping[str, TensorType], names: tuple[str, ...]) -> bool:
    return all((t := types.get(n)) is not None and ANY not in t.shape for n in names)


def _has_bits(value: np.ndarray) -> bool:
    """Can attributes hold every bit of the value? They lose the sign of NaNs."""
    return value.dtype.kind in "iub" or not bool(np.isnan(value.astype("float64")).any())


def _filling(op: Operator, name: str, t: TensorType, value: np.ndarray) -> Operator:
    """The operator that fills in a value in place of `op`; it keeps the source line of `op`."""
    first = value.reshape(-1)[:1]
    attrs: dict[str, Any] = {"shape": t.shape, "dtype": t.dtype}
    if first.size and value.tobytes() == first.tobytes() * value.size and float(first.item()) == first.item():
        made, attrs = "fill_constant", {**attrs, "value": float(first.item())}
    else:
        made, attrs = "assign_value", {**attrs, "values": elements(value)}
    return op.replace(type=made, inputs={}, outputs={"Out": (name,)}, attrs=OPS[made].complete_attrs(attrs))
