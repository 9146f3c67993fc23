"""Compose: replace a collective over all ranks by collectives over smaller groups, or by push and pull, as a recipe says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from ...ir.errors import TranspileError
from ...ir.make_op import filled
from ...ir.opdef import Effect, opdef
from ...ir.operator import Operator, unary
from ...ir.pass_base import Job, Pass
from ...ir.program import Program, ProgramPair
from ...ir.program_rewriter import Writer
from ...ir.types import ANY, Partial
from ...view.diff import show_bytes
from ..algorithms import CollectiveSequence, PushPull
from ..algorithms.selection import AlgorithmTable
from ..cluster import DATA, SERVERS, need_hosts
from ..lowering.redistribute import steps
from ..lowering.write_sequence import SequenceWriter
from ..placement.parameter_homes import pieces_of
from ..placement.placement_walk import where
from ..scheduling.delay_together import Waiting

Recipe = CollectiveSequence | PushPull


@dataclass(frozen=True)
class Compose(Pass):
    """Replace each all_reduce of a sum of known size over `group` by a recipe: a sequence of collectives over the hosts of a Cluster (see
    algorithms/sequence.py), or push and pull between trainers and servers (algorithms/servers.py). Maxima, values of open size, and
    operators in blocks are not changed.
    """

    recipe: Recipe
    group: str = DATA
    requires = ("lowered",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        if isinstance(self.recipe, CollectiveSequence):
            need_hosts(self.recipe.name, job.mesh, "take data_parallel in its place")
        found: list[Operator] = []

        def choose(writer: Writer, op: Operator) -> Recipe | None:
            if not self._takes(writer, op):
                return None
            found.append(op)
            return self.recipe

        main = compose(pair.main, choose, job)
        if isinstance(self.recipe, PushPull) and not found:
            _check_served(pair.main)
        return ProgramPair(main, pair.startup)

    def _takes(self, writer: Writer, op: Operator) -> bool:
        if op.type != "all_reduce" or op.attrs["group"] != self.group or op.attrs["op"] != "sum":
            return False
        d = writer.block.desc(op.input_arg_names[0])
        alone = d.placement == (Partial("sum", self.group),) or not isinstance(self.recipe, PushPull)
        return alone and ANY not in d.type.shape and d.type.numel > 0


def compose(
    program: Program, choose: Callable[[Writer, Operator], Recipe | None], job: Job, between: str | AlgorithmTable = "ring"
) -> Program:
    """The program with collectives carried out by recipes; `choose` gives the recipe of each, or None to keep it. `between`: the algorithm
    for stages between hosts without their own. Values are pulled from servers before their first reader, or together with the next push, so
    that each link is used in both directions.
    """
    writer, waiting = Writer(program), Waiting(program)
    sequences: dict[int, SequenceWriter] = {}  # by the ids of recipes, which they keep
    for recipe, run in groupby(writer.old, key=partial(choose, writer)):
        if recipe is None:
            waiting.before(run, writer.keep)
        elif isinstance(recipe, PushPull):
            for op in run:
                waiting.before([op])
                _push_and_pull(recipe, writer, op, waiting, job)
        else:
            if id(recipe) not in sequences:
                sequences[id(recipe)] = SequenceWriter(recipe, writer, job, between)
            sequences[id(recipe)].write(list(run))
    waiting.rest()
    return writer.program


def _push_and_pull(recipe: PushPull, writer: Writer, op: Operator, waiting: Waiting, job: Job) -> None:
    x, out, trainers = op.input_arg_names[0], op.output_arg_names[0], job.mesh.axes[op.attrs["group"]]
    d, summed = writer.block.desc(out), f"{out}.served"
    writer.declare(summed, d, (pieces_of(recipe.sizes(trainers, d.type.numel), SERVERS, trainers + recipe.servers),))

    def move(source: str, target: str) -> None:
        old, new = (writer.block.desc(n).placement for n in (source, target))
        (step,) = steps(old, new, {SERVERS: job.mesh.world_size, **job.mesh.axes})
        writer.keep(unary(step.type, source, target, filled(step.type, step.attrs), op.site))

    move(x, summed)
    waiting.rest()
    waiting.add((out,), partial(move, summed, out))
    job.log.append(f"%{out}: {show_bytes(d.type.nbytes)} added up by {recipe.servers} server{'s' * (recipe.servers > 1)}")


def _check_served(main: Program) -> None:
    """Raise TranspileError if all sums are in sub-blocks. Such sums stay among the trainers, since servers do not know when they run."""
    ops = [op for block in main.blocks[1:] for op in block.oplist if opdef(op.type).effect is Effect.COLLECTIVE]
    if ops:
        raise TranspileError(
            f"op {ops[0].type} is in a sub-block, and servers do not know when it runs; data_parallel() takes such programs, and "
            f"micro_batches(k, of=reduction_servers()) accumulates gradients{where(ops[0])}"
        )
