"""Plans of all ranks of a transpiled program: ranks with equal operators and local sizes share one plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from ..executor.plan.records import Plan
from ..ir.opdef import Effect, opdef
from ..ir.parts import Coords, coords_of, local_shape
from ..ir.program import Program
from ..ir.types import ANY
from ..transpiler.placement.pipeline_stages import STAGES
from ..transpiler.transpiler import DistributeTranspiler

EXACT = 64  # up to so many ranks, ranks are alike only if every local size is equal; unless the caller says another number
_TYPE = attrgetter("type")
_SAMPLES = 4  # of more than 64 ranks that count as alike so many are planned, of fewer 2; the one with most memory stands for all


class PlannedClass(NamedTuple):
    """The plan of some ranks. `programs` are their programs, by rank; none if they send nothing, or to the same ranks of their own `pp`."""

    plan: Plan
    ranks: tuple[int, ...]
    programs: Mapping[int, Program]


def plan_ranks(
    t: DistributeTranspiler, make: Callable[[Program], Plan], exact: int = EXACT, rows: Sequence[int] = ()
) -> list[PlannedClass]:  # fmt: skip
    """Plan the ranks with `make`, one of each class. `rows` are the sizes of the open axes of what the ranks are fed together: ranks that
    have different numbers of rows are not alike.

    Above `exact` ranks that have the operators of the program for all ranks, and no others, all ranks count as alike: an even cut gives
    some of them one element more, and the parts of a bucket are of other parameters, with as many elements in total. So do the ranks of one
    stage of a pipeline, if only stages have operators of their own; and so do ranks that differ in messages of collectives alone, if they
    send and receive in the same order. With `exact=0`, one rank is planned if ranks differ beside that in the
    messages of collectives alone, and these count as collectives of the communicator.

    >>> import fluidx as fx
    >>> from fluidx.executor.plan.dry_run import dry_plan
    >>> main, startup = fx.Program("line"), fx.Program("line_startup")
    >>> with fx.program_guard(main, startup):
    ...     loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 2], "float32"), size=1))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=4)
    >>> [planned.ranks for planned in plan_ranks(t, lambda program: dry_plan(program, batch=8))]
    [(0, 1, 2, 3)]
    """
    n = t.world_size
    if not exact and (common_program := t.without_rounds()) is not None:
        return [PlannedClass(make(common_program), tuple(range(n)), {})]
    if n > exact and t.ranks_have_all_operators:
        samples = _SAMPLES if n > EXACT else 2
        some = {r: make(t.get_trainer_program(r)) for r in sorted({k * (n - 1) // (samples - 1) for k in range(samples)})}
        largest = max(some.values(), key=lambda p: p.peak_bytes)
        return [PlannedClass(largest, tuple(range(n)), {})]
    if n > exact and _differ_by_stage(t):
        stages = zip(*t.main.groups[STAGES], strict=True)
        return [_by_ends(t, make, sorted(ranks)) for ranks in stages]
    common = {id(op) for block in t.main.blocks for op in block.oplist}
    alike = n > exact and t.ranks_differ_in_rounds_only
    classes: dict[int, list[int]] = {}
    for rank in range(n):
        program = t.get_trainer_program(rank)
        coords = coords_of(program.groups, rank, program.turns)
        key = hash(tuple(map(_TYPE, program.ops))) if alike else _signature(program, coords, common, t.main, rows)
        classes.setdefault(key, []).append(rank)
    found = []
    for ranks in classes.values():
        programs = {r: t.get_trainer_program(r) for r in ranks}
        found.append(PlannedClass(make(programs[ranks[0]]), tuple(ranks), programs))
    return found


def _differ_by_stage(t: DistributeTranspiler) -> bool:
    """Do only the stages of a pipeline have operators and messages of their own?"""
    if STAGES not in t.main.groups:
        return False
    descs = [d for block in t.main.blocks for d in block.descs.values()]
    roots = {e.group for d in descs for e in d.placement if e.root is not None}
    return roots == {STAGES} and not any(opdef(op.type).effect is Effect.P2P for op in t.main.ops)


def _by_ends(t: DistributeTranspiler, make: Callable[[Program], Plan], ranks: Sequence[int]) -> PlannedClass:
    """The class of ranks that count as alike: the first and the last are planned, and the one with more memory stands for all."""
    some = [make(t.get_trainer_program(r)) for r in (ranks[0], ranks[-1])]
    return PlannedClass(max(some, key=lambda p: p.peak_bytes), tuple(ranks), {})


def _signature(program: Program, coords: Coords, common: set[int], source: Program, rows: Sequence[int]) -> int:
    """A hash, equal for ranks whose programs do the same on values of the same local sizes. Names, peers and positions do not count."""
    numbers: dict[str, int] = {}
    shapes: dict[tuple[int, int], tuple] = {}

    def number(names: Sequence[str]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(n, len(numbers)) for n in names])

    found: list[object] = []
    for block, given in zip(program.blocks, source.blocks, strict=True):
        descs = block.descs

        def shape(name: str) -> tuple:
            d = descs[name]  # noqa: B023
            key = id(d.type), id(d.placement)
            if key not in shapes:
                shapes[key] = (d.type.dtype, *(local_shape(s, d.placement, coords) for s in _closed(d.type.shape, rows)))
            return shapes[key]

        for op in block.oplist:
            if id(op) in common:
                found.append(id(op))
            else:
                outs = op.output_arg_names
                found.append((op.type, number(op.input_arg_names), number(outs), tuple([shape(n) for n in outs if n in descs])))
        found.append(tuple([shape(n) for n in given.descs if n in descs]))
    return hash(tuple(found))


def _closed(shape: tuple[int, ...], rows: Sequence[int]) -> list[tuple[int, ...]]:
    """A shape with each of these sizes on its open axes."""
    return [tuple([r if d == ANY else d for d in shape]) for r in rows] if rows and ANY in shape else [shape]
