"""Whole training steps are one call into C, with the values that NumPy's bodies give and the same bits on one thread and two."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.context import RunContext
from fluidx.executor.plan.planner import plan
from fluidx.executor.run.bind import bind
from fluidx.executor.run.bound_plan import BoundPlan
from fluidx.executor.scope import Scope
from fluidx.ir import ExecutionError, Operator, TensorType
from fluidx.ops.kernels import NativeStep
from fluidx.testing.models import TestModel, classifier, train_ranks

L = fx.layers


def mlp():
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 40], "float32"), fx.data("label", [-1, 1], "int64")
        h = L.dropout(L.fc(L.fc(x, 33, act="relu"), 32, act="relu"), 0.1, dropout_implementation="upscale_in_train")
        loss = L.mean(L.softmax_with_cross_entropy(L.fc(h, 10), label))
        fx.optimizer.Adam(1e-2).minimize(loss)
    rng = np.random.default_rng(0)
    return main, startup, loss, {"x": rng.standard_normal((24, 40), "float32"), "label": rng.integers(0, 10, (24, 1))}


def gpt(d=32, heads=2, t=12, batch=3, vocabulary=50):
    """Two blocks of a transformer, with embeddings, a causal mask, layer_norm and gelu."""
    main, startup = fx.Program("gpt"), fx.Program("gpt_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [batch, t], "int64"), fx.data("label", [batch * t, 1], "int64")
        places, mask = fx.data("places", [t], "int64"), fx.data("mask", [t, t], "float32")
        h = L.elementwise_add(L.embedding(ids, [vocabulary, d]), L.embedding(places, [t, d]))
        for _ in range(2):
            qkv = L.split(L.fc(L.layer_norm(h, begin_norm_axis=2), 3 * d, num_flatten_dims=2), 3, dim=2)
            q, k, v = (L.transpose(L.reshape(part, [batch, t, heads, d // heads]), [0, 2, 1, 3]) for part in qkv)
            p = L.softmax(L.elementwise_add(L.matmul(q, k, transpose_y=True, alpha=(d // heads) ** -0.5), mask))
            o = L.reshape(L.transpose(L.matmul(p, v), [0, 2, 1, 3]), [batch, t, d])
            h = L.elementwise_add(h, L.fc(o, d, num_flatten_dims=2))
            wide = L.gelu(L.fc(L.layer_norm(h, begin_norm_axis=2), 4 * d, num_flatten_dims=2))
            h = L.elementwise_add(h, L.fc(wide, d, num_flatten_dims=2))
        logits = L.fc(L.layer_norm(h, begin_norm_axis=2), vocabulary, num_flatten_dims=2)
        loss = L.mean(L.softmax_with_cross_entropy(L.reshape(logits, [batch * t, vocabulary]), label))
        fx.optimizer.Adam(1e-2).minimize(loss)
    rng = np.random.default_rng(0)
    feed = {"ids": rng.integers(0, vocabulary, (batch, t)), "label": rng.integers(0, vocabulary, (batch * t, 1)), "places": np.arange(t)}
    return main, startup, loss, {**feed, "mask": np.triu(np.full((t, t), -1e9, "float32"), 1)}


def train(model, steps=3):
    main, startup, loss, feed = model
    exe, scope = fx.Executor(fx.CPUPlace()), Scope()
    exe.run(startup, scope=scope)
    losses = [exe.run(main, feed=feed, fetch_list=[loss], scope=scope)[0] for _ in range(steps)]
    return np.concatenate(losses), {n: scope.get(n).copy() for n in scope.arrays}


def planned(model):
    main, startup, loss, feed = model
    scope = Scope()
    fx.Executor(fx.CPUPlace()).run(startup, scope=scope)
    types = {n: TensorType(a.dtype.name, a.shape) for n, a in feed.items()}
    made = plan(main, types, [loss.name], scope.arrays, RunContext())
    return made, bind(made, scope, RunContext())


@pytest.mark.parametrize("build", [mlp, gpt])
def test_a_step_is_one_call_into_c(build):
    made, bound = planned(build())
    assert {s.op.type for s in made.steps if s.kernel not in ("native", "fused", "view")} == set()
    assert len(bound.compute._calls) == 1


@pytest.mark.parametrize("build", [mlp, gpt])
def test_a_step_gives_the_values_of_numpy_and_the_same_bits_on_any_number_of_threads(build, monkeypatch):
    native.set_num_threads(1)
    losses, state = train(build())
    native.set_num_threads(2)
    again, same = train(build())
    assert losses.tobytes() == again.tobytes() and all(state[n].tobytes() == same[n].tobytes() for n in state)
    monkeypatch.setenv("FLUIDX_KERNELS", "numpy")
    expected, _ = train(build())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # sums in another order, over three steps


def test_an_error_names_the_operator_among_those_of_one_call():
    main, startup, loss, feed = gpt()
    exe, scope = fx.Executor(fx.CPUPlace()), Scope()
    exe.run(startup, scope=scope)
    feed["label"][7] = 50
    with pytest.raises(ExecutionError, match="^op softmax_with_cross_entropy: label 50 is out of range for 50 classes") as caught:
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)
    assert caught.value.operator.type == "softmax_with_cross_entropy" and "in %softmax_with_cross_entropy" in str(caught.value)
    feed["label"][7], feed["ids"][1, 2] = 0, -3
    with pytest.raises(ExecutionError, match="^op lookup_table_v2: id -3 is out of range; table W has 50 rows, ids go from 0 to 49"):
        exe.run(main, feed=feed, fetch_list=[loss], scope=scope)


def test_a_kernel_between_copies_is_its_own_operators():
    """Its step is no part of a joined call, so the kernel's number counts from itself."""
    first, second = Operator("lookup_table", {}, {}), Operator("relu", {}, {})
    error = ValueError("id 7 is out of range")
    error.call = 0

    def between_copies():
        raise error

    bound = BoundPlan(None, RunContext(), np)
    bound.compute.add(first, between_copies, 0)
    bound.compute.add(second, NativeStep([native.gemm(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)))]), 1)
    bound.compute.join()
    with pytest.raises(ExecutionError) as caught:
        bound.run({})
    assert caught.value.operator is first


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
@pytest.mark.parametrize("kind", ["norm", "batch_norm"])
def test_ranks_compute_natively(strategy, kind, monkeypatch):
    """All that is left to other bodies is what communicates or draws the first weights."""
    from fluidx.executor.ranks import shared_plans

    others, real = set(), shared_plans.plan

    def watched(*args, **options):
        made = real(*args, **options)
        others.update(s.op.type for s in made.all_steps() if s.kernel in ("numpy", "any"))
        return made

    monkeypatch.setattr(shared_plans, "plan", watched)
    model: TestModel = classifier(kind=kind)
    train_ranks(model, strategy, 2, [model.feed(8)], [model.loss])
    assert others and others <= {"all_reduce", "broadcast", "nccl_init", "all_gather", "reduce_scatter", "uniform_random"}
