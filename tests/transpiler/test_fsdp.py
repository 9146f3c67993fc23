"""Parameters that rest in flat pieces of units: which are a unit, when it is gathered, what a rank holds, and checkpoints."""

import re
import tracemalloc
from collections import Counter

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir import Pieces, Role, Shard, TensorType, Var
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.transpiler.placement.parameter_homes import InFlatUnits
from tests.transpiler.models import MODELS, L, same_answers, written

KB = 1 / 2**10
LAYER = 16 * 16 * 4  # bytes of a layer of `deep`


def deep(layers=4, width=16, scoped=False):
    """Layers of one weight each, trained with Adam, whose state is as large as the parameters twice."""
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, width], "float32")
        for k in range(layers):
            with fx.name_scope(f"block{k // 2}" if scoped else "all"):
                h = L.fc(h, width, act="relu", param_attr=fx.ParamAttr(name=f"w{k}"), bias_attr=False)
        fx.optimizer.Adam(0.01).minimize(L.mean(L.square(h)))
    return main, startup


def made(program, trainers=2, **options):
    t = fx.DistributeTranspiler(fx.strategies.fsdp(**options)).transpile(program=program[0], startup_program=program[1], trainers=trainers)
    t.verify()
    return t


@pytest.mark.parametrize("trainers", [1, 2, 3, 4, 8, fx.Cluster(2, 4)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"units": 0.1 * KB}, {"units": 1.0}, {"units": "parameter", "prefetch": 3}, {"units": "scope", "reshard_after_forward": False}],
    ids=str,
)
def test_a_step_is_one_devices_bit_for_bit(options, trainers):
    model = integer_mlp("sum")
    fetch = [model.loss, *[g for _, g in model.gradients], *[p for p, _ in model.gradients]]
    feeds = [model.feed(24)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, fx.strategies.fsdp(**options), trainers, feeds, fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.array_equal(a, b), name
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


@pytest.mark.parametrize("name", ["gpt", "conv", "lamb", "masked", "branch"])
def test_models_keep_their_answers_without_resharding_and_far_ahead(name):
    same_answers(name, fx.strategies.fsdp(KB, reshard_after_forward=False, prefetch=3), 3)


def test_a_mesh_keeps_what_tp_cuts():
    main, startup = fx.Program("tp"), fx.Program("tp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = L.fc(fx.data("x", [-1, 4], "float64"), 8, act="relu", param_attr=fx.ParamAttr(name="w", placement=Shard(1, "tp")))
        h = L.fc(h, 3, param_attr=fx.ParamAttr(name="v", placement=Shard(0, "tp")), bias_attr=fx.ParamAttr(name="b"))
        loss = L.mean(L.square(h))
        _, pairs = fx.optimizer.Adam(0.1).minimize(loss)
    t = made((main, startup), trainers=fx.Mesh(dp=2, tp=2))
    descs = t.main.global_block().descs
    assert set(descs["w"].placement) == {Shard(1, "tp"), Shard(0, "dp")} and isinstance(descs["b"].placement[0], Pieces)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).standard_normal((rows, 4))}

    same_answers(fx.testing.models.TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs]), "fsdp", fx.Mesh(dp=2, tp=2))


# -- units --------------------------------------------------------------------------------------------------------------------------


def params(*sizes, **dtypes):
    return {f"p{k}": Var(f"p{k}", TensorType(dtypes.get(f"p{k}", "float32"), (size,))) for k, size in enumerate(sizes)}


def test_a_unit_has_at_most_so_many_bytes_or_one_larger_parameter():
    assert InFlatUnits(40 / 2**20).units(params(4, 6, 1, 30, 9, 1)) == [["p0", "p1"], ["p2"], ["p3"], ["p4", "p5"]]


def test_all_of_a_unit_is_cut_evenly():
    # 20 elements one behind the other, 5 for each of four ranks
    entries = InFlatUnits().entries(params(3, 9, 8), "dp", 4)
    assert entries == {"p0": Pieces((0, 3, 3, 3, 3)), "p1": Pieces((0, 2, 7, 9, 9)), "p2": Pieces((0, 0, 0, 3, 8))}


def test_each_dtype_has_a_range_of_its_own_and_one_element_stays_whole():
    entries = InFlatUnits().entries(params(4, 1, 2, p2="float64"), "dp", 2)
    assert entries == {"p0": Pieces((0, 2, 4)), "p2": Pieces((0, 1, 2))}


def test_a_scope_is_a_unit():
    main, _ = deep(scoped=True)
    choice = InFlatUnits("scope").seen(main)
    assert choice.units({p.name: main.global_block().descs[p.name] for p in main.all_parameters()}) == [["w0", "w1"], ["w2", "w3"]]


def test_units_are_in_the_order_in_which_forward_reads():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        made_first = L.create_parameter([4, 4], "float32", name="second")
        h = L.matmul(fx.data("x", [-1, 4], "float32"), L.create_parameter([4, 4], "float32", name="first"))
        L.matmul(h, made_first)
    choice = InFlatUnits(100 / 2**20).seen(main)
    assert choice.units({p.name: main.global_block().descs[p.name] for p in main.all_parameters()}) == [["first"], ["second"]]


@pytest.mark.parametrize("name", ["mlp", "gpt", "attention"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_unit_is_gathered_once_in_a_section_and_its_gradients_scattered_once(name, kept):
    model = written(MODELS[name])
    t = made((model.main, model.startup), 4, units=25, reshard_after_forward=not kept)
    census = Counter(op.type for op in t.main.ops)
    # all of these models is one unit, the one that forward uses last: backward finds it whole
    assert (census["all_gather"], census["reduce_scatter"]) == (1, 1)
    t = made((model.main, model.startup), 4, units=KB, reshard_after_forward=not kept)
    params = {p.name: t.main.global_block().descs[p.name] for p in model.main.all_parameters()}
    units = InFlatUnits(KB).seen(model.main).units(params)
    assert len(units) > 2
    census = Counter(op.type for op in t.main.ops)
    assert census["reduce_scatter"] == len(units)
    # backward needs no unit of which it reads nothing but shapes
    assert census["all_gather"] == len(units) or not kept and len(units) < census["all_gather"] < 2 * len(units)


@pytest.mark.parametrize("kept", [False, True])
def test_a_rank_sends_each_byte_of_a_unit_once_for_each_section_and_once_back(kept):
    layers, ranks = 6, 4
    t = made(deep(layers), ranks, units=2 * LAYER / 2**20, reshard_after_forward=not kept)
    read_in_backward = 0 if kept else layers - 1 - 2  # the first layer's input has no gradient, and the last unit is whole
    share = (ranks - 1) / ranks
    assert [t.traffic(r)["dp"] for r in range(ranks)] == [share * LAYER * (2 * layers + read_in_backward)] * ranks


# -- when -------------------------------------------------------------------------------------------------------------------------


def order(t):
    """The order of gathers ("+w0") and products ("w0") in forward and in backward, of the weights alone."""
    found = {Role.FORWARD: [], Role.BACKWARD: []}
    waiting, here = [], Role.FORWARD
    for op in t.main.ops:
        if op.role in found:
            here = op.role
            found[here] += waiting
            waiting = []
            found[here] += [n[:2] for n in op.input_arg_names if re.fullmatch(r"w\d\.full\d?", n)]
        elif op.type == "all_gather":
            waiting.append(f"+{op.input_arg_names[0][:2]}")
    return " ".join(found[Role.FORWARD]), " ".join(found[Role.BACKWARD])


@pytest.mark.parametrize(
    "ahead, forward, backward",
    [
        (0, "+w0 w0 +w1 w1 +w2 w2 +w3 w3", "w3 +w2 w2 +w1 w1"),
        (1, "+w0 +w1 w0 +w2 w1 +w3 w2 w3", "+w2 w3 +w1 w2 w1"),
        (2, "+w0 +w1 +w2 w0 +w3 w1 w2 w3", "+w2 +w1 w3 w2 w1"),
    ],
)
def test_units_are_gathered_so_many_ahead_and_never_more(ahead, forward, backward):
    t = made(deep(), units=LAYER / 2**20, prefetch=ahead)
    assert order(t) == (forward, backward)  # the gradient of x, which w0 would be for, nothing wants


def test_without_resharding_backward_gathers_nothing():
    t = made(deep(), units=LAYER / 2**20, reshard_after_forward=False)
    assert order(t) == ("+w0 +w1 w0 +w2 w1 +w3 w2 w3", "w3 w2 w1")


def test_nothing_but_gathers_changes_its_order():
    here, ahead = (made(deep(), units=LAYER / 2**20, prefetch=k).main.ops for k in (0, 2))
    assert [op for op in here if op.type != "all_gather"] == [op for op in ahead if op.type != "all_gather"]


# -- what a rank holds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [LAYER / 2**20, "parameter", 25])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_parameters_gradients_and_state_fall_with_the_ranks(ranks, units):
    layers = 16
    t = made(deep(layers), ranks, units=units)
    whole = layers * LAYER
    small = 4 * (1 + 2 * layers)  # the learning rate, and of each parameter the two powers that Adam keeps
    plans = [dry_plan(t.get_trainer_program(r), batch=ranks) for r in range(ranks)]
    assert [p.nbytes("state") for p in plans] == [3 * whole // ranks + small] * ranks
    assert all(p.peak_bytes == p.nbytes("state") + p.nbytes("feed") + p.arena_bytes for p in plans)
    if units != 25 and ranks > 1:
        # shards of all gradients, two units gathered, the gradient that is being made, and what a row of activations takes
        assert max(p.arena_bytes for p in plans) <= whole // ranks + 3 * LAYER + 2 * layers * 16 * 4 + 64 * 3 * layers


@pytest.mark.parametrize("ranks", [2, 4])
def test_startup_makes_no_parameter_whole(ranks):
    layers, width = 8, 64
    t = made(deep(layers, width), ranks)
    for p in (dry_plan(t.get_startup_program(r), fetch=[]) for r in range(ranks)):
        assert p.nbytes("state") == 3 * layers * width * width * 4 // ranks + 4 * (1 + 2 * layers)
        assert p.arena_bytes <= 2 * 64 * (1 + 2 * layers)  # the single numbers, which are broadcast together


def test_a_run_allocates_what_the_plans_say():
    ranks = 4
    t = made(deep(8, 128), ranks, units=128 * 128 * 4 / 2**20)
    feed = {"x": np.ones((ranks, 128), "float32")}
    plans = [dry_plan(t.get_trainer_program(r), batch=ranks, fetch=[]) for r in range(ranks)]
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as exe:
        exe.run_startup()
        tracemalloc.start(4)
        exe.run(feed=feed, fetch_list=[])
        arrays_of_bind = tracemalloc.Filter(True, "*/executor/run/bind.py", all_frames=True, domain=np.lib.tracemalloc_domain)
        arenas = tracemalloc.take_snapshot().filter_traces([arrays_of_bind])
        tracemalloc.stop()
        for scope, plan in zip(exe.scopes, plans, strict=True):
            assert sum(a.nbytes for a in scope.arrays.values()) == plan.nbytes("state")
    held, said = sum(s.size for s in arenas.statistics("filename")), sum(p.arena_bytes for p in plans)
    assert said > 500_000 and abs(held - said) < 0.01 * said  # each begins on a line of the cache


# -- checkpoints, inference --------------------------------------------------------------------------------------------------------


def equal_states(a, b):
    assert a.keys() == b.keys()
    for n in a:
        np.testing.assert_array_equal(a[n], b[n], err_msg=n)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_checkpoint_of_three_ranks_loads_into_others_and_one_device(ranks, tmp_path):
    program = deep()
    feed = {"x": np.random.default_rng(0).standard_normal((6, 16), "float32")}
    with fx.ParallelExecutor(made(program, 3), places=fx.cpu_places(3)) as exe:
        exe.run_startup()
        exe.run(feed=feed, fetch_list=[])
        fx.save(program[0], tmp_path / "m", exe)
        fx.io.save_persistables(exe, tmp_path / "all", program[0])
    kept = fx.io.load_program_state(tmp_path / "m")
    with fx.ParallelExecutor(made(program, ranks, units="parameter"), places=fx.cpu_places(ranks)) as exe:
        exe.run_startup()
        fx.load(program[0], tmp_path / "m", exe)
        equal_states({n: exe.state(n) for n in kept}, kept)
    one = fx.Executor()
    with fx.scope_guard(fx.Scope()):
        fx.io.load_persistables(one, tmp_path / "all", program[0])
        equal_states({n: np.asarray(fx.global_scope().find_var(n).get_tensor()) for n in kept}, kept)


def test_inference_gathers_units_ahead_and_scatters_nothing():
    model = written(MODELS["mlp"])
    test = model.main.clone(for_test=True)
    t = made((test, model.startup), 3, units=KB)
    types = Counter(op.type for op in t.main.ops)
    assert types["all_gather"] and not types["reduce_scatter"]
    logits = next(op for op in test.ops if op.type == "softmax_with_cross_entropy").input("Logits")[0]
    feed = model.feed(8)
    (one,), _ = train_single(model, [feed], [logits])
    with fx.ParallelExecutor(t, places=fx.cpu_places(3)) as exe:
        exe.run_startup()
        np.testing.assert_allclose(exe.run(feed=feed, fetch_list=[logits])[0], one[0], rtol=1e-12)


# -- resharding by block --------------------------------------------------------------------------------------------------------

BY_BLOCK = {  # of blocks 0 to 3, with 2 layers each, the last one stays whatever is asked for
    "all": (True, [0, 1, 2]),
    "none": (False, []),
    "the first two": (2, [0, 1]),
    "more than there are": (9, [0, 1, 2]),
    "no first one": (0, []),
    "one scope": ("block1", [1]),
    "by a pattern": ("block[02]", [0, 2]),
    "by names": (("block0", "block2"), [0, 2]),
    "the last one too": ("block*", [0, 1, 2]),
}


@pytest.mark.parametrize("reshard, again", BY_BLOCK.values(), ids=BY_BLOCK)
@pytest.mark.parametrize("half", [False, True])
def test_blocks_are_resharded_as_asked(reshard, again, half):
    """Backward reads both weights of a block, of block 0 the second alone."""
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = fx.data("x", [-1, 8], "float32")
        for k in range(8):
            with fx.name_scope(f"block{k // 2}"):
                h = L.fc(h, 8, act="relu", param_attr=fx.ParamAttr(name=f"w{k}"), bias_attr=False)
        optimizer = fx.optimizer.SGD(0.01)
        if half:
            optimizer = fx.mixed_precision.decorate(optimizer, dtype="bfloat16", init_loss_scaling=1.0, use_dynamic_loss_scaling=False)
        optimizer.minimize(L.mean(L.square(h)))
    t = made((main, startup), units="scope", reshard_after_forward=reshard)
    found = [k for k in range(4) for op in gathers_for(t, f"w{2 * k + 1}")]
    assert Counter(found) == {k: 2 if k in again else 1 for k in range(4)}


def gathers_for(t, param):
    """The collectives in whose message a parameter, or its cast, is gathered."""
    names, found = {param}, []
    for op in t.main.ops:
        if op.role is Role.DIST and not names.isdisjoint(op.input_arg_names):
            if op.type == "all_gather":
                found.append(op)
            else:
                names.update(op.output_arg_names)
    return found


def test_a_scope_that_no_parameter_has_is_refused():
    with pytest.raises(fx.TranspileError) as e:
        made(deep(scoped=True), units="scope", reshard_after_forward="encoder")
    assert "no parameter of program deep is first read in a scope 'encoder'; scopes of fx.name_scope: block0, block1" in str(e.value)


@pytest.mark.parametrize("reshard", [1, "block0", ("block0", "block1")])
def test_resharding_by_block_has_a_text_and_keeps_the_answers(reshard):
    strategy = fx.strategies.fsdp(units="scope", reshard_after_forward=reshard)
    if not isinstance(reshard, tuple):
        assert repr(fx.strategies.get(str(strategy))) == repr(strategy)
    with fx.name_scope("block0"):
        same_answers("mlp", fx.strategies.fsdp(KB, reshard_after_forward=2), 3)


# -- options -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"units": "layer"}, 'fsdp: units is a number of MiB above 0, "scope" or "parameter", got \'layer\''),
        ({"units": 0}, 'fsdp: units is a number of MiB above 0, "scope" or "parameter", got 0'),
        ({"prefetch": -1}, "fsdp: prefetch is a number of units, 0 or more, got -1"),
        ({"prefetch": 1.5}, "fsdp: prefetch is a number of units, 0 or more, got 1.5"),
        (
            {"reshard_after_forward": 0.5},
            "fsdp: reshard_after_forward is True, False, a number of units, or names of fx.name_scope such as 'block*', got 0.5",
        ),
        (
            {"reshard_after_forward": ()},
            "fsdp: reshard_after_forward is True, False, a number of units, or names of fx.name_scope such as 'block*', got ()",
        ),
        ({"cpu_offload": "params"}, "fsdp: cpu_offload is True or False, got 'params'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(fx.TranspileError) as e:
        fx.strategies.fsdp(**options)
    assert str(e.value).startswith(message)
