"""Adam and similar optimizers, which keep the mean and the mean square of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._checks import number
from ..clip import GradientClip
from ..ir import Parameter, Variable
from ..regularizer import Regularizer
from .base import Optimizer, UpdateStep, fraction


class _AdamFamily(Optimizer):
    """Base of the Adam family: options, moments and powers of beta."""

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, parameter_list, regularization, grad_clip, name, state_dtype)
        self.beta1, self.beta2 = (fraction(self.label, k, v) for k, v in (("beta1", beta1), ("beta2", beta2)))
        self.epsilon = number(self.label, "epsilon", epsilon)

    def _options(self) -> dict[str, float]:
        return {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}

    def _moments(self, step: UpdateStep, p: Parameter) -> tuple[Variable, Variable]:
        return step.state(p, "moment1"), step.state(p, "moment2")

    def _powers(self, step: UpdateStep, p: Parameter) -> tuple[Variable, Variable]:
        return step.power(p, "beta1_pow_acc", self.beta1), step.power(p, "beta2_pow_acc", self.beta2)


class Adam(_AdamFamily):
    """The step is the bias-corrected mean gradient divided by the root of its mean square (Kingma & Ba, 2015, algorithm 1).

    `lazy_mode` is accepted for fluid programs. It has no effect, because gradients are dense.
    """

    kind = "adam"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, beta1, beta2, epsilon, parameter_list, regularization, grad_clip, name, state_dtype)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        m, v = self._moments(step, p)
        out = {"ParamOut": p, "Moment1Out": step.next(m), "Moment2Out": step.next(v)}
        step.b.adam(p, g, m, v, lr, *self._powers(step, p), **self._options(), out=out)


class AdamW(_AdamFamily):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019): p * (1 - lr * weight_decay), then Adam's step.

    `apply_decay_param_fun(name)` selects the parameters that decay; without it all do.
    """

    kind = "adamw"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Sequence[Parameter | str] | None = None,
        weight_decay: float = 0.01,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, beta1, beta2, epsilon, parameter_list, regularization, grad_clip, name, state_dtype)
        self.weight_decay = number(self.label, "weight_decay", weight_decay)
        self.apply_decay_param_fun = apply_decay_param_fun

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        m, v = self._moments(step, p)
        decays = self.apply_decay_param_fun is None or self.apply_decay_param_fun(p.name)
        step.b.adamw(
            p, g, m, v, lr, *self._powers(step, p), **self._options(), coeff=self.weight_decay if decays else 0.0,
            out={"ParamOut": p, "Moment1Out": step.next(m), "Moment2Out": step.next(v)},
        )  # fmt: skip


class Adamax(_AdamFamily):
    """Adam with the largest recent gradient in place of the mean square (Kingma & Ba, 2015, algorithm 2)."""

    kind = "adamax"

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        m, n = step.state(p, "moment"), step.state(p, "inf_norm")
        power = step.power(p, "beta1_pow_acc", self.beta1)
        step.b.adamax(p, g, lr, m, n, power, **self._options(), out={"ParamOut": p, "MomentOut": step.next(m), "InfNormOut": step.next(n)})


class Lamb(_AdamFamily):
    """Adam's direction with a step scaled to the norm of the parameter, for very large batches (You et al., LAMB, 2020).

    `exclude_from_weight_decay_fn(param)` selects the parameters that do not decay. As in fluid 1.8 the moments are not bias-corrected;
    `bias_correction=True` follows the paper's algorithm 2.
    """

    kind = "lamb"

    def __init__(
        self,
        learning_rate: float | Variable = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameter_list: Sequence[Parameter | str] | None = None,
        regularization: Regularizer | None = None,
        grad_clip: GradientClip | None = None,
        exclude_from_weight_decay_fn: Callable[[Parameter], bool] | None = None,
        name: str | None = None,
        bias_correction: bool = False,
        state_dtype: str = "float32",
    ):
        super().__init__(learning_rate, beta1, beta2, epsilon, parameter_list, regularization, grad_clip, name, state_dtype)
        self.lamb_weight_decay = number(self.label, "lamb_weight_decay", lamb_weight_decay)
        self.exclude_from_weight_decay_fn = exclude_from_weight_decay_fn
        self.bias_correction = bool(bias_correction)

    def update(self, step: UpdateStep, p: Parameter, g: Variable, lr: Variable) -> None:
        b = step.b
        m, v = self._moments(step, p)
        powers = self._powers(step, p) if self.bias_correction else (None, None)
        free = self.exclude_from_weight_decay_fn is not None and self.exclude_from_weight_decay_fn(p)
        update, _, _ = b.lamb_update(
            p, g, m, v, *powers, **self._options(), weight_decay=0.0 if free else self.lamb_weight_decay,
            out={"Moment1Out": step.next(m), "Moment2Out": step.next(v)},
        )  # fmt: skip
        b.lamb_apply(p, update, b.squared_l2_norm(p), b.squared_l2_norm(update), lr, out={"ParamOut": p})
