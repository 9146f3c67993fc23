"""Mixtures of experts: what is computed, and that ranks compute the same however experts and tokens are cut."""

from collections import Counter

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Shard
from fluidx.testing.models import TestModel, train_single
from tests.transpiler.models import STRATEGIES, same_answers
from tests.transpiler.tensor_models import sent, transpiled

L = fx.layers
LENGTH, WIDTH, EXPERTS, HIDDEN = 6, 8, 4, 12


def mixture(over="ep", tokens="", single_queue=False, optimizer=None, **options):
    """Tokens through a layer and a mixture whose experts are cut over mesh axis `over`; `tokens`: these are cut over it too."""
    main, startup = fx.Program("mixture"), fx.Program("mixture_startup")
    shape = [-1, WIDTH] if single_queue else [-1, LENGTH, WIDTH]
    options = {"capacity": 5} | options if single_queue else options
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", shape, "float64")
        h = L.fc(x, WIDTH, num_flatten_dims=len(shape) - 1)
        h = L.shard(h, Shard(0, tokens)) if tokens else h
        attr = fx.ParamAttr(placement=Shard(0, over)) if over else None
        y, balance = L.moe(h, EXPERTS, HIDDEN, **{"top_k": 2, "param_attr": attr} | options)
        loss = L.mean(L.square(h + y)) + L.scale(balance, 0.1)
        _, pairs = (optimizer or fx.optimizer.Adam(0.01)).minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).standard_normal((rows, *shape[1:]))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


# -- one device ------------------------------------------------------------------------------------------------------------------------


def reference(x, state, k, capacity):
    """Sequences [b, s, d] through the mixture, token by token, and the loss that balances it."""
    gate, w1, b1, w2, b2 = (state[f"moe_0.{n}"] for n in ("w_0", "w_1", "b_0", "w_2", "b_1"))
    out, shares, chances = np.zeros_like(x), np.zeros(EXPERTS), np.zeros(EXPERTS)
    for b, sequence in enumerate(x):
        likes = np.exp(sequence @ gate)
        likes /= likes.sum(axis=1, keepdims=True)
        best = np.argsort(-likes, axis=1, kind="stable")[:, :k]
        taken = np.zeros(EXPERTS, int)
        shares += np.bincount(best[:, 0], minlength=EXPERTS)
        chances += likes.sum(axis=0)
        for j in range(k):
            for n, token in enumerate(sequence):
                e = best[n, j]
                taken[e] += 1
                if taken[e] > capacity:
                    continue
                weight = likes[n, e] if k == 1 else likes[n, e] / likes[n, best[n]].sum()
                out[b, n] += weight * (np.maximum(token @ w1[e] + b1[e, 0], 0) @ w2[e] + b2[e, 0])
    tokens = x.shape[0] * x.shape[1]
    return out, EXPERTS * (shares / tokens) @ (chances / tokens)


@pytest.mark.parametrize("k, factor, capacity", [(1, 1.25, 2), (2, 1.0, 3), (2, 4.0, 12)])
def test_a_token_goes_through_its_best_experts_while_they_have_room(k, factor, capacity):
    main, startup = fx.Program(), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, LENGTH, WIDTH], "float64")
        bias = fx.ParamAttr(initializer=fx.initializer.Normal())
        y, balance = L.moe(x, EXPERTS, HIDDEN, k, factor, bias_attr=bias)
    model = TestModel(main, startup, balance, None, [])
    value = np.random.default_rng(0).standard_normal((5, LENGTH, WIDTH))
    [(found, loss)], scope = train_single(model, [{"x": value}], [y, balance])
    state = {p.name: scope.get(p.name) for p in main.all_parameters()}
    exact, balanced = reference(value, state, k, capacity)
    np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(loss, [balanced], rtol=1e-12)


def test_the_loss_trains_the_gate_through_weights_and_balance():
    """Central differences of the loss by the gate's weights; the choices do not change under steps of 1e-6."""
    model = mixture(over="", optimizer=fx.optimizer.SGD(0.0))
    feed, gate = model.feed(4), "moe_0.w_0"
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(model.startup, scope=scope)
    (gradient,) = exe.run(model.main, feed=feed, fetch_list=[f"{gate}@GRAD"], scope=scope)
    value = scope.get(gate).copy()
    for at in ((0, 0), (3, 2), (7, 3)):
        losses = []
        for step in (1e-6, -1e-6):
            moved = value.copy()
            moved[at] += step
            scope.set(gate, moved)
            losses.append(exe.run(model.main, feed=feed, fetch_list=[model.loss], scope=scope)[0].item())
        np.testing.assert_allclose(gradient[at], (losses[0] - losses[1]) / 2e-6, rtol=1e-5, atol=1e-9)


# -- ranks -----------------------------------------------------------------------------------------------------------------------------


def moved(t, group):
    """What a step sends over a group, less what goes to an update."""
    updates = Counter("all_reduce" for m in t.explain() if m.endswith("for update") and f"over {group}" in m)
    return sent(t, group) - updates


def test_experts_cut_over_the_ranks_that_share_the_sequences_take_two_all_to_alls_each_way():
    t = transpiled(mixture("dp"), fx.Mesh(dp=2))
    assert moved(t, "dp") == Counter(all_to_all=4, all_reduce=1)  # and one number for each expert, the mean of its probabilities
    descs = t.main.global_block().descs
    assert {d.placement for n, d in descs.items() if d.is_parameter and n.startswith("moe") and d.type.ndim == 3} == {(Shard(0, "dp"),)}
    assert not [m for m in t.explain() if "moe" in m and m.endswith("for update") and "w_0" not in m]


def test_experts_cut_over_ranks_that_all_have_the_tokens_take_a_sum():
    t = transpiled(mixture("ep"), fx.Mesh(dp=2, ep=2))
    large = [m for m in t.explain() if f" {1024 * LENGTH * WIDTH * 8} bytes" in m]
    # forward; backward the terms of the tokens' gradient go on into the gradient of the layer before, which is smaller
    assert [m.split(",")[0].split(": ")[1] for m in large] == ["partial(sum) over ep shard(0) over dp to shard(0) over dp"]
    assert set(sent(t, "ep")) == {"all_reduce"}


def test_one_queue_for_all_tokens_gathers_the_choices_and_no_tokens():
    t = transpiled(mixture("dp", single_queue=True), fx.Mesh(dp=2))
    queue = [m for m in t.explain() if m.endswith("for expert_queue: whole")]
    assert len(queue) == 1 and f"{1024 * 2 * 8} bytes" in queue[0]


MIXTURES = {
    "experts and sequences over dp": ({"over": "dp"}, fx.Mesh(dp=2)),
    "over more ranks than experts": ({"over": "dp"}, fx.Mesh(dp=5)),
    "experts over ep": ({"over": "ep"}, fx.Mesh(dp=2, ep=2)),
    "experts and sequences over ep": ({"over": "ep", "tokens": "ep"}, fx.Mesh(dp=2, ep=2)),
    "one queue": ({"over": "dp", "single_queue": True}, fx.Mesh(dp=2)),
    "one queue, experts whole": ({"over": "", "single_queue": True}, fx.Mesh(dp=3)),
    "no bias, one expert a token": ({"over": "dp", "bias_attr": False, "top_k": 1, "act": "gelu"}, fx.Mesh(dp=2)),
    "columns over tp": ({"over": "", "param_attr": [fx.ParamAttr(placement=Shard(a, "tp")) for a in (2, 1)]}, fx.Mesh(dp=2, tp=2)),
    "experts over ep, columns over tp": (
        {"over": "", "param_attr": [fx.ParamAttr(placement=[Shard(0, "ep"), Shard(a, "tp")]) for a in (2, 1)]}, fx.Mesh(dp=2, tp=2, ep=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_train_as_one_device_does(kind):
    options, mesh = MIXTURES[kind]
    same_answers(mixture(**options), "data_parallel", mesh, rows=(9, 7) if "single_queue" in options else (5, 3))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "ring_optimizer"])
def test_three_axes_under_strategies_that_cut_updates_over_dp(strategy):
    options, mesh = MIXTURES["experts over ep, columns over tp"]
    same_answers(mixture(**options), STRATEGIES[strategy](), mesh, rows=(5, 3))


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "ring_optimizer", "reduce_broadcast"])
def test_experts_that_dp_cuts_are_updated_where_they_are_and_others_as_the_strategy_says(strategy):
    same_answers(mixture("dp"), STRATEGIES[strategy](), fx.Mesh(dp=2), rows=(5, 3))


# -- refusals --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, options, message",
    [
        ([-1, 8], {}, "has one queue of an open number of tokens, so capacity_factor determines no size; pass capacity="),
        ([-1, 6, 8], {"top_k": 3}, "top_k must be 1 or 2 and at most the 4 experts, got 3"),
        ([-1, 6, 8], {"capacity_factor": 0}, "capacity_factor must be a finite number above 0, got 0"),
        ([-1, 6, 8], {"capacity_factor": float("nan")}, "capacity_factor must be a finite number above 0, got nan"),
        ([-1, 6, 8], {"capacity_factor": float("inf")}, "capacity_factor must be a finite number above 0, got inf"),
        ([-1, 6, 8], {"capacity": 0}, "capacity"),
        ([-1, 2, 6, 8], {}, r"x must have 2 or 3 axes"),
        ([-1, 6, 8], {"gate_attr": False}, "gate_attr=False leaves no gate"),
        ([-1, 6, 8], {"param_attr": [None]}, "param_attr must be one for both weights or a list of two, got 1"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(shape, options, message):
    with fx.program_guard(fx.Program(), fx.Program()), pytest.raises(fx.ProgramError, match=f"layers.moe: .*{message}"):
        L.moe(fx.data("x", shape, "float32"), 4, 16, **options)


def test_one_expert_is_cut_nowhere():
    main, startup = fx.Program(), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        y, balance = L.moe(fx.data("x", [-1, 6, 8], "float32"), 1, 16, top_k=1, param_attr=fx.ParamAttr(placement=Shard(0, "ep")))
        fx.optimizer.SGD(0.1).minimize(L.mean(y) + balance)
    with pytest.raises(fx.TranspileError, match=r"op shard: shard\(0\) over ep cuts an axis of .*; leave it replicated over ep"):
        transpiled(TestModel(main, startup, None, None, []), fx.Mesh(dp=2, ep=2))
