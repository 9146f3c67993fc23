"""Checks of one operator: slots, attributes, types, and whether a placement rule allows the placements of its operands.

Operators with equal op, attributes, and types and placements of operands and results are one *operator class*, which is checked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

from ..ir.attributes import is_exact
from ..ir.entries import axis_of, is_local
from ..ir.errors import ProgramError
from ..ir.opdef import Effect, OpDef, opdef
from ..ir.operator import BlockRef, Operator
from ..ir.parts import entry_of
from ..ir.pattern import Pattern
from ..ir.rows import PlacementRow, cut_twice, find_row, rows, same_cut
from ..ir.time_axes import over_turns
from ..ir.types import Entry, Placement, TensorType, show_placement
from .advice import Advice
from .mesh import RankGroups, partial
from .normal_form import ExpressionTable
from .refusal import Refusal

Signature = tuple[TensorType, Placement]
COMMUNICATES = (Effect.COLLECTIVE, Effect.P2P)


class OperatorClass:
    """The facts about all operators of one class. `wrong` says why they are invalid; "" if they are valid."""

    __slots__ = ("definition", "attrs", "attrs_id", "counts", "ins", "outs", "types", "placed", "local", "runs", "wrong", "no_row", "adds")

    def __init__(
        self, definition: type[OpDef], attrs: Mapping[str, Any], attrs_id: int, counts: tuple, ins: Sequence[Any], outs: Sequence[Any]
    ):
        self.definition, self.attrs, self.attrs_id = definition, attrs, attrs_id
        self.ins: Sequence[Signature | None] = ins
        self.outs: Sequence[Signature | None] = outs
        self.local = any(s is not None and is_local(s[1]) for s in (*ins, *outs))
        self.counts = counts  # number of operands in each slot that takes a list
        self.types: list[TensorType | None] = [None if s is None else s[0] for s in outs]
        self.placed: list[tuple[Placement, bool] | None] = []  # of each output: (its canonical placement, whether it is partial)
        self.runs = any(isinstance(v, BlockRef) for v in attrs.values())
        self.wrong = ""
        self.no_row = ""  # why no placement rule allows these placements
        self.adds = False  # True if it adds terms of several iterations


class OperatorClasses:
    """The operator classes of programs over one mesh."""

    def __init__(self, mesh: RankGroups, table: ExpressionTable, loose: set[tuple] | None = None, single: bool = False):
        """`loose`: operator types whose declared results differ from the inferred ones in open sizes.

        A `single` program (for one device) adds its own to `loose`; other programs may have only these. None: this is not checked.
        """
        self.mesh, self.attrs_id, self.loose, self.single = mesh, table.attrs_id, loose, single
        self.found: dict[tuple, OperatorClass] = {}
        self._patterns: dict[tuple, tuple[Pattern, list[PlacementRow]]] = {}
        self._good_attrs: set[tuple[str, int]] = set()
        self._good_types: set[tuple] = set()  # of operators without sub-blocks
        self._row_of: dict[tuple, PlacementRow] = {}

    def of(self, op: Operator, ins: Sequence[Signature | None], outs: Sequence[Signature | None], counts: tuple) -> OperatorClass:
        number = self.attrs_id(op.attrs)
        key = op.type, number, tuple(map(id, ins)), tuple(map(id, outs)), counts  # equal signatures are one object
        op_class = self.found.get(key)
        if op_class is None:
            op_class = self.found[key] = OperatorClass(opdef(op.type), op.attrs, number, counts, ins, outs)
            try:
                self._check(op_class, op)
            except (Refusal, ProgramError) as e:
                text = str(e)
                op_class.wrong = text if text.startswith(f"op {op.type}") else f"op {op.type}: {text}"
            except Exception as e:  # a type rule or pattern that fails on these operands
                op_class.wrong = f"op {op.type} does not fit its operands and attributes: {type(e).__name__}: {e}"
        return op_class

    def _check(self, op_class: OperatorClass, op: Operator) -> None:
        if (op.type, op_class.attrs_id) not in self._good_attrs:
            check_attrs(op_class.definition, op.attrs)
            self._good_attrs.add((op.type, op_class.attrs_id))
        for s in op_class.ins:
            if s is not None:
                self.mesh.canonical(s[1], s[0])
        for s in (*op_class.ins, *op_class.outs) if self.mesh.axes and self.loose is not None else ():
            if s is not None and over_turns(s[1], self.mesh.axes):
                raise Refusal(f"an operand or result is {show_placement(s[1])}; an operator of a rank belongs to one iteration")
        for s in op_class.outs:
            placement = None if s is None else self.mesh.canonical(s[1], s[0])
            op_class.placed.append(None if placement is None else (placement, partial(placement)))
        if op_class.local or op_class.definition.effect is Effect.P2P:  # their types are local to one rank
            return
        self._check_global_types(op_class, op)
        if not op_class.runs and op_class.definition.effect not in COMMUNICATES and op_class.definition.comm.move is None:
            op_class.no_row = self._rows(op_class, op)
            if op_class.no_row and self.mesh.turns and self._adds(op_class):
                op_class.no_row, op_class.adds = "", True

    def _check_global_types(self, op_class: OperatorClass, op: Operator) -> None:
        in_types, out_types = [s and s[0] for s in op_class.ins], [s and s[0] for s in op_class.outs]
        known = op.type, op_class.attrs_id, op_class.counts, tuple(in_types), tuple(out_types)
        if known in self._good_types:  # of a class with other placements
            return
        inferred = check_types(op_class.definition, op, in_types, out_types)
        if self.loose is not None and inferred != out_types:
            key = (op.type, op_class.attrs_id, tuple(in_types), tuple(out_types))
            if self.single:
                self.loose.add(key)
            elif key not in self.loose:
                made = ", ".join(str(t) for t in inferred if t is not None)
                raise Refusal(f"its results are {made}, but they are declared {', '.join(str(t) for t in out_types if t is not None)}")
        if not op_class.runs:
            self._good_types.add(known)

    def _adds(self, op_class: OperatorClass) -> bool:
        """True if the operator reduces its operands, and these are the terms that several iterations made of the result."""
        folds = op_class.definition.rewrite.folds
        ins, outs = ([s for s in signatures if s is not None] for signatures in (op_class.ins, op_class.outs))
        if not folds or len(outs) != 1 or len({s[0] for s in (*ins, *outs)}) > 1:
            return False
        made = self.mesh.of_turns_together([self.mesh.canonical(s[1], s[0]) for s in ins], folds)
        return made is not None and self.mesh.canonical(made, outs[0][0]) == self.mesh.canonical(outs[0][1], outs[0][0])

    def _rows(self, op_class: OperatorClass, op: Operator) -> str:
        """Why no placement rule allows the placements; "" if one does."""
        ins, outs = [s and s[1] for s in op_class.ins], [s and s[1] for s in op_class.outs]
        groups = dict.fromkeys(e.group for p in (*ins, *outs) for e in p or ())
        if not groups:
            return ""
        in_types, out_types = [s and s[0] for s in op_class.ins], [s and s[0] for s in op_class.outs]
        types = [*in_types, *out_types]
        key = op.type, op_class.attrs_id, op_class.counts, tuple(in_types), tuple(out_types)
        if key not in self._patterns:
            made = op_class.definition.pattern_of(in_types, out_types, op_class.attrs)
            # a `meet` row needs communication, which is a collective in the program
            self._patterns[key] = made, [row for row in rows(made) if row.kind != "meet"]
        pattern, table = self._patterns[key]
        chosen: list[PlacementRow] = []
        for group in groups:
            before = [entry_of(p or (), group) for p in ins]
            after = [entry_of(p or (), group) for p in outs]
            n = self.mesh.size.get(group, 1)
            at = key, group, _with_roots_numbered((*before, *after))
            row = self._row_of.get(at)
            if row is None:
                row = find_row(table, pattern, before, after, types, group, n)
                if row is None:
                    return Advice(table, pattern, before, types, group, n).why_not(op, op_class.definition, after)
                self._row_of[at] = row
            chosen.append(row)
        if twice := cut_twice(chosen):
            return f"two groups shard {twice}, which is sharded in runs; gather one of them first"
        return self._nesting([*ins, *outs], types, pattern.shape_only)

    @staticmethod
    def _nesting(places: Sequence[Placement | None], types: Sequence[TensorType | None], free: frozenset[int]) -> str:
        """Why two groups that shard one axis, one inside the other, do so differently in different operands; "" if they do not."""
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
                    return f"{outer} and {inner} shard one axis of one operand, but not of another in the same way"
                unit = gcd(a.unit, b.unit)
                blocks.add((-1 if size < 0 else -(-size // unit), a.unit // unit, b.unit // unit))
            if len({x[1:] for x in blocks}) > 1 or len({x[0] for x in blocks} - {-1}) > 1:
                return f"{outer} and {inner} shard one axis of its operands at different bounds"
        return ""


def _with_roots_numbered(entries: Sequence[Entry | None]) -> tuple:
    """Entries over one group, with their roots numbered as they occur: rules only compare roots, so one rule allows all that are equal."""
    roots: dict[int, int] = {}
    return tuple([e if e is None or e.root is None else roots.setdefault(e.root, len(roots)) for e in entries])


def check_attrs(definition: type[OpDef], attrs: Mapping[str, Any]) -> None:
    """Raise ProgramError unless the attributes are exactly the declared ones, each of its type."""
    types = definition.attr_types
    if len(attrs) == len(types) and all(v.__class__ is types.get(k) and is_exact(v) for k, v in attrs.items()):
        return  # `complete_attrs` gives the same record
    full = definition.complete_attrs(attrs)
    for name, value in full.items():
        if name not in attrs:
            raise ProgramError(f"op {definition.name} has no value for attribute {name!r}; kernels take every attribute")
        if value is not attrs[name] and repr(value) != repr(attrs[name]):
            raise ProgramError(f"op {definition.name}: attribute {name!r} must be {type(value).__name__}, found {attrs[name]!r}")


def check_types(
    definition: type[OpDef], op: Operator, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]
) -> list[TensorType | None]:
    """The types that the op's rule infers. Raises Refusal if a declared type does not accept the inferred one."""
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
            raise Refusal(f"it makes {len(made)} outputs {slot.name!r}, but the operator names {len(names)}")
        for k, n in enumerate(names if slot.many or names else (None,)):
            t = next(declared)
            if n is not None and t is not None and not t.accepts(made[k]):
                raise Refusal(f"it makes {made[k]}, but %{n} is declared {t}")
            inferred.append(made[k] if n is not None else None)
    return inferred


def moved_entry_is(op_class: OperatorClass, mesh: RankGroups) -> str:
    """Why the placement of a collective's result does not follow from that of its operand, by the op's `move`; "" if it does."""
    definition, attrs = op_class.definition, op_class.attrs
    single = len(op_class.ins) == len(op_class.outs) == 1
    if definition.comm.move is None or not single or op_class.ins[0] is None or op_class.outs[0] is None:
        return "the op does not declare how it changes placements"
    (t, before), (t_out, after) = op_class.ins[0], op_class.outs[0]
    group = attrs.get("group")
    if group not in mesh.size:
        return f"group {group!r} is not declared, or its sets have different sizes"
    if t != t_out:
        return f"{t} cannot become {t_out}"
    n = mesh.size[group]
    if not 0 <= attrs.get("root", 0) < n:
        return f"root {attrs['root']} is not an index of {group}, which has {n} ranks"
    had, has = entry_of(before, group), entry_of(after, group)
    try:
        made = definition.comm.move(had, **attrs)
    except ProgramError as e:
        return str(e)
    if made is not None and made.axis is not None and (wrong := made.check(t, n)):
        return wrong
    if not same_cut(made, has, t.shape, n):
        return f"from {show_placement(before)} the op makes {f'whole over {group}' if made is None else made}, not {show_placement(after)}"
    if tuple(e for e in before if e.group != group) != tuple(e for e in after if e.group != group):
        return f"from {show_placement(before)} to {show_placement(after)} other groups change too"
    return _why_not_moved(before, after, had, has, made, n)


def _why_not_moved(before: Placement, after: Placement, had: Entry | None, has: Entry | None, made: Entry | None, n: int) -> str:
    """Why the entries over the group of a collective do not fit the rest of the placements; "" if they do."""
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
            return f"{entry}: its group has {n} ranks"
    return ""
