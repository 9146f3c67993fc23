"""Optimizers that a user writes from plain operators, and losses trained side by side, under every strategy."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, Role
from fluidx.testing.models import TestModel, train_ranks, train_single
from tests.sweep import some

L = fx.layers


class PlainMomentum(fx.optimizer.base.Optimizer):
    """The velocity is read before anything of the gradient is written to it."""

    def update(self, step, p, g, lr):
        v, b = step.state(p, "v"), step.b
        b.emit("sum", [b.scale(v, scale=0.9), g], out={"Out": v})
        b.elementwise_sub(p, b.elementwise_mul(v, lr), out={"Out": p})


class OldValue(fx.optimizer.base.Optimizer):
    """A value of the old parameter is used after the parameter has changed."""

    def update(self, step, p, g, lr):
        b = step.b
        old = b.scale(p, scale=0.1)
        b.elementwise_sub(p, b.elementwise_mul(g, lr), out={"Out": p})
        b.elementwise_add(p, old, out={"Out": p})


class SlowWeights(fx.optimizer.base.Optimizer):
    """State made from the updated parameter, and the parameter from that state."""

    def update(self, step, p, g, lr):
        s, b = step.state(p, "slow"), step.b
        b.elementwise_sub(p, b.elementwise_mul(g, lr), out={"Out": p})
        b.emit("sum", [b.scale(s, scale=0.5), b.scale(p, scale=0.5)], out={"Out": s})
        b.assign(s, out={"Out": p})


class NormOfAllSteps(fx.optimizer.base.Optimizer):
    """A persistable scalar of each gradient's norm: every rank keeps it."""

    def update(self, step, p, g, lr):
        s, b = step.state(p, "norm", shape=(1,)), step.b
        b.emit("sum", [s, b.squared_l2_norm(g)], out={"Out": s})
        factor = b.elementwise_div(lr, b.scale(b.sqrt(s), bias=1.0))
        b.elementwise_sub(p, b.elementwise_mul(g, factor), out={"Out": p})


class Centred(fx.optimizer.base.Optimizer):
    """The mean of the whole gradient is needed: nothing may be cut."""

    def update(self, step, p, g, lr):
        b = step.b
        centred = b.elementwise_sub(g, b.reduce_mean(g, dim=()))
        b.elementwise_sub(p, b.elementwise_mul(centred, lr), out={"Out": p})


class TrustRatio(fx.optimizer.base.Optimizer):
    """The norm of the parameter over the norm of its gradient."""

    def update(self, step, p, g, lr):
        b = step.b
        ratio = b.elementwise_div(b.sqrt(b.squared_l2_norm(p)), b.scale(b.sqrt(b.squared_l2_norm(g)), bias=0.1))
        b.elementwise_sub(p, b.elementwise_mul(b.elementwise_mul(g, ratio), lr), out={"Out": p})


def with_optimizer(cls):
    return lambda main, x, h, loss: cls(0.1).minimize(loss)[1]


def norm_of_the_neighbour(main, x, h, loss):
    """Each gradient's norm scales the update of another parameter, which lies on another rank, and is read on every rank as well."""
    pairs = fx.append_backward(loss)
    b = Builder(main.global_block(), role=Role.OPTIMIZE)
    norms = [b.squared_l2_norm(g) for _, g in pairs]
    for k, (p, g) in enumerate(pairs):
        factor = b.scale(b.sqrt(norms[k - 1]), scale=0.01)
        b.elementwise_sub(p, b.elementwise_mul(g, factor), out={"Out": p})
    for n in norms:
        b.sqrt(n)
    return pairs


def two_towers(main, x, h, loss):
    """The second loss has its backward part behind the first one's updates."""
    other = L.mean(L.abs(L.fc(L.fc(x, 4, act="relu"), 2)))
    first = fx.optimizer.Momentum(0.1, 0.9).minimize(loss)[1]
    return first + fx.optimizer.Adam(0.01, name="second").minimize(other)[1]


def two_losses_of_one_model(main, x, h, loss):
    """Both backward parts first; the shared parameters are updated twice."""
    other = L.mean(L.abs(L.fc(h, 2)))
    one, two = fx.optimizer.Momentum(0.1, 0.9), fx.optimizer.SGD(0.05)
    pairs = one.backward(loss), two.backward(other)
    one.apply_gradients(pairs[0])
    two.apply_gradients(pairs[1])
    return pairs[0] + pairs[1]


def two_optimizers_of_one_loss(main, x, h, loss):
    """One loss minimized twice, by other optimizers for other parameters: its gradient starts twice."""
    parameters = [p.name for p in main.all_parameters()]
    backbone, head = fx.optimizer.SGD(0.05, parameter_list=parameters[:3]), fx.optimizer.Adam(0.01, parameter_list=parameters[3:])
    pairs = backbone.backward(loss), head.backward(loss)
    backbone.apply_gradients(pairs[0])
    head.apply_gradients(pairs[1])
    return pairs[0] + pairs[1]


WAYS = {c.__name__: with_optimizer(c) for c in (PlainMomentum, OldValue, SlowWeights, NormOfAllSteps, Centred, TrustRatio)}
WAYS |= {f.__name__: f for f in (norm_of_the_neighbour, two_towers, two_losses_of_one_model, two_optimizers_of_one_loss)}
STRATEGIES = {
    "data_parallel": fx.strategies.data_parallel,
    "reduce_broadcast": fx.strategies.reduce_broadcast,
    "ring_optimizer": lambda: fx.strategies.ring_optimizer(chunk_mb=48 / 2**20),
    "zero1": fx.strategies.zero1,
}


def model(way) -> TestModel:
    main, startup = fx.Program("custom"), fx.Program("custom_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 7])
        h = L.fc(x, 6, act="tanh")
        h = L.elementwise_mul(h, L.create_parameter([1], "float32", default_initializer=fx.initializer.Constant(0.7)))
        loss = L.mean(L.square(L.fc(h, 3)))
        pairs = way(main, x, h, loss)

    def feed(rows, seed):
        return {"x": np.random.default_rng(seed).standard_normal((rows, 7), "float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("way, strategy, trainers", some(4, list(WAYS), list(STRATEGIES), [3, fx.Cluster(2, 2)]), ids=str)
def test_what_a_user_writes_gives_one_devices_values(way, strategy, trainers):
    m = model(WAYS[way])
    feeds = [m.feed(12, k) for k in range(3)] + [m.feed(2, 5)]
    one, scope = train_single(m, feeds, [m.loss])
    many, state = train_ranks(m, STRATEGIES[strategy](), trainers, feeds, [m.loss])
    # four steps of rounding in another order of addition
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(value, scope.get(name), rtol=1e-4, atol=1e-6, err_msg=name)


def test_what_joins_gradients_that_lie_on_different_ranks_gets_them_whole():
    def joined(main, x, h, loss):
        pairs = fx.append_backward(loss)
        b = Builder(main.global_block(), role=Role.OPTIMIZE)
        same = [(p, g) for p, g in pairs if g.shape[0] in (1, 3)]
        total = b.elementwise_add(same[1][1], same[0][1])
        for p, g in pairs:
            b.elementwise_sub(p, b.scale(total if p.shape == total.shape else g, scale=0.1), out={"Out": p})
        return pairs

    m = model(joined)
    feeds = [m.feed(12, k) for k in range(3)]
    one, scope = train_single(m, feeds, [m.loss])
    for strategy in STRATEGIES.values():
        many, state = train_ranks(m, strategy(), 4, feeds, [m.loss])
        np.testing.assert_allclose(many, one, rtol=1e-5)
        for name, value in state.items():
            np.testing.assert_allclose(value, scope.get(name), rtol=1e-4, atol=1e-6, err_msg=name)
