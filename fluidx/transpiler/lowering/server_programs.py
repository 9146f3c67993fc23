"""Remove from the programs of servers and trainers the operators that only other ranks run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from ...ir import flow
from ...ir.errors import TranspileError
from ...ir.opdef import OPS, Effect
from ...ir.operator import Operator, Role
from ...ir.parts import Coords, holds
from ...ir.program import Program
from ...ir.sub_blocks import runs_bodies
from ...ir.types import Local, Placement
from ..cluster import SERVERS
from ..placement.placement_walk import where
from .server_exchange import SERVED

_LOCAL: Placement = (Local(),)


class _Trainer(NamedTuple):
    """A trainer's program after operators of servers were removed. `before` keeps the original operators alive, so that their ids stay
    unique."""

    before: list[list[Operator]]
    ops: list[Operator]
    names: list[str]
    blocks: int


class ServerPrograms:
    """Removes operators of other ranks from rank programs if there are servers. `kept`: do servers store anything? `updates`: does the
    program update parameters?"""

    def __init__(self, program: Program):
        self.program = program
        self.trainers: dict[tuple[int, ...], _Trainer] = {}  # by the ids of all original operators
        ops = program.global_block().oplist if SERVERS in program.groups else ()
        self.updates = any(op.role is Role.OPTIMIZE for op in ops)
        self.kept, self.away = _beside(program)

    def leave_out(self, new: Program, coords: Coords) -> None:
        """Remove the operators of other ranks from a rank's program. Trainers have no elements of values on servers, so trainers with the
        same operators share the result."""
        if any(g not in coords for g in self.program.groups):
            _leave_out(new, coords, self.away, self.updates)
            return
        if not self.updates:
            return
        before = [b.oplist for b in new.blocks]
        key = tuple(map(id, chain(*before)))
        if key not in self.trainers:
            _leave_out(new, coords, None, self.updates)
            self.trainers[key] = _Trainer(before, [*new.global_block().oplist], [*new.global_block().descs], len(new.blocks))
            return
        left, block = self.trainers[key], new.global_block()
        block.oplist, block.descs = [*left.ops], {n: block.descs[n] for n in left.names}
        new.drop_blocks(left.blocks)


def _beside(program: Program) -> tuple[bool, set[str]]:
    """Whether servers store anything, and the names that servers do not have: values that only trainers pull; or, if servers store nothing,
    all values that are not placed on servers."""
    if SERVERS not in program.groups:
        return False, set()
    block = program.global_block()
    descs = block.descs
    there = {n for n, d in descs.items() if any(e.group == SERVERS for e in d.placement)}
    if not any(descs[n].persistable for n in there):
        return False, set(descs) - there
    pulled = [descs[n] for op in block.oplist if op.type in SERVED for n in op.output_arg_names]
    return True, {d.name for d in pulled if not d.placement and not d.persistable}


def _leave_out(program: Program, coords: Coords, away: Collection[str] | None, updates: bool) -> None:
    """Remove the operators of other ranks from a rank's program. On a server, these are operators on values placed over the trainers'
    groups, operators that depend on them, and operators that are then not needed. On all ranks, these are operators on values with elements
    only on other servers, unless they are read. Without `updates`, all state is written. `away` is None on a trainer; on a server it has
    the names that servers do not have."""
    block, is_server = program.global_block(), away is not None
    descs = block.descs
    gone = {n for n, d in descs.items() if any(e.group and e.group not in coords for e in d.placement)}.union(away or ())
    left = _for_servers(program, coords, gone) if is_server else block.oplist
    ends = {n for n, d in descs.items() if d.persistable and n not in gone and not (updates and _empty(d.placement, coords))}
    unless = set(descs) if is_server else {n for n, d in descs.items() if d.placement == _LOCAL or _empty(d.placement, coords)}
    block.oplist = _needed(program, left, ends, unless)
    if len(program.blocks) > 1 and not any(runs_bodies(op) for op in block.oplist):
        program.drop_blocks(1)
    named = set(chain.from_iterable(chain(*flow.touches(program, op)) for op in block.oplist))
    for n in [n for n, d in descs.items() if n in gone or n in unless and n not in named and not d.persistable]:
        del descs[n]


def _for_servers(program: Program, coords: Coords, gone: set[str]) -> list[Operator]:
    """The operators of a program that a server runs; results of other ranks are added to `gone`. Raises TranspileError if a server could
    not compute state that it stores."""
    block, left = program.global_block(), []
    descs = block.descs
    for op in block.oplist:
        reads, writes = flow.touches(program, op)
        if gone.isdisjoint(reads) and gone.isdisjoint(writes) and op.attrs.get("group", "") in ("", *coords):
            named = (*reads, *writes) if op.sub_blocks() else ()
            elsewhere = next((n for n in named if n in descs and not holds(descs[n].placement, coords)), None)
            if elsewhere is not None:
                raise _not_served(op, f"must run on every server, but %{elsewhere} is stored on another one")
            left.append(op)
            continue
        kept = next((n for n in writes if n in descs and n not in gone and descs[n].persistable and {*reads} != {n}), None)
        if kept is not None:
            raise _not_served(op, f"writes %{kept}, which servers keep, and reads what trainers compute: a server has no data")
        gone.update(n for n in writes if n in descs and not descs[n].persistable)
    return left


def _not_served(op: Operator, what: str) -> TranspileError:
    advice = "take a strategy without servers for this program, such as strategies.zero1()"
    return TranspileError(f"op {op.type} {what}; {advice}{where(op)}")


def _empty(placement: Placement, coords: Coords) -> bool:
    """Does the rank have no elements of a value in flat ranges on servers?"""
    for e in placement:
        if e.bounds is not None and e.group == SERVERS:
            return coords[SERVERS][0] not in e.bounds.filled
    return False


def _needed(program: Program, ops: Sequence[Operator], ends: Iterable[str], unless: Collection[str]) -> list[Operator]:
    """The operators that are needed: all except those that write only names in `unless`, none of which is read or is in `ends`."""
    needed, out = set(ends), []
    for op in reversed(ops):
        reads, writes = flow.touches(program, op)
        talks = OPS[op.type].effect not in (Effect.PURE, Effect.RANDOM)
        if talks or not needed.isdisjoint(writes) or not all(n in unless for n in writes):
            needed.update(reads)
            out.append(op)
    return out[::-1]
