"""The schedule of a rank, made from its plan: computing steps with their costs, collectives as meetings, messages as exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..executor.error_text import where
from ..executor.plan.cost import communicates
from ..executor.plan.records import Plan, Step
from ..ir.errors import ExecutionError
from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator, Role
from ..ir.program import Program
from ..transpiler.cluster import NODE
from ..transpiler.placement.pipeline_stages import STAGES
from .costs import CostEstimate
from .folding import Messages
from .schedule import Compute, Exchange, Item, Meeting, Wait


class Prices(Protocol):
    """What the parts of a run cost on a machine."""

    def step(self, plan: Plan, step: Step) -> CostEstimate:
        """The seconds of a step that computes."""

    def collective(self, method: str, members: Sequence[int], nbytes: int, groups: Sequence[Sequence[int]]) -> CostEstimate:
        """The seconds of a collective among `members`, while all sets of `groups` make the same call. `method` is the method of its
        algorithm, or "to_root", "from_root" and "root_parts". `nbytes` are those of the whole value."""

    def carried(
        self, algorithm: str, method: str, groups: Sequence[Sequence[int]], nbytes: int, hosts: int, rooted: bool
    ) -> CostEstimate:  # fmt: skip
        """The seconds of a collective that the sets of `groups` carry out by the messages of an algorithm."""

    @property
    def dispatch(self) -> float:
        """The seconds in which the host issues a step, ahead of the device."""

    def around(self, plan: Plan) -> CostEstimate:
        """The seconds of a run beside its steps: launching it and agreeing on it, and copying feeds in and fetches out."""


class Volume(NamedTuple):
    """What a collective moves: the method of its algorithm, "" for one without data, and the bytes of the whole value."""

    method: str
    nbytes: int


def volume(op: Operator, plan: Plan, n: int) -> Volume:
    """The volume of a collective among n ranks, from the values that this rank holds.

    A collective without an algorithm that sends data counts as a spread that sends as many bytes.
    """
    definition, values = opdef(op.type), plan.values
    ins = [values[name].type for name in op.input_arg_names if name in values]
    outs = [values[name].type for name in op.output_arg_names if name in values]
    method = definition.comm.algorithm_method
    if method == "spread":
        return Volume(method, sum(t.nbytes for t in outs))
    if method == "exchange":
        whole = max(sum(t.nbytes for t in side) for side in (ins, outs)) if "root" in op.attrs else n * sum(t.nbytes for t in ins)
        return Volume(method, whole)
    if method:
        return Volume(method, sum(t.nbytes for t in ins))
    if definition.comm.sent is None or not ins or n == 1:
        return Volume("", 0)
    return Volume("spread", round(definition.comm.sent(n, ins[0], op.attrs) * ins[0].nbytes * n / (n - 1)))


# they send as much as methods of all ranks, in another way
_ROOTED = {"reduce": "to_root", "broadcast": "from_root", "scatter_parts": "root_parts", "gather_parts": "root_parts"}


class KnownStep(NamedTuple):
    """A step without communication, and what it costs."""

    step: Step
    cost: CostEstimate


class ItemMaker:
    """Makes the items of a plan. `iterations` is the number of iterations of a loop that does not say it. `work_of` says to which work a
    step belongs; items of computing steps belong to one work, and `works` has that of each item. `like`: the maker of another rank's items;
    steps that are equal in both plans, on values of the same types, have its costs.

    `seconds` and `uncertain` are the sums of all costs, and of the costs times their spread."""

    def __init__(
        self, plan: Plan, prices: Prices, iterations: int | None = None, work_of: Callable[[Step, int], Any] | None = None,
        like: ItemMaker | None = None,
    ):  # fmt: skip
        self.plan, self.prices, self.iterations, self.work_of = plan, prices, iterations, work_of
        self.works: list[Any] = []
        self.program = plan.program
        self.rank = plan.program.rank or 0
        self.seconds = self.uncertain = 0.0
        self.known: dict[int, KnownStep] = {}  # by the identity of the first operator
        self._others: Mapping[int, KnownStep] = {} if like is None else like.known
        self._differ = frozenset[str]() if like is None else _other_types(plan, like.plan)

    def items(self) -> list[Item]:
        """The items, in the order of the plan."""
        found: list[Item] = []
        number: dict[int, int] = {}  # step -> item
        run = self._noted(self.prices.around(self.plan))
        work: list[tuple[int, float]] = [(-1, run)] if run else []
        beside = False
        belongs: Any = None

        def put(item: Item | None = None) -> None:
            nonlocal work
            if work:
                steps, seconds = zip(*work, strict=True)
                issued = self.prices.dispatch and self.prices.dispatch * sum(s > 0 and self._issued_alone(k) for k, s in work)
                found.append(Compute(steps, seconds, beside=beside, dispatch=issued))
                work = []
            if item is not None:
                found.append(item)
            self.works += [belongs] * (len(found) - len(self.works))

        for k, (step, cost) in enumerate(zip(self.plan.steps, self._costs(), strict=True)):
            to = belongs if self.work_of is None else self.work_of(step, k)
            if step.overlapped is not beside or to != belongs:
                put()
            beside, belongs = step.overlapped, to
            if step.waits_for is not None:
                put(Wait((k,), item=number[step.waits_for]))
            if cost is not None:
                work.append((k, cost.seconds))
            else:
                for part in self.parts(step, k):
                    if isinstance(part, float):
                        work.append((k, part))
                    else:
                        put(part)
            if step.marked:
                put()
                number[k] = len(found) - 1
        put()
        if self.plan.waits_at_end is not None:
            put(Wait((len(self.plan.steps),), item=number[self.plan.waits_at_end]))
        return found

    def _issued_alone(self, k: int) -> bool:
        """Does the host issue step k by itself? Updates, and copies of parameters such as casts to 16 bits, are issued for
        all parameters together."""
        if k < 0:
            return False
        op = self.plan.steps[k].op
        descs = self.program.global_block().descs
        moves = opdef(op.type).arithmetic.flops == 0 and op.input_arg_names
        return op.role is not Role.OPTIMIZE and not (moves and (d := descs.get(op.input_arg_names[0])) and d.is_parameter)

    def _costs(self) -> list[CostEstimate | None]:
        """The cost of each step; None for one that communicates or has sub-blocks."""
        others, alike, known = self._others, not self._differ, self.known
        found: list[CostEstimate | None] = []
        for step in self.plan.steps:
            at = id(step.ops[0])
            other = others.get(at)
            if other is not None and other.step == step and (alike or self._same_types(step)):
                known[at] = other
                found.append(other.cost)
            elif step.kernel == "control" or communicates(step):
                found.append(None)
            else:
                known[at] = KnownStep(step, self.prices.step(self.plan, step))
                found.append(known[at].cost)
        self.seconds += sum([c.seconds for c in found if c is not None])
        self.uncertain += sum([c.seconds * c.spread for c in found if c is not None])
        return found

    def _same_types(self, step: Step) -> bool:
        """Have the values of a step the types that they have in the other plan?"""
        apart = self._differ
        for op in step.ops:
            if not (apart.isdisjoint(op.input_arg_names) and apart.isdisjoint(op.output_arg_names)):
                return False
        return True

    def parts(self, step: Step, k: int) -> Iterator[float | Item]:
        """The seconds of a step, or the items of its communication. A loop is its body as often as it runs, a branch the dearer one."""
        if step.kernel == "control":
            bodies = [list(self._body(idx, k)) for idx in step.op.sub_blocks()]
            dearest = max(bodies, key=lambda parts: sum(p for p in parts if isinstance(p, float)), default=[])
            for _ in range(self._rounds(step.op)):
                yield from dearest
        elif communicates(step):
            yield from self._communication(step, k)
        else:
            yield self._noted(self.prices.step(self.plan, step))

    def _body(self, idx: int, k: int) -> Iterator[float | Item]:
        for step in self.plan.bodies[idx]:
            yield from self.parts(step, k)

    def _rounds(self, op: Operator) -> int:
        if not opdef(op.type).control.repeats:
            return 1
        most = self.iterations or op.attrs.get("max_rounds", 0)
        if not most:
            raise ExecutionError(
                f"op {op.type} runs until its condition is false, and nothing says how often that is; "
                f"give iterations=, or --iterations{where(op)}"
            )
        return most

    def _communication(self, step: Step, k: int) -> Iterator[Item]:
        if opdef(step.op.type).effect is Effect.P2P:
            sends, receives = messages(step.ops, self.plan)
            yield Exchange((k,), sends, receives, beside=step.overlapped, dispatch=self.prices.dispatch)
            return
        for op in step.ops:
            members = tuple(self.program.group_ranks(op.attrs["group"], self.rank))
            groups = self.program.groups[op.attrs["group"]]
            method, nbytes = volume(op, self.plan, len(members))
            if (by := op.attrs.get("algorithm", "")) and nbytes and len(members) > 1 and method != "adaptive":
                hosts = len(self.program.groups.get(NODE, ())) or 1
                found = self.prices.carried(by, method, groups, nbytes, hosts, "root" in op.attrs)
            else:
                found = self.prices.collective(_ROOTED.get(op.type, method), members, nbytes, groups)
            seconds = self._noted(found)
            yield Meeting((k,), op.attrs["group"], members, seconds, nbytes, beside=step.overlapped, dispatch=self.prices.dispatch)

    def _noted(self, found: CostEstimate) -> float:
        self.seconds += found.seconds
        self.uncertain += found.seconds * found.spread
        return found.seconds


def _other_types(plan: Plan, other: Plan) -> frozenset[str]:
    """The values of a plan that have no equal type in another one. Plans share equal types."""
    have = other.values
    return frozenset([n for n, v in plan.values.items() if n not in have or have[n].type is not v.type])


def messages(ops: Sequence[Operator], plan: Plan) -> tuple[Messages, Messages]:
    """The sends and the receives of operators, as (the other rank, bytes)."""
    sends: list[tuple[int, int]] = []
    receives: list[tuple[int, int]] = []
    for op in ops:
        side, names = (sends, op.input_arg_names) if op.inputs else (receives, op.output_arg_names)
        side.append((op.attrs["peer"], sum(plan.values[n].type.nbytes for n in names if n in plan.values)))
    return tuple(sends), tuple(receives)


class GroupSets:
    """The sets of all groups of programs, by the ranks in them. Programs of ranks share their groups."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, dict[int, tuple[int, ...]]]] = {}  # by the identity of the sets, which are kept alive

    def of(self, program: Program, rank: int) -> dict[str, tuple[int, ...]]:
        """{group: the set that the rank is in}, for the groups that it is in.

        >>> import fluidx as fx
        >>> program = fx.Program("p")
        >>> program.groups = {"dp": ((0, 1), (2, 3)), "tp": ((0, 1),)}
        >>> GroupSets().of(program, 2)
        {'dp': (2, 3)}
        """
        found = {}
        for group, some in program.groups.items():
            if id(some) not in self._known:
                self._known[id(some)] = some, {r: members for members in map(tuple, some) for r in members}
            members = self._known[id(some)][1].get(rank)
            if members is not None:
                found[group] = members
        return found


def own_messages(items: Sequence[Item], program: Program, rank: int) -> Mapping[int, tuple[Messages, Messages]]:
    """The messages of a rank whose schedule equals another's, by item: the bytes are those of the other, the peers its own. `program` is
    its program, or that of another rank of its stage."""
    if not any(isinstance(item, Exchange) for item in items):
        return {}
    known: dict[int, int] = {}
    if program.rank is not None and program.rank != rank and STAGES in program.groups:
        known = dict(zip(program.group_ranks(STAGES, program.rank), program.group_ranks(STAGES, rank), strict=True))
    ops = [op for op in program.global_block().oplist if opdef(op.type).effect is Effect.P2P]
    peers = iter([known.get(op.attrs["peer"], op.attrs["peer"]) for op in ops])
    order = [op.inputs != {} for op in ops]
    found, at = {}, 0
    for k, item in enumerate(items):
        if not isinstance(item, Exchange):
            continue
        sends, receives, n = iter(item.sends), iter(item.receives), len(item.sends) + len(item.receives)
        mine: tuple[list, list] = ([], [])
        for sent in order[at : at + n]:
            mine[not sent].append((next(peers), next(sends if sent else receives)[1]))
        found[k] = tuple(mine[0]), tuple(mine[1])
        at += n
    return found
