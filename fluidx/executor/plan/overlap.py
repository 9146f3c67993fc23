"""Overlap in a plan: which steps run at the same time as compute, on a GPU's communication stream or on a second thread of a CPU rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ... import config, native
from ...ir import flow
from ...ir.operator import Role
from .overlap_rules import Access, hidden, overlap
from .storage import COMMUNICATES, PlanNode, Root, StorageAssignment

_WORTH = 1 << 20  # bytes: copying them takes 0.1 ms, three times as long as waking a thread

Span = tuple[int, int]  # the first, and the last + 1, of the nodes that become one step


class OverlappedSteps(NamedTuple):
    """Numbers of the steps that overlap with compute. `waits`: {a step: the overlapped step that must end before it}; the number of steps
    stands for the end of the run."""

    steps: frozenset[int]
    waits: Mapping[int, int]


NOTHING = OverlappedSteps(frozenset(), {})


def least_hidden(ranks: int) -> int | None:
    """The bytes of communication that second threads of ranks must at least hide to be used; None: never use them.

    If second threads share cores with the threads that compute, nothing is hidden.
    """
    asked = config.overlap()
    if ranks == 1 or asked is False or (asked is None and native.cores() < 2 * ranks):
        return None
    return 0 if asked else _WORTH


def on_stream(storage: StorageAssignment, nodes: Sequence[PlanNode], order: Sequence[Span]) -> OverlappedSteps:
    """Overlap on a GPU stream: only communication steps; other steps on messages count as compute."""
    return _extended(storage, nodes, order, [_access(storage, nodes[k:stop], False) for k, stop in order], 0)


def on_thread(storage: StorageAssignment, nodes: Sequence[PlanNode], order: Sequence[Span], least: int) -> OverlappedSteps:
    """Overlap on a second thread: communication and the `dist` operators behind it, if compute hides at least `least` bytes of it."""
    if any(node.definition.effect in COMMUNICATES for some in storage.inner.values() for node in some):
        return NOTHING  # communication in a loop or branch runs on the compute thread; with a second thread the order would differ
    return _extended(storage, nodes, order, [_access(storage, nodes[k:stop], True) for k, stop in order], least)


def _access(storage: StorageAssignment, some: Sequence[PlanNode], follows: bool) -> Access:
    if some[0].made:  # a view or a join: no memory access
        return Access(frozenset(), frozenset())
    roots, ops = storage.roots, [op for node in some for op in node.ops]
    read = {id(roots[n]): roots[n] for op in ops for n in storage.sizes.reads(op) if n in roots}
    read |= {id(a.root): a.root for node in some for a in node.scratch}
    written = {id(roots[n]): roots[n] for op in ops for n in flow.writes(storage.program, op) if n in roots}
    follows = follows and all(op.role is Role.DIST for op in ops)
    nbytes = sum(r.nbytes for r in {**read, **written}.values())
    return Access(frozenset(read), frozenset(written), some[0].definition.effect in COMMUNICATES, follows, nbytes)


def _extended(
    storage: StorageAssignment, nodes: Sequence[PlanNode], order: Sequence[Span], accesses: Sequence[Access], least: int
) -> OverlappedSteps:
    """The overlapped steps. Storage that is being sent or received stays live until the wait."""
    found = overlap(accesses)
    if hidden(accesses, found) < least:
        return NOTHING
    roots: dict[Any, Root] = {id(r): r for r in storage.roots.values()} | {id(a.root): a.root for a in storage.all_scratch}
    for j, met in found.waits.items():
        at = order[j][0] if j < len(order) else len(nodes)
        for i in met:
            for r in accesses[i].reads | accesses[i].writes:
                roots[r].stop = max(roots[r].stop, at)
    return OverlappedSteps(found.overlapped, {j: met[-1] for j, met in found.waits.items()})
