"""Tiny models of every kind. Each writes a program for one device; sizes are distinct and data is float64, so that a wrong value shows."""

from . import alike, control_flow, layers, meshes, optimizers, precision, stages, training
from .base import MODELS, Model, build

FAMILIES = (optimizers, layers, control_flow, training, precision, alike, meshes, stages)  # each fills MODELS when it is imported

__all__ = ["FAMILIES", "MODELS", "Model", "build"]
