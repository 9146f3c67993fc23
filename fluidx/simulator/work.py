"""The work of a step: what decides how long it takes, whatever the values are called. Steps with equal work share one entry of a table."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from math import log
from typing import NamedTuple

from ..executor.plan.cost import communicates, step_cost
from ..executor.plan.records import Step, Value
from ..ir.attributes import attrs_key
from ..ir.opdef import OPS, opdef
from ..ir.types import TensorType

FREE = frozenset(("view", "joined", "nothing"))  # kinds of steps without a call
_MOST = 1 << 16  # attributes that are kept


class StepWork(NamedTuple):
    """The work of one step. `ops` are the types of its operators, each once, as profiles show them; `types` are those of the operands and
    results of its first operator."""

    ops: str
    kernel: str
    types: tuple[TensorType, ...]
    flops: int
    nbytes: int
    copied: int = 0  # bytes of operands and results that are copied to and from scratch
    widened: int = 0  # bytes of such copies that convert 16-bit floats, which a CPU computes in float32
    on_host: bool = False
    moves: bool = False  # between device memory and host memory

    @property
    def first(self) -> str:
        """The type of the first operator."""
        return self.ops.partition(" + ")[0]

    @property
    def product(self) -> bool:
        """Is it a sum of products, such as a convolution, that runs at the speed of matrix products?"""
        return is_product(self.first)

    @property
    def kind(self) -> str:
        """What else is like it: products of matrices, convolutions, attention, chains of elementwise operators, or what only moves its
        values on the CPU; "" for others."""
        if self.product:
            return OPS[self.first].arithmetic.sums_products
        if self.kernel == "fused":
            return "fused"
        return "copy" if self.kernel == "native" and not self.flops else ""

    @property
    def elementwise(self) -> bool:
        """Are its first operands of one shape, so that only their number of elements counts?"""
        return not self.product and all(t.shape == self.types[0].shape for t in self.types[:2])

    @property
    def window(self) -> tuple[int, ...]:
        """What tells of the algorithm of a convolution: the sizes of its filter, and its operations for each place of the image, rounded to
        a power of 2, which follow from strides and from the gradients that it has."""
        if len(self.types) < 2 or len(self.types[0].shape) < 2:
            return ()
        x, filters = self.types[:2]
        places = self.flops * x.shape[1] / max(1, x.numel * filters.numel)
        return *filters.shape[2:], round(log(max(places, 1e-3)) / log(2))

    @property
    def key(self) -> tuple:
        """What a profile says of it."""
        return self.ops, self.kernel, self.types, self.flops, self.nbytes

    @property
    def sizes(self) -> tuple[float, ...]:
        """Logarithms of its operations and bytes, and, unless it is elementwise, of the axes of its first two types; of a convolution
        also of the places that its filters have for each place of the image."""
        sizes: list[float] = [self.flops, self.nbytes]
        shaped = self.types[:2]
        if not self.elementwise:
            for t in shaped:
                sizes += (t.numel, *t.shape) if len(t.shape) == 4 else (t.numel, t.shape[-1] if t.shape else 1)
            if self.kind == "convolution" and len(shaped) == 2 and len(shaped[0].shape) == 4:
                sizes.append(self.flops * shaped[0].shape[1] / max(1, shaped[0].numel * shaped[1].numel))
        return tuple([log(max(n, 1e-3)) for n in sizes])

    @property
    def dtype(self) -> str:
        """The dtype of the first operand of floats, or of the first operand."""
        return next((t.dtype for t in self.types if t.is_float), self.types[0].dtype if self.types else "float32")


def is_product(op_type: str) -> bool:
    """Does an operator run at the speed of matrix products?

    >>> is_product("conv2d_grad"), is_product("mul"), is_product("relu")
    (True, True, False)
    """
    return op_type in OPS and bool(OPS[op_type].arithmetic.sums_products)


def work_of(step: Step, values: Mapping[str, Value]) -> StepWork:
    """The work of a step that computes, in a plan with these values.

    >>> import fluidx as fx
    >>> from fluidx.executor.plan.dry_run import dry_plan
    >>> main = fx.Program("rows")
    >>> with fx.program_guard(main):
    ...     _ = fx.layers.softmax(fx.data("x", [-1, 4], "float32"))
    >>> planned = dry_plan(main, batch=10)
    >>> work_of(planned.steps[0], planned.values)[2:5]
    ((f32[10,4], f32[10,4]), 200, 320)
    """
    cost, op = step_cost(step, values), step.op
    names = (*op.input_arg_names, *op.output_arg_names)
    types = tuple([values[n].type for n in names if n in values])
    ops = " + ".join(dict.fromkeys([o.type for o in step.ops]))
    copied = [0, 0]
    for s in step.scratch:
        if s.of:
            copied[s.type.dtype != values[s.of].type.dtype] += s.type.nbytes + values[s.of].type.nbytes
    transfers = bool(opdef(op.type).storage.copies_to)
    return StepWork(ops, step.kernel, types, cost.flops, cost.nbytes, copied[0], copied[1], step.on_host, transfers)


def step_key(step: Step, values: Mapping[str, Value]) -> tuple:
    """A key that steps of equal work have in common: kernel, types of the operators, attributes, and types of operands and results."""
    ops, here = step.ops, step.here
    op = ops[0]
    head: object
    if len(ops) == 1:
        names, head = (*op.input_arg_names, *op.output_arg_names), op.type
    else:
        names, head = tuple([n for o in ops for n in (*o.input_arg_names, *o.output_arg_names)]), tuple([o.type for o in ops])
    types = tuple([((t := v.type).dtype, t.shape) for n in names if (v := values.get(n)) is not None])
    aside = tuple([(s.type.dtype, s.type.shape) for s in step.scratch if s.of]) if step.scratch else ()
    return step.kernel, head, _number(op.attrs if here is None else here.attrs), types, aside, step.on_host


_seen: dict[int, tuple[Mapping, int]] = {}  # by the id of attributes, which are kept alive
_texts: dict[str, int] = {}
_next = count()


def _number(attrs: Mapping) -> int:
    """A number that equal attributes have in common. Numbers are never used again, also after the tables were cleared."""
    known = _seen.get(id(attrs))
    if known is None:
        if len(_seen) >= _MOST:
            _seen.clear()
            _texts.clear()
        text = attrs_key(attrs)
        if text not in _texts:
            _texts[text] = next(_next)
        known = _seen[id(attrs)] = attrs, _texts[text]
    return known[1]


__all__ = ["FREE", "StepWork", "communicates", "is_product", "step_key", "work_of"]
