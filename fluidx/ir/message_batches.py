"""Batches of messages: which sends and receives start together. The executor and the proof share this definition.

Neighbouring operators of Effect.P2P with the same `batch` start together: the sends are posted first, and none waits for another. An
operator without a batch stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from .opdef import Effect, opdef
from .operator import Operator


def batch_of(op: Operator) -> str:
    """The label of the batch that an operator belongs to; "" for none."""
    return op.attrs.get("batch", "") if opdef(op.type).effect is Effect.P2P else ""


def spans(ops: Sequence[Operator]) -> dict[int, tuple[int, int]]:
    """{index: (first, last)} for every operator of a batch: the indices of the operators that start together with it.

    >>> one = Operator("send", {"X": ("x",)}, {}, {"peer": 1, "batch": "a"})
    >>> spans([one, one, one.replace(attrs={"peer": 1, "batch": "b"}), one.replace(attrs={"peer": 1})])
    {0: (0, 1), 1: (0, 1), 2: (2, 2)}
    """
    found: dict[int, tuple[int, int]] = {}
    k = 0
    while k < len(ops):
        batch, stop = batch_of(ops[k]), k + 1
        if not batch:
            k = stop
            continue
        while stop < len(ops) and batch_of(ops[stop]) == batch:
            stop += 1
        found.update((i, (k, stop - 1)) for i in range(k, stop))
        k = stop
    return found


def forwarded(ops: Sequence[Operator], span: tuple[int, int]) -> Operator | None:
    """A send that reads the result of a receive in its own batch: the sent value would depend on their order."""
    batch = ops[span[0] : span[1] + 1]
    received = {n for op in batch for n in op.output_arg_names}
    return next((op for op in batch if not op.output_arg_names and received.intersection(op.input_arg_names)), None)
