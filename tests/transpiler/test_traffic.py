"""Bytes that each rank sends in a step, against the closed forms of the strategies."""

import pytest

import fluidx as fx
from fluidx.ir import Shard
from fluidx.testing.models import classifier, integer_mlp

P = 4 * (6 * 5 + 5 + 5 * 4 + 4)  # bytes of integer_mlp's parameters


def transpiled(model, strategy, trainers):
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "zero1", "zero2"])
def test_a_step_sends_each_parameter_twice_less_the_own_share(strategy, ranks):
    t = transpiled(integer_mlp(), strategy, ranks)
    assert [t.traffic(r).total for r in range(ranks)] == pytest.approx([2 * (ranks - 1) / ranks * P] * ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_sends_as_much_by_all_ranks_together(ranks):
    t = transpiled(integer_mlp(), "ring_optimizer", ranks)
    assert sum(t.traffic(r).total for r in range(ranks)) == 2 * (ranks - 1) * P


def test_batches_count_where_activations_travel():
    main, startup = fx.Program("tp"), fx.Program("tp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 8], "float32")
        h = fx.layers.fc(x, 6, param_attr=fx.ParamAttr(placement=Shard(1, "tp")), bias_attr=False)
        fx.layers.softmax(fx.layers.fc(h, 4, param_attr=fx.ParamAttr(placement=Shard(0, "tp")), bias_attr=False))
    t = fx.DistributeTranspiler().transpile(program=main, startup_program=startup, trainers=fx.Mesh(dp=2, tp=2))
    # each of two ranks holds 16 of 32 rows of 4 numbers, and an all_reduce of two sends as much as it has
    assert t.traffic(0, batch=32) == {"tp": 16 * 4 * 4}
    assert str(t.traffic(3, batch=32)) == "256 B over tp"


def test_a_single_device_sends_nothing():
    assert str(transpiled(classifier(), "data_parallel", 1).traffic(0)) == "nothing is sent"
