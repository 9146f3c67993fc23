"""Costs of steps from the figures of a sheet, by hand."""

import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.hardware.records import Device, Figure, Hardware, LinkFigures
from fluidx.ir.errors import FluidxError
from fluidx.simulator import costs
from fluidx.simulator.costs import CostEstimate, Costs
from fluidx.simulator.work import step_key


def figure(value, spread=0.0):
    return Figure(value, "made up", spread)


def hardware(kind="gpu", to_host=None, **peaks):
    """1 TFLOP/s at half of it, 10 GB/s at half of it, 2 us a call."""
    flops = {"float32": figure(1e12, 0.1), **{name: figure(value) for name, value in peaks.items()}}
    device = Device("toy", kind, figure(1e9), flops, figure(0.5), figure(1e10, 0.2), figure(0.5), figure(2e-6), figure(1.0), figure(0.0))
    return Hardware("toy", "made up", 4, 1, device, LinkFigures(figure(1e-6), figure(1e9)), None, figure(1e9), to_host)


def planned(build, batch=None, **kw):
    main, startup = fx.Program("some"), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        build()
    return dry_plan(main, batch=batch, **kw)


def product(rows, inner, columns, dtype="float32"):
    return planned(lambda: fx.layers.matmul(fx.data("x", [rows, inner], dtype), fx.data("y", [inner, columns], dtype)))


def only(plan, hw=None):
    (step,) = [s for s in plan.steps if s.kernel != "view"]
    return Costs(hw or hardware()).step(plan, step)


def test_a_large_product_is_bound_by_the_peak_of_its_dtype():
    # 2 * 1000^3 operations at 0.5e12 a second are 4 ms; 12 MB at 5e9 a second only 2.4 ms
    assert only(product(1000, 1000, 1000)) == CostEstimate(pytest.approx(4e-3 + 2e-6), 0.1, "sheet")
    # four times the peak: 1 ms of arithmetic; 6 MB are 1.2 ms, and that is now the longer one
    half = only(product(1000, 1000, 1000, "float16"), hardware(float16=4e12))
    assert half == CostEstimate(pytest.approx(1.2e-3 + 2e-6), 0.2, "sheet")


def test_an_elementwise_step_is_bound_by_its_bytes_also_without_a_peak_of_its_dtype():
    plan = planned(lambda: fx.layers.relu(fx.data("x", [1000, 1000], "float64")))
    assert only(plan) == CostEstimate(pytest.approx(16e6 / 5e9 + 2e-6), 0.2, "sheet")


def test_a_product_of_a_dtype_without_a_peak_is_refused_by_name():
    with pytest.raises(FluidxError, match='matmul computes products of float64, for which device toy has no peak; .*float32.*"flops"'):
        only(product(8, 8, 8, "float64"))


def test_views_cost_nothing():
    plan = planned(lambda: fx.layers.relu(fx.layers.reshape(fx.data("x", [4, 6], "float32"), [24])))
    costs_of = {s.op.type: Costs(hardware()).step(plan, s).seconds for s in plan.steps}
    assert costs_of["reshape"] == 0.0 and costs_of["relu"] > 2e-6


def test_equal_steps_are_estimated_once_and_others_apart(monkeypatch):
    seen = []
    monkeypatch.setattr(costs, "work_of", lambda step, values, real=costs.work_of: seen.append(step) or real(step, values))
    hw = hardware(int8=1.0)  # not the hardware of another test

    def build():
        x = fx.data("x", [-1, 7], "float32")
        for _ in range(5):
            x = fx.layers.softmax(x)

    for batch in (3, 3, 4):
        plan = planned(build, batch)
        each = {Costs(hw).step(plan, s) for s in plan.steps}
        assert len(each) == 1
    assert len(seen) == 2
    assert Costs(hw, 2).step(plan, plan.steps[0]) and len(seen) == 3  # more ranks at once: another table


def test_attributes_are_part_of_the_key():
    def build(transposed):
        fx.layers.matmul(fx.data("x", [16, 16], "float32"), fx.data("y", [16, 16], "float32"), transpose_x=transposed)

    plans = [planned(lambda t=t: build(t)) for t in (False, True, True)]
    keys = [step_key(p.steps[-1], p.values) for p in plans]
    assert keys[0] != keys[1] == keys[2]


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(costs, "_MOST", 3)
    costs._known.clear()
    for rows in range(1, 12):
        plan = planned(lambda: fx.layers.relu(fx.data("x", [-1, 3], "float32")), rows)
        Costs(hardware()).step(plan, plan.steps[0])
    assert len(costs._known) <= 3


def test_a_branch_costs_its_dearest_block():
    def build():
        x = fx.data("x", [1000, 1000], "float32")
        first = fx.layers.fill_constant([1], "bool", True)
        fx.layers.cond(first, lambda: fx.layers.relu(x), lambda: fx.layers.reduce_sum(x, keep_dim=True) + x)

    plan = planned(build)
    (step,) = [s for s in plan.steps if s.kernel == "control"]
    bodies = [sum(Costs(hardware()).step(plan, s).seconds for s in steps) for steps in plan.bodies.values()]
    assert Costs(hardware()).step(plan, step).seconds == pytest.approx(max(bodies)) and len(bodies) == 2


def test_a_loop_has_no_cost_and_says_why():
    def build():
        n, three = fx.data("n", [1], "int64"), fx.layers.fill_constant([1], "int64", 3)
        (i,) = fx.layers.while_loop(lambda i: fx.layers.less_than(i, three), lambda i: [i + 1], [n])
        fx.layers.relu(fx.layers.cast(i, "float32"))

    plan = planned(build)
    (step,) = [s for s in plan.steps if s.kernel == "control"]
    with pytest.raises(FluidxError, match="op while has no cost: how often its block runs is known at run time only"):
        Costs(hardware()).step(plan, step)


def test_work_on_host_memory_costs_the_way_there_and_needs_its_figures():
    work = costs.StepWork("adam", "numpy", (), 100, 2_000_000, on_host=True)
    link = LinkFigures(figure(1e-5), figure(1e9))
    assert Costs(hardware(to_host=link)).of(work).seconds == pytest.approx(2e-3 + 1e-5)
    assert Costs(hardware("cpu")).of(work).seconds == pytest.approx(2e6 / 5e9 + 2e-6)
    with pytest.raises(FluidxError, match="op adam works on host memory, and hardware toy has no figures"):
        Costs(hardware()).of(work)


def test_a_copy_to_the_host_passes_the_link_once():
    copy = costs.StepWork("memcpy_d2h", "numpy", (), 0, 4_000_000, moves=True)  # 2 MB are read and 2 MB written
    assert Costs(hardware(to_host=LinkFigures(figure(1e-5), figure(1e9)))).of(copy).seconds == pytest.approx(2e-3 + 1e-5)


def test_an_interval_is_the_spread_on_both_sides():
    e = CostEstimate(2.0, 0.25, "measured")
    assert (e.low, e.high) == (1.5, 2.5)
