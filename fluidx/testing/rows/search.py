"""Search for missing rows: placements that no row allows, but that give right results in every execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...ir import Effect, OpDef, opdef
from ...ir.parts import Part
from ...ir.rows import PlacementRow, rows
from ...ir.types import Entry, Partial, Shard
from ..reference import type_of
from .case import Case, has_rows
from .values import JOIN, Arrays, cut_at, differs, local_shape, show_entries


class MissingRow(NamedTuple):
    """Placements that gave right results in every execution, though no row allows them."""

    op: str
    sample: int
    types: str
    says: str  # "shard(0), whole -> shard(0)"

    def __str__(self) -> str:
        return f"op {self.op}, sample {self.sample} ({self.types}): no row allows {self.says}, which holds"


def missing_rows(op: str | type[OpDef], samples: int = 3, operands: int = 4) -> list[MissingRow]:
    """Placements over {whole, shard(d), partial(sum)} that no row allows, but that gave right results in every execution.

    The search runs on the most informative samples, one for each combination of numbers of axes and flags, with at most `operands`
    operands. It also runs with the elements of each operand in another order, because sparse values can give right results by chance.
    """
    definition = opdef(op) if isinstance(op, str) else op
    if not has_rows(definition) or definition.effect is Effect.RANDOM:
        return []
    found: list[MissingRow] = []
    with np.errstate(all="ignore"):
        for case in _informative(definition, samples, operands):
            found += case.search()
    return found


def _informative(definition: type[OpDef], samples: int, operands: int) -> list[_Search]:
    best: dict[Any, tuple[int, _Search]] = {}
    for k, sample in enumerate(definition.samples()):
        case = _Search(definition, k, sample, True)
        if not case.runs:
            case = _Search(definition, k, sample, False)
        present = [t for t in case.in_types if t is not None]
        if len(present) > operands or not present or any(0 in t.shape for t in present) or case.pattern.keyed:
            continue
        flags = tuple(v for v in case.attrs.values() if isinstance(v, (bool, str)))
        signature = (tuple(t.ndim for t in present), flags)
        score = sum(min(d, 4) for t in present for d in t.shape if d > 1) * 2 + case.widened
        if signature not in best or score > best[signature][0]:
            best[signature] = score, case
    found = [case for _, case in sorted(best.values(), key=lambda pair: -pair[0])[:samples]]
    # few elements can agree by chance
    large = [case for case in found if max(t.numel for t in case.in_types if t is not None) > 5]
    return large or found


class _Search(Case):
    """A sample on which placements that no row allows are executed."""

    @cached_property
    def variants(self) -> list[tuple[Arrays, Arrays]]:
        """(operands, results on one device): of the sample, and with the elements of every operand in another order."""
        shapes = [None if t is None else t.shape for t in self.out_types]
        out = [(self.ins, self.want)]
        for _ in range(8):
            ins = [None if v is None else self.rng.permutation(v.reshape(-1)).reshape(v.shape) for v in self.ins]
            try:
                out.append((ins, self.run(ins, shapes, self.attrs, None, False)))
            except Exception:
                continue
        # a constant result holds under many placements; for a bool it may be the only result
        varied = [pair for pair in out if all(w is None or w.size < 2 or (w != w.flat[0]).any() for w in pair[1])]
        return (varied or ([] if any(t is not None and t.dtype == "bool" for t in self.out_types) else out))[:4]

    def search(self) -> list[MissingRow]:
        table = [r for r in rows(self.pattern) if r.kind in ("cut", "whole", "linear")]
        found: list[MissingRow] = []
        if not self.variants:
            return found
        for ins, blocks in self.candidates():
            if any(self.allows(row, ins) for row in table):
                continue
            outs = self.holds(ins, blocks)
            if outs is not None:
                says = f"{show_entries(ins)} -> {show_entries(outs)}"
                found.append(MissingRow(self.definition.name, self.number, self.types, says))
        return found

    def candidates(self) -> Iterator[tuple[tuple[Entry | None, ...], int]]:
        choices: list[list[Any]] = []
        for k, t in enumerate(self.in_types):
            if t is None:
                choices.append([None])
                continue
            terms = [] if k in self.pattern.shape_only or t.dtype == "bool" else [Partial("sum", "")]
            choices.append([None, *(a for a, d in enumerate(t.shape) if d > 1), *terms])
        for chosen in product(*choices):
            sizes = [self.in_types[k].shape[c] for k, c in enumerate(chosen) if isinstance(c, int)]
            blocks = min(sizes, default=0)
            if any(s % blocks for s in sizes):
                continue
            if all(c is None or k in self.pattern.shape_only for k, c in enumerate(chosen)):
                continue
            ins = tuple(Shard(c, "", self.in_types[k].shape[c] // blocks) if isinstance(c, int) else c for k, c in enumerate(chosen))
            yield ins, blocks

    def allows(self, row: PlacementRow, ins: Sequence[Entry | None]) -> bool:
        for k, (want, have) in enumerate(zip(row.ins, ins, strict=True)):
            if k in self.pattern.shape_only or self.in_types[k] is None or want == have:
                continue
            if want is None or have is None or want.axis is None or not want.admits(have, self.in_types[k]) or have.unit % want.unit:
                return False
        return True

    def holds(self, ins: Sequence[Entry | None], blocks: int) -> tuple[Entry | None, ...] | None:
        """Placements of the outputs that hold for the operand placements `ins`; None if there are none."""
        options: list[list[Any]] = []
        for t in self.out_types:
            cut = [a for a, d in enumerate(t.shape) if blocks and d >= blocks and d % blocks == 0] if t is not None else []
            options.append([None, *(Shard(a, "", t.shape[a] // blocks) for a in cut)] if t is not None else [None])
        for outs in product(*options):
            left: list[set[str]] | None = None
            for turn, n in enumerate((3, 2, 2, 3, 3, 2, 3, 2)):
                if blocks and n > blocks:
                    n = 2
                found = self.once(ins, outs, blocks, n, turn)
                left = None if found is None else found if left is None else [a & b for a, b in zip(left, found, strict=True)]
                if left is None or not all(left):
                    left = None
                    break
            if left is not None:
                return tuple(
                    None if t is None or "whole" in h else e if "cut" in h else Partial(min(h, key="sum max".find), "")
                    for t, h, e in zip(self.out_types, left, outs, strict=True)
                )
        return None

    def once(self, ins: Sequence[Entry | None], outs: Sequence[Entry | None], blocks: int, n: int, turn: int) -> list[set[str]] | None:
        """Run all ranks once. For each output, the entries under which the local values give the right result; None if the run fails."""
        self.turn += 1
        values, want = self.variants[turn % len(self.variants)]
        bounds = cut_at(blocks, n, "uneven", self.rng) if blocks else ()
        kept, self.ins = self.ins, values
        try:
            parts = [self.parts(k, e, n, bounds, "terms", self.pattern) for k, e in enumerate(ins)]
        finally:
            self.ins = kept
        got: list[Arrays] = []
        for r in range(n):
            local = [local_shape(t, e, bounds, r) for t, e in zip(self.out_types, outs, strict=True)]
            mine = [None if q is None else q[r] for q in parts]
            try:
                attrs = self.local_attrs(mine, local) if blocks else self.attrs
                made = self.infer([type_of(v) for v in mine], attrs)
                if [None if t is None else t.shape for t in made] != local:
                    return None
                got.append(self.run(mine, local, attrs, self.part(ins, outs, bounds, r), False))
            except Exception:
                return None
            if any((g is None) != (s is None) or (g is not None and g.shape != s) for g, s in zip(got[-1], local, strict=True)):
                return None
        return [self.entries_of(e, w, [g[j] for g in got]) for j, (e, w) in enumerate(zip(outs, want, strict=True))]

    def entries_of(self, entry: Entry | None, want: Any, got: Arrays) -> set[str]:
        if want is None:
            return {"whole"}
        tolerance = self.tolerance(want, got)
        if entry is not None and entry.axis is not None:
            return {"cut"} if differs(entry.join(got), want, tolerance) is None else set()
        out = set()
        if all(differs(g, want, tolerance) is None for g in got):
            out.add("whole")
        for op in ("sum", "max") if want.dtype.kind != "b" else ("max",):
            joined = got[0]
            for g in got[1:]:
                joined = JOIN[op](joined, g)
            if differs(joined, want, tolerance) is None:
                out.add(op)
        return out

    def part(self, ins: Sequence[Entry | None], outs: Sequence[Entry | None], bounds: tuple[int, ...], r: int) -> Part | None:
        p = self.pattern
        if not p.needs_part:
            return None
        start = size = 0
        for f in p.located:
            size = self.size(f)
            for axes, e in zip((*p.ins, *p.outs), (*ins, *outs), strict=True):
                if e is not None and e.axis is not None and axes is not None and axes[e.axis] == (f,):
                    start = bounds[r] * e.unit
        return Part(prod(self.size(f) for f in p.counted), start, size)
