"""Every way from one placement to another: the operators, run on ranks, give the parts that the new placement means."""

from itertools import product
from math import prod

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import At, Operator, Partial, Pieces, Program, ProgramPair, Shard, TensorType, Var, opdef
from fluidx.ir.parts import check_placement, coords_of, cut, holds, join
from fluidx.ir.types import show_placement
from fluidx.transpiler.algorithms import Refused, schedule
from fluidx.transpiler.lowering.redistribute import steps
from fluidx.transpiler.lowering.write_algorithm import others, why_no_algorithm
from fluidx.transpiler.specialize import Specializer
from tests.sweep import ALL

SHAPE = (7, 5)


def entries(group, n):
    """Entries over a group: whole, cuts of both axes, blocks, terms, roots, and pieces of which one is empty."""
    pieces = Pieces((0, 4, 4, 35)[:n] + (35,), group)
    return [
        None,
        Shard(0, group),
        Shard(1, group),
        Shard(0, group, 2),
        Partial("sum", group),
        Partial("max", group),
        At(0, group),
        At(n - 1, group),
        pieces,
    ]


def term(whole, placement, coords):
    """What a rank holds: its cut, and of a sum or maximum a term that is the whole on no rank."""
    part = np.array(cut(whole, tuple(e for e in placement if not isinstance(e, Partial)), coords))
    sums = [coords[e.group] for e in placement if isinstance(e, Partial) and e.op == "sum"]
    if sums and all(index == n - 1 for index, n in sums):
        part = part - 3.0 * (prod(n for _, n in sums) - 1)  # the last one has what is missing
    elif sums:
        part = np.full_like(part, 3.0)
    if any(isinstance(e, Partial) and e.op == "max" and coords[e.group][0] == 0 for e in placement):
        part = part - 1.0
    return part


def by(algorithm, block, op, n):
    """The operator with the algorithm, where that can carry it."""
    try:
        definition = opdef(op.type)
        able = n > 1 and not why_no_algorithm(op, block.desc("x").type, n)
        if definition.comm.algorithm_method and able and not others(block.program, block, op):
            schedule(algorithm, definition.comm.algorithm_method, n)
            return op.replace(attrs={**op.attrs, "algorithm": algorithm})
    except Refused:
        pass
    return op


def moved(old, new, mesh, algorithm):
    """The value that ranks have after the steps from `old` to `new`: for each rank, and joined."""
    program = Program("moved")
    program.groups = mesh.groups()
    block = program.global_block()
    t = TensorType("float64", SHAPE)
    block.declare(Var("x", t, old, persistable=True))
    path = steps(old, new, mesh.axes)
    name = "x"
    for k, s in enumerate(path):
        assert not check_placement(t, s.after, program.groups, mesh.world_size), (s, show_placement(s.after))
        block.declare(Var(f"y{k}", t, s.after))
        op = Operator(s.type, {"X": (name,)}, {"Out": (f"y{k}",)}, opdef(s.type).complete_attrs(s.attrs))
        block.oplist.append(by(algorithm, block, op, mesh.axes[op.attrs["group"]]) if algorithm and "group" in op.attrs else op)
        name = f"y{k}"
    special, n = Specializer(program), mesh.world_size
    startup = Program("startup")
    startup.groups = program.groups
    pairs = [ProgramPair(special.rank_program(r), startup) for r in range(n)]
    whole = np.arange(35.0).reshape(SHAPE)
    coords = [coords_of(program.groups, r) for r in range(n)]
    with fx.ParallelExecutor(pairs, timeout=5) as exe:
        for r in range(n):
            if holds(old, coords[r]):
                exe.scopes[r].set("x", term(whole, old, coords[r]))
        if name == "x":
            return whole, [s.get("x") if "x" in s.arrays else None for s in exe.scopes], whole, coords
        (each,) = exe.run(feed={}, fetch_list=[name], return_merged=False)
        return whole, each, join(each, new, program.groups, SHAPE), coords


def check(old, new, mesh, algorithm):
    whole, each, joined, coords = moved(old, new, mesh, algorithm)
    for got, here in zip(each, coords, strict=True):
        if holds(new, here) and not any(isinstance(e, Partial) for e in new):
            want = cut(whole, new, here)
            assert got is not None or want.size == 0
            assert want.size == 0 or np.array_equal(got, want), (show_placement(old), show_placement(new), here)
    assert np.array_equal(joined, whole), (show_placement(old), show_placement(new))


def has_a_way(old, new):
    """Terms of a maximum come from terms of a maximum only, terms of a sum from no maximum directly."""
    before = {e.group: e for e in old}
    return all(
        not isinstance(e, Partial) or before.get(e.group) == e or e.op == "sum" and not isinstance(before.get(e.group), Partial)
        for e in new
    )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("algorithm", ["", "ring", "halving_doubling"])
def test_every_pair_over_one_group(algorithm, ranks):
    mesh = fx.Mesh(dp=ranks)
    for a, b in product(entries("dp", ranks), repeat=2):
        old, new = tuple(e for e in (a,) if e), tuple(e for e in (b,) if e)
        if a != b and has_a_way(old, new):
            check(old, new, mesh, algorithm)


def two_groups(mesh):
    """Placements over two groups, in the order of the mesh's axes."""
    outer, inner = mesh.axes
    for a, b in product(entries(outer, mesh.axes[outer]), entries(inner, mesh.axes[inner])):
        place = tuple(e for e in (a, b) if e is not None)
        if check_placement(TensorType("float64", SHAPE), place, mesh.groups(), mesh.world_size):
            continue
        if len({e.op for e in place if isinstance(e, Partial)}) > 1:
            continue
        yield place


MESH = fx.Mesh(dp=2, tp=2)
PLACES = list(two_groups(MESH))


@pytest.mark.parametrize("old", PLACES, ids=show_placement)
def test_every_pair_over_a_mesh(old):
    at = PLACES.index(old)
    for k, new in enumerate(PLACES):
        if new == old or not has_a_way(old, new) or not (ALL or (at < k) == ((at + k) % 2 == 0)):  # of each two places one way alone
            continue
        check(old, new, MESH, "")
