"""Recompute segments: where the forward pass is cut for recomputation, at given variables or at the cheapest places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from .ir import ANY, OPS, Block, Operator, Role, flow

_ROWS = 1024  # the size assumed for an open axis; cuts do not depend on it as long as the batch is the largest axis


class Segments(NamedTuple):
    """`keep` are the values that are not recomputed; `cuts` are the indices of the operators after which a segment ends."""

    keep: set[str]
    cuts: list[int]


def at_variables(last_write: Mapping[str, int], names: set[str]) -> Segments:
    """Segments that end where the given variables are computed."""
    return Segments(names, sorted(last_write[n] for n in names))


def automatic(block: Block, ops: Sequence[Operator], differentiated: Sequence[object]) -> Segments:
    """Segments of about equal bytes that end where few bytes are live; their number minimizes memory.

    A cut after an operator costs the bytes of the computed values that later forward operators read. The values of a segment that depend on
    a parameter (`differentiated` tells it for each operator) are kept for the backward pass, except views. With M bytes computed in total
    and c the median cost of a cut, k segments take about k*c + M/k bytes. This is least for k = sqrt(M/c): sqrt(N) for N equal layers (Chen
    et al., 2016). The cut nearest to each k-th part of M is the cheapest one within half a part; among equal ones, the nearest.
    """
    forward = [k for k, op in enumerate(ops) if op.role in (Role.FORWARD, Role.LOSS)]
    if not forward:
        return Segments(set(), [])
    alive = _alive(block, ops, forward)
    made, total = [], 0
    for k in forward:
        if differentiated[k] and OPS[ops[k].type].view is None:
            total += sum(_bytes(block, n) for n in ops[k].output_arg_names)
        made.append(total)
    costs = [sum(_bytes(block, n) for n in names) for names in alive]
    usual = median([c for c in costs if c] or [total or 1])
    parts = max(1, round(sqrt(total / usual)))
    found: dict[int, set[str]] = {}
    for j in range(1, parts):
        middle, reach = j * total / parts, total / parts / 2
        near = [i for i, m in enumerate(made) if costs[i] and abs(m - middle) <= reach]
        if near:
            best = min(near, key=lambda i: (costs[i], abs(made[i] - middle)))
            found[forward[best]] = alive[best]
    return Segments(set().union(*found.values()), sorted(found))


def _alive(block: Block, ops: Sequence[Operator], forward: Sequence[int]) -> list[set[str]]:
    """For each forward operator, the values computed up to there that a later operator reads."""
    computed = {n for k in forward for n in flow.writes(block.program, ops[k])}
    computed = {n for n in computed if (d := block.find(n)) is not None and not d.persistable and not d.is_data}
    out: list[set[str]] = []
    wanted: set[str] = set()
    for k in reversed(forward):
        out.append(set(wanted))
        reads, writes = flow.touches(block.program, ops[k])
        wanted.difference_update(writes)
        wanted.update(computed.intersection(reads))
    return out[::-1]


def _bytes(block: Block, name: str) -> int:
    t = block.desc(name).type
    return t.nbytes * _ROWS ** sum(d == ANY for d in t.shape)
