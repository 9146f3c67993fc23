"""Schedules of many micro-batches from a program of a few: its last but one stands for all that it does not have.

A rank's schedule is cut into the pieces of the pipeline's schedule, the forward or backward work of one micro-batch, and the messages
between them. They are put together again for any number of micro-batches, in the order that the strategy's schedule gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..executor.plan.records import Plan, Step
from ..ir import flow
from ..ir.errors import ExecutionError
from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator, Role
from ..ir.time_axes import turn_groups
from ..transpiler.passes.schedule import Schedule
from ..transpiler.placement.pipeline_stages import STAGES
from ..transpiler.scheduling.pipeline_schedules import Action, slots
from ..transpiler.transpiler import DistributeTranspiler
from .folding import Messages
from .schedule import Compute, Exchange, Item, Wait

LEAST = 2  # micro-batches of a program that stands for more


class Crossing(NamedTuple):
    """A message between stages: the work that it follows, and the stage that sends it."""

    work: Action
    sender: int


class MessageOrigin(NamedTuple):
    """Where the messages of an exchange come from: (item, number of the message in it) of its sends and of its receives."""

    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]


class RepeatedItems(NamedTuple):
    """The items for more micro-batches, and the origins of their exchanges among the items of the program."""

    items: list[Item]
    origins: dict[int, MessageOrigin]
    sources: dict[int, int]  # item -> item of the program, for those that are not exchanges between stages

    def messages(self, given: Mapping[int, tuple[Messages, Messages]]) -> dict[int, tuple[Messages, Messages]]:
        """The messages of a rank by item, from those by item of the program."""
        return {
            k: (tuple([given[i][0][port] for i, port in o.sends]), tuple([given[i][1][port] for i, port in o.receives]))
            for k, o in self.origins.items()
        }


class MicroBatches(NamedTuple):
    """How a program computes its micro-batches, and how many are to be simulated: `given` on the time axis `axis`.
    `schedule` is that of a pipeline, "" where the micro-batches come one after the other."""

    axis: str
    given: int
    simulated: int
    schedule: str

    @staticmethod
    def of(t: DistributeTranspiler, count: int) -> MicroBatches:
        """Those of a transpiled program, simulated as `count`. Raises ExecutionError if the program cannot stand for so many."""
        turns = t.main.turns
        if len(turns) != 1:
            raise ExecutionError(f"micro_batches={count}: {t.strategy!r} has no micro-batches; take strategies.micro_batches or pipeline")
        ((axis, given),) = turns.items()
        if not isinstance(count, int) or isinstance(count, bool) or count < given or given < LEAST:
            raise ExecutionError(
                f"micro_batches={count!r}: a program of {given} micro-batches stands for as many or more, if it has at least {LEAST}, the "
                f"first and one that is repeated; transpile for {LEAST} or 3, and ask for an integer of at least as many"
            )
        schedule = next((p.by for p in t.strategy.passes if isinstance(p, Schedule)), "")
        return MicroBatches(axis, given, count, schedule if STAGES in t.main.groups else "")

    def of_the_program(
        self, batch: int | None, feed: Mapping[str, Sequence[int]] | None
    ) -> tuple[int | None, Mapping[str, Sequence[int]] | None]:
        """The batch, and the shapes of the feed, for the micro-batches that the program has."""
        shapes = None if feed is None else {name: (self._rows(shape[0]), *shape[1:]) if shape else shape for name, shape in feed.items()}
        return None if batch is None else self._rows(batch), shapes

    def _rows(self, rows: int) -> int:
        if rows % self.simulated:
            raise ExecutionError(f"micro_batches={self.simulated}: a batch of {rows} rows does not divide by it; give a multiple")
        return rows // self.simulated * self.given

    def stood_for_by(self, turn: int, count: int) -> int:
        """The micro-batch of the program that is like number `turn` of `count`.

        >>> [MicroBatches("mb", 3, 5, "1f1b").stood_for_by(turn, 5) for turn in range(5)]
        [0, 1, 1, 1, 2]
        >>> [MicroBatches("mb", 2, 5, "1f1b").stood_for_by(turn, 5) for turn in range(5)]
        [0, 1, 1, 1, 1]
        """
        return self.given - 1 if turn == count - 1 else min(turn, max(1, self.given - 2))


class WorkPart(NamedTuple):
    """The work that an item belongs to; None before the first. `once`: it has no micro-batch, and is done in one of them only."""

    work: Action | None
    once: bool = False


class WorkOfSteps:
    """Which work of which micro-batch each step of a plan belongs to. A step without a micro-batch belongs to that of the step before."""

    def __init__(self, plan: Plan, of: MicroBatches):
        self.program, self.of = plan.program, of
        self.stage = _stage(plan, plan.program.rank or 0) if of.schedule else 0
        self.ranks = plan.program.group_ranks(STAGES, plan.program.rank or 0) if of.schedule else []
        self.turn = {name: turn.last for name, turn in turn_groups(self.program.turns)}
        self.backward: dict[str, bool] = {}
        self.last: Action | None = None
        self.crossings: dict[int, tuple[list[Crossing], list[Crossing]]] = {}  # by step: those of sends and of receives

    def __call__(self, step: Step, k: int) -> WorkPart:
        """The work of step k."""
        works = [self.work(op) for op in step.ops]
        if opdef(step.op.type).effect is Effect.P2P:
            sides: tuple[list[Crossing], list[Crossing]] = ([], [])
            for op, work in zip(step.ops, works, strict=True):
                if work is None:
                    break
                peer = self.ranks.index(op.attrs["peer"])
                backward = (peer < self.stage) if op.inputs else (peer > self.stage)  # gradients go back
                self.backward.update(dict.fromkeys(op.output_arg_names, backward))
                sides[not op.inputs].append(Crossing(Action(backward, work.turn), self.stage if op.inputs else peer))
            else:
                self.crossings[k] = sides
                return WorkPart(None)
        found = max([w for w in works if w is not None], default=None, key=lambda w: w.turn)
        if found is not None:
            self.last = found if self.of.schedule else Action(False, found.turn)
        return WorkPart(self.last, found is None)

    def work(self, op: Operator) -> Action | None:
        """The work of an operator; None for one without a micro-batch."""
        ins, outs = flow.touches(self.program, op)
        backward = op.role is Role.BACKWARD or (op.role not in (Role.FORWARD, Role.LOSS) and any(self.backward.get(n, False) for n in ins))
        self.backward.update(dict.fromkeys(outs, backward))
        turns = [turn for n in (*ins, *outs) if (turn := self.turn_of(n)) is not None]
        return Action(backward, max(turns)) if turns else None

    def turn_of(self, name: str) -> int | None:
        """The micro-batch of a value; None for one that is of none."""
        desc = self.program.global_block().descs.get(name)
        return None if desc is None else max([self.turn[e.group] for e in desc.placement if e.group in self.turn], default=None)


def _stage(plan: Plan, rank: int) -> int:
    return list(plan.program.group_ranks(STAGES, rank)).index(rank)


def _refused(of: MicroBatches, why: str) -> ExecutionError:
    instead = f"transpile for 3 micro-batches, or for all {of.simulated}"
    return ExecutionError(f"micro_batches={of.simulated}: {why}; {instead}")


_END: Action | None = Action(True, -1)  # what follows all works


class _Parts(NamedTuple):
    """The items of a program by what they are: of each work, and the message of each crossing, as (item, number in it)."""

    works: Mapping[Action | None, list[int]]
    once: set[int]
    sends: Mapping[Crossing, list[tuple[int, int]]]
    receives: Mapping[Crossing, list[tuple[int, int]]]


def repeat(items: Sequence[Item], works: Sequence[WorkPart | None], found: WorkOfSteps) -> RepeatedItems:
    """The items for more micro-batches. `works` has the work of each item. Raises ExecutionError for a program whose order is not that of
    its schedule."""
    of = found.of
    known = [part or WorkPart(None) for part in works]
    parts = _parts(items, [WorkPart(None, isinstance(i, Wait)) if p.work is None else p for i, p in zip(items, known, strict=True)], found)
    same = _Composer(items, parts, found, of.given).run()
    if _order(items, parts.once) != _order(same.items, {k for k, i in same.sources.items() if i in parts.once}):
        raise _refused(of, "the program does not compute its micro-batches in the order of the schedule")
    return _Composer(items, parts, found, of.simulated).run()


def _parts(items: Sequence[Item], works: Sequence[WorkPart], found: WorkOfSteps) -> _Parts:
    once = {i for i, part in enumerate(works) if part.once}
    works = _behind_messages(items, works, found)
    by: dict[Action | None, list[int]] = {}
    sends: dict[Crossing, list[tuple[int, int]]] = {}
    receives: dict[Crossing, list[tuple[int, int]]] = {}
    for i, (item, (work, _)) in enumerate(zip(items, works, strict=True)):
        if _crosses(item, found):
            assert isinstance(item, Exchange)
            for side, into in zip(found.crossings[item.steps[0]], (sends, receives), strict=True):
                for port, crossing in enumerate(side):
                    into.setdefault(crossing, []).append((i, port))
        else:
            by.setdefault(work, []).append(i)
    return _Parts(by, once, sends, receives)


def _crosses(item: Item, found: WorkOfSteps) -> bool:
    return isinstance(item, Exchange) and item.steps[0] in found.crossings


def _behind_messages(items: Sequence[Item], works: Sequence[WorkPart], found: WorkOfSteps) -> list[WorkPart]:
    """The works, where what is done once and follows a message belongs to the next work, or to the end."""
    moved, following = list(works), _END
    for i in reversed(range(len(items))):
        if _crosses(items[i], found):
            for k in range(i + 1, len(items)):
                if not moved[k].once:
                    break
                moved[k] = WorkPart(following, True)
        elif not works[i].once:
            following = works[i].work
    return moved


class _Composer:
    """Puts the parts of a schedule together for `count` micro-batches."""

    def __init__(self, items: Sequence[Item], parts: _Parts, found: WorkOfSteps, count: int):
        self.items, self.parts, self.of, self.stage, self.count = items, parts, found.of, found.stage, count
        self.stages = max(1, len(found.ranks))
        self.out: list[Item] = []
        self.origins: dict[int, MessageOrigin] = {}
        self.sources: dict[int, int] = {}
        self.number: dict[tuple[int, int], int] = {}  # (item of the program, micro-batch) -> item
        self.message_of: dict[int, list[Crossing]] = {}
        for crossing, ports in parts.receives.items():
            for i, _ in ports:
                self.message_of.setdefault(i, []).append(crossing)
        self.arrives: dict[Crossing, int] = {}

    def run(self) -> RepeatedItems:
        self._put(self.parts.works.get(None, ()), 0)
        if not self.of.schedule:
            for turn in range(self.count):
                self._work(Action(False, turn))
        else:
            self._pipeline()
        self._put(self.parts.works.get(_END, ()), self.count - 1)
        return RepeatedItems(self.out, self.origins, self.sources)

    def _pipeline(self) -> None:
        """The works of this stage in their slots, and its messages behind the slot of the work that they follow."""
        when = slots(self.of.schedule, self.stages, self.count)
        own = {2 * slot: work for work, slot in when[self.stage].items()}
        crossings: dict[int, list[Crossing]] = {}
        for sender in range(self.stages):
            for work, slot in when[sender].items():
                crossing = Crossing(work, sender)
                like = self._like(crossing)
                if like in self.parts.sends or like in self.parts.receives:
                    crossings.setdefault(2 * slot + 1, []).append(crossing)
        for time in sorted([*own, *crossings]):
            if time in own:
                self._work(own[time])
            else:
                self._exchange(crossings[time])

    def _like(self, crossing: Crossing) -> Crossing:
        turn = self.of.stood_for_by(crossing.work.turn, self.count)
        return Crossing(Action(crossing.work.backward, turn), crossing.sender)

    def _exchange(self, crossings: Sequence[Crossing]) -> None:
        sends, receives = [], []
        for crossing in crossings:
            sends += self.parts.sends.get(self._like(crossing), [])
            receives += self.parts.receives.get(self._like(crossing), [])
            self.arrives[crossing] = len(self.out)
        sent, got = tuple(sends), tuple(receives)
        like = self.items[(sent or got)[0][0]]
        self.origins[len(self.out)] = MessageOrigin(sent, got)
        sent_bytes = tuple([self.items[i].sends[port] for i, port in sent])  # type: ignore[attr-defined]
        got_bytes = tuple([self.items[i].receives[port] for i, port in got])  # type: ignore[attr-defined]
        self.out.append(replace(like, sends=sent_bytes, receives=got_bytes))  # type: ignore[call-arg]

    def _work(self, work: Action) -> None:
        turn = self.of.stood_for_by(work.turn, self.count)
        self._put(self.parts.works.get(Action(work.backward, turn), ()), work.turn)

    def _put(self, numbers: Sequence[int], turn: int) -> None:
        like = self.of.stood_for_by(turn, self.count)
        repeated = turn < self.count - 1 and (turn != like or like == self.of.given - 1)  # what is done once is done there
        for i in numbers:
            if repeated and i in self.parts.once:
                continue
            item = self.items[i]
            if isinstance(item, Wait):
                item = replace(item, item=self._waited(item.item, turn))
            elif isinstance(item, Exchange):
                n = len(item.sends), len(item.receives)
                self.origins[len(self.out)] = MessageOrigin(*(tuple([(i, port) for port in range(some)]) for some in n))
            self.number[i, turn] = len(self.out)
            self.sources[len(self.out)] = i
            self.out.append(item)

    def _waited(self, target: int, turn: int) -> int:
        """The item that a wait in a micro-batch waits for, which was `target` in the program."""
        if (known := self.number.get((target, turn))) is not None:
            return known
        crossings = [c for c in self.message_of.get(target, ()) if c.work.turn == self.of.stood_for_by(turn, self.count)]
        for c in crossings:
            found = self.arrives.get(Crossing(Action(c.work.backward, turn), c.sender))
            if found is not None:
                return found
        if turn == self.count - 1 and not crossings:  # what is left at the end: the last of its kind
            before = [k for k, item in enumerate(self.out) if item.beside]
            if before:
                return before[-1]
        raise _refused(self.of, "a micro-batch waits for communication of another")


def _order(items: Sequence[Item], once: Collection[int]) -> list[tuple]:
    """What must be equal in the schedule of the program and in the same schedule put together: all but the place of compute that is done
    once."""

    def shape(item: Item) -> tuple:
        if isinstance(item, Exchange):
            return Exchange, item.beside, sorted(item.sends), sorted(item.receives)
        return type(item), item.beside, shape(items[item.item]) if isinstance(item, Wait) else item.steps

    return [shape(item) for i, item in enumerate(items) if not (i in once and isinstance(item, Compute))]
