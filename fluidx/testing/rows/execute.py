"""Execute the rows of an op on its samples: on 2 and 3 ranks, with shards of uneven sizes and empty shards."""

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
from .values import Arrays, RowFailure, cut_at, differs, identity, local_shape, show_entries, show_entry


class WrongRow(NamedTuple):
    """A row whose execution gave a wrong result."""

    op: str
    sample: int
    types: str
    row: str
    cut: str
    what: str

    def __str__(self) -> str:
        return f"op {self.op}, sample {self.sample} ({self.types}): row '{self.row}', {self.cut}: {self.what}"


class RowReport(NamedTuple):
    """The numbers of rows and of executions of an op, and the rows that failed."""

    rows: int
    executions: int
    wrong: list[WrongRow]


def check_rows(op: str | type[OpDef]) -> RowReport:
    """Execute every row of an op on its samples. AssertionError shows the rows that do not hold.

    >>> check_rows("softmax").wrong
    []
    """
    report = execute_rows(op)
    if report.wrong:
        shown = "\n  ".join(map(str, report.wrong[:6]))
        raise AssertionError(f"{len(report.wrong)} executions of rows do not hold\n  {shown}")
    return report


def execute_rows(op: str | type[OpDef]) -> RowReport:
    """Execute every row that the pattern of an op gives for its samples, and collect the rows that fail."""
    definition = opdef(op) if isinstance(op, str) else op
    wrong: list[WrongRow] = []
    seen: set[bytes] = set()
    rows_seen = executions = 0
    if not has_rows(definition):
        return RowReport(0, 0, [])
    for case in _cases(definition, seen):
        count, ran = case.execute_all(wrong)
        rows_seen += count
        executions += ran
    return RowReport(rows_seen, executions, wrong)


def _cases(definition: type[OpDef], seen: set[bytes]) -> Iterator[_ExecutedCase]:
    """The samples of an op: as they are, with floats as float64 (rounding then hides no error), and without an optional output."""
    for k, sample in enumerate(definition.samples()):
        case = _ExecutedCase(definition, k, sample, False)
        wide = _ExecutedCase(definition, k, sample, True)
        new = wide.widened and wide.runs and wide.key not in seen
        if new:
            seen.add(wide.key)
            yield wide
        case.brief = wide.widened and wide.runs
        yield case
        absent = [j for j, s in enumerate(definition.out_slots) if s.optional]
        if new or not case.brief:
            for j in absent if len(definition.out_slots) > 1 and k < 2 else ():
                yield _ExecutedCase(definition, k, sample, wide.widened and wide.runs, j)


class _ExecutedCase(Case):
    """A sample on which the rows are executed."""

    def execute_all(self, wrong: list[WrongRow]) -> tuple[int, int]:
        """Execute every row and add failures to `wrong`; return (number of rows, number of executions)."""
        executions = count = 0

        def add_failure(row: str, cut: str, why: object) -> None:
            text = str(why) if isinstance(why, RowFailure) else f"{type(why).__name__}: {why}"
            wrong.append(WrongRow(self.definition.name, self.number, self.types, row, cut, text))

        with np.errstate(all="ignore"):
            try:
                patterns = [self.pattern, *self.open_patterns()]
                self.check_pattern()
                _ = self.want
            except Exception as e:
                add_failure("", "reading the pattern", e)
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
                        # `root` and `own` run the kernel as on one device; a collective runs `meet`, not a kernel
                        continue
                    for n, style in self.executions(row):
                        executions += 1
                        bounds: Any = ()
                        try:
                            bounds = self.bounds(row, p, n, style)
                            self.execute(row, p, n, bounds, style)
                        except Exception as e:
                            where = f"cut at {list(bounds)}" if bounds else style
                            add_failure(f"{row.why}: {show_entries(row.ins)} -> {show_entries(row.outs)}", f"{n} ranks, {where}", e)
                            break
        return count, executions

    def open_patterns(self) -> Iterator[Pattern]:
        """The pattern for types with an open first axis, as in programs: its rows must hold for every size."""
        first = next((t for t in self.in_types if t is not None and t.ndim), None)
        if first is None or first.shape[0] <= 1:
            return
        size = first.shape[0]
        ins = [t if t is None or not t.ndim or t.shape[0] != size else t.with_shape((ANY, *t.shape[1:])) for t in self.in_types]
        try:
            outs = self.infer(ins, self.attrs)
        except Exception:  # an op may need to know the size
            return
        yield self.definition.pattern_of(ins, outs, self.attrs)

    def check_pattern(self) -> None:
        """Every factor must have one size, and a kernel whose pattern needs a `Part` must take `part`."""
        p, d = self.pattern, self.definition
        if p.needs_part and not d.takes_part and not self.bind_takes_part:
            raise RowFailure("the pattern needs a `Part`, but the kernel has no parameter `part`")
        if len(p.located) > 1:
            raise RowFailure(f"a `Part` has the start of one factor, but the pattern locates {sorted(p.located)}")
        for f, size in p.sizes.items():
            if size not in (ANY, self.size(f)) and f not in p.whole:
                raise RowFailure(f"factor {f} has size {self.size(f)}, not {size}")
        for axes, t in zip((*p.ins, *p.outs), (*self.in_types, *self.out_types), strict=True):
            for factors, size in zip(axes or (), t.shape if t is not None else (), strict=True):
                if factors and p.whole.isdisjoint(factors) and prod(self.size(f) for f in factors) != size:
                    sizes = ", ".join(f"{f} of size {self.size(f)}" for f in factors)
                    raise RowFailure(f"an axis of size {size} is made of {sizes}")

    def executions(self, row: PlacementRow) -> list[tuple[int, str]]:
        """The executions of a row: pairs of (number of ranks, style of cuts or terms)."""
        if row.kind == "whole":
            return [(1, "whole"), (1, "with part")] if self.pattern.needs_part else [(1, "whole")]
        if row.kind in ("cut", "flat", "laid"):
            every = [(3, "uneven"), (2, "uneven"), (2, "first empty"), (3, "last empty"), (3, "any")]
        elif row.kind == "linear":
            every = [(3, "terms"), (2, "terms"), (3, "kept")]
        else:
            every = [(3, "terms"), (2, "terms"), (2, "kept")]
        return every[:1] if self.brief else every

    def bounds(self, row: PlacementRow, p: Pattern, n: int, style: str) -> tuple[int, ...]:
        """The bounds of the ranks: of the row's factor, in blocks; or of flat ranges, in elements."""
        if row.kind == "cut":
            return cut_at(row.runs or self.size(row.factor, p), n, style, self.rng)
        if row.kind == "flat":
            cut = zip((*row.ins, *row.outs), (*self.in_types, *self.out_types), strict=True)
            return cut_at(next(t.numel for e, t in cut if e is not None and e.bounds is not None and t is not None), n, style, self.rng)
        if row.kind == "laid":
            return cut_at(sum(t.numel for t in self.in_types if t is not None), n, style, self.rng)
        return ()

    def cuts(self, row: PlacementRow, p: Pattern, bounds: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The bounds of each operand and result."""
        if row.kind == "laid":
            return [*_clipped(bounds, self.in_types), *_clipped(bounds, self.out_types)]
        return [self.operand_bounds(row, p, axes, e, bounds) for axes, e in zip((*p.ins, *p.outs), (*row.ins, *row.outs), strict=True)]

    def operand_bounds(self, row: PlacementRow, p: Pattern, axes: Any, entry: Entry | None, bounds: tuple[int, ...]) -> tuple[int, ...]:
        """The bounds of one operand. A row that cuts a factor in runs gives the numbers of runs, which become elements here."""
        if not row.runs or entry is None or entry.axis is None or axes[entry.axis][0] != row.factor:
            return bounds
        size = self.size(row.factor, p)
        return tuple(b * size // row.runs for b in bounds)

    def execute(self, row: PlacementRow, p: Pattern, n: int, bounds: tuple[int, ...], style: str) -> None:
        """Run the kernel on every rank as the row says. Raises RowFailure if a result is wrong."""
        self.turn += 1
        bound = self.turn % 2 == 0  # the same on all ranks, so that replicated results have equal bits
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
        """The results of a rank that has no elements of a reduced factor: identities. The kernel is not called."""
        out: Arrays = []
        for t, s, e in zip(self.out_types, local, row.outs, strict=True):
            if t is None:
                out.append(None)
            elif e is not None and e.op:
                out.append(np.full(s, identity(e.op, np_dtype(t.dtype)), np_dtype(t.dtype)))
            elif 0 in s:
                out.append(np.empty(s, np_dtype(t.dtype)))
            else:
                raise RowFailure("one output is reduced, another is neither cut nor reduced; a rank without elements cannot compute it")
        return out

    def part(self, row: PlacementRow, p: Pattern, bounds: tuple[int, ...], r: int) -> Part | None:
        """The `Part` for the kernel on rank r; None if the pattern needs none."""
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
        """Raise RowFailure unless the local values `got` of output j, placed by `entry`, make up `want`."""
        name = self.out_name(j)
        for r, (g, s) in enumerate(zip(got, shapes, strict=True)):
            if g is None or g.shape != tuple(s) or g.dtype != want.dtype:
                found = "nothing" if g is None else f"{g.dtype.name}{list(g.shape)}"
                raise RowFailure(f"rank {r} should make {want.dtype.name}{list(s)} of {name} and makes {found}")
        if entry is not None and entry.op == "sum" and want.dtype.kind == "b":
            raise RowFailure(f"{name} is bool, which cannot be a sum of terms")

        def wrong(found: np.ndarray, wanted: np.ndarray) -> str | None:
            return None if np.array_equal(found, wanted) else differs(found, wanted, self.tolerance(want, got))

        if entry is None:
            for r, g in enumerate(got):
                if (why := wrong(g, want)) is not None:
                    raise RowFailure(f"rank {r} has {name} wrong: {why}")
                if differs(g, got[0], 0.0) is not None:
                    raise RowFailure(f"{name} should be the same everywhere; rank {r} differs from rank 0")
            return
        whole = want.reshape(-1) if entry.bounds is not None else want
        if (why := wrong(entry.join(got), whole)) is not None:
            raise RowFailure(f"{name} at {show_entry(entry)} joins wrong: {why}")


def _clipped(bounds: tuple[int, ...], types: list[Any]) -> list[tuple[int, ...]]:
    """Bounds of each of several values that are concatenated flat, if the whole is cut at `bounds`."""
    starts = [sum(t.numel for t in types[:k]) for k in range(len(types))]
    return [tuple(sorted((0, b - start, t.numel))[1] for b in bounds) for start, t in zip(starts, types, strict=True)]
