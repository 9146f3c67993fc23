"""The judge of access patterns: every row of an op is executed on its samples, and what no row allows is tried too.

A row is a lemma: if the operands lie so, running the kernel on every rank's part, told what `Part` says, gives the parts of outputs that
lie so, for any number of ranks and any cut. Values are cut, joined and described here from the definitions of the placements alone, and
not by `ir/parts.py`, so that an error there shows. Terms of a sum have mixed signs and unrelated sizes: a proportional split would pass
wrong rows (abs, say).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from ..executor.context import RunContext
from ..ir import ANY, Effect, OpDef, Sample, TensorType, np_dtype, opdef
from ..ir.parts import Part
from ..ir.pattern import Pattern, Row, rows
from ..ir.types import Entry, Partial, Pieces, Shard
from .reference import type_of

Arrays = list[Any]  # flat: slot by slot, the members of a list one by one, None for an absent one

_JOIN = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# another order of a sum, at most; relative to the largest value or term
_ROUGH = {"float64": 1e-9, "float32": 3e-5, "float16": 3e-2, "bfloat16": 2e-1}
_STEP = 3


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


class MissingRow(NamedTuple):
    """Placements that hold in every execution although no row allows them."""

    op: str
    sample: int
    types: str
    says: str  # "shard(0), whole -> shard(0)"

    def __str__(self) -> str:
        return f"op {self.op}, sample {self.sample} ({self.types}): no row allows {self.says}, which holds"


class Verdict(NamedTuple):
    """What the judge found out about an op."""

    rows: int
    executions: int
    wrong: list[WrongRow]


class _Wrong(Exception):
    """Why a row does not hold."""


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
    if not _judged(definition):
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
    if not _judged(definition):
        return []
    for k, sample in enumerate(definition.samples()):
        case = _Case(definition, k, sample, False)
        for f in _words(definition, case):
            best[f] = max(best.get(f, 1), *(case.size(g) for g in case.pattern.sizes if g == f or (f == "*" and g[0] == "*")), 1)
    return [f for f, size in best.items() if size < least]


def _judged(definition: type[OpDef]) -> bool:
    """Ops that need ranks have `move` instead; the host's and those of sub-blocks have no rows."""
    return definition.effect in (Effect.PURE, Effect.RANDOM) and not hasattr(definition, "run_reference")


def _words(definition: type[OpDef], case: _Case) -> set[str]:
    """The factors that the line for a sample names; sizes of 1 and empty axes included."""
    said = definition.pattern
    if callable(said):
        said = said(case.in_types, case.out_types, case.attrs)
    text = said[0] if isinstance(said, tuple) else said
    body = (text or "").partition("|")[0]
    for mark in ("->", ",", "(", ")", "~"):
        body = body.replace(mark, " ")
    return {w for w in body.split() if w != "."}


def _cases(definition: type[OpDef], seen: set[bytes]) -> Iterator[_Case]:
    """The samples of an op: as they are, and with their floats as float64, where rounding hides nothing."""
    for k, sample in enumerate(definition.samples()):
        case = _Case(definition, k, sample, False)
        wide = _Case(definition, k, sample, True)
        new = wide.widened and wide.runs and wide.key not in seen
        if new:
            seen.add(wide.key)
            yield wide
        case.brief = wide.widened and wide.runs
        yield case
        absent = [j for j, s in enumerate(definition.out_slots) if s.optional]
        if new or not case.brief:
            for j in absent if len(definition.out_slots) > 1 and k < 2 else ():
                yield _Case(definition, k, sample, wide.widened and wide.runs, j)


# -- values and their parts ---------------------------------------------------------------------------------------------------------


def _whole_numbers(x: np.ndarray) -> bool:
    return x.dtype.kind in "iub" or bool(np.isfinite(x).all() and (x == np.rint(x)).all() and np.abs(x).max(initial=0) < 1 << 20)


def _terms(x: np.ndarray, op: str, n: int, rng: np.random.Generator, kept: bool) -> list[np.ndarray]:
    """Values for n ranks whose `op` is x. With `kept`, one rank has it all and the others have nothing to add."""
    at = rng.integers(n)
    if kept:
        return [x if k == at else np.full_like(x, _identity(op, x.dtype)) for k in range(n)]
    if op == "sum":
        if x.dtype.kind in "iu":
            others = list(rng.integers(0, 9, (n - 1, *x.shape)).astype(x.dtype))
        else:
            draws = rng.standard_normal((n - 1, *x.shape)) * 3
            others = list((np.rint(draws * 3) if _whole_numbers(x) else draws).astype(x.dtype))
        if x.dtype.kind in "iu":
            others = [-o if k % 2 == 0 else o for k, o in enumerate(others)]
            rest = x.copy()
            for o in others:
                rest = rest - o
        else:
            rest = (x.astype("float64") - sum(o.astype("float64") for o in others)).astype(x.dtype)
        others.insert(int(at), rest)
        return others
    owner = rng.integers(0, n, x.shape)
    out = []
    for k in range(n):
        if x.dtype.kind == "b":
            lower = np.zeros_like(x) if op == "max" else np.ones_like(x)
        elif x.dtype.kind in "iu":
            step = rng.integers(0, 4, x.shape).astype(x.dtype)
            lower = np.where(x >= step, x - step, x) if op == "max" else x + step
        else:
            step = rng.uniform(0.3, 3, x.shape).astype(x.dtype)
            lower = x - step if op == "max" else x + step
        out.append(np.where(owner == k, x, lower).astype(x.dtype))
    return out


def _identity(op: str, dtype: np.dtype) -> Any:
    if op == "sum":
        return dtype.type(0)
    if dtype.kind == "b":
        return op == "min"
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return info.min if op == "max" else info.max
    return dtype.type(-np.inf if op == "max" else np.inf)


def _slab(x: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    return np.ascontiguousarray(x[(slice(None),) * axis + (slice(start, stop),)])


def _garbage(t: TensorType, shape: Sequence[int], zeros: bool) -> np.ndarray:
    """An array of which only the shape may be read."""
    dtype = np_dtype(t.dtype)
    if zeros:
        return np.broadcast_to(np.zeros((), dtype), tuple(shape))
    return np.full(tuple(shape), np.nan if t.is_float else True if dtype.kind == "b" else 101, dtype)


def _bounds(size: int, n: int, style: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Where `size` things are cut among n ranks: anywhere. "uneven" leaves no part empty where that can be."""
    if style == "uneven" and size >= n:
        inner = sorted(rng.choice(np.arange(1, size), n - 1, replace=False).tolist())
        even = [k * size // n for k in range(1, n)]
        if inner == even and size > n:  # the cut of the executor's own law shows nothing of other cuts
            inner = [inner[0] + (1 if inner[0] + 1 < (inner[1] if n > 2 else size) else -1 if inner[0] > 1 else 0), *inner[1:]]
        return (0, *inner, size)
    if style == "first empty":
        return (0, 0, *sorted(rng.integers(0, size + 1, n - 2).tolist()), size)
    if style == "last empty":
        return (0, *sorted(rng.integers(0, size + 1, n - 2).tolist()), size, size)
    return (0, *sorted(rng.integers(0, size + 1, n - 1).tolist()), size)


# -- one sample ---------------------------------------------------------------------------------------------------------------------


class _Case:
    """A sample with its pattern and what one device makes of it."""

    def __init__(self, definition: type[OpDef], number: int, sample: Sample, wide: bool, absent: int = -1):
        self.definition, self.number, self.sample, self.absent = definition, number, sample, absent
        self.attrs = definition.complete_attrs(sample.attrs)
        args = [*sample.args, *[None] * (len(definition.in_slots) - len(sample.args))]
        self.counts = [len(a) if s.many else 1 for s, a in zip(definition.in_slots, args, strict=True)]
        self.ins: Arrays = [v for s, a in zip(definition.in_slots, args, strict=True) for v in (a if s.many else [a])]
        self.widened = False
        self.brief = False  # another case of the same sample is judged at length
        if wide:
            self.widened = any(v is not None and type_of(v).is_float and v.dtype.itemsize < 8 for v in self.ins)
            self.ins = [v.astype("float64") if v is not None and type_of(v).is_float else v for v in self.ins]
        self.in_types = [type_of(v) for v in self.ins]
        self.rng = np.random.default_rng(crc32(f"{definition.name} {number} {wide} {absent}".encode()))
        self.bind_told = definition.bind is not None and "part" in inspect.signature(definition.bind).parameters
        self.turn = 0

    @cached_property
    def out_types(self) -> list[TensorType | None]:
        return self.infer(self.in_types, self.attrs)

    def infer(self, types: Sequence[Any], attrs: dict[str, Any]) -> list[TensorType | None]:
        d = self.definition
        got = d.infer(*self.arrange(types), **attrs)
        slots = [got] if len(d.out_slots) == 1 else list(got)
        flat = [t for s, ts in zip(d.out_slots, slots, strict=True) for t in (ts if s.many else [ts])]
        return [None if k == self.absent else t for k, t in enumerate(flat)]

    @cached_property
    def out_counts(self) -> list[int]:
        d = self.definition
        many = len(self.out_types) - sum(not s.many for s in d.out_slots)
        return [many if s.many else 1 for s in d.out_slots]

    @cached_property
    def pattern(self) -> Pattern:
        return self.definition.pattern_of(self.in_types, self.out_types, self.attrs)

    @cached_property
    def key(self) -> bytes:
        """What makes two cases the same."""
        values = (b"-" if v is None else repr((v.shape, v.dtype)).encode() + v.tobytes() for v in self.ins)
        return b"|".join((*values, repr(self.attrs).encode()))

    @cached_property
    def types(self) -> str:
        attrs = ", ".join(f"{k}={v!r}" for k, v in self.sample.attrs.items())
        return ", ".join(map(repr, self.in_types)) + (f"; {attrs}" if attrs else "")

    @cached_property
    def want(self) -> Arrays:
        return self.run(self.ins, [None if t is None else t.shape for t in self.out_types], self.attrs, None, False)

    @cached_property
    def runs(self) -> bool:
        """Does the op take these dtypes at all?"""
        try:
            return all(w is not None or k == self.absent for k, w in enumerate(self.want))
        except Exception:
            return False

    @cached_property
    def whole_numbers(self) -> bool:
        return all(v is None or k in self.pattern.shape_only or _whole_numbers(v) for k, v in enumerate(self.ins))

    def size(self, factor: str, pattern: Pattern | None = None) -> int:
        """The global size of a factor."""
        p = pattern or self.pattern
        for axes, t in zip((*p.ins, *p.outs), (*self.in_types, *self.out_types), strict=True):
            for factors, d in zip(axes or (), t.shape if t is not None else (), strict=True):
                if factors == (factor,):
                    return d
        known = p.sizes.get(factor, ANY)
        if known != ANY:
            return known
        for axes, t in zip((*p.ins, *p.outs), (*self.in_types, *self.out_types), strict=True):
            for factors, d in zip(axes or (), t.shape if t is not None else (), strict=True):
                if factor in factors:
                    return d // max(1, prod(p.sizes[f] for f in factors if f != factor))
        return 1

    # -- running a part ---------------------------------------------------------------------------------------------------------

    def arrange(self, flat: Sequence[Any], out: bool = False) -> list[Any]:
        slots, counts = (self.definition.out_slots, self.out_counts) if out else (self.definition.in_slots, self.counts)
        it = iter(flat)
        return [[next(it) for _ in range(c)] if s.many else next(it) for s, c in zip(slots, counts, strict=True)]

    def run(self, ins: Arrays, shapes: Sequence[Any], attrs: dict[str, Any], part: Part | None, bound: bool) -> Arrays:
        """The kernel, or what `bind` gives, on arrays of these output shapes."""
        d = self.definition
        ctx = RunContext()
        ctx.step = _STEP
        made: Arrays = [
            None if t is None else np.full(shape, 77, np_dtype(t.dtype)) for t, shape in zip(self.out_types, shapes, strict=True)
        ]
        args, outs = self.arrange(ins), self.arrange(made, True)
        if d.bind is not None and (bound or (d.kernel is None and d.view is None)):
            step = d.bind(np, args, outs, attrs, ctx, **({"part": part} if self.bind_told else {}))
            if step is not None:
                step()
                return made
        if d.kernel is None:
            if d.view is None:
                return made
            return [np.array(d.view(args[0], **attrs))]
        extra: dict[str, Any] = {"ctx": ctx} if d.takes_ctx else {}
        if d.takes_part:
            extra["part"] = part
        if d.takes_out:
            d.kernel(np, *args, out=outs[0] if len(outs) == 1 else tuple(outs), **attrs, **extra)
            return made
        got = d.kernel(np, *args, **attrs, **extra)
        got = [got] if len(d.out_slots) == 1 and not isinstance(got, tuple) else list(got)
        flat = [v for s, g in zip(d.out_slots, got, strict=True) for v in (g if s.many else [g])]
        return [None if t is None or v is None else np.asarray(v) for v, t in zip(flat, self.out_types, strict=True)]

    # -- rows ---------------------------------------------------------------------------------------------------------------------

    def judge(self, wrong: list[WrongRow]) -> tuple[int, int]:
        """Execute every row; returns how many there were and how many executions."""
        executions = count = 0

        def refuted(row: str, cut: str, why: object) -> None:
            text = str(why) if isinstance(why, _Wrong) else f"{type(why).__name__}: {why}"
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
                    if row.kind == "root":
                        continue  # what the root does is what one device does, as for `whole`
                    for n, style in self.ways(row):
                        executions += 1
                        bounds: Any = ()
                        try:
                            bounds = self.bounds(row, p, n, style)
                            self.execute(row, p, n, bounds, style)
                        except Exception as e:
                            where = f"cut at {list(bounds)}" if bounds else style
                            refuted(f"{row.why}: {_show(row.ins)} -> {_show(row.outs)}", f"{n} ranks, {where}", e)
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
        if p.told and not d.takes_part and not self.bind_told:
            raise _Wrong("the pattern says what the kernel is told, and the kernel takes no `part`")
        if len(p.located) > 1:
            raise _Wrong(f"the kernel is told where one factor begins, not {sorted(p.located)}")
        for f, size in p.sizes.items():
            if size not in (ANY, self.size(f)) and f not in p.whole:
                raise _Wrong(f"factor {f} has size {self.size(f)}, not {size}")
        for axes, t in zip((*p.ins, *p.outs), (*self.in_types, *self.out_types), strict=True):
            for factors, size in zip(axes or (), t.shape if t is not None else (), strict=True):
                if factors and p.whole.isdisjoint(factors) and prod(self.size(f) for f in factors) != size:
                    sizes = ", ".join(f"{f} of size {self.size(f)}" for f in factors)
                    raise _Wrong(f"an axis of size {size} is made of {sizes}")

    def ways(self, row: Row) -> list[tuple[int, str]]:
        """How a row is executed: ranks and style."""
        if row.kind == "whole":
            return [(1, "whole"), (1, "told")] if self.pattern.told else [(1, "whole")]
        if row.kind in ("cut", "flat"):
            every = [(3, "uneven"), (2, "uneven"), (2, "first empty"), (3, "last empty"), (3, "any")]
        elif row.kind == "linear":
            every = [(3, "terms"), (2, "terms"), (3, "kept")]
        else:
            every = [(3, "terms"), (2, "terms"), (2, "kept")]
        return every[:1] if self.brief else every

    def bounds(self, row: Row, p: Pattern, n: int, style: str) -> tuple[int, ...]:
        """Where the row's factor is cut, in blocks; or where flat ranges begin and end."""
        if row.kind == "cut":
            return _bounds(row.runs or self.size(row.factor, p), n, style, self.rng)
        if row.kind == "flat":
            cut = zip((*row.ins, *row.outs), (*self.in_types, *self.out_types), strict=True)
            return _bounds(next(t.numel for e, t in cut if isinstance(e, Pieces) and t is not None), n, style, self.rng)
        return ()

    def between(self, row: Row, p: Pattern, axes: Any, entry: Entry | None, bounds: tuple[int, ...]) -> tuple[int, ...]:
        """Where an operand's axis is cut: a factor in runs where those begin at which the row cuts."""
        if not row.runs or not isinstance(entry, Shard) or axes[entry.axis][0] != row.factor:
            return bounds
        size = self.size(row.factor, p)
        return tuple(b * size // row.runs for b in bounds)

    def execute(self, row: Row, p: Pattern, n: int, bounds: tuple[int, ...], style: str) -> None:
        """Run the ranks by a row; _Wrong says what does not hold."""
        cuts = [self.between(row, p, axes, e, bounds) for axes, e in zip((*p.ins, *p.outs), (*row.ins, *row.outs), strict=True)]
        parts = [self.parts(k, e, n, cuts[k], style, p) for k, e in enumerate(row.ins)]
        made = zip(self.out_types, row.outs, cuts[len(row.ins) :], strict=True)
        shapes = [[_local(t, e, c, r) for r in range(n)] for t, e, c in made]
        got: list[Arrays] = []
        for r in range(n):
            local = [s[r] for s in shapes]
            if all(s is None or 0 in s for s in local) and any(s is not None for s in local):
                got.append([None if t is None else np.empty(s, np_dtype(t.dtype)) for t, s in zip(self.out_types, local, strict=True)])
                continue
            if row.owes and bounds and bounds[r] == bounds[r + 1]:
                got.append(self.identities(row, local))
                continue
            self.turn += 1
            part = self.part(row, p, bounds, r) if style != "whole" else None
            mine = [None if q is None else q[r] for q in parts]
            attrs = self.local_attrs(mine, local) if bounds else self.attrs
            got.append(self.run(mine, local, attrs, part, self.turn % 2 == 0))
        for j, (entry, want) in enumerate(zip(row.outs, self.want, strict=True)):
            if want is not None and self.out_types[j] is not None:
                self.compare(j, entry, want, [g[j] for g in got], shapes[j], style)

    def parts(self, k: int, entry: Entry | None, n: int, bounds: tuple[int, ...], style: str, p: Pattern) -> list[Any] | None:
        """What every rank holds of operand k."""
        x, t = self.ins[k], self.in_types[k]
        if x is None:
            return None
        if k in p.shape_only:
            return [_garbage(t, _local(t, entry, bounds, r) or (), (r + self.turn) % 2 == 0) for r in range(n)]
        if entry is None:
            return [x] * n
        if isinstance(entry, Shard):
            return [_slab(x, entry.axis, a * entry.unit, b * entry.unit) for a, b in pairwise(bounds)]
        if isinstance(entry, Pieces):
            return [x.reshape(-1)[a:b].copy() for a, b in pairwise(bounds)]
        assert isinstance(entry, Partial)
        if entry.op == "sum" and x.dtype.kind == "b":
            raise _Wrong("a bool is no sum of terms")
        return _terms(x, entry.op, n, self.rng, style == "kept")

    def identities(self, row: Row, local: list[Any]) -> Arrays:
        """What a rank contributes that has nothing of a factor that is reduced: the kernel is not called."""
        out: Arrays = []
        for t, s, e in zip(self.out_types, local, row.outs, strict=True):
            if t is None:
                out.append(None)
            elif isinstance(e, Partial):
                out.append(np.full(s, _identity(e.op, np_dtype(t.dtype)), np_dtype(t.dtype)))
            elif 0 in s:
                out.append(np.empty(s, np_dtype(t.dtype)))
            else:
                raise _Wrong("an output beside one that is reduced is neither cut nor reduced, so an empty part cannot make it")
        return out

    def local_attrs(self, ins: Arrays, outs: list[Any]) -> dict[str, Any]:
        d = self.definition
        if d.local_attrs is None:
            return self.attrs
        return {**self.attrs, **d.local_attrs(dict(self.attrs), [None if v is None else v.shape for v in ins], list(outs))}

    def part(self, row: Row, p: Pattern, bounds: tuple[int, ...], r: int) -> Part | None:
        """What the kernel is told on rank r."""
        if not p.told:
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
            if isinstance(e, Shard):
                box = (*box[: e.axis], (bounds[r] * e.unit, bounds[r + 1] * e.unit), *box[e.axis + 1 :])
        return Part(prod(self.size(f, p) for f in p.counted), start, size, box, shape)

    def compare(self, j: int, entry: Entry | None, want: np.ndarray, got: Arrays, shapes: list[Any], style: str) -> None:
        """_Wrong unless what the ranks made of output j is parts of `want` that lie at `entry`."""
        name = self.out_name(j)
        for r, (g, s) in enumerate(zip(got, shapes, strict=True)):
            if g is None or g.shape != tuple(s) or g.dtype != want.dtype:
                found = "nothing" if g is None else f"{g.dtype.name}{list(g.shape)}"
                raise _Wrong(f"rank {r} should make {want.dtype.name}{list(s)} of {name} and makes {found}")
        if isinstance(entry, Partial) and entry.op == "sum" and want.dtype.kind == "b":
            raise _Wrong(f"{name} is bool, which is no sum of terms")
        tolerance = self.tolerance(want, got)
        if entry is None:
            for r, g in enumerate(got):
                if (why := _differs(g, want, tolerance)) is not None:
                    raise _Wrong(f"rank {r} has {name} wrong: {why}")
                if _differs(g, got[0], 0.0) is not None:
                    raise _Wrong(f"{name} should be the same everywhere; rank {r} differs from rank 0")
            return
        if isinstance(entry, Shard):
            joined = np.concatenate(got, entry.axis)
        elif isinstance(entry, Pieces):
            joined, want = np.concatenate(got), want.reshape(-1)
        else:
            assert isinstance(entry, Partial)
            joined = got[0]
            for g in got[1:]:
                joined = _JOIN[entry.op](joined, g)
        if (why := _differs(joined, want, tolerance)) is not None:
            raise _Wrong(f"{name} at {_entry(entry)} joins wrong: {why}")

    def tolerance(self, want: np.ndarray, got: Arrays) -> float:
        """0 where whole numbers make whole numbers: they add up exactly in any order."""
        if want.dtype.kind in "iub" or not want.size:
            return 0.0
        if self.whole_numbers and want.dtype.itemsize > 2 and not self.pattern.counted and _whole_numbers(want):
            if all(_whole_numbers(g) for g in got):
                return 0.0
        sizes = [1.0]
        for a in (want, *got):
            finite = np.abs(a[np.isfinite(a)].astype("float64"))
            sizes.append(float(finite.max(initial=0)))
        read = [v.dtype.name for k, v in enumerate(self.ins) if v is not None and k not in self.pattern.shape_only]
        return max(_ROUGH.get(name, 0.0) for name in (want.dtype.name, *read)) * max(sizes)

    def out_name(self, j: int) -> str:
        for s, c in zip(self.definition.out_slots, self.out_counts, strict=True):
            if j < c:
                return f"{s.name}[{j}]" if s.many else s.name
            j -= c
        return f"output {j}"


def _local(t: TensorType | None, entry: Entry | None, bounds: tuple[int, ...], r: int) -> tuple[int, ...] | None:
    """The shape of rank r's part."""
    if t is None:
        return None
    if isinstance(entry, Pieces):
        return (bounds[r + 1] - bounds[r],)
    if not isinstance(entry, Shard):
        return t.shape
    out = list(t.shape)
    if bounds[-1] * entry.unit != out[entry.axis]:
        raise _Wrong(f"{bounds[-1]} blocks of {entry.unit} do not make axis {entry.axis} of {t}")
    out[entry.axis] = (bounds[r + 1] - bounds[r]) * entry.unit
    return tuple(out)


def _differs(got: np.ndarray, want: np.ndarray, tolerance: float) -> str | None:
    """Where and how two arrays of one shape differ; None when they do not."""
    if got.shape != want.shape:
        return f"it has shape {list(got.shape)}, not {list(want.shape)}"
    same = got == want
    if same.all():
        return None
    if want.dtype.kind not in "iub":
        a, b = got.astype("float64"), want.astype("float64")
        same = same | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= tolerance)
        if same.all():
            return None
    at = tuple(int(v) for v in np.argwhere(~same)[0])
    return f"{got[at]} where one device has {want[at]}, at {list(at)} and {int((~same).sum()) - 1} more of {want.size}"


def _entry(e: Entry | None) -> str:
    if e is None:
        return "whole"
    if isinstance(e, Pieces):
        return "pieces"
    return str(e).partition(" over")[0]


def _show(entries: Sequence[Entry | None]) -> str:
    return ", ".join(map(_entry, entries))


# -- what no row allows -------------------------------------------------------------------------------------------------------------


def missing_rows(op: str | type[OpDef], samples: int = 3, operands: int = 4) -> list[MissingRow]:
    """Placements over {whole, shard(d), partial(sum)} that no row allows and that hold in every execution tried.

    Tried are the samples that say most, one for each way in which the op is called, with at most `operands` operands; the values of each
    operand also in other orders, so that a row does not hold by the luck of a sparse sample.
    """
    definition = opdef(op) if isinstance(op, str) else op
    if not _judged(definition) or definition.effect is Effect.RANDOM:
        return []
    found: list[MissingRow] = []
    with np.errstate(all="ignore"):
        for case in _telling(definition, samples, operands):
            found += case.search()
    return found


def _telling(definition: type[OpDef], samples: int, operands: int) -> list[_Search]:
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
    # a few elements agree by luck
    large = [case for case in found if max(t.numel for t in case.in_types if t is not None) > 5]
    return large or found


class _Search(_Case):
    """A sample on which placements are tried that no row allows."""

    @cached_property
    def variants(self) -> list[tuple[Arrays, Arrays]]:
        """Operands, and what one device makes of them: as they are, and with the values of every operand in another order."""
        shapes = [None if t is None else t.shape for t in self.out_types]
        out = [(self.ins, self.want)]
        for _ in range(8):
            ins = [None if v is None else self.rng.permutation(v.reshape(-1)).reshape(v.shape) for v in self.ins]
            try:
                out.append((ins, self.run(ins, shapes, self.attrs, None, False)))
            except Exception:
                continue
        # what is the same everywhere holds under many placements, and true or false may be all that there is
        told = [pair for pair in out if all(w is None or w.size < 2 or (w != w.flat[0]).any() for w in pair[1])]
        return (told or ([] if any(t is not None and t.dtype == "bool" for t in self.out_types) else out))[:4]

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
                says = f"{_show(ins)} -> {_show(outs)}"
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

    def allows(self, row: Row, ins: Sequence[Entry | None]) -> bool:
        for k, (want, have) in enumerate(zip(row.ins, ins, strict=True)):
            if k in self.pattern.shape_only or self.in_types[k] is None or want == have:
                continue
            if not (isinstance(want, Shard) and isinstance(have, Shard) and want.axis == have.axis and have.unit % want.unit == 0):
                return False
        return True

    def holds(self, ins: Sequence[Entry | None], blocks: int) -> tuple[Entry | None, ...] | None:
        """Where the outputs lie when the operands lie at `ins`; None when that is nowhere."""
        options: list[list[Any]] = []
        for t in self.out_types:
            cut = [a for a, d in enumerate(t.shape) if blocks and d >= blocks and d % blocks == 0] if t is not None else []
            options.append([None, *(Shard(a, "", t.shape[a] // blocks) for a in cut)] if t is not None else [None])
        for outs in product(*options):
            left: list[set[str]] | None = None
            for turn, n in enumerate((3, 2, 2, 3, 3, 2, 3, 2)):
                if blocks and n > blocks:
                    n = 2
                held = self.once(ins, outs, blocks, n, turn)
                left = None if held is None else held if left is None else [a & b for a, b in zip(left, held, strict=True)]
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
        """For each output, the ways in which what the ranks make of it is the right result; None when one has none."""
        self.turn += 1
        values, want = self.variants[turn % len(self.variants)]
        bounds = _bounds(blocks, n, "uneven", self.rng) if blocks else ()
        kept, self.ins = self.ins, values
        try:
            parts = [self.parts(k, e, n, bounds, "terms", self.pattern) for k, e in enumerate(ins)]
        finally:
            self.ins = kept
        got: list[Arrays] = []
        for r in range(n):
            local = [_local(t, e, bounds, r) for t, e in zip(self.out_types, outs, strict=True)]
            mine = [None if q is None else q[r] for q in parts]
            try:
                attrs = self.local_attrs(mine, local) if blocks else self.attrs
                made = self.infer([type_of(v) for v in mine], attrs)
                if [None if t is None else t.shape for t in made] != local:
                    return None
                got.append(self.run(mine, local, attrs, self.told(ins, outs, bounds, r), False))
            except Exception:
                return None
            if any((g is None) != (s is None) or (g is not None and g.shape != s) for g, s in zip(got[-1], local, strict=True)):
                return None
        return [self.ways_of(e, w, [g[j] for g in got]) for j, (e, w) in enumerate(zip(outs, want, strict=True))]

    def ways_of(self, entry: Entry | None, want: Any, got: Arrays) -> set[str]:
        if want is None:
            return {"whole"}
        tolerance = self.tolerance(want, got)
        if isinstance(entry, Shard):
            return {"cut"} if _differs(np.concatenate(got, entry.axis), want, tolerance) is None else set()
        out = set()
        if all(_differs(g, want, tolerance) is None for g in got):
            out.add("whole")
        for op in ("sum", "max") if want.dtype.kind != "b" else ("max",):
            joined = got[0]
            for g in got[1:]:
                joined = _JOIN[op](joined, g)
            if _differs(joined, want, tolerance) is None:
                out.add(op)
        return out

    def told(self, ins: Sequence[Entry | None], outs: Sequence[Entry | None], bounds: tuple[int, ...], r: int) -> Part | None:
        p = self.pattern
        if not p.told:
            return None
        start = size = 0
        for f in p.located:
            size = self.size(f)
            for axes, e in zip((*p.ins, *p.outs), (*ins, *outs), strict=True):
                if isinstance(e, Shard) and axes is not None and axes[e.axis] == (f,):
                    start = bounds[r] * e.unit
        return Part(prod(self.size(f) for f in p.counted), start, size)
