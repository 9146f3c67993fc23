"""Propagation: one walk over all operators of all roles gives every value a placement, asking the ops' own rules and nothing else.

Where a reader wants another placement than a value has, a `redistribute` stands between: the same global value, lying elsewhere. The
copy stays at hand until its name is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from ...ir.entries import axis_of
from ...ir.errors import TranspileError, nearest
from ...ir.flow import listed, sub_reads, sub_writes
from ...ir.make_op import filled
from ...ir.opdef import OPS, OpDef, opdef
from ...ir.operator import Frozen, Operator, attrs_key, unary
from ...ir.parts import entry_of
from ...ir.program import Block, Program
from ...ir.types import REPLICATE, At, Entry, Placement, TensorType, show_placement
from ...ir.unique_name import unused
from ...ir.var import Var
from ..cluster import SERVERS, several
from .choose_row import (
    Choice,
    Chosen,
    Copies,
    PatternClass,
    PatternClasses,
    annotated,
    at_root,
    choose,
    cut_across,
    may_write,
    move_cost,
    nominal_bytes,
)
from .decompose import not_again, written_out
from .loop_sums import begun, only_added_to
from .stand_in_entries import AtHand, filled_in, with_stand_ins

Names = Sequence[str | None]
Slots = Mapping[str, tuple[str, ...]]
State = tuple[dict[str | None, Copies], dict[str | None, tuple[str, ...]]]  # how values lie, and under which names


class Move(NamedTuple):
    """A change of placement that the walk put between two operators."""

    name: str
    old: Placement
    new: Placement
    type: TensorType
    reason: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value, an open axis counted as 1024."""
        return nominal_bytes(self.type)

    @property
    def sends(self) -> bool:
        """Does anything leave a rank? What every rank of a group has, each of them cuts for itself."""
        return not set(self.old) <= set(self.new)

    def __str__(self) -> str:
        moved = f"{self.nbytes} bytes" if self.sends else "nothing is sent"
        return f"%{self.name}: {show_placement(self.old)} to {show_placement(self.new)}, {moved}, for {self.reason}"


class Route(NamedTuple):
    """How what lies in some way gets to a placement: from which of those at hand, and what its new name ends in. `here`: it lies there."""

    here: bool
    nearest: int
    ending: str
    place: Placement
    alone: Copies  # it lies there and nowhere else
    also: Copies  # it lies there too


class Decision(NamedTuple):
    """Where an operator wants its operands, and where its results then lie; `take` and `parts` are those of a Choice."""

    take: list[int | None]
    wanted: list[Placement]
    results: list[Placement]
    why: str
    parts: bool


def every_move(move: Move, op: Operator) -> None:
    """Refuse no move."""


@dataclass
class Propagation:
    """Places the operators of one program, in place.

    `axes` are the groups that values are cut over, outer before inner, with their sizes. `rest` says where persistables and data lie
    between runs; variables in `floating` rest where the first operator that touches them wants them. `update` says where the finished
    gradient of a parameter goes. What `stays` is computed with where it rests, as far as possible. An operator whose device is in `pins`
    runs there, whatever moving its operands costs. `allowed` may refuse a move.
    """

    _before: ClassVar[Callable[..., None] | None] = None  # what is done in front of every operator: _before(op, what it reads)

    program: Program
    axes: Mapping[str, int]
    rest: Mapping[str, Placement]
    floating: set[str]
    update: Callable[[str], Placement | None]
    stays: Container[str] = ()
    allowed: Callable[[Move, Operator], None] = every_move
    pins: Mapping[str, At] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = list(several(self.axes).items())
        self.turns = self.program.turns
        self.kinds = PatternClasses()
        self.choices: dict[tuple, Choice] = {}  # by type, attributes, how the operands lie and the results' types
        self.decided: dict[tuple[PatternClass, AtHand, tuple[int, ...]], Decision] = {}  # with stand-ins for roots and flat ranges
        self.routes: dict[tuple[Copies, int], Route] = {}  # by what is held and the id of a placement, which the route keeps alive
        self.reasons: dict[str, Frozen] = {}  # the attributes of redistributes
        self.numbers: dict[Any, int] = {}  # of types and attributes: small keys for large things
        self.by_id: dict[int, int] = {}  # id of an attribute mapping or a type -> its number
        self.helds: dict[tuple[int, tuple[Placement, ...], bool], Copies] = {}
        self.types: dict[str, TensorType] = {}
        self.type_of: dict[str | None, int] = {None: -1}
        self.at: dict[str | None, Copies] = {None: Copies(())}
        self.names: dict[str | None, tuple[str, ...]] = {}  # of what lies under another name than its own, one for each placement
        self.home: dict[str, Placement] = {}  # where a value lies that has its own name: all that is written returns there
        self.keep: set[str] = set()
        for block in self.program.blocks:
            for name, (_, t, _, persistable, _, is_data, *_) in block.descs.items():
                self.types[name] = t
                number = self.by_id.get(id(t))
                self.type_of[name] = self._number(t, t) if number is None else number
                if persistable or is_data:
                    if persistable:
                        self.keep.add(name)
                    if name in self.floating:
                        self.at[name] = self._held(name, ())
                    else:
                        self.home[name] = place = self.rest.get(name, REPLICATE)
                        self.at[name] = self._held(name, (place,))
        self.finished: set[str] = set()
        self.parts_of: dict[str, list[Operator]] = {}  # what stands for operators, by the first name that they write
        self.block = self.program.blocks[0]
        self.source = self.block.oplist

    def run(self) -> None:
        """Rewrite block 0 and the blocks that it runs."""
        self._block(self.block)
        home = self.home
        for block in self.program.blocks:
            descs = block.descs
            for name, d in descs.items():
                old = d.placement
                q = home.get(name, old)
                if q is not old and q != old:
                    descs[name] = Var(name, d.type, q, *d[3:])

    @cached_property
    def last(self) -> dict[str, Operator]:
        """The last operator of block 0 that writes each persistable."""
        return {n: op for op in self.source for n in op.output_arg_names if n in self.keep}

    def _block(self, block: Block) -> None:
        outer, self.block = self.block, block
        ops, block.oplist = block.oplist, []
        self.out = block.oplist
        self._operators(ops)
        self.block, self.out = outer, outer.oplist

    def _operators(self, ops: Sequence[Operator]) -> None:
        choices, numbers, type_of, before = self.choices, self.by_id, self.type_of, self._before
        for op in ops:
            type_, inputs, outputs, attrs, _, role_var, _, device, reads, writes = op
            definition = OPS.get(type_) or opdef(type_)
            if before is not None:
                before(op, reads)
            if definition.bodies:
                self._control(op, definition)
                continue
            ins: Names = definition.flat_slots(inputs, definition.in_slots) if definition.optional_ins else reads
            outs: Names = definition.flat_slots(outputs, definition.out_slots) if definition.optional_outs else writes
            said = numbers.get(id(attrs)) if attrs else -1
            if said is None:
                said = self._number(attrs, attrs_key(attrs))
            key = (type_, device, said, *map(self.at.get, ins), None, *map(type_of.get, outs))
            choice = choices.get(key)
            if choice is None:
                choice = choices[key] = self._choose(op, definition, ins, outs)
            if choice.parts and (parts := self._parts(op)) is not None:
                self._operators(parts)
                continue
            still = choice.still and self.names.keys().isdisjoint(ins)
            made = self._at_home(op, definition, ins, outs) or choice.outs if choice.source else choice.outs
            self._write(op, None if still else self._brought(op, definition, ins, choice), outs, made)
            if role_var:
                self._finish(role_var, op)

    def _parts(self, op: Operator) -> list[Operator] | None:
        """The operators that stand for one, their new values declared; None where it has none."""
        parts = written_out(self.block, op)
        if parts is None:
            return None
        out = self.block.desc(op.output_arg_names[0])
        self.parts_of[out.name] = parts
        parts = not_again(self.block, op, parts, self.parts_of.get(out.attrs.get("copy_of", ""), ()), self.at)
        for part in parts:
            self.last.update((n, part) for n in part.output_arg_names if self.last.get(n) is op)
            for n in part.output_arg_names:
                if n not in self.types:
                    self.types[n] = t = self.block.descs[n].type
                    self.type_of[n] = self._number(t, t)
        return parts

    # -- one object for each type and placements, so that it is a key by itself ------------------------------------------------

    def _number(self, thing: Any, key: Any) -> int:
        """The number of an object that lives as long as the program; objects with equal keys have one number."""
        n = self.by_id[id(thing)] = self.numbers.setdefault(key, len(self.numbers))
        return n

    def _held(self, name: str | None, places: tuple[Placement, ...]) -> Copies:
        key = self.type_of[name], places, name in self.stays
        held = self.helds.get(key)
        if held is None:
            held = self.helds[key] = Copies(places, name in self.stays)
        return held

    def _hold(self, name: str, held: Copies, *names: str) -> None:
        """A value lies so, under these names; under its own without any."""
        self.at[name] = held
        if names:
            self.names[name] = names
        else:
            self.names.pop(name, None)

    # -- one operator ---------------------------------------------------------------------------------------------------------

    def _brought(self, op: Operator, definition: type[OpDef], ins: Names, choice: Choice) -> Slots | None:
        """What the operator reads to have its operands where it wants them, behind the redistributes which that takes; None: as it is."""
        changed: dict[int, str] = {}
        for k, (n, at_hand, place) in enumerate(zip(ins, choice.take, choice.ins, strict=True)):
            if at_hand is None or n is None:
                continue
            local = self._moved(n, place, op, choice.why) if at_hand < 0 or not self.at[n].places else self._name(n, at_hand)
            if local != n:
                changed[k] = local
        return with_names(op, definition, ins, changed) if changed else None

    def _check_defined(self, op: Operator, ins: Names) -> None:
        for n in ins:
            if n not in self.at:
                raise TranspileError(f"op {op.type} reads %{n} before any operator defines it{where(op)}")

    def _kind(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> PatternClass:
        found = [[None if n is None else self.types[n] for n in names] for names in (ins, outs)]
        return self.kinds.of(definition, found[0], found[1], op.attrs)

    def _choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> Choice:
        self._check_defined(op, ins)
        kind = self._kind(op, definition, ins, outs)
        have = tuple([self.at[n].places for n in ins])
        stays = tuple([k for k, n in enumerate(ins) if self.at[n].stays])
        said, pin = self._said(op, definition, ins), self.pins.get(op.device)
        if said or pin is not None or kind.pattern.flat_ranges:
            one = self._decided(definition, kind, have, stays, said, pin)
        else:
            general, entries = with_stand_ins(have)
            key = kind, general, stays
            if key not in self.decided:
                self.decided[key] = self._decided(definition, kind, general, stays, {}, None)
            one = self.decided[key]
            if entries:
                wanted, results = ([filled_in(q, entries) for q in places] for places in (one.wanted, one.results))
                one = one._replace(wanted=wanted, results=results)
        made = [(self._held(n, (q,)), q) for n, q in zip(outs, one.results, strict=True)]
        still, source = all(t is None or t == 0 for t in one.take), all(t is None for t in one.take)
        return Choice(one.take, one.wanted, made, f"{op.type}: {one.why}", still, source, one.parts)

    def _decided(
        self, definition: type[OpDef], kind: PatternClass, have: AtHand, stays: tuple[int, ...], said: Mapping[str, Entry | None],
        pin: At | None,
    ) -> Decision:  # fmt: skip
        """Where an operator wants operands that are at hand so, and where its results then lie."""
        p = kind.pattern
        over: list[Chosen] = []
        for group, n in self.groups:
            if pin is not None and pin.group == group:
                over.append(at_root(kind, pin))
                continue
            options = [tuple(dict.fromkeys(entry_of(q, group) for q in qs)) for qs in have]
            if group in said:
                over.append(annotated(kind, options, said[group], n))
            else:
                over.append(choose(kind, options, group, n, {row.factor for row, _, _ in over if row.runs}, stays))
        whole = next(row for row in kind.table if row.kind == "whole")
        if any(row.flat for row, _, _ in over):  # flat ranges stand beside nothing else
            over = [found if found[0].flat else (whole, list(whole.ins), list(whole.outs)) for found in over]
        elif SERVERS in self.axes and over[0][0] is not whole and any(row is not whole for row, _, _ in over[1:]):
            over = self._on_one_side(kind, over, have)
        wanted = [tuple(e for _, entries, _ in over if (e := entries[k]) is not None) for k in range(len(have))]
        results = [tuple(e for _, _, entries in over if (e := entries[k]) is not None) for k in range(len(p.outs))]
        take: list[int | None] = []
        for k, qs in enumerate(have):
            here = next((i for i, q in enumerate(qs) if q == wanted[k]), None)
            if here is None:  # what every rank has is on the root too
                here = next((i for i, q in enumerate(qs) if _serves(q, wanted[k])), -1)
            as_it_is = k in p.shape_only and not (qs and _elsewhere(qs[0], wanted[k]))
            take.append(None if as_it_is or p.ins[k] is None else here)
        parts = definition.expand is not None and any(cut_across(p, have, g) for g, _ in self.groups)
        return Decision(take, wanted, results, ", ".join(dict.fromkeys(row.why for row, _, _ in over)), parts)

    def _on_one_side(self, kind: PatternClass, over: Sequence[Chosen], have: Sequence[tuple[Placement, ...]]) -> list[Chosen]:
        """Of operands at servers and with trainers, all come to the trainers where they cut one of them, and else to one server."""
        whole, root = (next(row for row in kind.table if row.kind == k) for k in ("whole", "root"))
        nothing: Chosen = (whole, list(whole.ins), list(whole.outs))
        if any(axis_of(e) is not None for _, entries, _ in over[1:] for e in entries):
            return [nothing, *over[1:]]
        held = next(e for qs in have for q in qs if (e := entry_of(q, SERVERS)) is not None)
        ins, outs = ([held if e is not None else None for e in entries] for entries in (root.ins, root.outs))
        return [(root, ins, outs), *(nothing for _ in over[1:])]

    def _at_home(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> list[tuple[Copies, Placement]] | None:
        """Where results rest that have a place already, if a source can write there; None if not."""
        places = [None if n is None else self.home.get(n, REPLICATE) for n in outs]
        if not any(places) or not may_write(self._kind(op, definition, ins, outs), places, self.groups):
            return None
        return [(self._held(n, (q or REPLICATE,)), q or REPLICATE) for n, q in zip(outs, places, strict=True)]

    def _said(self, op: Operator, definition: type[OpDef], ins: Names) -> Mapping[str, Entry | None]:
        """Where the program says that the result of an operator lies."""
        if definition.annotation is None or ins[0] is None:
            return {}
        said = definition.annotation([None if n is None else next(iter(self.at[n].places), ()) for n in ins], **op.attrs)
        for group, e in said.items():
            if group not in self.axes:
                raise TranspileError(f"op {op.type}: {no_axis(group, self.axes, self.program.groups)}{where(op)}")
            t = self.types[ins[0]]
            axis = axis_of(e)
            if axis is not None and self.axes[group] > 1 and t.shape[axis] == 1:  # one element is cut nowhere: it broadcasts
                what = f"{e} cuts an axis of {t} that is one element long"
                raise TranspileError(f"op {op.type}: {what}; leave it whole over {group}{where(op)}")
        return said

    def _name(self, name: str, k: int) -> str:
        """The name under which a value lies in the placement number `k` of those at hand."""
        names = self.names.get(name)
        return names[k] if names else name

    def _moved(self, name: str, place: Placement, op: Operator, reason: str) -> str:
        """The name under which a value lies at `place`, after a redistribute when it does not yet."""
        held = self.at[name]
        if not held.places:  # a floating variable rests where its first operator wants it, and between steps there are no turns
            rests = tuple([e for e in place if e.group not in self.turns]) if self.turns and name in self.keep else place
            self.home[name] = rests
            held = self._held(name, (rests,))
            self._hold(name, held)
            if rests == place:
                return name
        route = self._route(name, held, place)
        if route.here:
            return self._name(name, route.nearest)
        target = self._move(name, held, route, op, reason)
        if name not in self.finished:  # a finished gradient stays where its update is
            self._hold(name, route.also, *(self.names.get(name) or (name,)), target)
        return target

    def _move(self, name: str, held: Copies, route: Route, op: Operator, reason: str) -> str:
        """Write a redistribute; the name of the copy that it makes."""
        if any(e.is_own and e not in route.place for e in held.places[route.nearest]):
            raise TranspileError(
                f"op {op.type} needs one global value of %{name}, but each rank has its own; use layers.replica_mean before it{where(op)}"
            )
        move = Move(name, held.places[route.nearest], route.place, self.types[name], reason)
        self.allowed(move, op)
        self.moves.append(move)
        target = self._new(name, route.ending, route.place)
        self._redistribute(self._name(name, route.nearest), target, op, reason)
        return target

    def _route(self, name: str, held: Copies, place: Placement) -> Route:
        key = held, id(place)
        route = self.routes.get(key)
        if route is None:
            here = place in held.places
            nearest = held.places.index(place) if here else 0
            if len(held.places) > 1 and not here:
                size = nominal_bytes(self.types[name])
                costs = [sum(move_cost(entry_of(q, g), entry_of(place, g), size) for g, _ in self.groups) for q in held.places]
                nearest = costs.index(min(costs))
            ending = suffix(held.places[nearest], place)
            alone, also = self._held(name, (place,)), held if here else self._held(name, (*held.places, place))
            route = self.routes[key] = Route(here, nearest, ending, place, alone, also)
        return route

    def _new(self, name: str, ending: str, place: Placement) -> str:
        """Declare a copy of a value, or its new value, in another placement."""
        target = unused(f"{name}.{ending}", self.types)
        self.types[target] = t = self.types[name]
        self.type_of[target] = self.type_of[name]
        self.block.descs[target] = Var(target, t, place, stop_gradient=True)
        return target

    def _redistribute(self, source: str, target: str, near: Operator, reason: str) -> None:
        attrs = self.reasons.get(reason)
        if attrs is None:
            attrs = self.reasons[reason] = filled("redistribute", {"reason": reason})
        self.out.append(unary("redistribute", source, target, attrs, near.site))

    def _write(self, op: Operator, inputs: Slots | None, outs: Names, results: Sequence[tuple[Copies, Placement]]) -> None:
        """Append the operator, reading `inputs` if given. State goes back to where it rests."""
        at, home = self.at, self.home
        away: dict[str, tuple[Copies, Placement]] = {}
        for n, result in zip(outs, results, strict=True):
            if n is None:
                continue
            held, place = result
            rests = home.setdefault(n, place)
            if rests is place or rests == place:
                at[n] = held
                if n in self.names:
                    del self.names[n]
            else:
                away[n] = result
        if away:
            self._write_away(op, inputs or op.inputs, away)
        else:
            self.out.append(op if inputs is None else op.replace(inputs=inputs))

    def _write_away(self, op: Operator, inputs: Slots, away: Mapping[str, tuple[Copies, Placement]]) -> None:
        """Append an operator whose results lie elsewhere than at home: they get names of their own, and are brought home."""
        renamed = {n: self._new(n, "new", place) for n, (_, place) in away.items()}
        self.out.append(op.with_slots(inputs, {s: tuple([renamed.get(n, n) for n in names]) for s, names in op.outputs.items()}))
        for n, (held, place) in away.items():
            if n in self.keep and not self.block.idx and self.last[n] is not op:
                self._hold(n, held, renamed[n])  # it is written over again: this value need not go home
                continue
            self._hold(n, self._route(n, held, self.home[n]).also, renamed[n], n)
            self._go_home(n, renamed[n], place, op)

    def _go_home(self, name: str, new: str, place: Placement, op: Operator) -> None:
        """Move the new value of a variable, which has a name of its own and lies at `place`, to where the variable rests."""
        move = Move(name, place, self.home[name], self.types[name], "its storage placement")
        self.moves.append(move)
        self._redistribute(new, name, op, move.reason)

    def _finish(self, finished: tuple[str, ...], op: Operator) -> None:
        """A finished gradient goes to the place of its update at once, and only that copy stays. `finished` is [param, grad, ...]."""
        for param, grad in zip(finished[::2], finished[1::2], strict=True):
            q = self.update(param)
            held = self.at.get(grad)
            if q is None or held is None:
                continue
            route = self._route(grad, held, q)
            if not route.here:
                self._hold(grad, route.alone, self._move(grad, held, route, op, "update"))
                self.finished.add(grad)

    # -- operators that run blocks ----------------------------------------------------------------------------------------------

    def _control(self, op: Operator, definition: type[OpDef]) -> None:
        """Blocks are placed like any other, all leave their results alike, and what decides between them is whole on every rank."""
        pin, changed = self.pins.get(op.device), {}
        for decides in definition.control_operands(op):
            if not (definition.repeats and pin is not None and (pin,) in self.at[decides].places):  # who runs a loop decides how often
                changed[decides] = self._moved(decides, REPLICATE, op, f"{op.type}: what decides is the same on every rank")
        bodies = [(self.program.blocks[op.attrs[which].idx], results) for which, results in definition.bodies.items()]
        if pin is not None:
            changed |= self._brought_to(pin, dict.fromkeys(n for block, _ in bodies for n in sub_reads(self.program, block)), op)
        added = self._written(op, definition, [block for block, _ in bodies])
        outer = self._state()
        ends = []
        for block, _ in bodies:
            self._enter(outer)
            self._block(block)
            ends.append((block, self._state()))
        for state in (outer, *(state for _, state in ends)):
            self._settle(state)
        self.floating.difference_update(added)
        for n, (k, before) in sorted(added.items(), key=lambda item: -item[1][0]):  # the last one first: numbers change behind it
            self._begin(n, k, before)
        attrs = dict(op.attrs)
        results: list[tuple[Copies, Placement]] = []
        named = [(which, block, state) for (_, which), (block, state) in zip(bodies, ends, strict=True) if which]
        for k, out in enumerate(op.output_arg_names if named else ()):
            q = self._common([(state[0], attrs[which][k]) for which, _, state in named])
            results.append((self._held(out, (q,)), q))
            for which, block, state in named:
                here = self.block, self.out
                self.block, self.out = block, block.oplist
                self.at, self.names = state
                local = self._moved(attrs[which][k], q, op, f"{op.type}: its branches leave %{out} alike")
                self.block, self.out = here
                attrs[which] = (*attrs[which][:k], local, *attrs[which][k + 1 :])
        self._enter(outer)
        moved = op.renamed(changed) if changed else op
        if any(attrs[a] != v for a, v in op.attrs.items()):
            moved = moved.replace(attrs=attrs)
        moved = listed(self.program, moved)
        self.last.update((n, moved) for n in op.output_arg_names if self.last.get(n) is op)
        self._write(moved, None, op.output_arg_names if named else (), results)

    def _written(self, op: Operator, definition: type[OpDef], blocks: Sequence[Block]) -> dict[str, tuple[int, Placement]]:
        """Bring what blocks write to where it rests, before they run. What a loop only adds to rests where the loop wants it: such names,
        with the number of the operator that wrote each, and how it lay."""
        added: dict[str, tuple[int, Placement]] = {}
        for n in dict.fromkeys(n for block in blocks for n in sub_writes(self.program, block) if n in self.at):
            held, adds = self.at[n], definition.repeats and n not in self.keep and only_added_to(self.program, blocks[0], n, self._kind)
            if adds and held.places and (k := begun(self.program, self.out, n)) is not None:
                added[n] = k, self.home.pop(n)
                self.floating.add(n)
                self._hold(n, held := self._held(n, ()))
            if not held.places:
                if not definition.repeats or adds:
                    continue  # the first operator of the block that wants it says where it rests
                self._moved(n, REPLICATE, op, "")
            home = self.home.get(n, REPLICATE)
            if definition.repeats and not adds and any(e.op for e in home):
                raise TranspileError(
                    f"op {op.type} writes %{n} in a sub-block, which is stored {show_placement(home)}; make it whole before{where(op)}"
                )
            if home not in held.places:  # it is on its way: the block finds it where it rests
                self._go_home(n, self._name(n, 0), held.places[0], op)
            self._hold(n, self._held(n, (home,)))
        return added

    def _begin(self, name: str, k: int, before: Placement) -> None:
        """Bring what operator k wrote, which lay at `before`, to where the loop behind it wanted it."""
        op, place = self.out[k], self.home[name]
        if place == before:
            return
        definition = opdef(op.type)
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        places = [None if n is None else self.home.get(n, REPLICATE) for n in outs]
        kind = self._kind(op, definition, ins, outs)
        reads = any(n is not None and j not in kind.pattern.shape_only for j, n in enumerate(ins))
        if not reads and may_write(kind, places, self.groups):
            del self.out[k]  # it reads no elements of anything: it may as well stand in front of the loop, where all is at hand
            away = [n for n in op.input_arg_names if n in self.at and _elsewhere(self.home.get(n, REPLICATE), place)]
            self.out.append(op.renamed({n: self._moved(n, REPLICATE, op, f"{op.type}: its shape") for n in away}))
            return
        new = self._new(name, "new", before)
        self.out[k] = op.with_slots(op.inputs, {s: tuple([new if n == name else n for n in names]) for s, names in op.outputs.items()})
        self._go_home(name, new, before, op)
        self.out.insert(k + 1, self.out.pop())

    def _brought_to(self, pin: At, names: Iterable[str], op: Operator) -> dict[str, str]:
        """Bring what a block reads to the root that runs it, before it runs: ranks that do not run it send from outside."""
        brought = {}
        for n in names:
            held = self.at.get(n)
            away = [q for q in held.places if any(e.root is not None and e.group == pin.group and e != pin for e in q)] if held else []
            if held is not None and away and len(away) == len(held.places):
                place = tuple(pin if e.group == pin.group else e for e in away[0])
                brought[n] = self._moved(n, place, op, f"{op.type}: at a root")
        return brought

    def _state(self) -> State:
        return self.at, self.names

    def _enter(self, state: State) -> None:
        """Go on where values lie so."""
        at, names = state
        self.at, self.names = dict(at), dict(names)
        self._settle(self._state())

    def _settle(self, state: State) -> None:
        """What floated there rests where another block wanted it."""
        for n in self.floating:
            if n in self.home and not state[0][n].places:
                state[0][n] = self._held(n, (self.home[n],))

    def _common(self, results: list[tuple[Mapping[str | None, Copies], str]]) -> Placement:
        """The placement in which it costs least to have a result of all branches."""
        groups = [g for g, _ in self.groups]

        def cost(q: Placement) -> float:
            return sum(
                min(sum(move_cost(entry_of(o, g), entry_of(q, g), nominal_bytes(self.types[n])) for g in groups) for o in at[n].places)
                for at, n in results
            )

        return min((q for at, n in results for q in at[n].places), key=cost)


def with_names(op: Operator, definition: type[OpDef], ins: Names, changed: Mapping[int, str]) -> Slots:
    """What an operator reads, with other names for some operands by their number: two of them may be one value in two placements."""
    names: list[Any] = list(ins)
    for k, n in changed.items():
        names[k] = n
    inputs: dict[str, tuple[str, ...]] = {}
    k = 0
    for slot, _, many in definition.in_slots:
        old = op.inputs.get(slot)
        if old is None:
            k += not many
            continue
        inputs[slot] = tuple(names[k : k + len(old)])
        k += len(old)
    return inputs


def _serves(held: Placement, wanted: Placement) -> bool:
    """Can a value that lies so be read where `wanted` is asked for? What every rank has is at the root too."""
    mine = {e.group: e for e in held}
    for e in wanted:
        have = mine.pop(e.group, None)
        if have != e and not (have is None and e.root is not None):
            return False
    return not mine


def _elsewhere(held: Placement, wanted: Placement) -> bool:
    """Is a value at a root, or on servers, where it is not wanted, so that not even its shape can be read there?"""
    return any((e.root is not None or e.group == SERVERS) and e not in wanted for e in held)


def no_axis(group: str, axes: Mapping[str, int], groups: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """What is to be said of an annotation over an axis that the ranks do not have."""
    sets = groups.get(group)
    if sets:
        as_axis = f"fx.Mesh(dp={len(sets)}, {group}={len(sets[0])})"
        return f"{group!r} is a group of a Cluster, for collectives alone; to cut over it give trainers={as_axis}"
    return f"the ranks have no axis {group!r}; {nearest(group, axes, 'they have')}; give trainers=fx.Mesh(dp=2, {group}=2)"


def suffix(old: Placement, new: Placement) -> str:
    """What the name of a moved copy ends in: sum, part, full or moved."""
    owed = [e for e in old if e.op]
    if owed and not any(e.op for e in new):
        return owed[0].op
    if not old:
        return "part"
    return "moved" if new else "full"


def where(op: Operator) -> str:
    """Lines that show an operator and the user's line."""
    return f"\n  in {op.to_string()}" + (f"\n  written at {op.site}" if op.site else "")
