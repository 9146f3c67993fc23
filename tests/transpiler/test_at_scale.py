"""What data-parallel trainers commonly get wrong on uneven ranks, exact to the bit under every strategy.

Averages of parameters, losses over a counted number of tokens, batch_norm, clips and ratios by norms of whole gradients, gradients of
tied parameters, and recompute. Data are small integers and what is divided by is a power of two, so all sums are exact in any order, and
each rounding that is left (a square root, a quotient) is of the same numbers: ranks and one device have to agree in every bit.
"""

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import TestModel, integer_mlp, train_ranks, train_single
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES

L = fx.layers
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def integers(rng, *shape, name=None):
    return fx.ParamAttr(name=name, initializer=fx.initializer.NumpyArrayInitializer(rng.integers(-2, 3, shape).astype("float64")))


def written(write, feed, optimizer=None):
    """The model whose loss a function writes in float64."""
    main, startup = fx.Program(write.__name__), fx.Program(f"{write.__name__}_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = write(np.random.default_rng(3))
        _, pairs = (optimizer or fx.optimizer.SGD(0.25)).minimize(loss)
    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def same_bits(model, strategy, ranks, feeds):
    """The losses and gradients of each step and all state at the end."""
    fetch = [model.loss, *[g for _, g in model.gradients]]
    one, scope = train_single(model, feeds, fetch)
    many, state = train_ranks(model, strategy, ranks, feeds, fetch)
    for a, b in zip(one, many, strict=True):
        for name, x, y in zip(fetch, a, b, strict=True):
            assert np.array_equal(x, y), name
    for name, value in state.items():
        assert np.array_equal(scope.get(name), value), name
    return one, state


def drawn(rows, seed=0, low=-2):
    return np.random.default_rng(seed).integers(low, 3, (rows, 6)).astype("float64")


def squares(rng):
    x = fx.data("x", [-1, 6], "float64")
    h = L.fc(x, 5, act="relu", param_attr=integers(rng, 6, 5), bias_attr=integers(rng, 5))
    return L.reduce_sum(L.square(L.fc(h, 4, param_attr=integers(rng, 5, 4), bias_attr=integers(rng, 4))))


@swept(2, strategy=STRATEGIES, ranks=[1, 3])
def test_moving_averages_of_parameters(strategy, ranks):
    """After each step e = e/2 + p/2, wherever p was updated."""
    main, startup = fx.Program("averaged"), fx.Program("averaged_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = squares(np.random.default_rng(3))
        _, pairs = fx.optimizer.Momentum(0.25, 0.5).minimize(loss)
        averages = fx.optimizer.ExponentialMovingAverage(0.5)
        averages.update()
    model = TestModel(main, startup, loss, None, [(p.name, g.name) for p, g in pairs])
    feeds = [{"x": drawn(7, k)} for k in range(2)]
    same_bits(model, strategy(), ranks, feeds)
    ends = [train_ranks(model, strategy(), ranks, feeds[:k], [])[1] for k in (1, 2)]
    for p, _ in pairs:
        assert np.array_equal(ends[1][f"{p.name}_ema_0"], ends[0][p.name] / 4 + ends[1][p.name] / 2), p.name
    scope = fx.executor.Scope()
    for name, value in ends[1].items():
        scope.set(name, value)
    with fx.scope_guard(scope), averages.apply(fx.Executor()):
        for p, _ in pairs:  # the averages began at 0 and have 3/4 of their weight
            assert np.array_equal(scope.get(p.name), ends[1][f"{p.name}_ema_0"] / 0.75), p.name


@swept(3, strategy=STRATEGIES, ranks=[2, 3, 4])
def test_a_loss_over_the_tokens_that_count_is_divided_by_the_count_of_all_ranks(strategy, ranks):
    """8 of 42 tokens count. Ranks hold different numbers of them, one of 3 and two of 4 hold none."""

    def masked(rng):
        x, mask = fx.data("x", [-1, 6], "float64"), fx.data("mask", [-1, 6], "float64")
        cost = L.square(L.fc(x, 6, param_attr=integers(rng, 6, 6), bias_attr=integers(rng, 6))) * mask
        count = L.reduce_sum(mask)
        count.stop_gradient = True
        return L.reduce_sum(cost) / count

    mask = np.zeros((7, 6))
    mask[0, :5] = mask[1, 2:5] = 1.0
    feed = {"x": drawn(7), "mask": mask}
    model = written(masked, None)
    (step, *_), state = same_bits(model, strategy(), ranks, [feed])
    w, b = (before(model, n) for n in ("fc_0.w_0", "fc_0.b_0"))
    y = feed["x"] @ w + b
    assert step[0] == (np.square(y) * mask).sum() / 8
    assert np.array_equal(state["fc_0.w_0"], w - 0.25 * feed["x"].T @ (2 * y * mask / 8))


@swept(2, strategy=STRATEGIES, ranks=[2, 3])
def test_a_mean_over_the_masked_rows_of_each_sample_is_a_mean_over_samples(strategy, ranks):
    """Both denominators at once: tokens of a sample, and samples of the whole batch."""

    def by_sample(rng):
        x, mask = fx.data("x", [-1, 6], "float64"), fx.data("mask", [-1, 6], "float64")
        cost = L.square(L.fc(x, 6, param_attr=integers(rng, 6, 6), bias_attr=False)) * mask
        return L.mean(L.reduce_sum(cost, dim=1) / L.reduce_sum(mask, dim=1))

    mask = np.zeros((8, 6))
    for row, count in enumerate((1, 2, 4, 4, 2, 1, 1, 2)):
        mask[row, :count] = 1.0
    same_bits(written(by_sample, None), strategy(), ranks, [{"x": drawn(8), "mask": mask}])


# a column of mean 0 and mean square 3: with epsilon 1 its deviation is 2, and all that batch_norm computes is exact
COLUMN = np.array([3.0, -3.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0])


@swept(3, strategy=STRATEGIES, ranks=[2, 3, 4])
def test_batch_norm_weighs_the_rows_of_ranks_by_their_number(strategy, ranks):
    """8 rows on 3 ranks are 2, 3 and 3, whose own means and variances differ from each other and from those of all."""

    def normalized(rng):
        x = fx.data("x", [-1, 6], "float64")
        eye = fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(np.eye(6)))
        h = L.batch_norm(L.fc(x, 6, param_attr=eye, bias_attr=False), epsilon=1.0, momentum=0.5)
        return L.reduce_sum(L.square(L.fc(h, 4, param_attr=integers(rng, 6, 4), bias_attr=integers(rng, 4))))

    rng = np.random.default_rng(1)
    x = np.stack([rng.permutation(COLUMN) for _ in range(6)], axis=1)
    model = written(normalized, None)
    _, state = same_bits(model, strategy(), ranks, [{"x": x}])
    assert np.array_equal(state["batch_norm_0.w_1"], np.zeros(6))  # the running mean
    assert np.array_equal(state["batch_norm_0.w_2"], np.full(6, 0.5 * 1 + 0.5 * 3))  # the running variance, which starts at 1


BY_NORMS = {
    "clip by global norm": lambda: fx.optimizer.SGD(0.25, grad_clip=fx.clip.GradientClipByGlobalNorm(1.0)),
    "clip by norm": lambda: fx.optimizer.Momentum(0.25, 0.5, grad_clip=fx.clip.GradientClipByNorm(1.0)),
    "LARS": lambda: fx.optimizer.LarsMomentum(0.25, 0.5, lars_coeff=0.5),
}


@swept(3, strategy=STRATEGIES, ranks=[2, 3], optimizer=BY_NORMS)
def test_norms_are_of_whole_gradients_and_parameters(strategy, ranks, optimizer):
    """Each rank has a part of them. Their squares are integers in the first step, so one number comes out whoever adds them up."""
    same_bits(written(squares, None, optimizer()), strategy(), ranks, [{"x": drawn(7)}])


@swept(2, strategy=STRATEGIES, ranks=[2, 3])
def test_a_clipped_step_has_the_length_that_was_asked_for(strategy, ranks):
    model = written(squares, None, fx.optimizer.SGD(1.0, grad_clip=fx.clip.GradientClipByGlobalNorm(2.0)))
    _, state = train_ranks(model, strategy(), ranks, [{"x": drawn(7)}], [])
    step = sum(np.square(state[p] - before(model, p)).sum() for p, _ in model.gradients)
    np.testing.assert_allclose(np.sqrt(step), 2.0, rtol=1e-12)  # some hundred squares in float64


@swept(2, strategy=STRATEGIES, ranks=[2, 3])
def test_a_tied_table_adds_up_its_gradients(strategy, ranks):
    """Rows that are looked up and the columns of the last product are one parameter."""

    def tied(rng):
        ids = fx.data("ids", [-1, 4], "int64")
        h = fx.embedding(ids, [9, 6], param_attr=integers(rng, 9, 6, name="table"), dtype="float64")
        logits = L.matmul(L.fc(h, 6, num_flatten_dims=2, param_attr=integers(rng, 6, 6)), h.block.var("table"), transpose_y=True)
        return L.reduce_sum(L.square(logits))

    same_bits(written(tied, None), strategy(), ranks, [{"ids": np.random.default_rng(0).integers(0, 9, (7, 4))}])


@swept(3, strategy=STRATEGIES, ranks=[1, 2, 4])
def test_recomputed_values(strategy, ranks):
    model = integer_mlp("sum", fx.optimizer.RecomputeOptimizer(fx.optimizer.SGD(0.5), ["fc_1.tmp_1"]))
    assert any("RECOMPUTE" in n for op in model.main.ops for n in op.output_arg_names)
    same_bits(model, strategy(), ranks, [model.feed(8)])


def before(model, name):
    """A parameter's first value."""
    return train_single(model, [], [])[1].get(name)
