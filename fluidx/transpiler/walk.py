"""Propagation: one walk over all operators of all roles gives every value a placement, asking the ops' own rules and nothing else.

Where a reader wants another placement than a value has, a `redistribute` stands between: the same global value, lying elsewhere. The
copy stays at hand until its name is written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..ir.errors import TranspileError
from ..ir.flow import sub_writes
from ..ir.opdef import OpDef, opdef
from ..ir.operator import Operator, Role, attrs_key, rename_slots
from ..ir.parts import entry_of
from ..ir.program import Block, Program, Var
from ..ir.types import REPLICATE, At, Partial, Placement, TensorType, show_placement
from .rules import Choice, Held, Kind, choose, move_cost, nominal_bytes
from .writer import complete

Names = Sequence[str | None]


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


@dataclass
class Walk:
    """Places the operators of one program, in place.

    `axes` are the groups that values are cut over, outer before inner, with their sizes. `rest` says where persistables and data lie
    between runs; variables in `floating` rest where the first operator that touches them wants them. `update` says where the finished
    gradient of a parameter goes. `allowed` may refuse a move.
    """

    program: Program
    axes: Mapping[str, int]
    rest: dict[str, Placement]
    floating: set[str]
    update: Callable[[str], Placement | None]
    allowed: Callable[[Move, Operator], None] = lambda move, op: None
    moves: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = list(self.axes.items())
        self.kinds: dict[tuple, Kind] = {}
        self.choices: dict[tuple, Choice] = {}  # by type, attributes, where the operands lie and the results' types
        self.numbers: dict[Any, int] = {}  # of types, attributes and held placements: small keys for large things
        self.by_id: dict[int, int] = {}  # id of an attribute mapping or a type -> its number
        self.at: dict[str | None, Held] = {None: _NOWHERE}
        self.nowhere: dict[str | None, int] = {None: -1}  # what lies nowhere yet, with a number for its type
        self.ids: dict[str | None, int] = {}  # the numbers of what is in `at`, and of what lies nowhere yet
        self.elsewhere: set[str] = set()  # values whose first placement is that of a copy under another name
        self.types: dict[str, TensorType] = {}
        self.type_of: dict[str | None, int] = {None: -1}
        self.keep: set[str] = set()
        for block in self.program.blocks:
            for d in block.descs.values():
                self._declare(d.name, d.type)
                if d.persistable:
                    self.keep.add(d.name)
                if d.name in self.floating:
                    self.nowhere[d.name] = self._number((self.type_of[d.name], ()))
                elif d.is_data or d.persistable:
                    self._hold(d.name, (self.rest.setdefault(d.name, REPLICATE),))
        self.last = {n: op for op in self.program.blocks[0].oplist for n in op.output_arg_names if n in self.keep}
        self.placed: dict[str, Placement] = {}  # values of this run that are neither data nor persistable
        self.finished: set[str] = set()
        self.block = self.program.blocks[0]
        self.ids.update(self.nowhere)

    def run(self) -> None:
        """Rewrite block 0 and the blocks that it runs."""
        self._block(self.block)
        for name in self.floating:
            self.rest.setdefault(name, REPLICATE)
        for block in self.program.blocks:
            descs = block.descs
            for name, d in descs.items():
                q = self.rest.get(name) if d.persistable or d.is_data else self.placed.get(name)
                if q is not None and q != d.placement:
                    descs[name] = Var(name, d.type, q, *d[3:])

    def _block(self, block: Block) -> None:
        outer, self.block = self.block, block
        ops, block.oplist = block.oplist, []
        self.out = block.oplist
        for op in ops:
            definition = opdef(op.type)
            if definition.bodies:
                self._control(op, definition)
            else:
                self._operator(op, definition)
        self.block, self.out = outer, outer.oplist

    # -- small numbers for types, attributes and placements ---------------------------------------------------------------------

    def _number(self, thing: Any) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    def _number_of(self, thing: Any, key: Callable[[Any], Any]) -> int:
        """The number of an object that lives as long as the program, found by its identity first."""
        n = self.by_id.get(id(thing))
        if n is None:
            n = self.by_id[id(thing)] = self._number(key(thing))
        return n

    def _declare(self, name: str, t: TensorType) -> None:
        self.types[name] = t
        number = self.by_id.get(id(t))
        self.type_of[name] = self._number_of(t, lambda t: t) if number is None else number

    def _held(self, name: str | None, places: tuple[Placement, ...], names: tuple[str, ...] = ()) -> Held:
        return Held(self._number((self.type_of[name], places)), places, names)

    def _hold(self, name: str, places: tuple[Placement, ...], names: tuple[str, ...] = ()) -> None:
        """A value lies at `places`, under these names; under its own without any."""
        self._take(name, self._held(name, places, names))

    def _take(self, name: str, held: Held) -> None:
        self.at[name] = held
        self.ids[name] = held.id
        if held.names and held.names[0] != name:
            self.elsewhere.add(name)
        elif name in self.elsewhere:
            self.elsewhere.remove(name)

    def _enter(self, at: dict[str | None, Held]) -> None:
        """Go on where values lie so."""
        self.at = at
        self.ids = {**self.nowhere, **{n: h.id for n, h in at.items()}}
        self.elsewhere = {n for n, h in at.items() if n is not None and h.names and h.names[0] != n}

    # -- one operator ---------------------------------------------------------------------------------------------------------

    def _operator(self, op: Operator, definition: type[OpDef]) -> None:
        ins: Names = definition.flat_slots(op.inputs, definition.in_slots) if definition.optional_ins else op.input_arg_names
        outs: Names = definition.flat_slots(op.outputs, definition.out_slots) if definition.optional_outs else op.output_arg_names
        attrs = self.by_id.get(id(op.attrs)) if op.attrs else -1
        if attrs is None:
            attrs = self._number_of(op.attrs, attrs_key)
        key = (op.type, attrs, *map(self.ids.get, ins), None, *map(self.type_of.get, outs))
        choice = self.choices.get(key)
        if choice is None:
            choice = self.choices[self._settled(key, op, ins)] = self._choose(self._kind(op, definition, ins, outs), ins, outs, op)
        if choice.still and self.elsewhere.isdisjoint(ins):
            self._write(op, outs, choice.outs, op)
            return
        changed: dict[int, str] = {}
        for k, (n, at_hand, place) in enumerate(zip(ins, choice.take, choice.ins, strict=True)):
            if at_hand is None or n is None:
                continue
            h = self.at.get(n)
            local = self._moved(n, place, op, choice.why) if at_hand < 0 or h is None else h.names[at_hand] if h.names else n
            if local != n:
                changed[k] = local
        self._write(_reading(op, definition, changed) if changed else op, outs, choice.outs, op)

    def _settled(self, key: tuple, op: Operator, ins: Names) -> tuple:
        """The key itself, when every operand lies somewhere or may lie anywhere."""
        for n in ins:
            if n is not None and n not in self.at and n not in self.floating:
                raise TranspileError(f"op {op.type} reads %{n} before any operator defines it{where(op)}")
        return key

    def _kind(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> Kind:
        """What operators of this type, these attributes and types have in common."""
        found = [[None if n is None else self.types[n] for n in names] for names in (ins, outs)]
        key = (op.type, attrs_key(op.attrs), *map(tuple, found))
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = Kind.of(definition, found[0], found[1], op.attrs)
        return kind

    def _choose(self, kind: Kind, ins: Names, outs: Names, op: Operator) -> Choice:
        p = kind.pattern
        have = [self.at[n].places if n in self.at else () for n in ins]
        over = []
        for group, n in self.groups:
            options = [tuple(dict.fromkeys(entry_of(q, group) for q in qs)) for qs in have]
            over.append(choose(kind, options, group, n))
        if any(row.kind == "flat" for row, _, _ in over):  # flat ranges stand beside nothing else
            whole = next(row for row in kind.table if row.kind == "whole")
            over = [found if found[0].kind == "flat" else (whole, list(whole.ins), list(whole.outs)) for found in over]
        wanted = [tuple(e for _, entries, _ in over if (e := entries[k]) is not None) for k in range(len(have))]
        results = [tuple(e for _, _, entries in over if (e := entries[k]) is not None) for k in range(len(p.outs))]
        take: list[int | None] = []
        for k, qs in enumerate(have):
            here = next((i for i, q in enumerate(qs) if q == wanted[k]), None)
            if here is None:  # what every rank has is on the root too
                here = next((i for i, q in enumerate(qs) if _serves(q, wanted[k])), -1)
            take.append(None if k in p.shape_only or p.ins[k] is None else here)
        why = f"{op.type}: {', '.join(dict.fromkeys(row.why for row, _, _ in over))}"
        made = [self._held(n, (q,)) for n, q in zip(outs, results, strict=True)]
        return Choice(take, wanted, made, why, all(t is None or t == 0 for t in take))

    def _moved(self, name: str, place: Placement, op: Operator, reason: str) -> str:
        """The name under which a value lies at `place`, after a redistribute when it does not yet."""
        held = self.at.get(name)
        if held is None:  # a floating variable rests where its first operator wants it
            self.rest[name] = place
            self._hold(name, (place,))
            return name
        names = held.names or (name,)
        if place in held.places:
            return names[held.places.index(place)]
        nearest = 0
        if len(names) > 1:
            size = nominal_bytes(self.types[name])
            costs = [sum(move_cost(entry_of(q, g), entry_of(place, g), size) for g, _ in self.groups) for q in held.places]
            nearest = costs.index(min(costs))
        move = Move(name, held.places[nearest], place, self.types[name], reason)
        self.allowed(move, op)
        self.moves.append(move)
        target = self._new(name, suffix(move.old, place), place)
        self._redistribute(names[nearest], target, op, reason)
        if name not in self.finished:  # a finished gradient stays where its update is
            self._hold(name, (*held.places, place), (*names, target))
        return target

    def _new(self, name: str, ending: str, place: Placement) -> str:
        """Declare a copy of a value, or its new value, in another placement."""
        target, k = f"{name}.{ending}", 0
        while target in self.types:
            k += 1
            target = f"{name}.{ending}{k}"
        t = self.types[name]
        self._declare(target, t)
        self.block.descs[target] = Var(target, t, place, stop_gradient=True)
        return target

    def _redistribute(self, source: str, target: str, near: Operator, reason: str) -> None:
        attrs = complete("redistribute", {"reason": reason})
        self.out.append(Operator("redistribute", {"X": (source,)}, {"Out": (target,)}, attrs, Role.DIST, (), near.site))

    def _write(self, op: Operator, outs: Names, results: list[Held], source: Operator) -> None:
        """Append the operator, `source` with its operands moved. State goes back to where it rests, a finished gradient to its update."""
        at, ids, placed, keep = self.at, self.ids, self.placed, self.keep
        home: list[tuple[str, str]] = []
        renamed: dict[str, str] = {}
        for n, held in zip(outs, results, strict=True):
            if n is None:
                continue
            q = held.places[0]
            rests = self.rest.setdefault(n, q) if n in keep else placed.setdefault(n, q)
            if rests is q or rests == q:
                at[n] = held
                ids[n] = held.id
                if n in self.elsewhere:
                    self.elsewhere.remove(n)
                continue
            renamed[n] = new = self._new(n, "new", q)
            if n in keep and not self.block.idx and self.last[n] is not source:
                self._hold(n, (q,), (new,))  # it is written over again: this value need not go home
                continue
            home.append((new, n))
            self._hold(n, (q, rests), (new, n))
        self.out.append(op.replace(outputs=rename_slots(op.outputs, renamed)) if renamed else op)
        for new, n in home:
            self._go_home(n, new, op)
        if op.role_var:
            self._finish(op)

    def _go_home(self, name: str, new: str, op: Operator) -> None:
        """Move the new value of a variable, which has a name of its own, to where the variable rests."""
        rests = self.rest[name] if name in self.keep else self.placed[name]
        move = Move(name, self.block.desc(new).placement, rests, self.types[name], "its place at rest")
        self.moves.append(move)
        self._redistribute(new, name, op, move.reason)

    def _finish(self, op: Operator) -> None:
        """A finished gradient goes to the place of its update at once, and only that copy stays."""
        for param, grad in zip(op.role_var[::2], op.role_var[1::2], strict=True):
            q = self.update(param)
            if q is not None and grad in self.at and q not in self.at[grad].places:
                self._hold(grad, (q,), (self._moved(grad, q, op, "update"),))
                self.finished.add(grad)

    # -- operators that run blocks ----------------------------------------------------------------------------------------------

    def _control(self, op: Operator, definition: type[OpDef]) -> None:
        """Blocks are placed like any other, all leave their results alike, and what decides between them is whole on every rank."""
        decides = op.inputs[definition.in_slots[0].name]
        changed = {n: self._moved(n, REPLICATE, op, f"{op.type}: what decides is the same on every rank") for n in decides}
        changed = {n: m for n, m in changed.items() if n != m}
        bodies = [(self.program.blocks[op.attrs[which].idx], results) for which, results in definition.bodies.items()]
        outer = dict(self.at)
        for n in dict.fromkeys(n for block, _ in bodies for n in sub_writes(self.program, block) if n in outer):
            home = self.rest.get(n, REPLICATE) if n in self.keep else self.placed.get(n, REPLICATE)
            if any(isinstance(e, Partial) for e in home):
                raise TranspileError(
                    f"op {op.type} writes %{n} in a block, which lies at {show_placement(home)}; write it whole before{where(op)}"
                )
            if home not in outer[n].places:  # it is on its way: the block finds it where it rests
                self._go_home(n, outer[n].names[0] if outer[n].names else n, op)
            outer[n] = self._held(n, (home,))
        ends = []
        for block, _ in bodies:
            self._enter(dict(outer))
            self._block(block)
            ends.append((block, self.at))
        self._enter(outer)
        attrs = dict(op.attrs)
        results: list[Held] = []
        named = [(which, block, at) for (_, which), (block, at) in zip(bodies, ends, strict=True) if which]
        for k, out in enumerate(op.output_arg_names if named else ()):
            q = self._common([(at, attrs[which][k]) for which, _, at in named])
            results.append(self._held(out, (q,)))
            for which, block, at in named:
                here = self.block, self.out
                self.block, self.out = block, block.oplist
                self._enter(at)
                local = self._moved(attrs[which][k], q, op, f"{op.type}: its branches leave %{out} alike")
                self.block, self.out = here
                attrs[which] = (*attrs[which][:k], local, *attrs[which][k + 1 :])
        self._enter(outer)
        moved = op.renamed(changed) if changed else op
        if any(attrs[a] != v for a, v in op.attrs.items()):
            moved = moved.replace(attrs=attrs)
        self._write(moved, op.output_arg_names if named else (), results, op)

    def _common(self, results: list[tuple[dict[str | None, Held], str]]) -> Placement:
        """The placement in which it costs least to have a result of all branches."""
        groups = [g for g, _ in self.groups]

        def cost(q: Placement) -> float:
            return sum(
                min(sum(move_cost(entry_of(o, g), entry_of(q, g), nominal_bytes(self.types[n])) for g in groups) for o in at[n].places)
                for at, n in results
            )

        return min((q for at, n in results for q in at[n].places), key=cost)


_NOWHERE = Held(-1, ())


def _reading(op: Operator, definition: type[OpDef], changed: Mapping[int, str]) -> Operator:
    """The operator with other names for some operands, by their number in slot order: two of them may be one value in two placements."""
    inputs, k = {}, 0
    for slot in definition.in_slots:
        names = op.inputs.get(slot.name)
        if names is None:
            k += not slot.many
            continue
        inputs[slot.name] = tuple([changed.get(k + i, n) for i, n in enumerate(names)])
        k += len(names)
    return Operator(op.type, inputs, op.outputs, op.attrs, op.role, op.role_var, op.site, op.device)


def _serves(held: Placement, wanted: Placement) -> bool:
    """Can a value that lies so be read where `wanted` is asked for? What every rank has is at the root too."""
    mine = {e.group: e for e in held}
    for e in wanted:
        have = mine.pop(e.group, None)
        if have != e and not (have is None and isinstance(e, At)):
            return False
    return not mine


def suffix(old: Placement, new: Placement) -> str:
    """What the name of a moved copy ends in: sum, part, full or moved."""
    owed = [e for e in old if isinstance(e, Partial)]
    if owed and not any(isinstance(e, Partial) for e in new):
        return owed[0].op
    if not old:
        return "part"
    return "moved" if new else "full"


def where(op: Operator) -> str:
    """Lines that show an operator and the user's line."""
    return f"\n  in {op.to_string()}" + (f"\n  written at {op.site}" if op.site else "")
