"""Values computed from one parameter, such as its cast to 16 bits: made on the shards, gathered in their dtype, and again in backward."""

from collections import Counter

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import ProgramPair, Role, Shard
from fluidx.ir.parser import parse_pair
from fluidx.testing.models import TestModel, train_ranks, train_single
from fluidx.verify import verify_ranks
from tests.transpiler.models import L

amp = fx.mixed_precision
STRATEGIES = {
    "fsdp": lambda: fx.strategies.fsdp(units="scope"),
    "fsdp in small units": lambda: fx.strategies.fsdp(units=2**-12, prefetch=2),
    "fsdp by parameter": lambda: fx.strategies.fsdp(units="parameter"),
    "fsdp that keeps": lambda: fx.strategies.fsdp(units="scope", reshard_after_forward=False),
    "fsdp on the host": lambda: fx.strategies.fsdp(units="scope", cpu_offload=True),
    "zero3": fx.strategies.zero3,
    "zero3 that keeps": lambda: fx.strategies.zero3(reshard_after_forward=False),
    "micro-batches": lambda: fx.strategies.micro_batches(2, fx.strategies.fsdp(units="scope")),
}


def bfloat16(optimizer, **options):
    return amp.decorate(optimizer, dtype="bfloat16", init_loss_scaling=1.0, use_dynamic_loss_scaling=False, **options)


def layers(count=4, width=8, bias=True, norm=False):
    h = fx.data("x", [-1, width], "float32")
    for k in range(count):
        with fx.name_scope(f"block{k}"):
            h = L.fc(h, width, act="tanh", param_attr=fx.ParamAttr(name=f"w{k}"), bias_attr=fx.ParamAttr(name=f"b{k}") if bias else False)
            h = L.layer_norm(h, begin_norm_axis=1) if norm else h
    return L.mean(L.square(h))


def model(optimizer, write=layers, width=8):
    main, startup = fx.Program("net"), fx.Program("net_startup")
    main.random_seed = startup.random_seed = 7
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = write()
        _, pairs = optimizer.minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).standard_normal((rows, width)).astype("float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


def ranks_of(found, strategy, trainers=4):
    t = fx.DistributeTranspiler(strategy).transpile(program=found.main, startup_program=found.startup, trainers=trainers)
    t.verify()
    return t


def sent(t, kind):
    """The bytes of the whole values that collectives of a kind carry, by dtype."""
    descs, found = t.main.global_block().descs, Counter()
    for op in t.main.ops:
        if op.type == kind:
            found[descs[op.input_arg_names[0]].type.dtype] += descs[op.input_arg_names[0]].type.nbytes
    return dict(found)


# -- what is gathered -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_parameters_are_gathered_as_often_as_in_float32_and_in_half_the_bytes(name):
    """All of these are read in 16 bits; the last unit of forward stays for backward, which reads no bias."""
    wide = ranks_of(model(fx.optimizer.Adam(0.01)), STRATEGIES[name]())
    half = ranks_of(model(bfloat16(fx.optimizer.Adam(0.01))), STRATEGIES[name]())
    assert set(sent(wide, "all_gather")) == {"float32"} and set(sent(half, "all_gather")) == {"bfloat16"}
    assert 2 * sent(half, "all_gather")["bfloat16"] == sent(wide, "all_gather")["float32"]
    count = [Counter(op.type for op in t.main.ops)["all_gather"] for t in (wide, half)]
    assert count[0] == count[1]
    if name == "fsdp":
        assert count[0] == 4 + 2  # the weight of block 3 stays, and that of block 0 has no reader in backward


def test_the_cast_is_made_on_the_shard_before_each_gather_and_freed_with_it():
    t = ranks_of(model(bfloat16(fx.optimizer.SGD(0.1)), lambda: layers(3, bias=False)), fx.strategies.zero3())
    descs, ops = t.main.global_block().descs, t.main.ops
    casts = [op for op in ops if op.type == "cast" and op.input_arg_names[0].startswith("w") and "GRAD" not in op.input_arg_names[0]]
    # w2 stays; the gradient of x is not wanted, so backward does not read w0
    assert [op.input_arg_names[0] for op in casts] == ["w0", "w1", "w2", "w1"]
    for op in casts:
        (out,) = op.output_arg_names
        assert op.role is Role.DIST and descs[out].placement == descs[op.input_arg_names[0]].placement != ()
        (reader,) = [r for r in ops if out in r.input_arg_names]
        assert reader.type == "all_gather"
    whole = {op.output_arg_names[0] for op in ops if op.type == "all_gather"}
    last = max(k for k, op in enumerate(ops) if op.role is Role.FORWARD)
    crossing = {n for op in ops[last:] for n in op.input_arg_names} & whole & {n for op in ops[:last] for n in op.output_arg_names}
    assert crossing == {"w2.bfloat16.full"}


def test_what_stays_float32_is_gathered_in_float32():
    t = ranks_of(model(bfloat16(fx.optimizer.SGD(0.1)), lambda: layers(2, norm=True)), fx.strategies.fsdp(units="scope"))
    of_norms = 2 * 2 * 8 * 4  # scale and bias of two norms of 8
    assert set(sent(t, "all_gather")) == {"bfloat16", "float32"}
    assert of_norms <= sent(t, "all_gather")["float32"] <= 2 * of_norms


@pytest.mark.parametrize("reduce_dtype, dtype", [(None, "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_gradients_are_scattered_in_the_dtype_that_was_asked_for(reduce_dtype, dtype):
    t = ranks_of(model(bfloat16(fx.optimizer.SGD(0.1), reduce_dtype=reduce_dtype)), fx.strategies.fsdp(units="scope"))
    assert set(sent(t, "reduce_scatter")) == {dtype}


def test_a_table_that_is_read_whole_in_float32_too_is_gathered_once_in_forward():
    """Its cast is computed from the gathered table; backward needs the cast alone, and gathers that."""

    def tied():
        ids = fx.data("ids", [-1, 3], "int64")
        h = fx.embedding(ids, [10, 4], param_attr=fx.ParamAttr(name="table"))
        h = L.fc(L.reshape(h, [-1, 12]), 4, param_attr=fx.ParamAttr(name="w"), bias_attr=False)
        h = L.matmul(h, fx.default_main_program().global_block().var("table"), transpose_y=True)
        return L.mean(L.square(L.fc(h, 2, param_attr=fx.ParamAttr(name="v"), bias_attr=False)))

    t = ranks_of(model(bfloat16(fx.optimizer.SGD(0.1)), tied), fx.strategies.zero3(), 2)
    gathered = [op.input_arg_names[0] for op in t.main.ops if op.type == "all_gather"]
    assert Counter(n.partition(".")[0] for n in gathered) == {"table": 2, "w": 2, "v": 1}
    assert [n for n in gathered if n.startswith("table")][0] == "table" and sent(t, "all_gather")["float32"] == 10 * 4 * 4


def test_a_value_of_equal_bytes_is_computed_in_each_section_from_the_gathered_parameter():
    def transposed():
        h, w = fx.data("x", [-1, 8], "float32"), L.create_parameter([6, 8], "float32", name="w")
        h = L.matmul(L.fc(h, 8, param_attr=fx.ParamAttr(name="u"), bias_attr=False), L.transpose(w, [1, 0]))
        return L.mean(L.square(L.fc(L.tanh(h), 6, param_attr=fx.ParamAttr(name="v"), bias_attr=False)))

    found = model(fx.optimizer.SGD(0.1), transposed)
    t = ranks_of(found, fx.strategies.fsdp(units="parameter"), 2)
    assert Counter(op.input_arg_names[0] for op in t.main.ops if op.type == "all_gather") == {"u": 1, "w": 2, "v": 1}
    of = [op for op in t.main.ops if op.type == "transpose" and op.input_arg_names[0].startswith("w.")]
    assert [op.role for op in of] == [Role.FORWARD, Role.BACKWARD]
    same_losses(found, fx.strategies.fsdp(units="parameter"), 2, 1e-5)


def test_a_rounded_weight_is_rounded_again_in_backward_and_not_kept():
    """fake_quantize reads the weight, a scale for each channel and a zero; its gradient reads the weight too."""

    def rounded():
        h = fx.data("x", [-1, 8], "float32")
        for k in range(3):
            h = L.fc(h, 8, act="tanh", param_attr=fx.ParamAttr(name=f"w{k}"), bias_attr=False)
        fx.quantize(fx.default_main_program(), [{"x": np.ones((2, 8), "float32")}], fx.default_startup_program())
        return L.mean(L.square(fx.default_main_program().global_block().var(h.name)))

    found = model(fx.optimizer.SGD(0.1), rounded)
    t = ranks_of(found, fx.strategies.zero3(), 2)
    of = [op for op in t.main.ops if op.type == "fake_quantize" and op.input_arg_names[0].startswith("w")]
    assert [op.role for op in of] == [Role.FORWARD] * 3 + [Role.BACKWARD] * 1  # w2 stays, and w0's product has no gradient of its input
    same_losses(found, fx.strategies.zero3(), 2, 1e-6)


def test_a_rounded_weight_in_16_bits_is_rounded_and_cast_on_the_shard():
    """The scale of a channel is cut like the channels; what is gathered is the cast of the rounded weight."""

    def rounded():
        h = L.fc(fx.data("x", [-1, 8], "float32"), 8, act="tanh", param_attr=fx.ParamAttr(name="w"), bias_attr=False)
        fx.quantize(fx.default_main_program(), [{"x": np.ones((2, 8), "float32")}], fx.default_startup_program())
        return L.mean(L.square(fx.default_main_program().global_block().var(h.name)))

    found = model(bfloat16(fx.optimizer.SGD(0.1)), rounded)
    t = ranks_of(found, fx.strategies.zero3(), 2)
    (op,) = [op for op in t.main.ops if op.type == "fake_quantize" and op.input_arg_names[0].startswith("w")]
    descs = t.main.global_block().descs
    assert op.role is Role.DIST and descs[op.output_arg_names[0]].placement == descs["w"].placement == (Shard(0),)
    assert sent(t, "all_gather")["bfloat16"] == 8 * 8 * 2
    same_losses(found, fx.strategies.zero3(), 2, 2**-7)


# -- answers ----------------------------------------------------------------------------------------------------------------------


def same_losses(found, strategy, ranks, tolerance, rows=7, steps=3):
    feeds = [found.feed(rows, k) for k in range(steps)]
    one, scope = train_single(found, feeds, [found.loss])
    many, state = train_ranks(found, strategy, ranks, feeds, [found.loss])
    np.testing.assert_allclose(many, one, rtol=tolerance)
    for p, _ in found.gradients:
        np.testing.assert_allclose(state[p], scope.get(p), rtol=tolerance, atol=tolerance / 4, err_msg=p)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_answers_are_one_devices_for_uneven_batches(name, ranks):
    """7 rows: a rank rounds its part of a gradient to the 8 digits of bfloat16, where one device rounds the sum."""
    same_losses(model(bfloat16(fx.optimizer.Momentum(0.1, 0.9)), lambda: layers(norm=True)), STRATEGIES[name](), ranks, 2**-7)


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_forward_is_one_devices_to_the_bit(name):
    """Each row is computed from the same casts, whoever makes them."""
    found = model(bfloat16(fx.optimizer.SGD(0.1)))
    h = next(op.input_arg_names[0] for op in found.main.ops if op.type == "square")
    feed = found.feed(7)
    (one,), _ = train_single(found, [feed], [h])
    (many,), _ = train_ranks(found, STRATEGIES[name](), 4, [feed], [h])
    assert np.array_equal(one[0], many[0])


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
@pytest.mark.parametrize("outside", [False, True])
def test_recompute_reads_the_value_that_backward_makes(name, outside):
    def checkpointed(optimizer):
        main, startup = fx.Program("net"), fx.Program("net_startup")
        main.random_seed = startup.random_seed = 7
        with fx.unique_name.guard(), fx.program_guard(main, startup):
            h, kept = fx.data("x", [-1, 8], "float32"), []
            for k in range(4):
                h = L.fc(h, 8, act="tanh", param_attr=fx.ParamAttr(name=f"w{k}"))
                kept.append(h)
            loss = L.mean(L.square(h))
            _, pairs = optimizer(kept[1::2]).minimize(loss)
        feed = model(fx.optimizer.SGD(0.1)).feed
        return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])

    sgd, recompute = fx.optimizer.SGD(0.1), fx.optimizer.RecomputeOptimizer
    found = checkpointed((lambda kept: recompute(bfloat16(sgd), kept)) if outside else lambda kept: bfloat16(recompute(sgd, kept)))
    t = ranks_of(found, STRATEGIES[name]())
    of = Counter(op.input_arg_names[0] for op in t.main.ops if op.type == "cast" and op.input_arg_names[0] in ("w0", "w1", "w2", "w3"))
    assert set(of.values()) <= {1, 2}
    same_losses(found, STRATEGIES[name](), 2, 2**-7)


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_a_parameter_that_is_updated_while_backward_runs_is_not_cast_again(name):
    """raise_updates puts the update of w behind the last reader of w, which is the cast: backward reads the value from before it."""
    strategy = fx.strategies.get({"fsdp": "fsdp{units=0.0002}", "zero3": "zero3"}[name] + ",raise_updates")
    found = model(bfloat16(fx.optimizer.SGD(0.5)))
    ranks_of(found, strategy)
    same_losses(found, strategy, 2, 2**-7)


def test_a_branch_reads_the_cast_that_was_made_before_it():
    def branched():
        h, flag = fx.data("x", [-1, 8], "float32"), L.fill_constant([1], "float32", 1.0)
        w = L.create_parameter([8, 8], "float32", name="w")
        h = L.matmul(h, w)
        h = L.cond(L.greater_than(flag, L.fill_constant([1], "float32", 0.0)), lambda: L.matmul(h, w), lambda: L.scale(h, 2.0))
        return L.mean(L.square(h))

    found = model(bfloat16(fx.optimizer.SGD(0.1)), branched)
    t = ranks_of(found, fx.strategies.zero3(), 2)
    assert set(sent(t, "all_gather")) == {"bfloat16"}
    same_losses(found, fx.strategies.zero3(), 2, 2**-7)


def test_parameters_that_tp_cuts_stay_cut_in_16_bits():
    def annotated():
        w, v = (fx.ParamAttr(name=n, placement=Shard(k, "tp")) for n, k in (("w", 1), ("v", 0)))
        h = L.fc(fx.data("x", [-1, 8], "float32"), 6, param_attr=w, bias_attr=False, act="tanh")
        return L.mean(L.square(L.fc(h, 4, param_attr=v, bias_attr=False)))

    found = model(bfloat16(fx.optimizer.SGD(0.1)), annotated)
    t = ranks_of(found, fx.strategies.zero3(), fx.Mesh(dp=2, tp=2))
    assert set(sent(t, "all_gather")) == {"bfloat16"}
    same_losses(found, fx.strategies.zero3(), fx.Mesh(dp=2, tp=2), 2**-7)


# -- memory -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fsdp{units=0.0625}", "zero3"])
def test_a_rank_needs_no_more_memory_than_in_float32(strategy):
    """12 layers of 128 x 128 on 8 ranks. Values of a step, without what kernels that widen their operands need beside them: a gradient in
    float32 stands beside the one in 16 bits that it is made of."""
    peaks = {}
    for name, optimizer in {
        "float32": fx.optimizer.Adam(0.01),
        "bfloat16": bfloat16(fx.optimizer.Adam(0.01)),
        "reduced": bfloat16(fx.optimizer.Adam(0.01), reduce_dtype="bfloat16"),
        "float16": amp.decorate(fx.optimizer.Adam(0.01)),
    }.items():
        t = ranks_of(model(optimizer, lambda: layers(12, 128, bias=False), 128), fx.strategies.get(strategy), 8)
        plan = dry_plan(t.get_trainer_program(0), batch=8, fetch=[])
        live = [sum(b.nbytes for b in plan.buffers if b.start <= k <= b.stop) for k in range(len(plan.steps))]
        peaks[name] = max(live)
    assert all(peaks[name] <= 1.1 * peaks["float32"] for name in peaks), peaks
    assert peaks["reduced"] < peaks["float32"] and peaks["float16"] < peaks["float32"]


@pytest.mark.parametrize("strategy", ["fsdp{units=0.25}", "zero3"])
def test_a_frozen_base_with_adapters_is_gathered_in_16_bits_in_both_sections(strategy):
    """As in LoRA: 6 weights of 128 x 128 that are not trained, each beside two factors of rank 2. Backward reads the base for the gradient
    of its input, but for that of the first layer; the last unit of forward stays."""

    def adapted():
        h = fx.data("x", [-1, 128], "float32")
        for k in range(6):
            base = L.fc(h, 128, param_attr=fx.ParamAttr(name=f"w{k}", trainable=False), bias_attr=False)
            low = L.fc(h, 2, param_attr=fx.ParamAttr(name=f"a{k}"), bias_attr=False)
            h = L.relu(base + L.fc(low, 128, param_attr=fx.ParamAttr(name=f"b{k}"), bias_attr=False))
        return L.mean(L.square(h))

    gathered, peaks = {}, {}
    for name, optimizer in {"float32": fx.optimizer.Adam(0.01), "bfloat16": bfloat16(fx.optimizer.Adam(0.01))}.items():
        t = ranks_of(model(optimizer, adapted, 128), fx.strategies.get(strategy), 4)
        gathered[name], peaks[name] = sent(t, "all_gather"), dry_plan(t.get_trainer_program(0), batch=8, fetch=[]).peak_bytes
    assert set(gathered["bfloat16"]) == {"bfloat16"} and 2 * gathered["bfloat16"]["bfloat16"] == gathered["float32"]["float32"]
    assert peaks["bfloat16"] < peaks["float32"]


# -- the proof ----------------------------------------------------------------------------------------------------------------------

CAST = "%w1.bfloat16.again = cast(%w1)"
WRONG = {
    "the cast is of another parameter": (CAST, "%w1.bfloat16.again = cast(%w2)"),
    "the parameter has changed since forward": (CAST, f"%w1 = scale(%w1) {{scale=2.0}}\n  {CAST}"),
    "what is gathered is the cast of another parameter": ("all_gather(%w1.bfloat16.again)", "all_gather(%w2.bfloat16)"),
    "a rank rounds twice": ("all_gather(%w1.bfloat16.again)", "all_gather(%w1)"),
}


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["on all", "on one rank"])
@pytest.mark.parametrize("old, new", WRONG.values(), ids=WRONG)
def test_wrong_casts_are_refused(old, new, ranks):
    t = ranks_of(model(bfloat16(fx.optimizer.SGD(0.1)), lambda: layers(4, bias=False)), fx.strategies.zero3(), 2)
    pairs = [parse_pair(str(ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)))) for r in range(2)]
    verify_ranks(t.source, [p.main for p in pairs], [p.startup for p in pairs])
    for r in ranks:
        assert old in str(pairs[r].main)
        pairs[r] = parse_pair(str(pairs[r]).replace(old, new))
    with pytest.raises(fx.VerifyError):
        verify_ranks(t.source, [p.main for p in pairs], [p.startup for p in pairs])
