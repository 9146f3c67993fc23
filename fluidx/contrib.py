"""Where fluid keeps mixed precision: `fluidx.contrib.mixed_precision` is `fluidx.mixed_precision`."""

from . import mixed_precision

__all__ = ["mixed_precision"]
