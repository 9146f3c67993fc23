"""Parameters that rest cut: where they are gathered, how often, and that they are updated where they rest."""

from collections import Counter

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Role, Shard
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.transpiler.placement.parameter_homes import AtRoots, InPieces, Sharded
from fluidx.transpiler.strategies import strategy
from tests.transpiler.models import MODELS, L, same_answers, written

ZERO3 = {"reshard": fx.strategies.zero3, "kept": lambda: fx.strategies.zero3(reshard_after_forward=False)}
both_ways = pytest.mark.parametrize("make", ZERO3.values(), ids=ZERO3)


def made(write, strategy_=None, trainers=2):
    """What a function that writes a loss and names an optimizer becomes on the ranks."""
    main, startup = fx.Program("made"), fx.Program("made_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss, optimizer = write()
        if optimizer is not None:
            optimizer.minimize(loss)
    t = fx.DistributeTranspiler(strategy_ or fx.strategies.zero3()).transpile(program=main, startup_program=startup, trainers=trainers)
    t.verify()
    return t


def gathers(t, block=0):
    """How often each parameter is gathered."""
    return Counter(op.input_arg_names[0] for op in t.main.blocks[block].oplist if op.type == "all_gather")


def rows(width=4):
    return fx.data("x", [-1, width], "float32")


def fc(x, width, name, act=None):
    return L.fc(x, width, param_attr=fx.ParamAttr(name=name), bias_attr=False, act=act)


@both_ways
@pytest.mark.parametrize("trainers", [1, 2, 3, 4, 8, fx.Cluster(2, 4)], ids=str)
def test_a_step_is_one_devices_bit_for_bit(make, trainers):
    model = integer_mlp("sum")
    fetch = [model.loss, *[g for _, g in model.gradients], *[p for p, _ in model.gradients]]
    feeds = [model.feed(24)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, make(), trainers, feeds, fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.array_equal(a, b), name
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


@pytest.mark.parametrize("name", ["gpt", "conv", "branch"])
def test_what_forward_gathered_serves_backward_too(name):
    same_answers(name, ZERO3["kept"](), 3)


def test_each_section_gathers_what_it_reads_once():
    def two_layers():
        y = L.fc(fc(rows(), 6, "w1", "relu"), 2, param_attr=fx.ParamAttr(name="w2"), bias_attr="b2")
        return L.mean(L.square(y)), fx.optimizer.SGD(0.1)

    again, once = made(two_layers), made(two_layers, ZERO3["kept"]())
    # the gradient of x takes no w1, which nothing wants, and that of a bias its shape alone
    assert gathers(again) == {"w1": 1, "w2": 2, "b2": 1}
    assert gathers(once) == {"w1": 1, "w2": 1, "b2": 1}
    for t in (again, once):
        assert Counter(op.type for op in t.main.ops)["reduce_scatter"] == 3
        assert {t.main.global_block().descs[n].placement for n in ("w1", "w2", "b2")} <= {(Shard(0),), (Shard(1),)}


def test_a_gather_stands_right_before_the_first_reader():
    t = made(lambda: (L.mean(fc(L.square(fc(rows(), 6, "w1")), 2, "w2")), fx.optimizer.SGD(0.1)))
    ops = t.main.ops
    at = [k for k, op in enumerate(ops) if op.type == "all_gather"]
    assert len(at) >= 2  # w1 and w2
    assert all(ops[k].output_arg_names[0] in ops[k + 1].input_arg_names for k in at)


def test_a_shared_parameter_is_gathered_once_in_a_section():
    def tied():
        ids = fx.data("ids", [-1, 3], "int64")
        h = fx.embedding(ids, [10, 4], param_attr=fx.ParamAttr(name="table"))
        h = L.matmul(h, fx.default_main_program().global_block().var("table"), transpose_y=True)
        return L.mean(L.square(fc(L.reshape(h, [-1, 30]), 2, "w"))), fx.optimizer.SGD(0.1)

    assert gathers(made(tied)) == {"table": 2, "w": 1}


def test_backward_finds_whole_what_forward_used_last():
    t = made(lambda: (L.mean(fc(L.square(fc(L.tanh(fc(rows(), 6, "w1")), 6, "w2")), 2, "w3")), fx.optimizer.SGD(0.1)))
    assert gathers(t) == {"w1": 1, "w2": 2, "w3": 1}
    assert gathers(made(lambda: (L.mean(fc(rows(), 6, "w")), fx.optimizer.SGD(0.1)))) == {"w": 1}


def test_what_backward_computes_again_works_with_backwards_copy():
    def checkpointed():
        h = fc(rows(), 6, "w1", "relu")
        loss = L.mean(L.square(fc(L.tanh(fc(h, 6, "w2")), 2, "w3")))
        sgd = fx.optimizer.SGD(0.1)
        sgd.apply_gradients(fx.append_backward(loss, checkpoints=[h]))
        return loss, None

    t = made(checkpointed)
    assert gathers(t) == {"w1": 1, "w2": 2, "w3": 1}  # what forward used last is whole when backward begins
    of = {n for op in t.main.ops if op.type == "all_gather" and op.input_arg_names != ("w3",) for n in op.output_arg_names}
    for op in t.main.ops:
        if op.role in (Role.FORWARD, Role.BACKWARD):
            assert all(n.endswith("1") == (op.role is Role.BACKWARD) for n in op.input_arg_names if n in of)


def test_the_update_and_its_regularizer_work_on_the_shard():
    decay = fx.regularizer.L2Decay(0.1)
    t = made(lambda: (L.mean(fc(rows(), 6, "w")), fx.optimizer.Momentum(0.1, 0.9, regularization=decay)))
    place = t.main.global_block().descs["w"].placement
    assert place == (Shard(0),)
    for op in t.main.ops:
        if op.role is Role.OPTIMIZE and "w" in op.input_arg_names:
            assert all(t.main.global_block().desc(n).placement == place for n in op.output_arg_names)
    assert gathers(t) == {"w": 1}


def test_a_parameter_that_is_read_in_a_branch_is_gathered_before_it_whatever_it_decides():
    def branched():
        x, flag = rows(), fx.data("flag", [1], "float32")
        h = L.cond(L.greater_than(flag, L.fill_constant([1], "float32", 0.0)), lambda: fc(x, 4, "w", "tanh"), lambda: L.scale(x, 2.0))
        return L.mean(L.square(fc(h, 2, "v"))), fx.optimizer.SGD(0.1)

    t = made(branched)
    found = [op.type for op in t.main.ops if op.type == "cond" or op.type == "all_gather" and op.input_arg_names == ("w",)]
    assert found == ["all_gather", "cond"] * 2  # backward runs the branch again
    assert not any(gathers(t, b.idx) for b in t.main.blocks[1:])


def test_a_loop_reads_what_was_gathered_before_it():
    def looped():
        h, i, n = fc(rows(), 4, "w1"), L.zeros([1], "int64"), L.fill_constant([1], "int64", 3)
        w = L.create_parameter([4, 4], "float32", name="w2")
        _, h = L.while_loop(lambda i, h: L.less_than(i, n), lambda i, h: [L.increment(i, in_place=False), L.tanh(L.matmul(h, w))], [i, h])
        return h, None

    t = made(looped)
    assert gathers(t) == {"w1": 1, "w2": 1}
    assert not any(gathers(t, b.idx) for b in t.main.blocks[1:])


def test_a_parameter_written_by_hand_in_forward_goes_back_to_rest_and_is_gathered_anew():
    def written_to():
        x = rows()
        h = fc(x, 4, "w")
        w = fx.default_main_program().global_block().var("w")
        L.assign(L.scale(w, 0.5), output=w)
        return L.matmul(h, w), None

    t = made(written_to)
    assert gathers(t)["w"] <= 2
    main, startup = t.source.main, t.source.startup
    feed = {"x": np.arange(20, dtype="float32").reshape(5, 4)}
    out = main.ops[-1].output_arg_names[0]
    scope, exe = fx.executor.Scope(), fx.Executor()
    exe.run(startup, scope=scope)
    one = [exe.run(main, feed=feed, fetch_list=[out, "w"], scope=scope) for _ in range(2)]
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as many:
        many.run_startup()
        for want in one:
            for a, b in zip(want, many.run(feed=feed, fetch_list=[out, "w"]), strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-6)


def test_one_element_stays_whole_and_an_unused_parameter_rests_cut():
    def odd():
        scale = L.create_parameter([1], "float32", name="scale")
        L.create_parameter([6, 2], "float32", name="unused")
        return L.mean(fc(rows(), 6, "w") * scale), fx.optimizer.SGD(0.1)

    t = made(odd)
    descs = t.main.global_block().descs
    assert descs["scale"].placement == () and descs["unused"].placement == (Shard(0),)
    assert gathers(t) == {"w": 1}


def test_what_tp_cuts_stays_cut_over_tp_in_use():
    def annotated():
        w = fx.ParamAttr(name="w", placement=Shard(1, "tp"))
        v = fx.ParamAttr(name="v", placement=Shard(0, "tp"))
        return L.mean(L.fc(L.fc(rows(), 8, param_attr=w, bias_attr=False), 2, param_attr=v, bias_attr=False)), fx.optimizer.Adam(0.1)

    t = made(annotated, trainers=fx.Mesh(dp=2, tp=2))
    descs = t.main.global_block().descs
    assert set(descs["w"].placement) == {Shard(1, "tp"), Shard(0, "dp")}
    gathered = {op.input_arg_names[0]: op for op in t.main.ops if op.type == "all_gather"}
    assert descs[gathered["w"].output_arg_names[0]].placement == (Shard(1, "tp"),)
    assert {op.attrs["group"] for op in gathered.values()} == {"dp"}
    assert gathers(t) == {"w": 1, "v": 1}


def test_strict_mode_takes_the_gathers_for_the_strategys_own():
    made(lambda: (L.mean(fc(rows(), 6, "w")), fx.optimizer.SGD(0.1)), fx.strategies.zero3(strict=True))


def test_inference_gathers_once_and_scatters_nothing():
    model = written(MODELS["mlp"])
    test = model.main.clone(for_test=True)
    t = fx.DistributeTranspiler("zero3").transpile(program=test, startup_program=model.startup, trainers=3)
    t.verify()
    types = Counter(op.type for op in t.main.ops)
    assert types["all_gather"] == 6 and not types["reduce_scatter"]


def test_rest_and_update_are_choices_of_their_own():
    model = integer_mlp("sum")
    mixed = strategy("mixed", InPieces(16 / 2**20), rest=Sharded())
    feeds = [model.feed(8)]
    (one,), scope = train_single(model, feeds, [model.loss])
    (many,), state = train_ranks(model, mixed, 3, feeds, [model.loss])
    assert np.array_equal(one[0], many[0])
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


def test_a_parameter_that_rests_at_a_root_is_refused():
    with pytest.raises(fx.TranspileError, match=r"AtRoots\(method='greedy'\) has 'w' stored at\(0\) over dp; all ranks must hold a part"):
        made(lambda: (L.mean(fc(rows(), 6, "w")), fx.optimizer.SGD(0.1)), strategy("rooted", rest=AtRoots()))


def test_options_are_checked():
    with pytest.raises(fx.TranspileError, match="zero3: reshard_after_forward is True, False, a number of units, or names .*, got -1"):
        fx.strategies.zero3(reshard_after_forward=-1)
    assert repr(fx.strategies.zero3(reshard_after_forward=False)) == "zero3(reshard_after_forward=False)"
