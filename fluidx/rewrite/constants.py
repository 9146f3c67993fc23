"""Constant folding: what follows from attributes, and from sizes where they are known, is computed once, when the program is rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from typing import Any

import numpy as np

from ..ir.constants import elements
from ..ir.dtypes import np_dtype
from ..ir.opdef import OPS, Effect, OpDef
from ..ir.operator import Operator
from ..ir.types import ANY, TensorType
from ..ops.kernels import bodies, narrow, wide, wide_type
from .walk import Answer, NameFacts, most_bytes

MOST_BYTES = 64 * 1024  # of a folded value and of what it is made of: attributes hold it, and every run copies it


class Constants:
    """The rule: an operator that only computes, of known values alone, becomes one that fills in its result.

    `natively`: the bodies that a run would choose, so that a folded value has the bits of a computed one. Random numbers, and what
    depends on state or a feed, are no constants; a result with a NaN is left, whose bits an attribute does not hold.
    """

    def __init__(self, walk: NameFacts, natively: bool = False, most_bytes: int = MOST_BYTES):
        self.walk, self.natively, self.most_bytes = walk, natively, most_bytes
        self.known: dict[str, Any] = {}  # of a name: its array (None where it cannot be computed), or the operator that makes it

    def __call__(self, op: Operator, definition: type[OpDef]) -> Answer:
        reads = op.input_arg_names
        if reads and reads[0] not in self.known and not definition.constant:
            return None
        if not self._follows(op, definition):
            return None
        if not reads or definition.view is not None:  # a view costs nothing, and a kernel may add up strided values in another order
            self._know(op, op)
            return None
        values = self._computed(op, definition)
        if values is None or not all(_has_bits(v) for v in values):
            return None
        for n, v in zip(op.output_arg_names, values, strict=True):
            self._know(op, v, n)
        return tuple([_filling(op, n, self.walk.type_of(n), v) for n, v in zip(op.output_arg_names, values, strict=True)])

    def note(self, op: Operator, definition: type[OpDef]) -> Answer:
        """Fold nothing, and note what is made of attributes alone."""
        if not op.input_arg_names and self._follows(op, definition):
            self._know(op, op)
        return None

    def _follows(self, op: Operator, definition: type[OpDef]) -> bool:
        """Is all known that the operator's results depend on, and small?"""
        if definition.effect is not Effect.PURE or definition.takes_ctx or definition.view_ctx or definition.native_takes_ctx:
            return False
        if definition.bind_control is not None:  # what it does is more than its result
            return False
        return (definition.constant or all(n in self.known for n in op.input_arg_names)) and self._is_small(op)

    def _know(self, op: Operator, value: Any, name: str = "") -> None:
        for n in (name,) if name else op.output_arg_names:
            if n not in self.walk.changing:
                self.known[n] = value

    def _is_small(self, op: Operator) -> bool:
        walk = self.walk
        names = (*op.input_arg_names, *op.output_arg_names)
        return walk.ask(_sizes_known, names) and walk.whole(names) and walk.ask(most_bytes, op.output_arg_names, self.most_bytes)

    def value(self, name: str) -> np.ndarray | None:
        """The value of a known name, computed when it is first asked for; None where it cannot be."""
        found = self.known[name]
        if isinstance(found, Operator):
            values = self._computed(found, OPS[found.type]) or repeat(None)
            self.known.update(zip(found.output_arg_names, values))
            found = self.known[name]
        return found

    def _computed(self, op: Operator, definition: type[OpDef]) -> list[np.ndarray] | None:
        """What the op's own kernel makes, in the order of the outputs; None where it fails, which it may do at its own time."""
        types = {n: self.walk.type_of(n) for n in (*op.input_arg_names, *op.output_arg_names)}
        if definition.constant:
            ins: dict[str, Any] = {n: np.broadcast_to(np.zeros((), np_dtype(types[n].dtype)), types[n].shape) for n in op.input_arg_names}
        else:
            ins = {n: self.value(n) for n in op.input_arg_names}
        if any(v is None for v in ins.values()):
            return None
        if definition.view is not None and (views := definition.views_of(ins[op.input_arg_names[0]], None, op.attrs)) is not None:
            return views
        outs = {n: np.empty(types[n].shape, np_dtype(types[n].dtype)) for n in op.output_arg_names}
        try:
            with np.errstate(all="ignore"):
                self._call(op, definition, ins, outs, types)
        except Exception:  # an id out of range, say: the run says so, with the line
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


def _sizes_known(types: Mapping[str, TensorType], names: tuple[str, ...]) -> bool:
    return all((t := types.get(n)) is not None and ANY not in t.shape for n in names)


def _has_bits(value: np.ndarray) -> bool:
    """Do attributes hold the value to the bit? Of NaNs they keep no sign."""
    return value.dtype.kind in "iub" or not bool(np.isnan(value.astype("float64")).any())


def _filling(op: Operator, name: str, t: TensorType, value: np.ndarray) -> Operator:
    """The operator that fills in a value, in the place of `op`: it keeps its line."""
    first = value.reshape(-1)[:1]
    attrs: dict[str, Any] = {"shape": t.shape, "dtype": t.dtype}
    if first.size and value.tobytes() == first.tobytes() * value.size and float(first.item()) == first.item():
        made, attrs = "fill_constant", {**attrs, "value": float(first.item())}
    else:
        made, attrs = "assign_value", {**attrs, "values": elements(value)}
    return op.replace(type=made, inputs={}, outputs={"Out": (name,)}, attrs=OPS[made].complete_attrs(attrs))
