"""Checks of feeds, groups of sends and receives that start together, and liveness of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ...ir import flow
from ...ir.errors import FeedError, ProgramError, nearest
from ...ir.message_batches import forwarded, spans
from ...ir.operator import Operator
from ...ir.program import Block, Program
from ...ir.sub_blocks import bodies
from ...ir.types import TensorType
from ..error_text import site, where

if TYPE_CHECKING:
    from .selection import Outline
    from .sizes import RankSizes

FOREVER = 1 << 60


def check_feeds(program: Program, ops: Sequence[Operator], feed_types: Mapping[str, TensorType], fetch: Sequence[str]) -> None:
    """Raise FeedError for a feed that the program does not declare, and for a data variable that is read but not fed."""
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
    """{k: (first, last)} of the neighbouring sends and receives that operator k starts together with."""
    found = spans(ops)
    for span in sorted(set(found.values())):
        if (op := forwarded(ops, span)) is not None:
            raise ProgramError(
                f"op {op.type} sends {op.input_arg_names[0]!r}, which another operator of batch {op.attrs['batch']!r} receives; "
                f"give it a batch of its own{where(op)}"
            )
    return found


class Liveness(NamedTuple):
    """Liveness in units, which are operators or chains. `spans`: sends and receives that start together; `last`: the last unit that touches
    a value; `writers`: the units that write it. Operators of sub-blocks have numbers between those of units (`times`)."""

    spans: Mapping[int, tuple[int, int]]
    last: Mapping[str, float]
    writers: Mapping[str, Sequence[float]]


def nested(program: Program, op: Operator) -> Iterator[tuple[Block, Operator]]:
    """(block, operator) for all operators in the sub-blocks of `op`. Operators of inner sub-blocks come before the one that runs them."""
    for idx in op.sub_blocks():
        block = program.blocks[idx]
        for inner in block.oplist:
            yield from nested(program, inner)
            yield block, inner


def times(i: int, count: int) -> list[float]:
    """The numbers of `count` operators in the sub-blocks that unit `i` runs: they lie before `i`, because `i` ends after them.

    >>> times(3, 4)
    [2.2, 2.4, 2.6, 2.8]
    """
    return [i - 1 + k / (count + 1) for k in range(1, count + 1)]


def op_reads(outline: Outline) -> list[tuple[str, ...]]:
    """The values that each operator and its sub-blocks read."""
    if not outline.runs_blocks:
        return [op.input_arg_names for op in outline.ops]
    return [flow.reads(outline.program, op) for op in outline.ops]


def op_writes(outline: Outline) -> list[tuple[str, ...]]:
    """The values that each operator and its sub-blocks write."""
    if not outline.runs_blocks:
        return [op.output_arg_names for op in outline.ops]
    return [flow.writes(outline.program, op) for op in outline.ops]


def lifetimes(outline: Outline, counts: Sequence[int], sizes: RankSizes | None = None) -> Liveness:
    """The liveness of all values. `counts`: the number of operators in each unit. `sizes` say what operators read (default: all inputs).

    Raises ProgramError if a batch of messages sends a value that it receives itself.
    """
    program, rest = outline.program, iter(outline.ops)
    units = [tuple(islice(rest, n)) for n in counts]
    spans = started_together([unit[0] for unit in units])
    last: dict[str, float] = {}
    writers: dict[str, list[float]] = {}
    all_reads = iter(outline.fact(op_reads) if sizes is None else sizes.all_reads(outline))
    all_writes = iter(outline.fact(op_writes))

    def note(reads: Iterable[str], writes: Iterable[str], at: float, until: float) -> None:
        for n in reads:
            last[n] = until
        for n in writes:
            last[n] = until
            if n in writers:
                writers[n].append(at)
            else:
                writers[n] = [at]

    for i, unit in enumerate(units):
        until = spans[i][1] if i in spans else i  # values that a batch sends are read until the whole batch has ended
        for op in unit:
            runs_blocks = outline.runs_blocks and op.sub_blocks()
            inside = [inner for _, inner in nested(program, op)] if runs_blocks else []
            for at, inner in zip(times(i, len(inside)), inside, strict=True) if inside else ():
                note(flow.reads(program, inner) if sizes is None else sizes.reads(inner), flow.writes(program, inner), at, at)
                last.update((n, at) for body in bodies(inner) for n in body.results(inner))
            note(next(all_reads), next(all_writes), i, until)
            if runs_blocks:
                last.update((n, until) for body in bodies(op) for n in body.results(op))
    last.update(dict.fromkeys(outline.fetch, FOREVER))
    return Liveness(spans, last, writers)
