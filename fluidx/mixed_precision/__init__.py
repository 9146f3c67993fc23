"""Training in mixed precision: products in 16 bits, parameters and what needs range or digits in float32, the loss scaled."""

from ..rewrite.amp_lists import AutoMixedPrecisionLists
from .optimizer import OptimizerWithMixedPrecision, decorate

__all__ = ["AutoMixedPrecisionLists", "OptimizerWithMixedPrecision", "decorate"]
