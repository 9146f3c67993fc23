"""Base of optimizers that wrap another one. They change how gradients are computed or used, and leave the updates to the inner optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import wrong
from ..ir import Operator, Parameter, Variable
from ..ir.program import Program
from .base import GradientOptions, Minimizer, ParamsGrads


class WrappedOptimizer(Minimizer):
    """Base of optimizers that wrap another one. Methods that a subclass does not define are those of the inner optimizer."""

    def __init__(self, optimizer: Any):
        self.label = f"optimizer.{type(self).__name__}"
        if not isinstance(optimizer, Minimizer):
            raise wrong(f"{self.label}: optimizer must be an optimizer, got {type(optimizer).__name__}: {optimizer!r}")
        self._optimizer = optimizer
        self.rescales, self.communicates = self.rescales or optimizer.rescales, self.communicates or optimizer.communicates

    def _backward(self, options: GradientOptions) -> ParamsGrads:
        return self._optimizer._backward(options)

    def _apply(self, params_grads: Sequence[tuple[Parameter, Variable]], startup: Program) -> list[Operator]:
        return self._optimizer._apply(params_grads, startup)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"
