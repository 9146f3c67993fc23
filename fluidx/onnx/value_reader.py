"""`ValueReader`: the values of an import, on the host or as variables, and the checks and host calls that each run repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from ..ir import Program, Variable
from .constants import constant, parameter
from .errors import OnnxError
from .node import Node
from .program_writer import ProgramWriter
from .symbolic_sizes import OpenSizes
from .values import FrozenPart, RuntimeValue, Weight, leaves, map_leaves

Evaluate = Callable[[Program, Sequence[Variable]], list[np.ndarray]]


class Check(NamedTuple):
    """A value that the import relied on: the program is right only for feeds with which `of` equals `expected` again."""

    of: Any
    expected: Any


class HostCall(NamedTuple):
    """A computation on the host in each run, from the values of `operands` to the values of `results`.

    The operands are variables, RuntimeValues or known values.
    """

    work: Callable[[list[Any]], list[Any]]
    operands: list[Any]
    results: list[Any]


class ValueReader(ProgramWriter):
    """A ProgramWriter that reads values of its variables.

    `evaluate` runs the program written so far and returns values of its variables; None if nothing can run it. `host_steps` lists the
    checks and the host calls of a run in order.
    """

    def __init__(self, main: Program, startup: Program, evaluate: Evaluate | None = None):
        super().__init__(main, startup)
        self.evaluate = evaluate
        self.host_steps: list[Check | HostCall] = []

    def array(self, value: Any) -> Any:
        """The known value on the host: an array or a list. A Weight gives its array, open sizes the numbers that stand for them."""
        return map_leaves(self.unwrapped(value), lambda v: v.value if isinstance(v, RuntimeValue) else v)

    @staticmethod
    def unwrapped(value: Any) -> Any:
        """A value with arrays in place of Weights and open sizes. Variables and RuntimeValues stay."""
        return map_leaves(value, lambda v: v.array if isinstance(v, (Weight, OpenSizes)) else v)

    def resolved(self, value: Any, n: Node | None = None) -> Any:
        """The value, or for a RuntimeValue its value in this run, which later runs check."""
        return self.value(value, n) if isinstance(value, RuntimeValue) else value

    def value(self, value: Any, n: Node | None = None) -> Any:
        """A value on the host; for a list, all its elements. Raises OnnxError if it must be computed and nothing can run the program."""
        if isinstance(value, np.ndarray):
            return value
        wanted = [v for v in leaves(value) if isinstance(v, (Variable, RuntimeValue))]
        now = self._current(wanted, n)
        self.host_steps.extend(map(Check, wanted, deepcopy(now)))  # copied: the caller may change arrays that it fed
        known = iter(now)
        return map_leaves(value, lambda v: next(known) if isinstance(v, (Variable, RuntimeValue)) else self.array(v))

    def _current(self, values: list[Any], n: Node | None = None) -> list[Any]:
        """The values in the run that the program is written for."""
        wanted = [v for v in leaves(values) if isinstance(v, Variable)]
        if not wanted:
            return list(self.array(values))
        if self.evaluate is None:
            who = f"node {n.proto.name or n.op_type!r} ({n.op_type})" if n is not None else "the model"
            raise OnnxError(
                f"{who} needs the value of {wanted[0].name!r} to know sizes or control flow, but this value depends on the feeds. If "
                "sizes determine it, give them: load(shapes=...). fx.onnx.session runs such models"
            )
        computed = iter(self.evaluate(self.main, wanted))
        self.keep_names(wanted)
        return list(map_leaves(values, lambda v: next(computed) if isinstance(v, Variable) else self.array(v)))

    def variable(self, value: Any) -> Variable:
        """A value as a variable of the program: the result of operators for sizes or a small constant, a parameter, or a state variable."""
        if isinstance(value, Variable):
            return value
        known = self._made.get(id(value))
        if known is None:
            known = self._made[id(value)] = value, value.write() if isinstance(value, OpenSizes) else constant(self, value)
            self._fixed.add(known[1].name)
        return known[1]

    def frozen(self, name: str, array: np.ndarray, shape: Sequence[int]) -> Variable:
        """A known array, in this shape, as a parameter that is not trained. `name` is that of the model."""
        known = self._made.get(id(array))
        if known is None:
            part = FrozenPart(name, array)  # keeps the array alive, and so its id
            known = self._made[id(array)] = part, parameter(self, part, shape)
            self._fixed.add(known[1].name)
        return known[1]
