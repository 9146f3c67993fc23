"""One operator by itself: slots, attributes, types, and whether its operands may lie where they lie.

Operators of one type, with equal attributes and operands of equal types and placements, are of one *kind* and are looked at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from ..ir.entries import axis_of, is_local
from ..ir.errors import ProgramError
from ..ir.opdef import Effect, OpDef, opdef
from ..ir.operator import BlockRef, Operator
from ..ir.parts import entry_of
from ..ir.pattern import Pattern
from ..ir.rows import PlacementRow, cut_twice, find_row, rows, same_cut
from ..ir.time_axes import over_turns
from ..ir.types import Placement, TensorType, show_placement
from .advice import Advice
from .mesh import RankGroups, partial
from .normal_form import ExpressionTable
from .refusal import Refusal

Signature = tuple[TensorType, Placement]
COMMUNICATES = (Effect.COLLECTIVE, Effect.P2P)


class OperatorClass:
    """What is known of all operators of a kind. `wrong` is the reason why none of them may stand in a program."""

    __slots__ = ("definition", "attrs", "attrs_id", "counts", "ins", "outs", "types", "placed", "local", "runs", "wrong", "no_row", "adds")

    def __init__(
        self, definition: type[OpDef], attrs: Mapping[str, Any], attrs_id: int, counts: tuple, ins: Sequence[Any], outs: Sequence[Any]
    ):
        self.definition, self.attrs, self.attrs_id = definition, attrs, attrs_id
        self.ins: Sequence[Signature | None] = ins
        self.outs: Sequence[Signature | None] = outs
        self.local = any(s is not None and is_local(s[1]) for s in (*ins, *outs))
        self.counts = counts  # operands of each slot that takes a list
        self.types: list[TensorType | None] = [None if s is None else s[0] for s in outs]
        self.placed: list[tuple[Placement, bool] | None] = []  # of each output: its placement's one form; does it have terms?
        self.runs = any(isinstance(v, BlockRef) for v in attrs.values())
        self.wrong = ""
        self.no_row = ""  # why no lemma refers to operands that lie so
        self.adds = False  # does it add up what several turns made?


class OperatorClasses:
    """The kinds of operators over one mesh."""

    def __init__(self, mesh: RankGroups, table: ExpressionTable, loose: set[tuple] | None = None, single: bool = False):
        """`loose` holds operators that the source declares with sizes left open, or filled in, otherwise than the type rule does: a
        `single` program adds its own, other programs may have no more. None: nothing is asked."""
        self.mesh, self.attrs_id, self.loose, self.single = mesh, table.attrs_id, loose, single
        self.found: dict[tuple, OperatorClass] = {}
        self._patterns: dict[tuple, tuple[Pattern, list[PlacementRow]]] = {}
        self._good_attrs: set[tuple[str, int]] = set()

    def of(self, op: Operator, ins: Sequence[Signature | None], outs: Sequence[Signature | None], counts: tuple) -> OperatorClass:
        number = self.attrs_id(op.attrs)
        key = op.type, number, tuple(map(id, ins)), tuple(map(id, outs)), counts  # equal signatures are one object
        kind = self.found.get(key)
        if kind is None:
            kind = self.found[key] = OperatorClass(opdef(op.type), op.attrs, number, counts, ins, outs)
            try:
                self._check(kind, op)
            except (Refusal, ProgramError) as e:
                text = str(e)
                kind.wrong = text if text.startswith(f"op {op.type}") else f"op {op.type}: {text}"
            except Exception as e:  # a type rule or pattern that what was written makes stumble
                kind.wrong = f"op {op.type} does not fit its operands and attributes: {type(e).__name__}: {e}"
        return kind

    def _check(self, kind: OperatorClass, op: Operator) -> None:
        if (op.type, kind.attrs_id) not in self._good_attrs:
            check_attrs(kind.definition, op.attrs)
            self._good_attrs.add((op.type, kind.attrs_id))
        for s in kind.ins:
            if s is not None:
                self.mesh.canonical(s[1], s[0])
        for s in (*kind.ins, *kind.outs) if self.mesh.axes and self.loose is not None else ():
            if s is not None and over_turns(s[1], self.mesh.axes):
                raise Refusal(f"an operand or result is {show_placement(s[1])}; an operator of a rank belongs to one iteration")
        for s in kind.outs:
            placement = None if s is None else self.mesh.canonical(s[1], s[0])
            kind.placed.append(None if placement is None else (placement, partial(placement)))
        if kind.local or kind.definition.effect is Effect.P2P:  # their types are those of one rank
            return
        in_types, out_types = [s and s[0] for s in kind.ins], [s and s[0] for s in kind.outs]
        inferred = check_types(kind.definition, op, in_types, out_types)
        if self.loose is not None and inferred != out_types:
            key = (op.type, kind.attrs_id, tuple(in_types), tuple(out_types))
            if self.single:
                self.loose.add(key)
            elif key not in self.loose:
                made = ", ".join(str(t) for t in inferred if t is not None)
                raise Refusal(f"its results are {made}, but they are declared {', '.join(str(t) for t in out_types if t is not None)}")
        if not kind.runs and kind.definition.effect not in COMMUNICATES and kind.definition.move is None:
            kind.no_row = self._rows(kind, op)
            if kind.no_row and self.mesh.turns and self._adds(kind):
                kind.no_row, kind.adds = "", True

    def _adds(self, kind: OperatorClass) -> bool:
        """Does the operator fold its operands into one, which turns made as terms of that?"""
        folds, ins, outs = kind.definition.folds, [s for s in kind.ins if s is not None], [s for s in kind.outs if s is not None]
        if not folds or len(outs) != 1 or len({s[0] for s in (*ins, *outs)}) > 1:
            return False
        made = self.mesh.of_turns_together([self.mesh.canonical(s[1], s[0]) for s in ins], folds)
        return made is not None and self.mesh.canonical(made, outs[0][0]) == self.mesh.canonical(outs[0][1], outs[0][0])

    def _rows(self, kind: OperatorClass, op: Operator) -> str:
        """Why no lemma allows the placements; "" where one does."""
        ins, outs = [s and s[1] for s in kind.ins], [s and s[1] for s in kind.outs]
        groups = dict.fromkeys(e.group for p in (*ins, *outs) for e in p or ())
        if not groups:
            return ""
        in_types, out_types = [s and s[0] for s in kind.ins], [s and s[0] for s in kind.outs]
        types = [*in_types, *out_types]
        key = op.type, kind.attrs_id, kind.counts, tuple(in_types), tuple(out_types)
        if key not in self._patterns:
            made = kind.definition.pattern_of(in_types, out_types, kind.attrs)
            # where ranks have to talk, a collective stands
            self._patterns[key] = made, [row for row in rows(made) if row.kind != "meet"]
        pattern, table = self._patterns[key]
        chosen: list[PlacementRow] = []
        for group in groups:
            before = [entry_of(p or (), group) for p in ins]
            after = [entry_of(p or (), group) for p in outs]
            n = self.mesh.size.get(group, 1)
            row = find_row(table, pattern, before, after, types, group, n)
            if row is None:
                return Advice(table, pattern, before, types, group, n).why_not(op, kind.definition, after)
            chosen.append(row)
        if twice := cut_twice(chosen):
            return f"two groups cut {twice}, which is in runs; redistribute what one of them cuts first"
        return self._nesting([*ins, *outs], types, pattern.shape_only)

    @staticmethod
    def _nesting(places: Sequence[Placement | None], types: Sequence[TensorType | None], free: frozenset[int]) -> str:
        """Two groups that cut one axis, one inside of the other, must do so alike in every operand that both cut."""
        cuts = [
            {} if k in free or t is None else {e.group: (rank, e, t.shape[e.axis]) for rank, e in enumerate(p or ()) if e.axis is not None}
            for k, (p, t) in enumerate(zip(places, types, strict=True))
        ]
        pairs = {(a, b) for by in cuts for a in by for b in by if by[a][0] < by[b][0] and by[a][1].axis == by[b][1].axis}
        for outer, inner in pairs:
            blocks = set()
            for by in cuts:
                if outer not in by or inner not in by:
                    continue
                (first, a, size), (second, b, _) = by[outer], by[inner]
                if a.axis != b.axis or first > second:
                    return f"{outer} and {inner} cut one axis of one operand, and not so of another"
                unit = gcd(a.unit, b.unit)
                blocks.add((-1 if size < 0 else -(-size // unit), a.unit // unit, b.unit // unit))
            if len({x[1:] for x in blocks}) > 1 or len({x[0] for x in blocks} - {-1}) > 1:
                return f"{outer} and {inner} cut one axis of its operands between other blocks"
        return ""


def check_attrs(definition: type[OpDef], attrs: Mapping[str, Any]) -> None:
    """Raise ProgramError unless all declared attributes are there, no others, each of its type."""
    full = definition.complete_attrs(attrs)
    for name, value in full.items():
        if name not in attrs:
            raise ProgramError(f"op {definition.name} has no value for attribute {name!r}; kernels take every attribute")
        if value is not attrs[name] and repr(value) != repr(attrs[name]):
            raise ProgramError(f"op {definition.name}: attribute {name!r} must be {type(value).__name__}, found {attrs[name]!r}")


def check_types(
    definition: type[OpDef], op: Operator, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]
) -> list[TensorType | None]:
    """The types that the op's rule infers, one by one; Refused where the declared ones do not take them."""
    given = iter(ins)
    types: dict[str, list[TensorType]] = {}
    for slot in definition.in_slots:
        names = op.inputs.get(slot.name, ())
        row = [next(given) for _ in (names if slot.many or names else (None,))]
        types[slot.name] = [t for t in row if t is not None]
    results = definition.infer_outputs(types, op.attrs)
    declared = iter(outs)
    inferred: list[TensorType | None] = []
    sub_blocks = bool(list(op.sub_blocks()))
    for slot, result in zip(definition.out_slots, results, strict=True):
        names = op.outputs.get(slot.name, ())
        made = list(result) if slot.many else [result]
        if slot.many and sub_blocks:
            made = [next(declared) for _ in names]
            inferred += made
            continue
        if slot.many and len(made) != len(names):
            raise Refusal(f"it makes {len(made)} outputs {slot.name!r}, {len(names)} are named")
        for k, n in enumerate(names if slot.many or names else (None,)):
            t = next(declared)
            if n is not None and t is not None and not t.accepts(made[k]):
                raise Refusal(f"it makes {made[k]}, but %{n} is declared {t}")
            inferred.append(made[k] if n is not None else None)
    return inferred


def moved_entry_is(kind: OperatorClass, mesh: RankGroups) -> str:
    """Why the placement of a communicating operator's result does not follow from its operand's, by the op's own `move`; "" if it does."""
    definition, attrs = kind.definition, kind.attrs
    if definition.move is None or len(kind.ins) != 1 or len(kind.outs) != 1 or kind.ins[0] is None or kind.outs[0] is None:
        return "the op says nothing of placements"
    (t, before), (t_out, after) = kind.ins[0], kind.outs[0]
    group = attrs.get("group")
    if group not in mesh.size:
        return f"group {group!r} is no declared group of sets of one size"
    if t != t_out:
        return f"{t} cannot become {t_out}"
    n = mesh.size[group]
    if not 0 <= attrs.get("root", 0) < n:
        return f"root {attrs['root']} is no rank of {group}, which has {n}"
    had, has = entry_of(before, group), entry_of(after, group)
    try:
        made = definition.move(had, **attrs)
    except ProgramError as e:
        return str(e)
    if made is not None and made.axis is not None and (wrong := made.check(t, n)):
        return wrong
    if not same_cut(made, has, t.shape, n):
        return f"from {show_placement(before)} the op makes {f'whole over {group}' if made is None else made}, not {show_placement(after)}"
    if tuple(e for e in before if e.group != group) != tuple(e for e in after if e.group != group):
        return f"from {show_placement(before)} to {show_placement(after)} other groups change too"
    for entry, placement in ((had, before), (has, after)):
        if entry is None:
            continue
        if entry.axis is not None:
            same_axis = [e for e in placement if e.axis == entry.axis]
            if same_axis[-1] is not entry and same_axis[-1] != entry:
                return f"{entry} is cut further by {same_axis[-1]}"
            if len(same_axis) > 1 and axis_of(made) is not None and entry is has and made != has:
                return f"{made} is not {has}"
        if entry.bounds is not None and made is not None and made.bounds is not None and entry is has and made != has:
            return f"{made} is not {has}"
        if entry.root is not None and not 0 <= entry.root < n:
            return f"{entry} is no rank of {group}"
    return ""
