"""Recomputation for the backward pass: where the forward pass is cut into segments, and the operators that compute values again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from typing import Any, NamedTuple

from .ir import ANY, OPS, Block, Effect, Operator, Role, Variable, flow
from .ir.unique_name import unused

_NEVER_TWICE = (Effect.HOST, Effect.COLLECTIVE, Effect.P2P)  # operators with these effects must not run twice

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
        if differentiated[k] and OPS[ops[k].type].storage.view is None:
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


class RecomputedValues:
    """Forward values that the backward pass reads: the first one, or a second one that is computed again in the value's segment."""

    def __init__(self, block: Block, ops: Sequence[Operator], last_write: Mapping[str, int], segments: Segments):
        self.block, self.ops, self.last_write = block, ops, last_write
        self.keep, self.cuts = segments
        self._second: dict[str, str] = {}  # forward name -> name of its second value
        self.originals: dict[str, str] = {}  # name of a second value -> forward name

    def value(self, name: str, reader: int) -> Variable:
        """The variable that a gradient of operator `reader` reads: the forward one, or its second value, computed here if needed."""
        if not self.cuts:
            return self.block.var(name)
        segment = bisect_left(self.cuts, reader)
        if segment == len(self.cuts) or not self._recomputable(name, segment):
            return self.block.var(name)
        waiting = [name]
        while waiting:
            n = waiting[-1]
            op = self.ops[self.last_write[n]]
            missing = [m for m in op.input_arg_names if m not in self._second and self._recomputable(m, segment) and m not in waiting]
            if n in self._second or not missing:
                waiting.pop()
                if n not in self._second:
                    self._emit_again(op)
            else:
                waiting += missing
        return self.block.var(self._second[name])

    def forget(self, name: str) -> None:
        """A second value was removed from the program."""
        original = self.originals.pop(name, None)
        if original is not None:
            self._second.pop(original, None)

    def _recomputable(self, name: str, segment: int) -> bool:
        at = self.last_write.get(name, -1)
        if at < 0 or name in self.keep or bisect_left(self.cuts, at) != segment:
            return False
        op = self.ops[at]
        return OPS[op.type].effect not in _NEVER_TWICE and not op.sub_blocks() and not self.block.desc(name).persistable

    def _emit_again(self, op: Operator) -> None:
        block = self.block
        out = {n: unused(f"{n}@RECOMPUTE", block.descs, lambda k: f"_{k - 1}") for n in op.output_arg_names}
        ins = {s: tuple(self._second.get(n, n) for n in names) for s, names in op.inputs.items()}
        outs = {s: tuple(out[n] for n in names) for s, names in op.outputs.items()}
        for n, copy in out.items():
            desc = block.desc(n)
            attrs: dict[str, Any] = {}
            if not desc.persistable:  # running statistics advance once: their second values are not used
                self._second[n], self.originals[copy] = copy, n
                attrs["copy_of"] = n
            block.declare(desc.changed(name=copy, persistable=False, is_parameter=False, attrs=attrs))
        block.oplist.append(op.replace(inputs=ins, outputs=outs, role=Role.BACKWARD))
