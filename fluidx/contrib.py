"""Where fluid keeps mixed precision: `fluidx.contrib.mixed_precision` is `fluidx.mixed_precision`."""

from . import mixed_precision
from .fluid_names import module_getattr

__all__ = ["mixed_precision"]
__getattr__ = module_getattr("contrib", __all__)
