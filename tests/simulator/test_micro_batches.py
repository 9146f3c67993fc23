"""Many micro-batches from a program of two, three or four: equal to the program of all of them."""

import pytest

import fluidx as fx
from fluidx.ir.errors import ExecutionError
from tests.sweep import some

L = fx.layers


def programs(stages=1, width=1024, layers=2):
    main, startup = fx.Program("stages"), fx.Program("stages_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, width], "float32")
        for stage in range(stages):
            with fx.device_guard(f"stage:{stage}" if stages > 1 else None):
                for _ in range(layers):
                    h = L.fc(h, width, act="relu")
                if stage == stages - 1:
                    loss = L.mean(h)
        fx.optimizer.Adam(0.1).minimize(loss)
    return main, startup


def transpiled(strategy, mesh, stages=1):
    main, startup = programs(stages)
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=mesh)


def both(make, mesh, stages, given, count, rows=4096):
    """The step of the program of all micro-batches, and that of the program of `given`, simulated as many."""
    whole = fx.simulate(transpiled(make(count), mesh, stages), cluster="dgx-a100", batch=rows * count)
    folded = fx.simulate(transpiled(make(given), mesh, stages), cluster="dgx-a100", batch=rows * count, micro_batches=count)
    return whole, folded


SCHEDULES = ("1f1b", "gpipe")
PIPELINES = [(2, 2, 2), (2, 2, 4), (2, 3, 3), (2, 3, 8), (2, 4, 8), (3, 2, 4), (3, 3, 4), (4, 4, 7), (4, 2, 7)]


@pytest.mark.parametrize("schedule, case", some(2, SCHEDULES, PIPELINES))
def test_a_pipeline_of_many_micro_batches_takes_as_long_as_the_program_of_all(schedule, case):
    stages, given, count = case
    mesh = fx.Mesh(pp=stages, dp=2)
    whole, folded = both(lambda n: fx.strategies.pipeline(n, schedule=schedule), mesh, stages, given, count)
    assert folded.seconds == pytest.approx(whole.seconds, rel=5e-3)  # what is done once may be in the idle time of a stage, or not
    assert sum(folded.run.link_bytes.values()) == sum(whole.run.link_bytes.values())


@pytest.mark.parametrize("of, case", some(3, ["data_parallel", "zero1", "fsdp"], [(2, 2), (2, 4), (2, 9), (3, 4), (3, 9), (4, 4), (4, 9)]))
def test_accumulation_takes_as_long_as_the_program_of_all_micro_batches(of, case):
    given, count = case
    whole, folded = both(lambda n: fx.strategies.micro_batches(n, of=fx.strategies.get(of)), 4, 1, given, count)
    assert folded.seconds == pytest.approx(whole.seconds, rel=1e-3)
    assert folded.memory(0).device == pytest.approx(whole.memory(0).device, rel=1e-4)


@pytest.mark.parametrize("schedule, case", some(2, SCHEDULES, [(2, 2, 4), (2, 3, 8), (3, 2, 4), (4, 2, 8), (4, 3, 8), (4, 4, 7)]))
def test_the_memory_of_many_micro_batches_is_that_of_the_program_of_all(schedule, case):
    stages, given, count = case
    whole, folded = both(lambda n: fx.strategies.pipeline(n, schedule=schedule), fx.Mesh(pp=stages), stages, given, count)
    for stage in range(stages):
        assert folded.memory(stage).device == pytest.approx(whole.memory(stage).device, rel=0.05)


def test_a_stage_keeps_as_many_micro_batches_as_stages_follow_it():
    """By hand: a micro-batch is 4,096 rows of 1,024 floats, 16 MiB; a stage makes two such activations of it, of which backward reads both,
    and receives one. From 2 to 8 of them, stage 0 of 4 keeps two more in "1f1b" and six more in "gpipe", and six more are fed."""
    mib = 1 << 20
    for schedule, more in (("1f1b", (2 * 2 * 16 + 6 * 16, 1 * 2 * 16 + 2 * 16)), ("gpipe", (6 * 2 * 16 + 6 * 16, 6 * 3 * 16))):
        t = transpiled(fx.strategies.pipeline(2, schedule=schedule), fx.Mesh(pp=4), 4)
        few, many = (fx.simulate(t, cluster="dgx-a100", batch=4096 * n, micro_batches=n) for n in (2, 8))
        grown = [many.memory(stage).device - few.memory(stage).device for stage in (0, 1)]
        assert grown == [n * mib for n in more]


def test_the_bubble_shrinks_with_the_number_of_micro_batches():
    t = transpiled(fx.strategies.pipeline(3), fx.Mesh(pp=4), 4)

    def a_micro_batch(m):
        return fx.simulate(t, cluster="dgx-a100", batch=4096 * m, micro_batches=m).seconds / m

    few, some, many = map(a_micro_batch, (4, 16, 64))
    assert few > some > many  # (m + 3) / m micro-batches each


@pytest.mark.parametrize(
    "strategy, count, message",
    [
        (fx.strategies.data_parallel(), 4, "has no micro-batches; take strategies.micro_batches or pipeline"),
        (fx.strategies.micro_batches(4), 3, "of 4 micro-batches stands for as many or more, if it has at least 2"),
        (fx.strategies.micro_batches(2), "a", "micro_batches='a': a program of 2 micro-batches stands for as many or more"),
        (fx.strategies.micro_batches(3), 7, "a batch of 64 rows does not divide by it; give a multiple"),
    ],
)
def test_programs_that_cannot_stand_for_so_many_are_refused(strategy, count, message):
    with pytest.raises(ExecutionError, match=message):
        fx.simulate(transpiled(strategy, 2), cluster="dgx-a100", batch=64, micro_batches=count)


def test_ranks_of_a_stage_are_planned_once_and_take_as_long():
    t = transpiled(fx.strategies.pipeline(4), fx.Mesh(pp=3, dp=4), 3)
    every = fx.simulate(t, cluster="dgx-a100", batch=4096)
    by_stage = fx.simulate(t, cluster="dgx-a100", batch=4096, exact=2)
    assert by_stage.seconds == pytest.approx(every.seconds, rel=1e-12)
    assert dict(by_stage.run.link_bytes) == dict(every.run.link_bytes)
    assert [len(s.ranks) for s in by_stage.folded.schedules] == [len(s.ranks) for s in every.folded.schedules]
