"""Predictions of transpiled programs: bounds, properties, refusals, and that every strategy can be predicted."""

from dataclasses import replace

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.hardware import load
from fluidx.ir.errors import ExecutionError, FeedError, FluidxError
from fluidx.simulator.costs import Costs
from fluidx.transpiler.strategies import CATALOGUE


def programs(width=64, layers=3):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, width], "float32")
        for _ in range(layers):
            h = fx.layers.fc(h, width, act="relu")
        loss = fx.layers.mean(h)
        fx.optimizer.Adam(0.1).minimize(loss)
    return main, startup


def transpiled(strategy="data_parallel", ranks=4, of=None, **options):
    main, startup = of or programs()
    made = fx.strategies.get(strategy, **options)
    return fx.DistributeTranspiler(made).transpile(program=main, startup_program=startup, trainers=ranks)


NEEDS = {"pipeline": {"micro_batches": 2}, "micro_batches": {"count": 2}, "rails": {}}


@pytest.mark.parametrize("strategy", CATALOGUE)
def test_every_strategy_is_predicted(strategy):
    ranks = fx.Cluster(hosts=2, devices_per_host=2) if strategy == "rails" else fx.Mesh(pp=2, dp=2) if strategy == "pipeline" else 4
    of = programs()
    if strategy == "pipeline":
        main, startup = fx.Program("stages"), fx.Program("stages_startup")
        with fx.program_guard(main, startup), fx.unique_name.guard():
            h = fx.data("x", [-1, 64], "float32")
            for stage in range(2):
                with fx.device_guard(f"gpu:{stage}"):
                    h = fx.layers.fc(h, 64, act="relu")
                    loss = fx.layers.mean(h)
            fx.optimizer.SGD(0.1).minimize(loss)
        of = main, startup
    t = transpiled(strategy, ranks, of, **NEEDS.get(strategy, {}))
    found = fx.simulate(t, cluster="dgx-a100", batch=64)
    assert found.seconds >= found.bounds.seconds > 0
    assert sum(p.seconds for p in found.critical_path) == pytest.approx(found.seconds, rel=1e-9)
    assert len(str(found).splitlines()) >= 4


def test_one_rank_is_the_sum_of_its_steps():
    t = transpiled(ranks=1)
    found = fx.simulate(t, cluster="dgx-a100", batch=64)
    costs, plan = Costs(load("dgx-a100")), dry_plan(t.get_trainer_program(0), batch=64, device="cuda")
    steps = sum(costs.step(plan, s).seconds for s in plan.steps)
    assert found.seconds == pytest.approx(steps + costs.around(plan).seconds, rel=1e-9)  # sums of floats in another order
    assert found.ranks[0].communication == 0


def test_memory_is_that_of_the_plan():
    t = transpiled("zero1")
    found = fx.simulate(t, cluster="dgx-a100", batch=64)
    for rank in range(4):
        assert found.memory(rank).device == dry_plan(t.get_trainer_program(rank), batch=64, device="cuda").peak_bytes


def test_more_bandwidth_less_latency_and_faster_compute_are_never_slower():
    found = fx.simulate(transpiled("ring_optimizer"), cluster="dgx-v100", batch=64)
    for factors in ({"network": 2.0}, {"latency": 0.5}, {"compute": 2.0}):
        assert found.what_if(**factors).seconds <= found.seconds
    for factors in ({"network": 0.5}, {"latency": 2.0}, {"compute": 0.5}):
        assert found.what_if(**factors).seconds >= found.seconds


def test_twice_the_network_is_a_machine_with_twice_the_bandwidth():
    t, machine = transpiled("zero1", of=programs(width=256)), load("dgx-v100")
    inside = machine.inside
    twice = replace(
        machine, inside=replace(inside, bandwidth=inside.bandwidth._replace(value=2 * inside.bandwidth.value),
                                by_group={n: f._replace(value=2 * f.value) for n, f in inside.by_group.items()}),
    )  # fmt: skip
    assert fx.simulate(t, cluster=machine, batch=64).what_if(network=2.0).seconds == fx.simulate(t, cluster=twice, batch=64).seconds


def test_free_communication_is_the_slowest_rank():
    t = transpiled()
    found = fx.simulate(t, cluster="dgx-a100", batch=64, slow={2: 3.0})
    free = found.what_if(network=1e12, latency=0.0)
    slowdown = found.hardware.device.slowdown.value
    assert found.bounds.compute <= free.seconds <= found.bounds.compute * slowdown
    assert free.seconds == pytest.approx(free.of_rank(2).compute, rel=1e-6)  # 1e12 times the bandwidth is not infinite


def test_others_wait_for_a_slow_rank_and_the_result_says_so():
    found = fx.simulate(transpiled(), cluster="dgx-a100", batch=64, slow={2: 3.0})
    assert [r.ranks for r in found.ranks] == [(0, 1, 3), (2,)]
    assert found.of_rank(0).waiting[2] > 0 and not found.of_rank(2).waiting
    assert "for rank 2" in found.why()


def test_waiting_is_a_part_of_what_is_exposed():
    # the gradients of the late rank come late, and the others compute meanwhile: only what their compute stream waits for is exposed
    t = transpiled(bucket_mb=0, of=programs(512, layers=6))
    for slow in ({2: 1.05}, {2: 1.3}, {2: 3.0}):
        found = fx.simulate(t, cluster="dgx-a100", batch=8192, slow=slow)
        for r in range(4):
            times = found.of_rank(r)
            assert 0 <= sum(times.waiting.values()) <= times.exposed * (1 + 1e-9)
            assert times.compute + times.exposed <= found.seconds * (1 + 1e-9)
        assert found.of_rank(0).waiting[2] > 0


def test_bytes_on_links_are_those_that_the_ranks_send():
    t = transpiled("ring_optimizer", 2)
    found = fx.simulate(t, cluster="dgx-a100", batch=64)
    for rank in range(2):
        assert found.link_use[f"rank {rank} out"].nbytes == t.traffic(rank, batch=64).total


def test_alike_ranks_are_planned_and_simulated_once():
    found = fx.simulate(transpiled("data_parallel", 512, programs(layers=2)), cluster="dgx-a100", batch=4096)
    assert [len(r.ranks) for r in found.ranks] == [512]


def test_the_profile_is_one_that_the_profiler_shows(tmp_path):
    found = fx.simulate(transpiled(), cluster="dgx-a100", batch=64)
    profile = found.profile()
    assert len(profile.runs) == 4
    first, last = profile.runs[0].span
    assert (last - first) * 1e-9 == pytest.approx(found.seconds, abs=2e-8 + found.hardware.device.call.value)
    exposed = profile.exposed()[0]
    assert exposed.exposed == pytest.approx(found.ranks[0].exposed, abs=1e-8)
    assert "all_reduce" in found.table()
    found.save(tmp_path / "predicted.json")
    assert found.against(tmp_path / "predicted.json").error == pytest.approx(0, abs=1e-6)  # whole nanoseconds


def test_a_measured_run_lies_beside_the_prediction(tmp_path):
    main, startup = programs()
    t = transpiled(of=(main, startup), ranks=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        with fx.profiler.profiler(sorted_key=None) as measured:
            exe.run(feed={"x": np.ones((64, 64), "float32")})
    comparison = fx.simulate(t, cluster="dgx-a100", batch=64).against(measured)
    assert comparison.measured > 0
    assert any("all_reduce" in d.name and d.predicted and d.measured for d in comparison.steps)


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        ({"cluster": "dgx-a10"}, FluidxError, "dgx-a100"),
        ({"cluster": None}, ExecutionError, "needs the figures of a machine.*fluidx clusters lists them"),
        ({"batch": None}, FeedError, "'x'.*batch size"),
        ({"batch": 0}, FeedError, "at least 1"),
        ({"slow": {9: 2.0}}, ExecutionError, "there is no rank 9"),
        ({"slow": {1: 0.0}}, ExecutionError, "above 0"),
        ({"fetch": ["nothing"]}, FeedError, "fetch names 'nothing'"),
        ({"fetch": "loss"}, FeedError, "list of names"),
        ({"slow": [1.2]}, ExecutionError, "slow is {rank: factor}"),
        ({"slow": {True: 2}}, ExecutionError, "there is no rank True"),
        ({"iterations": 0}, ExecutionError, "at least 1"),
        ({"feed": {"x": (-5, 64)}}, FeedError, "at least 0"),
        ({"feed": {"x": 64}}, FeedError, "'x'.*such as"),
        ({"feed": ["x"]}, FeedError, "shapes by name"),
        ({"batch": True}, FeedError, "at least 1"),
        ({"slow": {1: float("inf")}}, ExecutionError, "finite"),
        ({"feed": {"x": (64, 64), "y": (64, 1)}}, FeedError, "'y'.*it is fed: x"),
    ],
)
def test_wrong_arguments(wrong, error, message):
    with pytest.raises(error, match=message):
        fx.simulate(transpiled(), **{"cluster": "dgx-a100", "batch": 64, **wrong})


def test_only_rank_programs_are_predicted_and_only_for_ranks_that_there_are():
    with pytest.raises(ExecutionError, match="simulate takes a transpiled program"):
        fx.simulate(programs()[0], cluster="dgx-a100", batch=64)
    found = fx.simulate(transpiled(ranks=2), cluster="dgx-a100", batch=64)
    for ask in (found.of_rank, found.memory):
        for rank in (2, -1, "0"):
            with pytest.raises(ExecutionError, match="the ranks are 0 to 1"):
                ask(rank)


@pytest.mark.parametrize("wrong", [{"network": 0}, {"network": -1.0}, {"compute": float("nan")}, {"latency": -2.0}])
def test_what_if_refuses_factors_that_mean_nothing(wrong):
    with pytest.raises(ExecutionError, match=f"{next(iter(wrong))} must be a factor"):
        fx.simulate(transpiled(ranks=2), cluster="dgx-a100", batch=64).what_if(**wrong)


@pytest.mark.parametrize("exact", [64, 0])
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
def test_ranks_with_more_rows_of_an_uneven_batch_take_longer_and_hold_more(strategy, exact):
    width = 4096
    t = transpiled(strategy, of=programs(width, layers=2))
    found = fx.simulate(t, cluster="dgx-a100", batch=4 * 512 + 511, exact=exact)  # the last ranks have 640 rows, the first one has 639
    even = fx.simulate(t, cluster="dgx-a100", batch=4 * 640, exact=exact)
    assert found.of_rank(3).compute == pytest.approx(even.of_rank(3).compute)
    assert found.memory(3).device == even.memory(3).device
    if exact:
        assert found.of_rank(0).compute < found.of_rank(3).compute
        plans = [dry_plan(t.get_trainer_program(r), batch=4 * 512 + 511, device="cuda") for r in range(4)]
        assert [found.memory(r).device for r in range(4)] == [p.peak_bytes for p in plans]


def test_a_loop_without_a_known_number_of_iterations_is_refused_until_it_is_given():
    main, startup = fx.Program("loop"), fx.Program("loop_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x = fx.layers.fc(fx.data("x", [-1, 8], "float32"), 8)
        i, n = fx.layers.fill_constant([1], "int64", 0), fx.layers.fill_constant([1], "int64", 5)
        going = fx.layers.less_than(i, n)
        loop = fx.layers.While(going)
        with loop.block():
            fx.layers.increment(i, in_place=True)
            fx.layers.less_than(i, n, cond=going)
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(x))
    t = transpiled(of=(main, startup), ranks=2)
    with pytest.raises(ExecutionError, match="give iterations="):
        fx.simulate(t, cluster="dgx-a100", batch=8, fetch=[i.name])
    five, ten = (fx.simulate(t, cluster="dgx-a100", batch=8, fetch=[i.name], iterations=n).seconds for n in (5, 10))
    assert ten > five


def test_a_program_that_is_not_proved_is_not_predicted():
    t = transpiled("ring_optimizer", 2)
    block = t.get_trainer_program(1).global_block()
    t.get_trainer_program(1).frozen = False
    del block.oplist[next(k for k, op in enumerate(block.oplist) if op.type == "sum")]
    with pytest.raises(FluidxError):
        fx.simulate(t, cluster="dgx-a100", batch=64)
