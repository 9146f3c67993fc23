"""Recompute on ranks: what ranks reduced the first time is not reduced again, and the answers stay the same."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Shard

L = fx.layers


def trained(model, recompute):
    """A model of three blocks and its loss, trained with or without a checkpoint behind each of the first two."""
    main, startup = fx.Program("blocks"), fx.Program("blocks_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h, marks = fx.data("x", [-1, *model.shape], "float64"), []
        for _ in range(3):
            marks.append(h := model(h))
        loss = L.mean(L.square(h))
        if recompute:
            fx.optimizer.RecomputeOptimizer(fx.optimizer.SGD(0.1)).minimize(loss, checkpoints=marks[:2])
        else:
            fx.optimizer.SGD(0.1).minimize(loss)
    return main, startup, loss


def normalized(h):
    return L.relu(L.batch_norm(L.conv2d(h, 4, 3, padding=1, bias_attr=False)))


def of_runs(h):
    return L.fc(L.batch_norm(h, sub_batches=2), 5, act="tanh")


def attended(h):
    """A softmax over classes that are cut."""
    into = fx.ParamAttr(placement=Shard(1, "tp"))
    back = fx.ParamAttr(placement=Shard(0, "tp"))
    return L.fc(L.softmax(L.fc(h, 6, param_attr=into, bias_attr=False)), 4, param_attr=back, bias_attr=False)


normalized.shape, of_runs.shape, attended.shape = (3, 4, 4), (5,), (4,)


def transpiled(model, recompute, strategy, trainers):
    main, startup, loss = trained(model, recompute)
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=trainers), loss


def sent(t):
    """How often values are reduced to be whole, and to be cut."""
    types = [op.type for op in t.main.ops]
    return types.count("all_reduce"), types.count("reduce_scatter")


@pytest.mark.parametrize(
    "model, trainers",
    [(normalized, 4), (attended, fx.Mesh(tp=2)), (attended, fx.Mesh(dp=2, tp=2))],
    ids=["batch_norm", "softmax", "softmax, rows cut too"],
)
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "fsdp"])
def test_what_is_computed_again_reduces_nothing_again(model, trainers, strategy):
    once, _ = transpiled(model, False, strategy, trainers)
    again, _ = transpiled(model, True, strategy, trainers)
    assert len(again.main.ops) > len(once.main.ops)
    assert sent(again)[0] > 0
    assert sent(again) == sent(once)
    again.verify()


@pytest.mark.parametrize("model, ranks", [(normalized, 3), (of_runs, 2)], ids=["batch_norm", "runs of a batch"])
@pytest.mark.parametrize("strategy", ["data_parallel", fx.strategies.micro_batches(2, of=fx.strategies.data_parallel())], ids=str)
def test_ranks_that_recompute_do_what_ranks_do_that_keep_all(model, ranks, strategy):
    x = np.random.default_rng(0).standard_normal((8, *model.shape))
    steps = []
    for recompute in (False, True):
        t, loss = transpiled(model, recompute, strategy, ranks)
        t.verify()
        with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as exe:
            exe.run_startup()
            steps.append([exe.run(feed={"x": x}, fetch_list=[loss])[0] for _ in range(3)])
    assert np.array_equal(*steps)  # the same operators on the same parts, in the same order
    assert len({float(value) for value in np.ravel(steps[0])}) == 3
