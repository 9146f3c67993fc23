"""Dead-code analysis: which operators of a program a run needs for its fetches, state and effects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..ir import flow
from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator, op_types
from ..ir.program import Program


def live_ops(program: Program, fed: Collection[str], fetch: Iterable[str], ops: Sequence[Operator] | None = None) -> list[Operator]:
    """The operators of `ops`, or of block 0, that a fetch, a persistable variable or an effect needs. Operators that compute fed values are
    left out.

    >>> p = Program.parse_from_string('''program p {
    ...   data %x: f32[1]
    ...   %a: f32[1] = exp(%x)
    ...   %b: f32[1] = tanh(%x)
    ... }''')
    >>> [op.type for op in live_ops(p, ["x"], ["b"])]
    ['tanh']
    """
    descs = program.global_block().descs

    state = {n for n, d in descs.items() if d.persistable}
    plain = {t for t in op_types(program.global_block().oplist if ops is None else ops) if _is_plain(t)}

    def keep(op: Operator) -> bool:
        if op.type in plain:
            return not state.isdisjoint(op.output_arg_names)
        return flow.acts(program, op) or not state.isdisjoint(flow.writes(program, op))

    given = {n for n in fed if (d := descs.get(n)) is not None and not d.is_data}
    return flow.live_ops(program, fetch, keep, given, ops)


def _is_plain(type_: str) -> bool:
    """Does an operator of this type neither act nor run sub-blocks?"""
    definition = opdef(type_)
    return definition.effect in (Effect.PURE, Effect.RANDOM) and not definition.control.bodies
