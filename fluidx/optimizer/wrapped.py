"""Optimizers around an optimizer: they change how its gradients come about, or what happens to them, and leave the updates to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._checks import wrong
from .._collector import collections_paused
from ..ir import Operator, Parameter, Variable, default_startup_program
from ..ir.program import Program
from .base import Checkpoints, Optimizer, ParamsGrads


class WrappedOptimizer:
    """Base of the optimizers around another one; what a subclass does not say is done as the inner one does it."""

    def __init__(self, optimizer: Any):
        self.label = f"optimizer.{type(self).__name__}"
        if not isinstance(optimizer, (Optimizer, WrappedOptimizer)):
            raise wrong(f"{self.label}: optimizer must be an optimizer, got {type(optimizer).__name__}: {optimizer!r}")
        self._optimizer = optimizer

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Iterable[Variable | str] | None = None,
        checkpoints: Checkpoints = None,
    ) -> tuple[list[Operator], ParamsGrads]:
        """Append the gradients of `loss` and the updates of its parameters, as `Optimizer.minimize`."""
        with collections_paused():
            params_grads = self.backward(loss, startup_program, parameter_list, no_grad_set, checkpoints=checkpoints)
            return self.apply_optimize(loss, startup_program, params_grads), params_grads

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Iterable[Variable | str] | None = None,
        callbacks: Sequence[Callable[..., None]] | None = None,
        checkpoints: Checkpoints = None,
    ) -> ParamsGrads:
        """Append the gradients of `loss` alone."""
        return self._optimizer.backward(loss, startup_program, parameter_list, no_grad_set, callbacks, checkpoints)

    def apply_gradients(self, params_grads: ParamsGrads) -> list[Operator]:
        """Append the updates for gradients that exist, with their state initialized in the default startup program."""
        return self._apply(params_grads, default_startup_program())

    def apply_optimize(self, loss: Variable, startup_program: Program | None, params_grads: ParamsGrads) -> list[Operator]:
        """`apply_gradients`, with the state initialized in `startup_program`."""
        return self._apply(params_grads, startup_program or default_startup_program())

    def _apply(self, params_grads: Sequence[tuple[Parameter, Variable]], startup: Program) -> list[Operator]:
        return self._optimizer._apply(params_grads, startup)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"
