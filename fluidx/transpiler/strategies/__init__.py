"""The catalogue of strategies. A strategy says where parameters are stored and updated, and how communication is done; each is one
function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ... import rewrite as _rewrite  # noqa: F401  (fills PASSES)
from ...ir.errors import TranspileError, misspelt, nearest
from ...ir.pass_base import PASSES, Pass
from ..imported import imported
from .base import OWN, Common, Strategy, no_option, strategy
from .pipeline import micro_batches, pipeline
from .pipeline_text import Stage, parse_pipeline, show_stage
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


def options_of(name: str) -> tuple[str, ...]:
    """The names of the options of a strategy of the catalogue; none for another name.

    >>> options_of("micro_batches")[0], options_of("mine")
    ('count', ())
    """
    return (*OWN[name], *Common.__annotations__) if name in OWN else ()


def get(name: Any, /, **options: Any) -> Strategy:
    """A strategy by name, or "package.module:function" for your own; a Strategy is returned unchanged. An unknown name or option raises
    TranspileError, which names the nearest one.

    A text may give options in braces, and may list passes beside the strategy: passes of fluidx.rewrite by name, and your own as
    "package.module:Class". They run before the strategy, in their order.

    >>> get("ring_optimizer", chunk_mb=1)
    ring_optimizer(chunk_mb=1, roots='greedy')
    >>> get("zero1{bucket_mb=4},join_attention")
    zero1(bucket_mb=4).with_rewrites(JoinAttention())
    """
    if isinstance(name, Strategy):
        return name
    if callable(name) and name in CATALOGUE.values():
        raise TranspileError(f"strategies.{name.__name__} is a function; call it: strategies.{name.__name__}()")
    if isinstance(name, str) and not set("{,:").isdisjoint(name):
        return _pipeline(name, options)
    if not isinstance(name, str) or name not in CATALOGUE:
        near = misspelt(str(name), CATALOGUE)
        raise TranspileError(f"unknown strategy {name!r}; {f'did you mean {near!r}?' if near else 'there are: ' + ', '.join(CATALOGUE)}")
    for option in options:
        if option not in OWN[name] and option not in Common.__annotations__:
            raise no_option(name, option, OWN[name])
    return CATALOGUE[name](**options)


def _pipeline(text: str, options: dict[str, Any]) -> Strategy:
    """The strategy that a text with a strategy and passes describes; `options` are further options of the strategy."""
    stages = [Stage(text, {})] if set("{,").isdisjoint(text) else parse_pipeline(text)
    found = [(s, PASSES.get(s.name) or (imported(s.name, f"strategy {s.name!r}") if ":" in s.name else None)) for s in stages]
    unknown = next((s.name for s, own in found if own is None and s.name not in CATALOGUE), None)
    if unknown is not None:
        every = nearest(unknown, [*CATALOGUE, *PASSES], "there are")
        raise TranspileError(f"{text!r} has {unknown!r}, which is neither a strategy nor a pass; {every}")
    passes = [_pass(s, own) for s, own in found if _is_pass(own)]
    chosen = [(s, own) for s, own in found if not _is_pass(own)]
    if len(chosen) != 1:
        names = " and ".join(s.name for s, _ in chosen) or "none"
        raise TranspileError(f"{text!r} must have one strategy, found {names}; strategies are: {', '.join(CATALOGUE)}")
    ((stage, own),) = chosen
    given = {**stage.options, **options}
    return (get(stage.name, **given) if own is None else _own(stage.name, own, given)).with_rewrites(*passes)


def _is_pass(found: Any) -> bool:
    return isinstance(found, Pass) or (isinstance(found, type) and issubclass(found, Pass))


def _pass(stage: Stage, found: Any) -> Pass:
    if isinstance(found, Pass):
        _check_options(stage.name, (), stage.options)
        return found
    _check_options(stage.name, [f.name for f in fields(found) if f.init], stage.options)
    _check_needed(stage.name, found, stage.options)
    for f in fields(found):
        if isinstance(f.default, bool) and not isinstance(stage.options.get(f.name, f.default), bool):
            raise TranspileError(f"{stage.name}: {f.name} is true or false, got {stage.options[f.name]!r}")
    return found(**stage.options)


def _check_options(name: str, has: Sequence[str], options: Mapping[str, Any]) -> None:
    for option in options:
        if option not in has:
            more = nearest(option, has, "it has") if has else "it has none"
            raise TranspileError(f"{name} has no option {option!r}; {more}")


def _check_needed(name: str, found: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TranspileError for an option without a default that is not given."""
    for p in inspect.signature(found).parameters.values():
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in options:
            raise TranspileError(f"{name} needs {p.name}; write {name}{{{p.name}=...}}")


def _own(name: str, found: Any, options: dict[str, Any]) -> Strategy:
    """The Strategy that a user's function returns, or a user's Strategy object."""
    if callable(found):
        takes = inspect.signature(found).parameters.values()
        if all(p.kind is not p.VAR_KEYWORD for p in takes):
            _check_options(name, [p.name for p in takes if p.kind is not p.VAR_POSITIONAL], options)
        _check_needed(name, found, options)
        made = found(**options)
    else:
        _check_options(name, (), options)
        made = found
    if not isinstance(made, Strategy):
        raise TranspileError(f"strategy {name!r} must be a Strategy, or a function that makes one, got {type(made).__name__}: {made!r}")
    try:
        return replace(made, called=(show_stage(name, options), made.steps[: made.first], len(made.changes)))
    except TranspileError:  # an option without a text form
        return made


__all__ = [
    "CATALOGUE", "Common", "Strategy", "data_parallel", "fsdp", "get", "micro_batches", "parameter_server", "pipeline", "rails",
    "reduce_broadcast", "reduction_servers", "replicas", "ring_optimizer", "strategy", "zero1", "zero2", "zero3",
]  # fmt: skip
