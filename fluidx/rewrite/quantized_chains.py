"""Chains of operators on one quantized value: functions, which become tables, and products whose scales are computed in each run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from ..ir.opdef import opdef
from ..ir.operator import Operator
from ..ir.program import Program
from ..ops.expr.numpy import evaluate
from .quantized_values import FIRST, IntegerWriter, Steps

_CONV = "quantized_conv"


class FunctionTables(IntegerWriter):
    """Functions of one quantized value, element by element."""

    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str]):
        super().__init__(program, value, fetched)
        self.functions: dict[str, str] = {}  # name -> the quantized value of which it is a function

    def _function(self, op: Operator) -> None:
        """Note the result of an operator that is a function of one quantized value, element by element."""
        definition = opdef(op.type)
        if definition.expr is None or op.type == "fake_quantize" or len(op.output_arg_names) != 1:
            return
        sources = {self.functions.get(n, n) for n in op.input_arg_names if self.number(n) is None}
        out = op.output_arg_names[0]
        if len(sources) == 1 and (source := next(iter(sources))) in self.held and self.descs[out].type == self.descs[source].type:
            self.functions[out] = source

    def _table(self, name: str, steps: Steps) -> np.ndarray | None:
        """The integers of a function of a quantized value, for all that this can be."""
        held = self.held[self.functions[name]]
        q = np.arange(256, dtype=np.uint8)
        q = q.view(np.int8) if held.steps.dtype == "int8" else q
        found = {self.functions[name]: (q.astype(np.int32) - held.steps.zero).astype(np.float32) * np.float32(held.steps.scale)}
        with np.errstate(all="ignore"):
            y = self._evaluated(name, found)
            if not np.isfinite(y).all():
                return None
            real = np.clip(np.rint(y / np.float32(steps.scale)) + steps.zero, steps.lowest, steps.highest)
        return real.astype(steps.dtype)

    def _evaluated(self, name: str, found: dict[str, np.ndarray]) -> np.ndarray:
        if name not in found:
            op = self.maker(name)
            assert op is not None, "a function of a value has an operator"
            names = op.input_arg_names
            args = [np.float32(k) if (k := self.number(n)) is not None else self._evaluated(n, found) for n in names]
            expr, symbols = opdef(op.type).expr(op.attrs, [self.descs[n].type.shape for n in names], self.descs[name].type.ndim)
            found[name] = np.broadcast_to(evaluate(expr, np, dict(zip(symbols, args, strict=True))), 256).astype(np.float32)
        return found[name]


class DynamicProducts(IntegerWriter):
    """Products of integers that become floats by a cast, a scale and a bias, as ONNX Runtime's dynamic quantization writes them."""

    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str]):
        super().__init__(program, value, fetched)
        # result -> the product, and what is behind it: None, () for a cast, the names of the known and the computed factor of a scale
        self.scaled: dict[str, tuple[Operator, Any]] = {}

    def _dynamic(self, op: Operator) -> None:
        if op.attrs["dtype"] == "int32" and "Scale" not in op.inputs:
            self.scaled[op.output_arg_names[0]] = op, None

    def _turned_sums(self, op: Operator) -> None:
        """The transpose behind a convolution, and the copy behind that, lead to the sums with channels first."""
        x = op.input_arg_names[0]
        product, how = self.scaled.get(x, (None, None))
        if product is not None and how is None and product.type == _CONV and (op.type == "assign" or op.attrs.get("axis") == FIRST):
            self.scaled[op.output_arg_names[0]] = product, None

    def _cast(self, op: Operator) -> None:
        (x,) = op.inputs["X"]
        if x in self.scaled and self.scaled[x][1] is None and op.attrs["dtype"] == "float32":
            self.scaled[op.output_arg_names[0]] = self.scaled[x][0], ()

    def _multiply(self, op: Operator) -> bool | None:
        (x,), (y,), out = op.inputs["X"], op.inputs["Y"], op.output_arg_names[0]
        if y in self.scaled:
            x, y = y, x
        product, how = self.scaled.get(x, (None, None))
        if product is None or how != () or op.attrs["axis"] != -1 or not self._alike(x, out) or (found := self._scale(y, product)) is None:
            return None
        self.scaled[out] = product, found
        return self._in_float(product, found, None, out)

    def _alike(self, x: str, out: str) -> bool:
        return bool(self.descs[x].type.shape == self.descs[out].type.shape)

    @staticmethod
    def _by_output(array: np.ndarray, product: Operator) -> bool:
        """Has an array a number for each output of a product?"""
        at, n = (-3 if product.type == _CONV else -1), product.attrs["outputs"]
        return bool(array.dtype == np.float32 and array.size == n and array.ndim >= -at and array.shape[at] == n)

    def _scale(self, name: str, product: Operator) -> tuple[str, str] | None:
        """The names of the known and the computed factor of a scale."""
        made, factor = self.maker(name), ""
        array = self.known(name)
        if array is None:
            if self.descs[name].type.numel != 1:
                two = made.input_arg_names if made is not None and made.type == "elementwise_mul" else ()
                known = [n for n in two if self.known(n) is not None]
                (factor, *_) = [n for n in two if n not in known] or [""]
                array = self.known(known[0]) if len(known) == 1 and factor and self.descs[factor].type.numel == 1 else None
                if array is None:
                    return None
            else:
                factor, array = name, np.ones(1, np.float32)
        if array.dtype != np.float32 or array.size != 1 and not self._by_output(array, product):
            return None
        return self._parameter(f"{name}.known", array.reshape(-1)), factor

    def _dynamic_bias(self, x: str, b: np.ndarray, out: str) -> bool:
        product, how = self.scaled[x]
        if not how or not self._alike(x, out) or not self._by_output(b, product):
            return False
        return self._in_float(product, how, b.reshape(-1), out)

    def _in_float(self, op: Operator, scale: tuple[str, str], shift: np.ndarray | None, out: str) -> bool:
        ins = {slot: names[0] for slot, names in op.inputs.items()} | {"Scale": scale[0], "Factor": scale[1]}
        if shift is not None:
            ins["Shift"] = self._parameter(f"{out}.shift", shift)
        attrs = {**op.attrs, "dtype": "float32"}
        if op.type == _CONV:
            view = self._emit("transpose", {"X": self._emit(op.type, ins, f"{out}.nhwc", attrs)}, f"{out}.turned", {"axis": FIRST})
            self._emit("assign", {"X": view}, "", {}, out=out)
        else:
            self._emit(op.type, ins, "", attrs, out=out)
        return True
