"""Mixture of experts: the queue of tokens of each expert, dispatch of tokens to the slots of experts, and combination of the results.

A choice is one of the `k` experts of a token. Each expert has `capacity` slots for each index of the leading axes. The choice at position p
of the queue gets slot p; a choice without a free slot is dropped. No size depends on values. Source: Lepikhin et al., "GShard" (2020);
Fedus et al., "Switch Transformers" (2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ...ir import Arithmetic, Autocast, OpDef, ProgramError, Required, Sample, TensorType
from ...ir.parts import Part
from ..shared.arrays import add_rows
from ..shared.samples import f32, ints
from ..shared.types import check_range, meet, merge_size, need_float, need_ids, need_ndim, need_size, same_dtype

# -- types -----------------------------------------------------------------------------------------------------------------------------


def _lead(op: str, tokens: TensorType, ids: TensorType, position: TensorType, weight: TensorType | None) -> tuple[int, ...]:
    """The leading axes of tokens [..., s, d], which must be those of the choices [..., s, k] too."""
    need_float(op, "X", tokens)
    need_ids(op, "Ids", ids)
    need_ids(op, "Position", position)
    need_ndim(op, "X", tokens, 2, 99)
    if ids.ndim != tokens.ndim or not all(map(meet, ids.shape[:-1], tokens.shape[:-1])):
        raise ProgramError(f"op {op}: Ids {ids} must be [..., k] for tokens {tokens}")
    for slot, t in (("Position", position), ("Weight", weight)):
        if t is not None and (t.ndim != ids.ndim or not all(map(meet, t.shape, ids.shape))):
            raise ProgramError(f"op {op}: {slot} must have the shape of Ids {ids}, found {t}")
    if weight is not None:
        same_dtype(op, X=tokens, Weight=weight)
    return tokens.shape[:-2]


def _slots_of(op: str, y: TensorType, ids: TensorType) -> None:
    """Check slots [experts, ..., capacity, d] against choices [..., s, k]."""
    if y.ndim != ids.ndim + 1 or not all(map(meet, y.shape[1:-2], ids.shape[:-2])):
        raise ProgramError(f"op {op}: Y must be [experts, ..., capacity, d] for Ids {ids}, found {y}")


# -- slots of choices
# -----------------------------------------------------------------------------------------------------------------------


def _rows(xp: Any, op: str, ids: Any, position: Any, experts: int, capacity: int, part: Part | None) -> tuple[Any, Any]:
    """For choices, as [leading, s, k]: the row of its slot in [experts here * leading * capacity], and whether it has one here."""
    start, size = (0, experts) if part is None else (part.start, part.size)
    check_range(xp, op, xp.ascontiguousarray(ids), size, "the experts")
    lead = prod(ids.shape[:-2])
    e, p = (xp.asarray(a).reshape(lead, *ids.shape[-2:]).astype("int64", copy=False) for a in (ids, position))
    e = e - start
    here = (e >= 0) & (e < experts) & (p >= 0) & (p < capacity)
    return (e * lead + xp.arange(lead)[:, None, None]) * capacity + p, here


def _picked(xp: Any, rows: Any, row: Any, here: Any) -> Any:
    """The row of each choice, [choices, d], zeros for a choice without a row."""
    out = xp.zeros((row.size, rows.shape[-1]), rows.dtype)
    out[here.reshape(-1)] = rows[row[here]]
    return out


def _samples() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens, ids, positions): with several leading axes or none, and with choices without a slot."""
    for lead, s, k in (((3,), 5, 2), ((), 7, 1), ((2, 3), 4, 2)):
        ids = ints(*lead, s, k, high=4, seed=1)
        position = np.empty_like(ids)
        ExpertQueue.kernel(np, ids, out=position)
        yield f32(*lead, s, 3), ids, position


# -- the ops ---------------------------------------------------------------------------------------------------------------------------


class ExpertQueue(OpDef):
    """The position of each choice in the queue of its expert: Ids [..., s, k] are experts, with separate queues for each leading index.

    All first choices precede all second choices; each of the two groups is in the order of the tokens.
    """

    name = "expert_queue"
    inputs, outputs = ("Ids",), ("Position",)
    pattern = "* s k -> * s k | s! k!"

    @staticmethod
    def infer(ids):
        need_ids("expert_queue", "Ids", ids)
        need_ndim("expert_queue", "Ids", ids, 2, 99)
        return ids.with_dtype("int64")

    @staticmethod
    def kernel(xp, ids, *, out):
        if not ids.size:
            return
        s, k = ids.shape[-2:]
        flat = xp.asarray(ids).reshape(-1, s, k).swapaxes(1, 2).reshape(-1, k * s).astype("int64")
        order = xp.argsort(flat, axis=1, kind="stable")
        sorted_ids = xp.take_along_axis(flat, order, axis=1)
        here = xp.broadcast_to(xp.arange(k * s), flat.shape)
        begins = xp.concatenate([xp.ones((len(flat), 1), bool), sorted_ids[:, 1:] != sorted_ids[:, :-1]], axis=1)
        first = xp.maximum.accumulate(xp.where(begins, here, 0), axis=1)
        position = xp.empty_like(flat)
        xp.put_along_axis(position, order, here - first, axis=1)
        out[...] = position.reshape(-1, k, s).swapaxes(1, 2).reshape(out.shape)

    @staticmethod
    def samples():
        yield Sample.of(ints(3, 5, 2, high=3))
        yield Sample.of(ints(7, 1, high=4, seed=1))
        yield Sample.of(ints(2, 3, 4, 2, high=2, seed=2))


class ExpertDispatch(OpDef):
    """Tokens X [..., s, d] in the slots of their experts, [experts, ..., capacity, d]; zeros in an unused slot.

    Ids and Position [..., s, k] give the slots; with Weight, each token is multiplied by the weight of its choice. The experts are the
    first axis of Like, of which only the shape is read. The gradient is expert_combine.
    """

    name = "expert_dispatch"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X", "Ids", "Position", "Weight?", "Like")
    attrs = {"capacity": Required(int)}

    @staticmethod
    def pattern(ins, outs, attrs):
        like = " ".join(["e", *["."] * (ins[4].ndim - 1)])
        linear = "L(0) L(3)" if ins[3] is not None else "L(0)"
        return f"* s d, * s k, * s k, * s k, ~{like} -> e * c d | e@ c! s:+ k:+ {linear}"

    @staticmethod
    def infer(x, ids, position, weight, like, *, capacity):
        lead = _lead("expert_dispatch", x, ids, position, weight)
        need_size("expert_dispatch", "capacity", capacity, 1)
        if not like.ndim:
            raise ProgramError("op expert_dispatch: Like must have the experts as its first axis")
        return x.with_shape((like.shape[0], *lead, capacity, x.shape[-1]))

    @staticmethod
    def grad(b, op, g):
        x, ids, position, weight = op["X"], op["Ids"], op["Position"], op["Weight"]
        dw = b.expert_weight_grad(x, g, ids, position) if weight is not None and op.needs("Weight") else None
        return b.expert_combine(g, ids, position, weight), None, None, dw, None

    @staticmethod
    def kernel(xp, x, ids, position, weight, like, *, out, capacity, part=None):
        out[...] = 0
        row, here = _rows(xp, "expert_dispatch", ids, position, len(out), capacity, part)
        token = xp.broadcast_to(xp.arange(row.shape[0] * row.shape[1]).reshape(row.shape[0], -1, 1), row.shape)
        rows = x.reshape(-1, x.shape[-1])[token[here]]
        if weight is not None:
            rows = rows * weight.reshape(row.shape)[here][:, None]
        add_rows(xp, out.reshape(-1, x.shape[-1]), row[here], rows)

    @staticmethod
    def samples():
        like = f32(4, 3)
        for x, ids, position in _samples():
            yield Sample.of(x, ids, position, None, like, capacity=2, grad=("X",), why="Like is not read")
            weight = f32(*ids.shape, seed=2)
            yield Sample.of(x, ids, position, weight, like[:, 0], capacity=2, grad=("X", "Weight"), why="Like is not read")


class ExpertCombine(OpDef):
    """For each token the sum of its experts' results, times Weight if given: Y [experts, ..., capacity, d] as [..., s, d].

    Ids and Position [..., s, k] give the slots; a choice without a slot adds nothing. The gradient is expert_dispatch.
    """

    name = "expert_combine"
    autocast = Autocast(mixed="any")
    inputs = ("Y", "Ids", "Position", "Weight?")

    @staticmethod
    def pattern(ins, outs, attrs):
        linear = "L(0) L(3)" if ins[3] is not None else "L(0)"
        return f"e * c d, * s k, * s k, * s k -> * s d | e@ e:+ c! k:+ {linear}"

    @staticmethod
    def infer(y, ids, position, weight):
        _slots_of("expert_combine", y, ids)
        out = y.with_shape((*ids.shape[:-1], y.shape[-1]))
        _lead("expert_combine", out, ids, position, weight)
        return out

    @staticmethod
    def grad(b, op, g):
        y, ids, position, weight = op["Y"], op["Ids"], op["Position"], op["Weight"]
        dw = b.expert_weight_grad(g, y, ids, position) if weight is not None and op.needs("Weight") else None
        return b.expert_dispatch(g, ids, position, weight, y, capacity=y.shape[-2]), None, None, dw

    @staticmethod
    def kernel(xp, y, ids, position, weight, *, out, part=None):
        row, here = _rows(xp, "expert_combine", ids, position, len(y), y.shape[-2], part)
        rows = _picked(xp, y.reshape(-1, y.shape[-1]), row, here).reshape(*row.shape, y.shape[-1])
        if weight is not None:
            rows *= weight.reshape(row.shape)[..., None]
        out[...] = rows.sum(axis=2).reshape(out.shape)

    @staticmethod
    def samples():
        for x, ids, position in _samples():
            y = f32(4, *x.shape[:-2], 2, 3, seed=3)
            yield Sample.of(y, ids, position, None, grad=("Y",))
            yield Sample.of(y, ids, position, f32(*ids.shape, seed=2), grad=("Y", "Weight"))


class ExpertWeightGrad(OpDef):
    """The gradient of the weights of choices: X [..., s, d] times its slot in Y [experts, ..., capacity, d], summed over d."""

    name = "expert_weight_grad"
    arithmetic = Arithmetic(sums_products="matrix")
    autocast = Autocast(mixed="any")
    inputs, outputs = ("X", "Y", "Ids", "Position"), ("Weight@GRAD",)
    pattern = "* s d, e * c d, * s k, * s k -> * s k | e@ e:+ d:+ c! L(0) L(1)"

    @staticmethod
    def infer(x, y, ids, position):
        _slots_of("expert_weight_grad", y, ids)
        _lead("expert_weight_grad", x, ids, position, None)
        merge_size("expert_weight_grad", "the width of X and Y", x.shape[-1], y.shape[-1])
        return TensorType(x.dtype, ids.shape)

    @staticmethod
    def kernel(xp, x, y, ids, position, *, out, part=None):
        row, here = _rows(xp, "expert_weight_grad", ids, position, len(y), y.shape[-2], part)
        rows = _picked(xp, y.reshape(-1, y.shape[-1]), row, here).reshape(*row.shape, y.shape[-1])
        out[...] = xp.einsum("lsd,lskd->lsk", x.reshape(row.shape[0], row.shape[1], -1), rows).reshape(out.shape)

    @staticmethod
    def samples():
        for x, ids, position in _samples():
            yield Sample.of(x, f32(4, *x.shape[:-2], 2, 3, seed=3), ids, position, grad=(), why="a gradient itself")
