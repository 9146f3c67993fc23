"""The symbolic run of each rank by itself, between two operators that all ranks have: messages, collective calls, and deadlocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir.errors import VerifyError
from ..ir.opdef import OPS, Effect
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.text import ALWAYS_SHOWN
from .rank_classes import collectives_in_blocks, touched
from .refusal import NotYet, Refusal, fail
from .values import EMPTY

if TYPE_CHECKING:
    from .simultaneous_run import SimultaneousRun


class SeparateRuns:
    """Runs each rank by itself up to the next common operator. `at`: the next operator of each rank; `stop`: where each rank stops."""

    def __init__(self, world: SimultaneousRun):
        self.world, self.programs, self.n = world, world.programs, world.n
        self.rank_classes, self.declared, self.rank_values = world.rank_classes, world.declared, world.rank_values
        self.collective_calls, self.messages, self.attrs_id = world.collective_calls, world.messages, world.classes.attrs_id
        self.at: list[int] = []
        self.stop: list[int] = []

    def run_to(self, k: int) -> int:
        """Run the operators before common operator k; return the number of the next common operator that all ranks have reached."""
        if k not in self.rank_classes.after_gap:
            return k
        begin = [0 if k == 0 else c.common[k - 1] + 1 for c in self.rank_classes.classes]
        active = {id(c) for c, b in zip(self.rank_classes.classes, begin, strict=True) if b < c.common[k]}
        if not active:
            return k
        start = {id(c): b for c, b in zip(self.rank_classes.classes, begin, strict=True)}
        self.at = [start[id(c)] for c in self.rank_classes.of]
        self.stop = [c.common[k] for c in self.rank_classes.of]
        self.messages.items = [None] * self.n
        todo = deque(r for r in range(self.n) if id(self.rank_classes.of[r]) in active)
        self.postponed: dict[int, NotYet] = {}  # ranks that need a value which another rank has not made yet
        seen = -1
        while True:
            queued = set(todo)
            while todo:
                r = todo.popleft()
                queued.discard(r)
                for other in self._advance(r):
                    if other not in queued:
                        queued.add(other)
                        todo.append(other)
            stuck = [r for r in range(self.n) if self.at[r] < self.stop[r]]
            if not stuck:
                return k
            if self.postponed and sum(self.at) > seen:
                seen = sum(self.at)
                todo.extend(self.postponed)
                self.postponed.clear()
                continue
            if k >= self.rank_classes.length and self.postponed:
                r, e = next(iter(self.postponed.items()))
                raise fail(self.programs[r], self.at[r], str(e), rank=r)
            if k >= self.rank_classes.length:
                raise self._deadlock(stuck)
            # some rank waits for a rank that has reached the common operator: run that separately too
            k += 1
            self.stop = [c.common[k] for c in self.rank_classes.of]
            todo.extend(range(self.n))

    def _op(self, r: int) -> Operator:
        c = self.rank_classes.of[r]
        return self.rank_classes.ops[c.codes[self.at[r]]][0]

    def _advance(self, r: int) -> list[int]:
        """Run rank r up to a communication that cannot complete yet; return the ranks that may continue because of it."""
        woken: list[int] = []
        rank_class = self.rank_classes.of[r]
        while self.at[r] < self.stop[r]:
            k = self.at[r]
            code = rank_class.codes[k]
            op, program = self.rank_classes.ops[code]
            definition = OPS.get(op.type)
            effect = definition.effect if definition is not None else Effect.PURE
            try:
                if effect is Effect.P2P:
                    if not self.messages.exchange(r, woken):
                        break
                elif effect is Effect.COLLECTIVE:
                    if not self._run_collective(r, op, woken):
                        break
                elif members := self._ranks_of_blocks(op, program, r):
                    if not self._run_blocks_together(code, members, woken, r):
                        break
                else:
                    self.world.run_on_rank(r, k, op, program, code)
                    self.at[r] = k + 1
            except NotYet as e:
                self.postponed[r] = e
                break
            except Refusal as e:
                raise fail(self.programs[r], min(self.at[r], k), str(e), rank=r) from None
            except VerifyError:
                raise
            except Exception as e:
                raise fail(self.programs[r], k, f"op {op.type} cannot be checked: {type(e).__name__}: {e}", rank=r) from None
        return woken

    def _run_collective(self, r: int, op: Operator, woken: list[int]) -> bool:
        members = self.collective_calls.members(op, r)
        theirs = []
        for m in members:
            if self.at[m] >= len(self.rank_classes.of[m].codes):
                raise Refusal(f"op {op.type} waits for rank {m}, which has ended")
            if self.at[m] >= self.stop[m]:
                return False
            other = self._op(m)
            if OPS[other.type].effect is not Effect.COLLECTIVE if other.type in OPS else True:
                return False
            if tuple(self.collective_calls.members(other, m)) != tuple(members):
                return False
            theirs.append(other)
        for m, other in zip(members, theirs, strict=True):
            if (other.type, self.attrs_id(other.attrs)) != (op.type, self.attrs_id(op.attrs)):
                raise Refusal(f"rank {r} is in {_call_text(op)}, rank {m} in the same collective call in {_call_text(other)}")
        self.collective_calls.of_members(members, theirs)
        for m in members:
            self.at[m] += 1
            if m != r:
                woken.append(m)
        return True

    def _ranks_of_blocks(self, op: Operator, program: Program, r: int) -> Sequence[int]:
        """The ranks that run the blocks of an operator together, because of collectives in them; () if there are none."""
        if op.type not in OPS or not OPS[op.type].control.bodies:
            return ()
        groups = collectives_in_blocks(program, op)
        members = {r} if groups else set()
        while more := {m for one in groups for k in members for m in self.collective_calls.members(one, k)} - members:
            members |= more
        return sorted(members)

    def _run_blocks_together(self, code: int, members: Sequence[int], woken: list[int], r: int) -> bool:
        """Run an operator whose blocks communicate, on all ranks that take part, which must have equal values."""
        op, program = self.rank_classes.ops[code]
        for m in members:
            if self.at[m] >= len(self.rank_classes.of[m].codes):
                raise Refusal(f"op {op.type} waits for rank {m}, which has ended")
            if self.at[m] >= self.stop[m] or self.rank_classes.of[m].codes[self.at[m]] != code:
                return False
        for n in {*op.input_arg_names, *(n for b in op.sub_blocks() for n in touched(program, b))}:
            if n in self.declared.vars and len({self.rank_values.value(n, m) for m in members} - {EMPTY}) > 1:
                raise Refusal(
                    f"op {op.type}: its blocks communicate, but ranks {members[0]} to {members[-1]} have different values of %{n}"
                )
        self.world.running = frozenset(members)
        for m in members:
            self.world.run_on_rank(m, self.at[m], op, program, code)
        self.world.running = frozenset()
        for m in members:
            self.at[m] += 1
            if m != r:
                woken.append(m)
        return True

    # -- the report of a deadlock ------------------------------------------------------------------------------------

    def _deadlock(self, stuck: Sequence[int]) -> VerifyError:
        lines = []
        for r in stuck[:8]:
            op = self._op(r)
            items = self.messages.items[r]
            if items:
                op = next(x.op for x in items if not x.done)
                waits = f"rank {op.attrs['peer']}"
            else:
                members = self._ranks_of_blocks(op, self.programs[r], r) or self.collective_calls.members(op, r)
                absent = [m for m in members if m != r and not self._is_at(m, members)]
                waits = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent[:8]))}"
            lines.append(f"  rank {r} waits for {waits} in {op.to_string()}")
        head = f"the ranks wait for each other for ever: {len(stuck)} of {self.n} ranks are stuck"
        return fail(self.programs[stuck[0]], self.at[stuck[0]], head + "\n" + "\n".join(lines), rank=stuck[0])

    def _is_at(self, m: int, members: Sequence[int]) -> bool:
        if self.at[m] >= len(self.rank_classes.of[m].codes):
            return False
        other = self._op(m)
        definition = OPS.get(other.type)
        if inside := self._ranks_of_blocks(other, self.programs[m], m):
            return tuple(inside) == tuple(members)
        if definition is None or definition.effect is not Effect.COLLECTIVE:
            return False
        try:
            return tuple(self.collective_calls.members(other, m)) == tuple(members)
        except Refusal:
            return False


def _call_text(op: Operator) -> str:
    """A collective call for a message: the op with its group and the attributes that differ from their defaults."""
    usual = OPS[op.type].defaults
    shown = ", ".join(f"{k}={v}" for k, v in sorted(op.attrs.items()) if k in ALWAYS_SHOWN or v != usual.get(k))
    return f"{op.type}({shown})"
