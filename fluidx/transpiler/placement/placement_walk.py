"""Where an operator wants its operands, and where its results then lie: the rows of its rule, over each group of ranks.

Choices are kept by the kind of operator and by how its operands lie, so that a deep program asks the rules about a layer once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...ir.entries import axis_of
from ...ir.errors import TranspileError, nearest
from ...ir.form_walk import FormWalk
from ...ir.forms import FormChoice, Held, Names, Results
from ...ir.opdef import OpDef
from ...ir.operator import Operator
from ...ir.parts import entry_of
from ...ir.program import Program
from ...ir.types import REPLICATE, At, Entry, Placement, TensorType
from ..cluster import SERVERS, axes_with_ranks
from .choose_row import Chosen, PatternClass, PatternClasses, annotated, at_root, choose, cut_across, may_write
from .stand_in_entries import AtHand, filled_in, with_stand_ins


@dataclass(eq=False, slots=True)
class Choice(FormChoice):
    """`source`: no elements of any operand are read. `parts`: an axis that must be whole is cut, so that the operator is written out, if
    it can be."""

    source: bool = False
    parts: bool = False


class Decision(NamedTuple):
    """Where an operator wants its operands, and where its results then lie; `take` and `parts` are those of a Choice."""

    take: list[int | None]
    wanted: list[Placement]
    results: list[Placement]
    why: str
    parts: bool


class PlacementWalk(FormWalk):
    """A walk whose forms are placements, and what operators choose of them.

    `axes` are the groups that values are cut over, outer before inner, with their sizes. What `stays` is computed with where it rests, as
    far as possible, which is the mark of its value. An operator whose device is in `pins` runs there, whatever moving its operands costs.
    """

    keeps_choices = True

    def __init__(self, program: Program, axes: Mapping[str, int], stays: Container[str], pins: Mapping[str, At]):
        super().__init__(program)
        self.axes, self.stays, self.pins = axes, stays, pins
        self.groups = list(axes_with_ranks(axes).items())
        self.kinds = PatternClasses()
        self.decided: dict[tuple[PatternClass, AtHand, tuple[int, ...]], Decision] = {}  # with stand-ins for roots and flat ranges
        self.helds: dict[tuple[int, tuple[Placement, ...], bool], Held] = {}
        self.types: dict[str, TensorType] = {}
        self.at = {None: Held(())}

    def special(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names, choice: FormChoice) -> FormChoice | list[Operator]:
        """A source writes results where they rest, and an operator over an axis that must be whole and is cut is written out."""
        assert isinstance(choice, Choice)
        if choice.parts and (parts := self._parts(op)) is not None:
            return parts
        if choice.source and (made := self._at_home(op, definition, ins, outs)):
            return Choice(choice.take, choice.ins, made, choice.why, choice.still)
        return choice

    def _parts(self, op: Operator) -> list[Operator] | None:
        """The operators that stand for one, their new values declared; None where it has none."""
        raise NotImplementedError

    # -- one object for each type and placements, so that it is a key by itself ------------------------------------------------

    def _held(self, name: str | None, places: tuple[Placement, ...]) -> Held:
        key = self.type_of[name], places, name in self.stays
        held = self.helds.get(key)
        if held is None:
            held = self.helds[key] = Held(places, name in self.stays)
        return held

    # -- rows ---------------------------------------------------------------------------------------------------------------------

    def _check_defined(self, op: Operator, ins: Names) -> None:
        for n in ins:
            if n not in self.at:
                raise TranspileError(f"op {op.type} reads %{n} before any operator defines it{where(op)}")

    def _kind(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> PatternClass:
        found = [[None if n is None else self.types[n] for n in names] for names in (ins, outs)]
        return self.kinds.of(definition, found[0], found[1], op.attrs)

    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> Choice:
        self._check_defined(op, ins)
        kind = self._kind(op, definition, ins, outs)
        have = tuple([self.at[n].forms for n in ins])
        stays = tuple([k for k, n in enumerate(ins) if self.at[n].mark])
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
        return Choice(one.take, one.wanted, made, f"{op.type}: {one.why}", still, source or one.parts, None, source, one.parts)

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
            as_it_is = k in p.shape_only and not (qs and elsewhere(qs[0], wanted[k]))
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

    def _at_home(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> Results | None:
        """Where results rest that have a place already, if a source can write there; None if not."""
        places = [None if n is None else self.home.get(n, REPLICATE) for n in outs]
        if not any(places) or not may_write(self._kind(op, definition, ins, outs), places, self.groups):
            return None
        return [(self._held(n, (q or REPLICATE,)), q or REPLICATE) for n, q in zip(outs, places, strict=True)]

    def _said(self, op: Operator, definition: type[OpDef], ins: Names) -> Mapping[str, Entry | None]:
        """Where the program says that the result of an operator lies."""
        if definition.annotation is None or ins[0] is None:
            return {}
        said = definition.annotation([None if n is None else next(iter(self.at[n].forms), ()) for n in ins], **op.attrs)
        for group, e in said.items():
            if group not in self.axes:
                raise TranspileError(f"op {op.type}: {no_axis(group, self.axes, self.program.groups)}{where(op)}")
            t = self.types[ins[0]]
            axis = axis_of(e)
            if axis is not None and self.axes[group] > 1 and t.shape[axis] == 1:  # one element is cut nowhere: it broadcasts
                what = f"{e} cuts an axis of {t} that is one element long"
                raise TranspileError(f"op {op.type}: {what}; leave it whole over {group}{where(op)}")
        return said


def _serves(held: Placement, wanted: Placement) -> bool:
    """Can a value that lies so be read where `wanted` is asked for? What every rank has is at the root too."""
    mine = {e.group: e for e in held}
    for e in wanted:
        have = mine.pop(e.group, None)
        if have != e and not (have is None and e.root is not None):
            return False
    return not mine


def elsewhere(held: Placement, wanted: Placement) -> bool:
    """Is a value at a root, or on servers, where it is not wanted, so that not even its shape can be read there?"""
    return any((e.root is not None or e.group == SERVERS) and e not in wanted for e in held)


def no_axis(group: str, axes: Mapping[str, int], groups: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """What is to be said of an annotation over an axis that the ranks do not have."""
    sets = groups.get(group)
    if sets:
        as_axis = f"fx.Mesh(dp={len(sets)}, {group}={len(sets[0])})"
        return f"{group!r} is a group of a Cluster, for collectives alone; to cut over it give trainers={as_axis}"
    return f"the ranks have no axis {group!r}; {nearest(group, axes, 'they have')}; give trainers=fx.Mesh(dp=2, {group}=2)"


def where(op: Operator) -> str:
    """Lines that show an operator and the user's line."""
    return f"\n  in {op.to_string()}" + (f"\n  written at {op.site}" if op.site else "")
