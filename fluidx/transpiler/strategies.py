"""Strategies: named, short lists of passes. Writing a new one means writing one of these functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.errors import TranspileError, nearest
from .data_parallel import AllReduceGrads
from .host_rings import HostRings
from .places import PlaceValues
from .rewrite import Pass
from .root_cards import RootCards
from .roots import METHODS
from .startup import BroadcastStartup, InitGroups, ShardRandom, WeightUnevenBatch


@dataclass(frozen=True)
class Strategy:
    """A name with options, and the passes that they stand for. `repr` is the call that makes it."""

    name: str
    options: tuple[tuple[str, Any], ...]
    passes: tuple[Pass, ...]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options)})"


def _strategy(name: str, middle: Sequence[Pass], loss: str, **options: Any) -> Strategy:
    passes = (InitGroups(), PlaceValues(loss=loss), ShardRandom(), WeightUnevenBatch(), *middle, BroadcastStartup(), HostRings())
    shown = {**options, **({"loss": loss} if loss else {})}
    return Strategy(name, tuple(shown.items()), passes)


def _loss_name(loss: Any) -> str:
    return loss if isinstance(loss, str) else getattr(loss, "name", "") if loss is not None else ""


def data_parallel(loss: Any = None) -> Strategy:
    """Broadcast the initial values, all_reduce each gradient, optimize on every rank.

    2(n-1)/n of the parameters' bytes per rank and step. `loss` names the loss when it must be checked.
    Source: the AllReduce scheme of Paddle's NCCL design document.
    """
    return _strategy("data_parallel", [AllReduceGrads()], _loss_name(loss))


def reduce_broadcast(roots: str = "greedy", loss: Any = None) -> Strategy:
    """Reduce each gradient to its parameter's root, optimize there, broadcast the parameter.

    The optimizer's state exists once. `roots`: "greedy" balances bytes, "hash" is a fixed hash of the name.
    Source: Paddle's BuildStrategy.ReduceStrategy.Reduce.
    """
    _check_roots(roots)
    return _strategy("reduce_broadcast", [RootCards("collective", roots)], _loss_name(loss), roots=roots)


def ring_optimizer(chunk_mb: float = 4, roots: str = "greedy", loss: Any = None) -> Strategy:
    """Carry gradients round the ring to their root chunk by chunk, optimize there, carry the new values on round the ring.

    2(n-1) hops in all; 1/n of the optimizer's work and state on each rank. `chunk_mb`: largest chunk in MiB.
    Source: the ring scheme of Paddle's NCCL design document (steps 1 to 6).
    """
    _check_roots(roots)
    if not isinstance(chunk_mb, (int, float)) or isinstance(chunk_mb, bool) or not chunk_mb > 0:
        raise TranspileError(f"ring_optimizer: chunk_mb must be a number of MiB above 0, got {chunk_mb!r}")
    return _strategy(
        "ring_optimizer", [RootCards("ring", roots, float(chunk_mb))], _loss_name(loss), chunk_mb=chunk_mb, roots=roots
    )


def _check_roots(roots: str) -> None:
    if roots not in METHODS:
        raise TranspileError(f"unknown roots={roots!r}; {nearest(str(roots), METHODS, 'there are')}")


CATALOGUE: dict[str, Callable[..., Strategy]] = {
    "data_parallel": data_parallel,
    "reduce_broadcast": reduce_broadcast,
    "ring_optimizer": ring_optimizer,
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
    if name not in CATALOGUE:
        raise TranspileError(f"unknown strategy {name!r}; {nearest(str(name), CATALOGUE, 'there are')}")
    known = inspect.signature(CATALOGUE[name]).parameters
    for option in options:
        if option not in known:
            raise TranspileError(f"{name} has no option {option!r}; {nearest(option, known, 'it has')}")
    return CATALOGUE[name](**options)
