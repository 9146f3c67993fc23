"""The calls and arrays of plans for sizes that grow in equal steps: each number is computed from the same number in a few sample plans.

The sizes are start + k * step, and k is the position. A number follows if a polynomial of the position gives it in all samples. Some
memory changes from run to run: the arrays that a user feeds, and those that a run returns. The distance of such memory from that in which
the samples were bound is added to addresses in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import native
from ...ir.opdef import opdef
from ...ops import kernels
from ..context import RunContext
from ..plan.records import Step
from .bound_plan import BoundPlan
from .plan_memory import PlanMemory

_ADDRESS = 1 << 40  # numbers from here on may be addresses


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

    def straight(self) -> _Line | Polynomials:
        """The same, without bends if there are none."""
        return self if self.bend.any() else _Line(self.first, self.slope)


class _Line(NamedTuple):
    """Polynomials of degree 1."""

    first: np.ndarray
    slope: np.ndarray

    def at(self, k: int) -> np.ndarray:
        made = self.slope * k
        made += self.first
        return made


class Samples:
    """Bound plans at some positions, and the memories in which they are bound: the arena, the fetched values and the feeds. `bent`: is a
    number of degree 2?"""

    def __init__(self, at: Sequence[int], plans: Sequence[BoundPlan], room: PlanMemory):
        self.at, self.plans, self.room = at, plans, room
        self.memories = [room.arena[: room.own_bytes], *room.fetched.values(), *room.feeds.values()]
        self.bent = False
        starts = np.array([native.address(m) for m in self.memories])
        self._order = np.argsort(starts, kind="stable")
        self._starts = starts[self._order]
        self._stops = self._starts + [self.memories[k].nbytes for k in self._order]
        self.starts = starts

    def through(self, values: Sequence[np.ndarray]) -> tuple[Polynomials, np.ndarray]:
        """`Polynomials.through`, with zeros in place of polynomials that miss a sample."""
        found, right = Polynomials.through(self.at, values)
        wrong = ~right
        found.slope[wrong] = found.bend[wrong] = 0
        self.bent = self.bent or bool(found.bend.any())
        return found, right

    def memory_of(self, addresses: np.ndarray) -> np.ndarray:
        """The numbers of the memories in which addresses lie; -1 for other numbers."""
        place = np.searchsorted(self._starts, addresses, "right") - 1
        return np.where((place >= 0) & (addresses < self._stops[place]), self._order[place], -1)

    def memory(self, a: np.ndarray) -> int:
        """The number of the memory of an array; -1 if it is elsewhere."""
        return int(self.memory_of(np.array([native.address(a)]))[0])


class _Moved(NamedTuple):
    """Words that are addresses in some memory: their numbers, and those of the memories."""

    words: np.ndarray
    memories: np.ndarray

    @classmethod
    def of(cls, memories: np.ndarray) -> _Moved:
        found = np.flatnonzero(memories > 0)  # the arena stays where it is
        return cls(found, memories[found])

    def move(self, words: np.ndarray, by: np.ndarray) -> None:
        words[self.words] += by[self.memories]


class PatchedWords(NamedTuple):
    """Calls of C kernels at any position. `keeps` are arrays that they read. `nested`: the number of a word that is the address of an array
    of words, or of sizes -> these; `floats`: numbers of words that are whole numbers in floating point."""

    words: Polynomials | _Line
    moved: _Moved
    nested: Mapping[int, tuple[Polynomials | _Line, _Moved]]
    floats: np.ndarray
    keeps: tuple[Any, ...]

    def at(self, k: int, by: np.ndarray) -> tuple[bytes, tuple[Any, ...]]:
        """The words, and what they refer to. `by` is the distance of each memory from that of the samples."""
        made, keeps = self.words.at(k), [*self.keeps]
        self.moved.move(made, by)
        if self.floats.size:
            made[self.floats] = made[self.floats].astype(np.float64).view(np.int64)
        for number, (polynomials, moved) in self.nested.items():
            inner = polynomials.at(k)
            moved.move(inner, by)
            keeps.append(inner)
            made[number] = native.address(inner)
        return made.tobytes(), tuple(keeps)


class PatchedArray(NamedTuple):
    """An array at any position: its distance from the start of a memory, its shape and its strides, each as first, slope and bend."""

    memory: int
    dtype: np.dtype
    numbers: Sequence[tuple[int, int, int]]

    def shape(self, k: int) -> list[int]:
        return [first + k * slope + k * (k - 1) * bend for first, slope, bend in self.numbers[1 : 1 + len(self.numbers) // 2]]

    def at(self, k: int, memories: Sequence[np.ndarray]) -> np.ndarray:
        offset, *rest = [first + k * slope + k * (k - 1) * bend for first, slope, bend in self.numbers]
        axes = len(rest) // 2
        return np.ndarray(rest[:axes], self.dtype, memories[self.memory], offset, rest[axes:])


class ReboundStep(NamedTuple):
    """A step that NumPy computes, at any position: it is bound again, to the arrays of the position."""

    step: Step
    ctx: RunContext
    arrays: Mapping[str, PatchedArray | np.ndarray]
    scratch: Sequence[PatchedArray | np.ndarray]

    def at(self, k: int, memories: Sequence[np.ndarray]) -> Callable[[], Any]:
        op, definition = self.step.op, opdef(self.step.op.type)
        arrays = {n: array_at(a, k, memories) for n, a in self.arrays.items()}
        ins, outs = definition.operands(op, arrays.__getitem__, arrays.__getitem__)
        scratch = [array_at(a, k, memories) for a in self.scratch]
        return kernels.bind(definition, np, ins, outs, op.attrs, self.ctx, None, self.step.kernel, scratch)


def array_at(a: PatchedArray | np.ndarray, k: int, memories: Sequence[np.ndarray]) -> np.ndarray:
    return a.at(k, memories) if isinstance(a, PatchedArray) else a


# -- from samples -----------------------------------------------------------------------------------------------------------------------


def all_arrays(samples: Samples, found: Sequence[Sequence[np.ndarray]]) -> list[PatchedArray | np.ndarray] | None:
    """The arrays of all positions; one outside of the memories must be the same in all samples."""
    made: list[PatchedArray | np.ndarray] = []
    for some in zip(*found, strict=True):
        first, memory = some[0], samples.memory(some[0])
        if memory < 0:
            if any(native.address(a) != native.address(first) or a.shape != first.shape for a in some):
                return None
            made.append(first)
            continue
        start = int(samples.starts[memory])
        polynomials, right = samples.through([np.array([native.address(a) - start, *a.shape, *a.strides]) for a in some])
        if not right.all():
            return None
        made.append(PatchedArray(memory, first.dtype, [*zip(*[v.tolist() for v in polynomials], strict=True)]))
    return made


class PatchedCalls(NamedTuple):
    """Calls at all positions, in the order in which a run makes them. `pinned` are numbers of memories that must stay where they are."""

    calls: Sequence[Any]
    pinned: frozenset[int]


def all_calls(samples: Samples) -> PatchedCalls | None:
    """The calls at all positions; None if a number does not follow."""
    groups = [s.compute.groups() for s in samples.plans]
    if len({*map(len, groups)}) > 1:
        return None
    made: list[Any] = []
    pinned: set[int] = set()
    for some in zip(*groups, strict=True):
        kinds = {isinstance(step, kernels.NativeStep) for group in some for _, step, _ in group}
        if len(kinds) > 1:
            return None
        if kinds == {True}:
            found = _all_words(samples, [[call for _, step, _ in group for call in step.calls] for group in some], pinned)
            if found is None:
                return None
            made.append(found)
        else:
            for same in zip(*some, strict=True):
                numbers = [number for _, _, number in same]
                constant = _never_changes(samples.plans, numbers)
                call = same[0][1] if constant else _rebound(samples, numbers)
                if call is None:
                    return None
                if constant:
                    pinned |= _memories_of(samples, numbers[0])
                made.append(call)
    return PatchedCalls(made, frozenset(pinned))


def _rebound(samples: Samples, numbers: Sequence[int]) -> ReboundStep | None:
    """A step that NumPy computes on arrays of other sizes in each sample; None if a number of its arrays does not follow."""
    plans = samples.plans
    steps = [s.plan.steps[number] for s, number in zip(plans, numbers, strict=True) if number >= 0]
    first = steps[0] if len(steps) == len(plans) else None
    if first is None or first.kernel not in ("numpy", "any") or any(s.here is not None or s.ops != first.ops for s in steps):
        return None
    names = [*dict.fromkeys((*first.reads, *first.writes))]
    if any(one.of for step in steps for one in step.scratch) or any(n not in s.arrays for s in plans for n in names):
        return None
    arrays = all_arrays(samples, [[s.arrays[n] for n in names] for s in plans])
    scratch = all_arrays(samples, [[samples.room.scratch(one) for one in step.scratch] for step in steps])
    if arrays is None or scratch is None:
        return None
    return ReboundStep(first, plans[0].ctx, dict(zip(names, arrays, strict=True)), scratch)


def _never_changes(samples: Sequence[BoundPlan], numbers: Sequence[int]) -> bool:
    """Is a step that NumPy computes the same in all samples: does it access the same memory?"""
    steps = [s.plan.steps[number] for s, number in zip(samples, numbers, strict=True) if number >= 0]
    if len(steps) < len(samples) or any(step.here is not None or step.ops != steps[0].ops for step in steps):
        return False
    places = [[_place(s.arrays.get(n)) for n in (*step.reads, *step.writes)] for s, step in zip(samples, steps, strict=True)]
    return all(p == places[0] for p in places) and all(step.scratch == steps[0].scratch for step in steps)


def _place(a: np.ndarray | None) -> tuple[Any, ...]:
    return () if a is None else (native.address(a), a.dtype, a.shape, a.strides)


def _memories_of(samples: Samples, number: int) -> set[int]:
    """The numbers of the memories that a step accesses."""
    step, arrays = samples.plans[0].plan.steps[number], samples.plans[0].arrays
    return {samples.memory(arrays[n]) for n in (*step.reads, *step.writes) if n in arrays}


def _all_words(samples: Samples, calls: Sequence[Sequence[native.NativeCall]], pinned: set[int]) -> PatchedWords | None:
    """The words of calls at all positions; None if a word does not follow. Memories to which others refer are added to `pinned`."""
    first = calls[0]
    if any([(c.fn, len(c.args)) for c in some] != [(c.fn, len(c.args)) for c in first] for some in calls):
        return None
    values = [np.frombuffer(native.packed(some), np.int64) for some in calls]
    floats = _whole_floats(calls)
    for v in values:
        v[floats] = v[floats].view(np.float64).astype(np.int64)
    words, right, memories = _followed(samples, values)
    hidden = _with_addresses(samples, first)
    right &= ~np.isin(values[0], [*hidden])
    pinned.update(*[inside for address, inside in hidden.items() if address not in values[0]])
    nested: dict[int, tuple[Polynomials | _Line, _Moved]] = {}
    own = [{native.address(a): a for call in some for a in call.keeps if isinstance(a, np.ndarray)} for some in calls]
    for number in np.flatnonzero(~right).tolist():
        found = _nested(samples, [arrays.get(int(v[number])) for arrays, v in zip(own, values, strict=True)])
        if not found:
            return None
        if not isinstance(found, bool):
            nested[number] = found
    return PatchedWords(words.straight(), _Moved.of(memories), nested, floats, tuple([call.keeps for call in first]))


def _followed(samples: Samples, values: Sequence[np.ndarray]) -> tuple[Polynomials, np.ndarray, np.ndarray]:
    """The polynomials through words, whether each passes through all samples, and for words that are addresses the numbers of their
    memories. An address that differs between samples counts only if it is in one of these memories: any other is that of an array of the
    call's own."""
    memories = samples.memory_of(values[0])
    apart = np.logical_or.reduce([samples.memory_of(v) != memories for v in values[1:]])
    differs = np.logical_or.reduce([v != values[0] for v in values[1:]])
    stray = apart | differs & (memories < 0) & (np.abs(values[0]) >= _ADDRESS)
    kept = [np.where(stray, values[0], v) for v in values]
    words, right = samples.through(kept)
    return words, right & ~stray, np.where(stray, -1, memories)


def _whole_floats(samples: Sequence[Sequence[native.NativeCall]]) -> np.ndarray:
    """The numbers of the words that are floating-point numbers with whole values, which differ between samples: the divisors of means."""
    found, at = [], 0
    for some in zip(*samples, strict=True):
        for k, values in enumerate(zip(*[call.args for call in some], strict=True)):
            if isinstance(values[0], float) and len({*values}) > 1 and all(v.is_integer() and abs(v) < 2**53 for v in values):
                found.append(at + 2 + k)
        at += 2 + len(some[0].args)
    return np.array(found, np.int64)


def _with_addresses(samples: Samples, calls: Sequence[native.NativeCall]) -> dict[int, set[int]]:
    """The addresses of the calls' own arrays in which there are addresses in memories that move, and the numbers of these memories."""
    own = {native.address(a): a for call in calls for a in call.keeps if isinstance(a, np.ndarray) and a.dtype == np.int64 and a.size}
    known = zip(own.items(), samples.memory_of(np.array([*own], np.int64)).tolist(), strict=True)
    inside = {address: {*samples.memory_of(a.ravel()).tolist()} - {-1, 0} for (address, a), memory in known if memory < 0}
    return {address: memories for address, memories in inside.items() if memories}


def _nested(samples: Samples, arrays: Sequence[np.ndarray | None]) -> tuple[Polynomials | _Line, _Moved] | bool:
    """The words of arrays of words at all positions; True if the arrays are equal and hold no address; False if they do not follow."""
    found = [a for a in arrays if a is not None]
    first = found[0] if found else None
    if first is None or len(found) < len(arrays) or any((a.dtype, a.shape) != (first.dtype, first.shape) for a in found):
        return False
    if first.dtype != np.int64 or not first.flags.c_contiguous:
        return all(a.tobytes() == first.tobytes() for a in found)
    polynomials, right, memories = _followed(samples, [a.reshape(-1) for a in found])
    moved = _Moved.of(memories)
    if not right.all():
        return False
    return (polynomials.straight(), moved) if moved.words.size or any(a.tobytes() != first.tobytes() for a in found) else True
