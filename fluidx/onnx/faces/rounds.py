"""Loops that stay loops: the rounds of a Loop or a Scan as a sub-block of the program, which a `while` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...ir import ANY, Block, Builder, TensorType, Variable, program_guard
from ...layers import control_flow
from .. import limits
from ..errors import OnnxError
from ..node import Node

# what a round makes of its number and the states: whether there is another one (None: their number alone says so), and the outputs
Round = Callable[[Variable, list[Variable]], tuple[Variable | None, list[Variable]]]


class _Grows(Exception):
    """A round gives states of other sizes than it took: `types` are of both."""

    def __init__(self, types: list[TensorType]):
        self.types = types


class Rounds:
    """Writes one `while` for a node. `infos` are the outputs of the body: those of the states, and behind them those that are gathered.

    `limit` is the number of rounds at most, known or a variable, None for any; `start` of them are written already.
    """

    def __init__(self, n: Node, infos: Sequence[Any], limit: Any = None, start: int = 0):
        self.n, self.b, self.importer, self.infos, self.start = n, n.b, n.importer, infos, start
        self.known = not isinstance(limit, Variable)
        self.limit = limit if limit is None or not self.known else int(limit)

    def write(self, states: Sequence[Any], first: Variable | None, make: Round) -> tuple[list[Variable], list[Variable]]:
        """The states behind the last round, and the rows of what the rounds gather; `first` says whether there is a round (None: there is).

        Sizes that a round changes are open: it is written anew knowing that. Raises OnnxError for what no program repeats.
        """
        begin = [self.importer.variable(v) for v in states]
        types = [v.desc.type for v in begin]
        while True:
            before = self.importer.mark()
            try:
                return self._attempt(begin, types, first, make)
            except _Grows as e:
                self.importer.undo(before)
                types = e.types
            except OnnxError:
                self.importer.undo(before)
                raise

    def _attempt(
        self, begin: list[Variable], types: list[TensorType], first: Variable | None, make: Round
    ) -> tuple[list[Variable], list[Variable]]:
        b, importer = self.b, self.importer
        names = [importer.fresh(name) if name else None for name in [*self.n.outputs, *[""] * len(begin)]]
        held = [self._held(v, t, name) for v, t, name in zip(begin, types, names)]
        count = b.fill_constant(shape=[], dtype="int64", value=float(self.start))
        with program_guard(importer.main, importer.startup):
            more = b.assign(self._more(b, count, first))
            importer.fix([*held, count, more])
            with control_flow.While(more, max_rounds=self._most()).block() as block:
                again, made = make(count, held)
                inner = Builder(block, role=b.role)
                self._check_types(held, made)
                exact = first is None and again is None  # the number of rounds is the limit
                stashes = [self._gather(inner, row, count, exact) for row in made[len(held) :]]
                for v, new in zip(held, [inner.assign(new) for new in made[: len(held)]]):
                    inner.assign(new, out={"Out": v})
                inner.assign(inner.elementwise_add(count, inner.fill_constant(shape=[], dtype="int64", value=1.0)), out={"Out": count})
                inner.assign(inner.reshape(self._more(inner, count, again), shape=more.shape), out={"Out": more})
        return held, [s if s.shape[0] else b.stash_rows(s) for s in stashes]

    def _held(self, value: Variable, t: TensorType, name: str | None) -> Variable:
        """A copy of what a state begins with, which the rounds overwrite."""
        made = self.b.assign(value, name=name)
        if t != value.desc.type:
            self.b.block.descs[made.name] = made.desc.changed(type=t, attrs={**made.desc.attrs, "resized": True})
        return made

    def _more(self, b: Builder, count: Variable, again: Variable | None) -> Variable:
        """Is there another round?"""
        if again is not None and (self.known or self.limit is None):
            return again  # a known limit is the loop's own
        limit = b.fill_constant(shape=[], dtype="int64", value=float(self.limit)) if self.known else self.limit
        left = b.less_than(count, limit)
        return left if again is None else b.logical_and(again, b.reshape(left, shape=again.shape))

    def _most(self) -> int:
        """A bound to the rounds; what no loop reaches is none."""
        return self.limit - self.start if self.known and self.limit is not None and self.limit <= limits.ROUNDS else 0

    def _check_types(self, held: list[Variable], made: list[Variable]) -> None:
        types = []
        for info, v, new in zip(self.infos, held, made):
            was, now = v.desc.type, new.desc.type
            if was.dtype != now.dtype or was.ndim != now.ndim:
                raise self.n.wrong(
                    f"{info.name!r} is {was} when it begins and {now} after a round; a loop of a program carries values of one dtype, with "
                    "one number of axes, fx.onnx.session runs such models"
                )
            types.append(was.with_shape(a if a == b or a == ANY else ANY for a, b in zip(was.shape, now.shape)))
        if types != [v.desc.type for v in held]:
            raise _Grows(types)

    def _gather(self, inner: Builder, row: Variable, count: Variable, exact: bool) -> Variable:
        """Write a value of each round to a stash."""
        like, sized = self._like(row, inner.block)
        stash = self.b.stash(like, rounds=self.limit - self.start if exact and self.known and sized else 0)
        self.importer.fix([stash])
        at = inner.elementwise_sub(count, inner.fill_constant(shape=[], dtype="int64", value=float(self.start))) if self.start else count
        inner.stash_write(stash, row, inner.reshape(at, shape=[1]), out={"Out": stash})
        return stash

    def _like(self, row: Variable, block: Block) -> tuple[Variable, bool]:
        """A value outside of the loop with the type of one made inside, and whether its sizes are known there; they are those of the first
        round where not."""
        b, shape = self.b, row.shape
        at = [axis for axis, d in enumerate(shape) if d == ANY]
        if not at:
            return b.fill_constant(shape=shape, dtype=row.dtype, value=0.0), True
        sizes = b.sizes
        size = sizes.inside(block).shape(row.name)[at[0]]
        same = [(v, k) for v in self.importer.inputs for k, d in enumerate(v.shape) if d == ANY and sizes.shape(v.name)[k] == size]
        if len(at) == 1 and same:
            (v, k), *_ = same
            dims = [1 if d == ANY else d for d in shape]
            fill = b.fill_constant_batch_size_like
            return fill(v, shape=dims, dtype=row.dtype, value=0.0, input_dim_idx=k, output_dim_idx=at[0]), True
        like = b.block.create_var(self.importer.fresh(f"{row.name}.like"), shape, row.dtype, stop_gradient=True)
        like.is_resized = True
        dims = [0 if d == ANY else d for d in shape]
        return b.fill_constant(shape=dims, dtype=row.dtype, value=0.0, out={"Out": like}), False


def is_long(n: Node, graph: Any, rounds: int | None) -> bool:
    """Are the rounds, written one behind the other, too many operators, and may a loop be written that nobody runs meanwhile?"""
    return n.importer.evaluate is None and rounds is not None and rounds * len(graph.node) > limits.UNROLLED
