"""`Rounds` writes the rounds of a Loop or a Scan as the sub-block of a `while` operator."""

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

# (number of the round, states) -> (is there another round? None: the limit decides; outputs of the body)
Round = Callable[[Variable, list[Variable]], tuple[Variable | None, list[Variable]]]


class _SizesChange(Exception):
    """A round changes the sizes of states. `types` fit the states before and after it."""

    def __init__(self, types: list[ValueType]):
        self.types = types


class Rounds:
    """Writes one `while` for a node.

    `taken` are the state inputs of the body; `infos` its outputs: the states, then the outputs that are gathered over the rounds. `limit`
    is the largest number of rounds, known or a variable, None for no limit; `start` rounds were unrolled before. `like` is a value with
    `limit` rows, if there is one: the outputs of a loop that reaches its limit have sizes that are known before it runs.
    """

    def __init__(
        self, n: Node, taken: Sequence[Any], infos: Sequence[Any], limit: Any = None, start: int = 0, like: Variable | None = None
    ):
        self.like = like
        self.n, self.b, self.importer, self.taken, self.infos, self.start = n, n.b, n.importer, taken, infos, start
        self.known = not isinstance(limit, Variable)
        # no loop reaches it, and floats hold it exactly
        self.limit = limit if limit is None or not self.known else min(int(limit), 1 << 53)

    def write(self, states: Sequence[Any], first: Variable | None, make: Round) -> tuple[list[Variable], list[Variable]]:
        """The states after the last round, and the gathered outputs. `first` says whether there is a first round (None: there is).

        If a round changes sizes, the `while` is written again with these sizes open. Raises OnnxError if a program cannot repeat the body.
        """
        begin = [self._initial_state(v, info) for v, info in zip(states, self.taken)]
        types = [v.desc.type for v in begin]
        while True:
            before = self.importer.mark()
            try:
                return self._attempt(begin, types, first, make)
            except _SizesChange as e:
                self.importer.undo(before)
                types = e.types
            except OnnxError:
                self.importer.undo(before)
                raise

    def _initial_state(self, value: Any, info: Any) -> Variable:
        if isinstance(value, list) and not value:  # the body declares the type of the elements
            t = value_type(info.type)
            if isinstance(t, SequenceType):
                return self.b.sequence_empty(elem=str(t.elem))
        return self.importer.variable(value)

    def _attempt(
        self, begin: list[Variable], types: list[ValueType], first: Variable | None, make: Round
    ) -> tuple[list[Variable], list[Variable]]:
        b, importer = self.b, self.importer
        names = [importer.fresh(name) if name else None for name in [*self.n.outputs, *[""] * len(begin)]]
        held = [self._state_copy(v, t, name) for v, t, name in zip(begin, types, names)]
        count = b.fill_constant(shape=[], dtype="int64", value=float(self.start))
        with program_guard(importer.main, importer.startup):
            more = b.assign(self._another_round(b, count, first))
            importer.keep_names([*held, count, more])
            with control_flow.While(more, max_rounds=self._max_rounds()).block() as block:
                again, made = make(count, held)
                inner = Builder(block, role=b.role)
                made = [_as_optional(inner, v, new) for v, new in zip(held, made)] + made[len(held) :]
                self._check_types(held, made)
                exact = first is None and again is None  # the number of rounds equals the limit
                stashes = [self._gather(inner, row, count, exact) for row in made[len(held) :]]
                for v, new in zip(held, [inner.assign(new) for new in made[: len(held)]]):
                    inner.assign(new, out={"Out": v})
                inner.assign(inner.elementwise_add(count, inner.fill_constant(shape=[], dtype="int64", value=1.0)), out={"Out": count})
                inner.assign(inner.reshape(self._another_round(inner, count, again), shape=more.shape), out={"Out": more})
        return held, [s if s.shape[0] else b.stash_rows(s) for s in stashes]

    def _state_copy(self, value: Variable, t: ValueType, name: str | None) -> Variable:
        """A copy of the initial value of a state, which the rounds overwrite."""
        made = self.b.assign(value, name=name)
        if t != value.desc.type:
            self.b.block.descs[made.name] = made.desc.changed(type=t, attrs={**made.desc.attrs, "resized": True})
        return made

    def _another_round(self, b: Builder, count: Variable, again: Variable | None) -> Variable:
        """Is there another round?"""
        if again is not None and (self.limit is None or self._max_rounds()):
            return again
        limit = b.fill_constant(shape=[], dtype="int64", value=float(self.limit)) if self.known else self.limit
        left = b.less_than(count, limit)
        return left if again is None else b.logical_and(again, b.reshape(left, shape=again.shape))

    def _max_rounds(self) -> int:
        """The `max_rounds` of the `while`, for which its gradient allocates memory at the start; 0 if there are too many."""
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
                    f"{info.name!r} is {was} before the loop and {now} after a round; a loop of a program carries values of one dtype "
                    "and rank; fx.onnx.session runs such models"
                )
            types.append(was.with_shape(a if a == b or a == ANY else ANY for a, b in zip(was.shape, now.shape)))
        if types != [v.desc.type for v in held]:
            raise _SizesChange(types)

    def _gather(self, inner: Builder, row: Variable, count: Variable, exact: bool) -> Variable:
        """Store a value of each round in a stash."""
        like, sized = self._template(row, inner.block)
        rounds = self.limit - self.start if exact and self.known and sized else 0
        stash = self.b.stash(like, self.like if exact and not self.known and sized else None, rounds=rounds)
        self.importer.keep_names([stash])
        at = inner.elementwise_sub(count, inner.fill_constant(shape=[], dtype="int64", value=float(self.start))) if self.start else count
        inner.stash_write(stash, row, inner.reshape(at, shape=[1]), out={"Out": stash})
        return stash

    def _template(self, row: Variable, block: Block) -> tuple[Variable, bool]:
        """A value outside of the loop with the type of one inside, and whether its sizes are known there. If not, they come from the first
        round."""
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
    """The value as an optional, if the loop starts with an optional."""
    return b.optional(new) if isinstance(held.desc.type, OptionalType) and not isinstance(new.desc.type, OptionalType) else new


def is_long(n: Node, graph: Any, rounds: int | None) -> bool:
    """Are there too many rounds to unroll, and may the program have a loop, because nothing runs it meanwhile?"""
    return n.importer.evaluate is None and rounds is not None and rounds * len(graph.node) > limits.UNROLLED
