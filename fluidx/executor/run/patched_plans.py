"""Plans by patching: runs of one program whose feeds differ in sizes only, such as text or a cache that grows by one row for each run.

A bound plan that calls C kernels is numbers: addresses, sizes, strides and products of them. Plans for some sizes on a line are made in one
memory, which has room for the largest. If each number is a polynomial of degree 2 of the position on the line, through all of these plans,
the numbers of the other positions follow without planning. The smallest and the largest sizes are among the plans, and others in between: a
choice of a kernel by a threshold or a remainder shows as a number that does not follow, and then each size has a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir.errors import FluidxError
from ...ir.opdef import opdef
from ...ops import kernels
from ..context import RunContext
from ..plan.records import Plan, Step
from .bound_plan import BoundPlan
from .plan_memory import PlanMemory

Sizes = tuple[tuple[int, ...], ...]  # the shapes of the feeds, in their order
Planned = Callable[[Sizes], Plan]
Bound = Callable[[Plan, PlanMemory], BoundPlan]

_ENDS = (32, 128, 256)  # sizes from which on kernels process rows in another way; beyond them, powers of 4
_FEWEST = 6  # positions for which it is worth while to make the plans that all others follow from
_MOST_BYTES = 1 << 30  # of an arena: it has room for the largest sizes, though memory is taken where it is used
_MOST_LINES, _MOST_TRIES = 4, 3


def step_between(before: Sizes, now: Sizes) -> Sizes | None:
    """The smallest step by which the shapes grow from `before` to `now`: for each axis 0 or more. None if they do not grow so.

    >>> step_between(((1, 4), (6,)), ((1, 6), (6,)))
    ((0, 1), (0,))
    """
    if [*map(len, before)] != [*map(len, now)]:
        return None
    grown = [[b - a for a, b in zip(*shapes, strict=True)] for shapes in zip(before, now, strict=True)]
    whole = gcd(*[d for row in grown for d in row])
    if not whole or min(d for row in grown for d in row) < 0:
        return None
    return tuple([tuple([d // whole for d in row]) for row in grown])


def positions(start: Sizes, step: Sizes, now: Sizes) -> int | None:
    """The number k with `now` = `start` + k * `step`; None if there is none.

    >>> positions(((1, 4),), ((0, 1),), ((1, 9),))
    5
    """
    if [*map(len, start)] != [*map(len, now)]:
        return None
    flat = [(n - s, d) for shapes in zip(start, step, now, strict=True) for s, d, n in zip(*shapes, strict=True)]
    k = next((grown // d for grown, d in flat if d), 0)
    return k if all(grown == k * d for grown, d in flat) else None


def _end(size: int) -> int:
    """The size from which on other kernels may be better, above a size."""
    return next((end for end in _ENDS if size < end), 1 << (size.bit_length() + 1) // 2 * 2)


def sizes_at(start: Sizes, step: Sizes, k: int) -> Sizes:
    """`start` + k * `step`."""
    return tuple([tuple([s + k * d for s, d in zip(*shapes, strict=True)]) for shapes in zip(start, step, strict=True)])


class Polynomials(NamedTuple):
    """Whole numbers as polynomials of degree 2 of a position: `first` + k * `slope` + k * (k - 1) * `bend`."""

    first: np.ndarray
    slope: np.ndarray
    bend: np.ndarray

    @classmethod
    def through(cls, at: Sequence[int], values: Sequence[np.ndarray]) -> tuple[Polynomials, np.ndarray]:
        """The polynomials through the values at positions 0, 1 and at[2], and where they pass through all other values too.

        >>> found, right = Polynomials.through([0, 1, 3, 5], [np.array([2, 7]), np.array([5, 8]), np.array([17, 8]), np.array([37, 9])])
        >>> right.tolist(), found.at(2)[:1].tolist()
        ([True, False], [10])
        """
        first, slope, far = values[0], values[1] - values[0], at[2]
        rest = values[2] - first - far * slope
        found = cls(first, slope, rest // (far * (far - 1)))
        return found, np.logical_and.reduce([found.at(k) == v for k, v in zip(at, values, strict=True)])

    def at(self, k: int) -> np.ndarray:
        return self.first + k * self.slope + k * (k - 1) * self.bend


class _Words(NamedTuple):
    """Calls of C kernels at any position. `keeps` are arrays that they read. `nested`: the number of a word that is the address of an array
    of words, or of sizes -> these; `floats`: numbers of words that are whole numbers in floating point."""

    words: Polynomials
    nested: Mapping[int, Polynomials]
    floats: np.ndarray
    keeps: tuple[Any, ...]

    def at(self, k: int) -> tuple[bytes, tuple[Any, ...]]:
        """The words, and what they refer to."""
        made, keeps = self.words.at(k), [*self.keeps]
        if self.floats.size:
            made[self.floats] = made[self.floats].astype(np.float64).view(np.int64)
        for number, polynomials in self.nested.items():
            keeps.append(np.array(polynomials.at(k)))
            made[number] = native.address(keeps[-1])
        return made.tobytes(), tuple(keeps)


class _Array(NamedTuple):
    """An array at any position: its distance from the start of `memory`, its shape and its strides, each as first, slope and bend."""

    memory: np.ndarray
    dtype: np.dtype
    numbers: Sequence[tuple[int, int, int]]

    def at(self, k: int) -> np.ndarray:
        offset, *rest = [first + k * slope + k * (k - 1) * bend for first, slope, bend in self.numbers]
        axes = len(rest) // 2
        return np.ndarray(rest[:axes], self.dtype, self.memory, offset, rest[axes:])


class _Rebound(NamedTuple):
    """A step that NumPy computes, at any position: it is bound again, to the arrays of the position."""

    step: Step
    ctx: RunContext
    arrays: Mapping[str, _Array | np.ndarray]
    scratch: Sequence[_Array | np.ndarray]

    def at(self, k: int) -> Callable[[], Any]:
        op, definition = self.step.op, opdef(self.step.op.type)
        arrays = {n: _at(a, k) for n, a in self.arrays.items()}
        ins, outs = definition.operands(op, arrays.__getitem__, arrays.__getitem__)
        return kernels.bind(definition, np, ins, outs, op.attrs, self.ctx, None, self.step.kernel, [_at(a, k) for a in self.scratch])


def _at(a: _Array | np.ndarray, k: int) -> np.ndarray:
    return a.at(k) if isinstance(a, _Array) else a


class PatchedPlans(NamedTuple):
    """The plans for the shapes `start` + k * `step`, for k from 0 to `last`."""

    start: Sizes
    step: Sizes
    last: int
    sample: BoundPlan
    calls: Sequence[Any]
    feeds: Sequence[tuple[str, _Array]]
    fetches: Sequence[_Array | np.ndarray]

    @classmethod
    def of(cls, start: Sizes, step: Sizes, planned: Planned, bound: Bound) -> PatchedPlans | None:
        """Plans from `start` on, up to a size from which on other kernels may be better; None if there is no rule for their numbers."""
        growing = [(s, d) for shapes in zip(start, step, strict=True) for s, d in zip(*shapes, strict=True) if d]
        if min(growing)[0] < 2:
            return None  # a size of 1 may be an axis along which values repeat
        last = min((_end(s) - 1 - s) // d for s, d in growing)
        if last + 1 < _FEWEST:
            return None
        at = (0, 1, last, last // 2, last // 3 + 1)
        plans = [planned(sizes_at(start, step, k)) for k in at]
        largest = plans[at.index(last)]
        laid_out = [in_layout(p, largest) for p in plans]
        if largest.arena_bytes > _MOST_BYTES or any(p is None for p in laid_out) or not _has_room(at, plans, last):
            return None
        room = PlanMemory.of(largest)
        samples = [bound(p, room) for p in laid_out if p is not None]
        calls = _all_calls(at, samples, room)
        feeds = _all_arrays(at, [[a for _, a in s.feeds] for s in samples], room)
        fetches = _all_arrays(at, [s.fetches for s in samples], room)
        if calls is None or feeds is None or fetches is None or any(s.overlapped for s in samples):
            return None
        named: Any = zip([n for n, _ in samples[0].feeds], feeds, strict=True)
        return cls(start, step, last, samples[0], calls, tuple(named), fetches)

    def ready(self, sizes: Sizes) -> BoundPlan | None:
        """The plan for these shapes; None if they are not on the line."""
        k = positions(self.start, self.step, sizes)
        if k is None or not 0 <= k <= self.last:
            return None
        found = BoundPlan(self.sample.plan, self.sample.ctx, np)
        calls = [native.block(*c.at(k)) if isinstance(c, _Words) else c.at(k) if isinstance(c, _Rebound) else c for c in self.calls]
        found.compute = self.sample.compute.with_calls(calls)
        found.feeds = [(name, _at(a, k)) for name, a in self.feeds]
        found.fetches = [_at(a, k) for a in self.fetches]
        return found


class GrowingSizes:
    """The plans by patching of one program, feeds and fetches. They are made when sizes grow by one step, or by equal steps."""

    def __init__(self, planned: Planned, bound: Bound):
        self.planned, self.bound = planned, bound
        self._lines: list[PatchedPlans] = []
        self._before: list[Sizes] = []
        self._tries = _MOST_TRIES

    def ready(self, sizes: Sizes) -> BoundPlan | None:
        """The plan for feeds of these shapes; None if they need a plan of their own."""
        for line in self._lines:
            if (found := line.ready(sizes)) is not None:
                return found
        step = self._step(sizes)
        self._before = [*self._before[-1:], sizes]
        if step is None or not self._tries:
            return None
        made = self._made(sizes, step)
        if made is None:
            self._tries -= 1
            return None
        self._lines = [made, *self._lines[: _MOST_LINES - 1]]
        return made.ready(sizes)

    def _step(self, sizes: Sizes) -> Sizes | None:
        """The step by which sizes grow, if they grow by one of it, or by the same step as before."""
        step = step_between(self._before[-1], sizes) if self._before else None
        if step is None or positions(self._before[-1], step, sizes) == 1:
            return step
        return step if len(self._before) > 1 and step == step_between(*self._before) else None

    def _made(self, sizes: Sizes, step: Sizes) -> PatchedPlans | None:
        try:
            return PatchedPlans.of(sizes, step, self.planned, self.bound)
        except (FluidxError, MemoryError):  # larger sizes may not fit the program, or the machine
            return None


def in_layout(plan: Plan, largest: Plan) -> Plan | None:
    """The plan with the offsets of the largest one; None if it has other steps or buffers, or some that are larger."""
    pairs = [*zip(plan.buffers, largest.buffers, strict=False)]
    same = len(plan.buffers) == len(largest.buffers) and len(plan.steps) == len(largest.steps)
    if not same or plan.bodies or plan.host_arena_bytes or any(not _fits(a, b) for a, b in pairs):
        return None
    steps = []
    for step, wide in zip(plan.steps, largest.steps, strict=True):
        if [s.of for s in step.scratch] != [s.of for s in wide.scratch] or [*step.writes] != [*wide.writes]:
            return None
        if any(s.type.nbytes > w.type.nbytes for s, w in zip(step.scratch, wide.scratch, strict=True)):
            return None
        scratch = [s._replace(offset=w.offset) for s, w in zip(step.scratch, wide.scratch, strict=True)]
        steps.append(step._replace(scratch=tuple(scratch)))
    buffers = tuple([a._replace(offset=b.offset) for a, b in pairs])
    return plan._replace(steps=tuple(steps), buffers=buffers, arena_bytes=largest.arena_bytes)


def _fits(a: Any, b: Any) -> bool:
    return (a.kind, a.name, a.start, a.stop, a.on_host) == (b.kind, b.name, b.start, b.stop, b.on_host) and a.nbytes <= b.nbytes


def _has_room(at: Sequence[int], plans: Sequence[Plan], last: int) -> bool:
    """Are buffers and scratch at most as large as in the plan for position `last` at all positions before it, those between the plans too?

    Sizes that bend upwards are largest at the ends, which `in_layout` compares; others must still grow at the last position.
    """
    sizes = [np.array([*(b.nbytes for b in p.buffers), *(one.type.nbytes for step in p.steps for one in step.scratch)]) for p in plans]
    polynomials, right = Polynomials.through(at, sizes)
    return bool(right.all() and ((polynomials.bend >= 0) | (polynomials.slope + 2 * (last - 1) * polynomials.bend >= 0)).all())


def _all_arrays(at: Sequence[int], found: Sequence[Sequence[np.ndarray]], room: PlanMemory) -> list[_Array | np.ndarray] | None:
    """The arrays of all positions; one outside of the room must be the same in all samples."""
    made: list[_Array | np.ndarray] = []
    for some in zip(*found, strict=True):
        first = some[0]
        memory = next((m for m in (room.arena, *room.feeds.values()) if _inside(native.address(first), m)), None)
        if memory is None:
            if any(native.address(a) != native.address(first) or a.shape != first.shape for a in some):
                return None
            made.append(first)
            continue
        numbers = [np.array([native.address(a) - native.address(memory), *a.shape, *a.strides]) for a in some]
        polynomials, right = Polynomials.through(at, numbers)
        if not right.all():
            return None
        made.append(_Array(memory, first.dtype, [*zip(*[v.tolist() for v in polynomials], strict=True)]))
    return made


def _inside(address: int, memory: np.ndarray) -> bool:
    return 0 <= address - native.address(memory) < max(memory.nbytes, 1)


# -- calls ------------------------------------------------------------------------------------------------------------------------------


def _all_calls(at: Sequence[int], samples: Sequence[BoundPlan], room: PlanMemory) -> list[Any] | None:
    """The calls at all positions, in the order in which a run makes them; None if a number does not follow."""
    groups = [s.compute.groups() for s in samples]
    if len({*map(len, groups)}) > 1:
        return None
    made: list[Any] = []
    for some in zip(*groups, strict=True):
        kinds = {isinstance(step, kernels.NativeStep) for group in some for _, step, _ in group}
        if len(kinds) > 1:
            return None
        if kinds == {True}:
            found = _all_words(at, [[call for _, step, _ in group for call in step.calls] for group in some])
            if found is None:
                return None
            made.append(found)
        else:
            for same in zip(*some, strict=True):
                numbers = [number for _, _, number in same]
                call = same[0][1] if _never_changes(samples, numbers) else _rebound(at, samples, numbers, room)
                if call is None:
                    return None
                made.append(call)
    return made


def _rebound(at: Sequence[int], samples: Sequence[BoundPlan], numbers: Sequence[int], room: PlanMemory) -> _Rebound | None:
    """A step that NumPy computes on arrays of other sizes in each sample; None if a number of its arrays does not follow."""
    steps = [s.plan.steps[number] for s, number in zip(samples, numbers, strict=True) if number >= 0]
    first = steps[0] if len(steps) == len(samples) else None
    if first is None or first.kernel not in ("numpy", "any") or any(s.here is not None or s.ops != first.ops for s in steps):
        return None
    names = [*dict.fromkeys((*first.reads, *first.writes))]
    if any(one.of for step in steps for one in step.scratch) or any(n not in s.arrays for s in samples for n in names):
        return None
    arrays = _all_arrays(at, [[s.arrays[n] for n in names] for s in samples], room)
    scratch = _all_arrays(at, [[room.scratch(one) for one in step.scratch] for step in steps], room)
    if arrays is None or scratch is None:
        return None
    return _Rebound(first, samples[0].ctx, dict(zip(names, arrays, strict=True)), scratch)


def _never_changes(samples: Sequence[BoundPlan], numbers: Sequence[int]) -> bool:
    """Is a step that NumPy computes the same in all samples: does it access the same memory?"""
    steps = [s.plan.steps[number] for s, number in zip(samples, numbers, strict=True) if number >= 0]
    if len(steps) < len(samples) or any(step.here is not None or step.ops != steps[0].ops for step in steps):
        return False
    places = [[_place(s.arrays.get(n)) for n in (*step.reads, *step.writes)] for s, step in zip(samples, steps, strict=True)]
    return all(p == places[0] for p in places) and all(step.scratch == steps[0].scratch for step in steps)


def _place(a: np.ndarray | None) -> tuple[Any, ...]:
    return () if a is None else (native.address(a), a.dtype, a.shape, a.strides)


def _all_words(at: Sequence[int], samples: Sequence[Sequence[native.NativeCall]]) -> _Words | None:
    """The words of calls at all positions; None if a word does not follow."""
    first = samples[0]
    if any([(c.fn, len(c.args)) for c in calls] != [(c.fn, len(c.args)) for c in first] for calls in samples):
        return None
    values = [np.frombuffer(native.packed(calls), np.int64) for calls in samples]
    floats = _whole_floats(samples)
    for v in values:
        v[floats] = v[floats].view(np.float64).astype(np.int64)
    words, right = Polynomials.through(at, values)
    nested: dict[int, Polynomials] = {}
    for number in np.flatnonzero(~right).tolist():
        arrays = [_array_at(calls, int(v[number])) for calls, v in zip(samples, values, strict=True)]
        if not (found := _nested(at, arrays)):
            return None
        words.slope[number] = words.bend[number] = 0
        if isinstance(found, Polynomials):
            nested[number] = found
    return _Words(words, nested, floats, tuple([call.keeps for call in first]))


def _whole_floats(samples: Sequence[Sequence[native.NativeCall]]) -> np.ndarray:
    """The numbers of the words that are floating-point numbers which differ between samples, but are whole: the divisors of means."""
    found, at = [], 0
    for some in zip(*samples, strict=True):
        for k, values in enumerate(zip(*[call.args for call in some], strict=True)):
            if isinstance(values[0], float) and len({*values}) > 1 and all(v.is_integer() and abs(v) < 2**53 for v in values):
                found.append(at + 2 + k)
        at += 2 + len(some[0].args)
    return np.array(found, np.int64)


def _array_at(calls: Sequence[native.NativeCall], address: int) -> np.ndarray | None:
    """The array of a call's own that begins at an address: not one in the plan's memory."""
    return next((a for call in calls for a in call.keeps if isinstance(a, np.ndarray) and native.address(a) == address), None)


def _nested(at: Sequence[int], arrays: Sequence[np.ndarray | None]) -> Polynomials | bool:
    """The words of arrays of words at all positions; True if the arrays are equal; False if neither."""
    found = [a for a in arrays if a is not None]
    first = found[0] if found else None
    if first is None or len(found) < len(arrays) or any((a.dtype, a.shape) != (first.dtype, first.shape) for a in found):
        return False
    if all(a.tobytes() == first.tobytes() for a in found):
        return True
    if first.dtype != np.int64 or not first.flags.c_contiguous:
        return False
    polynomials, right = Polynomials.through(at, found)
    return polynomials if bool(right.all()) else False
