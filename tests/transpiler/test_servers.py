"""Parameter servers: ranks behind the trainers that keep the parameters, add gradients up and optimize."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Program, ProgramPair
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.verify import verify_ranks
from tests.transpiler.models import MODELS, same_answers

P = 4 * (6 * 5 + 5 + 5 * 4 + 4)  # bytes of integer_mlp's parameters


def transpiled(model, trainers=2, **options):
    strategy = fx.strategies.parameter_server(**options)
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


@pytest.mark.parametrize("trainers, servers", [(1, 1), (2, 1), (3, 2), (2, 3), (fx.Cluster(2, 2), 2)])
@pytest.mark.parametrize("split", ["round_robin", "hash"])
def test_one_devices_answers_bit_for_bit_where_sums_are_exact(trainers, servers, split):
    model = integer_mlp()
    feeds = [model.feed(7)]
    fetch = [model.loss, *[g for _, g in model.gradients]]
    (one,), scope = train_single(model, feeds, fetch)
    strategy = fx.strategies.parameter_server(servers, min_block=4, split=split)
    (many,), state = train_ranks(model, strategy, trainers, feeds, fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.array_equal(a, b), name
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_kinds(name):
    same_answers(name, fx.strategies.parameter_server(2, min_block=8), 3)


def test_trainers_have_no_updates_and_servers_nothing_else():
    t = transpiled(integer_mlp(optimizer=fx.optimizer.Momentum(0.5, 0.9)), 2, servers=2, min_block=4)
    for r in range(2):
        assert not [op for op in t.get_trainer_program(r).ops if op.type == "momentum"]
    for k in range(2):
        kinds = {op.type for op in t.get_pserver_program(k).ops}
        assert kinds == {"send", "recv", "sum", "momentum"}
        names = t.get_pserver_program(k).global_block().descs
        assert not any(d.is_data for d in names.values()) and "fc_0.tmp_0" not in names


def test_bytes_of_a_step():
    trainers, servers = 3, 2
    t = transpiled(integer_mlp(), trainers, servers=servers, min_block=4)
    assert [t.traffic(r).total for r in range(trainers)] == [P] * trainers  # a trainer sends its gradients
    assert sum(t.traffic(trainers + k).total for k in range(servers)) == trainers * P  # and each gets the parameters


def test_slices_are_shared_out():
    t = transpiled(integer_mlp(), 2, servers=2, min_block=10)
    descs = t.main.global_block().descs
    assert str(descs["fc_0.w_0"].placement[0]) == "pieces(0, 0, 0, 15, 30) over ps"  # 30 elements: two slices
    assert str(descs["fc_1.b_0"].placement[0]).startswith("at(")  # 4 elements: one
    whole = transpiled(integer_mlp(), 2, servers=2)
    assert all(d.placement[0].root in (2, 3) for d in whole.main.global_block().descs.values() if d.is_parameter)


def test_fluids_call():
    model = integer_mlp()
    config = fx.DistributeTranspilerConfig()
    config.mode, config.min_block_size, config.split_method = "pserver", 8, "HashName"
    t = fx.DistributeTranspiler(config)
    t.transpile(program=model.main, startup_program=model.startup, pservers="a:1,b:1", trainers=2, trainer_id=1)
    assert repr(t.strategy) == "parameter_server(servers=2, min_block=8, split='hash')" and t.world_size == 4
    main, startup = t.get_pserver_programs("b:1")
    assert main is t.get_trainer_program(3) and startup is t.get_startup_program(3)
    assert fx.DistributeTranspiler().transpile(
        program=model.main, startup_program=model.startup, pservers="a:1", trainers=2
    ).strategy.servers == 1  # fmt: skip


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fx.strategies.parameter_server(0), "parameter_server: servers must be an integer of at least 1, got 0"),
        (lambda: fx.strategies.parameter_server(split="rr"), "parameter_server: unknown split='rr'"),
        (lambda: fx.strategies.parameter_server(sync=False), "sync=False is not available: the result of a step would depend on"),
        (lambda: transpiled(integer_mlp(), fx.Mesh(dp=2, tp=2)), "servers need trainers with one axis, dp"),
        (lambda: transpiled(integer_mlp()).get_pserver_program("c:1"), "there is no server 'c:1'; there are: 1 servers"),
        (
            lambda: fx.DistributeTranspiler("zero1").transpile(program=integer_mlp().main, startup_program=fx.Program(), pservers="a:1"),
            "pservers lists 1 servers, and zero1() has none",
        ),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(fx.TranspileError, match=message.replace("(", r"\(").replace(")", r"\)")):
        call()


@pytest.mark.parametrize(
    "made, message",
    [
        (lambda inner: fx.optimizer.GradientMergeOptimizer(inner, 2), "op cond writes %fc_0.w_0, which servers keep, and reads what"),
        (lambda inner: fx.optimizer.PowerSGDOptimizer(inner, 1), "op assign writes %fc_0.w_0_powersgd_q_0, which servers keep"),
        (lambda inner: fx.optimizer.LocalSGDOptimizer(inner, 2), "op cond must run on every server, but %fc_0.b_0 is stored on another"),
    ],
)
def test_updates_that_servers_cannot_make_are_refused_at_once(made, message):
    with pytest.raises(fx.TranspileError, match=f"{message}.*; take a strategy without servers"):
        transpiled(integer_mlp(optimizer=made(fx.optimizer.SGD(0.5))), servers=2)


@pytest.mark.parametrize("trainers, servers", [(1, 1), (2, 1), (2, 2)])
def test_micro_batches_are_pushed_once(trainers, servers):
    model = integer_mlp()
    strategy = fx.strategies.micro_batches(2, of=fx.strategies.parameter_server(servers, min_block=4))
    feeds, fetch = [model.feed(8)], [model.loss]
    one, scope = train_single(model, feeds, fetch)
    many, state = train_ranks(model, strategy, trainers, feeds, fetch)
    assert np.array_equal(one, many)
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p
    t = fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)
    assert [t.traffic(r).total for r in range(trainers)] == [P] * trainers


def test_pservers_and_a_strategy_around_servers_have_to_agree():
    model, around = integer_mlp(), fx.strategies.micro_batches(2, of=fx.strategies.parameter_server(2))
    given = {"program": model.main, "startup_program": model.startup, "trainers": 2}
    assert fx.DistributeTranspiler(around).transpile(**given, pservers="a:1,b:1").world_size == 4
    with pytest.raises(fx.TranspileError, match="pservers lists 1 servers, and micro_batches.* has 2: give it as many"):
        fx.DistributeTranspiler(around).transpile(**given, pservers="a:1")
    with pytest.raises(fx.TranspileError, match="has servers, and these exclude an axis of stages; take micro_batches"):
        fx.strategies.pipeline(2, of=fx.strategies.parameter_server(2))


def test_half_the_bytes_of_gradients_are_pushed_as_16_bits():
    plain, narrow = (transpiled(integer_mlp(), 3, servers=2, min_block=4, wire=wire) for wire in ("", "bfloat16"))
    assert [t.traffic(0).total for t in (plain, narrow)] == [P, P / 2]
    assert plain.traffic(3).total == narrow.traffic(3).total  # parameters come as they are
    assert "rounded" in str(narrow.verify()) and "rounded" not in str(plain.verify())


BREAK = {
    "a term left out": lambda s: s.replace("%fc_0.b_0@GRAD.sum.of1]", "%fc_0.b_0@GRAD.sum.of0]"),
    "no update": lambda s: "\n".join(line for line in s.splitlines() if "sgd(%fc_0.b_0," not in line),
    "another trainer": lambda s: s.replace('peer=1, shape=[5]', 'peer=0, shape=[5]'),
    "the old value twice": lambda s: s.replace("send(%fc_0.b_0)", "send(%learning_rate_0)", 1),
}


@pytest.mark.parametrize("which", BREAK)
def test_wrong_servers_are_refused(which):
    model = integer_mlp()
    t = transpiled(model, 2, servers=1)
    mains = [t.get_trainer_program(r) for r in range(3)]
    text = str(mains[2])
    assert BREAK[which](text) != text
    mains[2] = Program.parse_from_string(BREAK[which](text))
    with pytest.raises(fx.VerifyError):
        verify_ranks(ProgramPair(model.main, model.startup), mains, [t.get_startup_program(r) for r in range(3)])
