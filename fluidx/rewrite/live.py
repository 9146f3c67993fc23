"""Dead-code analysis: which operators of a program a run needs for its fetches, state and effects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..ir import flow
from ..ir.operator import Operator
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

    def keep(op: Operator) -> bool:
        if flow.acts(program, op):
            return True
        return any((d := descs.get(n)) is not None and d.persistable for n in flow.writes(program, op))

    given = {n for n in fed if (d := descs.get(n)) is not None and not d.is_data}
    return flow.live_ops(program, fetch, keep, given, ops)
