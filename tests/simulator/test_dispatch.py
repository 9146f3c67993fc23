"""A host that issues the work of its device: hand-worked schedules."""

from dataclasses import replace

import pytest

import fluidx as fx
from fluidx.hardware import load
from fluidx.hardware.files import as_json, from_json
from fluidx.hardware.records import Figure
from fluidx.simulator.events import simulate_events
from fluidx.simulator.folding import unfolded
from fluidx.simulator.network import shared_link
from fluidx.simulator.schedule import Compute, Meeting


def ends(*items):
    return [span.ended for span in simulate_events(unfolded([items, items]), shared_link(0.0, 1.0)).spans[0]]


def test_a_device_that_waits_for_its_host_takes_as_long_as_the_host():
    assert ends(Compute((0,), (1.0,), dispatch=3.0), Compute((1,), (1.0,), dispatch=3.0)) == [3.0, 6.0]


def test_a_host_that_is_ahead_costs_nothing():
    assert ends(Compute((0,), (5.0,), dispatch=1.0), Compute((1,), (5.0,), dispatch=1.0)) == [5.0, 10.0]


def test_what_a_host_is_ahead_hides_small_work_later():
    # the host has issued all by 4.0; the device has 5 s of large work and then 0.5 s of small work
    assert ends(Compute((0,), (5.0,), dispatch=1.0), Compute((1,), (0.5,), dispatch=3.0)) == [5.0, 5.5]


def test_communication_is_issued_too():
    items = Compute((0,), (1.0,), dispatch=1.0), Meeting((1,), "dp", (0, 1), 1.0, dispatch=2.0), Compute((2,), (1.0,), dispatch=2.0)
    assert ends(*items) == [1.0, 2.0, 5.0]


def test_a_step_of_small_operators_is_bound_by_its_host():
    main, startup = fx.Program("small"), fx.Program("small_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, 8], "float32")
        for _ in range(10):
            h = fx.layers.fc(h, 8, bias_attr=False)
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    sheet = load("dgx-a100")
    issued = replace(sheet, device=replace(sheet.device, dispatch=Figure(1e-3, "a slow host")))
    steps = sum(1 for s in fx.simulate(t, cluster=sheet, batch=8).plans[0].steps)
    found = fx.simulate(t, cluster=issued, batch=8).seconds
    assert steps * 0.7e-3 < found <= (steps + 1) * 1.01e-3
    assert from_json(as_json(issued), "issued.json") == issued


def test_more_dispatch_is_never_faster():
    def run(seconds):
        return ends(Compute((0,), (1.0,), dispatch=seconds), Meeting((1,), "dp", (0, 1), 1.0), Compute((2,), (2.0,), dispatch=seconds))[-1]

    found = [run(d) for d in (0.0, 0.5, 1.0, 2.0, 4.0)]
    assert found == sorted(found) and found[0] == pytest.approx(4.0) and found[-1] == pytest.approx(8.0)
