"""A sample of an op with its access pattern: the results of one device, and runs of the kernel on local values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any
from zlib import crc32

import numpy as np

from ...executor.context import RunContext
from ...ir import ANY, Effect, OpDef, Sample, TensorType, np_dtype
from ...ir.parts import Part
from ...ir.pattern import Pattern
from ...ir.types import Entry
from ...ops import kernels
from ..reference import type_of
from .values import Arrays, RowFailure, are_whole, axis_slice, garbage, local_shape, terms_of

# sums may be computed in another order; relative to the largest value or term
_ROUGH = {"float64": 1e-9, "float32": 3e-5, "float16": 3e-2, "bfloat16": 2e-1}
_STEP = 3


def has_rows(definition: type[OpDef]) -> bool:
    """False for ops that communicate (they declare `move`), run on the host, run sub-blocks, or have result sizes that depend on values."""
    if definition.control.sized_by_values:
        return False
    return definition.effect in (Effect.PURE, Effect.RANDOM) and definition.control.run_reference is None


class Case:
    """A sample with its pattern and its results on one device."""

    def __init__(self, definition: type[OpDef], number: int, sample: Sample, wide: bool, absent: int = -1):
        self.definition, self.number, self.sample, self.absent = definition, number, sample, absent
        self.attrs = definition.complete_attrs(sample.attrs)
        args = [*sample.args, *[None] * (len(definition.in_slots) - len(sample.args))]
        self.counts = [len(a) if s.many else 1 for s, a in zip(definition.in_slots, args, strict=True)]
        self.ins: Arrays = [v for s, a in zip(definition.in_slots, args, strict=True) for v in (a if s.many else [a])]
        self.widened = False
        self.brief = False  # one execution for each row, because another case of this sample has all of them
        if wide:
            self.widened = any(v is not None and type_of(v).is_float and v.dtype.itemsize < 8 for v in self.ins)
            self.ins = [v.astype("float64") if v is not None and type_of(v).is_float else v for v in self.ins]
        self.in_types = [type_of(v) for v in self.ins]
        self.rng = np.random.default_rng(crc32(f"{definition.name} {number} {wide} {absent}".encode()))
        self.bind_takes_part = definition.native.bind is not None and "part" in inspect.signature(definition.native.bind).parameters
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
        """Equal for cases with equal operands and attributes."""
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
        """True if the op takes operands of these dtypes."""
        try:
            return all(w is not None or k == self.absent for k, w in enumerate(self.want))
        except Exception:
            return False

    @cached_property
    def whole_numbers(self) -> bool:
        return all(v is None or k in self.pattern.shape_only or are_whole(v) for k, v in enumerate(self.ins))

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
        """Run the kernel (`bound`: the step that `bind` returns) with outputs of these shapes."""
        d = self.definition
        made: Arrays = [
            None if t is None else np.full(shape, 77, np_dtype(t.dtype)) for t, shape in zip(self.out_types, shapes, strict=True)
        ]
        results = self.arrange(made, True)
        with np.errstate(all="ignore"):
            args, outs = kernels.wide(d, np, self.arrange(ins), results)
            flat = self._flat(kernels.narrow(np, results, self._run(args, outs, attrs, part, bound)))
        return [None if t is None or v is None else np.asarray(v) for v, t in zip(flat, self.out_types, strict=True)]

    def _run(self, args: list[Any], outs: list[Any], attrs: dict[str, Any], part: Part | None, bound: bool) -> list[Any]:
        d, ctx = self.definition, RunContext()
        ctx.step = _STEP
        if d.native.bind is not None and (bound or (d.kernel is None and d.storage.view is None)):
            step = d.native.bind(args, outs, attrs, ctx, **({"part": part} if self.bind_takes_part else {}))
            if step is not None:
                step()
                return outs
        if d.kernel is None:
            if d.storage.view is None:
                return outs
            return [np.array(d.storage.view(args[0], **attrs))]
        extra: dict[str, Any] = {"ctx": ctx} if d.takes_ctx else {}
        if d.takes_part:
            extra["part"] = part
        if d.takes_out:
            d.kernel(np, *args, out=outs[0] if len(outs) == 1 else tuple(outs), **attrs, **extra)
            return outs
        got = d.kernel(np, *args, **attrs, **extra)
        return [got] if len(d.out_slots) == 1 and not isinstance(got, tuple) else list(got)

    def _flat(self, results: list[Any]) -> list[Any]:
        return [v for s, r in zip(self.definition.out_slots, results, strict=True) for v in (r if s.many else [r])]

    def local_attrs(self, ins: Arrays, outs: list[Any]) -> dict[str, Any]:
        d = self.definition
        if d.comm.local_attrs is None:
            return self.attrs
        return {**self.attrs, **d.comm.local_attrs(dict(self.attrs), [None if v is None else v.shape for v in ins], list(outs))}

    def parts(self, k: int, entry: Entry | None, n: int, bounds: tuple[int, ...], style: str, p: Pattern) -> list[Any] | None:
        """The local value of operand k on every rank."""
        x, t = self.ins[k], self.in_types[k]
        if x is None:
            return None
        if k in p.shape_only:
            return [garbage(t, local_shape(t, entry, bounds, r) or (), (r + self.turn) % 2 == 0) for r in range(n)]
        if entry is None:
            return [x] * n
        if entry.axis is not None:
            return [axis_slice(x, entry.axis, a * entry.unit, b * entry.unit) for a, b in pairwise(bounds)]
        if entry.bounds is not None:
            return [x.reshape(-1)[a:b].copy() for a, b in pairwise(bounds)]
        assert entry.op
        if entry.op == "sum" and x.dtype.kind == "b":
            raise RowFailure("a bool cannot be a sum of terms")
        return terms_of(x, entry.op, n, self.rng, style == "kept")

    def tolerance(self, want: np.ndarray, got: Arrays) -> float:
        """The allowed difference; 0 if operands and results are whole numbers, whose sums are exact in any order."""
        if want.dtype.kind in "iub" or not want.size:
            return 0.0
        if self.whole_numbers and want.dtype.itemsize > 2 and not self.pattern.counted and are_whole(want):
            if all(are_whole(g) for g in got):
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
