"""One walk over the operators of a program; rules keep, replace or drop each operator, and share facts about names.

The walk asks each rule about every operator without effects. A rule answers None (no opinion), or a tuple of replacements: one operator,
which the next rule then sees, or none, if later operators read another name instead (`NameFacts.stands_for`).

Three kinds of names limit what a rule may do. A *changing* name has more than one value in a run: it is written twice, or by a body, or it
is state, data or a feed that is written. A *kept* name has to exist: changing names, fetched names, names that a body reads (bodies are not
rewritten), names that are sent, and final gradients of `role_var`. Any other name has one value and can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..ir import flow
from ..ir.opdef import OPS, Effect, OpDef, opdef
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.types import TensorType

Answer = tuple[Operator, ...] | None
Rule = Callable[[Operator, type[OpDef]], Answer]
_COMPUTES = (Effect.PURE, Effect.RANDOM)


class TypeQuery(NamedTuple):
    """A question about the types of names, its arguments, and the answer: true, false, None or a type."""

    question: Callable[..., Any]
    args: tuple[Any, ...]
    answer: Any

    def holds(self, types: Mapping[str, TensorType]) -> bool:
        """Is the answer the same for these types? A type must be the same object, because equal shapes such as (1,) and (True,) may
        differ."""
        return self.question(types, *self.args) is self.answer


def _type_of(types: Mapping[str, TensorType], name: str) -> TensorType | None:
    return types.get(name)


def equal_types(types: Mapping[str, TensorType], name: str, other: str) -> bool:
    t = types.get(name)
    return t is not None and t == types.get(other)


def most_bytes(types: Mapping[str, TensorType], names: tuple[str, ...], most: int) -> bool:
    """Does each of the values have a known size of at most `most` bytes?"""
    return all((t := types.get(n)) is not None and t.nbytes <= most for n in names)


class NameFacts:
    """Facts about names at the current operator: types, makers, and the names that replace others. `ops` is the result so far. `asked` has
    every question of the rules about types: if the answers are the same, the result is the same.
    """

    def __init__(
        self, program: Program, ops: Sequence[Operator], types: Mapping[str, TensorType], fetch: Iterable[str], given: Collection[str]
    ):
        self.program, self._types = program, types
        self.asked: list[TypeQuery] = []
        self.descs = program.global_block().descs
        self.alias: dict[str, str] = {}
        self.maker: dict[str, Operator] = {}  # for names that are not changing
        self.changing: set[str] = set()
        self.kept = set(fetch).union(given)
        self.version: dict[str, int] = {}  # for changing names: how often they were written so far
        self.changed = False
        self.renamed: list[tuple[Operator, Operator]] = []  # operators that read other names, before and after
        self.ops: list[Operator] = []
        self._look_ahead(ops, given)

    def _look_ahead(self, ops: Sequence[Operator], given: Collection[str]) -> None:
        descs, changing, seen = self.descs, self.changing, set()
        for op in ops:
            definition, outs = opdef(op.type), op.output_arg_names
            if definition.control.bodies:
                outs = flow.writes(self.program, op)
                self.kept.update(flow.reads(self.program, op))
            elif definition.effect is Effect.P2P:
                self.kept.update(op.input_arg_names)
            if op.role_var:
                self.kept.update(op.role_var)  # a transpile finds parameters and gradients by name
            for n in outs:
                if n in seen or n in given or ((d := descs.get(n)) is not None and (d.persistable or d.is_data)):
                    changing.add(n)
                seen.add(n)
        self.kept.update(changing)

    def run(self, ops: Sequence[Operator], rules: Sequence[Rule]) -> list[Operator]:
        """Walk over the given `ops` and return the operators that replace them."""
        out, alias, maker, changing = self.ops, self.alias, self.maker, self.changing
        for op in ops:
            new = op
            if alias and not alias.keys().isdisjoint(op.input_arg_names):
                new = op.renamed(alias)
                self.renamed.append((op, new))
            definition = OPS[op.type]
            made: Sequence[Operator] = (new,)
            if definition.effect in _COMPUTES and not definition.control.bodies:
                made = self._asked(new, definition, rules)
            out += made
            for one in made:
                for n in one.output_arg_names if not definition.control.bodies else flow.writes(self.program, one):
                    if n in changing:
                        self.version[n] = self.version.get(n, 0) + 1
                    else:
                        maker[n] = one
        self.changed = self.changed or bool(self.renamed)
        return out

    def _asked(self, op: Operator, definition: type[OpDef], rules: Sequence[Rule]) -> tuple[Operator, ...]:
        for rule in rules:
            found = rule(op, definition)
            if found is not None:
                self.changed = True
                if len(found) != 1:
                    return found
                op, definition = found[0], OPS[found[0].type]
        return (op,)

    # -- what rules ask ------------------------------------------------------------------------------------------------------

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """The answer to a question about types; rules use types only through questions."""
        answer = question(self._types, *args)
        self.asked.append(TypeQuery(question, args, answer))
        return answer

    def type_of(self, name: str) -> TensorType:
        """The type of a value that has a type."""
        t = self.ask(_type_of, name)
        assert t is not None, f"%{name} has no type"
        return t

    def free(self, op: Operator) -> bool:
        """May the operator be dropped when other names replace its results?"""
        return self.kept.isdisjoint(op.output_arg_names)

    def alike(self, name: str, other: str) -> bool:
        """Do two values have the same type, placement and memory?"""
        a, b = self.descs.get(name), self.descs.get(other)
        if a is not None and b is not None and a.on_host is not b.on_host:
            return False
        if a is not None and b is not None and (a.placement or b.placement) and (a.placement != b.placement or a.type != b.type):
            return False
        return self.ask(equal_types, name, other)

    def whole(self, names: Iterable[str]) -> bool:
        """Are all of these values replicated?"""
        return not any((d := self.descs.get(n)) is not None and d.placement for n in names)

    def in_one_piece(self, name: str) -> bool:
        """Is a value certainly contiguous? A view may not be, and then some kernels add up in another order."""
        made = self.maker.get(name)
        return made is None or ((d := OPS[made.type]).storage.view is None and d.storage.view_ctx is None)

    def stands_for(self, name: str, other: str) -> None:
        """From here on, read `name` where `other` is written."""
        self.alias[other] = name
