"""Branches (`cond`) that all ranks run together, but with different bodies: the bodies of one branch are run as the programs of all ranks.

The condition is the same on every rank, so all ranks run the same branch. A body may communicate and may have values at roots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..ir.entries import is_local
from ..ir.flow import sub_writes
from ..ir.operator import Operator
from ..ir.program import Block, Program
from ..ir.sub_blocks import SubBlock, bodies
from .rank_classes import touched
from .rank_values import AllRanks
from .refusal import Refusal
from .values import UNDEFINED

if TYPE_CHECKING:
    from .simultaneous_run import SimultaneousRun


class Branches:
    """Runs branches whose bodies differ between ranks."""

    def __init__(self, world: SimultaneousRun):
        self.world, self.rank_values = world, world.rank_values

    def of_all(self, op: Operator, scope: AllRanks) -> None:
        """Run each branch of an operator that all ranks have, and write the values that depend on the branch."""
        self.world.operators.class_of(op, scope)
        condition = self.world.control.condition(op, scope)
        if self.world.mesh.canonical(scope.signature(condition)[1], scope.signature(condition)[0]):
            raise Refusal(f"op {op.type}: the condition %{condition} must be replicated, because the branches differ between ranks")
        pred = self.world.operators.values.atoms[scope.read(condition)].e
        ends: list[SimultaneousRun] = []
        written: dict[str, None] = {}
        for body in bodies(op):
            for p, _ in self.world.twins:
                written.update(dict.fromkeys(n for n in sub_writes(p, p.blocks[body.idx]) if n in self.world.declared.vars))
            ends.append(self._run(op, body))
        results = self._results(op, scope, ends)
        for out in op.output_arg_names:
            written.setdefault(out)
        for name in written:
            self._merge(name, pred, ends, results.get(name, (name,) * len(ends)), scope)
        for world in ends:
            self.world.collective_calls.count += world.collective_calls.count
            self.world.messages.count += world.messages.count
            world.clear()

    def _run(self, op: Operator, body: SubBlock) -> SimultaneousRun:
        """Run the bodies of one branch on all ranks, from the current values."""
        results = [n for n in body.results(op) if isinstance(n, str)]
        named = dict.fromkeys(results)
        for p, _ in self.world.twins:
            named.update(dict.fromkeys(sorted(touched(p, body.idx))))
        views: dict[int, Program] = {}
        twins = []
        for p, ranks in self.world.twins:
            view = _view(p, body.idx, named)
            views.update(dict.fromkeys(ranks, view))
            twins.append((view, ranks))
        inside = {n for p, _ in self.world.twins for n in p.blocks[body.idx].descs}
        outside = [n for n in named if n in self.world.declared.vars and n not in inside]
        world = self.world.branch_run([views[r] for r in range(self.world.n)], twins, {*outside, *results})
        for n in outside:
            world.rank_values.start_from(n, self.rank_values)
        world.run()
        return world

    def _results(self, op: Operator, scope: AllRanks, ends: list[SimultaneousRun]) -> dict[str, tuple[str, ...]]:
        """For each result, its name in each branch."""
        outs, found = op.output_arg_names, []
        for body, world in zip(bodies(op), ends, strict=True):
            names = body.results(op)
            self.world.control.check_results(op, body, names, scope, AllRanks(world.rank_values))
            found.append(names)
        return {out: tuple(names[k] for names in found) for k, out in enumerate(outs)}

    def _merge(self, name: str, pred: int, ends: list[SimultaneousRun], names: tuple[str, ...], scope: AllRanks) -> None:
        """Write the value of a name after both branches, on every rank."""
        both = [world.rank_values.common_value(n) for world, n in zip(ends, names, strict=True)]
        own = name in self.world.declared.differs or is_local(scope.signature(name)[1])
        if UNDEFINED in both or own:
            for rank in range(self.world.n):
                of_rank = [UNDEFINED if own else world.rank_values.by_rank(n, rank) for world, n in zip(ends, names, strict=True)]
                self.rank_values.write(name, rank, self._chosen(pred, of_rank, scope, name))
            return
        scope.write(name, self._chosen(pred, both, scope, name))
        if not all(n in world.rank_values.written_by_all for world, n in zip(ends, names, strict=True)):
            self.rank_values.written_by_all.discard(name)
            made = [r for r in range(self.world.n) if all(w.rank_values.is_defined(n, r) for w, n in zip(ends, names, strict=True))]
            self.rank_values.empty.update((name, r) for r in made)

    def _chosen(self, pred: int, both: list[int], scope: AllRanks, name: str) -> int:
        if len(set(both)) == 1:
            return both[0]
        return UNDEFINED if min(both) < 0 else self.world.control.chosen(pred, both, scope, name)


def _view(program: Program, idx: int, named: Iterable[str]) -> Program:
    """A rank's body as a program: it is block 0, with declarations of the outer variables that it uses."""
    body = program.blocks[idx]
    view = Program(program.name)
    view.groups, view.rank = program.groups, program.rank
    block = Block(view, 0, -1)
    outside = {n: d for n in named if n not in body.descs and (d := body.find(n)) is not None}
    block.descs, block.oplist = {**outside, **body.descs}, body.oplist
    view.blocks = [block, *program.blocks[1:]]
    return view
