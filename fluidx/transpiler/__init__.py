"""Rewrite a program for one device into one program per rank."""

from . import strategies
from .cluster import Cluster, Mesh
from .config import DistributeTranspilerConfig
from .pass_ import Job, Pass, skip
from .strategies import Strategy, strategy
from .transpiler import DistributeTranspiler

__all__ = [
    "Cluster",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "Job",
    "Mesh",
    "Pass",
    "Strategy",
    "skip",
    "strategies",
    "strategy",
]
