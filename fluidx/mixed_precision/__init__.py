"""Training in mixed precision: matrix products in 16 bits, parameters and sensitive operators in float32, and loss scaling."""

from ..rewrite.amp_lists import AutoMixedPrecisionLists
from .optimizer import OptimizerWithMixedPrecision, decorate

__all__ = ["AutoMixedPrecisionLists", "OptimizerWithMixedPrecision", "decorate"]
