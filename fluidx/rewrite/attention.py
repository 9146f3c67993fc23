"""JoinAttention: replace attention written as products and a softmax by one operator, which does not keep the scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..ir.builder import Builder
from ..ir.opdef import opdef
from ..ir.operator import Operator
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Program
from .formula import Form, name, number, of
from .join import Joiner
from .region import Region, Use
from .values import Chain, ChainValues

_PRODUCT, _SOFTMAX, _TURN, _SHAPE = "matmul", "softmax", "transpose", "reshape"
_SCORES = Form(lambda scores, mask, *, factor: factor * scores + mask, given=("scores",), neutral={"mask": 0.0})
_SCALED = Form(lambda x, *, factor: factor * x, given=("x",))
_NEVER = -1e9  # added to the scores of hidden positions: its exp is 0 beside any score that is not that large


@named
@dataclass(frozen=True, repr=False)
class JoinAttention(Pass):
    """Replace the product of queries and keys, softmax along its last axis, and the product with values by scaled_dot_product_attention.

    Numbers that multiply queries, keys or scores become its scale; a value that is added to the scores becomes its mask. A mask that is a
    known constant, 0 up to the diagonal and -1e9 or less above it, becomes `causal`. The chain's gradient operators become the new
    operator's gradient. Results differ by rounding; a row whose mask is all -infinity gives zeros where softmax gives NaN. Weights that are
    set to 0 where they are NaN, as exporters write it for such rows, are joined too; then NaN in queries or keys stays NaN.

    The pass leaves a chain as it is if another operator, a fetch or a feed uses a value inside it, if ranks hold parts of its values, if
    the softmax is along another axis, if dropout is applied to the weights, if operands broadcast other than by heads, or if a value inside
    it has gradients from other operators.
    """

    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        joiner = Joiner(program, job)
        for k, op in enumerate(joiner.ops):
            if op.type == _SOFTMAX and not joiner.taken(k) and (reason := _joined(joiner, k, op)):
                job.log.append(f"{type(self).__name__} kept {op.to_string()}: {reason}")
        return joiner.program()


@dataclass(frozen=True)
class _Operand:
    """A value before it was multiplied with numbers, and the operators that multiplied it; `axis` is the permutation that it needs."""

    name: str
    factor: float = 1.0
    ops: tuple[int, ...] = ()
    axis: tuple[int, ...] = ()


def _joined(joiner: Joiner, k: int, softmax: Operator) -> str:
    """Join the products around one softmax; returns the reason if it cannot. The reason is empty if no product reads the softmax."""
    (x,), (w,), values = softmax.inputs["X"], softmax.outputs["Out"], joiner.values
    w, without_nan = _without_nan(values, w)
    after = [j for j in values.uses.get(w, ()) if values.ops[j].type == _PRODUCT and values.ops[j].inputs["X"] == (w,)]
    after = [j for j in after if values.ops[j].role is softmax.role and not values.ops[j].attrs["transpose_x"]]
    if not after:
        return ""
    weighted = values.ops[after[0]]
    if changing := [n for n in (x, w) if n in values.walk.changing]:
        return f"%{changing[0]} {values.why_needed(changing[0])}"
    if softmax.attrs["axis"] not in (-1, len(values.shape(x)) - 1):
        return f"the softmax is along axis {softmax.attrs['axis']}, not along the last one"
    if weighted.attrs != opdef(_PRODUCT).defaults:
        return f"%{weighted.output_arg_names[0]} is not the product of the untransposed weights and values"
    reason = f"%{x} is not a product of queries and keys, scaled and masked"
    for j in _products_behind(values, x):
        (s,) = values.ops[j].output_arg_names
        chain = Chain(values, s, {s: values.shape(s)})
        found = _SCORES.match(chain.known[x].formula, {"scores": s}) if x in chain.known else None
        if found is not None and chain.known[x].shape == chain.like:
            ops = {*chain.operators(x), k, *without_nan, after[0]}
            return _join(joiner, chain, s, j, weighted, ops, found["factor"], found.get("mask"))  # type: ignore[arg-type]
    return reason


def _without_nan(values: ChainValues, w: str) -> tuple[str, tuple[int, ...]]:
    """The value that is 0 where the weights are NaN and else the weights, and the operators that make it; if there is none, the weights."""
    for j in values.uses.get(w, ()):
        op = values.ops[j]
        if op.type != "where" or op.inputs["Y"] != (w,) or values.number(op.inputs["X"][0]) != 0:
            continue
        at, (out,) = values.maker(op.inputs["Condition"][0]), op.output_arg_names
        if at is None or values.ops[at].type != "isnan" or values.ops[at].input_arg_names != (w,):
            continue
        if values.shape(out) == values.shape(w):
            return out, (at, j)
    return w, ()


def _products_behind(values: ChainValues, x: str) -> Iterator[int]:
    """The products from which elementwise operators compute a value, the nearest first."""
    waiting, seen = [x], set[int]()
    for n in waiting:
        j = values.maker(n)
        if j is None or j in seen:
            continue
        seen.add(j)
        if values.ops[j].type == _PRODUCT:
            yield j
        elif opdef(values.ops[j].type).expr is not None:
            waiting += values.ops[j].input_arg_names


def _join(joiner: Joiner, chain: Chain, scores: str, j: int, weighted: Operator, ops: set[int], factor: float, mask: str | None) -> str:
    values, product = joiner.values, joiner.ops[j]
    if product.attrs["transpose_x"]:
        return f"%{product.inputs['X'][0]} is transposed by the product"
    q, k, v = _unscaled(values, product.inputs["X"][0], j), _keys(values, product, j), weighted.inputs["Y"][0]
    if k is None:
        return f"%{product.inputs['Y'][0]} is not transposed, neither by the product nor right before it"
    if reason := _why_not(values, chain, scores, q, k, v, mask):
        return reason
    causal = mask is not None and _is_causal(values, mask, chain.like)
    seen = None if causal else mask
    (out,), scale = weighted.output_arg_names, product.attrs["alpha"] * factor * q.factor * k.factor
    lse = joiner.fresh(f"{out}.lse")

    def write(b: Builder, use: Use) -> None:
        queries, keys, rows = (b.block.var(use(n)) for n in (q.name, k.name, v))
        if k.axis:
            keys = b.transpose(keys, axis=k.axis, name=joiner.fresh(f"{k.name}.turned"))
        masked = None if seen is None else b.block.var(use(seen))
        b.scaled_dot_product_attention(queries, keys, rows, masked, out={"Out": out, "Lse": lse}, scale=scale, causal=causal)

    inputs = tuple(dict.fromkeys(n for n in (q.name, k.name, v, seen) if n is not None))
    return joiner.join(Region(tuple(sorted({*ops, *q.ops, *k.ops})), out, inputs), write)


def _unscaled(values: ChainValues, x: str, reader: int) -> _Operand:
    """The value that was multiplied with numbers to make `x`, if only `reader` reads the products."""
    found = _Operand(x)
    while (at := _own_maker(values, found.name, reader)) is not None and (before := _multiplied(values, values.ops[at])) is not None:
        found, reader = _Operand(before[0], found.factor * before[1], (at, *found.ops)), at
    return found


def _multiplied(values: ChainValues, op: Operator) -> tuple[str, float] | None:
    """The operand and the number that an operator multiplies; None for other operators."""
    element, rest = opdef(op.type).expr, [n for n in op.input_arg_names if values.number(n) is None]
    (out,) = op.output_arg_names
    if element is None or len(rest) != 1 or values.shape(rest[0]) != values.shape(out):
        return None
    expr, symbols = element(op.attrs, [values.shape(n) for n in op.input_arg_names], len(values.shape(out)))
    known = {s: name(n) if (c := values.number(n)) is None else number(c) for s, n in zip(symbols, op.input_arg_names, strict=True)}
    formula = of(expr, known)
    found = None if formula is None else _SCALED.match(formula, {"x": rest[0]})
    return None if found is None else (rest[0], float(found["factor"]))


def _keys(values: ChainValues, product: Operator, j: int) -> _Operand | None:
    """The keys with rows before columns; None if the program has no such value."""
    found = _unscaled(values, product.inputs["Y"][0], j)
    if product.attrs["transpose_y"]:
        return found
    reader = found.ops[0] if found.ops else j
    at = _own_maker(values, found.name, reader)
    if at is None:
        return None
    if values.ops[at].type == _SHAPE:
        turned = _turned_in_other_axes(values, at)
        axis: tuple[int, ...] = tuple(range(len(values.shape(found.name))))
    else:
        turned = (values.ops[at].inputs["X"][0], (at,)) if values.ops[at].type == _TURN else None
        order = [a % len(values.shape(found.name)) for a in values.ops[at].attrs["axis"]] if turned else []
        axis = (*order[:-2], *reversed(order[-2:]))
    if turned is None:
        return None
    name, ops = turned
    ops = (*ops, *found.ops)
    if axis != tuple(range(len(axis))):
        return _Operand(name, found.factor, ops, axis)
    before = _unscaled(values, name, ops[0])
    return _Operand(before.name, before.factor * found.factor, (*before.ops, *ops))


def _turned_in_other_axes(values: ChainValues, last: int) -> tuple[str, tuple[int, ...]] | None:
    """The value whose last two axes are exchanged while its other axes are one axis, with the three operators; None if it is not so."""
    middle = _own_maker(values, values.ops[last].inputs["X"][0], last)
    first = None if middle is None else _own_maker(values, values.ops[middle].inputs["X"][0], middle)
    if middle is None or first is None or values.ops[middle].type != _TURN or values.ops[first].type != _SHAPE:
        return None
    shape = values.sizes.shape
    (x,), (flat,), (y,) = values.ops[first].inputs["X"], values.ops[first].output_arg_names, values.ops[last].output_arg_names
    ends = shape(x)[-2:] == shape(flat)[-2:] and shape(y)[-2:] == shape(flat)[:-3:-1]
    swaps = [a % len(shape(flat)) for a in values.ops[middle].attrs["axis"]] == [0, 2, 1]
    return (x, (first, middle, last)) if ends and swaps and shape(x)[:-2] == shape(y)[:-2] else None


def _own_maker(values: ChainValues, x: str, reader: int) -> int | None:
    """The operator that makes a value which only `reader` and gradients read; None if there is none."""
    at, role = values.maker(x), values.ops[reader].role
    if at is None or values.why_needed(x) or values.ops[at].role is not role or len(values.ops[at].output_arg_names) != 1:
        return None
    return at if [k for k in values.uses[x] if values.ops[k].role is role] == [reader] else None


def _why_not(values: ChainValues, chain: Chain, s: str, q: _Operand, k: _Operand, v: str, mask: str | None) -> str:
    """The reason if the joined operator would broadcast in another way than the product; empty if not."""
    sizes = values.sizes
    queries, keys, rows = sizes.shape(q.name), sizes.shape(k.name), sizes.shape(v)
    keys = tuple(keys[a] for a in k.axis) or keys
    if not 2 <= len(queries) == len(keys) == len(rows):
        return f"%{q.name}, %{k.name} and %{v} do not have the same number of axes, at least 2"
    heads = slice(-3, -2)
    if keys[:-2] != rows[:-2] or keys[:-3] != queries[:-3] or (keys[heads] != queries[heads] and keys[heads] != (1,)):
        return f"%{q.name}, %{k.name} and %{v} broadcast, or may broadcast, other than by heads"
    if mask is None:
        return ""
    at, shape, scores = chain.others[mask], sizes.shape(mask), sizes.shape(s)
    shape = (1,) * (len(scores) - len(shape)) + shape
    if len(shape) != len(at) or any((a == 1) != (b == 1) for a, b in zip(at, shape, strict=True)):
        return f"%{mask} does not align with the last axes of the scores"
    return "" if all(a in (1, b) for a, b in zip(shape, scores, strict=True)) else f"%{mask} may be larger than the scores"


def _is_causal(values: ChainValues, mask: str, scores: tuple[int, ...]) -> bool:
    """Is a mask a known constant that shows row i only the first i + 1 columns?"""
    array = values.constant(mask)
    if array is None or array.ndim < 2 or array.shape[-2:] != scores[-2:] or array.size != array.shape[-2] * array.shape[-1]:
        return False
    table = array.reshape(array.shape[-2:])
    seen = np.tril(np.ones(table.shape, bool))
    return bool((table[seen] == 0).all() and (table[~seen] <= _NEVER).all())
