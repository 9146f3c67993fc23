"""Gradients of matrices are exchanged as thin factors; ranks compute what one device does that runs PowerSGD."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Partial
from fluidx.optimizer import GradientMergeOptimizer, PowerSGDOptimizer
from fluidx.testing.models import train_ranks, train_single
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES, same_answers, written

D = "float64"
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def matrices(wrap=lambda inner: PowerSGDOptimizer(inner, 2), dtype=D):
    """Two layers whose weights [9, 12] and [12, 7] are approximated, and biases that are not."""

    def power() -> tuple:
        x, y = fx.data("x", [-1, 9], dtype), fx.data("y", [-1, 7], dtype)
        loss = fx.layers.mean(fx.layers.square(fx.layers.fc(fx.layers.fc(x, 12, act="tanh"), 7) - y))

        def feed(rows, seed=0):
            rng = np.random.default_rng(seed)
            return {"x": rng.standard_normal((rows, 9)).astype(dtype), "y": rng.standard_normal((rows, 7)).astype(dtype)}

        return loss, wrap(fx.optimizer.Momentum(0.1, 0.9)), feed

    return written(power)


def convolution() -> tuple:
    """A filter [6, 2, 3, 3] is read as a matrix [6, 18]."""
    x, y = fx.data("x", [-1, 2, 5, 5], D), fx.data("y", [-1, 6], D)
    h = fx.layers.conv2d(x, 6, 3, act="relu", bias_attr=False)
    loss = fx.layers.mean(fx.layers.square(fx.layers.reduce_mean(h, dim=[2, 3]) - y))

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, 2, 5, 5)), "y": rng.standard_normal((rows, 6))}

    return loss, PowerSGDOptimizer(fx.optimizer.SGD(0.5), 2), feed


def basis(x):
    """What Gram and Schmidt make of columns that are far from each other: the QR factor whose R has a positive diagonal."""
    q, r = np.linalg.qr(x)
    return q * np.sign(np.diag(r))


def test_one_device_runs_the_algorithm_of_the_paper():
    model = matrices()
    (w, g), *_ = model.gradients
    exe, scope = fx.Executor(), fx.executor.Scope()
    exe.run(model.startup, scope=scope)
    q, e, v, p = scope.get(f"{w}_powersgd_q_0"), 0.0, 0.0, scope.get(w)
    assert q.shape == (12, 2) and abs(q).max() > 0.5
    for k in range(6):
        (gradient,) = exe.run(model.main, feed=model.feed(11, k), fetch_list=[g], scope=scope)
        m = gradient + e
        left = basis(m @ q)
        q = m.T @ left
        e = m - left @ q.T
        v = 0.9 * v + left @ q.T
        p = p - 0.1 * v
        # float64, whose last digits are lost again and again in six steps
        # what is kept spans what Q does, column by column, so that M Q has the same basis
        np.testing.assert_allclose(scope.get(f"{w}_powersgd_q_0"), basis(q), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(scope.get(f"{w}_powersgd_error_0"), e, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(scope.get(w), p, rtol=1e-9, atol=1e-12)


def test_a_gradient_of_small_rank_is_exchanged_as_it_is():
    model = matrices()
    of_weights = [(w, g) for w, g in model.gradients if w.endswith("w_0")]
    assert of_weights
    for w, g in of_weights:
        # one row of data: the gradient is an outer product
        ((gradient, found),), scope = train_single(model, [model.feed(1)], [g, f"{g}.approximated"])
        np.testing.assert_allclose(found, gradient, rtol=1e-10, atol=1e-13)
        assert abs(scope.get(f"{w}_powersgd_error_0")).max() < 1e-12


def test_what_is_left_out_is_made_up_for_later():
    model = matrices(lambda inner: PowerSGDOptimizer(inner, 1))
    w, g = model.gradients[0]
    values, scope = train_single(model, [model.feed(11, k) for k in range(8)], [g, f"{g}.approximated"])
    given, used = (sum(v[k] for v in values) for k in range(2))
    left = scope.get(f"{w}_powersgd_error_0")
    assert abs(left).max() > 1e-3  # rank 1 is not enough for these
    np.testing.assert_allclose(used + left, given, atol=1e-13)


@swept(3, strategy=STRATEGIES, ranks=[1, 2, 3])
def test_ranks_give_the_answers_of_one_device(strategy, ranks):
    # float64: the ranks' sums differ in the last digit, and a basis magnifies that by what its columns have in common
    same_answers(matrices(), strategy(), ranks, rows=(7, 8, 2, 5))


def short_of_rank(k):
    """Rows of the k-th batch: all alike, where the gradients have rank 1, others, where they have more, and now and then none but zeros."""
    x = np.random.default_rng(k).standard_normal((6, 9)).astype("float32")
    return x * 0 if k % 5 == 4 else np.repeat(x[:1], 6, axis=0) if k % 3 == 0 else x


def one_row(k):
    """Rows that reach a single row of the first weights."""
    return np.eye(9, dtype="float32")[[k % 4] * 6]


# not one_row with rank 1: there the algorithm itself lets a last digit of E grow, as fast as the gradient turns from step to step
@pytest.mark.parametrize("rows, rank", [(short_of_rank, 1), (short_of_rank, 2), (short_of_rank, 3), (one_row, 2), (one_row, 3)])
def test_ranks_and_one_device_agree_where_gradients_have_less_rank_than_is_kept(rows, rank):
    model = matrices(lambda inner: PowerSGDOptimizer(inner, rank), "float32")
    feeds = [model.feed(6, k) | {"x": rows(k)} for k in range(8)]
    single, scope = train_single(model, feeds, [model.loss])
    values, state = train_ranks(model, fx.strategies.data_parallel(), 3, feeds, [model.loss])
    # float32 through eight steps, where a row that is nearly orthogonal to the last one loses three digits; a direction that is made of
    # rounding errors would change percents
    np.testing.assert_allclose(values, single, rtol=1e-3)
    for p in model.main.all_parameters():
        np.testing.assert_allclose(state[p.name], scope.get(p.name), rtol=1e-3, atol=1e-3)


@every_strategy
def test_filters_are_matrices_of_their_first_axis(strategy):
    same_answers(written(convolution), strategy(), 3)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "ring_optimizer"])
def test_merged_gradients_are_approximated_in_the_branch(strategy):
    model = matrices(lambda inner: GradientMergeOptimizer(PowerSGDOptimizer(inner, 2), 2))
    same_answers(model, STRATEGIES[strategy](), 3, rows=(7, 8, 2, 5))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_the_factors_are_all_that_is_sent(rank, ranks):
    model = matrices(lambda inner: PowerSGDOptimizer(inner, rank), "float32")
    t = fx.DistributeTranspiler().transpile(program=model.main, startup_program=model.startup, trainers=ranks)
    numbers = rank * (9 + 12) + rank * (12 + 7) + 12 + 7  # factors of both weights, and the biases
    assert t.traffic(0).total == pytest.approx(2 * (ranks - 1) / ranks * 4 * numbers)
    assert t.main.global_block().descs["fc_0.w_0_powersgd_error_0"].placement == (Partial("sum", "dp"),)


def test_gradients_no_larger_than_their_factors_stay_as_they_are():
    model = matrices(lambda inner: PowerSGDOptimizer(inner, 5))
    # 5 * (9 + 12) = 105 < 108 numbers, 5 * (12 + 7) = 95 > 84
    assert [d for d in model.main.global_block().descs if d.endswith("powersgd_q_0")] == ["fc_0.w_0_powersgd_q_0"]
    with pytest.raises(fx.ProgramError, match="rank"):
        PowerSGDOptimizer(fx.optimizer.SGD(0.1), 0)


def test_the_error_is_not_kept_in_units_of_a_scale_that_changes():
    decorate, inner = fx.mixed_precision.decorate, fx.optimizer.SGD(0.1)
    for around in (lambda o: o, fx.optimizer.RecomputeOptimizer, lambda o: GradientMergeOptimizer(o, 2)):
        with pytest.raises(fx.ProgramError, match=r"the outer one: mixed_precision.decorate\(PowerSGDOptimizer"):
            PowerSGDOptimizer(around(decorate(inner)))
    PowerSGDOptimizer(decorate(inner, init_loss_scaling=8.0, use_dynamic_loss_scaling=False))
    decorate(PowerSGDOptimizer(inner))


def test_half_precision_is_approximated_in_single():
    with fx.unique_name.guard(), fx.program_guard(fx.Program("half"), fx.Program("half_startup")):
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 9], "float16"), 12, bias_attr=False))
        PowerSGDOptimizer(fx.optimizer.SGD(1.0), 2).minimize(loss)
        descs = fx.default_main_program().global_block().descs
    assert descs["fc_0.w_0_powersgd_error_0"].type.dtype == "float32"
    assert descs["fc_0.w_0@GRAD.approximated"].type.dtype == "float16"
