"""Transformers of small layers, trained as written and with norms and attention joined: before minimize, after it, on two ranks."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.rewrite import JoinAttention, JoinLayerNorm, rewritten
from fluidx.testing.models import train_ranks, train_single
from tests.rewrite.written_out import attention, layer_norm, transformer, weight
from tests.sweep import examples

L = fx.layers
BOTH = [JoinLayerNorm(), JoinAttention()]
# Some thousand roundings of float64 in three steps, of values and losses of about 1
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def ready_norm(x):
    """As `written_out.layer_norm`, by the layer."""
    scale, shift = (weight((x.shape[-1],), x.dtype, seed).name for seed in (1, 2))
    return L.layer_norm(x, begin_norm_axis=2, param_attr=fx.ParamAttr(scale), bias_attr=fx.ParamAttr(shift))


def kinds(program):
    return Counter(op.type for op in program.ops)


def assert_same(model, main, feeds, loss, fetch=()):
    before, scope = train_single(model, feeds, [loss, *fetch])
    model.main = main
    after, other = train_single(model, feeds, [loss, *fetch])
    for a, b in zip([v for s in before for v in s], [v for s in after for v in s], strict=True):
        np.testing.assert_allclose(b, a, **CLOSE)
    for n in scope.arrays:
        np.testing.assert_allclose(other.arrays[n], scope.arrays[n], **CLOSE)


def test_training_with_gradients_joined_is_the_same():
    model = transformer()
    feeds, loss = [model.feed(3, k) for k in range(3)], model.loss.name
    gradients = [f"{p.name}@GRAD" for p in model.main.all_parameters()]
    joined = rewritten(model.main, BOTH, fetch=[loss, *gradients], log=(log := []))
    found = kinds(joined)
    assert log == [] and found["layer_norm"] == found["layer_norm_grad"] == 5
    assert found["scaled_dot_product_attention"] == found["scaled_dot_product_attention_grad"] == 2
    assert not {"reduce_mean", "softmax", "square_grad_x", "sqrt", "sqrt_grad", "softmax_grad", "elementwise_div_grad_x"} & found.keys()
    assert_same(model, joined, feeds, loss, gradients)


def test_what_is_joined_is_what_the_layers_write():
    """The same operators, as often, with the same answers."""
    written, ready = transformer(), transformer(ready_norm, L.scaled_dot_product_attention)
    joined = rewritten(written.main, BOTH, fetch=[written.loss])
    assert kinds(joined) == kinds(ready.main)
    assert {op.role_var for op in joined.ops} == {op.role_var for op in ready.main.ops}


@pytest.mark.parametrize("optimizer", [lambda: fx.optimizer.Momentum(0.05, 0.9), lambda: fx.optimizer.Adam(0.01)])
def test_joined_first_and_differentiated_then(optimizer):
    model, plain = transformer(optimizer=optimizer()), transformer(optimizer=False)
    main = rewritten(plain.main, BOTH, fetch=[plain.loss], log=(log := []))
    assert log == [] and kinds(main)["layer_norm"] == 5 and kinds(main)["scaled_dot_product_attention"] == 2
    with fx.unique_name.guard("late_"), fx.program_guard(main, plain.startup):
        optimizer().minimize(main.global_block().var(plain.loss.name))
    feeds = [model.feed(3, k) for k in range(3)]
    before, _ = train_single(model, feeds, [model.loss.name])
    plain.main = main
    after, _ = train_single(plain, feeds, [plain.loss.name])
    # Adam divides by the root of small moments, which magnifies rounding
    np.testing.assert_allclose(np.ravel(after), np.ravel(before), 1e-7)


def test_a_chain_whose_gradients_read_a_second_copy_is_joined_alone():
    """Checkpoints: the copies are no whole chain, so they stay, with their gradients."""
    main, startup = fx.Program("again"), fx.Program("again_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h, cuts = L.fc(fx.data("x", [-1, 5, 8], "float64"), 8, num_flatten_dims=2), []
        for _ in range(2):
            h = h + attention(*(L.fc(h, 8, num_flatten_dims=2) for _ in range(3)))
            cuts.append(h)
        loss = L.mean(L.square(h))
        fx.append_backward(loss, checkpoints=cuts)
    gradients = [f"{p.name}@GRAD" for p in main.all_parameters()]
    joined = rewritten(main, BOTH, fetch=[loss, *gradients], log=(log := []))
    found = kinds(joined)
    assert log == [] and found["scaled_dot_product_attention"] == found["softmax"] == found["softmax_grad"] == 2
    feed = {"x": np.random.default_rng(0).standard_normal((2, 5, 8))}
    scope = fx.Scope()
    fx.Executor().run(startup, scope=scope)
    before, after = (fx.Executor().run(p, feed=feed, fetch_list=[loss.name, *gradients], scope=scope) for p in (main, joined))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, **CLOSE)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero2"])
def test_two_ranks_train_the_joined_program(strategy, monkeypatch):
    monkeypatch.setenv("FLUIDX_VERIFY", "1")
    model = transformer(attend=lambda q, k, v: attention(q, k, v, L.assign(np.triu(np.full((5, 5), -1e9), 1))))
    feeds, loss = [model.feed(4, k) for k in range(2)], model.loss.name
    before, _ = train_single(model, feeds, [loss])
    model.main = rewritten(model.main, BOTH, fetch=[loss])
    assert all(op.attrs["causal"] for op in model.main.ops if op.type == "scaled_dot_product_attention")
    model.loss = loss
    after, _ = train_ranks(model, strategy, 2, feeds, [loss])
    np.testing.assert_allclose(np.ravel(after), np.ravel(before), **CLOSE)


def _mutated(main, rng):
    """The program with up to three changes: an operand that is another value of the same type, another number, another value written."""
    new = main.copy()
    block = new.global_block()
    for _ in range(rng.integers(1, 4)):
        k = int(rng.integers(len(block.oplist)))
        op = block.oplist[k]
        made = [n for o in block.oplist[:k] for n in o.output_arg_names]
        known = [*made, *(d.name for d in block.descs.values() if d.persistable or d.is_data)]
        numbers = [a for a, v in op.attrs.items() if isinstance(v, float)]
        if numbers and rng.random() < 0.4:
            a = numbers[int(rng.integers(len(numbers)))]
            block.oplist[k] = op.replace(attrs={**op.attrs, a: op.attrs[a] * 0.5 + 0.1})
        elif op.role.value != "optimize" and op.inputs:
            slots = [(s, i) for s, names in op.inputs.items() for i in range(len(names))]
            slot, i = slots[int(rng.integers(len(slots)))]
            was = op.inputs[slot][i]
            like = [n for n in known if block.descs[n].type == block.descs[was].type and n != was]
            if like:
                names = list(op.inputs[slot])
                names[i] = like[int(rng.integers(len(like)))]
                block.oplist[k] = op.replace(inputs={**op.inputs, slot: tuple(names)})
    return new


@settings(max_examples=examples(15, 100), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1))
def test_whatever_the_program_says_it_goes_on_saying(seed):
    """Programs that are wrong in some place: what is not the chain, or not its gradient, has to stay."""
    rng = np.random.default_rng(seed)
    ways = ["sqrt", "rsqrt", "power"], ["square", "product"], ["alpha", "queries", "scores"]
    root, square, scaled = (str(rng.choice(some)) for some in ways)
    norm = partial(layer_norm, root=root, square=square, scale=bool(rng.integers(2)))
    mask = (lambda: weight((5, 5), "float64", 3)) if rng.integers(2) else (lambda: None)
    model = transformer(norm, lambda q, k, v: attention(q, k, v, mask(), scaled), blocks=1, optimizer=fx.optimizer.SGD(0.05))
    gradients = [f"{p.name}@GRAD" for p in model.main.all_parameters()]
    main = _mutated(model.main, rng)
    values = [n for op in main.ops for n in op.output_arg_names if op.role.value in ("forward", "backward")]
    fetch = [model.loss.name, *gradients, *(values[int(k)] for k in rng.integers(len(values), size=rng.integers(0, 3)))]
    joined = rewritten(main, BOTH, fetch=fetch)
    found = []
    for model.main in (main, joined):
        (answers,), _ = train_single(model, [model.feed(2)], fetch)
        found.append(answers)
    # some are 0 but for rounding, which small divisors magnify, so that all are compared with the largest
    largest = max(np.nanmax(np.abs(a), initial=1.0) for a in found[0])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-9 * largest)
