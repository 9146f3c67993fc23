"""Whether the feeds of a program are there, and which of its operators start together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import flow
from ..ir.batches import forwarded, spans
from ..ir.errors import FeedError, ProgramError, nearest
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.types import TensorType
from .told import site, where


def check_feeds(program: Program, ops: Sequence[Operator], feed_types: Mapping[str, TensorType], fetch: Sequence[str]) -> None:
    """Raise FeedError for a feed that no variable takes, and for data that is read and not fed."""
    descs = program.global_block().descs
    data = {n: d for n, d in descs.items() if d.is_data}
    for name in feed_types:
        if name not in descs:
            raise FeedError(f"feed names {name!r}, which {program.label()} does not declare; {nearest(name, data, 'it takes')}")
    for op in ops:
        for n in flow.reads(program, op):
            if n in data and n not in feed_types:
                raise FeedError(f"feed is missing variable {n!r} ({data[n].type}), which op {op.type} reads{site(op)}")
    for n in fetch:
        if n in data and n not in feed_types:
            raise FeedError(f"feed is missing variable {n!r} ({data[n].type}), which is fetched")


def started_together(ops: Sequence[Operator]) -> dict[int, tuple[int, int]]:
    """(first, last) of the neighbouring sends and receives that start with operator k."""
    found = spans(ops)
    for span in sorted(set(found.values())):
        if (op := forwarded(ops, span)) is not None:
            raise ProgramError(
                f"op {op.type} sends {op.input_arg_names[0]!r}, which another operator of batch {op.attrs['batch']!r} receives; "
                f"give it a batch of its own{where(op)}"
            )
    return found
