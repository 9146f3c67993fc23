"""Optimizers that step along the gradient, or divide it by a measure of its size: SGD, momentum, Adagrad, RMSProp and others."""

from __future__ import annotations

from collections.abc import Sequence

from .._checks import number
from ..clip import GradientClip
from ..ir import Parameter, Variable
from ..regularizer import Regularizer
from .base import Optimizer, UpdateStep


class SGD(Optimizer):
    """Stochastic gradient descent: p - lr * g."""

    kind = "sgd"

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        step.b.sgd(p, g, lr, out={"ParamOut": p})


class Momentum(Optimizer):
    """SGD along a decaying sum of gradients, v = momentum * v + g; `use_nesterov` uses the sum one step ahead."""

    kind = "momentum"

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        parameter_list: Sequence[Parameter | str] | None = None,
        use_nesterov: bool = False,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.momentum = number(self.label, "momentum", momentum)
        self.use_nesterov = bool(use_nesterov)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        v = step.state(p, "velocity")
        out = {"ParamOut": p, "VelocityOut": step.next(v)}
        step.b.momentum(p, g, v, lr, mu=self.momentum, use_nesterov=self.use_nesterov, out=out)


class LarsMomentum(Optimizer):
    """Momentum with a rate per parameter, lr * lars_coeff * |p| / (|g| + lars_weight_decay * |p|) (You et al., 2017)."""

    kind = "lars_momentum"

    def __init__(
        self,
        learning_rate: float | Variable,
        momentum: float,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        epsilon: float = 0.0,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.momentum = number(self.label, "momentum", momentum)
        self.lars_coeff = number(self.label, "lars_coeff", lars_coeff)
        self.lars_weight_decay = number(self.label, "lars_weight_decay", lars_weight_decay)
        self.epsilon = number(self.label, "epsilon", epsilon)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        b, v = step.b, step.state(p, "velocity")
        norms = b.squared_l2_norm(p), b.squared_l2_norm(g)
        b.lars_momentum(
            p, g, v, *norms, lr, mu=self.momentum, lars_coeff=self.lars_coeff, lars_weight_decay=self.lars_weight_decay,
            epsilon=self.epsilon, out={"ParamOut": p, "VelocityOut": step.next(v)},
        )  # fmt: skip


class Adagrad(Optimizer):
    """Steps divided by the root of the sum of all squared gradients (Duchi et al., 2011)."""

    kind = "adagrad"

    def __init__(
        self,
        learning_rate: float | Variable,
        epsilon: float = 1e-6,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        initial_accumulator_value: float = 0.0,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.epsilon = number(self.label, "epsilon", epsilon)
        self.initial_accumulator_value = number(self.label, "initial_accumulator_value", initial_accumulator_value)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        m = step.state(p, "moment", self.initial_accumulator_value)
        step.b.adagrad(p, g, m, lr, epsilon=self.epsilon, out={"ParamOut": p, "MomentOut": step.next(m)})


class DecayedAdagrad(Optimizer):
    """Adagrad over a decaying average of squared gradients."""

    kind = "decayed_adagrad"

    def __init__(
        self,
        learning_rate: float | Variable,
        decay: float = 0.95,
        epsilon: float = 1e-6,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.decay = number(self.label, "decay", decay)
        self.epsilon = number(self.label, "epsilon", epsilon)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        m = step.state(p, "moment")
        step.b.decayed_adagrad(p, g, m, lr, decay=self.decay, epsilon=self.epsilon, out={"ParamOut": p, "MomentOut": step.next(m)})


class Adadelta(Optimizer):
    """Steps sized by earlier steps (Zeiler, 2012), times the learning rate."""

    kind = "adadelta"

    def __init__(
        self,
        learning_rate: float | Variable = 1.0,
        epsilon: float = 1e-6,
        rho: float = 0.95,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.epsilon = number(self.label, "epsilon", epsilon)
        self.rho = number(self.label, "rho", rho)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        a, d = step.state(p, "_avg_squared_grad"), step.state(p, "_avg_squared_update")
        out = {"ParamOut": p, "AvgSquaredGradOut": step.next(a), "AvgSquaredUpdateOut": step.next(d)}
        step.b.adadelta(p, g, a, d, lr, rho=self.rho, epsilon=self.epsilon, out=out)


class RMSProp(Optimizer):
    """Steps divided by the decaying root mean square of the gradients (Hinton, lecture 6e); `centered` uses their variance."""

    kind = "rmsprop"

    def __init__(
        self,
        learning_rate: float | Variable,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.rho = number(self.label, "rho", rho)
        self.epsilon = number(self.label, "epsilon", epsilon)
        self.momentum = number(self.label, "momentum", momentum)
        self.centered = bool(centered)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        m, s = step.state(p, "momentum"), step.state(p, "mean_square")
        a = step.state(p, "mean_grad") if self.centered else None
        mean = None if a is None else step.next(a)
        step.b.rmsprop(
            p, s, a, g, m, lr, epsilon=self.epsilon, decay=self.rho, momentum=self.momentum, centered=self.centered,
            out={"ParamOut": p, "MomentOut": step.next(m), "MeanSquareOut": step.next(s), "MeanGradOut": mean},
        )  # fmt: skip


class Ftrl(Optimizer):
    """Follow the regularized leader, for sparse linear models (McMahan et al., 2013)."""

    kind = "ftrl"

    def __init__(
        self,
        learning_rate: float | Variable,
        l1: float = 0.0,
        l2: float = 0.0,
        lr_power: float = -0.5,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.l1, self.l2, self.lr_power = (number(self.label, k, v) for k, v in (("l1", l1), ("l2", l2), ("lr_power", lr_power)))

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        n, z = step.state(p, "squared"), step.state(p, "linear")
        out = {"ParamOut": p, "SquaredAccumOut": step.next(n), "LinearAccumOut": step.next(z)}
        step.b.ftrl(p, n, z, g, lr, l1=self.l1, l2=self.l2, lr_power=self.lr_power, out=out)
