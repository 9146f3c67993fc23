"""Fold products and sums per channel into the filters, the bias or the normalization before them, for inference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from ..ir.opdef import OPS
from ..ir.operator import Operator
from ..ir.program import Program
from .base import with_ops
from .batch_norm import Folded, Folder

_PRODUCT, _SUM, _NORM = "elementwise_mul", "elementwise_add", "batch_norm"


def fold_scales(program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str] = ()) -> Folded:
    """Fold products with a vector per channel, then sums, into the operators before them that have parameters per channel. `value` gives
    the value of a parameter; values in `fetched` are not changed. The program must be for inference.
    """
    values: dict[str, np.ndarray] = {}
    for kind in (_PRODUCT, _SUM):
        folder = _Scales(program, partial(_latest, values, value), fetched)
        for op in program.global_block().oplist:
            if op.type == kind:
                folder.fold_into_maker(op)
        ops = [new for op in program.global_block().oplist for new in folder.instead.get(id(op), (op,))]
        program = with_ops(program, ops)
        values = {**values, **folder.values}
    return Folded(program, values, ())


def _latest(values: Mapping[str, np.ndarray], value: Callable[[str], np.ndarray], name: str) -> np.ndarray:
    return values[name] if name in values else value(name)


class _Scales(Folder):
    def fold_into_maker(self, op: Operator) -> None:
        (x,), (y,), (out,) = op.inputs["X"], op.inputs["Y"], op.output_arg_names
        before, _ = self._only_maker(x, op)
        t = self.descs[x].type
        if before is None or id(before) in self.instead or not t.is_float or t != self.descs[out].type:
            return
        axis = self._channel_axis(before) if before.type == _NORM else 1
        by = self._by_channel(y, x, op.attrs["axis"], axis)
        if by is None or not (self._shifted(before, by, axis) if op.type == _SUM else self._scaled(before, by, axis)):
            return
        slot = "Y" if before.type == _NORM else next(iter(before.outputs))
        self.instead[id(before)] = ()
        self.instead[id(op)] = (before.replace(outputs={**before.outputs, slot: (out,)}),)

    def _by_channel(self, name: str, x: str, axis: int, channels: int) -> np.ndarray | None:
        """The value of a parameter, or of a view of one, as a vector along the channels of x; None if it has another shape."""
        makers = self.makers.get(name, [])
        if makers:
            op = self.ops[makers[0]]
            definition = OPS[op.type]
            storage = definition.storage
            if len(makers) > 1 or storage.view is None or storage.view_ctx or not self._is_parameter(op.input_arg_names[0]):
                return None
            views = definition.views_of(self.value(op.input_arg_names[0]), None, op.attrs)
            array = None if views is None else views[0]
        else:
            array = self.value(name) if self._is_parameter(name) else None
        shape = self.descs[x].type.shape
        if array is None or len(shape) <= channels or array.size != shape[channels]:
            return None
        at = channels - (axis if axis >= 0 else len(shape) - array.ndim)
        return array.reshape(-1).astype("float64") if 0 <= at < array.ndim and array.shape[at] == array.size else None

    def _shifted(self, before: Operator, by: np.ndarray, axis: int) -> bool:
        """Add `by` to the parameter that `before` adds; returns whether it adds one."""
        if before.type == _NORM:
            bias = before.inputs["Bias"][0]
        elif before.type == _SUM and self._is_bias(before, axis):
            bias = before.inputs["Y"][0]
        else:
            return False
        if not self._is_parameter(bias) or not self._read_once(bias):
            return False
        self._put(bias, self._now(bias) + by)
        return True

    def _scaled(self, before: Operator, by: np.ndarray, axis: int) -> bool:
        """Multiply the results of `before` by `by` through its parameters; returns whether it is linear in parameters."""
        if before.type == _NORM:
            own = [before.inputs[slot][0] for slot in ("Scale", "Bias")]
            if not all(self._is_parameter(n) and self._read_once(n) for n in own):
                return False
            for n in own:
                self._put(n, self._now(n) * by)
            return True
        product: Operator | None = before
        if before.type == _SUM:
            if not self._is_bias(before, axis):
                return False
            product, _ = self._only_maker(before.inputs["X"][0], before)
        if product is None or isinstance(found := self._weight(product, axis), str):
            return False
        weight, along = found
        w = self._now(weight)
        self._put(weight, w * by.reshape([-1 if k == along else 1 for k in range(w.ndim)]))
        if before.type == _SUM:
            bias = before.inputs["Y"][0]
            self._put(bias, self._now(bias) * by)
        return True
