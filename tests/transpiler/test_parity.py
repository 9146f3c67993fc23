"""N ranks give one device's answers, for every strategy."""

from functools import cache

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import classifier, integer_mlp, train_ranks, train_single
from tests.sweep import some, swept

STRATEGIES = {
    "data_parallel": fx.strategies.data_parallel,
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "ring_optimizer": fx.strategies.ring_optimizer,
    "ring_optimizer of small chunks": lambda: fx.strategies.ring_optimizer(chunk_mb=64 / 2**20),
    "zero1": fx.strategies.zero1,
    "zero2": fx.strategies.zero2,
    "small buckets": lambda: fx.strategies.data_parallel(bucket_mb=64 / 2**20, first_bucket_mb=16 / 2**20),
    "late buckets": lambda: fx.strategies.data_parallel(overlap=False),
    "flat ranges of small buckets": lambda: fx.strategies.zero1(bucket_mb=64 / 2**20, first_bucket_mb=16 / 2**20),
    "zero2 along axes": lambda: fx.strategies.zero2(bucket_mb=0),
    "zero3": fx.strategies.zero3,
    "fsdp": lambda: fx.strategies.fsdp(units=1 / 2**10),
    "ring_optimizer by hash": lambda: fx.strategies.ring_optimizer(roots="hash"),
    "reduce_broadcast by hash": lambda: fx.strategies.reduce_broadcast(roots="hash"),
}
FIRST = ["data_parallel", "reduce_broadcast", "ring_optimizer of small chunks", "zero1"]
first_strategies = pytest.mark.parametrize("strategy", [STRATEGIES[s] for s in FIRST], ids=FIRST)
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


@cache
def one_device(reduce, rows):
    """A model of integers, what is fetched of it, its feeds, and what one device gives."""
    model = integer_mlp(reduce)
    fetch, feeds = [model.loss, *[g for _, g in model.gradients]], [model.feed(rows)]
    return model, fetch, feeds, *train_single(model, feeds, fetch)


def bit_equal(reduce, strategy, trainers, rows=24):
    """The loss, every gradient and every parameter after a step are those of one device, bit for bit."""
    model, fetch, feeds, (one,), scope = one_device(reduce, rows)
    (many,), state = train_ranks(model, strategy, trainers, feeds, fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.array_equal(a, b), name
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


@swept(2, strategy=STRATEGIES, ranks=[1, 2, 3, 4, 8])
def test_gradients_and_parameters_are_bit_equal_where_sums_are_exact(strategy, ranks):
    bit_equal("sum", strategy(), ranks)


@swept(2, strategy=STRATEGIES, ranks=[2, 4])
def test_a_mean_loss_is_bit_equal_too_when_the_mean_is_by_a_power_of_two(strategy, ranks):
    bit_equal("mean", strategy(), ranks, rows=32)  # 32 rows of 4 columns: the mean is by 128


@pytest.mark.parametrize("strategy, ranks", [(s, n) for s in FIRST for n in (3, 8)])
def test_random_data_stays_within_float32_rounding(strategy, ranks):
    model = classifier()
    feeds = [model.feed(24, k) for k in range(50)]
    one, scope = train_single(model, feeds, [model.loss])
    many, state = train_ranks(model, STRATEGIES[strategy](), ranks, feeds, [model.loss])
    # one step: only the order of additions differs, so a few units in the last place
    np.testing.assert_allclose(many[0][0], one[0][0], rtol=1e-6)
    # 50 steps: the differences grow with the steps, here by a factor below 50
    np.testing.assert_allclose([v[0].item() for v in many], [v[0].item() for v in one], rtol=5e-5)
    for p, _ in model.gradients:
        np.testing.assert_allclose(state[p], scope.get(p), rtol=5e-5, atol=5e-6)


@first_strategies
@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_an_uneven_batch_is_weighted(strategy, rows):
    model = classifier()
    feeds = [model.feed(rows, k) for k in range(3)]
    one, scope = train_single(model, feeds, [model.loss])
    many, state = train_ranks(model, strategy(), 4, feeds, [model.loss])
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for p, _ in model.gradients:
        np.testing.assert_allclose(state[p], scope.get(p), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_summed_loss_counts_no_borrowed_row(reduce):
    model = integer_mlp(reduce)
    feeds = [model.feed(3)]
    (one,), scope = train_single(model, feeds, [model.loss])
    (many,), state = train_ranks(model, fx.strategies.data_parallel(), 2, feeds, [model.loss])
    np.testing.assert_allclose(many[0], one[0], rtol=1e-6)
    for p, _ in model.gradients:
        np.testing.assert_allclose(state[p], scope.get(p), rtol=1e-5)


def test_dropping_leaves_surplus_rows_out():
    model = classifier()
    full = model.feed(11)
    kept = {k: v[:8] for k, v in full.items()}
    (one,), _ = train_single(model, [kept], [model.loss])
    (many,), _ = train_ranks(model, "data_parallel", 4, [full], [model.loss], uneven="drop")
    np.testing.assert_allclose(many[0], one[0], rtol=1e-6)


def test_padding_repeats_the_last_row():
    model = classifier()
    short = model.feed(6)
    padded = {k: np.concatenate([v, v[-1:], v[-1:]]) for k, v in short.items()}
    (one,), _ = train_single(model, [padded], [model.loss])
    (many,), _ = train_ranks(model, "data_parallel", 4, [short], [model.loss], uneven="pad")
    np.testing.assert_allclose(many[0], one[0], rtol=1e-6)


OPTIMIZERS = {
    "SGD": lambda: fx.optimizer.SGD(0.1),
    "Momentum": lambda: fx.optimizer.Momentum(0.1, 0.9, use_nesterov=True),
    "DGCMomentum": lambda: fx.optimizer.DGCMomentum(0.1, 0.9, 1, sparsity=[0.5], least=8),
    "Adagrad": lambda: fx.optimizer.Adagrad(0.1),
    "DecayedAdagrad": lambda: fx.optimizer.DecayedAdagrad(0.1),
    "Ftrl": lambda: fx.optimizer.Ftrl(0.1, l1=0.01, l2=0.01),
    "Adam": lambda: fx.optimizer.Adam(0.01),
    "AdamW": lambda: fx.optimizer.AdamW(0.01),
    "Adamax": lambda: fx.optimizer.Adamax(0.01),
    "RMSProp": lambda: fx.optimizer.RMSProp(0.01),
    "Adadelta": lambda: fx.optimizer.Adadelta(0.5),
    "Lamb": lambda: fx.optimizer.Lamb(0.01),
    "Dpsgd": lambda: fx.optimizer.Dpsgd(0.1, clip=0.05, batch_size=8.0, sigma=0.1),
    "Lookahead": lambda: fx.optimizer.LookaheadOptimizer(fx.optimizer.Momentum(0.1, 0.9), alpha=0.5, k=2),
    "LarsMomentum": lambda: fx.optimizer.LarsMomentum(0.1, 0.9),
    "global norm": lambda: fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)),
    "clip by norm": lambda: fx.optimizer.SGD(0.1, grad_clip=fx.clip.GradientClipByNorm(0.05)),
    "clip by value": lambda: fx.optimizer.SGD(0.1, grad_clip=fx.clip.GradientClipByValue(0.01)),
    "L2": lambda: fx.optimizer.Momentum(0.1, 0.9, regularization=fx.regularizer.L2Decay(0.1)),
    "L1 and global norm": lambda: fx.optimizer.SGD(
        0.1, regularization=fx.regularizer.L1Decay(0.01), grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)
    ),
}


def test_no_optimizer_is_forgotten():
    classes = {n for n in fx.optimizer.__all__ if not n.endswith("Optimizer")} - {"ExponentialMovingAverage", "ModelAverage"}
    assert classes <= set(OPTIMIZERS)


@pytest.mark.parametrize("optimizer, strategy", some(3, list(OPTIMIZERS), [*FIRST, "zero2", "zero3"]))
def test_every_optimizer_under_every_strategy(strategy, optimizer):
    model = classifier(OPTIMIZERS[optimizer]())
    feeds = [model.feed(12, k) for k in range(5)]
    one, scope = train_single(model, feeds, [model.loss])
    many, state = train_ranks(model, STRATEGIES[strategy](), 4, feeds, [model.loss])
    # Adam and its kin divide by the root of a small second moment, which magnifies rounding in the first steps
    np.testing.assert_allclose(many, one, rtol=2e-5)
    for name, value in state.items():
        np.testing.assert_allclose(value, scope.get(name), rtol=1e-3, atol=2e-5, err_msg=name)


@first_strategies
def test_a_learning_rate_schedule_advances_once_a_step(strategy):
    def optimizer():
        return fx.optimizer.SGD(fx.layers.exponential_decay(0.2, decay_steps=2, decay_rate=0.5, staircase=True))

    model = _scheduled(optimizer)
    feeds = [model.feed(8, k) for k in range(5)]
    one, scope = train_single(model, feeds, [model.loss])
    many, state = train_ranks(model, strategy(), 4, feeds, [model.loss])
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert state["@LR_DECAY_COUNTER@"] == scope.get("@LR_DECAY_COUNTER@")


def _scheduled(optimizer):
    from fluidx.testing.models import TestModel

    main, startup = fx.Program("scheduled"), fx.Program("scheduled_startup")
    with fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], "float32")
        loss = fx.layers.mean(fx.layers.square(fx.layers.fc(x, 3)))
        _, pairs = optimizer().minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).standard_normal((rows, 4), "float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@first_strategies
@pytest.mark.parametrize("kind", ["dropout", "norm", "conv", "batch_norm", "sub_batches"])
def test_models_with_state_and_randomness(strategy, kind):
    model = classifier(kind=kind)
    feeds = [model.feed(12, k) for k in range(4)]
    one, _ = train_single(model, feeds, [model.loss])
    many, _ = train_ranks(model, strategy(), 4, feeds, [model.loss])
    np.testing.assert_allclose(many, one, rtol=1e-5)


def test_batch_norm_takes_its_statistics_over_the_whole_batch():
    model = classifier(kind="batch_norm")
    statistics = [d.name for d in model.main.global_block().descs.values() if d.persistable and "batch_norm" in d.name]
    feeds = [model.feed(7, k) for k in range(3)]
    _, scope = train_single(model, feeds, [model.loss])
    _, state = train_ranks(model, "data_parallel", 3, feeds, [model.loss])
    assert len(statistics) >= 4
    for name in statistics:
        np.testing.assert_allclose(state[name], scope.get(name), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("cluster", [fx.Cluster(2, 2), fx.Cluster(3, 2), fx.Cluster(2, 1), fx.Cluster(1, 4)], ids=str)
@first_strategies
def test_several_hosts(strategy, cluster):
    bit_equal("sum", strategy(), cluster)


@pytest.mark.parametrize(
    "strategy", [fx.strategies.ring_optimizer(chunk_mb=256 / 2**20), fx.strategies.zero1(), fx.strategies.zero2()], ids=repr
)
def test_state_of_the_optimizer_is_cut_to_one_nth(strategy):
    model = classifier(fx.optimizer.Adam(0.01), width=64)
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=model.main, startup_program=model.startup, trainers=4)
    whole = sum(d.type.nbytes for d in model.main.global_block().descs.values() if "moment" in d.name)
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        exe.run(feed=model.feed(8), fetch_list=[])
        for scope in exe.scopes:
            assert 0 < sum(a.nbytes for n, a in scope.arrays.items() if "moment" in n) <= whole / 4 * 1.25


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_fetches_are_global_values(placement):
    model = classifier()
    main = model.main
    logits = next(op for op in main.ops if op.type == "softmax_with_cross_entropy").input("Logits")[0]
    name = logits if placement == "sharded" else model.gradients[0][0]
    feeds = [model.feed(7)]
    (one,), _ = train_single(model, feeds, [name])
    (many,), _ = train_ranks(model, "ring_optimizer", 3, feeds, [name])
    assert one[0].shape == many[0].shape
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [8, 7, 2])
def test_a_fetched_gradient_of_rows_is_one_devices(rows):
    model = classifier()
    logits = next(op for op in model.main.ops if op.type == "softmax_with_cross_entropy").input("Logits")[0]
    feeds = [model.feed(rows)]
    (one,), _ = train_single(model, feeds, [f"{logits}@GRAD"])
    (many,), _ = train_ranks(model, "data_parallel", 3, feeds, [f"{logits}@GRAD"])
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5, atol=1e-7)


def test_an_inference_program_runs_on_the_ranks_rows():
    model = classifier()
    test = model.main.clone(for_test=True)
    logits = next(op for op in test.ops if op.type == "softmax_with_cross_entropy").input("Logits")[0]
    t = fx.DistributeTranspiler()
    t.transpile(program=test, startup_program=model.startup, trainers=3)
    t.verify()
    feed = model.feed(8)
    (one,), _ = train_single(model, [feed], [logits])
    with fx.ParallelExecutor(t, places=fx.cpu_places(3)) as exe:
        exe.run_startup()
        (many,) = exe.run(feed=feed, fetch_list=[logits])
    np.testing.assert_allclose(many, one[0], rtol=1e-6)
