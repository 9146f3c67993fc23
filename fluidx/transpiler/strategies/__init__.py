"""Strategies: where parameters are updated and how what moves is lowered. Each is one screen; a new one is one function more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...ir.errors import TranspileError, nearest
from .base import Common, Strategy, strategy
from .pipeline import micro_batches, pipeline
from .rails import rails
from .replicas import replicas
from .replicated import data_parallel
from .rooted import reduce_broadcast, ring_optimizer
from .served import parameter_server, reduction_servers
from .sharded import fsdp
from .zero import zero1, zero2, zero3

CATALOGUE: dict[str, Callable[..., Strategy]] = {
    "data_parallel": data_parallel,
    "reduce_broadcast": reduce_broadcast,
    "ring_optimizer": ring_optimizer,
    "replicas": replicas,
    "rails": rails,
    "micro_batches": micro_batches,
    "pipeline": pipeline,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "fsdp": fsdp,
    "parameter_server": parameter_server,
    "reduction_servers": reduction_servers,
}


def __getattr__(name: str) -> Any:
    raise AttributeError(name if name.startswith("__") else f"there is no strategy {name!r}; {nearest(name, CATALOGUE, 'there are')}")


def get(name: Any, **options: Any) -> Strategy:
    """A strategy by name; a Strategy is given back as it is. Unknown names and options raise TranspileError with the nearest.

    >>> get("ring_optimizer", chunk_mb=1)
    ring_optimizer(chunk_mb=1, roots='greedy')
    """
    if isinstance(name, Strategy):
        return name
    if callable(name) and name in CATALOGUE.values():
        raise TranspileError(f"strategies.{name.__name__} is a function; call it: strategies.{name.__name__}()")
    if not isinstance(name, str) or name not in CATALOGUE:
        raise TranspileError(f"unknown strategy {name!r}; {nearest(str(name), CATALOGUE, 'there are')}")
    known = [*(p for p in inspect.signature(CATALOGUE[name]).parameters if p != "common"), *Common.__annotations__]
    for option in options:
        if option not in known:
            raise TranspileError(f"{name} has no option {option!r}; {nearest(option, known, 'it has')}")
    return CATALOGUE[name](**options)


__all__ = [
    "CATALOGUE", "Common", "Strategy", "data_parallel", "fsdp", "get", "micro_batches", "parameter_server", "pipeline", "rails",
    "reduce_broadcast", "reduction_servers", "replicas", "ring_optimizer", "strategy", "zero1", "zero2", "zero3",
]  # fmt: skip
