"""Prediction: what a step of all ranks takes, and why, before anything runs."""

from .simulate import simulate
from .simulation import Simulation

__all__ = ["Simulation", "simulate"]
