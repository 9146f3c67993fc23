"""What rewrites know of quantized values: their steps, their integers and those of weights; and how operators on integers are written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..ir import flow
from ..ir.opdef import OpDef, opdef
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.types import TensorType
from ..ir.unique_name import unused
from ..ir.var import Var
from ..ops.quantized.packing import as_int8
from .constants import ParameterValues
from .walk import Answer

CONVOLUTIONS = ("conv2d", "depthwise_conv2d")
_LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # transposes to channels last and back


class Steps(NamedTuple):
    """The numbers that a quantized value can be: (q - zero) * scale for integers q from `lowest` to `highest`."""

    scale: float
    zero: int
    lowest: int
    highest: int

    @property
    def dtype(self) -> str:
        return "uint8" if self.lowest >= 0 else "int8"

    def between(self, low: float, high: float) -> tuple[int, int]:
        """The integers of the values that are also between two bounds."""

        def nearest(bound: float) -> int:
            real = np.clip(bound / self.scale, self.lowest - self.zero, self.highest - self.zero)
            return int(np.rint(real)) + self.zero

        return max(self.lowest, nearest(low)), min(self.highest, nearest(high))


class Integers(NamedTuple):
    """A quantized value as integers: the name of their variable, its steps, and whether it is an image with channels last."""

    name: str
    steps: Steps
    last: bool = False


class IntegerProduct(NamedTuple):
    """A product or convolution of a quantized value with an integer weight, and what was found behind it: a bias, bounds."""

    op: Operator
    x: Integers
    weight: np.ndarray  # filters, or [columns, rows]
    zeros: np.ndarray | None  # of the weight, for each output
    scales: np.ndarray  # of the sums: one, or one for each output
    term: np.ndarray | None = None  # an integer bias
    shift: np.ndarray | None = None  # a bias in float
    low: float = -np.inf
    high: float = np.inf

    def largest(self) -> np.ndarray:
        """The largest magnitude that the sum of each output can have, in float64.

        >>> w = np.int8([[1, -2], [3, 0]])
        >>> IntegerProduct(None, Integers("x", Steps(1.0, 100, 0, 255)), w, None, np.ones(1)).largest()  # inputs from -100 to 155
        array([465., 465.])
        """
        w = self.weight.reshape(self.weight.shape[0], -1).astype(np.float64)
        w = w if self.zeros is None else w - self.zeros[:, None]
        steps = self.x.steps
        found: np.ndarray = np.abs(w).sum(1) * max(steps.highest - steps.zero, steps.zero - steps.lowest)
        return found


class QuantizedTotal(NamedTuple):
    """The sum of two quantized values, by the names of these, and bounds."""

    x: str
    y: str
    low: float = -np.inf
    high: float = np.inf


class QuantizedFacts(ParameterValues):
    """Facts about the values of a program: which are known, who makes and reads them."""

    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str]):
        super().__init__(program, value, fetched, natively=False)
        self.makers = flow.definitions(program)
        self.walk.run(self.ops, [self._learn])

    def _learn(self, op: Operator, definition: type[OpDef]) -> Answer:
        if self.follows(op, definition):
            self.constants.know(op, op)
        return None

    def known(self, name: str) -> np.ndarray | None:
        """The value of a name, computed from parameters and constants."""
        return self.constants.value(name) if name in self.constants.known else None

    def number(self, name: str) -> float | None:
        array = self.known(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def maker(self, name: str) -> Operator | None:
        at = self.makers.get(name, ())
        return self.ops[at[0]] if len(at) == 1 and name not in self.walk.changing else None

    def steps(self, op: Operator | None) -> Steps | None:
        """The steps of a quantized value; None for one that 8 bits with one scale do not hold."""
        if op is None or op.type != "fake_quantize" or self.descs[op.inputs["X"][0]].type.dtype != "float32":
            return None
        scale, zero = self.number(op.inputs["SCALE"][0]), self.number(op.inputs["ZERO"][0])
        low, high = op.attrs["lowest"], op.attrs["highest"]
        fits = 0 <= low <= high <= 255 or -128 <= low <= high <= 127
        if scale is None or zero is None or not fits or not 0 < scale < np.inf or not low <= zero <= high or zero != int(zero):
            return None
        return Steps(scale, int(zero), int(low), int(high))

    def weight(self, name: str, axis: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray] | None:
        """The integers of a quantized parameter as int8, the zero points of its outputs along `axis`, and the scales, which broadcast to
        it; None if it is no such parameter."""
        op = self.maker(name)
        if op is None or op.type != "fake_quantize" or (x := self.known(op.inputs["X"][0])) is None or x.dtype != np.float32:
            return None
        scale, zero = self.known(op.inputs["SCALE"][0]), self.known(op.inputs["ZERO"][0])
        low, high = op.attrs["lowest"], op.attrs["highest"]
        dtype = np.int8 if -128 <= low <= high <= 127 else np.uint8 if 0 <= low <= high <= 255 else None
        if scale is None or zero is None or dtype is None or zero.size not in (1, scale.size):
            return None
        return *as_int8(np.clip(np.rint(x / scale) + zero, low, high).astype(dtype), zero, axis), scale

    def read_once(self, name: str) -> bool:
        return len(self.uses.get(name, ())) == 1 and name not in self.fetched


class IntegerWriter(QuantizedFacts):
    """Writes operators on integers; `near` is the operator in whose place they are."""

    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str]):
        super().__init__(program, value, fetched)
        self.out: list[Operator] = []
        self.declared: dict[str, Var] = {}
        self.values: dict[str, np.ndarray] = {}  # of new parameters
        self.held: dict[str, Integers] = {}  # quantized values, which are floats
        self.ints: dict[str, Integers] = {}  # integers of the program
        self.layouts: dict[tuple[str, bool], str] = {}  # integers of an image -> the same in the other layout
        self.near: Operator = self.ops[0]

    def _fresh(self, name: str) -> str:
        return unused(name, {*self.descs, *self.declared}, "_".__mul__)

    def _emit(self, op_type: str, ins: Mapping[str, str], near: str, attrs: Mapping[str, Any], out: str = "") -> str:
        """Append an operator with one result, `out` or a fresh name like `near`."""
        definition = opdef(op_type)
        full = definition.complete_attrs(attrs)
        inputs = {slot: (name,) for slot, name in ins.items() if name}
        name = out or self._fresh(near)
        if not out:
            (t,) = definition.infer_outputs({s: [self._type(n) for n in names] for s, names in inputs.items()}, full)
            self.declared[name] = Var(name, t, stop_gradient=True)
        (slot,) = definition.outputs
        self.out.append(self.near.replace(type=op_type, inputs=inputs, outputs={slot: (name,)}, attrs=full, role_var=()))
        return name

    def _type(self, name: str) -> TensorType:
        found: TensorType = (self.declared.get(name) or self.descs[name]).type
        return found

    def _parameter(self, near: str, array: np.ndarray) -> str:
        name = self._fresh(near)
        self.declared[name] = Var(name, TensorType(array.dtype.name, array.shape), persistable=True, stop_gradient=True)
        self.values[name] = np.ascontiguousarray(array)
        return name

    def _turned(self, name: str, last: bool) -> str:
        """An image with channels last, or first; copied, as kernels read images in one piece."""
        view = self._emit("transpose", {"X": name}, f"{name}.turned", {"axis": _LAST if last else FIRST})
        return self._emit("assign", {"X": view}, f"{name}.{'nhwc' if last else 'nchw'}", {})

    def _in_layout(self, held: Integers, last: bool) -> str:
        if held.last == last:
            return held.name
        key = held.name, last
        if key not in self.layouts:
            self.layouts[key] = self._turned(held.name, last)
        return self.layouts[key]

    def _hold(self, name: str, held: Integers) -> bool:
        """Let integers stand for a value, which is there in float as well until it is known that nobody reads it so."""
        self.held[name] = held
        first = self._in_layout(held, False) if held.last else held.name
        self._emit("dequantize_linear", {"X": first}, "", {"scale": held.steps.scale, "zero": held.steps.zero}, out=name)
        return True
