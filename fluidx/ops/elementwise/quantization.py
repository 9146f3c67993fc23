"""Rounding to the numbers that a quantized value can have, with the gradient of training for quantization."""

from __future__ import annotations

import numpy as np

from ...ir import Sample
from ...ir.op_fields import Required
from ..expr import max, min, round, where
from .declare import elementwise


def _quantized(x, scale, zero, *, lowest, highest):
    return (min(max(round(x / scale) + zero, lowest), highest) - zero) * scale


def _passed(x, scale, zero, g, *, lowest, highest):
    q = round(x / scale) + zero
    return where(q < lowest, 0, where(q > highest, 0, g))


def _straight_through(b, op, g):
    return b.fake_quantize_grad(op["X"], op["SCALE"], op["ZERO"], g, **op.attrs), None, None


def _samples():
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, (2, 3, 4)).astype("float32")
    x[np.abs(np.abs(x) - 2) < 0.1] = 1.0
    fine = np.full((), 2.0**-24, "float32")  # steps far below those of central differences, which then see the slope of a clip to +-2
    yield Sample((x, fine, np.float32(0)), {"lowest": -(2.0**25), "highest": 2.0**25}, grad=("X",), tolerance=1e-2)
    why = "the function is a staircase, and its gradient that of a ramp"
    int8, uint8 = {"lowest": -128, "highest": 127}, {"lowest": 0, "highest": 255}
    yield Sample((x, np.float32(0.02), np.float32(5)), int8, grad=(), why=why)
    yield Sample((x, np.array([[0.01], [0.02], [0.03]], "float32"), np.float32(0)), int8, grad=(), why=why)
    yield Sample((x.astype("float64"), np.float64(0.01), np.float64(128)), uint8, grad=(), why=why)


def _grad_samples():
    for s in _samples():
        g = np.random.default_rng(7).standard_normal(s.args[0].shape).astype(s.args[0].dtype)
        yield Sample((*s.args, g), s.attrs, grad=(), why="a gradient op has no gradient of its own")


_ATTRS = {"lowest": Required(float), "highest": Required(float)}

elementwise("fake_quantize", _quantized, attrs=_ATTRS, grad=_straight_through, samples=_samples,
    doc="""X quantized to integers q between `lowest` and `highest`, and back: (q - ZERO) * SCALE, the nearest of these numbers.

    The gradient is that of training for quantization (Jacob et al. 2018): it passes unchanged where q is within the range, and is 0
    elsewhere; SCALE and ZERO have none.""")  # fmt: skip
elementwise("fake_quantize_grad", _passed, attrs=_ATTRS, samples=_grad_samples, grad=lambda b, op, g: (None, None, None, None),
    doc="The gradient of fake_quantize by X: G where the integer is within the range, 0 elsewhere.")  # fmt: skip
