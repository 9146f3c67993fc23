"""Rank programs: what does not name a rank is shared, what lies at a root runs there, rings are written out hop by hop."""

from collections import Counter

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramPair, Role
from fluidx.testing import run_ranks
from fluidx.testing.models import classifier, integer_mlp
from fluidx.transpiler.specialize import Specializer


def transpiled(model, strategy, trainers):
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "zero2"])
def test_ranks_that_run_alike_share_operators_and_variables(strategy):
    t = transpiled(classifier(), strategy, 8)
    programs = [t.get_trainer_program(r) for r in range(8)]
    for p in programs:
        assert all(a is b for a, b in zip(p.ops, t.main.ops, strict=True))
        assert all(p.global_block().descs[n] is d for n, d in t.main.global_block().descs.items())
    assert [p.rank for p in programs] == list(range(8)) and t.main.rank is None


def test_updates_run_at_their_root_only():
    t = transpiled(integer_mlp(), fx.strategies.reduce_broadcast(bucket_mb=0), 3)
    roots = {
        op.output_arg_names[0]: t.main.global_block().desc(op.output_arg_names[0]).placement[0].root
        for op in t.main.ops
        if op.output("ParamOut")
    }
    assert set(roots.values()) == {0, 1, 2}
    for r in range(3):
        ops = t.get_trainer_program(r).ops
        assert [op.output_arg_names[0] for op in ops if op.output("ParamOut")] == [n for n, root in roots.items() if root == r]
        # a collective is everybody's, wherever its result lies
        assert Counter(op.type for op in ops if op.role is Role.DIST) == Counter(op.type for op in t.main.ops if op.role is Role.DIST)


def test_an_operator_without_a_rank_in_it_is_the_same_object_in_ring_programs_too():
    t = transpiled(integer_mlp(), "ring_optimizer", 4)
    everyone = {id(op) for op in t.main.ops}
    for r in range(4):
        assert all(id(op) in everyone or op.role is Role.DIST for op in t.get_trainer_program(r).ops)


RING = """
program ring {
  group dp = [0, 1, 2]
  var %g: f32[4,3] partial(sum) over dp persistable
dist:
  %s: f32[4,3] PLACE = THERE(%g) {algorithm="ring", ATTRS, group="dp", op="sum"}
  %w: f32[4,3] = BACK(%s) {algorithm="ring", ATTRS, group="dp"}
}
"""
PLACES = {
    "at a root": ("at(1) over dp", "root=1", "reduce", "broadcast"),
    "in pieces": ("pieces(0, 5, 5, 12) over dp", "bounds=[0, 5, 5, 12]", "reduce_scatter", "all_gather"),
}


def ring(place, attrs, there, back):
    return RING.replace("PLACE", place).replace("ATTRS", attrs).replace("THERE", there).replace("BACK", back)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_ring_is_n_minus_1_hops_there_and_back(place):
    program = fx.Program.parse_from_string(ring(*place))
    special = Specializer(program)
    ranks = [special.rank_program(r) for r in range(3)]
    messages = 1 if "reduce" in place else 2  # one of the three pieces is empty
    sends = [(r, op.attrs["peer"]) for r, p in enumerate(ranks) for op in p.ops if op.type == "send"]
    assert len(sends) == 2 * 2 * messages and all(peer == (r + 1) % 3 for r, peer in sends)
    assert sum(op.type == "recv" for p in ranks for op in p.ops) == len(sends)
    startup = fx.Program("startup")
    startup.groups = program.groups
    with fx.ParallelExecutor([ProgramPair(p, startup) for p in ranks], timeout=5) as exe:
        for r, scope in enumerate(exe.scopes):
            scope.set("g", np.full((4, 3), 10.0**r, "float32"))
        s, w = exe.run(feed={}, fetch_list=["s", "w"])
        assert (s == 111).all() and s.shape == (4, 3)
        (each,) = exe.run(feed={}, fetch_list=["w"], return_merged=False)
        assert all((w == 111).all() for w in each)


def test_rings_of_one_wave_travel_hop_by_hop_together():
    text = ring(*PLACES["at a root"])
    text = text.replace("dist:\n", 'dist:\n  %t: f32[4,3] at(2) over dp = reduce(%g) {algorithm="ring", root=2, group="dp", op="sum"}\n', 1)
    special = Specializer(fx.Program.parse_from_string(text))
    batches = [[op.attrs["batch"] for op in special.rank_program(r).ops if op.type in ("send", "recv")] for r in range(3)]
    for mine in batches:
        reduce = [b for b in mine if b.startswith("ring.0.")]
        assert len({b.rpartition(".hop")[0] for b in reduce}) == 1 and reduce == sorted(reduce)


def test_a_message_is_at_most_4_mib():
    text = ring("at(0) over dp", "root=0", "reduce", "broadcast").replace("f32[4,3]", "f32[3,1000000]")
    rank1 = Specializer(fx.Program.parse_from_string(text)).rank_program(1)
    received = [
        rank1.global_block().desc(op.output_arg_names[0]).type.nbytes
        for op in rank1.ops
        if op.type == "recv" and op.attrs["batch"].startswith("ring.0.")
    ]
    assert sum(received) == 0  # rank 1 begins the ring of root 0
    rank2 = Specializer(fx.Program.parse_from_string(text)).rank_program(2)
    received = [
        rank2.global_block().desc(op.output_arg_names[0]).type.nbytes
        for op in rank2.ops
        if op.type == "recv" and op.attrs["batch"].startswith("ring.0.")
    ]
    assert sum(received) == 12_000_000 and max(received) <= 4 * 2**20


@pytest.mark.parametrize("strategy", [name for name in fx.strategies.CATALOGUE if name != "pipeline"])  # its stages are marked
@pytest.mark.parametrize("trainers", [2, fx.Cluster(2, 2)], ids=str)
def test_rank_programs_read_back_from_their_text_run_by_themselves(strategy, trainers):
    if strategy == "rails" and trainers == 2:
        pytest.skip("rails need several hosts")
    model = integer_mlp()
    t = transpiled(model, strategy, trainers)
    pairs = []
    for r in range(t.world_size):
        main, startup = str(t.get_trainer_program(r)), str(t.get_startup_program(r))
        pairs.append(ProgramPair(fx.Program.parse_from_string(main), fx.Program.parse_from_string(startup)))
    values = []
    for programs in (t, pairs):
        with fx.ParallelExecutor(programs, places=fx.cpu_places(t.world_size)) as exe:
            exe.run_startup()
            (loss,) = exe.run(feed=model.feed(7), fetch_list=[model.loss.name])
            values.append((loss.tolist(), [exe.state(p).tolist() for p, _ in model.gradients]))
    assert values[0] == values[1]


def test_run_ranks_takes_what_specialize_makes():
    text = (
        'program p {\n  group dp = [0, 1]\n  data %x: f32[4] at(1) over dp\ndist:\n  %y: f32[4] = broadcast(%x) {group="dp", root=1}\n}\n'
    )
    special = Specializer(fx.Program.parse_from_string(text))
    both = run_ranks([special.rank_program(r) for r in range(2)], {"x": np.arange(4.0, dtype="float32")}, ["y"])
    assert [y.tolist() for (y,) in both] == [[0, 1, 2, 3]] * 2
