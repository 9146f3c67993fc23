"""The results of operators in the proof: of expressions, of values with placements, and of local values of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol

from ..ir.decomposition import decomposed
from ..ir.entries import is_local
from ..ir.errors import ProgramError
from ..ir.make_op import make_op
from ..ir.opdef import Effect, OpDef, opdef
from ..ir.operator import Frozen, Operator, Role, op_types
from ..ir.parts import entry_of
from ..ir.types import Placement, TensorType
from .global_atoms import GlobalAtoms
from .linear import coefficients
from .mesh import without_roots
from .operator_check import COMMUNICATES, OperatorClass, OperatorClasses, Signature, check_types, moved_entry_is
from .refusal import Refusal
from .values import EMPTY, ProgramValues

_LOCAL_OPS_ONLY = "works on local values of a rank; only sums, multiples, reshapes, slices and concatenations of these are proved"
_MOST = 4096  # decompositions whose types are cached
_PART_TYPES: dict[tuple, set[str]] = {}  # class of a composite operator -> the types of its parts
_DEEPEST = 8  # the most nested decompositions


class DeclaredNames(Protocol):
    """Gives the declared type and placement of names."""

    def signature(self, name: str) -> Signature: ...


class NameScope(DeclaredNames, Protocol):
    """Reads and writes the values of names in a block, for all ranks or for one."""

    def read(self, name: str) -> int: ...

    def write(self, name: str, value: int) -> None: ...


class Operators:
    """The operators of programs that share one table of expressions."""

    def __init__(self, values: ProgramValues, classes: OperatorClasses):
        self.values, self.classes, self.table, self.mesh = values, classes, values.table, values.mesh
        self.global_atoms = GlobalAtoms(values)
        self.round: tuple = ()  # of the enclosing loops; random numbers depend on it
        self._coefficients: dict[tuple, Any] = {}
        self._memo: dict[tuple, tuple[int | None, ...]] = {}
        self._forms: dict[tuple, tuple[type[OpDef], bool, tuple]] = {}
        self._typed: dict[tuple, bool] = {}
        self._moves: dict[int, str] = {}
        self._hows: dict[int, int] = {}

    # -- names -------------------------------------------------------------------------------------------------------

    def class_of(self, op: Operator, scope: DeclaredNames) -> tuple[OperatorClass, Sequence[str | None], Sequence[str | None]]:
        """The operator's class, and the names that it reads and writes in slot order. Raises Refusal if the operator is invalid."""
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
            op_class = self.classes.of(op, tuple(map(signature, reads)), tuple(map(signature, writes)), counts)
        else:
            ins, outs = definition.flat_slots(inputs, definition.in_slots), definition.flat_slots(outputs, definition.out_slots)
            given, made = ([None if n is None else signature(n) for n in names] for names in (ins, outs))
            op_class = self.classes.of(op, tuple(given), tuple(made), counts)
        if op_class.wrong:
            raise Refusal(op_class.wrong)
        named = op.output_arg_names
        if len(named) > 1 and len(set(named)) < len(named):
            raise Refusal(f"op {op.type} writes one variable twice")
        return op_class, ins, outs

    # -- expressions -------------------------------------------------------------------------------------------------

    def expressions(
        self, definition: type[OpDef], op: Operator, attrs_id: int, ins: Sequence[int | None], types: Sequence[TensorType | None],
        opaque: bool = True, depth: int = 0, counts: tuple | None = None,
    ) -> list[int | None]:  # fmt: skip
        """The expressions of an operator's outputs of these types, from the expressions of its operands."""
        table = self.table
        if definition.gives_way_to_parts() and opaque and depth < _DEEPEST:
            by_parts = self._by_parts(definition, op, ins, depth)
            if by_parts is not None:
                return by_parts
        try:
            if definition.rewrite.meaning is not None and definition.effect not in COMMUNICATES:
                return list(definition.rewrite.meaning(table, _arranged(definition, op, ins), list(types), **op.attrs))
            weighted = self.linear(definition, op, attrs_id, ins, types)
            if weighted is not None:
                (t,) = types
                assert t is not None
                return [table.lin([(e, w) for k, w in weighted if (e := ins[k]) is not None], t)]
        except Refusal:
            if not opaque:
                raise
        if not opaque:
            raise Refusal(f"op {op.type} {_LOCAL_OPS_ONLY}")
        given = tuple(ins)
        if counts is None:
            counts = tuple(len(op.inputs.get(s.name, ())) for s in definition.in_slots if s.many)
        key = ("op", op.type, attrs_id, given, counts, *self._drawn(definition))
        return [None if t is None else table.intern((*key, k), t, given) for k, t in enumerate(types)]

    @contextmanager
    def in_round(self, of: tuple) -> Iterator[None]:
        """For operators in a loop body, whose random numbers differ in each round: `of` identifies the round."""
        outside, self.round = self.round, (*self.round, of)
        try:
            yield
        finally:
            self.round = outside

    def _drawn(self, definition: type[OpDef]) -> tuple:
        """The round, if the results depend on it besides the operands and attributes: for random operators."""
        return self.round if definition.effect is Effect.RANDOM else ()

    def _by_parts(self, definition: type[OpDef], op: Operator, ins: Sequence[int | None], depth: int) -> list[int | None] | None:
        """The expressions of a decomposed operator's outputs; None if it is not decomposed, or no program has all of its parts."""
        known = self.table.types
        shapes = tuple([None if e is None else known[e] for e in ins])
        key = op.type, tuple(op.attrs.values()), shapes, tuple(op.inputs), tuple(op.outputs)
        types_of_parts, present = _PART_TYPES.get(key), self.table.op_types
        if types_of_parts is not None and not _all_present(types_of_parts, present):
            return None
        names = definition.flat_slots(op.inputs, definition.in_slots)
        env = {n: e for n, e in zip(names, ins, strict=True) if n is not None and e is not None}
        parts = decomposed(op, _fresh(op), lambda n: known[env[n]]) or []
        if types_of_parts is None:
            if len(_PART_TYPES) >= _MOST:
                _PART_TYPES.clear()
            types_of_parts = _PART_TYPES[key] = op_types(parts)
            if not _all_present(types_of_parts, present):
                return None
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
            require = self.expressions(inner, p, self.classes.attrs_id(attrs), given, types, depth=depth + 1)
            env.update((n, e) for n, e in zip(outs, require, strict=True) if n is not None and e is not None)
        return [None if n is None else env[n] for n in definition.flat_slots(op.outputs, definition.out_slots)]

    def linear(
        self, definition: type[OpDef], op: Operator, attrs_id: int, ins: Sequence[int | None], types: Sequence[TensorType | None]
    ) -> list[tuple[int, float]] | None:
        """[(operand, weight)] if the only output is a weighted sum of operands of its own type; else None."""
        if definition.expr is None or len(types) != 1 or types[0] is None or types[0].dtype == "bool":
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
            # a constant must have one element or the shape of the result; another shape would change that of the result
            if all(given[k] == types[0] for k, _ in found) and all(t is None or t == types[0] or t.numel == 1 for t in given):
                return found
        return None

    # -- values with placements --------------------------------------------------------------------------------------

    def on_all_ranks(self, op_class: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The atoms of an operator's results, from those of its operands, by a placement rule. Raises Refusal if there is none."""
        key = (id(op_class), ins, *self._drawn(op_class.definition))
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._made(op_class, op, ins)
        return found

    def _made(self, op_class: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> tuple[int | None, ...]:
        if op_class.no_row:
            raise Refusal(f"op {op.type}: no rule allows its placements: {op_class.no_row}")
        if op_class.adds:
            return (self._added(op_class, op, ins),)
        definition, atoms = op_class.definition, self.values.atoms
        if definition.comm.move is not None:
            return (self.moved(op_class, op, ins),)
        es = [None if a is None else atoms[a].e for a in ins]
        made = self.expressions(definition, op, op_class.attrs_id, es, op_class.types, counts=op_class.counts)
        out: list[int | None] = []
        for k, (e, placed) in enumerate(zip(made, op_class.placed, strict=True)):
            if e is None or placed is None:
                out.append(None)
            elif placed[1]:
                out.append(self.values.term(e, placed[0], self._derivation(op_class, op, es, ins, placed[0], k)))
            else:
                out.append(self.values.atom(e, placed[0]))
        return tuple(out)

    def _derivation(self, op_class: OperatorClass, op: Operator, es: list, ins: tuple, placement: Placement, k: int) -> object:
        """The key of a derivation: terms that all ranks computed in the same way have one derivation, and only these can be added."""
        weighted = self.linear(op_class.definition, op, op_class.attrs_id, es, op_class.types)
        if weighted is not None:
            given = [(self.values.atoms[ins[i]], w) for i, w in weighted]
            if all(a.derivation is not None and without_roots(a.placement) == without_roots(placement) for a, _ in given):
                sums: dict[int, float] = {}
                for a, w in given:
                    assert a.derivation is not None
                    sums[a.derivation] = sums.get(a.derivation, 0.0) + w
                return "sum", tuple(sorted(sums.items()))
        terms = tuple([a if a is None else self.values.of_any_turn(a) for a in ins])
        return "op", op.type, op_class.attrs_id, terms, *self._drawn(op_class.definition), k

    def _added(self, op_class: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> int:
        """The atom of a reduction of terms that several iterations made."""
        atoms = [self.values.atoms[a] for a in ins if a is not None]
        e, _, d = atoms[0]
        if d is None or any((a.e, a.derivation) != (e, d) for a in atoms):
            raise Refusal(f"op {op.type}: its operands are not the iterations' terms of one sum")
        placed = op_class.placed[0]
        assert placed is not None
        return self.values.atom(e, placed[0], d if placed[1] else None)

    def moved(self, op_class: OperatorClass, op: Operator, ins: tuple[int | None, ...]) -> int:
        """The atom of a collective's result: its operand in the placement that the op gives."""
        why = self._moves.get(id(op_class))
        if why is None:
            why = self._moves[id(op_class)] = moved_entry_is(op_class, self.mesh)
        if why:
            raise Refusal(f"op {op.type}: {why}")
        s, a = op_class.outs[0], ins[0]
        assert s is not None and a is not None
        placement = self.mesh.canonical(s[1], s[0])
        replica_op = op_class.definition.comm.replica_op
        entry = entry_of(self.values.atoms[a].placement, op_class.attrs["group"])
        if replica_op is not None and entry is not None and entry.is_own:
            type_, attrs = replica_op(**op_class.attrs)
            return self.values.atom(self._of_own(type_, attrs, self.values.atoms[a].e, s, op_class.attrs.get("layers", ())), placement)
        return self.values.moved(a, placement, (op.type, self._in_any_turn(op_class)))

    def _in_any_turn(self, op_class: OperatorClass) -> int:
        """The number of an operator's attributes, with a turn replaced by its time axis."""
        turn = self.mesh.turns.get(op_class.attrs.get("group", ""))
        if turn is None:
            return op_class.attrs_id
        known = self._hows.get(id(op_class))
        if known is None:
            known = self._hows[id(op_class)] = self.classes.attrs_id(Frozen({**op_class.attrs, "group": turn.axis}))
        return known

    def _of_own(self, type_: str, attrs: Mapping[str, Any], e: int, signature: Signature, layers: Sequence[int]) -> int:
        """The result of a collective over replica-local values: the op `type_` of one device on their expression, for each layer.

        `signature` is the placement of operand and result over other groups. Raises Refusal if no rule of the op allows it.
        """
        definition = opdef(type_)
        op = make_op(type_, ("x",), ("out",), definition.complete_attrs(attrs), role=Role.FORWARD)
        op_class = self.classes.of(op, (signature,), (signature,), ())
        if why := op_class.wrong or op_class.no_row:
            raise Refusal(f"op {type_}, which the ranks compute together here: {why}")

        def made(x: int) -> int:
            (out,) = self.expressions(definition, op, op_class.attrs_id, (x,), [self.table.types[x]])
            assert out is not None
            return out

        if not layers:
            return made(e)
        return self.table.join([made(self.table.cut(e, a, b)) for a, b in pairwise(layers)], self.table.types[e].shape)

    def gives_nothing(self, op_class: OperatorClass, ins: Sequence[int | None], rank: int) -> bool:
        """True if an operator without elements on this rank gives only empty parts, and terms that add nothing."""
        if op_class.no_row:
            return False
        for v, s in zip(ins, op_class.ins, strict=True):
            if v is not None and v != EMPTY and s is not None and s[1]:
                return False
        return all(
            s is None or placed is None or placed[1] or 0 in self.local_type(s, rank).shape
            for s, placed in zip(op_class.outs, op_class.placed, strict=True)
        )

    # -- local values of one rank ------------------------------------------------------------------------------------

    def local_expression(self, signature: Signature, value: int, rank: int) -> int:
        """The local value on a rank, as an expression."""
        if is_local(signature[1]):
            return value
        if value != EMPTY:
            return self.values.local_expression(value, rank)
        if any(e.op not in ("", "sum") for e in signature[1]):
            raise Refusal("a maximum or minimum over a part without elements has no value")
        return self.table.lin((), self.local_type(signature, rank))  # no elements, or the term 0

    def local_type(self, signature: Signature, rank: int) -> TensorType:
        t, placement = signature
        if is_local(signature[1]):
            return t
        return TensorType(t.dtype, self.mesh.local_shape(self.mesh.canonical(placement, t), t.shape, rank))

    def as_stored(self, x: int, signature: Signature, rank: int) -> int:
        """The local expression x, as the value of a variable of this signature on the rank."""
        t, placement = signature
        if not is_local(signature[1]):
            return self.global_atoms.of(x, self.mesh.canonical(placement, t), t, rank)
        if self.table.types[x] != t:
            raise Refusal(f"it is {self.table.types[x]}, not {t}")
        return x

    def on_one_rank(
        self, op_class: OperatorClass, op: Operator, ins: Sequence[int | None], rank: int, outs: Sequence[str | None]
    ) -> list[int | None]:
        """The results of an operator on local values of one rank. Only sums, multiples, reshapes, slices and concatenations are allowed."""
        definition, table = op_class.definition, self.table
        if definition.effect is not Effect.PURE or op_class.runs:
            raise Refusal(f"op {op.type} {_LOCAL_OPS_ONLY}")
        xs = [None if v is None or s is None else self.local_expression(s, v, rank) for v, s in zip(ins, op_class.ins, strict=True)]
        types = [None if s is None else self.local_type(s, rank) for s in op_class.outs]
        key = (id(op_class), tuple(None if x is None else table.types[x] for x in xs), tuple(types))
        if key not in self._typed:
            try:
                check_types(definition, op, key[1], types)
            except ProgramError as e:
                raise Refusal(str(e)) from None
            self._typed[key] = True
        made = self.expressions(definition, op, op_class.attrs_id, xs, types, opaque=False)
        out: list[int | None] = []
        for x, s, n in zip(made, op_class.outs, outs, strict=True):
            if x is None or s is None:
                out.append(None)
                continue
            try:
                out.append(self.as_stored(x, s, rank))
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
    """(the op, whether the slots are complete and in declared order, number of names in each slot that takes a list)."""
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


def _all_present(parts: set[str], present: Set[str] | None) -> bool:
    """Are these parts of an operator among the types of the programs?"""
    return bool(parts) and (present is None or parts <= present)


def _fresh(op: Operator) -> Callable[..., str]:
    count = [0]

    def name(*words: Any) -> str:
        count[0] += 1
        return f"\0{op.type}.{count[0]}.{'.'.join(map(str, words))}"

    return name
