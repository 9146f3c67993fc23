"""OverHosts: carry out collectives over the ranks of several hosts by a recipe for hosts, such as "hierarchical"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...ir.errors import TranspileError
from ...ir.operator import Operator
from ...ir.pass_base import Job, Pass
from ...ir.program import ProgramPair
from ...ir.program_rewriter import Writer
from ...ir.types import ANY
from ..algorithms import SEQUENCED, SEQUENCES, CollectiveSequence, Grid, Refused
from ..algorithms.cost import over_hosts
from ..algorithms.selection import AlgorithmTable
from ..cluster import DATA, SERVERS, need_hosts
from ..lowering.choose_algorithm import chosen, flat
from ..lowering.write_algorithm import why_no_algorithm
from .compose import compose


@dataclass(frozen=True)
class OverHosts(Pass):
    """Replace collectives over `group` by the sequence that `algorithm` names. If it does not name a sequence, use "hierarchical", in which
    collectives between hosts have that algorithm (see algorithms/hierarchical.py). `when`: whether to use "hierarchical": True, False, or
    "auto", which uses it if there are several hosts with several devices each. With algorithm="auto", the cheapest is used: "hierarchical",
    "rails" or one algorithm for all ranks. `left`: types of collectives that are not changed.
    """

    when: Any = "auto"
    algorithm: str | AlgorithmTable = ""
    left: tuple[str, ...] = ()
    group: str = DATA
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        mesh, named = job.mesh, isinstance(self.algorithm, str) and self.algorithm in SEQUENCES
        if SERVERS in pair.main.groups:  # servers are outside of these hosts and receive the gradients: few collectives over dp are left
            if self.when is True:
                raise TranspileError("hierarchical=True has no use where gradients go to servers; leave it out")
            return pair
        if self.when is True:
            need_hosts("hierarchical=True", mesh, "leave it off")
        if named:
            need_hosts(f"algorithm={self.algorithm!r}", mesh, "leave it out")
        if not mesh.two_levels:
            return pair
        usual = SEQUENCES["hierarchical"] if self.when and mesh.world_size > mesh.hosts else None

        def in_startup(writer: Writer, op: Operator) -> CollectiveSequence | None:
            return _able(usual, writer, op, job) if self._takes(op) and op.type not in self.left else None

        def in_main(writer: Writer, op: Operator) -> CollectiveSequence | None:
            said = self._said(writer, op, job) if self._takes(op) else None
            found = said or in_startup(writer, op)
            return self._cheapest(found, writer, op, job) if found is usual and self.when == self.algorithm == "auto" else found

        between = flat(self.algorithm) or "ring"
        # startup runs once, so its cost does not matter
        return ProgramPair(compose(pair.main, in_main, job, between), compose(pair.startup, in_startup, job))

    def _takes(self, op: Operator) -> bool:
        return op.attrs.get("group") == self.group and op.attrs.get("op", "sum") == "sum"

    def _said(self, writer: Writer, op: Operator, job: Job) -> CollectiveSequence | None:
        """The sequence that is named for a collective."""
        name = self.algorithm
        if isinstance(name, AlgorithmTable):
            name = name.choose(op.type, self.group, writer.block.desc(op.output_arg_names[0]).type.nbytes)
        return _able(SEQUENCES.get(name), writer, op, job)

    @staticmethod
    def _cheapest(usual: CollectiveSequence | None, writer: Writer, op: Operator, job: Job) -> CollectiveSequence | None:
        """The sequence for a collective by the cost model; None if one algorithm among all ranks is cheaper."""
        t, hosts, n = writer.block.desc(op.output_arg_names[0]).type, job.mesh.hosts, job.mesh.world_size
        if usual is None or op.type not in ("all_reduce", "reduce", "broadcast") or why_no_algorithm(op, t, n):
            return usual  # collectives with parts use a two-level algorithm
        grid = Grid(hosts, n // hosts, op.attrs.get("root", 0), t.shape[0] if t.shape else 0)
        found = over_hosts(op.type, grid, t.nbytes, job.mesh.links)
        job.say(op, chosen(op, n, t.nbytes, found))
        return SEQUENCES.get(found[0].name)


def _able(recipe: CollectiveSequence | None, writer: Writer, op: Operator, job: Job) -> CollectiveSequence | None:
    """The recipe, if it can carry out the collective; else None."""
    if recipe is None or op.type not in SEQUENCED:
        return None
    t, hosts = writer.block.desc(op.output_arg_names[0]).type, job.mesh.hosts
    if recipe.slicing(hosts) is not None and (ANY in t.shape or not t.numel):
        return None
    try:
        recipe.stages(op.type, Grid(hosts, job.mesh.world_size // hosts, op.attrs.get("root", 0)))
    except Refused:
        return None
    return recipe
