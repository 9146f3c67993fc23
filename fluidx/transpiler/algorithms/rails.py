"""Rails: slice by slice, each device of a host exchanges with those of its number on the other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import NODE, RAIL
from .sequence import CollectiveSequence, Grid, SequenceStage, Slicing


@dataclass(frozen=True)
class Rails(CollectiveSequence):
    """all_reduces as Fairring and Herring make them, in slices of at most `slice_mb` MiB.

    Of a slice, a rank gets the host's sum of its slot (reduce_scatter in the node), sends each shard of it to the rank of its number that
    is responsible for it and adds up its own (reduce_scatter on the rail, direct), sends the sum back (all_gather on the rail, direct),
    and has the slice when the host's ranks have exchanged slots (all_gather in the node). So the rounds are as many whatever the
    number of hosts. Slices overlap: those of neighbouring all_reduces follow each other, at most `parallelism` of them on their way at
    a time, and no more than `staging_mb` MiB has room for. What `grows` is larger with more hosts (growth): both sizes.
    Sources: Fairring (Facebook Research); Thangakrishnan et al., "Herring: rethinking the parameter server at scale for the cloud" (2020).
    """

    slice_mb: float = 25.0
    staging_mb: float = 50.0
    parallelism: int = 4
    grows: bool = False
    name = "rails"

    def all_reduce(self, grid: Grid) -> tuple[SequenceStage, ...]:
        return (
            SequenceStage("reduce_scatter", NODE, word="slot"),
            SequenceStage("reduce_scatter", RAIL, "direct", word="shard"),
            SequenceStage("all_gather", RAIL, "direct", word="sum"),
            SequenceStage("all_gather", NODE, word="full"),
        )

    def slicing(self, hosts: int) -> Slicing:
        more = growth(hosts) if self.grows else 1.0
        return Slicing(max(1, int(self.slice_mb * more * 2**20)), max(1, min(self.parallelism, int(self.staging_mb / self.slice_mb))))


def growth(hosts: int) -> float:
    """How much larger buckets are, with their slices and staging, on so many hosts than on eight or fewer.

    A shard is 1/hosts of a slot: in proportion to the hosts it stays as large as it is on eight, and messages do not drown in overhead.
    Source: Fairring's buckets of 25, 50 and 100 MiB on 8, 16 and 32 machines.

    >>> [25 * growth(hosts) for hosts in (2, 8, 16, 32)]
    [25.0, 25.0, 50.0, 100.0]
    """
    return max(1.0, hosts / 8)
