"""WeightedAverage: a running mean of fetched values, in Python, as fluid has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._checks import wrong


class WeightedAverage:
    """The weighted mean of the added values.

    >>> average = WeightedAverage()
    >>> average.add(value=2.0, weight=1); average.add(value=4.0, weight=3)
    >>> average.eval()
    3.5
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all values."""
        self.numerator: Any = None
        self.denominator = 0.0

    def add(self, value: Any, weight: Any) -> None:
        """Add a number or an array with a weight."""
        if not isinstance(value, (int, float, np.number, np.ndarray)):
            raise wrong(f"average.WeightedAverage: value must be a number or an array, got {type(value).__name__}: {value!r:.60}")
        if not isinstance(weight, (int, float, np.number)) and not (isinstance(weight, np.ndarray) and weight.size == 1):
            raise wrong(f"average.WeightedAverage: weight must be a number, got {type(weight).__name__}: {weight!r:.60}")
        weight = float(np.asarray(weight).reshape(-1)[0])
        term = value * weight
        self.numerator = term if self.numerator is None else self.numerator + term
        self.denominator += weight

    def eval(self) -> Any:
        """The mean. Raises ProgramError if no value with a weight was added."""
        if self.numerator is None or not self.denominator:
            raise wrong("average.WeightedAverage: there is nothing to average yet; call add() first")
        return self.numerator / self.denominator


__all__ = ["WeightedAverage"]
