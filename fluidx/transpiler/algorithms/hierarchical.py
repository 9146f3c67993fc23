"""The hierarchical recipe: first inside the hosts, then between them, so that few bytes cross the network."""

from __future__ import annotations

from ..cluster import DATA, NODE, RAIL
from .sequence import CollectiveSequence, Grid, SequenceStage


class Hierarchical(CollectiveSequence):
    """all_reduce: reduce_scatter in the node, all_reduce of the part on the rail, all_gather in the node. A value with fewer rows than a
    node has ranks is reduced to the node's first rank instead and broadcast from it. reduce, broadcast: on the node and the rail of the
    root. reduce_scatter, all_gather: the parts of dp are not parts of a node's part, so an algorithm of two levels carries them out (see
    algorithms/two_level.py).

    Sources: Horovod's hierarchical allreduce (local, cross and global communicators); "Broadcast, AllReduce in a single machine. And
    Broadcast, AllReduce, Send, Recv in multiple machines", Paddle's NCCL design document.
    """

    name = "hierarchical"

    def all_reduce(self, grid: Grid) -> tuple[SequenceStage, ...]:
        there, back = ("reduce_scatter", "all_gather") if grid.rows >= grid.devices else ("reduce", "broadcast")
        return SequenceStage(there, NODE, word="node"), SequenceStage("all_reduce", RAIL, word="hosts"), SequenceStage(back, NODE)

    def reduce(self, grid: Grid) -> tuple[SequenceStage, ...]:
        host, local = divmod(grid.root, grid.devices)
        return SequenceStage("reduce", NODE, root=local, word="node"), SequenceStage("reduce", RAIL, root=host)

    def broadcast(self, grid: Grid) -> tuple[SequenceStage, ...]:
        host, local = divmod(grid.root, grid.devices)
        return SequenceStage("broadcast", RAIL, root=host, word="hosts"), SequenceStage("broadcast", NODE, root=local)

    def reduce_scatter(self, grid: Grid) -> tuple[SequenceStage, ...]:
        return (SequenceStage("reduce_scatter", DATA, "direct/"),)

    def all_gather(self, grid: Grid) -> tuple[SequenceStage, ...]:
        return (SequenceStage("all_gather", DATA, "direct/"),)
