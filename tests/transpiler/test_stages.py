"""Operators that are marked with a stage run on one rank of `pp`; values go from stage to stage, and everything is one device's."""

from __future__ import annotations

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import At, Shard, VerifyError
from fluidx.ir.opdef import OPS, Effect
from fluidx.ir.program import ProgramPair
from fluidx.testing.models import TestModel
from fluidx.verify import verify_ranks
from tests.transpiler.models import same_answers
from tests.transpiler.staged import equal, gpt, layers

L, S = fx.layers, fx.strategies
INNER = [S.data_parallel, S.reduce_broadcast, S.ring_optimizer, S.zero1, S.zero2]
every_strategy = pytest.mark.parametrize("strategy", INNER, ids=lambda s: s.__name__)


def transpiled(model, trainers, strategy=None):
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


@pytest.mark.parametrize("stages", [2, 4])
@every_strategy
def test_stages_alone_are_bit_equal(strategy, stages):
    equal(layers(stages), strategy(), fx.Mesh(pp=stages), fetch=("fc_0.tmp_0",))


@every_strategy
@pytest.mark.parametrize("mesh", [fx.Mesh(pp=2, dp=2), fx.Mesh(dp=3, pp=2)], ids=repr)
def test_stages_and_data_parallel_are_bit_equal(strategy, mesh):
    equal(layers(2), strategy(), mesh)


@every_strategy
def test_stages_tensor_parallel_and_data_parallel_are_bit_equal(strategy):
    equal(layers(2, width=6, tp=True), strategy(), fx.Mesh(pp=2, dp=2, tp=2))


@pytest.mark.parametrize("mesh", [fx.Mesh(pp=2), fx.Mesh(pp=3, dp=2)], ids=repr)
def test_a_gpt_whose_first_and_last_stage_share_a_table(mesh):
    model = gpt(mesh.sizes["pp"])
    same_answers(model, S.data_parallel(), mesh, rows=(5, 4, 1), fetch=("table@GRAD", "layer_norm_1.tmp_2"))


def test_everything_rests_where_it_is_used_and_crosses_once():
    t = transpiled(gpt(2), fx.Mesh(pp=2))
    places = {n: str(d.placement[0]) if d.placement else "" for n, d in t.main.global_block().descs.items() if d.persistable or d.is_data}
    assert places["ids"] == places["table"] == "at(0) over pp" and places["label"] == places["fc_4.w_0"] == "at(1) over pp"
    assert places["fc_4.w_0_moment1_0"] == "at(1) over pp" and places["fc_4.w_0_beta1_pow_acc_0"] == places["@LR_DECAY_COUNTER@"] == ""
    moved = [(op.input_arg_names[0], op.attrs["root"], op.attrs["to"]) for op in t.main.ops if op.type == "transfer"]
    # the activation and the table go there, their gradients back
    assert moved == [("elementwise_add.tmp_1", 0, 1), ("table", 0, 1), ("elementwise_add.tmp_1@GRAD", 1, 0), (moved[3][0], 1, 0)]
    assert moved[3][0].startswith("table@GRAD@RENAME")
    assert t.traffic(0, batch=3)["pp"] == 3 * 4 * 6 * 8 + 11 * 6 * 8 + 8  # and the sum of squares that the clip needs


def test_state_is_cut_at_its_stage_where_updates_are():
    t = transpiled(layers(2, fx.optimizer.Momentum(0.5, 0.9)), fx.Mesh(pp=2, dp=2), S.zero1())
    assert str(t.main.global_block().descs["w1_velocity_0"].placement) == str((At(1, "pp"), Shard(0, "dp")))
    kinds = [op.type for op in t.main.ops if op.role == "dist"]
    assert [kinds.count(k) for k in ("transfer", "reduce_scatter", "all_gather")] == [2, 4, 4]


def test_a_stage_has_the_operators_of_its_layers_alone():
    t = transpiled(layers(3), fx.Mesh(pp=3))
    programs = [t.get_trainer_program(r) for r in range(3)]
    assert [[op.type for op in p.ops if OPS[op.type].effect is Effect.P2P or op.type in ("mul", "sgd")] for p in programs] == [
        ["mul", "send", "recv", "sgd", "sgd"],
        ["recv", "mul", "send", "recv", "send", "sgd", "sgd"],
        ["recv", "mul", "send", "sgd", "sgd"],
    ]
    with fx.ParallelExecutor(t, places=fx.cpu_places(3)) as exe:
        exe.run_startup()
        assert [sorted(n for n in s.arrays if n in ("w0", "w1", "w2")) for s in exe.scopes] == [["w0"], ["w1"], ["w2"]]


def test_stages_read_back_from_text_run():
    model = layers(2)
    t = transpiled(model, fx.Mesh(pp=2, dp=2))
    pairs = [ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)) for r in range(4)]
    again = [ProgramPair(*(fx.Program.parse_from_string(str(p)) for p in (pair.main, pair.startup))) for pair in pairs]
    assert all(a.main == b.main and a.startup == b.startup for a, b in zip(again, pairs, strict=True))
    with fx.ParallelExecutor(again, places=fx.cpu_places(4)) as exe, fx.scope_guard(fx.executor.Scope()):
        exe.run_startup()
        (many,) = exe.run(feed=model.feed(5), fetch_list=[model.loss.name])
        one = fx.Executor(fx.CPUPlace())
        one.run(model.startup)
        assert many == one.run(model.main, feed=model.feed(5), fetch_list=[model.loss.name])[0]


# -- programs that are no straight line ---------------------------------------------------------------------------------------------


def written(build, feeds):
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = build()
        _, pairs = fx.optimizer.SGD(0.1).minimize(loss)
    return TestModel(main, startup, loss, feeds, [(p.name, g.name) for p, g in pairs])


def rows(n, seed=0):
    return {"x": np.random.default_rng(seed).standard_normal((n, 4))}


def test_operators_without_a_stage_follow_what_they_read():
    def build():
        x = fx.data("x", [-1, 4], "float64")
        with fx.device_guard("gpu:0"):
            h = L.fc(x, 3)
        h = L.tanh(h)
        with fx.device_guard("gpu:1"):
            h = L.fc(h, 3)
        return L.mean(L.square(h))

    model = written(build, rows)
    same_answers(model, S.data_parallel(), fx.Mesh(pp=2, dp=2))
    t = transpiled(model, fx.Mesh(pp=2))
    on = {op.type: t.main.global_block().descs[op.output_arg_names[0]].placement[0].root for op in t.main.ops if op.role == "forward"}
    assert on["tanh"] == 0 and on["square"] == 1


def test_a_way_back_to_an_earlier_stage_and_a_value_for_several_stages():
    def build():
        x = fx.data("x", [-1, 4], "float64")
        with fx.device_guard("stage:0"):
            h = skip = L.fc(x, 4, act="tanh")
        with fx.device_guard("stage:1"):
            h = L.fc(h, 4) * skip
        with fx.device_guard("stage:2"):
            h = L.fc(h, 4) + skip
        with fx.device_guard("stage:0"):
            return L.mean(L.square(L.fc(h, 2)))

    model = written(build, rows)
    same_answers(model, S.data_parallel(), fx.Mesh(pp=3, dp=2))


def test_rows_and_tokens_may_be_folded_into_one_axis_that_crosses():
    def build():
        x = fx.data("x", [-1, 3, 4], "float64")
        with fx.device_guard("stage:0"):
            h = L.reshape(L.fc(x, 4, num_flatten_dims=2), [-1, 4])
        with fx.device_guard("stage:1"):
            return L.mean(L.square(L.fc(h, 2)))

    model = written(build, lambda n, seed=0: {"x": np.random.default_rng(seed).standard_normal((n, 3, 4))})
    t = transpiled(model, fx.Mesh(pp=2))
    recv = next(op for op in t.get_trainer_program(1).ops if op.type == "recv")
    assert recv.attrs["shape"] == (-1, 4) and recv.attrs["like"] == "x" and recv.attrs["open"] == (0, 3)
    same_answers(model, S.data_parallel(), fx.Mesh(pp=2, dp=2), rows=(5, 2))


def branching(x):
    with fx.device_guard("stage:0"):
        h = L.fc(x, 4, act="tanh")
    flag = fx.data("flag", [1], "float64")
    with fx.device_guard("stage:1"):
        deep = L.cond(L.greater_than(flag, L.fill_constant([1], "float64", 0.0)), lambda: L.fc(h, 4), lambda: h * 2.0)
        return L.mean(L.square(deep))


def test_a_branch_in_a_stage_reads_what_was_brought_there():
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = branching(fx.data("x", [-1, 4], "float64"))
    model = TestModel(main, startup, loss, lambda n, seed=0: rows(n, seed) | {"flag": np.array([seed % 2 - 0.5])}, [])
    same_answers(model, S.data_parallel(), fx.Mesh(pp=2, dp=2), rows=(5, 4))


def test_a_gradient_out_of_a_branch_has_no_size_that_another_stage_knows():
    t = transpiled(written(lambda: branching(fx.data("x", [-1, 4], "float64")), rows), fx.Mesh(pp=2))
    with pytest.raises(fx.TranspileError, match="its size does not follow from the size of one feed; move the stage border"):
        t.get_trainer_program(0)


# -- what cannot be -----------------------------------------------------------------------------------------------------------------


def refused(model, trainers):
    with pytest.raises(fx.TranspileError) as caught:
        transpiled(model, trainers)
    return str(caught.value).split("\n")[0]


def test_a_stage_that_there_is_not():
    assert refused(layers(3), fx.Mesh(pp=2)) == (
        "op mul is marked stage:2, and the ranks have 2 stages, 0 to 1; mark it with one of them, or give trainers=fx.Mesh(pp=3, ...)"
    )


def test_a_stage_without_operators():
    assert refused(layers(2), fx.Mesh(pp=4)) == (
        "program layers has no operators for stages 2, 3 of the 4 that pp=4 asks for; mark them while the program is written: "
        'with fx.device_guard("stage:2"): ...'
    )


def test_a_size_that_does_not_follow_from_what_is_fed():
    def build():
        x = fx.data("x", [-1, 4], "float64")
        with fx.device_guard("stage:0"):
            h = L.slice(L.fc(x, 4), axes=[0], starts=[1], ends=[100])
        with fx.device_guard("stage:1"):
            return L.mean(L.square(L.fc(h, 2)))

    t = transpiled(written(build, rows), fx.Mesh(pp=2))
    with pytest.raises(fx.TranspileError, match=r"%slice_0.tmp_0 f64\[-1,4\] goes from 0 to 1 over pp, and its size does not follow"):
        t.get_trainer_program(1)


def test_stages_are_hints_alone_where_ranks_have_no_such_axis():
    equal(layers(2), S.data_parallel(), 2)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"open": (0, 2)}, "the open axes of %fc_0.tmp_2 from rank 0 are not known to be 2 times axis 0 of %x"),
        ({"open": (1, 1)}, "the open axes of %fc_0.tmp_2 from rank 0 are not known to be 1 times axis 1 of %x"),
        ({"like": "w0"}, "op recv on rank 1 names axis 0 of 'w0', which is not an axis of a data variable"),
        ({"like": "", "open": ()}, "op recv on rank 1: f32[-1,5] has 1 open axes, and 0 sizes are given"),
        ({"peer": 1}, "names peer 1"),
        ({"shape": (-1, 4)}, "op recv makes f32"),
    ],
    ids=str,
)
def test_a_recv_that_says_something_else_is_refused(change, why):
    model = layers(2)
    t = transpiled(model, fx.Mesh(pp=2))
    mains = [fx.Program.parse_from_string(str(t.get_trainer_program(r))) for r in range(2)]
    ops = mains[1].global_block().oplist
    k = next(k for k, op in enumerate(ops) if op.type == "recv")
    ops[k] = ops[k].replace(attrs={**ops[k].attrs, **change})
    with pytest.raises(VerifyError) as caught:
        verify_ranks(ProgramPair(model.main, model.startup), mains, [t.get_startup_program(r) for r in range(2)])
    assert why in str(caught.value)


def test_a_stage_that_is_fed_nothing_is_planned_by_the_sizes_of_the_feeds():
    t = transpiled(layers(3), fx.Mesh(pp=3, dp=2))
    planned = dry_plan(t.get_trainer_program(2), batch=7)  # the first of two ranks that share stage 1
    assert planned.values["fc_0.tmp_2.moved"].type.shape == (3, 5) and planned.nbytes("feed") == 0
