"""Properties of predictions of real programs: every strategy, meshes, narrowed gradients, offloaded state, written-out algorithms."""

import json
import random
from dataclasses import replace

import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.hardware.records import Device, Figure, Hardware, LinkFigures
from fluidx.ir import Shard
from fluidx.simulator.collective_times import CollectiveTimes
from fluidx.simulator.events import simulate_events
from fluidx.simulator.folding import unfolded
from fluidx.simulator.machine_prices import Factors, MachinePrices
from fluidx.simulator.rank_items import ItemMaker
from fluidx.simulator.schedule import Exchange, Meeting
from fluidx.transpiler.strategies import CATALOGUE
from tests.sweep import some

L = fx.layers
NEEDS = {"pipeline": {"micro_batches": 3}, "micro_batches": {"count": 2}}


def perceptron(width=96, layers=3):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, width], "float32")
        for k in range(layers):
            h = L.fc(h, width * (1 + k % 2), act="relu")
        fx.optimizer.Adam(0.1).minimize(L.mean(h))
    return main, startup


def stages(width=96):
    main, startup = fx.Program("stages"), fx.Program("stages_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, width], "float32")
        for stage in range(2):
            with fx.device_guard(f"stage:{stage}"):
                h = L.fc(h, width, act="relu")
                if stage == 1:
                    loss = L.mean(h)
        fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup


def cut_over_tp(width=96):
    """A block cut by columns and by rows over tp."""
    main, startup = fx.Program("block"), fx.Program("block_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, width], "float32")
        up = L.fc(h, 4 * width, param_attr=fx.ParamAttr("up.w", placement=Shard(1, "tp")),
                  bias_attr=fx.ParamAttr("up.b", placement=Shard(0, "tp")), act="relu")  # fmt: skip
        down = L.fc(up, width, param_attr=fx.ParamAttr("down.w", placement=Shard(0, "tp")))
        fx.optimizer.Adam(0.1).minimize(L.mean(down))
    return main, startup


def transpiled(strategy, ranks=4, of=perceptron, **options):
    main, startup = of() if strategy != "pipeline" else stages()
    made = fx.strategies.get(strategy, **{**NEEDS.get(strategy, {}), **options})
    return fx.DistributeTranspiler(made).transpile(program=main, startup_program=startup, trainers=ranks)


def case(name):
    """A transpiled program of every kind: a strategy of the catalogue on 4 ranks, or one of the others."""
    if name in CATALOGUE:
        ranks = {"rails": fx.Cluster(hosts=2, devices_per_host=2), "pipeline": fx.Mesh(pp=2, dp=2)}
        return transpiled(name, ranks.get(name, 4))
    return OTHERS[name]()


OTHERS = {
    "hierarchical": lambda: transpiled("data_parallel", fx.Cluster(hosts=2, devices_per_host=2)),
    "ring": lambda: transpiled("data_parallel", algorithm="ring"),
    "tree": lambda: transpiled("zero1", algorithm="tree"),
    "two trees": lambda: transpiled("data_parallel", algorithm="double_binary_tree"),
    "tp": lambda: transpiled("data_parallel", fx.Mesh(dp=1, tp=4), cut_over_tp),
    "dp and tp": lambda: transpiled("data_parallel", fx.Mesh(dp=2, tp=2), cut_over_tp),
    "zero1 and tp": lambda: transpiled("zero1", fx.Mesh(dp=2, tp=2), cut_over_tp),
    "fsdp and tp": lambda: transpiled("fsdp", fx.Mesh(dp=2, tp=2), cut_over_tp),
    "narrow": lambda: transpiled("data_parallel", wire="bfloat16"),
    "narrow zero1": lambda: transpiled("zero1", wire="float16"),
    "offloaded zero1": lambda: transpiled("zero1", cpu_offload=True),
    "offloaded fsdp": lambda: transpiled("fsdp", cpu_offload=True),
}
KINDS = [*CATALOGUE, *OTHERS]
BATCH = 96


def predicted(t, **options):
    return fx.simulate(t, cluster="dgx-v100", batch=BATCH, verify=False, **options)


def items_of(t, found):
    """The items of each rank, planned by itself, and the prices."""
    prices = MachinePrices(found.hardware, t.world_size, -(-t.world_size // t.cluster.hosts) if t.cluster.hosts > 1 else 8)
    plans = [dry_plan(t.get_trainer_program(r), batch=BATCH, device="cuda") for r in range(t.world_size)]
    return [ItemMaker(p, prices).items() for p in plans], prices


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_never_below_its_bounds_and_its_path_is_the_whole_step(kind):
    found = predicted(case(kind), slow={1: 1.5})
    assert found.seconds >= found.bounds.seconds > 0
    assert found.seconds >= max(r.compute for r in found.ranks)
    assert sum(p.seconds for p in found.critical_path) == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_folded_ranks_take_as_long_as_ranks_that_are_planned_one_by_one(kind):
    t = case(kind)
    for slow in ({}, {1: 1.7}):
        found = predicted(t, slow=slow)
        items, prices = items_of(t, found)
        assert found.seconds == pytest.approx(simulate_events(unfolded(items, slow), prices.network, prices.slowdown).seconds, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_other_numbers_on_one_host_take_as_long(kind):
    t = case(kind)
    items, prices = items_of(t, predicted(t))
    if len(set(prices.host_of)) > 1:
        pytest.skip("other numbers are on other hosts")
    n = t.world_size
    new = list(range(n))
    random.Random(3).shuffle(new)
    moved = [None] * n
    for rank, own in enumerate(items):
        moved[new[rank]] = [_renamed(item, new) for item in own]
    one, other = (simulate_events(unfolded(r), prices.network, prices.slowdown).seconds for r in (items, moved))
    assert one == pytest.approx(other, rel=1e-9)


def _renamed(item, new):
    if isinstance(item, Meeting):
        members = tuple(new[m] for m in item.members)
        return Meeting(item.steps, item.group, members, item.seconds, beside=item.beside, dispatch=item.dispatch)
    if isinstance(item, Exchange):
        sends, receives = (tuple((new[p], b) for p, b in side) for side in (item.sends, item.receives))
        return Exchange(item.steps, sends, receives, beside=item.beside, dispatch=item.dispatch)
    return item


@pytest.mark.parametrize("kind", KINDS)
def test_better_machines_are_not_slower_and_slow_ranks_not_faster(kind):
    t = case(kind)
    found = predicted(t)
    for name, values in (("network", (0.25, 0.5, 1.0, 2.0, 16.0)), ("compute", (0.5, 1.0, 4.0)), ("latency", (8.0, 2.0, 1.0, 0.25, 0.0))):
        seconds = [found.what_if(**{name: v}).seconds for v in values]
        assert all(a >= b * (1 - 1e-9) for a, b in zip(seconds, seconds[1:], strict=False)), (name, seconds)
    late = [predicted(t, slow={2: f}).seconds for f in (1.0, 1.5, 3.0)]
    assert late == sorted(late)


@pytest.mark.parametrize(
    "trainers, servers, cluster", some(3, [2, 4], [{}, {"servers": 2}, {"servers": 2, "min_block": 256}], ["dgx-v100", "v100-25gb"])
)
def test_servers_are_not_faster_with_a_slow_rank_or_more_rows(trainers, servers, cluster):
    t = transpiled("parameter_server", trainers, **servers)

    def seconds(batch=BATCH, **slow):
        return fx.simulate(t, cluster=cluster, batch=batch, verify=False, **slow).seconds

    for rank in range(t.world_size):
        late = [seconds(slow={rank: f}) for f in (1.0, 1.01, 1.02, 1.05, 1.1, 1.35, 2.0, 5.0)]
        assert all(b >= a * (1 - 1e-9) for a, b in zip(late, late[1:], strict=False)), (rank, late)
    more = [seconds(n) for n in (32, 48, 64, 128, 192, 256, 1024)]
    assert all(b >= a * (1 - 1e-9) for a, b in zip(more, more[1:], strict=False)), more


# -- communication by itself --------------------------------------------------------------------------------------------------


def only_links(latency=1e-5, bandwidth=1e9):
    """A machine whose computation takes no time."""

    def figure(value):
        return Figure(value, "made up")

    device = Device("free", "gpu", figure(1e12), {"float32": figure(1e30)}, figure(1.0), figure(1e30), figure(1.0), figure(0.0),
                    figure(1.0), figure(0.0))  # fmt: skip
    return Hardware("free", "made up", 64, 1, device, LinkFigures(figure(latency), figure(bandwidth)), None, figure(1e12))


def one_gradient(width=1024):
    """A program with one parameter, of 4 MiB."""
    main, startup = fx.Program("one"), fx.Program("one_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        fx.optimizer.SGD(0.1).minimize(L.mean(L.fc(fx.data("x", [-1, width], "float32"), width, bias_attr=False)))
    return main, startup


@pytest.mark.parametrize("ranks, messages", [(1, 0), (2, 2), (4, 12)])
def test_a_run_begins_and_ends_with_a_call_of_all_ranks_on_the_link_that_they_share(ranks, messages):
    free = only_links()
    hub = replace(free, inside=replace(free.inside, shared=Figure(1e6, "made up"), call_bytes=500))
    plan = dry_plan(one_gradient()[0], batch=8, device="cuda")
    without, limited = (MachinePrices(h, ranks, 64).around(plan).seconds for h in (free, hub))
    assert limited - without == pytest.approx(2 * messages * 500 / 1e6)
    assert MachinePrices(hub, ranks, 64, Factors(network=2.0)).around(plan).seconds == pytest.approx(without + messages * 500 / 1e6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "algorithm, messages, share",
    [
        ("ring", lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
        ("halving_doubling", lambda p: 2 * (p - 1).bit_length(), lambda p: 2 * (p - 1) / p),
        ("recursive_doubling", lambda p: (p - 1).bit_length(), lambda p: (p - 1).bit_length()),
    ],
)
def test_a_written_out_algorithm_takes_what_its_formula_says(algorithm, messages, share, ranks):
    a, b, n = 1e-5, 1e9, 4 << 20
    t = transpiled("data_parallel", ranks, one_gradient, algorithm=algorithm)
    found = fx.simulate(t, cluster=only_links(a, b), batch=8 * ranks, fetch=[], verify=False)
    assert found.seconds == pytest.approx(messages(ranks) * a + share(ranks) * n / b, rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_written_out_ring_takes_as_long_as_the_communicators(ranks):
    machine = only_links()
    ring, call = (
        fx.simulate(transpiled("data_parallel", ranks, one_gradient, **o), cluster=machine, batch=8 * ranks, fetch=[], verify=False).seconds
        for o in ({"algorithm": "ring"}, {})
    )
    base = machine.inside.latency.value  # of the call
    assert call == pytest.approx(CollectiveTimes(machine).seconds("all_reduce", range(ranks), 4 << 20), rel=1e-9)
    assert call == pytest.approx(ring + base, rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_all_reduce_takes_a_reduce_scatter_and_an_all_gather(ranks):
    data_parallel, zero1 = (
        fx.simulate(transpiled(s, ranks, one_gradient), cluster=only_links(), batch=8 * ranks, fetch=[], verify=False)
        for s in ("data_parallel", "zero1")
    )
    assert zero1.seconds == pytest.approx(data_parallel.seconds, rel=1e-6)


def test_narrowed_gradients_are_half_of_the_bytes():
    whole, half = (predicted(transpiled("data_parallel", algorithm="ring", **o)) for o in ({}, {"wire": "bfloat16"}))
    assert sum(half.run.link_bytes.values()) == sum(whole.run.link_bytes.values()) / 2


def test_offloaded_state_is_in_host_memory_and_its_way_takes_time():
    here, there = (predicted(transpiled("zero1", **o)) for o in ({}, {"cpu_offload": True}))
    assert there.memory(0).host > 0 == here.memory(0).host and there.memory(0).device < here.memory(0).device
    assert there.seconds > here.seconds


def test_offloaded_activations_are_in_host_memory_and_their_way_takes_time():
    here, there = (predicted(transpiled(f"data_parallel{rewrite}")) for rewrite in ("", ",offload_activations{least_mb=0}"))
    assert there.memory(0).host > 0 == here.memory(0).host
    assert there.seconds > here.seconds


# -- profiles -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["data_parallel", "fsdp", "ring_optimizer", "pipeline", "dp and tp"])
def test_a_simulated_timeline_has_the_rows_and_kinds_of_a_measured_one(kind, tmp_path):
    t = case(kind)
    found = predicted(t)
    found.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[r] for r in range(4)} == {f"rank {r}" for r in range(4)}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert sorted(order, key=order.get) == [row for r in range(4) for row in (r, 1000 + r, 2000 + r) if row in order]
    kinds = {e.get("cat", "").split(",")[0] for e in events if e["ph"] == "X"}
    assert {"operator", "communication", "run"} <= kinds <= {"operator", "communication", "run", "wait"}
    for row in names:  # calls of a row are one after the other
        calls = [e for e in events if e["ph"] == "X" and e["tid"] == row and not e["cat"].startswith("run")]
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in calls)
        assert all(a[1] <= b[0] + 2e-3 for a, b in zip(spans, spans[1:], strict=False))  # microseconds


@pytest.mark.parametrize("kind", ["data_parallel", "fsdp", "ring_optimizer"])
def test_a_simulated_table_adds_up(kind):
    found = predicted(case(kind))
    profile = found.profile()
    rows = profile.rows(at_best=found._ceilings)
    assert [row.total for row in rows] == sorted([row.total for row in rows], reverse=True)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    for row in rows:
        assert row.least <= row.mean <= row.most and row.total == pytest.approx(row.calls * row.mean)
    assert {row.bound for row in rows} >= {"communication"}
    for run, exposed in zip(profile.runs, profile.exposed(), strict=True):
        assert exposed.exposed == pytest.approx(found.of_rank(run.rank).exposed, abs=1e-8)
    with pytest.raises(fx.ExecutionError, match="profiler: "):
        profile.rows(by="line")
