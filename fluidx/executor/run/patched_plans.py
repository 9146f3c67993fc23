"""Plans by patching: runs of one program whose feeds differ in sizes only, such as text or a cache that grows by one row for each run.

A bound plan that calls C kernels is numbers: addresses, sizes, strides and products of them. Sizes are start + k * step, and k is the
position. Plans for some positions are made in one memory, which has room for the largest. If each number is a polynomial of degree 2 of the
position, through all of these plans, the numbers of the other positions are computed without planning. Three plans are made, two more if a
number is not linear. The smallest and the largest sizes are among them: a choice of a kernel by a threshold or a remainder shows as a
number that is no such polynomial, and then each size has a plan of its own.

Feeds are read where they are, and fetched values are written into new arrays that the user gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir.errors import FluidxError
from ..plan.allocation import ALIGN, put
from ..plan.records import Plan
from . import observers
from .bound_plan import BoundPlan
from .patched_calls import PatchedArray, PatchedWords, Polynomials, ReboundStep, Samples, all_arrays, all_calls, array_at
from .plan_memory import PlanMemory, fetched_buffers, with_fetches_apart

Sizes = tuple[tuple[int, ...], ...]  # the shapes of the feeds, in their order
Planned = Callable[[Sizes], Plan]
Bound = Callable[[Plan, PlanMemory], BoundPlan]
Expected = Callable[[Sizes], Sizes | None]  # the step by which sizes will grow

_ENDS = (32, 128, 256)  # sizes from which on kernels process rows in another way; beyond them, powers of 4
_FEWEST = 6  # positions for which it is worth while to make the plans that all others follow from
_MOST_BYTES = 1 << 30  # of an arena: it has room for the largest sizes, though memory is taken where it is used
_MOST_LINES, _MOST_TRIES = 6, 2
_LEAST_MOVED = 4096  # bytes of a value; smaller ones are copied


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


def _begin(size: int) -> int:
    """The smallest size that has the same end."""
    return max([2, *[end for end in _ENDS if end <= size]]) if size < _ENDS[-1] else 1 << (size.bit_length() - 1) // 2 * 2


def sizes_at(start: Sizes, step: Sizes, k: int) -> Sizes:
    """`start` + k * `step`."""
    return tuple([tuple([s + k * d for s, d in zip(*shapes, strict=True)]) for shapes in zip(start, step, strict=True)])


def _growing(start: Sizes, step: Sizes) -> list[tuple[int, int]]:
    """The sizes that grow, with their steps."""
    return [(s, d) for shapes in zip(start, step, strict=True) for s, d in zip(*shapes, strict=True) if d]


def last_position(start: Sizes, step: Sizes) -> int:
    """The last position before a size above which other kernels may be better; 0 if there are too few positions.

    >>> last_position(((1, 40),), ((0, 1),)), last_position(((1, 30),), ((0, 1),))
    (87, 0)
    """
    growing = _growing(start, step)
    if min(growing)[0] < 2:
        return 0  # a size of 1 may be an axis along which values repeat
    last = min((_end(s) - 1 - s) // d for s, d in growing)
    return last if last + 1 >= _FEWEST else 0


def first_sizes(sizes: Sizes, step: Sizes) -> Sizes:
    """The first of the sizes that grow as `sizes` do and for which kernels are the same.

    >>> first_sizes(((1, 40), (1, 41)), ((0, 1), (0, 1)))
    ((1, 32), (1, 33))
    """
    return sizes_at(sizes, step, -min((s - _begin(s)) // d for s, d in _growing(sizes, step)))


class _Alike(NamedTuple):
    """The numbers of feeds that have one shape at each position."""

    start: tuple[int, ...]
    step: tuple[int, ...]
    feeds: tuple[int, ...]

    def has(self, k: int, sizes: Sizes) -> bool:
        """Are these the sizes of the feeds at position k?"""
        shape = tuple([s + k * d for s, d in zip(self.start, self.step, strict=True)])
        return all(sizes[n] == shape for n in self.feeds)


def _alike(start: Sizes, step: Sizes) -> list[_Alike]:
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for n, shapes in enumerate(zip(start, step, strict=True)):
        found.setdefault(shapes, []).append(n)
    return [_Alike(shape, by, tuple(feeds)) for (shape, by), feeds in found.items()]


class PatchedPlans(NamedTuple):
    """The plans for the shapes `start` + k * `step`, for k from 0 to `last`. `by` has the feed, the axis and the step of one size that
    grows. `moves` are the numbers of the memories that a run has elsewhere: of feeds, and of the values that it hands out. NumPy accesses
    those that are `viewed`. `addresses` are those of the memories."""

    start: Sizes
    step: Sizes
    by: tuple[int, int, int]
    alike: Sequence[_Alike]
    last: int
    sample: BoundPlan
    memories: Sequence[np.ndarray]
    addresses: Sequence[int]
    moves: frozenset[int]
    viewed: frozenset[int]
    calls: Sequence[Any]
    feeds: Sequence[tuple[str, PatchedArray | np.ndarray]]
    fetches: Sequence[PatchedArray | np.ndarray]

    @classmethod
    def of(cls, start: Sizes, step: Sizes, planned: Planned, bound: Bound) -> PatchedPlans | None:
        """Plans from `start` on, up to a size from which on other kernels may be better; None if there is no rule for their numbers."""
        if not (last := last_position(start, step)):
            return None
        at = [0, 1, last]
        plans = [planned(sizes_at(start, step, k)) for k in at]
        largest = plans[-1]
        if largest.arena_bytes > _MOST_BYTES:
            return None
        wide = with_fetches_apart(largest)
        room = PlanMemory.of(wide, largest.arena_bytes)
        bounds: list[BoundPlan] = []
        for more in ((), (last // 2, last // 3 + 1)):
            at += more
            plans += [planned(sizes_at(start, step, k)) for k in more]
            laid_out = [in_layout(p, wide) for p in plans[len(bounds) :]]
            if any(p is None for p in laid_out) or not _has_room(at, plans, last):
                return None
            bounds += [bound(p, room) for p in laid_out if p is not None]
            samples = Samples(at, bounds, room)
            found = cls._through(samples, start, step, last)
            if found is None or not samples.bent:
                return found
        return found

    @classmethod
    def _through(cls, samples: Samples, start: Sizes, step: Sizes, last: int) -> PatchedPlans | None:
        """The plans whose numbers follow from those of the samples."""
        plans = samples.plans
        found = all_calls(samples)
        feeds = all_arrays(samples, [[a for _, a in s.feeds] for s in plans])
        fetches = all_arrays(samples, [s.fetches for s in plans])
        if found is None or feeds is None or fetches is None or any(s.overlapped for s in plans):
            return None
        named: Any = [*zip([n for n, _ in plans[0].feeds], feeds, strict=True)]
        numpys = {a.memory for c in found.calls if isinstance(c, ReboundStep) for a in c.arrays.values() if isinstance(a, PatchedArray)}
        moves = frozenset(range(1, len(samples.memories))) - found.pinned - _stay(samples, fetches)
        by = next((n, axis, d) for n, shape in enumerate(step) for axis, d in enumerate(shape) if d)
        memories, addresses = samples.memories, samples.starts.tolist()
        arrays: Any = (found.calls, named, fetches)
        return cls(start, step, by, _alike(start, step), last, plans[0], memories, addresses, moves, frozenset(numpys), *arrays)

    def ready(self, sizes: Sizes) -> PatchedPlan | None:
        """The plan for these shapes; None if no position has them."""
        if len(sizes) != len(self.start):
            return None
        n, axis, d = self.by
        k = (sizes[n][axis] - self.start[n][axis]) // d if axis < len(sizes[n]) else -1
        return PatchedPlan(self, k) if 0 <= k <= self.last and all(one.has(k, sizes) for one in self.alike) else None


class PatchedPlan(BoundPlan):
    """The plan at position `k`."""

    def __init__(self, line: PatchedPlans, k: int):
        super().__init__(line.sample.plan, line.sample.ctx, np)
        self.line, self.k = line, k

    def run(self, feed: Mapping[str, Any], after: observers.After | None = None) -> list[Any]:
        """Read the feeds where they are, make every call, hand out the arrays of fetched values. What cannot be moved is copied."""
        line, k = self.line, self.k
        memories = [*line.memories]
        by = [0] * len(memories)
        for name, a in line.feeds:
            value = feed[name]
            if isinstance(a, PatchedArray) and a.memory in line.moves and value.flags.c_contiguous and value.flags.aligned:
                by[a.memory] = native.address(value) - line.addresses[a.memory]
                if a.memory in line.viewed:
                    memories[a.memory] = value.reshape(-1).view(np.uint8)
            else:
                put(array_at(a, k, memories), value)
        found = [self._new(f, memories, by) if isinstance(f, PatchedArray) and f.memory in line.moves else f for f in line.fetches]
        moved = np.array(by, np.int64)
        self.compute = line.sample.compute.with_calls([*self._calls(memories, moved)])
        self.walk(after)
        return [f if isinstance(f, np.ndarray) and f is not g else array_at(g, k, memories).copy() for f, g in zip(found, line.fetches)]

    def _calls(self, memories: Sequence[np.ndarray], by: np.ndarray) -> Iterator[Any]:
        for call in self.line.calls:
            if isinstance(call, PatchedWords):
                yield native.block(*call.at(self.k, by))
            else:
                yield call.at(self.k, memories) if isinstance(call, ReboundStep) else call

    def _new(self, a: PatchedArray, memories: list[np.ndarray], by: list[int]) -> PatchedArray | np.ndarray:
        """A new array for a fetched value, in the place of its memory; the value itself if an array was handed out for the memory."""
        if by[a.memory]:
            return a
        shape = a.shape(self.k)
        raw = np.empty(prod(shape) * a.dtype.itemsize + ALIGN, np.uint8)
        address = native.address(raw)
        begin = -address % ALIGN
        by[a.memory] = address + begin - self.line.addresses[a.memory]
        memories[a.memory] = raw[begin:]
        return np.ndarray(shape, a.dtype, raw, begin)


def _stay(samples: Samples, fetches: Sequence[PatchedArray | np.ndarray]) -> set[int]:
    """The numbers of memories that a run cannot have elsewhere: small ones, feeds that are written or fetched, and fetched values that are
    not all of their memory in each sample."""
    first, whole = samples.plans[0], [fetched_buffers(s.plan).keys() for s in samples.plans]
    numbered = [*enumerate(samples.memories)]
    apart = [*samples.room.fetched]
    found = {m for m, memory in numbered if memory.nbytes < _LEAST_MOVED}
    found |= {1 + k for k, n in enumerate(apart) if any(n not in names for names in whole)}
    written = {n for step in first.plan.steps if step.kernel not in ("view", "joined") for n in step.writes}
    feeds = {1 + len(apart) + k for k in range(len(samples.room.feeds))}
    reached = {samples.memory(first.arrays[n]) for n in written if n in first.arrays}
    reached |= {f.memory for f in fetches if isinstance(f, PatchedArray)}
    return found | reached & feeds


class GrowingSizes:
    """The plans by patching of one program, feeds and fetches. They are made when sizes grow by one step, or by equal steps, or are
    expected to."""

    def __init__(self, planned: Planned, bound: Bound, expected: Expected = lambda sizes: None):
        self.planned, self.bound, self.expected = planned, bound, expected
        self._lines: list[PatchedPlans] = []
        self._before: list[Sizes] = []
        self._tries = _MOST_TRIES

    def known(self, sizes: Sizes) -> PatchedPlan | None:
        """The plan for feeds of these shapes, if plans for such shapes were made."""
        for line in self._lines:
            if (found := line.ready(sizes)) is not None:
                self._before = [sizes]
                return found
        return None

    def ready(self, sizes: Sizes) -> PatchedPlan | None:
        """The plan for feeds of these shapes; None if they need a plan of their own."""
        if (found := self.known(sizes)) is not None:
            return found
        step = self._step(sizes) or self.expected(sizes)
        self._before = [*self._before[-1:], sizes]
        if step is None or not self._tries:
            return None
        start = first_sizes(sizes, step) if self._tries == _MOST_TRIES else sizes
        if not last_position(start, step):
            return None
        made = self._made(start, step)
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
