"""The cost of collectives: closed forms, work of rounds, and what algorithm="auto" chooses."""

from math import log2

import pytest

import fluidx as fx
from fluidx.ops.comm.volume import PASSES, share
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.transpiler.algorithms import SEQUENCES, Grid, algorithm
from fluidx.transpiler.algorithms.cost import over_hosts, rounds_work, sequence_seconds
from fluidx.transpiler.cluster import Link, Links
from tests.each import each
from tests.sweep import swept


@each("n", [2, 3, 5, 8, 9])
@each("name", ["ring", "direct"])
def test_what_all_ranks_send_by_rounds_that_send_nothing_twice_is_the_closed_form(name, n):
    for method in ("all_reduce", "reduce", "spread", "exchange"):
        assert rounds_work(algorithm(name), method, n).total / n == pytest.approx(share(method, n), rel=1e-4)


def test_a_rank_that_adds_in_halves_sends_no_less_than_its_share_and_pairs_send_all_they_have():
    for n in (2, 4, 8, 16):
        assert rounds_work(algorithm("halving_doubling"), "all_reduce", n) == pytest.approx((2 * log2(n), 2 * (n - 1) / n, 2 * (n - 1)))
        assert rounds_work(algorithm("recursive_doubling"), "all_reduce", n) == pytest.approx((log2(n), log2(n), n * log2(n)))
        assert share("adaptive", n) == log2(n)


def test_among_many_ranks_a_share_is_how_often_the_value_passes():
    for method, passes in PASSES.items():
        assert share(method, 10**9) == pytest.approx(passes)


def transpiled(cluster, width=64, **options):
    main, startup = fx.Program("square"), fx.Program("square_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, width], "float32")
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(x, width, bias_attr=False)))
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(algorithm="auto", **options))
    return t.transpile(program=main, startup_program=startup, trainers=cluster)


def sums(t):
    return {(op.type, op.attrs["group"], op.attrs.get("algorithm", "")) for op in t.main.ops if op.attrs.get("op") == "sum"}


SLOW_CALLS = Links(shared=Link(1e-3, 1e-9), inside=Link(1e-5, 1e-9))


def test_on_one_host_the_communicator_is_chosen_unless_its_calls_are_dear():
    assert sums(transpiled(4)) == {("all_reduce", "dp", "")}
    assert sums(transpiled(fx.Mesh(dp=4))) == {("all_reduce", "dp", "")}
    t = transpiled(fx.Cluster(1, 4, links=SLOW_CALLS))
    assert sums(t) == {("all_reduce", "dp", "recursive_doubling")}
    t.verify()
    slow = Links(shared=Link(0.1, 1e-9), inside=Link(1e-5, 1e-9))
    assert sums(transpiled(fx.Cluster(1, 4, links=slow), 512)) == {("all_reduce", "dp", "halving_doubling")}  # 1 MiB: fewer bytes count


def test_on_several_hosts_two_levels_rails_or_one_algorithm_are_chosen():
    assert ("all_reduce", "rail", "recursive_doubling") in sums(transpiled(fx.Cluster(4, 2)))
    flat = transpiled(fx.Cluster(4, 2, links=SLOW_CALLS))
    assert sums(flat) == {("all_reduce", "dp", "recursive_doubling")}
    said = next(str(line) for line in flat.explain() if "8 ranks, 16384 bytes" in str(line))
    assert said.startswith("%fc_0.w_0@GRAD.sum: all_reduce over dp, 8 ranks, 16384 bytes: recursive_doubling 49.9 us; hierarchical ")
    flat.verify()
    both = over_hosts("all_reduce", Grid(4, 8), 10**9, Links(between=Link(1e-6, 1e-9), shared=Link(1e-6, 1e-9)))
    assert [e.name for e in both[:2]] == ["rails", "hierarchical"]  # slices are between the hosts while others are inside of them


def test_hierarchical_true_and_false_leave_no_choice_between_levels():
    assert ("all_reduce", "rail", "recursive_doubling") in sums(transpiled(fx.Cluster(4, 2, links=SLOW_CALLS), hierarchical=True))
    assert sums(transpiled(fx.Cluster(4, 2), hierarchical=False)) == {("all_reduce", "dp", "recursive_doubling")}


def test_the_time_of_a_sequence_is_that_of_its_stages():
    between, shared = Link(1e-5, 1e-9), Link(1e-6, 1e-10)
    links, nbytes, hosts, devices = Links(between, Link(1, 1), shared), 10**6, 4, 8
    inside = 2 * (1e-6 + 7 / 8 * nbytes * 1e-10)
    rail = 4 * 1e-5 + 2 * 3 / 4 * nbytes / devices * 1e-9  # halving and doubling among four
    pairs = 2 * 1e-5 + 2 * nbytes / devices * 1e-9
    found = sequence_seconds(SEQUENCES["hierarchical"], "all_reduce", Grid(hosts, devices), nbytes, links)
    assert found == pytest.approx(inside + min(rail, pairs), rel=1e-4)
    direct = 2 * (3 * 1e-5 + 3 / 4 * nbytes / devices * 1e-9)
    found = sequence_seconds(SEQUENCES["rails"], "all_reduce", Grid(hosts, devices), nbytes, links)
    assert found == pytest.approx(inside + direct, rel=1e-4)


@swept(2, strategy=["data_parallel", "zero1", "fsdp", "reduce_broadcast"], links={"usual": Links(), "slow calls": SLOW_CALLS})
def test_what_is_chosen_trains_bit_for_bit(strategy, links):
    model = integer_mlp()
    (one,), scope = train_single(model, [model.feed(24)], [model.loss])
    for hosts, devices in ((1, 3), (1, 4), (2, 2), (3, 1), (2, 3)):
        cluster = fx.Cluster(hosts, devices, links=links)
        (many,), state = train_ranks(model, fx.strategies.get(strategy, algorithm="auto"), cluster, [model.feed(24)], [model.loss])
        assert (one[0] == many[0]).all() and all((scope.get(p) == state[p]).all() for p, _ in model.gradients)


def test_what_are_no_links_is_refused():
    with pytest.raises(fx.TranspileError, match="Cluster: links are Links"):
        fx.Cluster(2, 2, links=(1, 2))
