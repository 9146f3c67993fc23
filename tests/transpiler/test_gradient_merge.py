"""Gradients of k runs are added up where they are made; ranks talk in each k-th run only, and the answers are one device's."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Effect, Partial, parse_pair
from fluidx.ir.opdef import opdef
from fluidx.optimizer import GradientMergeOptimizer as Merge
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.verify import verify_ranks
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES, same_answers, written

P = 4 * (6 * 5 + 5 + 5 * 4 + 4)  # bytes of integer_mlp's parameters
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())


def parameters(model, scope):
    return {p: scope.get(p) for p, _ in model.gradients}


def transpiled(model, strategy, trainers):
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


def test_k_runs_are_one_with_a_batch_k_times_as_large():
    # sums of squares of small integers, and a rate of a half: every number is exact
    merged, plain = (integer_mlp(optimizer=o) for o in (Merge(fx.optimizer.SGD(0.5), 3, avg=False), fx.optimizer.SGD(0.5)))
    feeds = [merged.feed(4, k) for k in range(3)]
    _, in_three = train_single(merged, feeds, [])
    _, in_one = train_single(plain, [{"x": np.concatenate([f["x"] for f in feeds])}], [])
    for p, value in parameters(plain, in_one).items():
        assert np.array_equal(in_three.get(p), value), p


def test_avg_divides_by_the_number_of_runs():
    # a mean over 8 rows of 4 columns twice, and their mean, is the mean over 16 rows; all divisors are powers of two
    merged, plain = (integer_mlp("mean", o) for o in (Merge(fx.optimizer.SGD(0.5), 2), fx.optimizer.SGD(0.5)))
    feeds = [merged.feed(8, k) for k in range(2)]
    _, in_two = train_single(merged, feeds, [])
    _, in_one = train_single(plain, [{"x": np.concatenate([f["x"] for f in feeds])}], [])
    for p, value in parameters(plain, in_one).items():
        assert np.array_equal(in_two.get(p), value), p


def test_between_updates_parameters_rest_and_accumulators_grow():
    model = integer_mlp(optimizer=Merge(fx.optimizer.SGD(0.5), 3))
    p, g = model.gradients[0]
    exe, scope = fx.Executor(), fx.executor.Scope()
    exe.run(model.startup, scope=scope)
    begin, total = scope.get(p), 0.0
    for k in range(3):
        (gradient,) = exe.run(model.main, feed=model.feed(4, k), fetch_list=[g], scope=scope)
        total = total + gradient
        if k < 2:
            assert np.array_equal(scope.get(p), begin)
            assert np.array_equal(scope.get(f"{p}_merged_0"), total)
    np.testing.assert_allclose(scope.get(p), begin - 0.5 * total / 3, rtol=1e-6)  # a float32 third is rounded
    assert not scope.get(f"{p}_merged_0").any()


@swept(3, strategy=STRATEGIES, ranks=[1, 2, 3])
def test_ranks_are_bit_equal_where_sums_are_exact(strategy, ranks):
    model = integer_mlp(optimizer=Merge(fx.optimizer.Momentum(0.5, 0.5), 2))
    feeds = [model.feed(8, k) for k in range(2)]
    sums = [f"{p}_merged_0" for p, _ in model.gradients]
    for runs in (1, 2):
        one, scope = train_single(model, feeds[:runs], [model.loss, *sums])
        many, state = train_ranks(model, strategy(), ranks, feeds[:runs], [model.loss, *sums])
        assert all(np.array_equal(a, b) for x, y in zip(one, many, strict=True) for a, b in zip(x, y, strict=True))
        assert all(np.array_equal(value, scope.get(n)) for n, value in state.items())


def merged_adam():
    """Adam with a clip by the norm of all gradients, weight decay and a bias of one element, updated in every second run."""
    x = fx.data("x", [-1, 6], "float64")
    label = fx.data("label", [-1, 1], "float64")
    h = fx.layers.fc(fx.layers.fc(x, 7, act="tanh"), 1)
    loss = fx.layers.mean(fx.layers.square(h - label))
    inner = fx.optimizer.Adam(0.05, grad_clip=fx.clip.GradientClipByGlobalNorm(0.3), regularization=fx.regularizer.L2Decay(0.1))

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, 6)), "label": rng.standard_normal((rows, 1))}

    return loss, Merge(inner, 2), feed


@swept(2, strategy=STRATEGIES, ranks=[2, 4])
def test_clips_decays_and_state_are_those_of_one_device(strategy, ranks):
    same_answers(written(merged_adam), strategy(), ranks, rows=(7, 8, 2, 5, 3))


def test_a_mesh_of_two_axes():
    model = integer_mlp(optimizer=Merge(fx.optimizer.Momentum(0.5, 0.5), 2))
    t = transpiled(model, "data_parallel", fx.Mesh(dp=2, tp=2))
    assert t.verify().parameters == 4


def communicates(program, inside):
    blocks = program.blocks[1:] if inside else program.blocks[:1]
    return [op.type for b in blocks for op in b.oplist if opdef(op.type).effect in (Effect.COLLECTIVE, Effect.P2P)]


@every_strategy
def test_nothing_is_sent_outside_of_the_branch(strategy):
    t = transpiled(written(merged_adam), strategy(), 3)
    for rank in range(3):
        outside = communicates(t.get_trainer_program(rank), inside=False)
        assert [op for op in outside if op != "all_gather"] == []  # parameters that rest cut are gathered in every run
        assert not outside or t.strategy.name in ("zero3", "fsdp")
        assert communicates(t.get_trainer_program(rank), inside=True)


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "zero1", "zero2"])
def test_an_update_sends_what_one_without_merging_does(strategy):
    t = transpiled(integer_mlp(optimizer=Merge(fx.optimizer.Momentum(0.5, 0.5), 4)), strategy, 3)
    assert t.traffic(0).total == pytest.approx(2 * 2 / 3 * P)


def test_accumulators_are_terms_and_the_optimizers_state_lies_where_updates_are():
    t = transpiled(integer_mlp(optimizer=Merge(fx.optimizer.Momentum(0.5, 0.5), 4)), fx.strategies.zero1(bucket_mb=0), 2)
    descs = t.main.global_block().descs
    assert descs["fc_0.w_0_merged_0"].placement == (Partial("sum", "dp"),)
    assert str(descs["fc_0.w_0_velocity_0"].placement[0]) == "shard(0) over dp"


def test_gradients_of_16_bits_are_added_up_in_32():
    main, startup = fx.Program("half"), fx.Program("half_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float16")
        loss = fx.layers.mean(fx.layers.fc(x, 2))
        Merge(fx.optimizer.SGD(1.0), 2).minimize(loss)
    descs = main.global_block().descs
    assert descs["fc_0.w_0_merged_0"].type.dtype == "float32"
    assert main.blocks[1].descs["fc_0.w_0@GRAD.merged"].type.dtype == "float16"


def test_what_k_may_be():
    with pytest.raises(fx.ProgramError, match="k_steps"):
        Merge(fx.optimizer.SGD(0.1), 0)
    with pytest.raises(fx.ProgramError, match="optimizer must be an optimizer"):
        Merge("sgd", 2)


# -- wrong programs -------------------------------------------------------------------------------------------------------------


def edited(strategy, rank, old, new):
    """The rank programs of a merged training, one of them (or all, for None) changed, against the source."""
    t = transpiled(integer_mlp(optimizer=Merge(fx.optimizer.Momentum(0.5, 0.5), 2)), strategy, 3)
    pairs = [parse_pair(str(fx.ir.ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)))) for r in range(3)]
    changed = False
    for r, pair in enumerate(pairs):
        text = str(pair)
        if rank in (None, r) and old in text:
            changed = True
            pairs[r] = parse_pair(text.replace(old, new))
    assert changed, old
    return lambda: verify_ranks(t.source, [p.main for p in pairs], [p.startup for p in pairs])


ZERO = "%fc_0.w_0_merged_0 = fill_zeros_like(%fc_0.w_0_merged_0)"
SUMMED = '%fc_0.w_0@GRAD.merged.sum: f32[6,5] stop_gradient = all_reduce(%fc_0.w_0@GRAD.merged) {group="dp", op="sum"}'
INCREMENT = "increment(%gradient_merge_runs_0)"
WRONG = {
    "an accumulator is not emptied": ("data_parallel", None, ZERO, "", "does not hold one device's value"),
    "one rank does not empty an accumulator": ("data_parallel", 1, ZERO, "", "."),
    "all but one rank's terms are kept": ("data_parallel", None, ZERO, ZERO.replace("fill_zeros_like", "assign"), "does not hold"),
    "the terms are not added up": (
        "data_parallel", None, SUMMED, SUMMED.partition("=")[0] + "= assign(%fc_0.w_0@GRAD.merged)", "no rule allows",
    ),
    "one rank reduces by its maximum": ("data_parallel", 1, SUMMED, SUMMED.replace('"sum"', '"max"'), "in the same collective call"),
    "one rank stays away from a meeting": ("data_parallel", 2, SUMMED, "", "."),
    "the mean is of another number": ("data_parallel", None, "{scale=0.5} for %fc_0.w_0,", "{scale=0.25} for %fc_0.w_0,", "does not hold"),
    "one rank counts otherwise": ("data_parallel", 1, INCREMENT, f"{INCREMENT} {{step=2.0}}", "."),
    "one rank takes the other branch": ("data_parallel", 1, "= equal(", "= not_equal(", "."),
    "a root does not update in the branch": ("reduce_broadcast", None, "= momentum(%fc_0.w_0,", "= momentum(%fc_0.w_0.new,", "."),
    "a message goes to another rank": ("ring_optimizer", 0, "peer=1", "peer=2", "."),
}  # fmt: skip


@pytest.mark.parametrize("strategy, rank, old, new, why", WRONG.values(), ids=WRONG.keys())
def test_wrong_branches_are_refused(strategy, rank, old, new, why):
    check = edited(strategy, rank, old, new)
    with pytest.raises(fx.VerifyError, match=why):
        check()
