"""What a planner varies of each strategy. A strategy of the catalogue declares it beside its function, with `searched`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from ...ir.errors import TranspileError, nearest

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class SearchSpace:
    """The options that a planner varies, each with its values, the usual one first. Of two strategies that take equally long, the planner
    takes the one with the lower `order`. `needs` is "" or what the ranks must have: "hosts", several of them, or "stages" of a pipeline.
    `within`: the strategy cuts the batch of another one, its option `of`. `saves`: it needs less memory on more ranks, so that it is
    combined with what saves memory elsewhere. `carried`: its collectives take the options `algorithm` and `hierarchical`."""

    order: int
    options: Mapping[str, tuple[Any, ...]]
    needs: str = ""
    within: bool = False
    saves: bool = False
    carried: bool = True

    def choices(self) -> Iterator[dict[str, Any]]:
        """The combinations of values; the usual values are left out.

        >>> [*SearchSpace(0, {"chunk_mb": (4, 1), "roots": ("greedy",)}).choices()]
        [{}, {'chunk_mb': 1}]
        """
        for values in product(*self.options.values()):
            yield {name: v for (name, (usual, *_)), v in zip(self.options.items(), values, strict=True) if v != usual}


SPACES: dict[str, SearchSpace] = {}


def searched(
    order: int, needs: str = "", within: bool = False, saves: bool = False, carried: bool = True, **options: tuple[Any, ...]
) -> Callable[[_F], _F]:  # fmt: skip
    """A decorator of a strategy: declares what a planner varies of it (see SearchSpace). Raises TranspileError for an option that the
    strategy does not have, and for a first value that is not the default.

    >>> @searched(order=50, size=(4, 8))
    ... def own_strategy(size: int = 4): ...
    >>> SPACES.pop("own_strategy").options
    {'size': (4, 8)}
    """

    def declare(function: _F) -> _F:
        has = inspect.signature(function).parameters
        for name, values in options.items():
            if name not in has:
                raise TranspileError(f"{function.__name__} has no option {name!r} to vary; {nearest(name, has, 'it has')}")
            if values[0] != has[name].default:
                raise TranspileError(
                    f"{function.__name__}: the first value of {name} is {values[0]!r}; begin with the default, {has[name].default!r}"
                )
        SPACES[function.__name__] = SearchSpace(order, options, needs, within, saves, carried)
        return function

    return declare
