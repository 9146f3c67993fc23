"""verify_ranks: run all rank programs together on symbolic values, and compare with the program for one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import VerifyError
from ..opdef import OPS, Effect
from ..operator import Operator
from ..program import Program, ProgramPair
from .evaluate import State
from .local import check_program, fail
from .terms import UNDEFINED, TermError, Terms, Value, covers

_COMM = (Effect.COLLECTIVE, Effect.P2P)


@dataclass
class Report:
    """What was proved, for which ranks."""

    label: str
    ranks: int
    operators: int = 0
    collectives: int = 0
    messages: int = 0
    variables: int = 0
    parameters: int = 0
    states: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        n = self.ranks
        lines = [
            f"proved for {self.label} on {n} rank{'s' * (n > 1)}:",
            f"  types        {self.operators} operators: every input defined, every type as its rule infers it",
            f"  collectives  {self.collectives} meetings: same order, type, shape, dtype, reduction and root on every member",
            f"  messages     {self.messages} sends, each with its recv: same peer, shape and dtype",
            "  no deadlock  all ranks reach the end of startup and of a step, even if sends wait for their recvs",
            f"  startup      every rank begins with the values of one device ({self.variables} variables)",
            f"  same answers {self.parameters} parameters and {self.states} other states "
            "end the step with one device's value, as expressions",
        ]
        lines += [f"  on purpose   {note}" for note in self.notes]
        return "\n".join(lines)


def verify_ranks(
    source: ProgramPair,
    mains: Sequence[Program],
    startups: Sequence[Program],
    layout: Mapping[str, Sequence[tuple[str, int, int, int]]] | None = None,
    loss_op: str = "",
    notes: Sequence[str] = (),
    label: str = "program",
) -> Report:
    """Prove that the rank programs do together what `source` does on one device; raise VerifyError where they do not.

    Checks types and definitions, that communication matches and cannot deadlock (each send is taken to wait for its recv), and that each
    persistable variable ends startup and a step with the same expression as on one device. For a loss that is a mean over rows, the mean
    of the ranks' gradients is one device's gradient.
    """
    report = Report(label, len(mains), notes=list(notes))
    layout = layout or {}
    _check_layout(source.main, layout)
    for programs, single in ((startups, source.startup), (mains, source.main)):
        report.operators += _check_types(programs)
        terms = Terms(len(programs), loss_op or "avg")
        reference = State(terms, single, 0, single=True)
        for i, op in enumerate(single.global_block().oplist):
            try:
                reference.run(op)
            except TermError as e:
                raise fail(single, i, str(e)) from None
        world = _World(terms, programs, report)
        world.run()
        is_main = programs is mains
        proved = _compare(reference, world.states, layout, set(report.notes), is_main)
        if not is_main:
            report.variables = len(proved)
            continue
        report.parameters = sum(reference.descs[n].is_parameter for n in proved)
        report.states = len(proved) - report.parameters
    return report


def _check_layout(source: Program, layout: Mapping[str, Sequence[tuple[str, int, int, int]]]) -> None:
    for name, pieces in layout.items():
        size = source.global_block().desc(name).type.numel
        if not covers(sorted((a, b) for _, _, a, b in pieces), size):
            raise VerifyError(f"the parts of %{name} do not cover its {size} elements: {sorted((a, b) for _, _, a, b in pieces)}")


def _check_types(programs: Sequence[Program]) -> int:
    first = programs[0]
    count = check_program(first)
    known = {id(op) for op in first.global_block().oplist}
    base = first.global_block().descs
    for p in programs[1:]:
        dirty = {n for n, d in p.global_block().descs.items() if base.get(n) is not d}
        count += check_program(p, known, dirty)
    return count


# -- all ranks together --------------------------------------------------------------------------------------------------------


@dataclass
class _Item:
    """One send or recv that has not met its partner."""

    op: Operator
    index: int
    peer: int
    done: bool = False


@dataclass
class _Rank:
    state: State
    ops: list[Operator]
    at: int = 0
    items: list[_Item] | None = None  # the group of sends and recvs that the rank is in


class _World:
    def __init__(self, terms: Terms, programs: Sequence[Program], report: Report):
        self.terms, self.programs, self.report = terms, programs, report
        self.n = len(programs)

    def run(self) -> None:
        shared, at = self._together()
        self.ranks = [_Rank(shared.fork(p, r), p.global_block().oplist, at) for r, p in enumerate(self.programs)]
        self.waiting: set[int] = set()
        todo = deque(range(self.n))
        while todo:
            r = todo.popleft()
            todo.extend(self._advance(r))
        stuck = [r for r in range(self.n) if self.ranks[r].at < len(self.ranks[r].ops)]
        if stuck:
            raise self._deadlock(stuck)
        self.states = [r.state for r in self.ranks]

    def _together(self) -> tuple[State, int]:
        """Run the operators that all ranks share, as long as every rank stays in the same state; return where they part."""
        state = State(self.terms, self.programs[0], 0)
        lists = [p.global_block().oplist for p in self.programs]
        descs = [p.global_block().descs for p in self.programs]
        first, others = lists[0], lists[1:]
        everyone = tuple(range(self.n))
        at = 0
        alike = all(d is descs[0] or all(d.get(k) is v for k, v in descs[0].items()) for d in descs[1:]) if others else True
        while at < len(first) and (alike or OPS[first[at].type].effect not in _COMM):
            op = first[at]
            if any(at >= len(o) or o[at] is not op for o in others):
                break
            names = (*op.input_arg_names, *op.output_arg_names)
            if not alike and any(d.get(n) is not descs[0].get(n) for d in descs[1:] for n in names):
                break
            effect = OPS[op.type].effect
            if effect is Effect.P2P:
                break
            try:
                if effect is Effect.COLLECTIVE:
                    group = op.attrs["group"]
                    simple = op.type in ("all_reduce", "broadcast", "nccl_init", "barrier")
                    if not simple or self.programs[0].groups.get(group) != (everyone,):
                        break
                    if op.input_arg_names:
                        values = [self._explicit(state.read(op.input_arg_names[0]), r) for r in everyone]
                        state.write(op.output_arg_names[0], self._result(op, values, 0, everyone))
                    self.report.collectives += 1
                else:
                    state.run(op)
            except TermError as e:
                raise fail(self.programs[0], at, str(e)) from None
            at += 1
        return state, at

    def _explicit(self, value: Value, rank: int) -> Value:
        if value[0] == "T":
            return ("T", tuple(self._explicit(v, rank) for v in value[1]), value[2])
        return value if value[0] != "L" else self.terms.total(self.terms.of(value, rank)) if self.n > 1 else value

    def _advance(self, r: int) -> list[int]:
        """Run rank r up to a communication that cannot complete yet; return ranks that may go on because of it."""
        rank = self.ranks[r]
        woken: list[int] = []
        while rank.at < len(rank.ops):
            op = rank.ops[rank.at]
            effect = OPS[op.type].effect if op.type in OPS else Effect.PURE
            try:
                if effect not in _COMM:
                    rank.state.run(op)
                    rank.at += 1
                elif effect is Effect.P2P:
                    if not self._exchange(r, woken):
                        break
                elif not self._meet(r, op, woken):
                    break
            except TermError as e:
                raise fail(self.programs[r], rank.at, str(e)) from None
        return woken

    # -- collectives ------------------------------------------------------------------------------------------------------------

    def _members(self, r: int, op: Operator) -> tuple[int, ...]:
        program = self.programs[r]
        group = op.attrs["group"]
        if group not in program.groups:
            raise TermError(f"op {op.type} names group {group!r}, which is not declared; declared: {', '.join(program.groups)}")
        return program.group_ranks(group, r)

    def _meet(self, r: int, op: Operator, woken: list[int]) -> bool:
        members = self._members(r, op)
        for m in members:
            other = self.ranks[m]
            if other.at >= len(other.ops):
                raise TermError(f"op {op.type} waits for rank {m}, which has ended")
            theirs = other.ops[other.at]
            if OPS[theirs.type].effect is not Effect.COLLECTIVE or self._members(m, theirs) != members:
                return False
        mine = self._signature(r, op)
        for m in members:
            met = self._signature(m, self.ranks[m].ops[self.ranks[m].at])
            if met != mine:
                raise TermError(f"rank {r} is in {_show(mine)}, rank {m} at the same meeting in {_show(met)}")
        self.report.collectives += 1
        if op.input_arg_names:
            ops = [self.ranks[m].ops[self.ranks[m].at] for m in members]
            values = [self._explicit(self.ranks[m].state.read(o.input_arg_names[0]), m) for m, o in zip(members, ops, strict=True)]
            for k, (m, o) in enumerate(zip(members, ops, strict=True)):
                self.ranks[m].state.write(o.output_arg_names[0], self._result(o, values, k, members))
        for m in members:
            self.ranks[m].at += 1
            if m != r:
                woken.append(m)
        return True

    def _signature(self, r: int, op: Operator) -> tuple:
        descs = self.programs[r].global_block().descs
        types = tuple(repr(descs[n].type) for n in op.input_arg_names if n in descs)
        return (op.type, types, op.attrs.get("op"), op.attrs.get("root"), op.attrs.get("nranks"), op.attrs["group"])

    def _result(self, op: Operator, values: list[Value], k: int, members: tuple[int, ...]) -> Value:
        """What member k gets from a collective on the members' values."""
        t = self.terms
        root = op.attrs.get("root")
        if root is not None and not 0 <= root < len(members):
            raise TermError(f"op {op.type} has root={root}, but its group has {len(members)} ranks")
        if op.type == "broadcast":
            if values[root][0] == "U":  # type: ignore[index]
                raise TermError(f"op broadcast hands out %{op.input_arg_names[0]}, which root {root} does not have")
            return values[root]  # type: ignore[index]
        if op.type == "reduce" and k != root:
            return UNDEFINED
        if op.type in ("all_reduce", "reduce", "reduce_scatter"):
            if op.attrs["op"] not in ("sum", "avg"):
                whole: Value = ("G", t.intern(("collective", op.attrs["op"], tuple(values))))
            else:
                w = 1.0 / len(members) if op.attrs["op"] == "avg" else 1.0
                whole = t.total((atom, v * w) for m, value in zip(members, values, strict=True) for atom, v in t.of(value, m))
            if op.type != "reduce_scatter":
                return whole
            size = self.ranks[members[k]].state.descs[op.input_arg_names[0]].type.numel
            return t.chunked(whole, size * k // len(members), size * (k + 1) // len(members), size)
        if op.type == "all_gather":
            each = self.ranks[members[k]].state.descs[op.input_arg_names[0]].type.numel
            if all(v[0] == "G" for v in values):
                e = t.join([(j * each, (j + 1) * each, v[1]) for j, v in enumerate(values)], each * len(members))
                if e is not None:
                    return ("G", e)
        return ("G", t.intern(("collective", op.type, tuple(values), k if op.type == "all_to_all" else None)))

    # -- point to point ------------------------------------------------------------------------------------------------------------

    def _exchange(self, r: int, woken: list[int]) -> bool:
        """Match the sends and recvs that rank r has started with those that its peers have started."""
        rank = self.ranks[r]
        if rank.items is None:
            rank.items = self._batch(r)
        for item in rank.items:
            if item.done:
                continue
            if not 0 <= item.peer < self.n or item.peer == r:
                raise TermError(f"op {item.op.type} names peer {item.peer}; ranks are 0 to {self.n - 1}, and not the rank itself")
            other = self.ranks[item.peer]
            if other.items is None and other.at < len(other.ops) and OPS[other.ops[other.at].type].effect is Effect.P2P:
                other.items = self._batch(item.peer)
            want = "recv" if item.op.type == "send" else "send"
            # messages between two ranks keep their order, so the first open partner is the one
            partner = next((x for x in other.items or () if not x.done and x.op.type == want and x.peer == r), None)
            earlier = next(x for x in rank.items if not x.done and x.op.type == item.op.type and x.peer == item.peer)
            if partner is None or earlier is not item:
                continue
            self._pass(r, item, item.peer, partner) if want == "recv" else self._pass(item.peer, partner, r, item)
            if item.peer not in woken:
                woken.append(item.peer)
        if not all(x.done for x in rank.items):
            return False
        rank.at += len(rank.items)
        rank.items = None
        return True

    def _batch(self, r: int) -> list[_Item]:
        rank = self.ranks[r]
        first = rank.ops[rank.at]
        stop = rank.at + 1
        batch = first.attrs.get("batch")
        if batch:
            while stop < len(rank.ops) and OPS[(op := rank.ops[stop]).type].effect is Effect.P2P and op.attrs.get("batch") == batch:
                stop += 1
        return [_Item(rank.ops[i], i, rank.ops[i].attrs["peer"]) for i in range(rank.at, stop)]

    def _pass(self, a: int, send: _Item, b: int, recv: _Item) -> None:
        x, out = send.op.input_arg_names[0], recv.op.output_arg_names[0]
        there, here = self.programs[a].global_block().desc(x).type, self.programs[b].global_block().desc(out).type
        if there != here:
            raise TermError(f"rank {a} sends %{x}: {there}, rank {b} receives %{out}: {here}")
        if send.op.attrs["group"] != recv.op.attrs["group"]:
            raise TermError(f"rank {a} sends over {send.op.attrs['group']}, rank {b} receives over {recv.op.attrs['group']}")
        self.ranks[b].state.write(out, self._explicit(self.ranks[a].state.read(x), a))
        send.done = recv.done = True
        self.report.messages += 1

    def _deadlock(self, stuck: list[int]) -> VerifyError:
        lines = []
        for r in stuck[:8]:
            rank = self.ranks[r]
            op = rank.ops[rank.at]
            if rank.items:
                op = next(x.op for x in rank.items if not x.done)
                waits = f"rank {op.attrs['peer']}"
            else:
                absent = [m for m in self._members(r, op) if m != r and not self._at_meeting(m, op, r)]
                waits = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
            lines.append(f"  rank {r} waits for {waits} in {op.to_string()}")
        program = self.programs[stuck[0]]
        head = f"the ranks wait for each other for ever: {len(stuck)} of {self.n} ranks are stuck"
        return fail(program, self.ranks[stuck[0]].at, head + "\n" + "\n".join(lines))

    def _at_meeting(self, m: int, op: Operator, r: int) -> bool:
        other = self.ranks[m]
        return (
            other.at < len(other.ops)
            and OPS[other.ops[other.at].type].effect is Effect.COLLECTIVE
            and self._members(m, other.ops[other.at]) == self._members(r, op)
        )


def _show(signature: tuple) -> str:
    type_, types, op, root, nranks, group = signature
    extra = "".join(f", {k}={v}" for k, v in (("op", op), ("root", root), ("nranks", nranks)) if v is not None)
    return f"{type_}({', '.join(types)}) over {group}{extra}"


# -- the result ---------------------------------------------------------------------------------------------------------------------


def _compare(
    reference: State, states: Sequence[State], layout: Mapping[str, Sequence[tuple[str, int, int, int]]], notes: set[str], is_main: bool
) -> list[str]:
    """Check that every persistable of the single-device program holds the same expression on each rank that has it; return their names.

    What a pass made local on purpose is checked to be the rank's own, and not returned.
    """
    terms, proved = reference.terms, []
    when = "at the end of the step" if is_main else "after startup"
    for name, d in reference.descs.items():
        if not d.persistable:
            continue
        expected = reference.read(name)
        if name in layout:
            proved.append(name)
            for chunk, owner, start, stop in layout[name]:
                want = terms.chunked(expected, start, stop, d.type.numel)
                _same(states[owner], chunk, owner, _as_global(want), when)
            continue
        local = any(note.startswith(f"{name} ") for note in notes)
        if not local:
            proved.append(name)
        for r, s in enumerate(states):
            if name not in s.descs:
                raise VerifyError(f"rank {r}: %{name} is missing from {s.program.label()}; no layout says where it went")
            _same(s, name, r, expected if local else _as_global(expected), when)
    return proved


def _as_global(value: Value) -> Value:
    return ("G", value[1]) if value[0] == "L" else value


def _same(state: State, name: str, rank: int, expected: Value, when: str) -> None:
    try:
        found = state.read(name)
    except TermError as e:
        raise VerifyError(f"rank {rank}: {e}\n  in {state.program.label()}") from None
    if found == expected:
        return
    ops = state.block.oplist
    index = next((i for i in range(len(ops) - 1, -1, -1) if name in ops[i].output_arg_names or _window(state, ops[i], name)), None)
    t = state.terms
    message = f"%{name} does not hold one device's value {when}: expected {t.describe(expected)}, found {t.describe(found)}"
    if index is None:
        raise VerifyError(f"rank {rank}: {message}; no operator writes it\n  in {state.program.label()}")
    raise fail(state.program, index, message)


def _window(state: State, op: Operator, name: str) -> bool:
    return any((d := state.descs.get(n)) is not None and d.attrs.get("window_of") == name for n in op.output_arg_names)

