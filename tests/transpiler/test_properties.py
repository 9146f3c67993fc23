"""What holds for every model, strategy and cluster: random models, transpiled, proved, printed, parsed and run."""

import zlib
from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.ir import Role, Shard
from fluidx.ir.parts import coords_of, holds, local_shape
from fluidx.testing.models import classifier, train_single
from fluidx.transpiler.placement.roots import assign, cut
from tests.sweep import examples
from tests.transpiler.random_models import build, recipes

strategies = st.one_of(
    st.just(fx.strategies.data_parallel()),
    st.builds(fx.strategies.reduce_broadcast, st.sampled_from(["greedy", "hash"])),
    st.builds(fx.strategies.ring_optimizer, st.sampled_from([4, 64 / 2**20, 36 / 2**20]), st.sampled_from(["greedy", "hash"])),
    st.builds(fx.strategies.zero1),
    st.builds(fx.strategies.zero2),
    st.builds(fx.strategies.zero3, reshard_after_forward=st.booleans()),
    st.builds(fx.strategies.fsdp, st.sampled_from([1e-4, 25, "scope", "parameter"]), st.booleans(), st.integers(0, 3)),
)
clusters = st.one_of(st.integers(1, 5), st.sampled_from([fx.Cluster(2, 2), fx.Cluster(3, 1), fx.Cluster(2, 3), fx.Mesh(dp=2, tp=2)]))
several = settings(max_examples=examples(10, 100), deadline=None, suppress_health_check=list(HealthCheck))


def transpiled(model, strategy, trainers):
    t = fx.DistributeTranspiler(strategy)
    return t.transpile(program=model.main, startup_program=model.startup, trainers=trainers)


def same_as(one, scope, model, t, feeds):
    """Train the ranks, and compare losses and state with one device's."""
    with fx.ParallelExecutor(t, places=fx.cpu_places(t.world_size), timeout=20) as exe:
        exe.run_startup()
        many = [exe.run(feed=f, fetch_list=[model.loss]) for f in feeds]
        # the order of additions differs; Adam and its kin divide by the root of a small moment, which magnifies that
        np.testing.assert_allclose(many[0], one[0], rtol=1e-12)
        np.testing.assert_allclose(many[1], one[1], rtol=1e-6)
        for d in model.main.global_block().descs.values():
            if d.persistable:
                np.testing.assert_allclose(exe.state(d.name), scope.get(d.name), rtol=1e-5, atol=1e-7, err_msg=d.name)


@several
@given(recipes, strategies, clusters)
def test_a_transpile_is_proved_and_leaves_its_input_alone(recipe, strategy, trainers):
    model = build(recipe)
    before = str(model.main), str(model.startup)
    versions = model.main.version, model.startup.version
    t = transpiled(model, strategy, trainers)
    report = t.verify()
    assert report.parameters == len(model.main.all_parameters())
    assert (str(model.main), str(model.startup)) == before
    assert (model.main.version, model.startup.version) == versions


@several
@given(recipes, strategies, clusters)
def test_every_program_parses_back_and_a_second_transpile_prints_the_same(recipe, strategy, trainers):
    model = build(recipe)
    t, again = transpiled(model, strategy, trainers), transpiled(model, strategy, trainers)
    for rank in [None, *range(t.world_size)]:
        for get in ("get_trainer_program", "get_startup_program"):
            p, q = (t.main, again.main) if rank is None else (getattr(t, get)(rank), getattr(again, get)(rank))
            text = str(p)
            assert fx.Program.parse_from_string(text) == p
            assert str(q) == text


@several
@given(recipes, strategies, clusters, st.sampled_from([12, 7, 2]))
def test_two_steps_give_one_devices_losses_and_state(recipe, strategy, trainers, rows):
    model = build(recipe)
    t = transpiled(model, strategy, trainers)
    feeds = [model.feed(rows, k) for k in range(2)]
    one, scope = train_single(model, feeds, [model.loss])
    same_as(one, scope, model, t, feeds)


@several
@given(recipes, strategies, clusters)
def test_every_update_is_made_on_all_ranks_or_each_of_its_elements_once_in_a_group(recipe, strategy, trainers):
    model = build(recipe)
    t = transpiled(model, strategy, trainers)
    descs = t.main.global_block().descs
    updates = [op for op in t.main.ops if op.role is Role.OPTIMIZE and op.output("ParamOut")]
    wanted = Counter(n for op in model.main.ops if op.role is Role.OPTIMIZE for n in op.output("ParamOut"))
    assert Counter(n.removesuffix(".new") for op in updates for n in op.output("ParamOut")) == wanted
    dp = len(t.main.groups["dp"][0])
    for (n,) in (op.output("ParamOut") for op in updates):
        elements = [prod(local_shape(descs[n].type.shape, descs[n].placement, coords_of(t.main.groups, r))) for r in t.main.groups["dp"][0]]
        held = [holds(descs[n].placement, coords_of(t.main.groups, r)) for r in t.main.groups["dp"][0]]
        made = sum(k for k, here in zip(elements, held, strict=True) if here)
        assert made in (descs[n].type.numel, dp * descs[n].type.numel), (n, descs[n].placement)
    for op in updates:  # state lies where its parameter is updated
        place = descs[op.output("ParamOut")[0]].placement
        for slot, names in op.outputs.items():
            assert slot == "ParamOut" or all(descs[n].placement == place or descs[n].type.numel == 1 for n in names), op


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 9), st.integers(16, 4096), st.sampled_from(["greedy", "hash"])
)
@settings(max_examples=100, deadline=None)
def test_chunks_cover_their_parameter_and_greedy_roots_are_balanced(sizes, ranks, chunk, method):
    chunks = [c for k, n in enumerate(sizes) for c in cut(f"p{k}", n, 4, chunk)]
    rooted = assign(chunks, ranks, method)
    for k, n in enumerate(sizes):
        mine = [c for c in rooted if c.param == f"p{k}"]
        assert [c.start for c in mine] == [0, *(c.stop for c in mine[:-1])] and mine[-1].stop == n
        assert all(c.nbytes == 4 * (c.stop - c.start) <= max(chunk, 4) for c in mine)
    assert all(0 <= c.root < ranks for c in rooted)
    if method == "greedy":
        loads = [sum(c.nbytes for c in rooted if c.root == r) for r in range(ranks)]
        # Graham's bound: no rank holds more than the mean and one largest chunk
        assert max(loads) <= sum(loads) / ranks + max(c.nbytes for c in rooted)


def test_hash_roots_are_the_same_in_every_process_and_version():
    chunks = [c for name in ("fc_0.w_0", "fc_0.b_0", "conv2d_1.w_0") for c in cut(name, 100, 4, 160)]
    assert [c.root for c in assign(chunks, 4, "hash")] == [zlib.crc32(f"{c.param}:{c.start}".encode()) % 4 for c in chunks]
    assert [c.root for c in assign(chunks, 4, "hash")] == [0, 2, 1, 2, 2, 1, 1, 3, 0]


@pytest.mark.parametrize("strategy", [s for s in fx.strategies.CATALOGUE if s not in ("rails", "parameter_server")])  # which need more
def test_one_rank_is_legal_and_needs_no_message(strategy):
    t = transpiled(classifier(), strategy, 1)
    t.verify()
    sent = [op.type for op in (*t.get_trainer_program(0).ops, *t.get_startup_program(0).ops) if op.type in ("send", "recv")]
    assert not sent


@several
@given(
    recipes,
    strategies,
    st.sampled_from([fx.Mesh(dp=2, tp=2), fx.Mesh(dp=1, tp=3), fx.Mesh(tp=2, dp=2)]),
    st.sampled_from([7, 2]),
    st.data(),
)
def test_any_cut_of_any_parameters_gives_one_devices_losses_and_state(recipe, strategy, mesh, rows, data):
    model = build(recipe)
    feeds = [model.feed(rows, k) for k in range(2)]
    one, scope = train_single(model, feeds, [model.loss])
    descs = model.main.global_block().descs
    for p in model.main.all_parameters():
        axis = data.draw(st.sampled_from([None, *range(len(p.shape))]), label=p.name)
        if axis is not None:
            descs[p.name] = descs[p.name].changed(placement=(Shard(axis, "tp"),))
    t = transpiled(model, strategy, mesh)
    t.verify()
    same_as(one, scope, model, t, feeds)
