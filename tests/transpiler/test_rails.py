"""Rails: slices in slots in shards, their order, what crosses the network, and one device's answers."""

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluidx as fx
from fluidx.executor.plan.dry_run import dry_plan
from fluidx.ir.errors import TranspileError
from fluidx.ir.parts import bounds, coords_of, intervals
from fluidx.ir.types import Shard
from fluidx.testing.models import classifier, integer_mlp, train_ranks, train_single
from fluidx.transpiler.lowering.slices import SlicePosition, element_at, position_of, slices, steps

few = st.integers(1, 5)


@given(st.integers(1, 200), st.integers(1, 50))
def test_slices_are_alike_and_none_is_too_large(size, most):
    found = slices(size, most)
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])] and found[-1][1] == size
    sizes = {b - a for a, b in found}
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1 and len(found) == -(-size // most)


@given(st.integers(1, 60), st.integers(1, 30), few, few)
def test_every_element_is_in_one_shard_of_one_slot_of_one_slice(size, most, hosts, each):
    groups = {"node": [], "rail": [], **fx.Cluster(hosts, each).groups()}
    if hosts == 1:
        groups["node"], groups["rail"] = (tuple(range(each)),), tuple((k,) for k in range(each))
    seen = []
    for a, b in slices(size, most):
        for rank in range(hosts * each):
            coords = coords_of(groups, rank)
            (slot,) = intervals((b - a,), (Shard(0, "node"),), coords)
            (shard,) = intervals((b - a,), (Shard(0, "node"), Shard(0, "rail")), coords)
            assert slot[0] <= shard[0] <= shard[1] <= slot[1]
            seen += [(a + k, rank) for k in range(*shard)]
    assert sorted(k for k, _ in seen) == list(range(size))


@given(st.integers(1, 300), st.integers(1, 50), few, few)
def test_the_index_map_is_a_bijection_onto_the_shards(size, most, devices, hosts):
    shape = size, most, devices, hosts
    positions = [position_of(k, *shape) for k in range(size)]
    assert [element_at(p, *shape) for p in positions] == list(range(size))
    assert positions == sorted(positions)  # slices, slots and shards continue each other
    there = set()
    for s, (a, b) in enumerate(slices(size, most)):
        for slot, (c, d) in enumerate(pairwise(bounds(b - a, devices))):
            for shard, (e, f) in enumerate(pairwise(bounds(d - c, hosts))):
                there |= {SlicePosition(s, slot, shard, k) for k in range(f - e)}
    assert set(positions) == there


@pytest.mark.parametrize("cluster", [fx.Cluster(2, 2), fx.Cluster(3, 1), fx.Cluster(3, 2), fx.Cluster(2, 5)], ids=str)
def test_the_index_map_says_which_rank_adds_up_an_element_of_the_program(cluster):
    most, width = 29, 11
    t = transpiled(cluster, width, slice_mb=4 * most / 2**20, staging_mb=8 * most / 2**20)
    block, hosts, each = t.main.global_block(), cluster.hosts, cluster.devices_per_host
    cuts = [(op.attrs["start"], op.attrs["stop"], op.output_arg_names[0]) for op in t.main.ops if op.type == "chunk"]
    for element in range(width * width):
        where = position_of(element, width * width, most, each, hosts)
        assert element_at(where, width * width, most, each, hosts) == element
        start, stop, name = cuts[where.slice]
        coords = coords_of(cluster.groups(), where.shard * each + where.slot)
        ((a, b),) = intervals((stop - start,), block.desc(f"{name}.shard").placement, coords)
        assert start + a + where.offset == element < start + b


@given(st.integers(0, 20), few, st.integers(1, 12))
def test_slices_go_through_their_stages_and_no_more_are_on_their_way_than_may(count, stages, in_flight):
    order = [s for now in steps(count, stages, in_flight) for s in now]
    assert sorted(order) == [(k, stage) for k in range(count) for stage in range(stages)]
    for k in range(count):
        assert [s.stage for s in order if s.slice == k] == list(range(stages))
    on_their_way = set()
    for now in steps(count, stages, in_flight):
        on_their_way |= {s.slice for s in now}
        assert len(on_their_way) <= in_flight
        on_their_way -= {s.slice for s in now if s.stage == stages - 1}


def test_what_the_next_slice_brings_stands_before_what_this_one_does_next():
    order = [s for now in steps(3, stages=4, in_flight=4) for s in now]
    for k in range(2):
        for stage in range(1, 4):
            assert order.index((k + 1, stage - 1)) < order.index((k, stage))


SMALL = {"slice_mb": 40 / 2**20, "staging_mb": 80 / 2**20}  # ten numbers each, two at a time


@pytest.mark.parametrize("cluster", [fx.Cluster(2, 2), fx.Cluster(2, 4), fx.Cluster(3, 1), fx.Cluster(3, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, SMALL, {**SMALL, "parallelism": 1}], ids=["one slice", "slices", "one at a time"])
def test_training_over_rails_is_bit_equal(options, cluster):
    model = integer_mlp()
    fetch, feeds = [model.loss, *[g for _, g in model.gradients]], [model.feed(24)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, fx.strategies.rails(**options), cluster, feeds, fetch)
    assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))
    assert all(np.array_equal(scope.get(p), state[p]) for p, _ in model.gradients)


def test_a_norm_and_random_data_go_over_rails_too():
    model = classifier(fx.optimizer.Adam(0.01, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)))
    feeds = [model.feed(24, k) for k in range(3)]
    one, _ = train_single(model, feeds, [model.loss])
    many, _ = train_ranks(model, fx.strategies.rails(**SMALL), fx.Cluster(2, 2), feeds, [model.loss])
    np.testing.assert_allclose(many, one, rtol=1e-5)  # the order of additions differs: a few units in the last place a step


def transpiled(cluster, width=64, **options):
    main, startup = fx.Program("square"), fx.Program("square_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, width], "float32")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(x, width, bias_attr=False)))
    return fx.DistributeTranspiler(fx.strategies.rails(**options)).transpile(program=main, startup_program=startup, trainers=cluster)


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_hops_do_not_grow_with_the_hosts_and_bytes_are_the_closed_form(hosts):
    each, size = 2, 64 * 64
    t = transpiled(fx.Cluster(hosts, each))
    for rank in range(hosts * each):
        sends = [op for op in t.get_trainer_program(rank).ops if op.type == "send"]
        assert len({op.attrs["batch"] for op in sends}) == 2 and len(sends) == 2 * (hosts - 1)
        assert all(op.attrs["peer"] % each == rank % each for op in sends)  # to devices of its number only
        assert t.traffic(rank)["rail"] == 2 * (hosts - 1) / hosts * 4 * size / each


def test_slices_that_are_as_far_share_their_batches_and_staging_bounds_them():
    t = transpiled(fx.Cluster(2, 2), slice_mb=64 * 64 / 2**20, staging_mb=3 * 64 * 64 / 2**20)
    assert t.explain()[-1] == (
        "%fc_0.w_0@GRAD.sum: 4 slices over the rails, 3 at a time: 12.3 KB staged; finished slices stay until all 16.4 KB are there"
    )
    begun, ended, most = set(), set(), 0
    for op in t.get_trainer_program(0).ops:
        for n in op.output_arg_names:
            if ".slice" in n:
                k = n.partition(".slice")[2][0]
                begun.add(k)
                if n.endswith(".full"):
                    ended.add(k)
        most = max(most, len(begun - ended))
    assert most == 3 and len(ended) == 4
    batches = [op.attrs["batch"] for op in t.get_trainer_program(0).ops if op.type == "send"]
    assert len(batches) == 8 > len(set(batches))


@pytest.mark.parametrize("cluster", [fx.Cluster(2, 2), fx.Cluster(4, 2), fx.Cluster(3, 1), fx.Cluster(8, 2), fx.Cluster(2, 4)], ids=str)
@pytest.mark.parametrize("slices, parallelism", [(2, 4), (4, 4), (8, 8), (20, 32)])
def test_beside_a_gradient_and_its_sum_a_rank_has_no_more_than_the_staging(cluster, slices, parallelism):
    width, slice_mb = 512, 0.05
    t = transpiled(cluster, width, slice_mb=slice_mb, staging_mb=slices * slice_mb, parallelism=parallelism)
    plan = dry_plan(t.get_trainer_program(0), batch=cluster.world_size)
    small = 64 * 1024  # of activations
    assert plan.arena_bytes <= 2 * 4 * width * width + slices * slice_mb * 2**20 + small
    made = [plan.values[n] for n in plan.values if n.endswith(".full" if cluster.devices_per_host > 1 else ".sum") and ".slice" in n]
    whole = plan.values["fc_0.w_0@GRAD.sum"].buffer
    assert len(made) == 21 and {v.buffer for v in made} == {whole}  # finished slices are made in their places in the sum


def test_one_slice_at_a_time_takes_no_more_than_half_of_it_beside_it():
    for cluster in (fx.Cluster(2, 2), fx.Cluster(8, 2), fx.Cluster(8, 1)):
        t = transpiled(cluster, 512, slice_mb=0.2, staging_mb=0.2)
        plan = dry_plan(t.get_trainer_program(0), batch=cluster.world_size)
        assert plan.arena_bytes <= 2 * 4 * 512 * 512 + 1.5 * 0.2 * 2**20


@pytest.mark.parametrize("hosts, together", [(2, 6), (8, 6), (16, 12), (32, 25)])
def test_automatic_buckets_grow_with_the_hosts_and_are_one_slice_each(hosts, together):
    main, startup = fx.Program("deep"), fx.Program("deep_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 1024], "float32")
        for _ in range(40):  # of 4 MiB each, and the limits are 25, 50 and 100
            x = fx.layers.fc(x, 1024, bias_attr=False)
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(x))
    t = fx.DistributeTranspiler(fx.strategies.rails(bucket_mb="auto"))
    t.transpile(program=main, startup_program=startup, trainers=fx.Cluster(hosts, 2))
    packed = [len(op.input_arg_names) for op in t.main.ops if op.type == "pack"]
    assert max(packed) == together and sum(packed) >= 40 - together  # the first, and the rest, are smaller
    assert all(": 1 slice over" in line for line in t.explain() if "over the rails" in line)


def test_automatic_buckets_are_bit_equal():
    model, options = integer_mlp(), {**SMALL, "bucket_mb": "auto"}
    (one,), scope = train_single(model, [model.feed(24)], [model.loss])
    (many,), state = train_ranks(model, fx.strategies.rails(**options), fx.Cluster(12, 1), [model.feed(24)], [model.loss])
    assert np.array_equal(one, many) and all(np.array_equal(scope.get(p), state[p]) for p, _ in model.gradients)


def message(call):
    with pytest.raises(TranspileError) as e:
        call()
    return str(e.value)


def test_what_cannot_be_is_refused():
    assert message(lambda: transpiled(4)) == (
        "rails needs several hosts: transpile(trainers=fx.Cluster(hosts=2, devices_per_host=4)); on one host, "
        "take data_parallel in its place"
    )
    assert message(lambda: transpiled(fx.Mesh(dp=2, tp=2))) == (
        "rails goes over the hosts of a Cluster, whose one axis is dp; with Mesh(dp=2, tp=2), take data_parallel in its place"
    )
    assert message(lambda: transpiled(["a:1", "a:2", "b:1"])) == (
        "every host must have the same number of ranks: a has 2, b has 1; list as many endpoints for each"
    )
    assert message(lambda: fx.strategies.rails(slice_mb=0)) == "rails: slice_mb must be a finite number of MiB above 0, got 0"
    assert message(lambda: fx.strategies.rails(slice_mb=inf, staging_mb=inf)) == (
        "rails: slice_mb must be a finite number of MiB above 0, got inf"
    )
    assert message(lambda: fx.strategies.rails(bucket_mb="large")) == (
        'rails: bucket_mb is a number of MiB, 0 or more, or "auto", got \'large\''
    )
    assert message(lambda: fx.strategies.rails(bucket_mb=-1)) == "rails: bucket_mb must be a number of MiB, 0 or more, got -1"
    assert message(lambda: fx.strategies.rails(parallelism=0)) == "rails: parallelism must be a number of slices of at least 1, got 0"
    assert message(lambda: fx.strategies.rails(slice_mb=60)) == (
        "rails: staging_mb=50 has no room for a slice of slice_mb=60; give it room for two"
    )
