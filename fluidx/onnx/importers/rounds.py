"""Loops that stay loops: the rounds of a Loop or a Scan as a sub-block of the program, which a `while` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...ir import ANY, Block, Builder, TensorType, Variable, program_guard
from ...ir.valuetypes import OptionalType, SequenceType, ValueType, common_type
from ...layers import control_flow
from .. import limits
from ..errors import OnnxError
from ..node import Node
from ..types import value_type

# what a round makes of its number and the states: whether there is another one (None: their number alone says so), and the outputs
Round = Callable[[Variable, list[Variable]], tuple[Variable | None, list[Variable]]]


class _Grows(Exception):
    """A round gives states of other sizes than it took: `types` are of both."""

    def __init__(self, types: list[ValueType]):
        self.types = types


class Rounds:
    """Writes one `while` for a node. `taken` are the inputs of the body that are states, `infos` its outputs: the states, and behind them
    those that are gathered.

    `limit` is the number of rounds at most, known or a variable, None for any; `start` of them are written already.
    """

    def __init__(self, n: Node, taken: Sequence[Any], infos: Sequence[Any], limit: Any = None, start: int = 0):
        self.n, self.b, self.importer, self.taken, self.infos, self.start = n, n.b, n.importer, taken, infos, start
        self.known = not isinstance(limit, Variable)
        self.limit = limit if limit is None or not self.known else min(int(limit), 1 << 53)  # which no loop reaches, and floats hold

    def write(self, states: Sequence[Any], first: Variable | None, make: Round) -> tuple[list[Variable], list[Variable]]:
        """The states behind the last round, and the rows of what the rounds gather; `first` says whether there is a round (None: there is).

        Sizes that a round changes are open: it is written anew knowing that. Raises OnnxError for what no program repeats.
        """
        begin = [self._begin(v, info) for v, info in zip(states, self.taken)]
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

    def _begin(self, value: Any, info: Any) -> Variable:
        if isinstance(value, list) and not value:  # of what, says the body
            t = value_type(info.type)
            if isinstance(t, SequenceType):
                return self.b.sequence_empty(elem=str(t.elem))
        return self.importer.variable(value)

    def _attempt(
        self, begin: list[Variable], types: list[ValueType], first: Variable | None, make: Round
    ) -> tuple[list[Variable], list[Variable]]:
        b, importer = self.b, self.importer
        names = [importer.fresh(name) if name else None for name in [*self.n.outputs, *[""] * len(begin)]]
        held = [self._held(v, t, name) for v, t, name in zip(begin, types, names)]
        count = b.fill_constant(shape=[], dtype="int64", value=float(self.start))
        with program_guard(importer.main, importer.startup):
            more = b.assign(self._more(b, count, first))
            importer.keep_names([*held, count, more])
            with control_flow.While(more, max_rounds=self._most()).block() as block:
                again, made = make(count, held)
                inner = Builder(block, role=b.role)
                made = [_as_optional(inner, v, new) for v, new in zip(held, made)] + made[len(held) :]
                self._check_types(held, made)
                exact = first is None and again is None  # the number of rounds is the limit
                stashes = [self._gather(inner, row, count, exact) for row in made[len(held) :]]
                for v, new in zip(held, [inner.assign(new) for new in made[: len(held)]]):
                    inner.assign(new, out={"Out": v})
                inner.assign(inner.elementwise_add(count, inner.fill_constant(shape=[], dtype="int64", value=1.0)), out={"Out": count})
                inner.assign(inner.reshape(self._more(inner, count, again), shape=more.shape), out={"Out": more})
        return held, [s if s.shape[0] else b.stash_rows(s) for s in stashes]

    def _held(self, value: Variable, t: ValueType, name: str | None) -> Variable:
        """A copy of what a state begins with, which the rounds overwrite."""
        made = self.b.assign(value, name=name)
        if t != value.desc.type:
            self.b.block.descs[made.name] = made.desc.changed(type=t, attrs={**made.desc.attrs, "resized": True})
        return made

    def _more(self, b: Builder, count: Variable, again: Variable | None) -> Variable:
        """Is there another round?"""
        if again is not None and (self.limit is None or self._most()):
            return again
        limit = b.fill_constant(shape=[], dtype="int64", value=float(self.limit)) if self.known else self.limit
        left = b.less_than(count, limit)
        return left if again is None else b.logical_and(again, b.reshape(left, shape=again.shape))

    def _most(self) -> int:
        """The loop's own bound to its rounds, for as many of which its gradient has room from the start: 0 where they are too many."""
        return self.limit - self.start if self.known and self.limit is not None and self.limit <= limits.ROUNDS else 0

    def _check_types(self, held: list[Variable], made: list[Variable]) -> None:
        types: list[ValueType] = []
        for info, v, new in zip(self.infos, held, made):
            was, now = v.desc.type, new.desc.type
            if not (isinstance(was, TensorType) and isinstance(now, TensorType)):
                types.append(common_type(was, now))
                continue
            if was.dtype != now.dtype or was.ndim != now.ndim:
                raise self.n.wrong(
                    f"{info.name!r} is {was} when it begins and {now} after a round; a loop in a program carries values of one dtype "
                    "and rank; fx.onnx.session runs such models"
                )
            types.append(was.with_shape(a if a == b or a == ANY else ANY for a, b in zip(was.shape, now.shape)))
        if types != [v.desc.type for v in held]:
            raise _Grows(types)

    def _gather(self, inner: Builder, row: Variable, count: Variable, exact: bool) -> Variable:
        """Write a value of each round to a stash."""
        like, sized = self._like(row, inner.block)
        stash = self.b.stash(like, rounds=self.limit - self.start if exact and self.known and sized else 0)
        self.importer.keep_names([stash])
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


def _as_optional(b: Builder, held: Variable, new: Variable) -> Variable:
    """A value as an optional that holds it, where the loop begins with an optional."""
    return b.optional(new) if isinstance(held.desc.type, OptionalType) and not isinstance(new.desc.type, OptionalType) else new


def is_long(n: Node, graph: Any, rounds: int | None) -> bool:
    """Are the rounds, written one behind the other, too many operators, and may a loop be written that nobody runs meanwhile?"""
    return n.importer.evaluate is None and rounds is not None and rounds * len(graph.node) > limits.UNROLLED
