"""The rails recipe: slice by slice, each device of a host exchanges data with the devices at the same position on the other hosts."""

from __future__ import annotations

from dataclasses import dataclass

from ..cluster import NODE, RAIL
from .sequence import CollectiveSequence, Grid, SequenceStage, Slicing


@dataclass(frozen=True)
class Rails(CollectiveSequence):
    """all_reduce as in Fairring and Herring, in slices of at most `slice_mb` MiB.

    For each slice, a rank receives the host's sum of its slot (reduce_scatter in the node). It sends each shard of the slot to the
    responsible rank of its rail and adds up its own shard (reduce_scatter on the rail, direct). It sends the sum back (all_gather on the
    rail, direct), and the ranks of the host exchange their slots (all_gather in the node). So the number of rounds does not depend on the
    number of hosts. Slices overlap, also those of neighbouring all_reduces: at most `parallelism` slices are in flight at a time, and at
    most as many as fit into `staging_mb` MiB. With `grows`, both sizes grow with the number of hosts (growth).
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
    """The factor for the sizes of buckets, slices and staging on more than eight hosts. A shard is 1/hosts of a slot. With sizes in
    proportion to the hosts, a shard stays as large as on eight hosts, and the overhead of messages stays small.
    Source: Fairring's buckets of 25, 50 and 100 MiB on 8, 16 and 32 machines.

    >>> [25 * growth(hosts) for hosts in (2, 8, 16, 32)]
    [25.0, 25.0, 50.0, 100.0]
    """
    return max(1.0, hosts / 8)
