"""Proof of a rewrite that only inserts conversions: without its converters, the new program equals the old one.

Both programs are read side by side. A converter (a cast, a copy between memories, a transpose) makes no new value: its result counts as the
value that it reads. The other operators must be the same in the same order, sub-blocks included, and each must read the same values as its
counterpart, in the form that it needs. Every other operator makes new values. So a copy made before its source was written again is another
value, and so is the result of a converter of the wrong operand.
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
    """The value of a name: which value, and in which order of axes."""

    value: Any  # a number; or the name, for a value from before the run
    order: Order = ()


class _Side:
    """One of the two programs, and the current values of its names."""

    def __init__(self, program: Program, promise: Conversions):
        self.program, self.promise = program, promise
        self.current: dict[str, Converted] = {}
        self.finished: set[tuple[str, str]] = set()  # (parameter, final gradient)

    def read(self, name: str) -> Converted:
        return self.current.get(name) or Converted(name)

    def operators(self, block: Block) -> Iterator[tuple[int, Operator]]:
        """The operators of a block without its converters, whose results are recorded here."""
        for k, op in enumerate(block.oplist):
            self.finished.update(zip(op.role_var[::2], op.role_var[1::2], strict=True))
            order = self.promise.converts(op, block)
            if order is None:
                yield k, op
                continue
            (x,), (out,) = op.input_arg_names, op.output_arg_names
            source = self.read(x)
            self.current[out] = Converted(source.value, composed(source.order, order))


def check_conversions(before: Program, after: Program, promise: Conversions, fetch: Iterable[str] = ()) -> None:
    """Raise VerifyError unless `after` is `before` with conversions as promised.

    At the end, state, data and fetches must be equal, and so must every other variable that both programs write.
    """
    check_program(after)
    if len(before.blocks) != len(after.blocks):
        raise VerifyError(f"{after.label()} has {len(after.blocks)} blocks, and the program before the rewrite {len(before.blocks)}")
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
        for n in sorted(n for n, d in descs.items() if d.persistable or d.is_data):
            self._same_declaration(n)
        for n in {*kept, *(n for n in left.current if n in right.current)}:
            if left.read(n) != right.read(n):
                raise fail(right.program, -1, f"%{n} ends with another value than in the program before the rewrite")
        if other := left.finished ^ right.finished:
            listed = ", ".join(sorted(g for _, g in other))
            raise fail(right.program, -1, f"the final gradients differ from those before the rewrite: {listed}")

    def _same_declaration(self, name: str) -> None:
        """Compare how a state or data variable is declared."""
        d, new = self.left.program.global_block().descs[name], self.right.program.global_block().descs.get(name)
        label = self.right.program.label()
        if new is None:
            raise VerifyError(f"{label} does not declare %{name}")
        if (d.type, d.persistable, d.is_data, d.is_parameter) != (new.type, new.persistable, new.is_data, new.is_parameter):
            raise VerifyError(f"{label} declares %{name} otherwise than the program before the rewrite")

    def _blocks(self, mine: int, other: int) -> None:
        """Compare a block of the old program with one of the new program."""
        block, made = self.left.program.blocks[mine], self.right.program.blocks[other]
        for found in zip_longest(self.left.operators(block), self.right.operators(made)):
            if found[0] is None or found[1] is None:
                k, op = found[0] or found[1]
                where = "is new" if found[0] is None else "is missing"
                raise fail(self.right.program, k if found[0] is None else -1, f"op {op.type} {where}", block=other)
            (_, op), (k, new_op) = found
            try:
                self._operators(op, new_op, block, made)
            except Refusal as e:
                raise fail(self.right.program, k, f"op {new_op.type} {e}", block=other) from None

    def _operators(self, op: Operator, new_op: Operator, block: Block, made: Block) -> None:
        if (op.type, op.role, op.device) != (new_op.type, new_op.role, new_op.device):
            raise Refusal(f"is in the place of op {op.type}")
        definition = opdef(op.type)
        if definition.control.bodies:
            self._control(op, new_op, definition)
            return
        orders = self._same_operands(op, new_op, definition)
        results = self.promise.results(op, new_op, block, orders)
        why = results if isinstance(results, str) else self.promise.misfit(op, new_op, block, made)
        if why:
            raise Refusal(str(why))
        outs = definition.flat_slots(op.outputs, definition.out_slots), definition.flat_slots(new_op.outputs, definition.out_slots)
        named = [(m, n) for m, n in zip(*outs, strict=True) if m is not None and n is not None]
        for (m, n), order in zip(named, results, strict=True):
            self._write(m, n, order)  # type: ignore[arg-type]

    def _same_operands(self, op: Operator, new_op: Operator, definition: type[OpDef]) -> list[Order]:
        """For each operand, the order of axes in the new operator relative to the old one."""
        pairs = [definition.flat_slots(one.inputs, definition.in_slots) for one in (op, new_op)]
        if len(pairs[0]) != len(pairs[1]) or any((m is None) != (n is None) for m, n in zip(*pairs, strict=True)):
            raise Refusal("has other operands")
        return [self._same(m, n) for m, n in zip(*pairs, strict=True) if m is not None and n is not None]

    def _same(self, name: str, other: str) -> Order:
        old, new = self.left.read(name), self.right.read(other)
        if old.value != new.value:
            raise Refusal(f"reads %{other}, which is not the value %{name} that it read before")
        return between(old.order, new.order)

    def _write(self, name: str, other: str, order: Order = ()) -> None:
        self.values += 1
        self.left.current[name], self.right.current[other] = Converted(self.values), Converted(self.values, order)

    # -- operators that run blocks ---------------------------------------------------------------------------------------------

    def _control(self, op: Operator, new_op: Operator, definition: type[OpDef]) -> None:
        for m, n in zip(definition.control_operands(op), definition.control_operands(new_op), strict=True):
            if self._same(m, n):
                raise Refusal(f"is controlled by %{n}, whose axes are in another order")
        structure = {*definition.control.bodies, *definition.control.bodies.values()}
        if any(op.attrs[a] != new_op.attrs[a] for a in op.attrs if a not in structure):
            raise Refusal("has other attributes")
        blocks = [(op.attrs[which].idx, new_op.attrs[which].idx) for which in definition.control.bodies]
        written = self._written(blocks)
        if definition.control.repeats:
            for n in written:  # values that earlier rounds have written
                self._same_unconverted(n, "when a round begins")
                self._write(n, n)
        start = dict(self.left.current), dict(self.right.current)
        count = len(op.output_arg_names) if any(definition.control.bodies.values()) else 0
        for (mine, other), results in zip(blocks, definition.control.bodies.values(), strict=True):
            self.left.current, self.right.current = dict(start[0]), dict(start[1])
            self._blocks(mine, other)
            for n in written:
                self._same_unconverted(n, "when the block ends")
            for k in range(count) if results else ():
                if self._same(op.attrs[results][k], new_op.attrs[results][k]):
                    raise Refusal(f"returns %{new_op.attrs[results][k]} with its axes in another order")
        self.left.current, self.right.current = start
        for n in written:
            self._write(n, n)
        for m, n in zip(op.output_arg_names[:count], new_op.output_arg_names[:count], strict=True):
            self._write(m, n)

    def _written(self, blocks: Iterable[tuple[int, int]]) -> list[str]:
        """The outer variables that the blocks write. They must be the same in both programs."""
        found: list[set[str]] = [set(), set()]
        for pair in blocks:
            for side, program in enumerate((self.left.program, self.right.program)):
                found[side].update(flow.sub_writes(program, program.blocks[pair[side]]))
        if more := sorted(found[0] ^ found[1]):
            raise Refusal(f"writes other outer variables in its blocks than before: {', '.join(more)}")
        return sorted(found[0])

    def _same_unconverted(self, name: str, when: str) -> None:
        if self.left.read(name) != self.right.read(name):
            raise Refusal(f"has another value of %{name} than before {when}")
