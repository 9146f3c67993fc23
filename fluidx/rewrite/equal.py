"""Common subexpression elimination: of operators with the same inputs and attributes, only the first is kept."""

from __future__ import annotations

from ..ir.opdef import Effect, OpDef
from ..ir.operator import Frozen, Operator, Role, attrs_key
from .walk import Answer, NameFacts, most_bytes

_MOST_BYTES = 64 * 1024  # the limit for values without operands: making a larger one again is as fast as reading it, and frees memory


class Equal:
    """The rule: an operator equal to an earlier one of its section is dropped; if its result has to exist, it becomes a copy."""

    def __init__(self, walk: NameFacts):
        self.walk = walk
        self.seen: dict[tuple, Operator] = {}
        self.section = Role.DIST

    def __call__(self, op: Operator, definition: type[OpDef]) -> Answer:
        walk, reads, outs = self.walk, op.input_arg_names, op.output_arg_names
        if op.role is not Role.DIST:
            self.section = op.role
        if definition.effect is not Effect.PURE or not walk.changing.isdisjoint(outs):
            return None
        values: tuple = reads
        if not walk.changing.isdisjoint(reads):
            if definition.storage.view is not None:
                return None  # whether it is a view or a copy depends on its liveness
            values = tuple([(n, walk.version.get(n, 0)) if n in walk.changing else n for n in reads])
        if not reads and not walk.ask(most_bytes, outs, _MOST_BYTES):
            return None
        # not across sections: a backward pass recomputes or moves a value in order not to keep it. By id, because an enum # hashes slowly
        key = (op.type, id(op.role), id(self.section), values, *op.attrs.values())
        first = self.seen.setdefault(key, op)
        if first is not op and not self._same(first, op):
            first = self.seen.setdefault((key, repr(op.inputs), attrs_key(op.attrs), op.device), op)
        if first is op or not self._same(first, op):
            return None
        if walk.free(op):
            for name, other in zip(first.output_arg_names, outs, strict=True):
                walk.stands_for(name, other)
            return ()
        if len(outs) > 1 or not reads or definition.expr is not None or definition.storage.view is not None:
            return None  # a copy would cost as much
        return (op.replace(type="assign", inputs=Frozen(X=first.output_arg_names), outputs=Frozen(Out=outs), attrs=Frozen()),)

    def _same(self, first: Operator, op: Operator) -> bool:
        """Compare exactly, because different operators may have one key: 0 and -0 do, 1 and True do, and the same names in other slots."""
        if first.inputs != op.inputs or first.device != op.device or first.outputs.keys() != op.outputs.keys():
            return False
        if [len(n) for n in first.outputs.values()] != [len(n) for n in op.outputs.values()]:
            return False
        if first.attrs is not op.attrs and attrs_key(first.attrs) != attrs_key(op.attrs):
            return False
        return all(self.walk.alike(a, b) for a, b in zip(first.output_arg_names, op.output_arg_names, strict=True))
