"""The cost of a plan step, computed before it runs: bytes read and written on this rank, and arithmetic operations.

The number of operations follows from the op's access pattern: the points of its loops, which is the product of the sizes of all factors;
twice that for a sum of products. An op whose pattern does not name its loops, or that does more at each point, declares `flops`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...ir.constants import arrays_in
from ...ir.opdef import Effect, OpDef, opdef
from ...ir.operator import Operator
from ...ir.pattern import Pattern, Types
from ...ir.types import TensorType
from ...ops.kernels import bodies
from .rank_view import LocalOp
from .shadows import Shadows

if TYPE_CHECKING:
    from .records import Step, Value


class Cost(NamedTuple):
    """Bytes read and written (each operand counts once) and arithmetic operations. Internal buffers of kernels do not count.

    >>> Cost(8, 4, 3) + Cost(8, 4, 3)
    Cost(read=16, written=8, flops=6)
    """

    read: int = 0
    written: int = 0
    flops: int = 0

    @property
    def nbytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: object) -> Cost:
        assert isinstance(other, Cost)
        return Cost(self.read + other.read, self.written + other.written, self.flops + other.flops)


_FREE = frozenset({"view", "joined", "control", "nothing"})
_NOTHING = Cost()
_MOST = 1 << 14
_COSTS: dict[tuple, tuple[Cost, Any]] = {}


def communicates(step: Step) -> bool:
    """Does the step communicate?"""
    return step.kernel == "exchange" or opdef(step.op.type).effect in (Effect.COLLECTIVE, Effect.P2P)


def step_cost(step: Step, values: Mapping[str, Value]) -> Cost:
    """The cost of a step, in a plan with these values. Steps of sub-blocks are separate steps.

    Steps with equal operators, on operands of equal types, are looked up in a table of the process.
    """
    if step.kernel in _FREE:
        return _NOTHING
    key = _key(step, values)
    known = _COSTS.get(key)
    if known is not None:
        return known[0]
    if step.kernel == "fused":
        cost = _chain_cost(step, values)
    else:
        cost = sum([_op_cost(op, step, values) for op in step.ops], _NOTHING)
    attrs = [*[op.attrs for op in step.ops], *([] if step.here is None else [step.here.attrs])]
    if all(next(arrays_in(some.values()), None) is None for some in attrs):  # the table would keep the memory of a constant
        if len(_COSTS) >= _MOST:
            _COSTS.clear()
        # the key has the ids of attributes and types, so they are kept alive
        _COSTS[key] = cost, (attrs, [values[n].type for op in step.ops for n in _names(op) if n in values])
    return cost


def _key(step: Step, values: Mapping[str, Value]) -> tuple:
    """A key that is equal for steps of equal costs: their operators with slots and attributes, and the types of their values. A value that
    comes again is given by its number."""
    here, number = step.here, dict[str, int]()
    key: list[Any] = [step.kernel] if here is None else [step.kernel, id(here.attrs), *here.ghosts.items()]
    for op in step.ops:
        ins, outs, names = op.inputs, op.outputs, _names(op)
        key += (opdef(op.type), id(op.attrs), *ins, *outs)
        if len(ins) + len(outs) != len(names):
            key += (*map(len, ins.values()), *map(len, outs.values()))
        for n in names:
            if n in number:
                key.append(number[n])
            else:
                number[n] = -1 - len(number)
                key.append(id(values[n].type) if n in values else 0)
    return tuple(key)


def _names(op: Operator) -> tuple[str, ...]:
    return op.input_arg_names + op.output_arg_names


def thread_bytes(step: Step, values: Mapping[str, Value]) -> int:
    """The bytes of internal buffers that each thread keeps for the C kernel of a step."""
    op, here, definition = step.op, step.here, opdef(step.op.type)
    if step.kernel not in ("native", "fused") or not definition.native.memory_per_thread:
        return 0
    aside = {(s.of, s.reads): s.type for s in step.scratch}
    ghosts = () if here is None else here.ghosts.values()
    shadows = Shadows([*aside.values(), *ghosts, *(values[n].type for n in (*step.reads, *step.writes) if n in values)])

    def read(name: str) -> np.ndarray:
        return shadows.of(aside.get((name, True)) or values[name].type)

    def written(name: str) -> np.ndarray:
        # in a chain, the first results of all operators have one shape, and the first has the dtype of its operand
        dtype = values[op.input_arg_names[0]].type.dtype
        stored = [t for o in step.ops if (n := o.output_arg_names[0]) in values and (t := values[n].type).dtype == dtype]
        return shadows.of(aside.get((name, False)) or (values[name].type if name in values else stored[0]))

    outs = definition.arrange(op.outputs, definition.out_slots, written)
    body = bodies(definition, natively=True)[0]
    assert body.own is not None
    if here is None:
        return body.own(definition.arrange(op.inputs, value=read), outs, op.attrs)
    return body.own(here.inputs(op, definition, read, shadows.of), outs, here.attrs)


def _chain_cost(step: Step, values: Mapping[str, Value]) -> Cost:
    """The cost of a chain. Values that are not stored cost no bytes."""
    read, stored = ([values[n].type for n in names if n in values] for names in (step.reads, step.writes))
    first, made = opdef(step.op.type), values[step.ops[-1].output_arg_names[0]].type  # all results in a chain have one type
    flops, elementwise = 0, step.ops
    if first.native.tail:
        op, elementwise = step.op, step.ops[1:]
        ins = _types(first.flat_slots(op.inputs, first.in_slots), values)
        outs = [made, *_types(first.flat_slots(op.outputs, first.out_slots)[1:], values)]
        flops = op_flops(first, first.pattern_of(ins, outs, op.attrs), ins, outs, op.attrs)
    counted = [(said, op) for op in elementwise if callable(said := opdef(op.type).arithmetic.flops)]
    flops += sum(said([], [made], op.attrs) for said, op in counted)
    return Cost(sum(t.nbytes for t in read), sum(t.nbytes for t in stored), flops)


def _op_cost(op: Operator, step: Step, values: Mapping[str, Value]) -> Cost:
    definition, here = opdef(op.type), step.here
    in_names, out_names = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
    ins, outs = _types(in_names, values, here), _types(out_names, values)
    written = _nbytes(zip(out_names, outs, strict=True))
    if step.kernel == "fill":
        return Cost(0, written, 0)
    if communicates(step):
        return Cost(_nbytes(zip(in_names, ins, strict=True)), written, 0)
    p = definition.pattern_of(ins, outs, op.attrs if here is None else here.attrs)
    flops = op_flops(definition, p, ins, outs, op.attrs if here is None else here.attrs)
    # an embedding table or a sliced operand is read only in part: no more bytes than the result has
    some = definition.arithmetic.flops == 0
    read = _nbytes(
        (n, t, written if some or any(f in p.located for axis in p.ins[k] or () for f in axis) else None)
        for k, (n, t) in enumerate(zip(in_names, ins, strict=True))
        if k not in p.shape_only
    )
    return Cost(read, written, flops)


def _types(names: Iterable[str | None], values: Mapping[str, Value], here: LocalOp | None = None) -> list[TensorType | None]:
    ghosts = {} if here is None else here.ghosts
    return [ghosts.get(k) or (values[n].type if n is not None and n in values else None) for k, n in enumerate(names)]


def _nbytes(operands: Iterable[tuple]) -> int:
    """The bytes of operands (name, type) or (name, type, limit); each name counts once."""
    sizes = {n: min(t.nbytes, t.nbytes if not most or most[0] is None else most[0]) for n, t, *most in operands if t is not None}
    return sum(sizes.values())


def op_flops(definition: type[OpDef], p: Pattern, ins: Types, outs: Types, attrs: Mapping[str, object]) -> int:
    """The number of arithmetic operations of an op, for operands and results of these types.

    >>> import fluidx.ops
    >>> def flops(name, ins, outs, **attrs):
    ...     d, ins, outs = opdef(name), *([TensorType("float32", shape) for shape in side] for side in (ins, outs))
    ...     attrs = {**d.defaults, **attrs}
    ...     return op_flops(d, d.pattern_of(ins, outs, attrs), ins, outs, attrs)
    >>> flops("matmul", [(3, 4), (4, 5)], [(3, 5)]), flops("reduce_sum", [(3, 4)], [(3,)], dim=(1,)), flops("reshape", [(3, 4)], [(12,)])
    (120, 12, 0)
    """
    said = definition.arithmetic.flops
    if callable(said):
        return said(ins, outs, attrs)
    if said is None:
        said = 2 if _sums_products(p) else 1
    return said and said * points(p, ins, outs)


def _sums_products(p: Pattern) -> bool:
    """Does the op sum over a factor that two operands have?"""
    having = [{f for axis in axes or () for f in axis} for k, axes in enumerate(p.ins) if k not in p.shape_only]
    return any(sum(f in factors for factors in having) > 1 for f, how in p.reduced.items() if how == "sum")


def points(p: Pattern, ins: Types, outs: Types) -> int:
    """The points of an op's loops: the product of the sizes of its factors. Axes without a factor count for the largest operand only."""
    sizes: dict[str, int] = {}
    compound: dict[tuple[str, ...], int] = {}
    dots = 1
    for k, (axes, t) in enumerate(zip((*p.ins, *p.outs), (*ins, *outs), strict=True)):
        if axes is None or t is None or (k < len(p.ins) and k in p.shape_only):
            continue
        alone = 1
        for factors, d in zip(axes, t.shape, strict=True):
            if len(factors) > 1:
                compound[factors] = max(d, compound.get(factors, 1))
            elif not factors or "/" in factors[0]:  # size 1; or blocks of a factor that is an axis of another operand
                continue
            elif factors[0][0] == ".":
                alone *= d
            else:
                sizes[factors[0]] = max(d, sizes.get(factors[0], 1))
        dots = max(dots, alone) if 0 not in t.shape else 0
        if not dots:
            return 0
    return prod(sizes.values()) * dots * _outside(compound, sizes, p.sizes)


def _outside(compound: Mapping[tuple[str, ...], int], sizes: Mapping[str, int], said: Mapping[str, int]) -> int:
    """The size of the factors that appear only in axes made of several factors."""
    known = dict(sizes)
    for factors, d in compound.items():
        new = [f for f in factors if f not in known]
        if len(new) > 1 and all(said.get(f, 0) > 0 for f in new):
            known.update({f: said[f] for f in new})
        elif new:
            rest = prod(known[f] for f in factors if f in known)
            known.update({**dict.fromkeys(new, 1), new[0]: max(1, d // max(1, rest))})
    return prod(known[f] for f in known if f not in sizes)


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of costs.

    >>> total([Cost(1, 2, 3), Cost(4, 5, 6)])
    Cost(read=5, written=7, flops=9)
    """
    return Cost(*map(sum, zip(*costs, strict=True))) if costs else Cost()
