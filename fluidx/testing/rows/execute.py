"""Every row of an op is executed on its samples: on 2 and 3 ranks, with uneven and empty parts."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...ir import ANY, OpDef, np_dtype, opdef
from ...ir.parts import Part
from ...ir.pattern import Pattern
from ...ir.rows import PlacementRow, rows
from ...ir.types import Entry
from .case import Case, has_rows
from .values import Arrays, Wrong, cut_at, differs, identity, local_shape, show_entries, show_entry


class WrongRow(NamedTuple):
    """A row that execution refutes."""

    op: str
    sample: int
    types: str
    row: str
    cut: str
    what: str

    def __str__(self) -> str:
        return f"op {self.op}, sample {self.sample} ({self.types}): row '{self.row}', {self.cut}: {self.what}"


class Verdict(NamedTuple):
    """What the judge found out about an op."""

    rows: int
    executions: int
    wrong: list[WrongRow]


def check_rows(op: str | type[OpDef]) -> Verdict:
    """Execute every row of an op on its samples. AssertionError shows the rows that do not hold.

    >>> check_rows("softmax").wrong
    []
    """
    verdict = judge(op)
    if verdict.wrong:
        shown = "\n  ".join(map(str, verdict.wrong[:6]))
        raise AssertionError(f"{len(verdict.wrong)} executions of rows do not hold\n  {shown}")
    return verdict


def judge(op: str | type[OpDef]) -> Verdict:
    """Execute every row that the pattern of an op gives for its samples: on 2 and 3 ranks, with uneven and empty parts."""
    definition = opdef(op) if isinstance(op, str) else op
    wrong: list[WrongRow] = []
    seen: set[bytes] = set()
    rows_seen = executions = 0
    if not has_rows(definition):
        return Verdict(0, 0, [])
    for case in _cases(definition, seen):
        count, ran = case.judge(wrong)
        rows_seen += count
        executions += ran
    return Verdict(rows_seen, executions, wrong)


def thin_factors(op: str | type[OpDef], least: int = 2) -> list[str]:
    """The factors of an op's pattern that none of its samples exercises with a size of at least `least`."""
    definition = opdef(op) if isinstance(op, str) else op
    best: dict[str, int] = {}
    if not has_rows(definition):
        return []
    for k, sample in enumerate(definition.samples()):
        case = Case(definition, k, sample, False)
        for f in _words(definition, case):
            best[f] = max(best.get(f, 1), *(case.size(g) for g in case.pattern.sizes if g == f or (f == "*" and g[0] == "*")), 1)
    return [f for f, size in best.items() if size < least]


def _words(definition: type[OpDef], case: Case) -> set[str]:
    """The factors that the line for a sample names; sizes of 1 and empty axes included."""
    said = definition.pattern
    if callable(said):
        said = said(case.in_types, case.out_types, case.attrs)
    text = said[0] if isinstance(said, tuple) else said
    body = (text or "").partition("|")[0]
    for mark in ("->", ",", "(", ")", "~"):
        body = body.replace(mark, " ")
    return {w for w in body.split() if w != "."}


def _cases(definition: type[OpDef], seen: set[bytes]) -> Iterator[_Judged]:
    """The samples of an op: as they are, and with their floats as float64, where rounding hides nothing."""
    for k, sample in enumerate(definition.samples()):
        case = _Judged(definition, k, sample, False)
        wide = _Judged(definition, k, sample, True)
        new = wide.widened and wide.runs and wide.key not in seen
        if new:
            seen.add(wide.key)
            yield wide
        case.brief = wide.widened and wide.runs
        yield case
        absent = [j for j, s in enumerate(definition.out_slots) if s.optional]
        if new or not case.brief:
            for j in absent if len(definition.out_slots) > 1 and k < 2 else ():
                yield _Judged(definition, k, sample, wide.widened and wide.runs, j)


class _Judged(Case):
    """A sample on which the rows are executed."""

    def judge(self, wrong: list[WrongRow]) -> tuple[int, int]:
        """Execute every row; returns how many there were and how many executions."""
        executions = count = 0

        def refuted(row: str, cut: str, why: object) -> None:
            text = str(why) if isinstance(why, Wrong) else f"{type(why).__name__}: {why}"
            wrong.append(WrongRow(self.definition.name, self.number, self.types, row, cut, text))

        with np.errstate(all="ignore"):
            try:
                patterns = [self.pattern, *self.open_patterns()]
                self.check_pattern()
                _ = self.want
            except Exception as e:
                refuted("", "reading the pattern", e)
                return 0, 0
            done: set[Any] = set()
            for p in patterns:
                table = rows(p)
                for row in table:
                    key = (row.ins, row.outs, row.runs, row.factor in p.ignored, frozenset(p.counted), frozenset(p.located))
                    if key in done:
                        continue
                    done.add(key)
                    count += 1
                    if row.kind in ("root", "own", "meet"):
                        continue  # what a rank does by itself is what one device does, as for `whole`; what takes all ranks is no kernel's
                    for n, style in self.ways(row):
                        executions += 1
                        bounds: Any = ()
                        try:
                            bounds = self.bounds(row, p, n, style)
                            self.execute(row, p, n, bounds, style)
                        except Exception as e:
                            where = f"cut at {list(bounds)}" if bounds else style
                            refuted(f"{row.why}: {show_entries(row.ins)} -> {show_entries(row.outs)}", f"{n} ranks, {where}", e)
                            break
        return count, executions

    def open_patterns(self) -> Iterator[Pattern]:
        """The pattern for types whose first axis is open, as programs have them: its rows must hold for every size."""
        first = next((t for t in self.in_types if t is not None and t.ndim), None)
        if first is None or first.shape[0] <= 1:
            return
        size = first.shape[0]
        ins = [t if t is None or not t.ndim or t.shape[0] != size else t.with_shape((ANY, *t.shape[1:])) for t in self.in_types]
        try:
            outs = self.infer(ins, self.attrs)
        except Exception:  # an op may need the size
            return
        yield self.definition.pattern_of(ins, outs, self.attrs)

    def check_pattern(self) -> None:
        """One factor has one size, and who is told something takes it."""
        p, d = self.pattern, self.definition
        if p.needs_part and not d.takes_part and not self.bind_told:
            raise Wrong("the pattern says what the kernel is told, and the kernel takes no `part`")
        if len(p.located) > 1:
            raise Wrong(f"the kernel is told where one factor begins, not {sorted(p.located)}")
        for f, size in p.sizes.items():
            if size not in (ANY, self.size(f)) and f not in p.whole:
                raise Wrong(f"factor {f} has size {self.size(f)}, not {size}")
        for axes, t in zip((*p.ins, *p.outs), (*self.in_types, *self.out_types), strict=True):
            for factors, size in zip(axes or (), t.shape if t is not None else (), strict=True):
                if factors and p.whole.isdisjoint(factors) and prod(self.size(f) for f in factors) != size:
                    sizes = ", ".join(f"{f} of size {self.size(f)}" for f in factors)
                    raise Wrong(f"an axis of size {size} is made of {sizes}")

    def ways(self, row: PlacementRow) -> list[tuple[int, str]]:
        """How a row is executed: ranks and style."""
        if row.kind == "whole":
            return [(1, "whole"), (1, "told")] if self.pattern.needs_part else [(1, "whole")]
        if row.kind in ("cut", "flat", "laid"):
            every = [(3, "uneven"), (2, "uneven"), (2, "first empty"), (3, "last empty"), (3, "any")]
        elif row.kind == "linear":
            every = [(3, "terms"), (2, "terms"), (3, "kept")]
        else:
            every = [(3, "terms"), (2, "terms"), (2, "kept")]
        return every[:1] if self.brief else every

    def bounds(self, row: PlacementRow, p: Pattern, n: int, style: str) -> tuple[int, ...]:
        """Where the row's factor is cut, in blocks; or where flat ranges begin and end."""
        if row.kind == "cut":
            return cut_at(row.runs or self.size(row.factor, p), n, style, self.rng)
        if row.kind == "flat":
            cut = zip((*row.ins, *row.outs), (*self.in_types, *self.out_types), strict=True)
            return cut_at(next(t.numel for e, t in cut if e is not None and e.bounds is not None and t is not None), n, style, self.rng)
        if row.kind == "laid":
            return cut_at(sum(t.numel for t in self.in_types if t is not None), n, style, self.rng)
        return ()

    def cuts(self, row: PlacementRow, p: Pattern, bounds: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Where each operand and result is cut."""
        if row.kind == "laid":
            return [*_clipped(bounds, self.in_types), *_clipped(bounds, self.out_types)]
        return [self.between(row, p, axes, e, bounds) for axes, e in zip((*p.ins, *p.outs), (*row.ins, *row.outs), strict=True)]

    def between(self, row: PlacementRow, p: Pattern, axes: Any, entry: Entry | None, bounds: tuple[int, ...]) -> tuple[int, ...]:
        """Where an operand's axis is cut: a factor in runs where those begin at which the row cuts."""
        if not row.runs or entry is None or entry.axis is None or axes[entry.axis][0] != row.factor:
            return bounds
        size = self.size(row.factor, p)
        return tuple(b * size // row.runs for b in bounds)

    def execute(self, row: PlacementRow, p: Pattern, n: int, bounds: tuple[int, ...], style: str) -> None:
        """Run the ranks by a row; Wrong says what does not hold."""
        self.turn += 1
        bound = self.turn % 2 == 0  # on all ranks alike: what is the same everywhere has the same bits
        cuts = self.cuts(row, p, bounds)
        parts = [self.parts(k, e, n, cuts[k], style, p) for k, e in enumerate(row.ins)]
        made = zip(self.out_types, row.outs, cuts[len(row.ins) :], strict=True)
        shapes = [[local_shape(t, e, c, r) for r in range(n)] for t, e, c in made]
        got: list[Arrays] = []
        for r in range(n):
            local = [s[r] for s in shapes]
            if all(s is None or 0 in s for s in local) and any(s is not None for s in local):
                got.append([None if t is None else np.empty(s, np_dtype(t.dtype)) for t, s in zip(self.out_types, local, strict=True)])
                continue
            if row.owes and bounds and bounds[r] == bounds[r + 1]:
                got.append(self.identities(row, local))
                continue
            part = self.part(row, p, bounds, r) if style != "whole" else None
            mine = [None if q is None else q[r] for q in parts]
            attrs = self.local_attrs(mine, local) if bounds else self.attrs
            got.append(self.run(mine, local, attrs, part, bound))
        for j, (entry, want) in enumerate(zip(row.outs, self.want, strict=True)):
            if want is not None and self.out_types[j] is not None:
                self.compare(j, entry, want, [g[j] for g in got], shapes[j], style)

    def identities(self, row: PlacementRow, local: list[Any]) -> Arrays:
        """What a rank contributes that has nothing of a factor that is reduced: the kernel is not called."""
        out: Arrays = []
        for t, s, e in zip(self.out_types, local, row.outs, strict=True):
            if t is None:
                out.append(None)
            elif e is not None and e.op:
                out.append(np.full(s, identity(e.op, np_dtype(t.dtype)), np_dtype(t.dtype)))
            elif 0 in s:
                out.append(np.empty(s, np_dtype(t.dtype)))
            else:
                raise Wrong("an output beside one that is reduced is neither cut nor reduced, so an empty part cannot make it")
        return out

    def part(self, row: PlacementRow, p: Pattern, bounds: tuple[int, ...], r: int) -> Part | None:
        """What the kernel is told on rank r."""
        if not p.needs_part:
            return None
        start = size = 0
        for f in p.located:
            size = self.size(f, p)
            if row.kind == "cut" and f == row.factor:
                start = bounds[r] * size // row.runs if row.runs else bounds[r]
            elif row.runs and f == f"{row.factor}/{row.runs}":
                start = bounds[r]
        box: tuple[tuple[int, int], ...] = ()
        shape: tuple[int, ...] = ()
        first = self.out_types[0]
        if p.keyed and first is not None:
            shape, e = first.shape, row.outs[0]
            box = tuple((0, d) for d in shape)
            if e is not None and e.axis is not None:
                box = (*box[: e.axis], (bounds[r] * e.unit, bounds[r + 1] * e.unit), *box[e.axis + 1 :])
            elif e is not None and e.bounds is not None:
                shape, box = (first.numel,), ((bounds[r], bounds[r + 1]),)
        return Part(prod(self.size(f, p) for f in p.counted), start, size, box, shape)

    def compare(self, j: int, entry: Entry | None, want: np.ndarray, got: Arrays, shapes: list[Any], style: str) -> None:
        """Wrong unless what the ranks made of output j is parts of `want` that lie at `entry`."""
        name = self.out_name(j)
        for r, (g, s) in enumerate(zip(got, shapes, strict=True)):
            if g is None or g.shape != tuple(s) or g.dtype != want.dtype:
                found = "nothing" if g is None else f"{g.dtype.name}{list(g.shape)}"
                raise Wrong(f"rank {r} should make {want.dtype.name}{list(s)} of {name} and makes {found}")
        if entry is not None and entry.op == "sum" and want.dtype.kind == "b":
            raise Wrong(f"{name} is bool, which is no sum of terms")
        tolerance = self.tolerance(want, got)
        if entry is None:
            for r, g in enumerate(got):
                if (why := differs(g, want, tolerance)) is not None:
                    raise Wrong(f"rank {r} has {name} wrong: {why}")
                if differs(g, got[0], 0.0) is not None:
                    raise Wrong(f"{name} should be the same everywhere; rank {r} differs from rank 0")
            return
        whole = want.reshape(-1) if entry.bounds is not None else want
        if (why := differs(entry.join(got), whole, tolerance)) is not None:
            raise Wrong(f"{name} at {show_entry(entry)} joins wrong: {why}")


def _clipped(bounds: tuple[int, ...], types: list[Any]) -> list[tuple[int, ...]]:
    """Where values that lie one behind the other are cut, if all of it is cut at `bounds`."""
    starts = [sum(t.numel for t in types[:k]) for k in range(len(types))]
    return [tuple(sorted((0, b - start, t.numel))[1] for b in bounds) for start, t in zip(starts, types, strict=True)]
