"""Import of the domain ai.onnx.preview.training: one optimizer step for several tensors, and Gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...backward import gradients
from ...ir import Variable
from ..import_tables import imports, on_numpy
from ..node import Node
from ..values import Outputs

_DOMAIN = "ai.onnx.preview.training"


class _Step:
    """Shared parts of the optimizers: learning rate and step count in the dtype of a parameter, and arithmetic with numbers."""

    def __init__(self, n: Node, kinds: int):
        self.n, self.b = n, n.b
        given = n.xs(2)
        self.count = len(given) // kinds
        if len(given) != self.count * kinds:
            raise n.wrong(f"it takes {kinds} tensors for each parameter, found {len(given)} in total")
        self.groups = [given[k :: self.count] for k in range(self.count)]

    def scalar(self, k: int, like: Variable) -> Variable:
        x, dtype = self.n.x(k), like.desc.type.dtype
        return x if x.desc.type.dtype == dtype else self.b.cast(x, dtype=dtype)

    def times(self, x: Variable, factor: float) -> Variable:
        return self.b.scale(x, scale=float(factor))

    def add(self, *xs: Variable) -> Variable:
        total, *rest = xs
        for x in rest:
            total = self.b.elementwise_add(total, x)
        return total

    def regularized(self, x: Variable, g: Variable) -> Variable:
        """The gradient plus that of half the squared norm."""
        return self.add(self.times(x, self.n.attr("norm_coefficient", 0.0)), g)

    def after_first(self, t: Variable) -> Variable:
        """0 in the first step, 1 later."""
        return self.b.sign(t)

    def outputs(self, moved: Sequence[tuple[Variable, ...]]) -> Outputs:
        """All new parameters, then all new states of each kind."""
        return Outputs(v for kind in zip(*moved) for v in kind)


@imports("Adagrad", domain=_DOMAIN)
def adagrad(n: Node) -> object:
    s, b, moved = _Step(n, 3), n.b, []
    for x, g, h in s.groups:
        rate = b.elementwise_div(s.scalar(0, x), b.scale(s.scalar(1, x), scale=float(n.attr("decay_factor", 0.0)), bias=1.0))
        g = s.regularized(x, g)
        h = s.add(h, b.square(g))
        root = b.scale(b.sqrt(h), bias=float(n.attr("epsilon", 1e-6)))
        moved.append((b.elementwise_sub(x, b.elementwise_mul(b.elementwise_div(g, root), rate)), h))
    return s.outputs(moved)


@imports("Adam", domain=_DOMAIN)
def adam(n: Node) -> object:
    s, b, moved = _Step(n, 4), n.b, []
    alpha, beta = float(n.attr("alpha", 0.9)), float(n.attr("beta", 0.999))
    for x, g, v, h in s.groups:
        rate, t = s.scalar(0, x), s.scalar(1, x)
        g = s.regularized(x, g)
        v = s.add(s.times(v, alpha), s.times(g, 1 - alpha))
        h = s.add(s.times(h, beta), s.times(b.square(g), 1 - beta))
        rate = b.elementwise_mul(rate, b.elementwise_div(b.sqrt(_bias_correction(s, t, beta)), _bias_correction(s, t, alpha)))
        step = b.elementwise_div(v, b.scale(b.sqrt(h), bias=float(n.attr("epsilon", 1e-6))))
        x = b.elementwise_sub(x, b.elementwise_mul(step, rate))
        moved.append((s.times(x, 1 - n.attr("norm_coefficient_post", 0.0)), v, h))
    return s.outputs(moved)


def _bias_correction(s: _Step, t: Variable, base: float) -> Variable:
    """1 - base ** t, and 1 in the first step, which is not corrected."""
    power = s.b.elementwise_pow(s.b.fill_any_like(t, value=base), t)
    return s.b.scale(s.b.elementwise_mul(power, s.after_first(t)), scale=-1.0, bias=1.0)


@imports("Momentum", domain=_DOMAIN)
def momentum(n: Node) -> object:
    s, b, moved = _Step(n, 3), n.b, []
    alpha, beta, mode = float(n.attr("alpha")), float(n.attr("beta")), n.attr("mode")
    if mode not in ("standard", "nesterov"):
        raise n.wrong(f"its mode must be standard or nesterov, found {mode!r}")
    for x, g, v in s.groups:
        g = s.regularized(x, g)
        share = b.scale(s.after_first(s.scalar(1, x)), scale=beta - 1, bias=1.0)
        v = s.add(s.times(v, alpha), b.elementwise_mul(g, share))
        step = s.add(g, s.times(v, alpha)) if mode == "nesterov" else v
        moved.append((b.elementwise_sub(x, b.elementwise_mul(step, s.scalar(0, x))), v))
    return s.outputs(moved)


@on_numpy("Gradient", domain=_DOMAIN)
def gradient(n: Node) -> object:
    """The gradient of `y` at the values that `xs` and `zs` have in this graph. Other values would need another graph."""
    names = [*n.attr("xs"), *n.attr("zs", [])]
    for name, operand in zip(names, n.operands):
        if n.importer.lookup(name) is not operand:
            raise n.wrong(f"its operand is not the value of {name!r} in its graph; fluidx cannot differentiate at another value")
    xs = [n.importer.variable(n.importer.lookup(name)) for name in n.attr("xs")]
    found: list[Any] = gradients(n.importer.variable(n.importer.lookup(n.attr("y"))), xs)
    return Outputs(n.b.fill_zeros_like(x) if g is None else g for x, g in zip(xs, found))
