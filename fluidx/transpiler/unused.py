"""Warnings about requests that have no effect: a mesh axis that no value is placed over, or ranks that never communicate."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.opdef import opdef
from ..ir.operator import Operator, Role
from ..ir.pass_base import Job
from ..ir.program import Block, Program, ProgramPair
from .cluster import DATA, Mesh
from .passes.place import Place
from .placement.parameter_homes import EVERYWHERE
from .placement.placement_walk import where
from .strategies import Strategy


def unused(strategy: Strategy, source: Program, made: ProgramPair, job: Job) -> list[str]:
    """Sentences that name a request without effect, and what to write instead."""
    found = list(job.unused)
    meets = next((op for _, op in _ops(source) if opdef(op.type).comm.replica_collective), None)
    updates = [(block, op) for block, op in _ops(made.main) if op.role is Role.OPTIMIZE and op.output("ParamOut")]
    several = job.mesh.axes.get(DATA, 1) > 1
    apart = any(e.is_own for d in made.main.global_block().descs.values() for e in d.placement)
    if several and meets is not None and not apart:
        found.append(
            f"{strategy!r} keeps the parameters of all ranks equal, so {meets.type} changes nothing and saves nothing; "
            f"LocalSGD, DGC and Adasum are for ranks that train separately: fx.strategies.replicas(){where(meets)}"
        )
    if apart and updates and meets is None:
        found.append(
            f"{strategy!r}: ranks train separately, and no operator of {source.label()} combines them: {job.mesh.world_size} separate "
            "models; minimize with fx.optimizer.LocalSGDOptimizer, or take fx.strategies.data_parallel()"
        )
    found += _idle_axes(made.main, job)
    if several and updates and _cuts(strategy) and not any(block.desc(op.output("ParamOut")[0]).placement for block, op in updates):
        found.append(
            f"{strategy!r} cuts no parameter of {source.label()}, and none has a root: each rank updates all of them, as by data_parallel()"
        )
    if strategy.servers and not strategy.keep and not any(op.type == "push" for _, op in _ops(made.main)):
        found.append(
            f"{strategy!r}: the servers receive nothing, because no sum of {source.label()} has terms on several trainers; leave them out: "
            "fx.strategies.data_parallel()"
        )
    return found


def _ops(program: Program) -> Iterator[tuple[Block, Operator]]:
    return ((block, op) for block in program.blocks for op in block.oplist)


def _cuts(strategy: Strategy) -> bool:
    """Does a strategy store or update parameters with a placement other than replicated?"""
    places = [p for p in strategy.passes if isinstance(p, Place)]
    return any(p.update not in (None, EVERYWHERE) or p.rest != EVERYWHERE for p in places)


def _idle_axes(main: Program, job: Job) -> Iterator[str]:
    """Warnings about axes of a mesh whose ranks all do the same work."""
    if not isinstance(job.mesh, Mesh):
        return
    over = {e.group for block in main.blocks for d in block.descs.values() for e in d.placement}
    sizes = job.mesh.sizes
    for axis in (a for a, n in sizes.items() if n > 1 and a not in over):
        fewer = ", ".join(f"{a}={n * sizes[axis] if a == 'dp' else n}" for a, n in sizes.items() if a != axis) or f"dp={sizes[axis]}"
        yield (
            f"no value is placed over axis {axis} of {job.mesh!r}: its {sizes[axis]} ranks all do the same work; cut parameters over it, "
            f"ParamAttr(placement=Shard(1, {axis!r})), or give trainers=fx.Mesh({fewer})"
        )
