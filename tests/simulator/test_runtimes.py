"""Gradients as DDP and Horovod send them: hand-worked schedules."""

import pytest

import fluidx as fx
from fluidx.hardware import load
from fluidx.ir.errors import ExecutionError
from fluidx.simulator.estimate import CostEstimate
from fluidx.simulator.events import simulate_events
from fluidx.simulator.folding import unfolded
from fluidx.simulator.network import shared_link
from fluidx.simulator.runtimes import GradientRuntime, ddp_buckets, horovod_cycles
from fluidx.simulator.schedule import Compute, Meeting, Wait

MB = 1 << 20
SHEET = load("dgx-a100")


class OneMillisecondAMebibyte:
    def collective(self, method, members, nbytes, groups):
        return CostEstimate(1e-3 * nbytes / MB, 0.0, "sheet")


class PlanOfGroups:
    class program:
        groups = {"dp": ((0, 1),)}


def gradient(step, mb):
    return Meeting((step,), "dp", (0, 1), 1e-3 * mb, mb * MB, beside=True)


def backward(*gradients, seconds=10e-3):
    """Compute of `seconds` in front of each gradient, and an update of 1 ms."""
    items = []
    for k, mb in enumerate(gradients):
        items += [Compute((2 * k,), (seconds,)), gradient(2 * k + 1, mb)]
    return [*items, Wait((90,), item=len(items) - 1), Compute((91,), (1e-3,))]


def ran(runtime, items):
    made = GradientRuntime(runtime, SHEET, OneMillisecondAMebibyte())
    made.decide([(items, 1.0)])
    changed = made.items(items, PlanOfGroups())
    return changed, simulate_events(unfolded([changed, changed]), shared_link(0.0, 1.0)).seconds


def test_ddp_sends_a_small_bucket_first_and_the_update_waits_for_all():
    # 10 ms a gradient of backward; buckets: 1 MiB at 10 ms, 25 MiB at 30 ms, the rest of 2 MiB at 40 ms
    changed, seconds = ran("ddp", backward(1, 20, 5, 2))
    assert [i.nbytes // MB for i in changed if isinstance(i, Meeting)] == [1, 25, 2]
    # sent from 10 to 11, from 30 to 55, from 55 to 57; then the update
    assert seconds == pytest.approx(58e-3)


def test_buckets_of_ddp_close_with_the_gradient_that_fills_them():
    assert ddp_buckets([MB // 2, 30 * MB, 24 * MB, 24 * MB]) == [range(0, 2), range(2, 4)]
    assert ddp_buckets([]) == []


def test_horovod_waits_for_its_cycle_and_sends_what_is_ready_together():
    # ready at 0.4, 0.8 and 1.2 ms: the first two go in the cycle of 1 ms, the third in the cycle of 3 ms, when they have ended
    items = backward(1, 1, 1, seconds=0.4e-3)
    changed, seconds = ran("horovod", items)
    assert [i.nbytes // MB for i in changed if isinstance(i, Meeting)] == [2, 1]
    copy = 2 * MB / (SHEET.device.bandwidth.value * SHEET.device.bandwidth_share.value)  # of a mebibyte, read and written
    # 1 ms, 2 ms of sending between copies of 2 MiB, then 1 ms of sending between copies of 1 MiB, and the update
    assert seconds == pytest.approx(1e-3 + 2e-3 + 4 * copy + 1e-3 + 2 * copy + 1e-3)


def test_horovod_fuses_at_most_128_mb():
    assert horovod_cycles([0.0] * 3, [100 * MB, 20 * MB, 20 * MB], [0.0] * 3) == [(range(0, 2), 1e-3), (range(2, 3), 2e-3)]
    assert horovod_cycles([0.0], [500 * MB], [0.0]) == [(range(0, 1), 1e-3)]


def test_a_cycle_that_takes_longer_delays_the_next():
    assert horovod_cycles([0.0, 2e-3], [8, 8], [7e-3, 1e-3]) == [(range(0, 1), 1e-3), (range(1, 2), 8e-3)]


def programs():
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, 2048], "float32")
        for _ in range(6):
            h = fx.layers.fc(h, 2048, act="relu")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    return main, startup


def transpiled(**options):
    main, startup = programs()
    return fx.DistributeTranspiler(fx.strategies.data_parallel(**options)).transpile(program=main, startup_program=startup, trainers=8)


def test_ddp_takes_as_long_as_the_buckets_of_data_parallel():
    found = fx.simulate(transpiled(bucket_mb=0), cluster="v100-25gb", batch=4096, runtime="ddp").seconds
    own = fx.simulate(transpiled(), cluster="v100-25gb", batch=4096).seconds
    assert found == pytest.approx(own, rel=0.1)  # 7 buckets of 16 MiB: data_parallel never fills one above 25 MiB, DDP does


@pytest.mark.parametrize("runtime", ["ddp", "horovod"])
def test_every_gradient_is_sent_once_and_the_same_questions_are_answered(runtime):
    t = transpiled(bucket_mb=0)
    found = fx.simulate(t, cluster="dgx-v100", batch=4096, runtime=runtime, slow={3: 1.5})
    static = fx.simulate(t, cluster="dgx-v100", batch=4096, slow={3: 1.5})

    def sent(simulation):
        return sum(i.nbytes for i in simulation.folded.schedules[0].items if isinstance(i, Meeting))

    assert sent(found) == sent(static)
    assert found.seconds >= found.bounds.compute
    assert sum(p.seconds for p in found.critical_path) == pytest.approx(found.seconds, rel=1e-9)
    assert found.what_if(network=0.1).seconds > found.seconds
    assert found.profile() is not None and str(found)


@pytest.mark.parametrize(
    "options, runtime, message",
    [
        ({"bucket_mb": 0}, "hovorod", "unknown runtime 'hovorod'; did you mean 'horovod'"),
        ({}, "ddp", r"makes its own buckets of gradients, and runs data_parallel only; transpile with strategies.data_parallel\("),
    ],
)
def test_refusals(options, runtime, message):
    with pytest.raises(ExecutionError, match=message):
        fx.simulate(transpiled(**options), cluster="dgx-a100", batch=64, runtime=runtime)
