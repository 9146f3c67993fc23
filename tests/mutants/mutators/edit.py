"""Places and edits: how a change is named, so that it finds its place in the programs of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from fluidx.ir import OPS, Operator, Program, ProgramError, Role

Slots = Mapping[str, tuple[str, ...]]
Programs = Sequence[Program]
DTYPES = ("float32", "float64", "float16", "int64", "int32", "bool", "uint8")


@dataclass(frozen=True)
class Edit:
    """One change of one program; `apply` says whether it found its place."""

    kind: str
    text: str
    apply: Callable[[Program], bool]


class Place(NamedTuple):
    """An operator of a program, named so that it is found again in another rank's program."""

    block: int
    type: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    nth: int

    @staticmethod
    def of(program: Program, block: int, index: int) -> Place:
        ops = program.blocks[block].oplist
        op = ops[index]
        twins = [k for k, o in enumerate(ops) if _alike(o, op)]
        return Place(block, op.type, op.input_arg_names, op.output_arg_names, twins.index(index))

    def find(self, program: Program) -> int | None:
        if self.block >= len(program.blocks):
            return None
        ops = program.blocks[self.block].oplist
        alike = [k for k, o in enumerate(ops) if o.type == self.type and o.output_arg_names == self.writes]
        exact = [k for k in alike if ops[k].input_arg_names == self.reads]
        found = exact or (alike if self.writes else [])  # what a ring's rank reads is not what another one reads
        return found[min(self.nth, len(found) - 1)] if found else None

    def __str__(self) -> str:
        where = f"block {self.block}: " if self.block else ""
        nth = f" (number {self.nth})" if self.nth else ""
        return f"{where}{', '.join(self.writes) or '-'} = {self.type}({', '.join(self.reads)}){nth}"


NOWHERE = Place(0, "", (), (), 0)  # for a value that belongs to no operator


def _alike(a: Operator, b: Operator) -> bool:
    return a.type == b.type and a.output_arg_names == b.output_arg_names and a.input_arg_names == b.input_arg_names


def changed_copy(program: Program) -> Program:
    """A copy that may be written to."""
    new = program.copy()
    new.frozen = False
    new.rank, new.strategy, new.random_seed = program.rank, program.strategy, program.random_seed
    return new


def equal(p: Program, q: Program) -> bool:
    return p is q or p == q and [b.parent_idx for b in p.blocks] == [b.parent_idx for b in q.blocks]


def some_op(rng: Random, program: Program) -> tuple[Place, Operator] | None:
    """An operator; rare types and what only a strategy writes come as often as the many of a model."""
    every = [(b.idx, k, o) for b in program.blocks for k, o in enumerate(b.oplist)]
    if not every:
        return None
    p = rng.random()
    if p < 0.35:
        dist = [e for e in every if e[2].role is Role.DIST or e[2].type in ("send", "recv") or "group" in e[2].attrs]
        every = dist or every
    elif p < 0.5:
        inner = [e for e in every if e[0] or e[2].sub_blocks()]
        every = inner or every
    if rng.random() < 0.5:
        types = sorted({e[2].type for e in every})
        chosen = rng.choice(types)
        every = [e for e in every if e[2].type == chosen]
    block, k, op = rng.choice(every)
    return Place.of(program, block, k), op


def on_op(kind: str, place: Place, text: str, change: Callable[[Program, list[Operator], int], bool | None]) -> Edit:
    def apply(program: Program) -> bool:
        at = place.find(program)
        if at is None:
            return False
        return change(program, program.blocks[place.block].oplist, at) is not False

    return Edit(kind, text, apply)


def completed(name: str, attrs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return OPS[name].complete_attrs(attrs)
    except ProgramError:
        return None


def names_of(program: Program) -> list[str]:
    return [n for b in program.blocks for n in b.descs] or ["nope", "nor"]
