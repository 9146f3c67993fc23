"""Rewrite a program for one device into one program per rank."""

from . import strategies
from .cluster import Cluster
from .config import DistributeTranspilerConfig
from .strategies import Strategy
from .transpiler import DistributeTranspiler

__all__ = ["Cluster", "DistributeTranspiler", "DistributeTranspilerConfig", "Strategy", "strategies"]
