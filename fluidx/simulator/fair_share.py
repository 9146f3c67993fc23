"""Max-min fair rates of flows that share links.

Source: Bertsekas and Gallager, "Data Networks" (1992), section 6.5.2: all flows grow alike until a link is full; its flows stop there, and
the others go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, NamedTuple


class Flow(NamedTuple):
    """A transfer that is under way: `uses` has how many such transfers pass each link, and `most` is the rate that it cannot exceed."""

    uses: Mapping[Any, int]
    most: float = inf


def fair_rates(flows: Mapping[Any, Flow], capacity: Mapping[Any, float]) -> dict[Any, float]:
    """The rate of each flow, in the unit of the capacities.

    >>> fair_rates({"a": Flow({"x": 1}), "b": Flow({"x": 1, "y": 1}), "c": Flow({"y": 1}, most=1.0)}, {"x": 10.0, "y": 4.0})
    {'c': 1.0, 'b': 3.0, 'a': 7.0}
    """
    rates: dict[Any, float] = {}
    left = {link: capacity[link] for f in flows.values() for link in f.uses}
    growing = dict(flows)
    while growing:
        load: dict[Any, int] = {}
        for f in growing.values():
            for link, n in f.uses.items():
                load[link] = load.get(link, 0) + n
        share = {link: max(0.0, left[link]) / n for link, n in load.items()}
        level = min([*share.values(), *(f.most for f in growing.values())])
        full = {link for link, s in share.items() if s <= level}
        stopped = [k for k, f in growing.items() if f.most <= level or not full.isdisjoint(f.uses)]
        for k in stopped or list(growing):  # a flow without a link and without a limit
            rates[k] = level
            for link, n in growing.pop(k).uses.items():
                left[link] -= n * level
    return rates
