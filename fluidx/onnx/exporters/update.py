"""Export of optimizer updates: the standard's operators if they mean the same, else basic nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir.dtypes import np_dtype
from ...ops.update.base import work_dtype
from . import exports

if TYPE_CHECKING:
    from ..export_graph import Op

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
def momentum(op: _Update) -> dict[str, str]:
    mode = "nesterov" if op.attrs["use_nesterov"] else "standard"
    return _training_operator(op, "Momentum", "Velocity", alpha=op.attrs["mu"], beta=1.0, norm_coefficient=0.0, mode=mode)


@_update("adagrad")
def adagrad(op: _Update) -> dict[str, str]:
    return _training_operator(op, "Adagrad", "Moment", epsilon=op.attrs["epsilon"], decay_factor=0.0, norm_coefficient=0.0)


@_update("adam", "adamw")
def adam(op: _Update) -> dict[str, str]:
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
