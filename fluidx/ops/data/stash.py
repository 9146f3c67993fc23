"""Stashes: arrays that keep a value of each iteration of a loop, so that the gradient loop can go back through the iterations.

With a bound, a stash is a tensor with a row for each iteration. Without one its type has no rows, and its memory grows with the iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...ir.axis_letters import along
from ...ir.errors import ExecutionError, ProgramError
from ...ir.op_facets import Arithmetic, Control, Rewrite, Storage
from ...ir.opdef import OpDef, Sample
from ...ir.types import ANY
from ..shared.samples import f32, i64


class Rows:
    """The rows of a stash, which a run keeps by name: the plans of the segments of a program share them. With a bound, `array` has all
    rows; otherwise it is replaced by one of twice the size when it is full.
    """

    def __init__(self, xp: Any, array: Any):
        self.xp, self.array, self.grows, self.count = xp, array, not len(array), 0

    def clear(self) -> None:
        """Start with no iterations: rows of a bounded stash that no iteration writes are 0. A growing stash keeps its memory for the next
        run.
        """
        self.count = 0
        if not self.grows:
            self.array.fill(0)

    def write(self, x: Any, at: Any) -> None:
        k = int(at.item())
        if x.shape != self.array.shape[1:]:
            if k or not self.grows:
                sizes = f"{list(self.array.shape[1:])} in the first iteration and {list(x.shape)} in iteration {k}"
                raise ExecutionError(f"op stash_write: a value kept for the gradient must have one size in all iterations, found {sizes}")
            self.array = self.xp.empty((0, *x.shape), x.dtype)
        if self.grows and k >= len(self.array):
            larger = self.xp.empty((max(8, 2 * k), *x.shape), x.dtype)
            larger[: self.count] = self.array[: self.count]
            self.array = larger
        _check(k, len(self.array), "stash_write")
        self.array[k] = x
        self.count = k + 1

    def read(self, at: Any, out: Any) -> None:
        k = int(at.item())
        _check(k, self.count if self.grows else len(self.array), "stash_read")
        out[...] = self.array[k]

    def written(self) -> Any:
        """The rows of all iterations."""
        return self.array[: self.count] if self.grows else self.array


def _check(k: int, rows: int, op: str) -> None:
    if not 0 <= k < rows:
        raise ExecutionError(f"op {op}: the stash has rows for {rows} iterations, none for iteration {k}")


def _at_round(stash: Any, at: Any) -> Any:
    if at.dtype != "int64" or at.shape != (1,):
        raise ProgramError(f"the iteration of a stash must be i64[1], found {at}")
    return stash


def _row(stash: Any, at: Any, op: str) -> Any:
    k = int(at.item())
    _check(k, len(stash), op)
    return stash[k]


def _begin(stashes: dict[str, Rows], name: str, rows: Rows) -> None:
    stashes[name] = rows
    rows.clear()


def _write(stashes: dict[str, Rows], name: str, rows: Rows, x: Any, at: Any) -> None:
    stashes.setdefault(name, rows).write(x, at)


def _read(stashes: Mapping[str, Rows], name: str, rows: Rows, at: Any, out: Any) -> None:
    stashes.get(name, rows).read(at, out)


class Stash(OpDef):
    """An empty stash for values like X, one for each of `rounds` iterations of a loop; 0: for any number of iterations, as they come.

    With Like, there are as many as Like has rows; only the shapes of X and Like are read.
    """

    name = "stash"
    inputs = ("X", "Like?")
    attrs = {"rounds": 0}
    arithmetic = Arithmetic(flops=0)
    rewrite = Rewrite(constant=True)

    @staticmethod
    def pattern(ins, outs, attrs):
        like = "" if ins[1] is None else f"~{along(0, ins[1].ndim, '.')}"
        return f"~*, {like} -> . * | L()"

    @staticmethod
    def infer(x, like, *, rounds):
        if like is not None and not like.ndim:
            raise ProgramError("op stash: Like must have an axis, whose size is the number of iterations")
        return x.with_shape((rounds if like is None else like.shape[0], *x.shape))

    @staticmethod
    def kernel(xp, x, like, *, out, rounds):
        out.fill(0)

    @staticmethod
    def _bind(planner: Any, op: Any) -> Callable[[], Any]:
        (name,) = op.output("Out")
        return partial(_begin, planner.ctx.stashes, name, planner.rows(name))

    control = Control(bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(f32(4, 3), None, rounds=2, grad=(), why="the values do not depend on X")
        yield Sample.of(i64(3, 1), None, rounds=3)
        yield Sample.of(f32(4, 3), f32(5, 2), grad=(), why="the values do not depend on X and Like")


class _StashUpdate(OpDef):
    """Base of the ops that change the row of one iteration."""

    inputs = ("Stash", "X", "Round")
    storage = Storage(inplace=(("Stash", "Out"),))
    pattern = ". *, *, . -> . * | L(0,1)"

    @staticmethod
    def infer(stash, x, at):
        return _at_round(stash, at)

    @staticmethod
    def grad(b, op, g):
        return g, b.stash_read(g, op["Round"]), None


class StashWrite(_StashUpdate):
    """The stash with X as its value of iteration Round, [1] int64, counted from 0. Each iteration is written once.

    The gradient of X is the row of that iteration, in a gradient with a row for each.
    """

    name = "stash_write"
    storage = Storage(same_variable=True)
    arithmetic = Arithmetic(flops=0)

    @staticmethod
    def kernel(xp, stash, x, at):
        k = int(at.item())
        _check(k, len(stash) + 1, "stash_write")  # the iteration after the last one adds a row
        return xp.concatenate([stash[:k], x[None], stash[k + 1 :]])

    @staticmethod
    def _bind(planner: Any, op: Any) -> Callable[[], Any]:
        (name,), (x,), (at,) = op.input("Stash"), op.input("X"), op.input("Round")
        if op.output("Out")[0] != name:
            raise ExecutionError(
                f"op stash_write: a stash must be written in place; this op reads {name!r} and writes {op.output('Out')[0]!r}"
            )
        return partial(_write, planner.ctx.stashes, name, planner.rows(name), planner.array(x), planner.array(at))

    control = Control(bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 4, 3), f32(4, 3), i64(1), grad=("X",), why="each iteration is written once: no value of Stash is lost")
        yield Sample.of(i64(3, 1, 2), np.int64(7).reshape(()), i64(2))


class StashRead(OpDef):
    """The value of iteration Round, [1] int64, of a stash; for a tensor, its row with that number."""

    name = "stash_read"
    inputs = ("Stash", "Round")
    arithmetic = Arithmetic(flops=0)
    pattern = ". *, . -> * | L(0)"

    @staticmethod
    def infer(stash, at):
        return _at_round(stash, at).with_shape(stash.shape[1:])

    @staticmethod
    def grad(b, op, g):
        return b.stash_read_grad(op["Stash"], op["Round"], g), None

    @staticmethod
    def kernel(xp, stash, at, *, out):
        rows = Rows(xp, stash)
        rows.count = len(stash)
        rows.read(at, out)

    @staticmethod
    def _bind(planner: Any, op: Any) -> Callable[[], Any]:
        (name,), (at,), (out,) = op.input("Stash"), op.input("Round"), op.output("Out")
        return partial(_read, planner.ctx.stashes, name, planner.rows(name), planner.array(at), planner.array(out))

    control = Control(bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 4, 3), i64(1))
        yield Sample.of(i64(3, 1, 2), i64(2))


class StashReadGrad(OpDef):
    """Zeros in the shape of Stash, with the gradient as the row of iteration Round; only the shape of Stash is read."""

    name = "stash_read_grad"
    inputs, outputs = ("Stash", "Round", "Out@GRAD"), ("Stash@GRAD",)
    arithmetic = Arithmetic(flops=0)
    pattern = "~. *, ., * -> . * | L(2)"

    @staticmethod
    def _accumulate_into(b, op, total):
        return b.stash_add(total, b.block.var(op.input("Out@GRAD")[0]), b.block.var(op.input("Round")[0]), out={"Out": total})

    storage = Storage(accumulate_into=_accumulate_into)

    @staticmethod
    def infer(stash, at, g):
        return _at_round(stash, at)

    @staticmethod
    def grad(b, op, g):
        return None, None, b.stash_read(g, op["Round"])

    @staticmethod
    def kernel(xp, stash, at, g, *, out):
        out.fill(0)
        _row(out, at, "stash_read_grad")[...] = g

    @staticmethod
    def samples():
        yield Sample.of(f32(3, 4, 3), i64(1), f32(4, 3))


class StashAdd(_StashUpdate):
    """Stash with X added to its row of iteration Round."""

    name = "stash_add"

    @staticmethod
    def kernel(xp, stash, x, at, *, out):
        if out is not stash:
            xp.copyto(out, stash)
        row = _row(out, at, "stash_add")
        row += x

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 4, 3), f32(4, 3), i64(1))


class StashRows(OpDef):
    """The rows of all iterations in a stash without a bound."""

    name = "stash_rows"
    inputs = ("Stash",)
    arithmetic = Arithmetic(flops=0)
    control = Control(sized_by_values=("n",))

    @staticmethod
    def infer(stash):
        return stash.with_shape((ANY, *stash.shape[1:]))

    @staticmethod
    def grad(b, op, g):
        return g

    @staticmethod
    def kernel(xp, stash):
        return stash

    @staticmethod
    def samples():
        yield Sample.of(f32(2, 3), grad=(), why="the gradient has as many rows as there are iterations, but the type of the stash has none")
        yield Sample.of(i64(0, 1, 2))
