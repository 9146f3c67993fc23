"""Optimizer updates and Gradient: the domain ai.onnx.preview.training, and the formulas of other updates as nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...backward import gradients
from ...ir import Variable
from ...ir.opdef import OPS
from ...ops.update.base import Update, work_dtype
from ...ops.update.trace import expressions
from ..export_graph import Op
from ..expression_nodes import written_out
from ..node import Node
from ..table import exports, imports, on_numpy
from ..values import Outputs

_TRAINING = "ai.onnx.preview.training"
_Write = Callable[..., tuple[Variable, ...]]

# -- import: an update operator for each tensor ------------------------------------------------------------------------------------


def _updates(name: str, states: int) -> Callable[[_Write], _Write]:
    """Register a function that writes the update of one parameter. It gets the node, the rate, the step count and the tensors."""

    def register(write: _Write) -> _Write:
        @imports(name, domain=_TRAINING)
        def updates(n: Node) -> object:
            moved = [write(n, *tensors) for tensors in _groups(n, states)]
            return Outputs(v for kind in zip(*moved) for v in kind)  # all parameters, then all states of each kind

        return write

    return register


def _groups(n: Node, states: int) -> Iterator[tuple[Variable, ...]]:
    """(rate, step count, parameter, gradient, states) of each parameter; the gradient has that of half the squared norm added."""
    given, kinds = n.xs(2), states + 2
    count = len(given) // kinds
    if len(given) != count * kinds:
        raise n.wrong(f"it takes {kinds} tensors for each parameter, found {len(given)} in total")
    for k in range(count):
        x, g, *more = given[k::count]
        rate, t = (n.cast(n.x(at), x.dtype) for at in (0, 1))
        yield rate, t, x, n.b.elementwise_add(n.b.scale(x, scale=n.attr("norm_coefficient", 0.0)), g), *more


@_updates("Adagrad", 1)
def adagrad(n: Node, rate: Variable, t: Variable, x: Variable, g: Variable, h: Variable) -> tuple[Variable, ...]:
    rate = n.b.elementwise_div(rate, n.b.scale(t, scale=n.attr("decay_factor", 0.0), bias=1.0))
    made: tuple[Variable, ...] = n.b.adagrad(x, g, h, rate, epsilon=n.attr("epsilon", 1e-6))
    return made


@_updates("Adam", 2)
def adam(n: Node, rate: Variable, t: Variable, x: Variable, g: Variable, v: Variable, h: Variable) -> tuple[Variable, ...]:
    """fluid corrects epsilon for the bias too. Here the rate alone is corrected, from the second step on."""
    b, alpha, beta = n.b, n.attr("alpha", 0.9), n.attr("beta", 0.999)

    def correction(base: float) -> Variable:
        power = b.elementwise_pow(b.fill_any_like(t, value=base), t)
        return b.scale(b.elementwise_mul(power, b.sign(t)), scale=-1.0, bias=1.0)

    rate, none = b.elementwise_mul(rate, b.elementwise_div(b.sqrt(correction(beta)), correction(alpha))), b.fill_zeros_like(t)
    x, v, h = b.adam(x, g, v, h, rate, none, none, beta1=alpha, beta2=beta, epsilon=n.attr("epsilon", 1e-6))
    return b.scale(x, scale=1 - n.attr("norm_coefficient_post", 0.0)), v, h


@_updates("Momentum", 1)
def momentum(n: Node, rate: Variable, t: Variable, x: Variable, g: Variable, v: Variable) -> tuple[Variable, ...]:
    """The velocity gets a share of the gradient, and all of it in the first step."""
    b, mode = n.b, n.attr("mode")
    if mode not in ("standard", "nesterov"):
        raise n.wrong(f"its mode must be standard or nesterov, found {mode!r}")
    added = b.elementwise_mul(g, b.scale(b.sign(t), scale=n.attr("beta") - 1, bias=1.0))
    x, v = b.momentum(x, added, v, rate, mu=n.attr("alpha"), use_nesterov=mode == "nesterov")
    if mode == "nesterov":  # the parameter moves by all of the gradient
        x = b.elementwise_sub(x, b.elementwise_mul(b.elementwise_sub(g, added), rate))
    return x, v


@on_numpy("Gradient", domain=_TRAINING)
def gradient(n: Node) -> object:
    """The gradient of `y` at the values that `xs` and `zs` have in this graph. Other values would need another graph."""
    names = [*n.attr("xs"), *n.attr("zs", [])]
    for name, operand in zip(names, n.operands):
        if n.importer.lookup(name) is not operand:
            raise n.wrong(f"its operand is not the value of {name!r} in its graph; fluidx cannot differentiate at another value")
    xs = [n.importer.variable(n.importer.lookup(name)) for name in n.attr("xs")]
    found: list[Any] = gradients(n.importer.variable(n.importer.lookup(n.attr("y"))), xs)
    return Outputs(n.b.fill_zeros_like(x) if g is None else g for x, g in zip(xs, found))


# -- export -------------------------------------------------------------------------------------------------------------------------


class _Update:
    """An `Op` for an update. 16-bit operands are converted to float32, the dtype of the optimizer state."""

    def __init__(self, op: Op):
        self._op, self._wide = op, dict[str, str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def __getitem__(self, slot: str) -> str:
        if slot not in self._wide:
            self._wide[slot] = self._op.cast(slot, self.dtype(slot))
        return self._wide[slot]

    def dtype(self, slot: str) -> str:
        return work_dtype(self._op.dtype(slot))


@exports(*(name for name, definition in OPS.items() if issubclass(definition, Update)))
def update(op: Op) -> dict[str, str]:
    """An operator of the training domain if it means the same, else the nodes of the formula. The new parameter has its own dtype."""
    wide: Any = _Update(op)
    made = _BY_OPERATOR[op.type](wide) if op.type in _BY_OPERATOR else _by_formula(wide)
    if "ParamOut" in made and work_dtype(own := op.dtype("Param")) != own:
        made["ParamOut"] = op.emit("Cast", made["ParamOut"], to=op.code(own))
    return made


def _by_formula(op: Op) -> dict[str, str]:
    """The nodes of an update's formula. An output that it does not compute is left out."""
    definition: Any = OPS[op.type]
    given = [s.name for s in definition.in_slots if op.has(s.name)]
    wanted = [s.name for s in definition.out_slots if op.op.outputs.get(s.name)]
    present = [tuple(s.name in some for s in slots) for some, slots in ((given, definition.in_slots), (wanted, definition.out_slots))]
    values, seen = {slot: op[slot] for slot in given}, dict[Any, str]()
    made = expressions(definition, present[0], present[1], tuple(op.attrs.items()))
    return {slot: written_out(op, e, values, seen) for slot, e in zip(wanted, made, strict=True) if e.fn != "const"}


def _momentum(op: Op) -> dict[str, str]:
    mode = "nesterov" if op.attrs["use_nesterov"] else "standard"
    return _training_operator(op, "Momentum", "Velocity", alpha=op.attrs["mu"], beta=1.0, norm_coefficient=0.0, mode=mode)


def _adagrad(op: Op) -> dict[str, str]:
    return _training_operator(op, "Adagrad", "Moment", epsilon=op.attrs["epsilon"], decay_factor=0.0, norm_coefficient=0.0)


def _training_operator(op: Op, op_type: str, state: str, **attrs: Any) -> dict[str, str]:
    """An operator of the training domain. With these attributes its step count has no effect."""
    rate, step = op.emit("Reshape", op["LearningRate"], op.ints([])), op.const(np.array(1, np.int64))
    param, moved = op.emit_many(op_type, 2, rate, step, op["Param"], op["Grad"], op[state], domain=_TRAINING, **attrs)
    return {"ParamOut": param, f"{state}Out": moved}


_BY_OPERATOR = {"momentum": _momentum, "adagrad": _adagrad}
