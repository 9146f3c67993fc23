"""RecomputeOptimizer: values of the forward pass are computed again for the backward pass, in place of being kept."""

from __future__ import annotations

from typing import Any

from .._checks import wrong
from .base import Checkpoints, GradientOptions, ParamsGrads
from .wrapped import WrappedOptimizer


class RecomputeOptimizer(WrappedOptimizer):
    """An optimizer whose gradients keep the `checkpoints` of the forward pass and compute again what lies between them.

    The answers are those of the inner optimizer, to the bit: copies of an operator draw the same random numbers. `_set_checkpoints`, under
    fluid's name, takes variables or their names; "auto" chooses them (see `append_backward`). So does `minimize(..., checkpoints=...)`.
    """

    def __init__(self, optimizer: Any, checkpoints: Checkpoints = None):
        super().__init__(optimizer)
        self._checkpoints: Checkpoints = None
        if checkpoints is not None:
            self._set_checkpoints(checkpoints)

    def _set_checkpoints(self, checkpoints: Checkpoints) -> None:
        """What is kept: variables or their names, or "auto"."""
        if not (checkpoints == "auto" or isinstance(checkpoints, (list, tuple)) and checkpoints):
            raise wrong(f'{self.label}: checkpoints must be a list of variables or their names, or "auto"; got {checkpoints!r}')
        self._checkpoints = checkpoints

    def _backward(self, asked: GradientOptions) -> ParamsGrads:
        chosen = self._checkpoints if asked.checkpoints is None else asked.checkpoints
        if chosen is None:
            raise wrong(f'{self.label}: call _set_checkpoints([...]) before minimize, or _set_checkpoints("auto")')
        return self._optimizer._backward(asked._replace(checkpoints=chosen))
