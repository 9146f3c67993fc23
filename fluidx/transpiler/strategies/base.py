"""What a strategy is: a name, its options, and named steps, each a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...ir.errors import TranspileError, nearest
from ..choices import EVERYWHERE
from ..pass_ import Pass
from ..passes.broadcast import BroadcastStartup
from ..passes.expand import ExpandFused
from ..passes.groups import InitGroups
from ..passes.hosts import HostRings
from ..passes.lower import Lower
from ..passes.place import Place

Steps = tuple[tuple[str, Pass], ...]


@dataclass(frozen=True)
class Strategy:
    """A name with options, and named steps, each a pass. `repr` is the call that makes it.

    A strategy is data: `before`, `after` and `replace` give a new one, and steps are found by their names: groups, expand, place, lower,
    startup, hosts, and those that a strategy adds.

    >>> from fluidx.transpiler.strategies import data_parallel
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
    name: str, update: Any = None, by: str = "collective", schedule: Steps = (), strict: bool = False, loss: Any = None,
    rest: Any = EVERYWHERE, kept: bool = False, own: bool = False, **options: Any,
) -> Strategy:  # fmt: skip
    """A strategy from its choices: where parameters are updated and rest (see choices.py and Place), how what moves is lowered (see
    lowerings.py), and passes that schedule the result."""
    loss = loss if isinstance(loss, str) else getattr(loss, "name", "") if loss is not None else ""
    steps: Steps = (
        ("groups", InitGroups()),
        ("expand", ExpandFused()),
        ("place", Place(update, rest, kept, strict=strict, loss=loss, own=own)),
        ("startup", BroadcastStartup()),
        ("lower", Lower(by)),
        ("hosts", HostRings()),
        *schedule,
    )
    shown = {**options, **({"strict": True} if strict else {}), **({"loss": loss} if loss else {})}
    return Strategy(name, tuple(shown.items()), steps)
