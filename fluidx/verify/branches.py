"""Branches that ranks have together, each with a body of its own: the bodies of one branch are programs of all ranks, run side by side.

What decides is the same on every rank, so all of them run the same branch. A body may hold what communicates, and what lies at roots.
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
    """The branches of a world of ranks whose bodies differ from rank to rank."""

    def __init__(self, world: SimultaneousRun):
        self.world, self.held = world, world.held

    def of_all(self, op: Operator, scope: AllRanks) -> None:
        """Run each branch of an operator, whose text all ranks share, and choose between what they leave behind."""
        self.world.operators.kind(op, scope)
        condition = self.world.control.condition(op, scope)
        if self.world.mesh.canonical(scope.signature(condition)[1], scope.signature(condition)[0]):
            raise Refusal(f"op {op.type}: the condition %{condition} must be whole on every rank, for their branches differ")
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
            self.world.meetings.count += world.meetings.count
            self.world.messages.count += world.messages.count
            world.dissolve()

    def _run(self, op: Operator, body: SubBlock) -> SimultaneousRun:
        """The ranks' bodies of one branch, run from where the ranks are."""
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
        world = self.world.inside([views[r] for r in range(self.world.n)], twins, {*outside, *results})
        for n in outside:
            world.held.begin(n, self.held)
        world.run()
        return world

    def _results(self, op: Operator, scope: AllRanks, ends: list[SimultaneousRun]) -> dict[str, tuple[str, ...]]:
        """Under which name each branch leaves each result."""
        outs, found = op.output_arg_names, []
        for body, world in zip(bodies(op), ends, strict=True):
            names = body.results(op)
            self.world.control.check_results(op, body, names, scope, AllRanks(world.held))
            found.append(names)
        return {out: tuple(names[k] for names in found) for k, out in enumerate(outs)}

    def _merge(self, name: str, pred: int, ends: list[SimultaneousRun], names: tuple[str, ...], scope: AllRanks) -> None:
        """What the ranks hold under a name behind both branches."""
        both = [world.held.agreed(n) for world, n in zip(ends, names, strict=True)]
        own = name in self.world.declared.differs or is_local(scope.signature(name)[1])
        if UNDEFINED in both or own:
            for rank in range(self.world.n):
                held = [UNDEFINED if own else world.held.mine(n, rank) for world, n in zip(ends, names, strict=True)]
                self.held.write(name, rank, self._chosen(pred, held, scope, name))
            return
        scope.write(name, self._chosen(pred, both, scope, name))
        if not all(n in world.held.by_all for world, n in zip(ends, names, strict=True)):
            self.held.by_all.discard(name)
            made = [r for r in range(self.world.n) if all(w.held.made(n, r) for w, n in zip(ends, names, strict=True))]
            self.held.empty.update((name, r) for r in made)

    def _chosen(self, pred: int, both: list[int], scope: AllRanks, name: str) -> int:
        if len(set(both)) == 1:
            return both[0]
        return UNDEFINED if min(both) < 0 else self.world.control.chosen(pred, both, scope, name)


def _view(program: Program, idx: int, named: Iterable[str]) -> Program:
    """A rank's branch as a program: the body is its block 0, which declares what it names of outside too."""
    body = program.blocks[idx]
    view = Program(program.name)
    view.groups, view.rank = program.groups, program.rank
    block = Block(view, 0, -1)
    outside = {n: d for n in named if n not in body.descs and (d := body.find(n)) is not None}
    block.descs, block.oplist = {**outside, **body.descs}, body.oplist
    view.blocks = [block, *program.blocks[1:]]
    return view
