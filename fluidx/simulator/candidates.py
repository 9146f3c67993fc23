"""The candidates of a planner: every strategy of the catalogue with the options that it declares, on every mesh that a program asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ..ir.errors import TranspileError, nearest
from ..ir.opdef import opdef
from ..ir.operator import Role
from ..ir.pass_base import Pass
from ..ir.program import Program
from ..rewrite import Recompute
from ..transpiler import strategies
from ..transpiler.cluster import DATA, Cluster, Mesh
from ..transpiler.passes.time_axis import Turns
from ..transpiler.placement.pipeline_stages import STAGES, stage_of
from ..transpiler.strategies import Strategy
from ..transpiler.strategies.search_space import SPACES, SearchSpace

OVER_HOSTS: tuple[dict[str, Any], ...] = ({}, {"hierarchical": False}, {"algorithm": "auto"})  # how collectives go over several hosts
ON_ONE: tuple[dict[str, Any], ...] = ({}, {"algorithm": "auto"})


class Candidate(NamedTuple):
    """A strategy for ranks. `order`: of two candidates that take equally long, the one with the lower order is simpler."""

    strategy: Strategy
    trainers: Cluster | Mesh
    order: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int, int]:
        """What decides its plan on one device: ranks that train on different data, micro-batches, and the number of rewrites."""
        turns = next((p.count for p in self.strategy.passes if isinstance(p, Turns)), 1)
        return self.trainers.axes.get(DATA, 1), turns, len(self.strategy.rewrites)

    @property
    def recomputes(self) -> bool:
        """Has it Recompute among its rewrites?"""
        return any(isinstance(p, Recompute) for p in self.strategy.rewrites)

    def __str__(self) -> str:
        where = f" on {self.trainers!r}" if isinstance(self.trainers, Mesh) else ""
        return f"{self.strategy.call}{where}"


def candidates(
    program: Program, cluster: Cluster | Mesh, names: Sequence[str] | None = None, wires: Sequence[str] = (),
    saving: Sequence[Pass] = (),
) -> list[Candidate]:  # fmt: skip
    """The candidates for a program on the ranks of a cluster, the simplest first. `names` are the strategies to take, by default all that
    need no more ranks than train; `wires` the dtypes in which gradients may travel beside their own; `saving` the rewrites that save
    memory, each of which is tried.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup):
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> found = candidates(main, fx.Cluster(1, 4), ["ring_optimizer"])
    >>> [str(c) for c in found[:2]], len(found)
    (["ring_optimizer(chunk_mb=4, roots='greedy')", "ring_optimizer(chunk_mb=1, roots='greedy')"], 3)
    """
    spaces = _chosen(names)
    found: list[Candidate] = []
    for at, trainers in enumerate(meshes(program, cluster)):
        several = isinstance(trainers, Cluster) and trainers.hosts > 1
        staged = trainers.axes.get(STAGES, 1) > 1
        for name, space in spaces.items():
            if space.needs == "hosts" and not several or (space.needs == "stages") is not staged:
                continue
            made = _within(name, space, spaces, staged) if space.within else _alone(name, space, several, wires, saving)
            found += [Candidate(one, trainers, (space.order, *order, at)) for order, one in made]
    return sorted(found, key=lambda c: c.order)


def _chosen(names: Sequence[str] | None) -> Mapping[str, SearchSpace]:
    for name in names or ():
        if name not in strategies.CATALOGUE:
            raise TranspileError(f"plan: unknown strategy {name!r}; {nearest(str(name), SPACES, 'it tries')}")
        if name not in SPACES:
            raise TranspileError(f"plan does not try {name}, which needs other ranks or another program; it tries: {', '.join(SPACES)}")
    return {n: space for n, space in SPACES.items() if names is None or n in names}


def _alone(
    name: str, space: SearchSpace, several: bool, wires: Sequence[str], saving: Sequence[Pass]
) -> Iterator[tuple[tuple[int, ...], Strategy]]:  # fmt: skip
    """A strategy with its options, algorithms and wires; and its usual options with what saves memory."""
    ways = OVER_HOSTS if several else ON_ONE
    for number, (own, way) in enumerate(product(space.choices(), ways if space.carried else ways[:1])):
        if way and len(own) > 1:  # another way beside the usual options, and beside each one that is changed
            continue
        for k, wire in enumerate(("", *wires)):
            yield (len(own) + len(way) + k, number), strategies.get(name, **own, **way, **({"wire": wire} if wire else {}))
    if space.saves or space.order == 0:
        usual = strategies.get(name)
        for number, one in enumerate(saving):
            yield (10, number), usual.with_rewrites(one)
        if space.saves:
            away = strategies.get(name, cpu_offload=True)
            yield (11, 0), away
            yield from (((12, number), away.with_rewrites(one)) for number, one in enumerate(saving))


def _within(
    name: str, space: SearchSpace, spaces: Mapping[str, SearchSpace], staged: bool
) -> Iterator[tuple[tuple[int, ...], Strategy]]:  # fmt: skip
    """A strategy that cuts the batch, of those that save memory, and of the simplest one."""
    inner = {n: s for n, s in spaces.items() if not s.within and not s.needs and (s.saves or s.order == 0)}
    for number, own in enumerate(space.choices()):
        yield (0, number), strategies.get(name, **own)
        for n, s in inner.items() if not staged else ():
            if s.order:
                yield (s.order, number), strategies.get(name, **own, of=strategies.get(n))


def trains(program: Program) -> bool:
    """Does a program train: has it a backward pass?"""
    return any(op.role is Role.BACKWARD for op in program.global_block().oplist)


def axes_of(program: Program) -> dict[str, int]:
    """The mesh axes beside `dp` that a program's annotations name. The axis of stages has its number of stages, the others 0: any number.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("cut"), fx.Program("cut_startup")
    >>> with fx.program_guard(main, startup):
    ...     attr = fx.ParamAttr(placement=fx.ir.Shard(1, "tp"))
    ...     _ = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2, param_attr=attr)
    >>> axes_of(main)
    {'tp': 0}
    """
    found = {e.group: 0 for d in program.global_block().descs.values() for e in d.placement if e.group and e.group != DATA}
    stages = 0
    for op in program.global_block().oplist:
        if op.device and (stage := stage_of(op.device)) is not None:
            stages = max(stages, stage + 1)
        if opdef(op.type).comm.annotation is not None:
            found.update({g: 0 for g in op.attrs.get("groups", ()) if g != DATA})
    return {**({STAGES: stages} if stages > 1 else {}), **{g: 0 for g in sorted(found) if g != STAGES}}


def meshes(program: Program, cluster: Cluster | Mesh) -> list[Cluster | Mesh]:
    """The ways to arrange the ranks of a cluster for a program: the cluster itself, or every mesh of the axes that the program names.
    Axes other than `dp` and stages stay inside a host. A mesh that is given is taken as it is.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("cut"), fx.Program("cut_startup")
    >>> with fx.program_guard(main, startup):
    ...     attr = fx.ParamAttr(placement=fx.ir.Shard(1, "tp"))
    ...     _ = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 2, param_attr=attr)
    >>> meshes(main, fx.Cluster(1, 4))
    [Mesh(dp=4, tp=1), Mesh(dp=2, tp=2), Mesh(dp=1, tp=4)]
    """
    axes = axes_of(program)
    if isinstance(cluster, Mesh) or not axes:
        return [cluster]
    stages, others = axes.pop(STAGES, 1), list(axes)
    most = cluster.devices_per_host
    sizes = [k for k in range(1, most + 1) if most % k == 0]
    found: list[Cluster | Mesh] = []
    for choice in product(sizes, repeat=len(others)):
        size = prod(choice) * stages
        if prod(choice) <= most and cluster.world_size % size == 0:
            named = {**({STAGES: stages} if stages > 1 else {}), DATA: cluster.world_size // size, **dict(zip(others, choice, strict=True))}
            found.append(Mesh(**named) if cluster.hardware is None else Mesh(**named).on(cluster))
    if not found:
        raise TranspileError(
            f"plan: {program.label()} has {stages} pipeline stages, and {cluster.world_size} ranks are no multiple of them; "
            f"give {stages * max(1, cluster.world_size // stages)} ranks"
        )
    return found
