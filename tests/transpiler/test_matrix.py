"""Every strategy on every kind of model and 1 to 8 ranks: one device's answers, proved.

A strategy or a choice of options is one line. Pipelines, whose models are marked, and replicas, whose answers are those of several devices,
have tests of their own; the model of integers under the strategies of test_parity.py is there.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import TestModel, integer_mlp, train_ranks, train_single
from tests.sweep import some
from tests.transpiler import models
from tests.transpiler.models import written

L, D = fx.layers, "float64"
ROWS = (16, 9)  # an even batch, and one that leaves some of 8 ranks with one row


def unused() -> models.Written:
    """A parameter that the loss does not reach, beside others that it does."""
    x, label, feed = models._rows((6,))
    logits = L.fc(L.fc(x, 8, act="tanh"), 5)
    L.fc(x, 3, name="unused")
    return L.mean(L.softmax_with_cross_entropy(logits, label)), fx.optimizer.Momentum(0.1, 0.9), feed


@cache
def model(name: str) -> TestModel:
    return {"integers": integer_mlp, "unused": lambda: written(unused)}.get(name, lambda: written(models.MODELS[name]))()


STRATEGIES = {
    **models.STRATEGIES,
    "halving and doubling": lambda: fx.strategies.data_parallel(algorithm="halving_doubling"),
    "trees": lambda: fx.strategies.data_parallel(algorithm="double_binary_tree"),
    "micro-batches": lambda: fx.strategies.micro_batches(3),
    "micro-batches of fsdp": lambda: fx.strategies.micro_batches(2, fx.strategies.fsdp(units=1 / 2**10)),
    "parameter_server": lambda: fx.strategies.parameter_server(2, min_block=8),
    "reduction_servers": lambda: fx.strategies.reduction_servers(2, bucket_mb=1 / 2**10, first_bucket_mb=1 / 2**11),
}
MODELS = ("integers", "mlp", "conv", "gpt", "unused", "masked", "recomputed")
RANKS = {1: ("integers", "conv"), 2: MODELS, 4: MODELS, 8: ("integers", "unused", "masked")}
EXACT = ("integers",)  # small integers: every sum is exact in any order


class One(NamedTuple):
    """What one device gives: the feeds, what is fetched in each step, and the state behind them."""

    feeds: list[dict[str, np.ndarray]]
    values: list[list[np.ndarray]]
    state: Any


@cache
def one_device(name: str) -> One:
    m = model(name)
    feeds = [m.feed(n, k) for k, n in enumerate(ROWS)]
    values, scope = train_single(m, feeds[:1] if name in EXACT else feeds, [m.loss])
    return One(feeds[: len(values)], values, scope)


def same(name: str, strategy: Any, trainers: Any) -> None:
    m, one = model(name), one_device(name)
    values, state = train_ranks(m, strategy, trainers, one.feeds, [m.loss])
    for (a,), (b,) in zip(one.values, values, strict=True):
        _equal(name, "the loss", b, a)
    for n, found in state.items():
        _equal(name, n, found, one.state.get(n))


def _equal(name: str, what: str, found: np.ndarray, wanted: np.ndarray) -> None:
    if name in EXACT:
        assert np.array_equal(found, wanted), what
    else:  # float64, and only the order of additions differs; Adam's division by small numbers magnifies that
        np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-9, err_msg=what)


ELSEWHERE = ("data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero2", "zero3", "fsdp")  # on integers, with gradients
CASES = [(name, n) for n, names in RANKS.items() for name in names if name not in EXACT]


@pytest.mark.parametrize("strategy, name, ranks", [
    *((s, name, n) for s in STRATEGIES if s not in ELSEWHERE for name in EXACT for n in RANKS),
    *((s, *case) for s, case in some(4, list(STRATEGIES), CASES)),
])  # fmt: skip
def test_ranks_give_one_devices_answers(name, strategy, ranks):
    if (strategy, name, ranks) == ("parameter_server", "conv", 1):
        with pytest.raises(fx.TranspileError, match="a single trainer with servers has no other trainer to share it with"):
            same(name, STRATEGIES[strategy](), ranks)
        return
    same(name, STRATEGIES[strategy](), ranks)


HOSTS = {**models.STRATEGIES, "rails": lambda: fx.strategies.rails(slice_mb=256 / 2**20, staging_mb=1 / 2**10)}


@pytest.mark.parametrize("name, strategy", some(3, ["conv", "gpt", "masked"], list(HOSTS)))
def test_two_hosts_of_four_give_one_devices_answers(name, strategy):
    same(name, HOSTS[strategy](), fx.Cluster(2, 4))
