"""The proof of a rewrite that converts values: without the converters it is the program that it was made of.

Both programs are walked side by side. A converter (a cast, a copy between memories, a transpose at a border) makes no value: its result is
the value that it reads, so that it drops out. What is left must be the same operators in the same order, bodies included, and each must
read the same values as its counterpart, in the form that it wants. Each run of an operator makes new values, so a copy that was made before
its source was written again is another value, as is a converter of the wrong operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from ..ir import flow
from ..ir.conversions import Conversions, Order, between, composed
from ..ir.errors import VerifyError
from ..ir.opdef import OpDef, opdef
from ..ir.operator import Operator
from ..ir.program import Block, Program
from .refusal import Refusal, fail
from .verify_ranks import check_program


class Converted(NamedTuple):
    """What a name holds: which value, and in which order of axes."""

    value: Any  # a name for what is there before the program runs, else a number
    order: Order = ()


class _Side:
    """One of the two programs, and what its names hold."""

    def __init__(self, program: Program, promise: Conversions):
        self.program, self.promise = program, promise
        self.holds: dict[str, Converted] = {}
        self.finished: set[tuple[str, str]] = set()  # parameters and their gradients

    def read(self, name: str) -> Converted:
        return self.holds.get(name) or Converted(name)

    def operators(self, block: Block) -> Iterator[tuple[int, Operator]]:
        """The operators of a block that are no converters. What these leave is noted on the way."""
        for k, op in enumerate(block.oplist):
            self.finished.update(zip(op.role_var[::2], op.role_var[1::2], strict=True))
            order = self.promise.converts(op, block)
            if order is None:
                yield k, op
                continue
            (x,), (out,) = op.input_arg_names, op.output_arg_names
            held = self.read(x)
            self.holds[out] = Converted(held.value, composed(held.order, order))


def check_conversions(before: Program, after: Program, promise: Conversions, fetch: Iterable[str] = ()) -> None:
    """Raise VerifyError unless `after` is `before` with values converted as promised. State, and what is in `fetch`, is compared at the
    end, and everything else that `after` still has under its name."""
    check_program(after)
    if len(before.blocks) != len(after.blocks):
        raise VerifyError(f"{after.label()} has {len(after.blocks)} blocks, and what it was made of {len(before.blocks)}")
    _Comparison(before, after, promise).run(fetch)


class _Comparison:
    def __init__(self, before: Program, after: Program, promise: Conversions):
        self.promise = promise
        self.left, self.right = _Side(before, promise), _Side(after, promise)
        self.values = 0

    def run(self, fetch: Iterable[str]) -> None:
        left, right = self.left, self.right
        self._blocks(0, 0)
        descs = left.program.global_block().descs
        kept = {n for n, d in descs.items() if d.persistable or d.is_data}.union(fetch)
        for n in {*kept, *(n for n in left.holds if n in right.holds)}:
            if left.read(n) != right.read(n):
                raise fail(right.program, -1, f"%{n} ends with another value than in the program that it was made of")
        if other := left.finished ^ right.finished:
            raise fail(right.program, -1, f"other gradients are finished than before: {', '.join(sorted(g for _, g in other))}")

    def _blocks(self, mine: int, other: int) -> None:
        """Compare a block of the first program with one of the second."""
        block, made = self.left.program.blocks[mine], self.right.program.blocks[other]
        for found in zip_longest(self.left.operators(block), self.right.operators(made)):
            if found[0] is None or found[1] is None:
                k, op = found[0] or found[1]
                where = "was not there before" if found[0] is None else "is missing"
                raise fail(self.right.program, k if found[0] is None else -1, f"op {op.type} {where}", block=other)
            (_, op), (k, its) = found
            try:
                self._operators(op, its, block, made)
            except Refusal as e:
                raise fail(self.right.program, k, f"op {its.type} {e}", block=other) from None

    def _operators(self, op: Operator, its: Operator, block: Block, made: Block) -> None:
        if (op.type, op.role, op.device) != (its.type, its.role, its.device):
            raise Refusal(f"stands where op {op.type} stood")
        definition = opdef(op.type)
        if definition.bodies:
            self._control(op, its, definition)
            return
        orders = self._same_operands(op, its, definition)
        results = self.promise.results(op, its, block, orders)
        why = results if isinstance(results, str) else self.promise.misfit(op, its, block, made)
        if why:
            raise Refusal(str(why))
        outs = definition.flat_slots(op.outputs, definition.out_slots), definition.flat_slots(its.outputs, definition.out_slots)
        named = [(m, n) for m, n in zip(*outs, strict=True) if m is not None and n is not None]
        for (m, n), order in zip(named, results, strict=True):
            self._write(m, n, order)  # type: ignore[arg-type]

    def _same_operands(self, op: Operator, its: Operator, definition: type[OpDef]) -> list[Order]:
        """In which order of axes the second operator has the operands of the first."""
        pairs = [definition.flat_slots(one.inputs, definition.in_slots) for one in (op, its)]
        if len(pairs[0]) != len(pairs[1]) or any((m is None) != (n is None) for m, n in zip(*pairs, strict=True)):
            raise Refusal("has other operands")
        return [self._same(m, n) for m, n in zip(*pairs, strict=True) if m is not None and n is not None]

    def _same(self, name: str, other: str) -> Order:
        mine, its = self.left.read(name), self.right.read(other)
        if mine.value != its.value:
            raise Refusal(f"reads %{other}, which is not the value %{name} that it read before")
        return between(mine.order, its.order)

    def _write(self, name: str, other: str, order: Order = ()) -> None:
        self.values += 1
        self.left.holds[name], self.right.holds[other] = Converted(self.values), Converted(self.values, order)

    # -- operators that run blocks ---------------------------------------------------------------------------------------------

    def _control(self, op: Operator, its: Operator, definition: type[OpDef]) -> None:
        for m, n in zip(definition.control_operands(op), definition.control_operands(its), strict=True):
            if self._same(m, n):
                raise Refusal(f"decides by %{n}, whose axes are in another order")
        structure = {*definition.bodies, *definition.bodies.values()}
        if any(op.attrs[a] != its.attrs[a] for a in op.attrs if a not in structure):
            raise Refusal("has other attributes")
        blocks = [(op.attrs[which].idx, its.attrs[which].idx) for which in definition.bodies]
        written = self._written(blocks)
        if definition.repeats:
            for n in written:  # what the rounds before have left
                self._same_at_home(n, "when a round begins")
                self._write(n, n)
        start = dict(self.left.holds), dict(self.right.holds)
        count = len(op.output_arg_names) if any(definition.bodies.values()) else 0
        for (mine, other), results in zip(blocks, definition.bodies.values(), strict=True):
            self.left.holds, self.right.holds = dict(start[0]), dict(start[1])
            self._blocks(mine, other)
            for n in written:
                self._same_at_home(n, "when the block ends")
            for k in range(count) if results else ():
                if self._same(op.attrs[results][k], its.attrs[results][k]):
                    raise Refusal(f"hands out %{its.attrs[results][k]} with its axes in another order")
        self.left.holds, self.right.holds = start
        for n in written:
            self._write(n, n)
        for m, n in zip(op.output_arg_names[:count], its.output_arg_names[:count], strict=True):
            self._write(m, n)

    def _written(self, blocks: Iterable[tuple[int, int]]) -> list[str]:
        """What the blocks write outside of themselves, which has to be the same for both."""
        found: list[set[str]] = [set(), set()]
        for pair in blocks:
            for side, program in enumerate((self.left.program, self.right.program)):
                found[side].update(flow.sub_writes(program, program.blocks[pair[side]]))
        if more := sorted(found[0] ^ found[1]):
            raise Refusal(f"writes other variables outside of its blocks than before: {', '.join(more)}")
        return sorted(found[0])

    def _same_at_home(self, name: str, when: str) -> None:
        if self.left.read(name) != self.right.read(name):
            raise Refusal(f"has another value of %{name} than before {when}")
