"""Casts: the forward operators of a program rewritten so that those which may work in 16 bits.

One walk forwards. An operator's declaration says what it works in, 16 bits, float32 or any, and each of its operands is read in that: from
the copy at hand, or from a cast written in front of it, once for each value. An operator that takes any follows what was computed before
it: float32 where one of its operands was worked out in float32, else 16 bits where one came in 16. Parameters, data and constants have
no say.

A value computed in 16 bits is a variable of 16 bits from then on. Where its name has to stay float32 (state, data, what is written
twice, what blocks or operators of other sections touch), the 16 bits get a name of their own and the old name is a cast back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ..ir import Block, Builder, Operator, Program, ProgramError, Role, TensorType, Var, flow, nearest
from ..ir.opdef import OpDef, opdef
from ..ir.operator import rename_slots
from ..ir.unique_name import unused
from .lists import AutoMixedPrecisionLists

WIDE = "float32"
_FORWARD = (Role.FORWARD, Role.LOSS)


def cast_forward(program: Program, lists: AutoMixedPrecisionLists, dtype: str) -> None:
    """Rewrite the forward operators of a program in place. Raises ProgramError where one of them cannot work in `dtype`."""
    block = program.global_block()
    unknown = next((n for n in lists.black_varnames if n not in block.descs), None)
    if unknown is not None:
        has = nearest(unknown, block.descs, "it has")
        raise ProgramError(f"custom_black_varnames: {program.label()} has no variable {unknown!r}; {has}")
    ops, block.oplist = block.oplist, []
    _Casts(program, block, lists, dtype, _fixed(program, ops)).run(ops)


@contextmanager
def as_it_was_on_errors(block: Block) -> Iterator[None]:
    """Leave the block as it was found when an error is raised."""
    ops, descs = list(block.oplist), dict(block.descs)
    try:
        yield
    except BaseException:
        block.oplist = ops
        block.descs.clear()
        block.descs.update(descs)
        raise


class _Casts:
    """The walk: `ops` go in, the block's list of operators is filled."""

    def __init__(self, program: Program, block: Block, lists: AutoMixedPrecisionLists, dtype: str, fixed: set[str]):
        self.program, self.block, self.lists, self.dtype, self.fixed = program, block, lists, dtype, fixed
        self.b = Builder(block, role=Role.FORWARD)
        self.worked_in: dict[str, str] = {}  # of values that were computed: 16 bits or float32
        self.narrowed: set[str] = set()  # values that are of 16 bits by this walk
        self.copies: dict[str, str] = {}  # of a value, its copy in the other dtype

    def run(self, ops: Iterable[Operator]) -> None:
        for op in ops:
            if op.role in _FORWARD and not (definition := opdef(op.type)).bodies:
                self._one(op, definition)
            else:
                self._forget(flow.writes(self.program, op))
                self.block.oplist.append(op)

    def _one(self, op: Operator, definition: type[OpDef]) -> None:
        works_in = self._works_in(op)
        names = {n: self._in(n, works_in, op) for n in op.input_arg_names if works_in}
        inputs = rename_slots(op.inputs, names)
        self._forget(op.output_arg_names)
        try:
            types = definition.infer_outputs({s: [self._type(n) for n in given] for s, given in inputs.items()}, op.attrs)
        except ProgramError as e:
            at = f"\n  written at {op.site}" if op.site else ""
            raise ProgramError(f"mixed precision in {self.dtype}: {e}; put {op.type!r} into custom_black_list{at}") from None
        made = {n: t.dtype for n, t in self._results(op, definition, types)}
        narrow = [n for n, dtype in made.items() if dtype == self.dtype != self._type(n).dtype]
        kept = {n: self._declare_half(n) for n in narrow if n in self.fixed}
        self.block.oplist.append(op.replace(inputs=inputs, outputs=rename_slots(op.outputs, kept)))
        if works_in:
            self.worked_in.update((n, self.dtype if dtype == self.dtype else WIDE) for n, dtype in made.items())
        for n in narrow:
            if n in kept:
                self._write_for(op)
                self.b.cast(kept[n], dtype=WIDE, out={"Out": n})
                self.copies[n] = kept[n]
            else:
                self.block.declare(self.block.desc(n).changed(type=self._type(n).with_dtype(self.dtype)))
                self.narrowed.add(n)

    def _works_in(self, op: Operator) -> str:
        """What an operator works in; "" where it takes any and nothing that was computed."""
        said = self.lists.of(op)
        if said != "any":
            return self.dtype if said == "half" else WIDE
        found = {self.worked_in.get(n, "") for n in op.input_arg_names if self._type(n).is_float}
        return next((d for d in (WIDE, self.dtype) if d in found), "")

    def _in(self, name: str, dtype: str, near: Operator) -> str:
        """The name under which a value is read in a dtype. What the rewrite did not narrow, it does not widen."""
        has = self._type(name).dtype
        if has == dtype or has not in (WIDE, self.dtype) or dtype == WIDE and name not in self.narrowed:
            return name
        if name not in self.copies:
            self._write_for(near)
            copy = self._free(f"{name}.{dtype}")
            self.copies[name] = self.b.cast(self.block.var(name), dtype=dtype, name=copy).name
        return self.copies[name]

    def _write_for(self, op: Operator) -> None:
        """Casts written from now on have the line and the device of `op`."""
        self.b.site, self.b.device = op.site, op.device

    def _results(self, op: Operator, definition: type[OpDef], types: Iterable[Any]) -> list[tuple[str, TensorType]]:
        """The operator's results with the types that its rule gives, one or a list for each slot."""
        found: list[tuple[str, TensorType]] = []
        for slot, t in zip(definition.out_slots, types, strict=True):
            found += zip(op.outputs.get(slot.name, ()), t if isinstance(t, list) else [t])
        return found

    def _declare_half(self, name: str) -> str:
        copy = self._free(f"{name}.{self.dtype}")
        self.block.declare(Var(copy, self._type(name).with_dtype(self.dtype), stop_gradient=self.block.desc(name).stop_gradient))
        return copy

    def _free(self, name: str) -> str:
        return unused(name, self.block.find, "_{}".format)

    def _type(self, name: str) -> TensorType:
        return self.block.desc(name).type

    def _forget(self, names: Iterable[str]) -> None:
        """Names that are written anew have another value from here on."""
        for n in names:
            self.copies.pop(n, None)
            self.worked_in.pop(n, None)


def _fixed(program: Program, ops: Iterable[Operator]) -> set[str]:
    """Names whose variables keep their type."""
    descs = program.global_block().descs
    fixed = {n for n, d in descs.items() if d.persistable or d.is_data}
    seen: set[str] = set()
    for op in ops:
        reads, writes = flow.touches(program, op)
        if op.role not in _FORWARD or opdef(op.type).bodies:
            fixed.update(reads, writes)
        fixed.update(n for n in writes if n in seen)
        seen.update(writes)
    return fixed
