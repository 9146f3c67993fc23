"""The push-pull recipe: trainers push their terms to servers, which add them up, and pull the sums."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ...ir.parts import bounds


@dataclass(frozen=True)
class PushPull:
    """An all_reduce in which every trainer pushes slice k of its term to server k, which adds the slices up, and pulls the sums from all.

    Sources: the servers of BytePS (Jiang et al. 2020), of Google's Reduction Server, and of Herring (Thangakrishnan et al. 2020).
    """

    servers: int = 1
    name = "servers"

    def sizes(self, trainers: int, size: int) -> dict[int, int]:
        """How many of `size` elements each server adds up, by its rank: servers are numbered after the trainers, and slices differ by at
        most one element.

        >>> PushPull(2).sizes(trainers=3, size=5)
        {3: 2, 4: 3}
        """
        return dict(enumerate([b - a for a, b in pairwise(bounds(size, self.servers))], trainers))
