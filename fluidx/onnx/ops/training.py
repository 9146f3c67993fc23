"""Optimizer updates and Gradient: the domain ai.onnx.preview.training, and basic nodes where it means something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...backward import gradients
from ...ir import Variable
from ...ir.dtypes import np_dtype
from ...ops.update.base import work_dtype
from ..export_graph import Op
from ..node import Node
from ..table import exports, imports, on_numpy
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

TRAINING = "ai.onnx.preview.training"


class _Update:
    """An `Op` for an update. 16-bit operands are converted to float32, the dtype of the optimizer state."""

    def __init__(self, op: Op):
        self._op, self._wide = op, dict[str, str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def __getitem__(self, slot: str) -> str:
        if self.dtype(slot) == self._op.dtype(slot):
            return self._op[slot]
        if slot not in self._wide:
            self._wide[slot] = self._op.emit("Cast", self._op[slot], to=self._op.code(self.dtype(slot)))
        return self._wide[slot]

    def dtype(self, slot: str) -> str:
        return work_dtype(self._op.dtype(slot))


def _update(*names: str) -> Callable[[Any], Any]:
    """Register a function that exports updates. The new parameter is converted back to its own dtype."""

    def register(write: Any) -> Any:
        @exports(*names)
        def written(op: Op) -> dict[str, str]:
            made = write(_Update(op))
            found = {"ParamOut": made} if isinstance(made, str) else made
            own = op.dtype("Param")
            if work_dtype(own) != own:
                found["ParamOut"] = op.emit("Cast", found["ParamOut"], to=op.code(own))
            return found

        return written

    return register


def _n(op: Op | _Update, value: float) -> str:
    return op.const(np.array(value, np_dtype(op.dtype("Param"))))


def _minus(op: Op | _Update, step: str) -> str:
    return op.emit("Sub", op["Param"], step)


def _decayed(op: Op | _Update, state: str, keep: str, value: str) -> str:
    """keep * state + (1 - keep) * value."""
    beta = op.attrs[keep]
    return op.emit("Add", op.emit("Mul", op[state], _n(op, beta)), op.emit("Mul", value, _n(op, 1 - beta)))


def _square(op: Op | _Update) -> str:
    return op.emit("Mul", op["Grad"], op["Grad"])


def _divided_by_root(op: Op | _Update, value: str, square: str, epsilon: str) -> str:
    return op.emit("Div", value, op.emit("Add", op.emit("Sqrt", square), epsilon))


@_update("sgd")
def sgd(op: _Update) -> str:
    return _minus(op, op.emit("Mul", op["LearningRate"], op["Grad"]))


def _training_operator(op: _Update, op_type: str, state: str, **attrs: Any) -> dict[str, str]:
    """An operator of the training domain. With these attributes its step count has no effect."""
    rate, step = op.emit("Reshape", op["LearningRate"], op.ints([])), op.const(np.array(1, np.int64))
    param, moved = op.emit_many(op_type, 2, rate, step, op["Param"], op["Grad"], op[state], domain=TRAINING, **attrs)
    return {"ParamOut": param, f"{state}Out": moved}


@_update("momentum")
def export_momentum(op: _Update) -> dict[str, str]:
    mode = "nesterov" if op.attrs["use_nesterov"] else "standard"
    return _training_operator(op, "Momentum", "Velocity", alpha=op.attrs["mu"], beta=1.0, norm_coefficient=0.0, mode=mode)


@_update("adagrad")
def export_adagrad(op: _Update) -> dict[str, str]:
    return _training_operator(op, "Adagrad", "Moment", epsilon=op.attrs["epsilon"], decay_factor=0.0, norm_coefficient=0.0)


@_update("adam", "adamw")
def export_adam(op: _Update) -> dict[str, str]:
    """As basic nodes: fluid applies bias correction to epsilon too, but Adam of the training domain does not."""
    one, a = _n(op, 1.0), op.attrs
    root = op.emit("Sqrt", op.emit("Sub", one, op["Beta2Pow"]))
    rate = op.emit("Div", op.emit("Mul", op["LearningRate"], root), op.emit("Sub", one, op["Beta1Pow"]))
    first, second = _decayed(op, "Moment1", "beta1", op["Grad"]), _decayed(op, "Moment2", "beta2", _square(op))
    step = op.emit("Mul", _divided_by_root(op, first, second, op.emit("Mul", root, _n(op, a["epsilon"]))), rate)
    start = op["Param"]
    if op.type == "adamw":
        start = op.emit("Mul", start, op.emit("Sub", one, op.emit("Mul", op["LearningRate"], _n(op, a["coeff"]))))
    return {"ParamOut": op.emit("Sub", start, step), "Moment1Out": first, "Moment2Out": second}


@_update("adamax")
def adamax(op: _Update) -> dict[str, str]:
    moment = _decayed(op, "Moment", "beta1", op["Grad"])
    known = op.emit("Add", op.emit("Mul", op["InfNorm"], _n(op, op.attrs["beta2"])), _n(op, op.attrs["epsilon"]))
    norm = op.emit("Max", known, op.emit("Abs", op["Grad"]))
    rate = op.emit("Div", op["LearningRate"], op.emit("Sub", _n(op, 1.0), op["Beta1Pow"]))
    return {"ParamOut": _minus(op, op.emit("Mul", op.emit("Div", moment, norm), rate)), "MomentOut": moment, "InfNormOut": norm}


@_update("decayed_adagrad")
def decayed_adagrad(op: _Update) -> dict[str, str]:
    moment = _decayed(op, "Moment", "decay", _square(op))
    step = _divided_by_root(op, op["Grad"], moment, _n(op, op.attrs["epsilon"]))
    return {"ParamOut": _minus(op, op.emit("Mul", step, op["LearningRate"])), "MomentOut": moment}


@_update("adadelta")
def adadelta(op: _Update) -> dict[str, str]:
    epsilon, squares = _n(op, op.attrs["epsilon"]), _decayed(op, "AvgSquaredGrad", "rho", _square(op))
    ratio = op.emit("Div", op.emit("Add", op["AvgSquaredUpdate"], epsilon), op.emit("Add", squares, epsilon))
    step = op.emit("Mul", op.emit("Sqrt", ratio), op["Grad"])
    updates = _decayed(op, "AvgSquaredUpdate", "rho", op.emit("Mul", step, step))
    return {"ParamOut": _minus(op, op.emit("Mul", step, op["LearningRate"])), "AvgSquaredGradOut": squares, "AvgSquaredUpdateOut": updates}


@_update("rmsprop")
def rmsprop(op: _Update) -> dict[str, str]:
    found = {"MeanSquareOut": _decayed(op, "MeanSquare", "decay", _square(op))}
    spread = found["MeanSquareOut"]
    if op.attrs["centered"]:
        found["MeanGradOut"] = mean = _decayed(op, "MeanGrad", "decay", op["Grad"])
        spread = op.emit("Sub", spread, op.emit("Mul", mean, mean))
    root = op.emit("Sqrt", op.emit("Add", spread, _n(op, op.attrs["epsilon"])))
    step = op.emit("Div", op.emit("Mul", op["LearningRate"], op["Grad"]), root)
    found["MomentOut"] = moment = op.emit("Add", op.emit("Mul", op["Moment"], _n(op, op.attrs["momentum"])), step)
    return {**found, "ParamOut": _minus(op, moment)}


@exports("ema_update")
def ema_update(op: Op) -> str:
    rest = op.emit("Sub", _n(op, 1.0), op["Decay"])
    return op.emit("Add", op.emit("Mul", op["Ema"], op["Decay"]), op.emit("Mul", op["Param"], rest))
