"""Mixed precision under every strategy: the answers of one device's mixed precision, and steps that all ranks skip together."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir.opdef import OPS, Effect
from fluidx.testing.models import TestModel, train_ranks, train_single
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES

L = fx.layers
amp = fx.mixed_precision
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def integers(rng, *shape):
    return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(rng.integers(-1, 2, shape).astype("float32")))


def small_integers(optimizer):
    """A perceptron over -1, 0 and 1. For 8 rows every sum has at most 11 significant bits, so a step is exact in float16 too."""
    main, startup = fx.Program("small_integers"), fx.Program("small_integers_startup")
    rng = np.random.default_rng(3)
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 6], "float32")
        h = L.fc(x, 5, act="relu", param_attr=integers(rng, 6, 5), bias_attr=integers(rng, 5))
        loss = L.reduce_sum(L.square(L.fc(h, 4, param_attr=integers(rng, 5, 4), bias_attr=integers(rng, 4))))
        _, pairs = optimizer.minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).integers(-1, 2, (rows, 6)).astype("float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def same_bits(model, strategy, ranks, feeds, fetch, single=None):
    """What is fetched and all state, on ranks and on one device (`single`, where it is known); both are returned."""
    one, scope = single or train_single(model, feeds, fetch)
    many, state = train_ranks(model, strategy, ranks, feeds, fetch)
    for a, b in zip(one, many, strict=True):
        for name, x, y in zip(fetch, a, b, strict=True):
            assert np.array_equal(x, y, equal_nan=True), name
    for name, value in state.items():
        assert np.array_equal(scope.get(name), value), name
    return one, state


@cache
def one_step(reduce_dtype):
    """A model, its feed, what is fetched, and what one device gives."""
    model = small_integers(amp.decorate(fx.optimizer.Momentum(0.125, 0.5), init_loss_scaling=8.0, reduce_dtype=reduce_dtype))
    feeds, fetch = [model.feed(8)], [model.loss, *[g for _, g in model.gradients]]
    return model, feeds, fetch, train_single(model, feeds, fetch)


@swept(3, strategy=STRATEGIES, ranks=[1, 2, 4], reduce_dtype=["float16", "float32"])
def test_a_step_in_float16_is_one_devices_to_the_bit(strategy, ranks, reduce_dtype):
    model, feeds, fetch, single = one_step(reduce_dtype)
    same_bits(model, strategy(), ranks, feeds, fetch, single)


OPTIMIZERS = {"Momentum": lambda: fx.optimizer.Momentum(0.125, 0.5), "Adam": lambda: fx.optimizer.Adam(0.125)}
SCALING = {"loss_scaling_0": 4.0, "num_good_steps_0": 0, "num_bad_steps_0": 0}  # after one bad step, from 8.0


@cache
def an_overflow(optimizer, then=()):
    """A model, a feed whose step overflows and others `then`, and what one device gives."""
    model = small_integers(amp.decorate(optimizer(), init_loss_scaling=8.0, decr_every_n_nan_or_inf=1, decr_ratio=0.5))
    feeds = [model.feed(8, seed) for seed in (0, *then)]
    feeds[0]["x"][5, 2] = 1e30  # row 5 lies on the last of 2 ranks, and on the third of 4
    return model, feeds, train_single(model, feeds, [model.loss])


@cache
def untouched(optimizer, scale, seeds=()):
    """The state after steps on these feeds alone."""
    model = small_integers(amp.decorate(optimizer(), init_loss_scaling=scale))
    return train_single(model, [model.feed(8, seed) for seed in seeds], [])[1]


@swept(3, strategy=STRATEGIES, ranks=[1, 2, 4], optimizer=OPTIMIZERS)
def test_an_overflow_on_the_rows_of_one_rank_skips_the_step_on_all(strategy, ranks, optimizer):
    model, feeds, single = an_overflow(optimizer)
    _, state = same_bits(model, strategy(), ranks, feeds, [model.loss], single)
    before = untouched(optimizer, 8.0)
    for name, value in state.items():
        assert np.array_equal(value, [SCALING[name]] if name in SCALING else before.get(name)), name


@swept(2, strategy=STRATEGIES, optimizer=OPTIMIZERS)
def test_a_skipped_step_leaves_nothing_behind_but_the_scale(strategy, optimizer):
    model, feeds, single = an_overflow(optimizer, then=(1,))
    _, state = same_bits(model, strategy(), 4, feeds, [model.loss], single)
    fresh = untouched(optimizer, 4.0, seeds=(1,))
    for name, value in state.items():
        assert np.array_equal(value, fresh.get(name)), name


@pytest.mark.parametrize("reduce_dtype, bytes_each", [(None, 2), ("float32", 4)])
def test_gradients_travel_in_16_bits_unless_asked(reduce_dtype, bytes_each):
    model = small_integers(amp.decorate(fx.optimizer.SGD(0.125), reduce_dtype=reduce_dtype))
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    descs = t.main.global_block().descs
    sums = [descs[op.input_arg_names[0]].type for op in t.main.ops if op.type == "all_reduce"]
    parameters = 6 * 5 + 5 + 5 * 4 + 4
    # beside the gradients the counts of what is not finite are added up, if each rank has parts of them; whole gradients are counted alike
    assert sum(s.nbytes for s in sums) == bytes_each * parameters


@pytest.mark.parametrize("strategy, extra", [("data_parallel", 0), ("reduce_broadcast", 1), ("zero1", 1), ("zero2", 1)])
def test_one_number_says_whether_there_was_an_overflow(strategy, extra):
    """Where every rank has whole gradients each counts the same; else the counts of all gradients are one sum."""
    plain, half = small_integers(fx.optimizer.Adam(0.125)), small_integers(amp.decorate(fx.optimizer.Adam(0.125)))
    found = []
    for model in (plain, half):
        t = fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=4)
        found.append(Counter(op.type for op in t.main.ops if OPS[op.type].effect is Effect.COLLECTIVE))
    assert found[1] == found[0] + Counter({"all_reduce": extra})


@swept(2, strategy=STRATEGIES, ranks=[1, 4])
def test_a_merged_gradient_is_skipped_when_one_of_its_runs_overflows(strategy, ranks):
    """Of four runs in pairs the second one overflows: the first update is skipped, and the accumulators begin anew."""

    def merged(scale):
        optimizer = amp.decorate(fx.optimizer.Momentum(0.125, 0.5), init_loss_scaling=scale, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        return small_integers(fx.optimizer.GradientMergeOptimizer(optimizer, 2))

    model, feeds = merged(8.0), []
    for k in range(4):
        feeds.append(model.feed(8, k))
    feeds[1]["x"][5, 2] = 1e30
    _, state = same_bits(model, strategy(), ranks, feeds, [model.loss])
    _, fresh = train_single(merged(4.0), feeds[2:], [])
    for name, value in state.items():
        if name != "gradient_merge_runs_0":
            assert np.array_equal(value, fresh.get(name)), name
    assert state["loss_scaling_0"] == 4.0 and state["num_good_steps_0"] == 1


@pytest.mark.parametrize("outer", [fx.optimizer.GradientMergeOptimizer, fx.optimizer.LocalSGDOptimizer])
def test_what_updates_in_a_block_has_to_stand_outside(outer):
    with pytest.raises(fx.ProgramError, match=rf"a step cannot be skipped: cond writes .*: {outer.__name__}\(decorate\(...\)\)"):
        small_integers(amp.decorate(outer(fx.optimizer.SGD(0.1), 2)))
    small_integers(outer(amp.decorate(fx.optimizer.SGD(0.1)), 2))  # as the message says


def test_ranks_that_train_by_themselves_skip_by_themselves():
    optimizer = amp.decorate(fx.optimizer.Momentum(0.125, 0.5), init_loss_scaling=8.0, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
    model = small_integers(optimizer)
    feed = model.feed(8)
    feed["x"][5, 2] = 1e30
    t = fx.DistributeTranspiler("replicas").transpile(program=model.main, startup_program=model.startup, trainers=2)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2), timeout=20) as exe:
        exe.run_startup()
        exe.run(feed=feed, fetch_list=[])
        for rank, scope in enumerate(exe.scopes):
            _, alone = train_single(model, [{"x": feed["x"][4 * rank : 4 * rank + 4]}], [])
            for name in [d.name for d in model.main.global_block().descs.values() if d.persistable]:
                assert np.array_equal(scope.get(name), alone.get(name)), (rank, name)
        assert [s.get("loss_scaling_0") for s in exe.scopes] == [8.0, 4.0]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: fx.optimizer.AdasumOptimizer(fx.optimizer.Momentum(0.125, 0.5)),
        lambda: fx.optimizer.DGCMomentumOptimizer(0.125, 0.5, 0, least=0),
    ],
    ids=["Adasum", "DGC"],
)
def test_ranks_that_update_with_what_others_send_skip_together(optimizer):
    model = small_integers(amp.decorate(optimizer(), init_loss_scaling=8.0, decr_every_n_nan_or_inf=1, decr_ratio=0.5))
    feed = model.feed(8)
    feed["x"][5, 2] = 1e30  # a row of rank 1
    t = fx.DistributeTranspiler("replicas").transpile(program=model.main, startup_program=model.startup, trainers=2)
    t.verify()
    params = [p for p, _ in model.gradients]
    with fx.ParallelExecutor(t, places=fx.cpu_places(2), timeout=20) as exe:
        exe.run_startup()
        before = [[s.get(p).copy() for p in params] for s in exe.scopes]
        exe.run(feed=feed, fetch_list=[])
        for s, old in zip(exe.scopes, before, strict=True):
            assert all(np.array_equal(s.get(p), a) for p, a in zip(params, old, strict=True))
            assert s.get("loss_scaling_0") == 4.0
        exe.run(feed=model.feed(8, 1), fetch_list=[])
        first, second = ([s.get(p) for p in params] for s in exe.scopes)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first, before[0], strict=True))


@pytest.mark.parametrize("trainers, servers", [(1, 1), (2, 1), (3, 2), (2, 3)])
def test_servers_and_trainers_have_one_scale(trainers, servers):
    rule = {"init_loss_scaling": 8.0, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    model = small_integers(amp.decorate(fx.optimizer.Momentum(0.125, 0.5), **rule))
    feeds = [model.feed(8), model.feed(8, 1), model.feed(8, 2)]
    feeds[1]["x"][5, 2] = 1e30
    scale, good = "loss_scaling_0", "num_good_steps_0"
    strategy = fx.strategies.parameter_server(servers, min_block=4)
    same_bits(model, strategy, trainers, feeds, [model.loss, scale, good])


def deep(optimizer):
    """Dropout, batch_norm, a tied table, attention by hand: one of each kind of operator."""
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    words, width, length = 13, 8, 4
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [-1, length], "int64"), fx.data("label", [-1, length, 1], "int64")
        table = fx.ParamAttr(name="table", initializer=fx.initializer.Normal(0.0, 0.3))
        h = L.dropout(fx.embedding(ids, [words, width], param_attr=table), 0.2, dropout_implementation="upscale_in_train")
        first = L.batch_norm(L.fc(h, width, num_flatten_dims=2, act="gelu"), data_layout="NHWC")
        q, k, v = (L.fc(first, width, num_flatten_dims=2) for _ in range(3))
        mixed = L.matmul(L.softmax(L.matmul(q, k, transpose_y=True, alpha=0.35)), v)
        second = L.layer_norm(first + mixed, begin_norm_axis=2)
        logits = L.matmul(second, main.global_block().var("table"), transpose_y=True)
        loss = L.mean(L.softmax_with_cross_entropy(logits, label))
        _, pairs = optimizer([first, second]).minimize(loss)

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"ids": rng.integers(0, words, (rows, length)), "label": rng.integers(0, words, (rows, length, 1))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def clipped():
    return fx.optimizer.Momentum(0.1, 0.9, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5))


def recomputed_inside(checkpoints):
    return amp.decorate(fx.optimizer.RecomputeOptimizer(clipped(), checkpoints), init_loss_scaling=2.0**10)


def recomputed_outside(checkpoints):
    return fx.optimizer.RecomputeOptimizer(amp.decorate(clipped(), init_loss_scaling=2.0**10), checkpoints)


@every_strategy
def test_recompute_mixed_precision_and_clipping_together(strategy):
    model = deep(recomputed_inside)
    feeds = [model.feed(6, k) for k in range(3)]
    one, scope = train_single(model, feeds, [model.loss])
    many, state = train_ranks(model, strategy(), 4, feeds, [model.loss])
    # float16 has 11 digits: terms that ranks round and add up differ from one rounded sum by some 2^-11 of them
    np.testing.assert_allclose(many, one, rtol=2e-3)
    for name, value in state.items():
        np.testing.assert_allclose(value, scope.get(name), rtol=2e-2, atol=2e-3, err_msg=name)


def test_recompute_outside_of_mixed_precision_and_inside_are_one_program():
    inside, outside = deep(recomputed_inside), deep(recomputed_outside)
    assert str(inside.main) == str(outside.main) and str(inside.startup) == str(outside.startup)
    plain = deep(lambda checkpoints: amp.decorate(clipped(), init_loss_scaling=2.0**10))
    feeds = [plain.feed(6, k) for k in range(3)]
    (one, scope), (two, again) = (train_single(m, feeds, [m.loss]) for m in (plain, inside))
    assert np.array_equal(one, two)
    for p, _ in plain.gradients:
        assert np.array_equal(scope.get(p), again.get(p)), p
