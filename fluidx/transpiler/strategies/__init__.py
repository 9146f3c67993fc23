"""Strategies: where parameters are updated and how what moves is lowered. Each is one screen; a new one is one function more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

from ... import rewrite
from ...ir.errors import TranspileError, misspelt, nearest
from ...rewrite.base import Rewrite, rewrite_name
from .base import OWN, Common, Strategy, no_option, strategy
from .pipeline import micro_batches, pipeline
from .pipeline_text import Stage, parse_pipeline
from .rails import rails
from .replicas import replicas
from .replicated import data_parallel
from .rooted import reduce_broadcast, ring_optimizer
from .served import parameter_server, reduction_servers
from .sharded import fsdp
from .zero import zero1, zero2, zero3

CATALOGUE: dict[str, Callable[..., Strategy]] = {
    "data_parallel": data_parallel,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "fsdp": fsdp,
    "ring_optimizer": ring_optimizer,
    "reduce_broadcast": reduce_broadcast,
    "micro_batches": micro_batches,
    "pipeline": pipeline,
    "rails": rails,
    "parameter_server": parameter_server,
    "reduction_servers": reduction_servers,
    "replicas": replicas,
}
OWN.update({name: tuple(p for p in inspect.signature(f).parameters if p != "common") for name, f in CATALOGUE.items()})


def __getattr__(name: str) -> Any:
    raise AttributeError(name if name.startswith("__") else f"there is no strategy {name!r}; {nearest(name, CATALOGUE, 'there are')}")


def get(name: Any, **options: Any) -> Strategy:
    """A strategy by name, "package.module:function" for one of your own; a Strategy is given back as it is. Unknown names and options raise
    TranspileError with the nearest.

    A text names options in braces, and beside one strategy rewrites of fluidx.rewrite, which are done first, in their order.

    >>> get("ring_optimizer", chunk_mb=1)
    ring_optimizer(chunk_mb=1, roots='greedy')
    >>> get("zero1{bucket_mb=4},join_attention")
    zero1(bucket_mb=4).with_rewrites(JoinAttention())
    """
    if isinstance(name, Strategy):
        return name
    if callable(name) and name in CATALOGUE.values():
        raise TranspileError(f"strategies.{name.__name__} is a function; call it: strategies.{name.__name__}()")
    if isinstance(name, str) and not set("{,").isdisjoint(name):
        return _pipeline(name, options)
    if isinstance(name, str) and ":" in name:
        return _own(name, options)
    if not isinstance(name, str) or name not in CATALOGUE:
        near = misspelt(str(name), CATALOGUE)
        raise TranspileError(f"unknown strategy {name!r}; {f'did you mean {near!r}?' if near else 'there are: ' + ', '.join(CATALOGUE)}")
    for option in options:
        if option not in OWN[name] and option not in Common.__annotations__:
            raise no_option(name, option, OWN[name])
    return CATALOGUE[name](**options)


def _pipeline(text: str, options: dict[str, Any]) -> Strategy:
    """What a text of a strategy and rewrites says."""
    known = {rewrite_name(r): r for r in vars(rewrite).values() if isinstance(r, type) and issubclass(r, Rewrite) and r is not Rewrite}
    stages = parse_pipeline(text)
    named = [s for s in stages if s.name not in known]
    unknown = next((s.name for s in named if s.name not in CATALOGUE and ":" not in s.name), None)
    if unknown is not None:
        every = nearest(unknown, [*CATALOGUE, *known], "there are")
        raise TranspileError(f"{text!r} has {unknown!r}, which is no strategy and no rewrite; {every}")
    if len(named) != 1:
        found = " and ".join(s.name for s in named) or "none"
        raise TranspileError(f"{text!r} must have one strategy, found {found}; strategies are: {', '.join(CATALOGUE)}")
    made = [_rewrite(known[s.name], s) for s in stages if s.name in known]
    return get(named[0].name, **{**named[0].options, **options}).with_rewrites(*made)


def _rewrite(of: type[Rewrite], stage: Stage) -> Rewrite:
    has = [f.name for f in fields(of)]
    for option in stage.options:
        if option not in has:
            more = nearest(option, has, "it has") if has else "it has none"
            raise TranspileError(f"{stage.name} has no option {option!r}; {more}")
    return of(**stage.options)


def _own(name: str, options: dict[str, Any]) -> Strategy:
    """What a function of the user's makes, or a Strategy that stands under that name."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except ImportError as e:
        raise TranspileError(f"strategy {name!r}: cannot import {module!r}: {e}; write package.module:function") from None
    if found is None:
        raise TranspileError(f"strategy {name!r}: {module} has no {attribute!r}; write package.module:function")
    made = found(**options) if callable(found) else found
    if not isinstance(made, Strategy):
        raise TranspileError(f"strategy {name!r} must be a Strategy, or a function that makes one, got {type(made).__name__}: {made!r}")
    return made


__all__ = [
    "CATALOGUE", "Common", "Strategy", "data_parallel", "fsdp", "get", "micro_batches", "parameter_server", "pipeline", "rails",
    "reduce_broadcast", "reduction_servers", "replicas", "ring_optimizer", "strategy", "zero1", "zero2", "zero3",
]  # fmt: skip
