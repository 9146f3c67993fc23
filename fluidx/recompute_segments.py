"""Where the forward pass is cut when values are computed again for the backward pass: at given variables, or where it is cheap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

from .ir import ANY, OPS, Block, Operator, Role, flow

_ROWS = 1024  # what an open axis counts for; where it is cut does not depend on it as long as the batch is the largest axis of all


class Segments(NamedTuple):
    """`keep` are the values that stay; `cuts` the operators behind which a segment ends, by index."""

    keep: set[str]
    cuts: list[int]


def at_variables(last_write: Mapping[str, int], names: set[str]) -> Segments:
    """Segments that end where the variables are computed."""
    return Segments(names, sorted(last_write[n] for n in names))


def automatic(block: Block, ops: Sequence[Operator], differentiated: Sequence[object]) -> Segments:
    """Segments of about equal bytes, as many as take the least memory, that end where few bytes are alive.

    A cut behind an operator costs the bytes of the computed values that later forward operators read; what a segment makes that depends on
    a parameter (`differentiated` says so of each operator) is kept for the backward pass, views apart. With M bytes made in all and c the
    median cost of a cut, k segments take about k*c + M/k bytes, the least at k = sqrt(M/c): sqrt(N) of N equal layers (Chen et al., 2016).
    Around each k-th part of M, as far as half a part away, the cheapest cut is taken, of equal ones the nearest.
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
    """For each forward operator, the computed values from up to there that a later one reads."""
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
