"""`RecomputeOptimizer`: values of the forward pass are computed again for the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

from .._checks import wrong
from .base import Checkpoints, GradientOptions, ParamsGrads
from .wrapped import WrappedOptimizer


class RecomputeOptimizer(WrappedOptimizer):
    """An optimizer whose backward pass keeps only the `checkpoints` of the forward pass and recomputes the values between them.

    Results equal those of the inner optimizer bit by bit: copies of an operator draw the same random numbers. `_set_checkpoints`, which has
    fluid's name, takes variables or their names; "auto" selects them (see `append_backward`). `minimize(..., checkpoints=...)` takes the
    same.
    """

    def __init__(self, optimizer: Any, checkpoints: Checkpoints = None):
        super().__init__(optimizer)
        self._checkpoints: Checkpoints = None
        if checkpoints is not None:
            self._set_checkpoints(checkpoints)

    def _set_checkpoints(self, checkpoints: Checkpoints) -> None:
        """Set the values to keep: variables or their names, or "auto"."""
        if not (checkpoints == "auto" or isinstance(checkpoints, (list, tuple)) and checkpoints):
            raise wrong(f'{self.label}: checkpoints must be a list of variables or their names, or "auto"; got {checkpoints!r}')
        self._checkpoints = checkpoints

    def _backward(self, options: GradientOptions) -> ParamsGrads:
        chosen = self._checkpoints if options.checkpoints is None else options.checkpoints
        if chosen is None:
            raise wrong(f'{self.label}: call _set_checkpoints([...]) before minimize, or _set_checkpoints("auto")')
        return self._optimizer._backward(options._replace(checkpoints=chosen))
