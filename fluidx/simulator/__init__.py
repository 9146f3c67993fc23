"""Prediction: what a step of all ranks takes, and why, before anything runs."""

from .planned import Planned
from .planner import plan
from .simulate import simulate
from .simulation import Simulation

__all__ = ["Planned", "Simulation", "plan", "simulate"]
