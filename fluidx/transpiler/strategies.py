"""Strategies: where parameters are updated and how what moves is lowered. Each is one screen; a new one is one function more."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ..ir.errors import TranspileError, nearest
from .choices import AtRoots, Everywhere, InPieces, Sharded
from .pass_ import Pass
from .passes.broadcast import BroadcastStartup
from .passes.expand import ExpandFused
from .passes.groups import InitGroups
from .passes.hosts import HostRings
from .passes.lower import Lower
from .passes.pack import PackSmall
from .passes.place import Place
from .passes.waves import GatherWaves
from .roots import METHODS

Steps = tuple[tuple[str, Pass], ...]


@dataclass(frozen=True)
class Strategy:
    """A name with options, and named steps, each a pass. `repr` is the call that makes it.

    A strategy is data: `before`, `after` and `replace` give a new one, and steps are found by their names: groups, expand, place, lower,
    startup, hosts, and those that a strategy adds.

    >>> data_parallel().steps_named()
    ['groups', 'expand', 'place', 'startup', 'lower', 'hosts']
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    steps: Steps

    @property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(p for _, p in self.steps)

    def steps_named(self) -> list[str]:
        """The names of the steps, in order."""
        return [n for n, _ in self.steps]

    def before(self, step: str, one: Pass, name: str = "") -> Strategy:
        """The same strategy with a pass in front of a step."""
        at = self._find(step)
        return self._with((*self.steps[:at], self._new(one, name), *self.steps[at:]))

    def after(self, step: str, one: Pass, name: str = "") -> Strategy:
        """The same strategy with a pass behind a step."""
        at = self._find(step) + 1
        return self._with((*self.steps[:at], self._new(one, name), *self.steps[at:]))

    def replace(self, step: str, one: Pass) -> Strategy:
        """The same strategy with another pass as that step."""
        at = self._find(step)
        return self._with((*self.steps[:at], (step, one), *self.steps[at + 1 :]))

    def _with(self, steps: Steps) -> Strategy:
        return replace(self, steps=steps)

    def _new(self, one: Pass, name: str) -> tuple[str, Pass]:
        name = name or type(one).__name__
        if name in self.steps_named():
            raise TranspileError(f"{self!r} has a step {name!r} already; give the pass another name: name=...")
        return name, one

    def _find(self, step: str) -> int:
        names = self.steps_named()
        if step not in names:
            raise TranspileError(f"{self!r} has no step {step!r}; {nearest(step, names, 'it has')}")
        return names.index(step)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options)})"


def strategy(
    name: str, update: Any, by: str = "collective", schedule: Steps = (), strict: bool = False, loss: Any = None, **options: Any
) -> Strategy:
    """A strategy from its choices: where parameters are updated (see choices.py), how what moves is lowered (see lowerings.py), and
    passes that schedule the result."""
    loss = loss if isinstance(loss, str) else getattr(loss, "name", "") if loss is not None else ""
    steps: Steps = (
        ("groups", InitGroups()),
        ("expand", ExpandFused()),
        ("place", Place(update, strict=strict, loss=loss)),
        ("startup", BroadcastStartup()),
        ("lower", Lower(by)),
        ("hosts", HostRings()),
        *schedule,
    )
    shown = {**options, **({"strict": True} if strict else {}), **({"loss": loss} if loss else {})}
    return Strategy(name, tuple(shown.items()), steps)


def data_parallel(loss: Any = None, strict: bool = False) -> Strategy:
    """Broadcast the initial values, all_reduce each gradient, optimize on every rank.

    2(n-1)/n of the parameters' bytes per rank and step. `loss` names the loss when it must be checked; `strict` refuses communication
    that the strategy itself does not ask for.
    Source: the AllReduce scheme of Paddle's NCCL design document.
    """
    return strategy("data_parallel", Everywhere(), loss=loss, strict=strict)


def reduce_broadcast(roots: str = "greedy", loss: Any = None, strict: bool = False) -> Strategy:
    """Reduce each gradient to its parameter's root, optimize there, broadcast the parameter.

    The optimizer's state exists once. `roots`: "greedy" balances bytes, "hash" is a fixed hash of the name.
    Source: Paddle's BuildStrategy.ReduceStrategy.Reduce.
    """
    _check_roots(roots)
    return strategy("reduce_broadcast", AtRoots(roots), loss=loss, strict=strict, roots=roots)


def ring_optimizer(chunk_mb: float = 4, roots: str = "greedy", loss: Any = None, strict: bool = False) -> Strategy:
    """Carry gradients round the ring to their roots piece by piece, optimize there, carry the new values on round the ring.

    2(n-1) hops in all; 1/n of the optimizer's work and state on each rank. `chunk_mb`: largest piece in MiB.
    Source: the ring scheme of Paddle's NCCL design document (steps 1 to 6).
    """
    _check_roots(roots)
    if not isinstance(chunk_mb, (int, float)) or isinstance(chunk_mb, bool) or not chunk_mb > 0:
        raise TranspileError(f"ring_optimizer: chunk_mb must be a number of MiB above 0, got {chunk_mb!r}")
    schedule: Steps = (("waves", GatherWaves(float(chunk_mb))), ("pack", PackSmall()))
    return strategy(
        "ring_optimizer", InPieces(float(chunk_mb), roots), "ring", schedule, loss=loss, strict=strict, chunk_mb=chunk_mb, roots=roots
    )


def zero1(loss: Any = None, strict: bool = False) -> Strategy:
    """Each rank keeps and updates its shard of the optimizer's state: reduce_scatter gradients, all_gather the new parameters.

    The bytes of data_parallel, 1/n of the state. Source: Rajbhandari et al., "ZeRO" (2020), stage 1.
    """
    return strategy("zero1", Sharded(), schedule=(("late", GatherWaves(inf, ("reduce_scatter",))),), loss=loss, strict=strict)


def zero2(loss: Any = None, strict: bool = False) -> Strategy:
    """zero1 whose gradients are reduced and cut as soon as they are finished, so that no rank keeps whole ones.

    Source: Rajbhandari et al., "ZeRO" (2020), stage 2.
    """
    return strategy("zero2", Sharded(), loss=loss, strict=strict)


def _check_roots(roots: str) -> None:
    if roots not in METHODS:
        raise TranspileError(f"unknown roots={roots!r}; {nearest(str(roots), METHODS, 'there are')}")


CATALOGUE: dict[str, Callable[..., Strategy]] = {
    "data_parallel": data_parallel,
    "reduce_broadcast": reduce_broadcast,
    "ring_optimizer": ring_optimizer,
    "zero1": zero1,
    "zero2": zero2,
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
