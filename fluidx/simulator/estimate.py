"""CostEstimate: seconds, how sure they are, and where they come from."""

from __future__ import annotations

from typing import NamedTuple


class CostEstimate(NamedTuple):
    """Seconds, their relative spread (0.1 is 10 %), and where they come from: "measured", "interpolated", "profile" or "sheet".

    >>> CostEstimate(2.0, 0.25, "measured").high
    2.5
    """

    seconds: float
    spread: float
    source: str

    @property
    def low(self) -> float:
        return self.seconds * (1 - self.spread)

    @property
    def high(self) -> float:
        return self.seconds * (1 + self.spread)

    def wider(self, spread: float) -> CostEstimate:
        """The same with a spread that has another one in it, of a factor on all times."""
        return self._replace(spread=min(1.0, self.spread + spread)) if spread else self
