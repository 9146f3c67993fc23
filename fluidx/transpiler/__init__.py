"""Rewrite a program for one device into one program per rank."""

from ..fluid_names import module_getattr
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named, skip
from . import strategies
from .algorithms import register
from .cluster import Cluster, Mesh
from .config import DistributeTranspilerConfig
from .fluid import HashName, RoundRobin, memory_optimize, release_memory
from .strategies import Strategy, strategy
from .transpiler import DistributeTranspiler

__all__ = [
    "Cluster",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "HashName",
    "Job",
    "Mesh",
    "ONE_DEVICE",
    "Pass",
    "RoundRobin",
    "Strategy",
    "memory_optimize",
    "named",
    "register",
    "release_memory",
    "skip",
    "strategies",
    "strategy",
]
__getattr__ = module_getattr("transpiler", __all__)
