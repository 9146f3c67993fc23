"""The simulated schedule against the executor: kernels only take their modelled time, on virtual clocks, and ranks meet as they do."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.hardware.records import Device, Figure, Hardware, LinkFigures
from fluidx.ir import Shard
from fluidx.simulator.machine_prices import MachinePrices
from fluidx.simulator.rank_items import ItemMaker
from fluidx.simulator.schedule import Meeting
from fluidx.testing.modelled_time import EAGER, virtual_clocks
from fluidx.transpiler.strategies import CATALOGUE
from tests.sweep import some

NEEDS = {"pipeline": {"micro_batches": 4}, "micro_batches": {"count": 2}}


def figure(value):
    return Figure(value, "made up")


def machine(base=2.0):
    """Messages that take no time, and steps and collectives of seconds that differ with their operations and bytes."""
    device = Device("slow", "cpu", figure(1e12), {"float32": figure(1e3)}, figure(1.0), figure(1e3), figure(1.0), figure(0.25),
                    figure(1.0), figure(0.0))  # fmt: skip
    links = LinkFigures(figure(1e-12), figure(1e18), 1, {1: figure(1e3)}, figure(base))
    return Hardware("slow", "made up", 64, None, device, links, links, figure(1e12))


def perceptron(width=24):
    """Layers of different sizes, so that steps take different times."""
    main, startup = fx.Program("uneven"), fx.Program("uneven_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, width], "float32")
        for k in (2, 5, 1, 3):
            h = fx.layers.fc(h, k * width // 2, act="relu")
        fx.optimizer.Adam(0.1).minimize(fx.layers.mean(h))
    return main, startup


def stages(count, width=24):
    main, startup = fx.Program("stages"), fx.Program("stages_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, width], "float32")
        for stage in range(count):
            with fx.device_guard(f"gpu:{stage}"):
                h = fx.layers.fc(h, width * (1 + stage % 2), act="relu")
                loss = fx.layers.mean(h)
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup


def transpiled(strategy, ranks, width=24, **options):
    if strategy == "rails":
        ranks = fx.Cluster(hosts=2, devices_per_host=ranks // 2)
    main, startup = perceptron(width)
    if strategy == "pipeline":
        main, startup = stages(2, width)
        ranks = fx.Mesh(pp=2, dp=ranks // 2)
    made = fx.strategies.get(strategy, **NEEDS.get(strategy, {}), **options)
    return fx.DistributeTranspiler(made).transpile(program=main, startup_program=startup, trainers=ranks)


def seconds_of(t, hardware, slow):
    """The modelled seconds of a step of a plan. A collective takes them when all have come."""
    prices = MachinePrices(hardware, t.world_size, -(-t.world_size // t.cluster.hosts))

    def seconds(plan, step):
        parts = list(ItemMaker(plan, prices).parts(step, 0))
        compute = sum(p for p in parts if isinstance(p, float)) * slow.get(plan.program.rank, 1.0)
        return compute + sum(p.seconds for p in parts if isinstance(p, Meeting))

    return seconds


def simulated_and_run(t, rows, slow):
    """When each rank ends a step: simulated, and on the virtual clocks of a run."""
    hardware = machine()
    with fx.ParallelExecutor(t, places=fx.cpu_places(t.world_size), timeout=60, verify=False) as exe:
        exe.run_startup()
        with virtual_clocks(seconds_of(t, hardware, slow)) as clocks:
            for rank in range(t.world_size):  # launching a run costs a call
                clocks.compute(rank, False, hardware.device.call.value * slow.get(rank, 1.0))
            exe.run(feed={"x": np.zeros((rows, t.main.global_block().var("x").shape[1]), "float32")}, fetch_list=[])
    found = fx.simulate(t, cluster=hardware, batch=rows, fetch=[], slow=slow, verify=False)
    ends = [max(s.ended for s in spans) for spans in found.run.spans]
    ranks = range(t.world_size)
    return [ends[found.folded.class_of[r]] for r in ranks], [max(clocks.now[r, beside] for beside in (False, True)) for r in ranks]


@pytest.fixture(autouse=True)
def overlap(monkeypatch):
    monkeypatch.setenv("FLUIDX_OVERLAP", "1")


@pytest.mark.parametrize("strategy, ranks", some(3, list(CATALOGUE), [2, 4, 16]))
def test_the_simulated_schedule_is_that_of_the_executor(strategy, ranks):
    predicted, run = simulated_and_run(transpiled(strategy, ranks), 32, {})
    assert predicted == pytest.approx(run, rel=1e-6)


def cut_over_tp(width=24):
    """A block cut by columns and by rows over tp."""
    main, startup = fx.Program("block"), fx.Program("block_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        up = fx.layers.fc(fx.data("x", [-1, width], "float32"), 4 * width, param_attr=fx.ParamAttr("up.w", placement=Shard(1, "tp")),
                          bias_attr=fx.ParamAttr("up.b", placement=Shard(0, "tp")), act="relu")  # fmt: skip
        down = fx.layers.fc(up, width, param_attr=fx.ParamAttr("down.w", placement=Shard(0, "tp")))
        fx.optimizer.Adam(0.1).minimize(fx.layers.mean(down))
    return main, startup


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "fsdp"])
def test_on_a_mesh_too(strategy):
    main, startup = cut_over_tp()
    made = fx.strategies.get(strategy)
    t = fx.DistributeTranspiler(made).transpile(program=main, startup_program=startup, trainers=fx.Mesh(dp=2, tp=2))
    predicted, run = simulated_and_run(t, 32, {2: 1.5})
    assert predicted == pytest.approx(run, rel=1e-6)


OPTIONS = [
    ("data_parallel", {"algorithm": "ring"}), ("data_parallel", {"algorithm": "double_binary_tree"}), ("zero1", {"wire": "bfloat16"}),
    ("fsdp", {"cpu_offload": True}), ("ring_optimizer", {"chunk_mb": 1}),
]  # fmt: skip


@pytest.mark.parametrize("strategy, options", OPTIONS)
def test_with_options_too(strategy, options):
    predicted, run = simulated_and_run(transpiled(strategy, 4, **options), 32, {0: 1.5})
    assert predicted == pytest.approx(run, rel=1e-6)


@pytest.mark.parametrize("strategy", ["ring_optimizer", "reduction_servers", "pipeline"])
def test_with_messages_that_wait_for_their_receiver(strategy):
    t = transpiled(strategy, 4, width=192)
    plan = dry_plan(t.get_trainer_program(0), batch=1024)
    sent = [op for op in plan.program.global_block().oplist if op.type == "send"]
    assert any(plan.values[op.input_arg_names[0]].type.nbytes > EAGER for op in sent)
    predicted, run = simulated_and_run(t, 1024, {1: 1.5})
    assert predicted == pytest.approx(run, rel=1e-6)


@pytest.mark.parametrize("strategy", ["data_parallel", "ring_optimizer", "fsdp", "reduction_servers"])
def test_with_a_slow_rank_too(strategy):
    predicted, run = simulated_and_run(transpiled(strategy, 4), 32, {1: 2.5, 3: 1.25})
    assert predicted == pytest.approx(run, rel=1e-6)
