"""Compute values that depend on parameters alone once, for inference: dequantized weights, scaled filters, sums of tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np

from ..ir import flow
from ..ir.opdef import OPS, OpDef
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.sub_blocks import bodies
from ..ir.unique_name import unused
from ..ir.var import Var
from .base import with_ops
from .batch_norm import Folded
from .constants import MOST_BYTES, ParameterValues
from .walk import Answer


def fold_weights(program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str] = ()) -> Folded:
    """Replace operators that read only parameters and constants by parameters with their results, computed by the kernels that a run would
    use. `value` gives the value of a parameter. Matrices that products read transposed, and nothing else, are stored as the products
    multiply them. The program must be for inference.

    These stay: operators whose result is larger than the parameters that it is computed from, views of parameters, which cost nothing,
    values in `fetched`, random numbers, and values computed from parameters that the program writes.
    """
    weights = _Weights(program, value, fetched)
    ops = weights.left()
    if not weights.values:
        return Folded(program, {}, ())
    new = program.copy()
    new.global_block().descs.update(weights.declared)
    return Folded(with_ops(new, ops, drop_state=weights.parameters.difference(weights.needed, fetched)), weights.values, ())


class _Weights(ParameterValues):
    """The new parameters, and the operators that stay."""

    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str]):
        super().__init__(program, value, fetched, natively=True)
        self.sources = {n: frozenset((n,)) for n in self.parameters}  # the parameters that a value is computed from
        self.known: set[int] = set()  # the operators whose results are computed from parameters alone, by id
        self.needed: set[str] = set()  # the names that the operators read that stay
        self.turned: dict[str, str] = {}  # new parameters, by the names of those that were transposed
        self.declared: dict[str, Var] = {}  # the new parameters
        self.values: dict[str, np.ndarray] = {}  # of the new parameters
        self.walk.run(self.ops, [self._learn])

    def _learn(self, op: Operator, definition: type[OpDef]) -> Answer:
        outs = op.output_arg_names
        if not self.follows(op, definition) or not set(outs).isdisjoint(self.fetched):
            return None
        source = frozenset[str]().union(*(self.sources.get(n, ()) for n in op.input_arg_names))
        if self._size(outs) <= max(self._size(source), MOST_BYTES):
            self.constants.know(op, op)
            self.known.add(id(op))
            self.sources.update(dict.fromkeys(outs, source))
        return None

    def _size(self, names: Iterable[str]) -> int:
        return sum(self.descs[n].type.nbytes for n in names)

    def left(self) -> list[Operator]:
        """The operators that stay; what they read of others is in `values`."""
        stay: list[Operator] = []
        for op in reversed(self.ops):
            made = self._made(op, self.needed.intersection(op.output_arg_names)) if id(op) in self.known else None
            if made is not None:
                self.values.update(made)
                self.declared.update({n: self.descs[n].changed(persistable=True, stop_gradient=True) for n in made})
                continue
            if op.type == "matmul" and (y := self._turned(op)) is not None:
                op = op.replace(inputs={**op.inputs, "Y": (y,)}, attrs={**op.attrs, "transpose_y": False})
            stay.append(op)
            self.needed.update(flow.reads(self.program, op), *(body.results(op) for body in bodies(op)))
        stay.reverse()
        return stay

    def _made(self, op: Operator, names: Collection[str]) -> dict[str, np.ndarray] | None:
        """The values of these results of an operator; None if it has to stay."""
        if not names:
            return {}
        if OPS[op.type].storage.view is not None or not any(self.sources[n] for n in names):
            return None
        made = {n: v for n in names if (v := self.constants.value(n)) is not None}
        return made if len(made) == len(names) else None

    def _turned(self, op: Operator) -> str | None:
        """The new parameter that a product multiplies by, whose rows are in one piece; None if its own is so, or if others read that."""
        (y,), turned = op.inputs["Y"], op.attrs["transpose_y"]
        alike = {(o.type, o.inputs.get("Y"), o.attrs.get("transpose_y")) for o in (self.ops[k] for k in self.uses[y])}
        if alike != {(op.type, (y,), turned)} or y in (*op.inputs["X"], *self.fetched) or not self.sources.get(y):
            return None
        array = self.constants.value(y) if y not in self.turned and self.descs[y].type.ndim == 2 else None
        read = array if array is None or not turned else array.T
        if read is not None and read.strides[1] != read.itemsize:
            name, t = unused(f"{y}.turned", {*self.descs, *self.declared}, "_".__mul__), self.descs[y].type
            self.declared[name] = Var(name, t.with_shape(read.shape), persistable=True, stop_gradient=True)
            self.values[name], self.turned[y] = np.ascontiguousarray(read), name
        return self.turned.get(y)
