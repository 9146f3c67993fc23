"""A record of programs as they were when they were looked at: tells whether anything was changed since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .program import Program


class Stamp:
    """Remembers programs' operators and variables. They are immutable records, so comparing them is mostly comparing identities.

    >>> p = Program("p")
    >>> stamp = Stamp([p])
    >>> stamp.changed(p)
    ''
    >>> _ = p.global_block().append_op("fill_constant", {}, {"Out": "x"}, {"shape": (2,), "value": 1.0})
    >>> stamp.changed(p)
    'program p has 1 operator, it had 0'
    """

    def __init__(self, programs: Sequence[Program]):
        self._held = {id(p): (p, _state(p)) for p in programs}

    def changed(self, program: Program) -> str:
        """What is different about one of the programs; "" when nothing is."""
        if id(program) not in self._held:
            return f"{program.label()} is another object"
        old, new = self._held[id(program)][1], _state(program)
        if old == new:
            return ""
        for (_, ops), (_, ops_now) in zip(old[1], new[1], strict=False):
            if len(ops) != len(ops_now):
                s = "" if len(ops_now) == 1 else "s"
                return f"{program.label()} has {len(ops_now)} operator{s}, it had {len(ops)}"
            for before, now in zip(ops, ops_now, strict=True):
                if before != now:
                    return f"{program.label()} has\n    {now}\n  where it had\n    {before}"
        return f"{program.label()} declares other variables, groups or blocks than it did"


def _state(program: Program) -> tuple[Any, list[tuple[Any, tuple]]]:
    head = (dict(program.groups), program.rank, program.random_seed, len(program.blocks))
    return head, [((b.parent_idx, dict(b.descs)), tuple(b.oplist)) for b in program.blocks]
