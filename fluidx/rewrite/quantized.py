"""Join quantized values into operators that compute in 8 bits, for inference.

A quantized value is the result of `fake_quantize`, which QuantizeLinear and DequantizeLinear of a model file become: a float that is an
integer minus a zero point, times a scale. Products and convolutions of quantized values are sums of integers times one scale for each
output, so integers are multiplied, and the result is rounded to the integers of the next quantized value at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ..ir import flow
from ..ir.operator import Operator
from ..ir.program import Program
from ..ops.quantized.packing import packed
from ..ops.quantized.products import BYTES, packed_filter
from .base import with_ops
from .batch_norm import Folded
from .live import live_ops
from .quantized_chains import DynamicProducts, FunctionTables
from .quantized_values import CONVOLUTIONS, FIRST, IntegerProduct, Integers, QuantizedTotal, Steps

_VIEWS = ("reshape", "transpose", "flatten", "squeeze", "unsqueeze", "assign")
_QUANTIZED = ("fake_quantize", "quantize_linear", "dequantize_linear", "quantized_matmul", "quantized_conv")
_INT32 = 2.0**31  # sums with their integer biases are smaller


def join_quantized(program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str] = ()) -> Folded:
    """The program for inference that computes in 8 bits where its values are quantized. `value` gives the value of a parameter.

    Products and convolutions of a quantized value with a quantized parameter are computed in integers, with a bias, relu or clip and the
    rounding of the result; so are sums of two quantized values, functions of one, which become tables, maxima of windows, and reshapes.
    Where the result of a product is not quantized it is a float. A value between operators that become one is not rounded in float32 on
    the way, so results may be one step off where a value lies in the middle between two.
    """
    if not any(op.type in _QUANTIZED for op in program.global_block().oplist):
        return Folded(program, {}, ())
    live = with_ops(program, live_ops(program, (), fetched))  # what nobody reads is no reader
    return _QuantizedJoins(live, value, fetched).folded()


class _QuantizedJoins(FunctionTables, DynamicProducts):
    def __init__(self, program: Program, value: Callable[[str], np.ndarray], fetched: Collection[str]):
        super().__init__(program, value, fetched)
        self.products: dict[str, IntegerProduct] = {}
        self.totals: dict[str, QuantizedTotal] = {}
        self.made: dict[str, tuple[Operator, IntegerProduct]] = {}  # integers -> the operator and the product that make them
        self.packed: dict[str, str] = {}  # weight -> its packed integers
        self.rounded: dict[tuple[str, Steps], Integers] = {}  # values that were rounded to steps

    def folded(self) -> Folded:
        rules: Mapping[str, Callable[[Operator], bool | None]] = {
            **dict.fromkeys(CONVOLUTIONS, self._convolution), "matmul": self._product, "mul": self._product,
            "fake_quantize": self._round, "quantize_linear": self._quantize, "dequantize_linear": self._dequantize,
            "elementwise_add": self._add, "pool2d": self._pool, "quantized_matmul": self._dynamic, "quantized_conv": self._dynamic,
            "relu": self._bound, "clip": self._bound, "relu6": self._bound, "cast": self._cast, "elementwise_mul": self._multiply,
            **dict.fromkeys(_VIEWS, self._view),
        }  # fmt: skip
        for op in self.ops:
            self.near = op
            rule = rules.get(op.type)
            if rule is None or self._several(op) or not rule(op):
                self.out.append(op)
            if not self._several(op):
                self._function(op)
        new = self.program.copy()
        new.global_block().descs.update(self.declared)
        ops = live_ops(new, (), self.fetched, self.out)
        needed = {n for op in ops for n in flow.reads(self.program, op)}.union(self.fetched)
        values = {n: v for n, v in self.values.items() if n in needed}
        lost = {n for n in (*self.parameters, *self.values) if n not in needed}
        return Folded(with_ops(new, ops, drop_state=lost), values, ())

    def _several(self, op: Operator) -> bool:
        """Does it write names that have other values too?"""
        return not self.walk.changing.isdisjoint(op.output_arg_names)

    # -- products -----------------------------------------------------------------------------------------------------------------------

    def _convolution(self, op: Operator) -> bool:
        (x,), found = op.inputs["Input"], self.weight(op.inputs["Filter"][0], 0)
        plain = op.attrs["padding_algorithm"] == "EXPLICIT" and op.attrs["data_format"] == "NCHW"
        if x not in self.held or found is None or not plain:
            return False
        q, zeros, scale = found
        if scale.size != 1 and scale.shape != (q.shape[0], 1, 1, 1):
            return False
        return self._summed(IntegerProduct(op, self.held[x], q, zeros, self._scales(scale, x)), op.output_arg_names[0])

    def _product(self, op: Operator) -> bool:
        (x,), (y,), attrs = op.inputs["X"], op.inputs["Y"], op.attrs
        t = self.descs[x].type
        if op.type == "mul":
            plain = attrs["x_num_col_dims"] == t.ndim - 1 and attrs["y_num_col_dims"] == 1
        else:
            plain = not attrs["transpose_x"] and attrs["alpha"] == 1.0 and t.ndim > 1
        found = self.weight(y, 0 if attrs.get("transpose_y") else 1) if x in self.held and plain and self.descs[y].type.ndim == 2 else None
        if found is None:
            return False
        q, zeros, scale = found if attrs.get("transpose_y") else (found[0].T, found[1], found[2].T)
        along_columns = scale.shape == (q.shape[0], 1) or scale.ndim == 1 and scale.size == q.shape[0] and not attrs.get("transpose_y")
        if scale.size != 1 and not along_columns:
            return False
        return self._summed(IntegerProduct(op, self.held[x], q, zeros, self._scales(scale, x)), op.output_arg_names[0])

    def _scales(self, scale: np.ndarray, x: str) -> np.ndarray:
        found: np.ndarray = scale.reshape(-1).astype(np.float32) * np.float32(self.held[x].steps.scale)
        return found

    def _summed(self, product: IntegerProduct, out: str) -> bool:
        """Note a product, unless its sums may be larger than 32 bits hold; the sums of floats are then computed as they are."""
        return bool(product.largest().max(initial=0.0) < _INT32) and self._pending(product, out)

    def _pending(self, product: IntegerProduct, out: str) -> bool:
        """Note a product, and write it with a result in float, for the case that this is read."""
        self.products[out] = product
        result = self._written(product, out, {"dtype": "float32"}, product.scales, product.shift)
        if product.op.type in CONVOLUTIONS:
            view = self._emit("transpose", {"X": result}, f"{out}.turned", {"axis": FIRST})
            self._emit("assign", {"X": view}, "", {}, out=out)
        return True

    def _written(
        self, p: IntegerProduct, out: str, how: Mapping[str, Any], scales: np.ndarray, shift: np.ndarray | None
    ) -> str:
        """The operator of a product, whose result has channels last; the name of this."""
        op, image = p.op, p.op.type in CONVOLUTIONS
        weight = op.inputs["Filter" if image else "Y"][0]
        groups = op.attrs["groups"] if image else 1
        if weight not in self.packed:
            self.packed[weight] = self._parameter(f"{weight}.packed", packed_filter(p.weight, groups) if image else packed(p.weight[None]))
        attrs = {**how, "outputs": p.weight.shape[0], "zero": p.x.steps.zero}
        if image:
            kept = {slot: op.attrs[slot] for slot in ("groups", "strides", "paddings", "dilations")}
            attrs |= {**kept, "kernel": tuple(p.weight.shape[2:])}
        ins = {
            "Input": self._in_layout(p.x, image), "Filter": self.packed[weight],
            "FilterZero": "" if p.zeros is None else self._parameter(f"{weight}.zero", p.zeros),
            "Bias": "" if p.term is None else self._parameter(f"{out}.bias", p.term),
            "Scale": self._parameter(f"{out}.scale", scales),
            "Shift": "" if shift is None else self._parameter(f"{out}.shift", shift.astype(np.float32)),
        }  # fmt: skip
        result = "" if image or how["dtype"] != "float32" else out
        return self._emit("quantized_conv" if image else "quantized_matmul", ins, f"{out}.{'nhwc' if image else 'int8'}", attrs, out=result)

    def _requantized(self, p: IntegerProduct, out: str, steps: Steps) -> Integers:
        """A product, rounded to steps."""
        low, high = steps.between(p.low, p.high)
        how = {"dtype": steps.dtype, "out_zero": steps.zero, "lowest": low, "highest": high}
        scale = np.float32(steps.scale)
        shift = None if p.shift is None else p.shift / scale
        q = self._written(p, f"{out}.int8", how, p.scales / scale, shift)
        self.made[q] = self.out[-1], p
        return Integers(q, steps, p.op.type in CONVOLUTIONS)

    # -- what follows -------------------------------------------------------------------------------------------------------------------

    def _round(self, op: Operator) -> bool:
        (x,), out, steps = op.inputs["X"], op.output_arg_names[0], self.steps(op)
        found = None if steps is None or self.known(x) is not None else self._integers(x, out, steps)
        return found is not None and self._hold(out, found)

    def _quantize(self, op: Operator) -> bool:
        (x,), out = op.inputs["X"], op.output_arg_names[0]
        found = self._integers(x, out, Steps(op.attrs["scale"], op.attrs["zero"], *BYTES[op.attrs["dtype"]]))
        if found is None:
            return False
        self.ints[out] = found
        self._emit("assign", {"X": self._in_layout(found, False)}, "", {}, out=out)
        return True

    def _dequantize(self, op: Operator) -> None:
        (x,), out = op.inputs["X"], op.output_arg_names[0]
        steps = Steps(op.attrs["scale"], op.attrs["zero"], *BYTES[self.descs[x].type.dtype])
        self.held[out] = self.ints[x]._replace(steps=steps) if x in self.ints else Integers(x, steps)

    def _integers(self, x: str, out: str, steps: Steps) -> Integers | None:
        """The integers of a value that is rounded to steps; None if 8 bits do not hold them."""
        if (x, steps) not in self.rounded:
            found = self._rounded(x, out, steps)
            if found is None:
                return None
            self.rounded[x, steps] = found
        return self.rounded[x, steps]

    def _rounded(self, x: str, out: str, steps: Steps) -> Integers | None:
        if x in self.held and self.held[x].steps == steps:
            return self.held[x]
        if x in self.products:
            return self._requantized(self.products[x], out, steps)
        if x in self.totals:
            return self._total(self.totals[x], out, steps)
        if x in self.functions and (table := self._table(x, steps)) is not None:
            source = self.held[self.functions[x]]
            q = self._emit("quantized_lookup", {"X": source.name, "Table": self._parameter(f"{out}.table", table)}, f"{out}.int8", {})
            return Integers(q, steps, source.last)
        if (steps.lowest, steps.highest) not in BYTES.values():
            return None
        how = {"scale": steps.scale, "zero": steps.zero, "dtype": steps.dtype}
        return Integers(self._emit("quantize_linear", {"X": x}, f"{out}.int8", how), steps)

    def _add(self, op: Operator) -> bool | None:
        (x,), (y,), out = op.inputs["X"], op.inputs["Y"], op.output_arg_names[0]
        if y in self.products or y in self.scaled:
            x, y = y, x
        if x in self.scaled and op.attrs["axis"] == -1 and (b := self.known(y)) is not None:
            return self._dynamic_bias(x, b, out)
        if x in self.products and (b := self.known(y)) is not None and self.descs[x].type.shape == self.descs[out].type.shape:
            return self._biased(self.products[x], y, b, out, op.attrs["axis"])
        if x in self.held and y in self.held and self.descs[x].type.shape == self.descs[y].type.shape:
            self.totals[out] = QuantizedTotal(x, y)
        return None

    def _biased(self, p: IntegerProduct, name: str, b: np.ndarray, out: str, axis: int) -> bool:
        n, image, t = p.weight.shape[0], p.op.type in CONVOLUTIONS, self.descs[out].type
        at = 1 if image else t.ndim - 1
        start = t.ndim - b.ndim if axis == -1 else axis
        by_output = b.size == n and (n == 1 or 0 <= at - start < b.ndim and b.shape[at - start] == n)
        bounded = p.low != -np.inf or p.high != np.inf
        if not by_output or p.term is not None or p.shift is not None or bounded or b.dtype != np.float32:
            return False
        maker = self.maker(name)
        whole = b.reshape(-1).astype(np.float64) / p.scales.astype(np.float64)
        is_integer = maker is not None and maker.type == "fake_quantize" and maker.attrs["highest"] > 65535
        small = (np.abs(whole) + p.largest()).max() < _INT32  # or the sum could wrap
        if is_integer and small and np.allclose(whole, np.rint(whole), rtol=1e-6, atol=1e-2):
            return self._pending(p._replace(term=np.rint(whole).astype(np.int32)), out)
        return self._pending(p._replace(shift=b.reshape(-1)), out)

    def _bound(self, op: Operator) -> bool | None:
        (x,), out = op.inputs["X"], op.output_arg_names[0]
        bounds = (0.0, np.inf) if op.type == "relu" else (0.0, op.attrs["threshold"]) if op.type == "relu6" else None
        low, high = bounds or (op.attrs["min"], op.attrs["max"])
        for known in (self.products, self.totals):
            if x in known and low <= high:
                p: Any = known[x]
                known[out] = p._replace(low=min(max(p.low, low), high), high=max(min(p.high, high), low))
        return None

    def _total(self, total: QuantizedTotal, out: str, steps: Steps) -> Integers:
        """The sum of two quantized values, rounded to steps: behind the product that makes one of them, if nobody else reads that."""
        low, high = steps.between(total.low, total.high)
        for x, y in ((total.y, total.x), (total.x, total.y)):
            made = self.made.get(self.held[x].name)
            if made is not None and self._alone(x) and (found := self._behind(made, self.held[x], self.held[y], out, steps, low, high)):
                return found
        a, b = self.held[total.x], self.held[total.y]
        last = a.last or b.last
        how = {
            "zero_x": a.steps.zero, "ratio_x": _ratio(a, steps), "zero_y": b.steps.zero, "ratio_y": _ratio(b, steps), "zero": steps.zero,
            "dtype": steps.dtype, "lowest": low, "highest": high,
        }  # fmt: skip
        ins = {"X": self._in_layout(a, last), "Y": self._in_layout(b, last)}
        return Integers(self._emit("quantized_sum", ins, f"{out}.int8", how), steps, last)

    def _alone(self, name: str) -> bool:
        """Does one operator read a quantized value, and none the value that it rounds?"""
        maker = self.maker(name)
        return self.read_once(name) and maker is not None and self.read_once(maker.inputs["X"][0])

    def _behind(
        self, made: tuple[Operator, IntegerProduct], x: Integers, y: Integers, out: str, steps: Steps, low: int, high: int
    ) -> Integers | None:
        op, product = made
        if x.steps.dtype != steps.dtype or "Other" in op.inputs:
            return None
        sums = {
            "ratio": _ratio(x, steps), "other_zero": y.steps.zero, "other_ratio": _ratio(y, steps), "sum_zero": steps.zero,
            "sum_lowest": low, "sum_highest": high,
        }  # fmt: skip
        inputs = {slot: names[0] for slot, names in op.inputs.items()} | {"Other": self._in_layout(y, x.last)}
        return Integers(self._emit(op.type, inputs, f"{out}.int8", {**op.attrs, **sums}), steps, x.last)

    def _pool(self, op: Operator) -> bool | None:
        (x,), out, attrs = op.inputs["X"], op.output_arg_names[0], op.attrs
        plain = attrs["pooling_type"] == "max" and attrs["padding_algorithm"] == "EXPLICIT" and attrs["data_format"] == "NCHW"
        if x not in self.held or not plain or attrs["global_pooling"] or attrs["adaptive"]:
            return None
        how = {"kernel": attrs["ksize"], "strides": attrs["strides"], "paddings": attrs["paddings"], "ceil_mode": attrs["ceil_mode"]}
        q = self._emit("quantized_max_pool", {"X": self._in_layout(self.held[x], True)}, f"{out}.nhwc", how)
        return self._hold(out, Integers(q, self.held[x].steps, True))

    def _view(self, op: Operator) -> bool | None:
        x, out = op.input_arg_names[0], op.output_arg_names[0]
        if x not in self.held or len(op.input_arg_names) != 1 or len(op.output_arg_names) != 1:
            self._turned_sums(op)
            return None
        (slot,) = op.inputs
        q = self._emit(op.type, {slot: self._in_layout(self.held[x], False)}, f"{out}.int8", op.attrs)
        return self._hold(out, Integers(q, self.held[x].steps))


def _ratio(held: Integers, steps: Steps) -> float:
    return float(np.float32(held.steps.scale) / np.float32(steps.scale))
