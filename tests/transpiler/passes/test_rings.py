"""Collectives of a group go over its rings in turns, and answers do not change."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.compiler import strategy_of
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import ProgramPair
from fluidx.testing import check_pass
from fluidx.transpiler.passes.rings import Rings
from fluidx.verify import verify_ranks

GIVEN = """
  group dp = [0, 1]
  group tp = [0] [1]
  var %a: f32[4] partial(sum) over dp; var %b: f32[4] partial(sum) over dp; var %c: f32[4] partial(sum) over dp
  var %d: f32[4] partial(sum) over tp; var %e: f32[4] partial(sum) over dp
"""


def test_each_group_takes_its_rings_in_turns():
    check_pass(Rings(2), given=GIVEN, before="""
dist:
  %a.sum: f32[4] = all_reduce(%a) {group="dp", op="sum"}
  %b.sum: f32[4] = all_reduce(%b) {group="dp", op="sum"}
  %d.sum: f32[4] = all_reduce(%d) {group="tp", op="sum"}
  %e.sum: f32[4] = all_reduce(%e) {algorithm="ring", group="dp", op="sum"}
  %c.part: f32[4] shard(0) over dp = reduce_scatter(%c) {group="dp", op="sum"}
""", after="""
dist:
  %a.sum: f32[4] = all_reduce(%a) {group="dp", op="sum"}
  %b.sum: f32[4] = all_reduce(%b) {group="dp", op="sum", ring=1}
  %d.sum: f32[4] = all_reduce(%d) {group="tp", op="sum"}
  %e.sum: f32[4] = all_reduce(%e) {algorithm="ring", group="dp", op="sum"}
  %c.part: f32[4] shard(0) over dp = reduce_scatter(%c) {group="dp", op="sum"}
""")  # fmt: skip


def mlp():
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.layers.fc(fx.data("x", [-1, 4], "float32"), 6, act="relu")
        loss = fx.layers.mean(fx.layers.fc(h, 3))
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup, loss


def transpiled(rings):
    main, startup, loss = mlp()
    config = fx.DistributeTranspilerConfig()
    config.nccl_comm_num = rings
    t = fx.DistributeTranspiler(config)
    t.strategy = fx.strategies.data_parallel(bucket_mb=0, rings=rings) if rings else t.strategy
    t.transpile(program=main, startup_program=startup, trainers=2)
    return t, loss


def test_fluids_nccl_comm_num_makes_rings():
    config = fx.DistributeTranspilerConfig(nccl_comm_num=2)
    assert repr(config.strategy()) == "data_parallel(rings=2)"
    for mode in ("reduce", "ring_optimizer"):
        assert "rings=2" in repr(fx.DistributeTranspilerConfig(collective_mode=mode, nccl_comm_num=2).strategy())
    assert repr(fx.DistributeTranspilerConfig(nccl_comm_num=1).strategy()) == "data_parallel()"
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(fx.TranspileError, match="nccl_comm_num is a number of communicators for each group, 1 or more, got"):
            fx.DistributeTranspilerConfig(nccl_comm_num=wrong).strategy()
        with pytest.raises(fx.TranspileError, match="data_parallel: rings is a number of communicators"):
            fx.strategies.data_parallel(rings=wrong)


def test_a_build_strategy_makes_rings_too():
    options = fx.BuildStrategy()
    assert repr(strategy_of(options)) == "data_parallel()"
    options.nccl_comm_num = 2
    assert repr(strategy_of(options)) == "data_parallel(rings=2)"
    options.reduce_strategy = fx.BuildStrategy.ReduceStrategy.Reduce
    assert repr(strategy_of(options)) == "reduce_broadcast(roots='greedy', rings=2)"


def hierarchical(inter, trainers):
    main, startup, _ = mlp()
    config = fx.DistributeTranspilerConfig(use_hierarchical_allreduce=True, hierarchical_allreduce_inter_nranks=inter)
    return fx.DistributeTranspiler(config).transpile(program=main, startup_program=startup, trainers=trainers)


@pytest.mark.parametrize("inter, trainers", [
    (2, 4), (2, "a:1,a:2,b:1,b:2"), (0, "a:1,a:2,b:1,b:2"), (1, fx.Cluster(2, 2)),
])  # fmt: skip
def test_fluids_hierarchical_all_reduce_reduces_inside_hosts_first(inter, trainers):
    t = hierarchical(inter, trainers)
    assert t.main.groups["node"] == ((0, 1), (2, 3))
    used = {op.attrs["group"] for op in t.main.ops if op.type in ("all_reduce", "reduce_scatter", "all_gather")}
    assert used == {"node", "rail"}
    t.verify()


@pytest.mark.parametrize("inter, trainers, why", [
    (3, 4, "hierarchical_allreduce_inter_nranks=3 does not divide 4 trainers into several hosts"),
    (4, 4, "does not divide 4 trainers"),
    (2, fx.Cluster(2, 4), "hierarchical_allreduce_inter_nranks=2, but the hosts of the trainers have 4 each; leave it at 0"),
    (-1, 4, "is a number of ranks, 0 or more, got -1"),
    (0, 4, "hierarchical=True"),
])  # fmt: skip
def test_a_hierarchy_without_hosts_is_refused(inter, trainers, why):
    with pytest.raises(fx.TranspileError, match=why):
        hierarchical(inter, trainers)
    with pytest.raises(fx.TranspileError, match="hierarchical_allreduce_inter_nranks=2 needs use_hierarchical_allreduce=True"):
        fx.DistributeTranspilerConfig(hierarchical_allreduce_inter_nranks=2).ranks(4)


def test_programs_and_plans_say_which_ring():
    t, _ = transpiled(3)
    t.verify()
    mine = t.get_trainer_program(1)
    assert [op.attrs["ring"] for op in mine.ops if op.type == "all_reduce"] == [0, 1, 2, 0]
    (init,) = [op for op in t.get_startup_program(1).ops if op.type == "nccl_init"]
    assert init.attrs["rings"] == 3
    sent = [op.attrs["ring"] for op in t.get_startup_program(1).ops if op.type == "broadcast"]
    assert sent == [k % 3 for k in range(5)]
    text = str(dry_plan(mine, batch=4))
    assert [f"ring {k}" in text for k in (1, 2, 3)] == [True, True, False]
    assert "ring " not in str(dry_plan(transpiled(1)[0].get_trainer_program(1), batch=4))
    assert fx.Program.parse_from_string(mine.to_string(fluid_names="c")) == mine


def test_answers_are_those_without_rings():
    found = []
    for rings in (1, 2, 3):
        t, loss = transpiled(rings)
        with fx.ParallelExecutor(t, places=fx.cpu_places(2), timeout=10) as exe:
            exe.run_startup()
            feed = {"x": np.arange(16, dtype="float32").reshape(4, 4)}
            found.append([exe.run(feed=feed, fetch_list=[loss])[0].tobytes() for _ in range(3)])
    assert found[0] == found[1] == found[2]


def test_ranks_that_use_different_rings_are_refused():
    """NCCL would wait for ever."""
    t, _ = transpiled(2)
    main, startup, _ = mlp()
    mains = [t.get_trainer_program(r) for r in range(2)]
    startups = [t.get_startup_program(r) for r in range(2)]
    verify_ranks(ProgramPair(main, startup), mains, startups)
    other = fx.Program.parse_from_string(str(mains[1]).replace("ring=1", "ring=0", 1))
    assert other != mains[1]
    with pytest.raises(fx.VerifyError, match="ring"):
        verify_ranks(ProgramPair(main, startup), [mains[0], other], startups)
