"""TuningExecutor: the training is that of one strategy, whatever is tried on the way."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir.errors import TranspileError

STEPS = 12


def programs():
    main, startup = fx.Program("ints"), fx.Program("ints_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x = fx.data("x", [-1, 4], "float32")
        w = fx.ParamAttr(initializer=fx.initializer.Constant(1.0))
        h = fx.layers.fc(x, 4, param_attr=w, bias_attr=False)
        loss = fx.layers.reduce_sum(h)
        fx.optimizer.Momentum(1.0, 1.0).minimize(loss)
    return main, startup, loss


def feeds():
    rng = np.random.default_rng(0)
    return [{"x": rng.integers(-2, 3, (8, 4)).astype("float32")} for _ in range(STEPS)]


def one_device():
    main, startup, loss = programs()
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    with fx.scope_guard(scope):
        exe.run(startup)
        return [exe.run(main, feed=f, fetch_list=[loss])[0].item() for f in feeds()]


class Clock:
    """Each step of a strategy takes the seconds that are given for it."""

    def __init__(self):
        self.now, self.step = 0.0, 1.0

    def __call__(self):
        self.now += self.step / 2
        return self.now


STRATEGIES = [fx.strategies.data_parallel(), fx.strategies.zero1(), fx.strategies.fsdp(), fx.strategies.ring_optimizer()]


@pytest.mark.parametrize("places", [fx.cpu_places, fx.process_places], ids=["threads", "processes"])
def test_losses_and_parameters_are_those_of_one_device(places):
    main, startup, loss = programs()
    with fx.TuningExecutor(STRATEGIES, main, startup, places(2), steps=2, warm_up=0) as exe:
        exe.run_startup()
        losses = [exe.run(fetch_list=[loss], feed=f)[0].item() for f in feeds()]
        assert losses == one_device()  # small integers: exact
        assert exe.settled and len(exe.tried) == 4 and exe.step == STEPS


def test_the_fastest_is_kept():
    main, startup, loss = programs()
    clock, seconds = Clock(), iter([3, 3, 1, 1, 2, 2])
    with fx.TuningExecutor(STRATEGIES[:3], main, startup, fx.cpu_places(2), steps=2, warm_up=0, clock=clock) as exe:
        exe.run_startup()
        used = []
        for k, f in enumerate(feeds()):
            clock.step = 2.0 * next(seconds) if k < 6 else 1.0
            used.append(exe.strategy)
            exe.run(fetch_list=[loss], feed=f)
        assert used[:6] == [s for s in STRATEGIES[:3] for _ in range(2)]
        assert exe.strategy == STRATEGIES[1] and set(used[6:]) == {STRATEGIES[1]}
        assert [t.median for t in exe.tried] == [3.0, 1.0, 2.0]


def test_a_refused_strategy_is_skipped_and_the_training_goes_on():
    main, startup, loss = programs()
    some = [STRATEGIES[0], fx.strategies.rails(), STRATEGIES[1]]
    with fx.TuningExecutor(some, main, startup, fx.cpu_places(2), steps=1, warm_up=0) as exe:
        exe.run_startup()
        losses = [exe.run(fetch_list=[loss], feed=f)[0].item() for f in feeds()]
    assert losses == one_device()
    refused = [t for t in exe.tried if not t.seconds]
    assert [t.options["strategy"] for t in refused] == [some[1]] and "hosts" in refused[0].why


def test_what_fx_plan_found_is_tried():
    main, startup, loss = programs()
    planned = fx.plan(main, startup, cluster="dgx-a100", ranks=2, batch=8, strategies=["data_parallel", "zero1"])
    with fx.TuningExecutor(planned, main, startup, fx.cpu_places(2), most=2, steps=1, warm_up=0) as exe:
        exe.run_startup()
        assert [exe.run(fetch_list=[loss], feed=f)[0].item() for f in feeds()] == one_device()
        assert len(exe.tried) == min(2, len(planned.candidates))


@pytest.mark.parametrize(
    "strategies, options, message",
    [
        ([], {}, "takes a list of strategies"),
        ("zero1", {}, "takes a list of strategies"),
        ([fx.strategies.rails()], {}, "none of 1 strategies can be taken"),
        (STRATEGIES, {"steps": 0}, "steps >= 1"),
    ],
)
def test_wrong_arguments(strategies, options, message):
    main, startup, _ = programs()
    with pytest.raises(TranspileError, match=message):
        fx.TuningExecutor(strategies, main, startup, fx.cpu_places(2), **options)
