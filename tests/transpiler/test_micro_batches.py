"""Micro-batches: the batch is cut over an axis of time, and the answers are one device's."""

from __future__ import annotations

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import VerifyError
from fluidx.ir.jsonform import from_json, to_json
from fluidx.ir.program import ProgramPair
from fluidx.testing.models import train_single
from fluidx.verify import verify_ranks
from tests.transpiler.models import MODELS, same_answers, written
from tests.transpiler.staged import equal, gpt, layers

S = fx.strategies
INNER = [S.data_parallel, S.reduce_broadcast, S.ring_optimizer, S.zero1, S.zero2]
every_strategy = pytest.mark.parametrize("strategy", INNER, ids=lambda s: s.__name__)


def transpiled(model, trainers, strategy):
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


# -- the same answers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 7, 2])  # even parts, uneven ones, and turns without any rows
@pytest.mark.parametrize("turns", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_and_parameters_are_bit_equal(ranks, turns, rows):
    equal(layers(2), S.micro_batches(turns), ranks, rows=(rows,), fetch=("fc_0.tmp_1",))


@every_strategy
def test_under_every_strategy(strategy):
    equal(layers(3), S.micro_batches(3, strategy()), 3)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind(name):
    """A training batch_norm takes the whole batch, dropout draws what one device draws, branches are written out in every turn."""
    same_answers(name, S.micro_batches(3), 2)


def test_every_value_can_be_fetched_and_is_one_devices():
    model = written(MODELS["conv"])
    names = {n for op in model.main.ops if op.role != "optimize" for n in op.output_arg_names}
    same_answers(model, S.micro_batches(3, S.zero1()), 2, rows=(7, 2), fetch=tuple(sorted(names)))


def test_what_each_rank_has_is_that_of_all_its_turns():
    model = layers(2)
    t = transpiled(model, 2, S.micro_batches(2))
    (one,), _ = train_single(model, [model.feed(7)], ["fc_0.tmp_0", model.loss])
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        exe.run_startup()
        rows, loss = exe.run(feed=model.feed(7), fetch_list=["fc_0.tmp_0", model.loss], return_merged=False)
    assert np.array_equal(rows[0], one[0][:3]) and np.array_equal(rows[1], one[0][3:])
    assert loss[0] + loss[1] == one[1]


def test_a_maximum_over_the_batch_is_that_of_all_turns():
    main, startup = fx.Program("peak"), fx.Program("peak_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float64")
        peak = fx.layers.reduce_max(x, dim=0)
        out = fx.layers.reduce_sum(x / peak)
    feed = {"x": np.random.default_rng(1).standard_normal((7, 3)) + 3.0}
    t = fx.DistributeTranspiler(S.micro_batches(3)).transpile(program=main, startup_program=startup, trainers=2)
    assert [op.type for op in t.main.ops].count("elementwise_max") == 2
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        found = exe.run(feed=feed, fetch_list=[peak, out])
    assert np.array_equal(found[0], feed["x"].max(0))
    np.testing.assert_allclose(found[1], (feed["x"] / feed["x"].max(0)).sum(), rtol=1e-12)  # sums in another order


def test_a_loop_over_what_a_turn_has_counts_for_itself():
    """Every turn runs its own rounds, from the same counter."""
    main, startup = fx.Program("rounds"), fx.Program("rounds_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float64")
        h = fx.layers.assign(fx.layers.scale(x, 2.0))
        count, most = (fx.layers.fill_constant([1], "int64", n) for n in (0, 3))
        going = fx.layers.less_than(count, most)
        with fx.layers.While(going).block():
            fx.layers.assign(fx.layers.tanh(h) + x, h)
            fx.layers.increment(count, 1)
            fx.layers.less_than(count, most, cond=going)
        out = fx.layers.reduce_sum(h)
    feed = {"x": np.random.default_rng(2).standard_normal((7, 3))}
    wanted = feed["x"] * 2.0
    for _ in range(3):
        wanted = np.tanh(wanted) + feed["x"]
    t = fx.DistributeTranspiler(S.micro_batches(3)).transpile(program=main, startup_program=startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe:
        rounds, rows, total = exe.run(feed=feed, fetch_list=[count, h, out])
    assert rounds == [3]
    np.testing.assert_allclose(rows, wanted, rtol=1e-12)  # the kernels' tanh
    np.testing.assert_allclose(total, wanted.sum(), rtol=1e-12)


@pytest.mark.parametrize("ranks", [2, fx.Mesh(pp=2, dp=2)], ids=repr)
def test_merged_gradients_and_those_of_turns_add_up_to_one_update(ranks):
    optimizer = fx.optimizer.GradientMergeOptimizer(fx.optimizer.Momentum(0.1, 0.9), 2)
    same_answers(gpt(2, optimizer=optimizer), S.micro_batches(3), ranks, rows=(5, 4, 6, 3))


def test_on_several_hosts_with_reductions_in_two_levels():
    equal(layers(2), S.micro_batches(2), fx.Cluster(2, 2))


# -- what is written ----------------------------------------------------------------------------------------------------------------


def test_a_step_sends_once_whatever_the_number_of_turns():
    traffic = [transpiled(layers(3), 2, S.micro_batches(m)).traffic(0, batch=12) for m in (1, 2, 4)]
    assert traffic[0] == traffic[1] == traffic[2] and len({t.operators for t in traffic}) == 1


def test_gradients_are_sent_as_soon_as_the_last_turn_has_them():
    ops = [op.type for op in transpiled(layers(2), 2, S.micro_batches(2, S.data_parallel(bucket_mb=0))).main.ops]
    first, last = ops.index("all_reduce"), len(ops) - 1 - ops[::-1].index("all_reduce")
    assert "relu_grad" in ops[first:last]  # of the layer before


def test_turns_come_one_after_the_other_and_add_up_as_they_come():
    main = transpiled(layers(2), 1, S.micro_batches(3)).main
    turns = [int(n[-1]) for op in main.ops for n in op.output_arg_names if ".mb" in n and "-" not in n]
    assert turns == sorted(turns) and set(turns) == {0, 1, 2}
    sums = [(op.input_arg_names, op.output_arg_names) for op in main.ops if op.type == "sum" and "w1@GRAD" in str(op)]
    assert sums == [
        (("w1@GRAD.mb0", "w1@GRAD.mb1"), ("w1@GRAD.sum.mb0-1",)),
        (("w1@GRAD.sum.mb0-1", "w1@GRAD.mb2"), ("w1@GRAD.sum",)),
    ]
    assert [op.role_var for op in main.ops if op.role_var and op.role_var[0] == "w1"] == [("w1", "w1@GRAD.sum")]


def test_activations_take_the_memory_of_one_turn():
    def arena(turns):
        model = layers(6, width=64)
        return dry_plan(transpiled(model, 1, S.micro_batches(turns)).get_trainer_program(0), batch=512, fetch=[]).nbytes("arena")

    gradients = 2 * 4 * (5 * 64 * 64 + 6 * 64 + 6 * 64)  # those that are added up, and those of one turn
    assert arena(8) - gradients < arena(1) / 4


def test_programs_with_turns_print_and_come_back():
    main = transpiled(layers(2), 2, S.micro_batches(2)).get_trainer_program(1)
    assert "  turns mb = 2\n" in str(main) and "shard(0) over dp shard(0) over mb.1" in str(main)
    assert fx.Program.parse_from_string(str(main)) == main and from_json(to_json(main)) == main


# -- what cannot be -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: S.micro_batches(0), "micro_batches: count must be an integer from 1 to 1024, got 0"),
        (lambda: S.micro_batches(2.0), "micro_batches: count must be an integer from 1 to 1024, got 2.0"),
        (lambda: S.micro_batches(2, "zero1"), "micro_batches: of must be a strategy such as strategies.zero1(), got 'zero1'"),
        (
            lambda: S.micro_batches(4, of=S.micro_batches(2, of=S.zero1())),
            "micro_batches: of=micro_batches(count=2, of=zero1()) already has micro-batches; use it alone, or "
            "micro_batches(count=4, of=zero1())",
        ),
        (
            lambda: transpiled(layers(2), fx.Mesh(mb=2, dp=1), S.micro_batches(2)),
            "mb is an axis of ranks of Mesh(mb=2, dp=1); a time axis needs another name: Turns(axis=...)",
        ),
    ],
    ids=["none", "no integer", "no strategy", "cut twice", "a taken name"],
)
def test_refusals(make, text):
    with pytest.raises(fx.TranspileError) as caught:
        make()
    assert str(caught.value) == text


def test_what_one_turn_has_is_no_value_to_fetch():
    model = layers(2)
    t = transpiled(model, 2, S.micro_batches(2))
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe, pytest.raises(fx.FeedError, match="at one index of a time axis"):
        exe.run_startup()
        exe.run(feed=model.feed(4), fetch_list=["fc_0.tmp_0.mb1"])


# -- programs that are not right ----------------------------------------------------------------------------------------------------


def broken(change):
    """The message of the proof for two ranks with two turns, of whose programs `change(lines)` changed the text."""
    model = layers(2)
    t = transpiled(model, 2, S.micro_batches(2, S.data_parallel(bucket_mb=0)))
    mains = []
    for r in range(2):
        text = str(t.get_trainer_program(r))
        changed = change(text)
        assert changed != text
        mains.append(fx.Program.parse_from_string(changed))
    with pytest.raises(VerifyError) as caught:
        verify_ranks(ProgramPair(model.main, model.startup), mains, [t.get_startup_program(r) for r in range(2)])
    return str(caught.value)


MUTANTS = {
    "a term is added twice": lambda s: s.replace("sum([%w0@GRAD.mb0, %w0@GRAD.mb1])", "sum([%w0@GRAD.mb1, %w0@GRAD.mb1])"),
    "a term is missing": lambda s: s.replace("sum([%w0@GRAD.mb0, %w0@GRAD.mb1])", "sum([%w0@GRAD.mb0])"),
    "terms of two gradients": lambda s: s.replace("sum([%b0@GRAD.mb0, %b0@GRAD.mb1])", "sum([%b0@GRAD.mb0, %b1@GRAD.mb1])"),
    "an operand of another turn": lambda s: s.replace("mul(%x.mb1, %w0)", "mul(%x.mb0, %w0)"),
    "a gradient with the other turn's activations": lambda s: s.replace("matmul(%fc_0.tmp_2.mb1,", "matmul(%fc_0.tmp_2.mb0,"),
    "the part of another turn": lambda s: s.replace('part(%x) {group="mb.1"}', 'part(%x) {group="mb.0"}'),
    "parts cut along another axis": lambda s: s.replace('part(%x) {group="mb.1"}', 'part(%x) {axis=1, group="mb.1"}'),
    "another number of turns": lambda s: s.replace("turns mb = 2", "turns mb = 3"),
    "no turns at all": lambda s: s.replace("  turns mb = 2\n", ""),
    "a value that says it is of another turn": lambda s: s.replace(
        "%fc_0.tmp_0.mb1: f32[-1,5] shard(0) over dp shard(0) over mb.1", "%fc_0.tmp_0.mb1: f32[-1,5] shard(0) over dp shard(0) over mb.0"
    ),
    "ranks that meet in a turn": lambda s: s.replace('all_reduce(%w0@GRAD.sum.by1) {group="dp"', 'all_reduce(%w0@GRAD.mb1) {group="mb.1"'),
    "terms that count as whole": lambda s: s.replace(
        "%reduce_sum_0.tmp_0: f32[1] partial(sum) over dp partial(sum) over mb", "%reduce_sum_0.tmp_0: f32[1] partial(sum) over dp"
    ),
    "turns of a value that is not declared": lambda s: s.replace(
        "  var %fc_0.tmp_0: f32[-1,5] shard(0) over dp shard(0) over mb\n", ""
    ),
    "a value that each rank has for itself, and none makes": lambda s: s.replace(
        "%fc_0.tmp_0: f32[-1,5] shard(0) over dp shard(0) over mb\n", "%fc_0.tmp_0: f32[-1,5] local\n"
    ),
    "an operator over all turns": lambda s: s.replace("%fc_0.tmp_0.mb1:", "%fc_0.tmp_0:").replace(
        "shard(0) over dp shard(0) over mb.1 stop_gradient = mul(%x.mb1, %w0)", "shard(0) over dp shard(0) over mb = mul(%x.mb1, %w0)"
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_refused(name):
    assert broken(MUTANTS[name])
