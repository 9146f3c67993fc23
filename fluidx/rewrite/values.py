"""Facts about the values of a program for rewrites: makers and readers, constants, and the formulas that chains of operators compute."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..ir import flow
from ..ir.opdef import OPS, Effect, OpDef, opdef
from ..ir.operator import Operator
from ..ir.pass_base import Job
from ..ir.program import Program
from ..ir.sizes import StandInShapes
from ..ir.types import ANY
from .constants import Constants
from .formula import Formula, name, number, of
from .walk import Answer, NameFacts

OPEN = (1 << 31) - 1  # takes the place of an open size when shapes are aligned; no program has this size


class ChainValues:
    """Facts about the values of block 0. Operators are given by their index."""

    def __init__(self, program: Program, job: Job):
        self.program, self.ops = program, program.global_block().oplist
        self.descs = program.global_block().descs
        self.fetched, self.fed = frozenset(job.fetched(program)), job.fed
        self.walk = NameFacts(program, self.ops, {n: d.type for n, d in self.descs.items()}, self.fetched, self.fed)
        constants = self.constants = Constants(self.walk)

        def learn(op: Operator, definition: type[OpDef]) -> Answer:
            constants(op, definition)
            return None

        self.walk.run(self.ops, [learn])
        self.makers, self.uses = flow.definitions(program), flow.uses(program)
        self.sizes = StandInShapes(program.global_block())

    def constant(self, value: str) -> np.ndarray | None:
        """The array that a value always has; None if it is not known."""
        return self.constants.value(value) if value in self.constants.known else None

    def number(self, value: str) -> float | None:
        """The number that a value of one element always has; None if it is not known."""
        array = self.constant(value)
        if array is None or array.size != 1 or array.dtype.kind not in "iuf":
            return None
        return float(str(array.reshape(-1)[0]))  # 0.1, not the double of float32's 0.1: as float32 they are equal

    def maker(self, value: str) -> int | None:
        """The operator that makes a value, if exactly one does and it has no effects; else None."""
        at = self.makers.get(value, ())
        if len(at) != 1 or (d := self.descs.get(value)) is None or d.persistable or d.is_data:
            return None
        definition = OPS[self.ops[at[0]].type]
        return at[0] if definition.effect is Effect.PURE and not definition.control.bodies else None

    def shape(self, value: str) -> tuple[int, ...]:
        """The shape of a value, with OPEN for open sizes."""
        return shown(self.descs[value].type.shape)

    def why_needed(self, value: str) -> str:
        """The reason why a value has to exist even without readers; empty if there is none."""
        if value in self.fed:
            return "is fed"
        if value in self.fetched:
            return "is fetched"
        if value in self.walk.changing:
            return "is written more than once, or kept from run to run"
        return "is needed by its name" if value in self.walk.kept else ""

    def unchanged(self, value: str, first: int, last: int) -> bool:
        """Does a value keep its content from operator `first` to operator `last`?"""
        return value not in self.walk.changing or not any(first <= k <= last for k in self.makers.get(value, ()))


class ChainValue(NamedTuple):
    """A value of a chain: its formula, and its shape in the axes of the chain, with size 1 for axes that it lacks."""

    formula: Formula
    shape: tuple[int, ...]


class Chain:
    """The values that elementwise operators compute from the values `starts`, as formulas over these and other values. All values have the
    axes of `like`. A value without some of these axes, such as a mean, may have fewer axes in between, if it gets them back in the right
    places. `starts` are names in formulas, with their shapes in those axes; `others` are values from outside of the chain, with theirs.
    """

    def __init__(self, values: ChainValues, like: str, starts: Mapping[str, tuple[int, ...]]):
        self.values, self.like = values, values.shape(like)
        self.known = {n: ChainValue(name(n), shape) for n, shape in starts.items()}  # in the order of computation
        self.others: dict[str, tuple[int, ...]] = {}
        role = {values.ops[values.makers[n][0]].role for n in starts}
        waiting = sorted(k for n in starts for k in values.uses.get(n, ()))
        done = -1
        while waiting:
            k = heapq.heappop(waiting)
            op = values.ops[k]
            if k == done or op.role not in role or len(op.output_arg_names) != 1 or op.output_arg_names[0] in self.known:
                continue
            done = k
            if (made := self._made(op, opdef(op.type))) is not None:
                (out,) = op.output_arg_names
                self.known[out] = made
                for n in values.uses.get(out, ()):
                    heapq.heappush(waiting, n)

    def _made(self, op: Operator, definition: type[OpDef]) -> ChainValue | None:
        if definition.effect is not Effect.PURE or any(n not in self.values.descs for n in op.input_arg_names):
            return None
        if definition.storage.view is not None and len(op.input_arg_names) == 1:
            return self._laid_out(op, definition)
        return self._computed(op, definition) if definition.expr is not None else None

    def _laid_out(self, op: Operator, definition: type[OpDef]) -> ChainValue | None:
        """The value of a view with the same elements in the same order, which restores the axes of the chain or drops axes of size 1."""
        (x,), (out,) = op.input_arg_names, op.output_arg_names
        known, types = self.known[x], [self.values.descs[n].type for n in (x, out)]
        p = definition.pattern_of(types[:1], types[1:], op.attrs)
        a, b = ([f for axis in side[0] or () for f in axis] for side in (p.ins, p.outs))
        shape = self.values.shape(out)
        fits = shape == known.shape or _without_ones(shape) == shape == _without_ones(known.shape)
        return known if a == b and fits else None

    def _computed(self, op: Operator, definition: type[OpDef]) -> ChainValue | None:
        """The value of an elementwise operator."""
        (out,), names, values = op.output_arg_names, op.input_arg_names, self.values
        shape = values.shape(out)
        assert definition.expr is not None
        expr, aligned = definition.expr(op.attrs, [values.shape(n) for n in names], len(shape))
        mine = {self.known[n].shape for n in names if n in self.known}
        fewer = len(shape) < len(self.like)
        if fewer and (len(mine) > 1 or any(values.shape(n) != shape for n in names if n in self.known)):
            return None
        formulas: dict[str, Formula] = {}
        others: dict[str, tuple[int, ...]] = {}
        for (symbol, meets), n in zip(aligned.items(), names, strict=True):
            at = (1,) * (len(shape) - len(meets)) + meets
            if (k := values.number(n)) is not None:
                formulas[symbol] = number(k)
            elif n in self.known:
                if not fewer and at != self.known[n].shape:
                    return None
                formulas[symbol] = self.known[n].formula
            elif fewer or self.others.get(n, at) != at:
                return None
            else:
                formulas[symbol], others[n] = name(n), at
        formula = of(expr, formulas)
        if formula is None or len(shape) > len(self.like):
            return None
        self.others.update(others)
        return ChainValue(formula, mine.pop() if fewer else shape)

    def operators(self, last: str) -> list[int]:
        """The operators of the chain that compute a value, by index, without the operators that make the values from outside."""
        found: set[int] = set()
        waiting = [last]
        while waiting:
            for k in self.values.makers.get(waiting.pop(), ()):
                if k not in found:
                    found.add(k)
                    waiting += [n for n in self.values.ops[k].input_arg_names if n in self.known]
        return sorted(found)


def shown(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(OPEN if d == ANY else d for d in shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in shape if d != 1)
