"""fluid's module of `LayerHelper`, which is `fx.layers.LayerHelper`."""

from .layers.fluid_helper import LayerHelper

__all__ = ["LayerHelper"]
