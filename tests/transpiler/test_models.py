"""Models of many kinds: every strategy gives one device's values, and inserts the communication that it should and no other."""

from collections import Counter

import pytest

import fluidx as fx
from fluidx.ir.opdef import OPS, Effect
from tests.sweep import some
from tests.transpiler.models import MODELS, STRATEGIES, same_answers, written


@pytest.mark.parametrize("name, strategy", some(3, list(MODELS), list(STRATEGIES)))
def test_three_ranks_and_uneven_batches_give_one_devices_losses_and_state(name, strategy):
    same_answers(name, STRATEGIES[strategy](), 3)


# what is communicated beside the operators that a strategy needs for each parameter
BESIDE = {
    "mlp": ({}, {}, {}),
    "conv": ({"all_reduce": 2}, {"all_reduce": 2, "broadcast": 2}, {"all_reduce": 2, "all_gather": 2}),  # statistics; scale and bias for dx
    "gpt": ({}, {"all_reduce": 1}, {"all_reduce": 1}),  # the global norm
    "lamb": ({}, {}, {"all_reduce": 4}),  # the norms of cut parameters
    "masked": ({"all_reduce": 1}, {"all_reduce": 1}, {"all_reduce": 4}),  # the number of tokens; the norms of cut gradients
    "branch": ({}, {}, {}),
    "folded": ({}, {"all_reduce": 1}, {"all_reduce": 1}),
    "attention": ({}, {}, {}),
}
EACH = {
    "data_parallel": (0, ["all_reduce"]),
    "reduce_broadcast": (1, ["reduce", "broadcast"]),
    "zero1": (2, ["reduce_scatter", "all_gather"]),
    "zero2": (2, ["reduce_scatter", "all_gather"]),
}


def communication(program):
    return Counter(op.type for b in program.blocks for op in b.oplist if OPS[op.type].effect in (Effect.COLLECTIVE, Effect.P2P))


@pytest.mark.parametrize("strategy", EACH)
@pytest.mark.parametrize("name", BESIDE)
def test_one_operator_each_way_for_each_parameter(name, strategy):
    model = written(MODELS[name])
    unpacked = fx.strategies.get(strategy, bucket_mb=0)
    t = fx.DistributeTranspiler(unpacked).transpile(program=model.main, startup_program=model.startup, trainers=4)
    column, each = EACH[strategy]
    expected = Counter({op: len(model.gradients) for op in each}) + Counter(BESIDE[name][column])
    assert communication(t.main) == expected


@pytest.mark.parametrize("name", BESIDE)
def test_a_ring_carries_each_parameter_there_and_back(name):
    model = written(MODELS[name])
    unpacked = fx.strategies.ring_optimizer().replace("pack", fx.transpiler.Pass())
    t = fx.DistributeTranspiler(unpacked).transpile(program=model.main, startup_program=model.startup, trainers=4)
    found = communication(t.main)
    back = len(model.gradients) + BESIDE[name][1].get("broadcast", 0)
    there = found["reduce"] + found["reduce_scatter"]
    assert (there, found["broadcast"] + found["all_gather"]) == (len(model.gradients), back)
    assert found["all_reduce"] == BESIDE[name][1].get("all_reduce", 0)


def test_without_a_cut_nothing_is_sent():
    model = written(MODELS["mlp"])
    for strategy in STRATEGIES.values():
        t = fx.DistributeTranspiler(strategy()).transpile(program=model.main, startup_program=model.startup, trainers=1)
        assert not communication(t.main) and [op.type for op in t.main.ops] == [op.type for op in model.main.ops]
        t.verify()
