"""Collectives that ranks carry out by messages, in closed form: rounds worked by hand, and the same as message by message."""

from math import inf

import pytest

import fluidx as fx
from fluidx.simulator.network import PortFigures, hosts_with_ports
from fluidx.simulator.round_times import RoundTimes

INSIDE, BETWEEN = PortFigures(1e-6, 1e9), PortFigures(1e-5, 1e8)


def times(host_of, add=lambda nbytes: 0.0):
    return RoundTimes(hosts_with_ports(host_of, INSIDE, BETWEEN), add)


def test_doubling_sends_the_whole_value_in_each_of_two_rounds():
    found = times([0] * 4).seconds("recursive_doubling", "all_reduce", [(0, 1, 2, 3)], 1e6)
    assert found == pytest.approx(2 * (1e-6 + 1e6 / 1e9))


def test_a_ring_adds_a_quarter_in_each_of_its_first_three_rounds():
    found = times([0] * 4, add=lambda nbytes: nbytes / 1e8).seconds("ring", "all_reduce", [(0, 1, 2, 3)], 1e6)
    assert found == pytest.approx(6 * (1e-6 + 2.5e5 / 1e9) + 3 * 2.5e5 / 1e8, rel=1e-5)


def test_sets_that_send_at_the_same_time_share_the_card_of_a_host():
    """Two hosts of two: on the rails (0, 2) and (1, 3) a ring of two has 2 rounds of half the value, of both rails over one card."""
    one, both = (times([0, 0, 1, 1]).seconds("ring", "all_reduce", rails, 1e6) for rails in ([(0, 2)], [(0, 2), (1, 3)]))
    assert one == pytest.approx(2 * (1e-5 + 5e5 / 1e8)) and both == pytest.approx(2 * (1e-5 + 2 * 5e5 / 1e8))


def test_a_value_with_one_owner_travels_whole():
    """From rank 0 around a chain of three others: a tree needs two rounds of all bytes."""
    found = times([0] * 4).seconds("tree", "spread", [(0, 1, 2, 3)], 1e6, rooted=True)
    assert found == pytest.approx(2 * (1e-6 + 1e6 / 1e9))


def test_a_root_that_hands_out_parts_sends_one_to_each_other_rank():
    """4 MB for 4 ranks: at once, three messages of 1 MB over the port of the root."""
    found = times([0] * 4).seconds("direct", "exchange", [(0, 1, 2, 3)], 4e6, rooted=True)
    assert found == pytest.approx(1e-6 + 3 * 1e6 / 1e9)


def test_an_algorithm_of_too_many_messages_has_no_time():
    ranks = tuple(range(1024))
    assert times([0] * 1024).seconds("direct", "all_reduce", [ranks], 1e6) == inf


def transpiled(strategy, hosts):
    main, startup = fx.Program("line"), fx.Program("line_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, 2048], "float32")
        for _ in range(2):
            h = fx.layers.fc(h, 2048, bias_attr=False)
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    cluster = fx.Cluster.load("dgx-a100", hosts=hosts)
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=cluster)


@pytest.mark.parametrize("algorithm", ["", "auto", "recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_one_rank_for_all_takes_as_long_as_message_by_message(algorithm, hosts):
    """One bucket, so that no collective waits for another one."""
    t = transpiled(fx.strategies.data_parallel(bucket_mb=100, algorithm=algorithm), hosts)
    folded, exact = (fx.simulate(t, batch=8 * hosts, verify=False, exact=e).seconds for e in (0, 1))
    assert t.messages > 0 and folded == pytest.approx(exact, rel=0.01)


def test_algorithms_differ_also_if_one_rank_stands_for_all():
    some = [transpiled(fx.strategies.data_parallel(**o), 8) for o in ({}, {"algorithm": "auto"}, {"hierarchical": False})]
    assert len({fx.simulate(t, batch=64, verify=False, exact=0).seconds for t in some}) == 3


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", "data_parallel{algorithm=ring}"])
def test_ranks_that_share_a_plan_take_as_long_as_ranks_planned_one_by_one(strategy):
    """On two hosts the ranks differ in messages of collectives alone, in which each has other peers and blocks."""
    t = transpiled(fx.strategies.get(strategy), 2)
    shared, apart = (fx.simulate(t, batch=16, verify=False, exact=e).seconds for e in (1, 64))
    assert shared == pytest.approx(apart, rel=0.01)
