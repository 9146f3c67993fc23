"""What transpile, a rank's program and its plan cost grows neither with the ranks nor with the square of a bucket: counted calls."""

import sys

import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.transpiler.algorithms import ALGORITHMS, SEQUENCES
from tests.transpiler.test_own_algorithms import TwoPhaseStar
from tests.transpiler.test_sequences import ThroughFirst

L = fx.layers


def deep(layers=30):
    """A program of many small layers, as in benchmarks/transpile.py."""
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 32], "float32")
        for _ in range(layers):
            x = L.fc(x, 32, act="relu")
        fx.optimizer.SGD(0.1).minimize(L.mean(x))
    return main, startup


def calls(work):
    """How many functions are called."""
    made = 0

    def count(frame, event, argument):
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made


def transpiled(strategy, ranks):
    main, startup = deep()
    t = fx.DistributeTranspiler(strategy)
    return t, calls(lambda: t.transpile(program=main, startup_program=startup, trainers=ranks))


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero2", "zero3", "fsdp"])
def test_a_thousand_ranks_cost_transpile_hardly_more_than_four(strategy):
    transpiled(strategy, 4)  # what is made once a process
    few, many = transpiled(strategy, 4)[1], transpiled(strategy, 1000)[1]
    assert many < 2.5 * few  # parameters lie at 1,000 places in place of 4; rounds of the ring made one by one were 150 times the calls


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero3", "fsdp", "ring"])
def test_a_thousand_ranks_cost_verify_hardly_more_than_four(strategy):
    made = []
    for ranks in (4, 4, 1000):
        t, _ = transpiled(fx.strategies.data_parallel(algorithm="ring") if strategy == "ring" else strategy, ranks)
        made.append(calls(t.verify))
    assert made[2] < 3.2 * made[1]  # the check of a placement looks at each rank once; each rank's messages would be 1,000 times the calls


def test_a_thousand_trainers_cost_a_parameter_server_no_more_to_be_checked():
    transpiled(fx.strategies.parameter_server(2), 4)
    few, many = (transpiled(fx.strategies.parameter_server(2), n)[1] for n in (4, 1000))
    assert many < 1.2 * few


def test_a_rank_of_a_thousand_makes_its_own_messages_alone():
    t, made = transpiled("ring_optimizer", 1000)
    specialized = calls(lambda: t.get_trainer_program(1))
    assert specialized < 2 * made


def test_a_plan_asks_for_the_views_of_a_bucket_once():
    asked = []
    for mb in (0.05, 25):
        main, startup = deep(100)
        t = fx.DistributeTranspiler(fx.strategies.data_parallel(bucket_mb=mb))
        t.transpile(program=main, startup_program=startup, trainers=2)
        program = t.get_trainer_program(0)
        dry_plan(program, batch=4)
        asked.append(calls(lambda program=program: dry_plan(program, batch=8)))
    small, large = asked
    assert large < 1.2 * small


@pytest.mark.parametrize(
    "recipe, ranks",
    [(TwoPhaseStar(), 200), (ThroughFirst(), fx.Cluster(125, 8)), ("rails", fx.Cluster(125, 8)), ("hierarchical", fx.Cluster(125, 8))],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_recipes_are_proved_on_many_ranks(recipe, ranks):
    before = dict(ALGORITHMS), dict(SEQUENCES)
    try:
        main, startup = deep(2)
        t = fx.DistributeTranspiler(fx.strategies.data_parallel(algorithm=recipe))
        t.transpile(program=main, startup_program=startup, trainers=ranks)
        assert f"on {t.world_size} ranks" in str(t.verify()).splitlines()[0]
        made = t.get_trainer_program(t.world_size - 8)  # it is held against the proof
        assert made.rank == t.world_size - 8 and any(op.type == "send" for op in made.ops)
    finally:
        for known, old in zip((ALGORITHMS, SEQUENCES), before, strict=True):
            known.clear()
            known.update(old)
