"""What an operator makes of what it reads: on expressions, on parts that lie somewhere, and on one rank's own values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

from ..ir.entries import is_local
from ..ir.errors import ProgramError
from ..ir.make_op import make_op
from ..ir.opdef import Effect, OpDef, opdef
from ..ir.operator import Frozen, Operator, Role
from ..ir.parts import entry_of
from ..ir.types import Placement, TensorType
from .linear import coefficients
from .mesh import without_roots
from .operator_check import COMMUNICATES, OperatorClass, OperatorClasses, Signature, check_types, moved_entry_is
from .refusal import Refusal
from .values import EMPTY, ProgramValues

_DEEPEST = 8  # operators that expand to operators that expand ...


class DeclaredNames(Protocol):
    """Where names are declared."""

    def signature(self, name: str) -> Signature: ...


class NameScope(DeclaredNames, Protocol):
    """Where an operator's names mean something: a block, for all ranks or for one."""

    def read(self, name: str) -> int: ...

    def write(self, name: str, value: int) -> None: ...


class Operators:
    """The operators of one set of programs, over one table."""

    def __init__(self, values: ProgramValues, kinds: OperatorClasses):
        self.values, self.kinds, self.table, self.mesh = values, kinds, values.table, values.mesh
        self.round: tuple = ()  # of the loops around, which takes part in what is drawn at random
        self._coefficients: dict[tuple, Any] = {}
        self._memo: dict[tuple, tuple[int | None, ...]] = {}
        self._forms: dict[tuple, tuple[type[OpDef], bool, tuple]] = {}
        self._typed: dict[tuple, bool] = {}
        self._moves: dict[int, str] = {}
        self._hows: dict[int, int] = {}

    # -- names -------------------------------------------------------------------------------------------------------

    def kind(self, op: Operator, scope: DeclaredNames) -> tuple[OperatorClass, Sequence[str | None], Sequence[str | None]]:
        """The operator's kind, and the names that it reads and writes in slot order. Raises Refused for what may not stand there."""
        inputs, outputs = op.inputs, op.outputs
        form = op.type, len(inputs), *inputs, *map(len, inputs.values()), *outputs, *map(len, outputs.values())
        known = self._forms.get(form)
        if known is None:
            known = self._forms[form] = _form(op)
        definition, in_order, counts = known
        signature = scope.signature
        ins: Sequence[str | None]
        outs: Sequence[str | None]
        if in_order:
            ins, outs = reads, writes = op.input_arg_names, op.output_arg_names
            kind = self.kinds.of(op, tuple(map(signature, reads)), tuple(map(signature, writes)), counts)
        else:
            ins, outs = definition.flat_slots(inputs, definition.in_slots), definition.flat_slots(outputs, definition.out_slots)
            given, made = ([None if n is None else signature(n) for n in names] for names in (ins, outs))
            kind = self.kinds.of(op, tuple(given), tuple(made), counts)
        if kind.wrong:
            raise Refusal(kind.wrong)
        named = op.output_arg_names
        if len(named) > 1 and len(set(named)) < len(named):
            raise Refusal(f"op {op.type} writes one variable twice")
        return kind, ins, outs

    # -- expressions -------------------------------------------------------------------------------------------------

    def expressions(
        self, definition: type[OpDef], op: Operator, attrs_id: int, ins: Sequence[int | None], types: Sequence[TensorType | None],
        opaque: bool = True, depth: int = 0, counts: tuple | None = None,
    ) -> list[int | None]:  # fmt: skip
        """The expressions of an operator's outputs, of these types, from those of its operands."""
        table = self.table
        if definition.expand is not None and opaque and depth < _DEEPEST:
            parts = definition.expand(op, _fresh(op))
            if parts is not None:
                return self._expanded(definition, op, parts, ins, depth)
        try:
            if definition.meaning is not None and definition.effect not in COMMUNICATES:
                return list(definition.meaning(table, _arranged(definition, op, ins), list(types), **op.attrs))
            weighted = self.linear(definition, op, attrs_id, ins, types)
            if weighted is not None:
                (t,) = types
                assert t is not None
                return [table.lin([(e, w) for k, w in weighted if (e := ins[k]) is not None], t)]
        except Refusal:
            if not opaque:
                raise
        if not opaque:
            raise Refusal(f"op {op.type} works on what a rank holds for itself; only sums, multiples and what lays elements out anew may")
        given = tuple(ins)
        if counts is None:
            counts = tuple(len(op.inputs.get(s.name, ())) for s in definition.in_slots if s.many)
        said = ("op", op.type, attrs_id, given, counts, *self._drawn(definition))
        return [None if t is None else table.intern((*said, k), t, given) for k, t in enumerate(types)]

    @contextmanager
    def in_round(self, of: tuple) -> Iterator[None]:
        """Operators inside stand in a loop, and draw in each round anew: `of` says what decides which numbers."""
        outside, self.round = self.round, (*self.round, of)
        try:
            yield
        finally:
            self.round = outside

    def _drawn(self, definition: type[OpDef]) -> tuple:
        """What the results of an operator depend on besides its operands and attributes."""
        return self.round if definition.effect is Effect.RANDOM else ()

    def _expanded(
        self, definition: type[OpDef], op: Operator, parts: Sequence[Operator], ins: Sequence[int | None], depth: int
    ) -> list[int | None]:
        names = definition.flat_slots(op.inputs, definition.in_slots)
        env = {n: e for n, e in zip(names, ins, strict=True) if n is not None and e is not None}
        for p in parts:
            inner = opdef(p.type)
            given = [None if n is None else env[n] for n in inner.flat_slots(p.inputs, inner.in_slots)]
            outs = inner.flat_slots(p.outputs, inner.out_slots)
            row = {s.name: [self.table.types[env[n]] for n in p.inputs.get(s.name, ())] for s in inner.in_slots}
            attrs = inner.complete_attrs(p.attrs)
            p = p.replace(attrs=attrs)
            types: list[TensorType | None] = []
            for slot, result in zip(inner.out_slots, inner.infer_outputs(row, attrs), strict=True):
                made = list(result) if slot.many else [result]
                types += made if slot.many or p.outputs.get(slot.name) else [None]
            made_by = self.expressions(inner, p, self.kinds.attrs_id(attrs), given, types, depth=depth + 1)
            env.update((n, e) for n, e in zip(outs, made_by, strict=True) if n is not None and e is not None)
        return [None if n is None else env[n] for n in definition.flat_slots(op.outputs, definition.out_slots)]

    def linear(
        self, definition: type[OpDef], op: Operator, attrs_id: int, ins: Sequence[int | None], types: Sequence[TensorType | None]
    ) -> list[tuple[int, float]] | None:
        """[(operand, weight)] where the one output is a weighted sum of operands of its own type."""
        if getattr(definition, "expr", None) is None or len(types) != 1 or types[0] is None or types[0].dtype == "bool":
            return None
        table = self.table
        numbers = tuple(None if e is None else table.constant_of(e) for e in ins)
        for constants in dict.fromkeys((numbers, (None,) * len(numbers))):
            key = op.type, attrs_id, constants
            if key not in self._coefficients:
                self._coefficients[key] = coefficients(definition, op.attrs, constants)
            found = self._coefficients[key]
            if found is None:
                continue
            given = [table.types[e] if e is not None else None for e in ins]
            # a number stands for a value that has one element, or all those of the result: others would change its shape
            if all(given[k] == types[0] for k, _ in found) and all(t is None or t == types[0] or t.numel == 1 for t in given):
                return found
        return None

    # -- parts -------------------------------------------------------------------------------------------------------

    def together(self, kind: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The atoms that an operator makes of atoms, by a lemma that its placements follow; Refused where there is none."""
        key = (id(kind), ins, *self._drawn(kind.definition))
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._made(kind, op, ins)
        return found

    def _made(self, kind: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> tuple[int | None, ...]:
        if kind.no_row:
            raise Refusal(f"op {op.type}: no rule allows its placements: {kind.no_row}")
        if kind.adds:
            return (self._added(kind, op, ins),)
        definition, atoms = kind.definition, self.values.atoms
        if definition.move is not None:
            return (self.moved(kind, op, ins),)
        es = [None if a is None else atoms[a].e for a in ins]
        made = self.expressions(definition, op, kind.attrs_id, es, kind.types, counts=kind.counts)
        out: list[int | None] = []
        for k, (e, placed) in enumerate(zip(made, kind.placed, strict=True)):
            if e is None or placed is None:
                out.append(None)
            elif placed[1]:
                out.append(self.values.term(e, placed[0], self._derivation(kind, op, es, ins, placed[0], k)))
            else:
                out.append(self.values.atom(e, placed[0]))
        return tuple(out)

    def _derivation(self, kind: OperatorClass, op: Operator, es: list, ins: tuple, placement: Placement, k: int) -> object:
        """How terms are made: what adds up in one way on every rank is one derivation."""
        weighted = self.linear(kind.definition, op, kind.attrs_id, es, kind.types)
        if weighted is not None:
            given = [(self.values.atoms[ins[i]], w) for i, w in weighted]
            if all(a.derivation is not None and without_roots(a.placement) == without_roots(placement) for a, _ in given):
                sums: dict[int, float] = {}
                for a, w in given:
                    assert a.derivation is not None
                    sums[a.derivation] = sums.get(a.derivation, 0.0) + w
                return "sum", tuple(sorted(sums.items()))
        terms = tuple([a if a is None else self.values.of_any_turn(a) for a in ins])
        return "op", op.type, kind.attrs_id, terms, *self._drawn(kind.definition), k

    def _added(self, kind: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> int:
        """The sum, or maximum, of terms that several turns made."""
        atoms = [self.values.atoms[a] for a in ins if a is not None]
        e, _, d = atoms[0]
        if d is None or any((a.e, a.derivation) != (e, d) for a in atoms):
            raise Refusal(f"op {op.type}: its operands are not the iterations' parts of one sum")
        placed = kind.placed[0]
        assert placed is not None
        return self.values.atom(e, placed[0], d if placed[1] else None)

    def moved(self, kind: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> int:
        """The atom in the placement that the op gives it."""
        why = self._moves.get(id(kind))
        if why is None:
            why = self._moves[id(kind)] = moved_entry_is(kind, self.mesh)
        if why:
            raise Refusal(f"op {op.type}: {why}")
        s, a = kind.outs[0], ins[0]
        assert s is not None and a is not None
        placement = self.mesh.canonical(s[1], s[0])
        replica_op = kind.definition.replica_op
        entry = entry_of(self.values.atoms[a].placement, kind.attrs["group"])
        if replica_op is not None and entry is not None and entry.is_own:
            type_, attrs = replica_op(**kind.attrs)
            return self.values.atom(self._of_own(type_, attrs, self.values.atoms[a].e, s, kind.attrs.get("layers", ())), placement)
        return self.values.moved(a, placement, (op.type, self._in_any_turn(kind)))

    def _in_any_turn(self, kind: OperatorClass) -> int:
        """The number of an operator's attributes, of which one may name a turn."""
        turn = self.mesh.turns.get(kind.attrs.get("group", ""))
        if turn is None:
            return kind.attrs_id
        known = self._hows.get(id(kind))
        if known is None:
            known = self._hows[id(kind)] = self.kinds.attrs_id(Frozen({**kind.attrs, "group": turn.axis}))
        return known

    def _of_own(self, type_: str, attrs: Mapping[str, Any], e: int, signature: Signature, layers: Sequence[int]) -> int:
        """What the one-device operator makes of an expression, of each layer by itself: so values that ranks have of their own meet. Over
        other groups operand and result lie alike, as `signature` says; Refused where the operator has no lemma for that."""
        definition = opdef(type_)
        op = make_op(type_, ("x",), ("out",), definition.complete_attrs(attrs), role=Role.FORWARD)
        kind = self.kinds.of(op, (signature,), (signature,), ())
        if why := kind.wrong or kind.no_row:
            raise Refusal(f"op {type_}, which ranks do together here: {why}")

        def made(x: int) -> int:
            (out,) = self.expressions(definition, op, kind.attrs_id, (x,), [self.table.types[x]])
            assert out is not None
            return out

        if not layers:
            return made(e)
        return self.table.join([made(self.table.cut(e, a, b)) for a, b in pairwise(layers)], self.table.types[e].shape)

    def emptied(self, kind: OperatorClass, ins: Sequence[int | None], rank: int) -> bool:
        """Does an operator of which this rank has no elements make nothing but parts without elements, and terms that add nothing?"""
        if kind.no_row:
            return False
        for v, s in zip(ins, kind.ins, strict=True):
            if v is not None and v != EMPTY and s is not None and s[1]:
                return False
        return all(
            s is None or placed is None or placed[1] or 0 in self.local_type(s, rank).shape
            for s, placed in zip(kind.outs, kind.placed, strict=True)
        )

    # -- one rank's own values ---------------------------------------------------------------------------------------

    def plain(self, signature: Signature, value: int, rank: int) -> int:
        """A value of a rank as an expression that says so."""
        if is_local(signature[1]):
            return value
        if value != EMPTY:
            return self.values.plain(value, rank)
        if any(e.op not in ("", "sum") for e in signature[1]):
            raise Refusal("a part without elements leaves a maximum or minimum without a value")
        return self.table.lin((), self.local_type(signature, rank))  # no elements, or a term that adds nothing

    def local_type(self, signature: Signature, rank: int) -> TensorType:
        t, placement = signature
        if is_local(signature[1]):
            return t
        return TensorType(t.dtype, self.mesh.local_shape(self.mesh.canonical(placement, t), t.shape, rank))

    def stored(self, x: int, signature: Signature, rank: int) -> int:
        """The plain value x, as a variable of this signature keeps it on the rank."""
        t, placement = signature
        if not is_local(signature[1]):
            return self.values.read_back(x, self.mesh.canonical(placement, t), t, rank)
        if self.table.types[x] != t:
            raise Refusal(f"it is {self.table.types[x]}, not {t}")
        return x

    def alone(
        self, kind: OperatorClass, op: Operator, ins: Sequence[int | None], rank: int, outs: Sequence[str | None]
    ) -> list[int | None]:
        """What an operator makes of one rank's own values: only sums, multiples, and what lays elements out anew."""
        definition, table = kind.definition, self.table
        if definition.effect is not Effect.PURE or kind.runs:
            raise Refusal(f"op {op.type} works on what a rank holds for itself; only sums, multiples and what lays elements out anew may")
        xs = [None if v is None or s is None else self.plain(s, v, rank) for v, s in zip(ins, kind.ins, strict=True)]
        types = [None if s is None else self.local_type(s, rank) for s in kind.outs]
        key = (id(kind), tuple(None if x is None else table.types[x] for x in xs), tuple(types))
        if key not in self._typed:
            try:
                check_types(definition, op, key[1], types)
            except ProgramError as e:
                raise Refusal(str(e)) from None
            self._typed[key] = True
        made = self.expressions(definition, op, kind.attrs_id, xs, types, opaque=False)
        out: list[int | None] = []
        for x, s, n in zip(made, kind.outs, outs, strict=True):
            if x is None or s is None:
                out.append(None)
                continue
            try:
                out.append(self.stored(x, s, rank))
            except Refusal as e:
                raise Refusal(f"op {op.type} writes %{n}: {e}") from None
        return out

    def describe(self, value: int, local: bool = False) -> str:
        if value < 0:
            return "nothing"
        if local:
            return self.table.show(value)
        a = self.values.atoms[value]
        from ..ir.types import show_placement

        return f"{self.table.show(a.e)} ({show_placement(a.placement)})"


def _form(op: Operator) -> tuple[type[OpDef], bool, tuple]:
    """(the op, are all slots there and in order?, names in each slot that takes a list) of operators with such slots."""
    try:
        definition = opdef(op.type)
        definition.check_slots(op)
    except ProgramError as e:
        raise Refusal(str(e)) from None
    slots = ((op.inputs, definition.in_slots), (op.outputs, definition.out_slots))
    in_order = all(tuple(given) == tuple(s.name for s in declared) for given, declared in slots)
    return definition, in_order, tuple(len(op.inputs.get(s.name, ())) for s in definition.in_slots if s.many)


def _arranged(definition: type[OpDef], op: Operator, ins: Sequence[int | None]) -> list[Any]:
    given: Iterator[int | None] = iter(ins)
    out: list[Any] = []
    for slot in definition.in_slots:
        if slot.many:
            out.append([next(given) for _ in op.inputs.get(slot.name, ())])
        else:
            out.append(next(given))
    return out


def _fresh(op: Operator) -> Callable[..., str]:
    count = [0]

    def name(*words: Any) -> str:
        count[0] += 1
        return f"\0{op.type}.{count[0]}.{'.'.join(map(str, words))}"

    return name
