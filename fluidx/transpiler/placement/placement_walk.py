"""The placements that an operator needs for its operands, and those of its results, chosen from its placement rules for each group.

Choices are cached by the class of the operator and the placements of its operands, so a deep program uses the rules once for each kind of
layer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from .stand_in_entries import AtHand, GeneralPlacements, filled_in, with_stand_ins

FIXED, TO_FILL = -1, -2


@dataclass(eq=False, slots=True)
class Choice(FormChoice):
    """A FormChoice of placements. `source`: the operator reads no elements of its operands. `parts`: an axis that must not be cut is cut,
    so the operator is decomposed if possible."""

    source: bool = False
    parts: bool = False


class Decision(NamedTuple):
    """The placements that an operator needs for its operands, and those of its results; `take`, `parts`, `still` and `source` are as in
    Choice."""

    take: list[int | None]
    wanted: list[Placement]
    results: list[Placement]
    why: str
    parts: bool
    still: bool
    source: bool

    def sources(self, have: AtHand) -> list[tuple[int, Any]]:
        """Where each placement of an operand and of a result comes from, for other roots and flat ranges: the operand that has it too, and
        its number there; or FIXED or TO_FILL and the placement."""
        at = {q: (k, i) for k, qs in enumerate(have) for i, q in enumerate(qs) if q}
        places = [*self.wanted, *self.results]
        return [at.get(q) or (TO_FILL if any(e.stands_for is not None for e in q) else FIXED, q) for q in places]


class PlacementWalk(FormWalk):
    """A walk whose forms are placements. `axes` are the groups that values are cut over, outer before inner, with their sizes. Operators
    use variables in `stays` in their storage placement if possible; this is the mark of these values. An operator whose device is in `pins`
    runs on that rank, whatever the cost of moving its operands.
    """

    keeps_choices = True

    def __init__(self, program: Program, axes: Mapping[str, int], stays: Container[str], pins: Mapping[str, At]):
        super().__init__(program)
        self.axes, self.stays, self.pins = axes, stays, pins
        self.groups = list(axes_with_ranks(axes).items())
        self.kinds = PatternClasses()
        self.kind_of: dict[tuple, PatternClass] = {}  # by the numbers of attributes and types
        self.general = GeneralPlacements()
        # one decision serves all roots and flat ranges; beside it: its sources
        self.decided: dict[tuple[PatternClass, tuple[int, ...]], tuple[Decision, list[tuple[int, Any]]]] = {}
        self.helds: dict[tuple[int, ...], Held] = {}  # by the ids of the placements, which they keep
        self.one: dict[Placement, Placement] = {}  # one object for equal placements of decisions
        self.types: dict[str, TensorType] = {}
        self.at = {None: Held(())}

    def special(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names, choice: FormChoice) -> FormChoice | list[Operator]:
        """A source writes its results in their storage placements; an operator with a cut axis that must not be cut is decomposed."""
        assert isinstance(choice, Choice)
        if choice.parts and (parts := self._parts(op)) is not None:
            return parts
        if choice.source and (made := self._at_home(op, definition, ins, outs)):
            return Choice(choice.take, choice.ins, made, choice.why, choice.still)
        return choice

    def _parts(self, op: Operator) -> list[Operator] | None:
        """The operators that replace one operator, with their new values declared; None if it is not decomposed."""
        raise NotImplementedError

    # -- one object for each type and placements, so that its identity is a key -------------------------------------------------

    def _held(self, name: str | None, places: tuple[Placement, ...]) -> Held:
        mark = name in self.stays
        key = self.type_of[name], mark, *map(id, places)
        held = self.helds.get(key)
        if held is None:
            held = self.helds[key] = Held(places, mark)
        return held

    # -- rows ---------------------------------------------------------------------------------------------------------------------

    def _check_defined(self, op: Operator, ins: Names) -> None:
        for n in ins:
            if n not in self.at:
                raise TranspileError(f"op {op.type} reads %{n} before any operator defines it{where(op)}")

    def _kind(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> PatternClass:
        number = self.type_of.get
        key = definition, self.by_id.get(id(op.attrs)) if op.attrs else -1, *map(number, ins), None, *map(number, outs)
        kind = self.kind_of.get(key)
        if kind is None:
            found = [[None if n is None else self.types[n] for n in names] for names in (ins, outs)]
            kind = self.kinds.of(definition, found[0], found[1], op.attrs)
            if key[1] is not None:
                self.kind_of[key] = kind
        return kind

    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> Choice:
        at = self.at
        if not all(map(at.__contains__, ins)):
            self._check_defined(op, ins)
        kind, helds = self._kind(op, definition, ins, outs), [at[n] for n in ins]
        said = self._said(op, definition, ins) if definition.comm.annotation is not None else {}
        pin = self.pins.get(op.device) if self.pins else None
        if said or pin is not None or kind.pattern.flat_ranges:
            one = self._decided(definition, kind, tuple([held.forms for held in helds]), _marked(helds), said, pin)
            wanted, results = one.wanted, one.results
        else:
            one, wanted, results = self._for_all_roots(definition, kind, helds)
        made = [(self._held(n, (q,)), q) for n, q in zip(outs, results, strict=True)]
        return Choice(one.take, wanted, made, f"{op.type}: {one.why}", one.still, one.source or one.parts, None, one.source, one.parts)

    def _for_all_roots(
        self, definition: type[OpDef], kind: PatternClass, helds: Sequence[Held]
    ) -> tuple[Decision, list[Placement], list[Placement]]:
        """The decision for operands held so, whichever roots and flat ranges their placements have, and then the placements of operands
        and of results."""
        key, entries = self.general.key(helds)
        found = self.decided.get((kind, key))
        if found is None:
            general, _ = with_stand_ins([held.forms for held in helds])
            one = self._decided(definition, kind, general, _marked(helds), {}, None)
            found = self.decided[kind, key] = one, one.sources(general)
        one, sources = found
        if not entries:
            return one, one.wanted, one.results
        places = [helds[k].forms[i] if k >= 0 else i if k == FIXED else self._one(filled_in(i, entries)) for k, i in sources]
        return one, places[: len(one.wanted)], places[len(one.wanted) :]

    def _decided(
        self, definition: type[OpDef], kind: PatternClass, have: AtHand, stays: tuple[int, ...], said: Mapping[str, Entry | None],
        pin: At | None,
    ) -> Decision:  # fmt: skip
        """The Decision for an operator whose operands are available in these placements."""
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
        if any(row.flat for row, _, _ in over):  # a value with flat ranges has no other entries
            over = [found if found[0].flat else (whole, list(whole.ins), list(whole.outs)) for found in over]
        elif SERVERS in self.axes and over[0][0] is not whole and any(row is not whole for row, _, _ in over[1:]):
            over = self._on_one_side(kind, over, have)
        wanted = [self._one([entries[k] for _, entries, _ in over]) for k in range(len(have))]
        results = [self._one([entries[k] for _, _, entries in over]) for k in range(len(p.outs))]
        take: list[int | None] = []
        for k, qs in enumerate(have):
            here = next((i for i, q in enumerate(qs) if q == wanted[k]), None)
            if here is None:  # a replicated value is on the root too
                here = next((i for i, q in enumerate(qs) if _serves(q, wanted[k])), -1)
            as_it_is = k in p.shape_only and not (qs and elsewhere(qs[0], wanted[k]))
            take.append(None if as_it_is or p.ins[k] is None else here)
        parts = definition.gives_way_to_parts() and any(cut_across(p, have, g) for g, _ in self.groups)
        still, source = all(t is None or t == 0 for t in take), all(t is None for t in take)
        return Decision(take, wanted, results, ", ".join(dict.fromkeys(row.why for row, _, _ in over)), parts, still, source)

    def _one(self, entries: Iterable[Entry | None]) -> Placement:
        """The placement of these entries, one object for equal ones."""
        place = tuple([e for e in entries if e is not None])
        return self.one.setdefault(place, place)

    def _on_one_side(self, kind: PatternClass, over: Sequence[Chosen], have: Sequence[tuple[Placement, ...]]) -> list[Chosen]:
        """If some operands are on servers and others on trainers, bring all to the trainers if these cut one of them, else to one
        server."""
        whole, root = (next(row for row in kind.table if row.kind == k) for k in ("whole", "root"))
        nothing: Chosen = (whole, list(whole.ins), list(whole.outs))
        if any(axis_of(e) is not None for _, entries, _ in over[1:] for e in entries):
            return [nothing, *over[1:]]
        held = next(e for qs in have for q in qs if (e := entry_of(q, SERVERS)) is not None)
        ins, outs = ([held if e is not None else None for e in entries] for entries in (root.ins, root.outs))
        return [(root, ins, outs), *(nothing for _ in over[1:])]

    def _at_home(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> Results | None:
        """The storage placements of results that have one, if a source can write its results there; else None."""
        places = [None if n is None else self.home.get(n, REPLICATE) for n in outs]
        if not any(places) or not may_write(self._kind(op, definition, ins, outs), places, self.groups):
            return None
        return [(self._held(n, (q or REPLICATE,)), q or REPLICATE) for n, q in zip(outs, places, strict=True)]

    def _said(self, op: Operator, definition: type[OpDef], ins: Names) -> Mapping[str, Entry | None]:
        """The entries that the program itself annotates for the result of an operator."""
        if definition.comm.annotation is None or ins[0] is None:
            return {}
        said = definition.comm.annotation([None if n is None else next(iter(self.at[n].forms), ()) for n in ins], **op.attrs)
        for group, e in said.items():
            if group not in self.axes:
                raise TranspileError(f"op {op.type}: {no_axis(group, self.axes, self.program.groups)}{where(op)}")
            t = self.types[ins[0]]
            axis = axis_of(e)
            if axis is not None and self.axes[group] > 1 and t.shape[axis] == 1:  # an axis of size 1 is not cut: it broadcasts
                what = f"{e} cuts an axis of {t} that has size 1"
                raise TranspileError(f"op {op.type}: {what}; leave it replicated over {group}{where(op)}")
        return said


def _marked(helds: Sequence[Held]) -> tuple[int, ...]:
    return tuple([k for k, held in enumerate(helds) if held.mark])


def _serves(held: Placement, wanted: Placement) -> bool:
    """Can a value in the placement `held` be read as one in `wanted`? A replicated value is at every root too."""
    mine = {e.group: e for e in held}
    for e in wanted:
        have = mine.pop(e.group, None)
        if have != e and not (have is None and e.root is not None):
            return False
    return not mine


def elsewhere(held: Placement, wanted: Placement) -> bool:
    """Is a value at a root or on servers, and needed on other ranks, which cannot even read its shape?"""
    return any((e.root is not None or e.group == SERVERS) and e not in wanted for e in held)


def no_axis(group: str, axes: Mapping[str, int], groups: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """The error text for an annotation over an axis that the ranks do not have."""
    sets = groups.get(group)
    if sets:
        as_axis = f"fx.Mesh(dp={len(sets)}, {group}={len(sets[0])})"
        return f"{group!r} is a group of a Cluster, for collectives alone; to cut over it give trainers={as_axis}"
    return f"the ranks have no axis {group!r}; {nearest(group, axes, 'they have')}; give trainers=fx.Mesh(dp=2, {group}=2)"


def where(op: Operator) -> str:
    """Lines for an error message: the operator, and the user's source line."""
    return f"\n  in {op.to_string()}" + (f"\n  written at {op.site}" if op.site else "")
