"""Times of collectives, worked by hand on a small machine, and compared with what is published of real ones."""

from dataclasses import replace
from itertools import product

import pytest

from fluidx import FluidxError
from fluidx.hardware import Device, Figure, Hardware, LinkFigures, SwitchFigures, load
from fluidx.simulator.collective_times import METHODS, PIECE, SLICE, CollectiveTimes, GroupShape
from fluidx.simulator.machine_prices import Factors, MachinePrices
from tests.each import each


def figure(value):
    return Figure(value, "an example")


ONE = figure(1.0)
DEVICE = Device("toy", "gpu", figure(1e9), {"float32": figure(1e12)}, ONE, figure(1e11), ONE, figure(1e-6), ONE, figure(1e6))
INSIDE = LinkFigures(figure(1e-6), figure(100e9), by_group={2: figure(40e9), 4: figure(80e9)}, collective_latency=figure(10e-6))
BETWEEN = LinkFigures(figure(5e-6), figure(10e9), count=2)
TOY = Hardware("toy", "hosts of four toys with two cards", 4, None, DEVICE, INSIDE, BETWEEN, figure(1e9))
BIG = 1 << 30


def seconds(method, ranks, nbytes, sharing=1, of=TOY):
    return CollectiveTimes(of).seconds(method, list(ranks), nbytes, sharing)


@each("method", METHODS)
def test_one_rank_takes_no_time_and_an_empty_value_takes_the_latency(method):
    assert seconds(method, [3], BIG) == 0
    assert 5e-6 <= seconds(method, range(4), 0) <= 20e-6


def test_a_ring_inside_a_host_by_hand():
    # 10 us, 2 x 3 messages of 1 us, and 2 x 3/4 of 80 MB at 80 GB/s
    assert seconds("all_reduce", range(4), 80e6) == pytest.approx(10e-6 + 6e-6 + 1.5e-3)
    assert seconds("reduce", range(4), 80e6) == seconds("spread", range(4), 80e6) == pytest.approx(8e-6 + 0.75e-3)
    # a pair has half of the bandwidth: 2 messages, and 80 MB at 40 GB/s
    assert seconds("all_reduce", [0, 1], 80e6) == pytest.approx(12e-6 + 2e-3)


def test_an_all_reduce_of_large_values_is_a_reduce_scatter_and_an_all_gather():
    for ranks in (range(2), range(4), range(8), range(0, 16, 4), range(16)):
        apart = seconds("reduce", ranks, BIG) + seconds("spread", ranks, BIG)
        assert seconds("all_reduce", ranks, BIG) == pytest.approx(apart)
        assert seconds("all_reduce", ranks, 64) <= seconds("reduce", ranks, 64) + seconds("spread", ranks, 64)


def test_a_small_all_reduce_takes_a_tree():
    eight = replace(TOY, devices_per_host=8)  # 2 log2 8 messages, not the 14 of a ring
    assert seconds("all_reduce", range(8), 0, of=eight) == pytest.approx(10e-6 + 6e-6)
    assert seconds("all_reduce", range(4), 0) == pytest.approx(10e-6 + 4e-6)


def test_over_hosts_the_longer_of_both_levels_counts_and_one_slice_of_the_other():
    n = 1e9
    inside, between = 2 * 3 / 4 * n / 80e9, 2 * 1 / 2 * n / 20e9  # two cards of 10 GB/s carry what the host sends
    latency = 10e-6 + 2 * (3 * 1e-6 + 5e-6)
    assert seconds("all_reduce", range(8), n) == pytest.approx(latency + between + inside * SLICE / n)
    # by up to a slice, one level comes after the other
    small = 1e6
    ring = latency + 1.5 * small / 80e9 + small / 20e9
    tree = 10e-6 + 2 * (2 * 1e-6 + 5e-6) + 2 * small * (2 / 80e9 + 1 / 20e9)
    assert seconds("all_reduce", range(8), small) == pytest.approx(min(ring, tree))


def test_groups_that_use_the_cards_at_the_same_time_share_them():
    rail, n = (0, 4, 8, 12), 1e9
    bytes_out = 2 * 3 / 4 * n
    latency = 10e-6 + 2 * 3 * 5e-6
    assert seconds("all_reduce", rail, n) == pytest.approx(latency + bytes_out / 10e9)  # one device has one of the two cards
    assert seconds("all_reduce", rail, n, sharing=2) == pytest.approx(latency + bytes_out / 10e9)  # and so has the other
    assert seconds("all_reduce", rail, n, sharing=4) == pytest.approx(latency + bytes_out / 5e9)
    times = CollectiveTimes(TOY)
    assert times.sharing([range(r, 16, 4) for r in range(4)]) == 4
    assert times.sharing([range(0, 8), range(8, 16)]) == times.sharing([range(0, 4)]) == 1


def test_all_to_all_sends_a_part_to_each():
    n = 16e8  # each of 4 ranks sends 3 parts of a 16th
    assert seconds("exchange", range(4), n) == pytest.approx(10e-6 + 3e-6 + 3e8 / 80e9)
    # each of 8 ranks sends 4 parts of a 64th out of its host: 16 parts, 400 MB, over 20 GB/s
    assert seconds("exchange", range(8), n) == pytest.approx(10e-6 + 3e-6 + 5e-6 + 4e8 / 20e9)


def test_a_root_sends_or_gets_all_parts_but_its_own():
    n = 16e8
    assert seconds("root_parts", range(4), n) == pytest.approx(10e-6 + 3e-6 + 12e8 / 80e9)
    # four of eight parts leave the root's host, over its one card of 10 GB/s
    assert seconds("root_parts", range(8), n) == pytest.approx(10e-6 + 3e-6 + 5e-6 + 8e8 / 10e9)


def test_adaptive_sums_exchange_whole_values_in_rounds():
    assert seconds("adaptive", range(4), 80e6) == pytest.approx(10e-6 + 2 * (1e-6 + 1e-3))
    # two rounds inside, and one in which four ranks send 80 MB each over 20 GB/s
    assert seconds("adaptive", range(8), 80e6) == pytest.approx(10e-6 + 2 * (1e-6 + 1e-3) + 5e-6 + 16e-3)


def test_a_switch_that_adds_up_is_taken_where_it_is_faster():
    fast = replace(TOY, inside=replace(INSIDE, in_switch=SwitchFigures(figure(50e-6), figure(160e9))))
    assert seconds("all_reduce", range(4), 80e6, of=fast) == pytest.approx(50e-6 + 0.75e-3)
    assert seconds("all_reduce", range(4), 1e5, of=fast) == seconds("all_reduce", range(4), 1e5)
    assert seconds("reduce", range(4), 80e6, of=fast) == seconds("reduce", range(4), 80e6)


GROUPS = [range(2), range(3), range(4), range(8), range(32), range(0, 32, 4), (0, 1, 2, 4), range(2, 7)]
SIZES = [1, 1000, 65536, 10**6, SLICE, SLICE + 1, 10**8, 10**10]


@each("method", METHODS)
@each("ranks", GROUPS)
def test_more_bytes_take_longer_and_better_links_do_not(method, ranks):
    took = [seconds(method, ranks, n) for n in SIZES]
    assert took == sorted(took) and took[0] < took[-1]
    for n, link, name in product(SIZES, ("inside", "between"), ("bandwidth", "latency", "collective_latency")):
        links = getattr(TOY, link)
        if getattr(links, name) is not None:
            value = getattr(links, name).value
            better = replace(links, **{name: figure(value * 2 if name == "bandwidth" else value / 2)})
            if name == "bandwidth":
                better = replace(better, by_group={k: figure(2 * f.value) for k, f in links.by_group.items()})
            assert seconds(method, ranks, n, of=replace(TOY, **{link: better})) <= seconds(method, ranks, n)
        assert seconds(method, ranks, n, sharing=3) >= seconds(method, ranks, n)


def test_only_where_ranks_are_counts_not_which():
    assert len({seconds("all_reduce", ranks, BIG) for ranks in ([8, 9, 14, 15], [0, 1, 4, 5], [5, 0, 4, 1])}) == 1
    assert GroupShape.of([8, 9, 14, 15], 4) == GroupShape(4, 2, 2, 2)


def test_an_estimate_has_the_spread_of_the_link_that_bounds_it():
    times = CollectiveTimes(load("dgx-v100"))
    pair, hosts = times.estimate("all_reduce", range(2), BIG), times.estimate("all_reduce", range(16), BIG)
    assert (pair.seconds, pair.spread, pair.source) == (times.seconds("all_reduce", range(2), BIG), 0.02, "sheet")
    assert hosts.spread == 0.1 and times.estimate("all_reduce", [5], BIG).seconds == 0


def message(call):
    with pytest.raises(FluidxError) as caught:
        call()
    return str(caught.value)


def test_what_has_no_time_is_refused():
    assert message(lambda: seconds("all_reduced", range(2), 1)) == (
        "no time is known for collectives of method 'all_reduced'; did you mean 'all_reduce'?"
    )
    assert message(lambda: seconds("all_reduce", range(8), 1, of=replace(TOY, between=None))) == (
        "a group of 8 ranks is on 2 hosts, and toy has no network; give the network's figures in its file: between"
    )


# -- what is published --------------------------------------------------------------------------------------------------------------------

A100_2 = {1 << 20: 44.21, 16 << 20: 131.9, 64 << 20: 404.7, 256 << 20: 1455.8, 1048576000: 5331.2}
A100_8 = {4 << 20: 95.8, 24 << 20: 265.3, 64 << 20: 579.9, 256 << 20: 2162.3, 1048576000: 8011.7}
V100_2 = {1 << 20: 70.14, 16 << 20: 764.1, 64 << 20: 2998.9, 1048576000: 46489.0}


@pytest.mark.parametrize("name, n, points", [("dgx-a100", 2, A100_2), ("dgx-a100", 8, A100_8), ("dgx-v100", 2, V100_2)])
def test_all_reduce_inside_a_host_is_within_an_eighth_of_the_curves_that_the_figures_come_from(name, n, points):
    for size, us in points.items():  # VIA-Research/vTrain
        assert seconds("all_reduce", range(n), size, of=load(name)) * 1e6 == pytest.approx(us, rel=0.125)


@pytest.mark.parametrize(
    "name, n, size, us",
    [
        ("dgx-a100", 8, 16 << 30, 127997),  # stas00/ml-engineering
        ("dgx-h200", 8, 16 << 30, 62341),
        ("p4d", 16, 8, 164.3),  # aws-samples/awsome-distributed-training
        ("p4d", 16, 2 << 30, 51406),
        ("p5", 8, 524288, 21.17),
        ("p5", 16, 16 << 30, 66132),
        ("dgx-v100", 8, 25 << 20, 26040 / 64),  # Fairring, micro-benchmark 3 on one machine: 64 all_reduces of 25 MiB
    ],
)
def test_all_reduce_is_near_what_others_published(name, n, size, us):
    assert seconds("all_reduce", range(n), size, of=load(name)) * 1e6 == pytest.approx(us, rel=0.06)


def test_a_fabric_that_reaches_a_third_of_its_sheet_needs_figures_of_its_own():
    """Fairring's 8 machines: 2.70 ms for each 25 MiB, where the cards of the sheet need 1.2."""
    sheet = load("dgx-v100")
    assert seconds("all_reduce", range(64), 25 << 20, of=sheet) < 0.5 * 172.71e-3 / 64
    slow = replace(sheet, between=replace(sheet.between, bandwidth=figure(4.5e9)))
    assert seconds("all_reduce", range(64), 25 << 20, of=slow) == pytest.approx(172.71e-3 / 64, rel=0.05)


def test_a_link_that_all_ranks_share_by_hand():
    # 0.5 GB/s for all: of 80 MB each of 4 ranks sends 2 x 3/4, 480 MB together; the ring's 1.5 ms comes beside it for 4 pieces of 0.5 MiB
    hub = replace(TOY, inside=replace(INSIDE, shared=figure(0.5e9)))
    least, ring, wire = 14e-6, 6e-6 - 4e-6 + 1.5e-3, 4 * 1.5 * 80e6 / 0.5e9
    assert seconds("all_reduce", range(4), 80e6, of=hub) == pytest.approx(least + wire + ring * 4 * PIECE / 80e6)
    # a small value is added when it has come, one time after the other: 4 ranks send 6 KB together, of 1 KB
    small = seconds("all_reduce", range(4), 1e3)
    assert seconds("all_reduce", range(4), 1e3, of=hub) == pytest.approx(small + 6e3 / 0.5e9)
    assert seconds("all_reduce", range(4), 0, of=hub) == seconds("all_reduce", range(4), 0)


def test_a_shared_link_does_not_slow_down_what_is_slower():
    wide = replace(TOY, inside=replace(INSIDE, shared=figure(1e15)))
    assert seconds("spread", range(4), BIG, of=wide) == pytest.approx(seconds("spread", range(4), BIG), rel=1e-3)


def test_groups_between_hosts_share_a_link_wherever_they_are():
    hub = replace(TOY, devices_per_host=1, between=replace(BETWEEN, shared=figure(1e9)))
    times = CollectiveTimes(hub)
    pairs = [[0, 1], [2, 3]]  # on four hosts: no card is shared, but the link is
    assert CollectiveTimes(replace(TOY, devices_per_host=1)).sharing(pairs) == 1 and times.sharing(pairs) == 2
    # in a pair each rank sends half of 0.2 GB to the other one
    assert times.seconds("spread", [0, 1], 2e8) == pytest.approx(0.2, rel=1e-2)
    assert times.seconds("spread", [0, 1], 2e8, 2) == pytest.approx(0.4, rel=1e-2)


def test_groups_inside_hosts_share_the_links_of_their_own_host():
    hub = CollectiveTimes(replace(TOY, inside=replace(INSIDE, shared=figure(1e9))))
    assert hub.sharing([[0, 1], [2, 3], [4, 5], [6, 7]]) == 2 and hub.sharing([[0, 1], [4, 5]]) == 1
    assert CollectiveTimes(TOY).sharing([[0, 1], [2, 3]]) == 1


def test_a_root_gets_or_sends_the_whole_value_over_its_link():
    for method in ("to_root", "from_root"):  # half of 10 us, n - 1 messages of 1 us; 80 MB at 80 GB/s, and at 40 GB/s for a pair
        assert seconds(method, range(4), 80e6) == pytest.approx(8e-6 + 1e-3)
        assert seconds(method, [0, 1], 80e6) == pytest.approx(6e-6 + 2e-3)
        # a host gets 1 GB over two cards of 10 GB/s, beside one slice at 80 GB/s inside
        assert seconds(method, range(8), 1e9) == pytest.approx(50e-3 + SLICE / 80e9 + 13e-6)


def test_a_root_gets_its_sum_in_parts_that_all_ranks_add():
    slow = replace(TOY, inside=replace(INSIDE, shared=figure(1e6)))
    # 4 ranks send 3/4 of 4 MB each to be added; three of them send the root the quarters that they have added: 15 MB together
    assert seconds("to_root", range(4), 4e6, of=slow) == pytest.approx(15, rel=1e-3)
    assert seconds("reduce", range(4), 4e6, of=slow) == pytest.approx(12, rel=1e-3)
    assert seconds("from_root", range(4), 4e6, of=slow) == pytest.approx(12, rel=1e-3)


def test_the_texts_of_a_call_pass_a_shared_link_too():
    hub = replace(TOY, inside=replace(INSIDE, shared=figure(1e6), call_bytes=500))
    # 12 texts of 500 B at 1 MB/s, and of two groups at once the other's as well
    assert seconds("all_reduce", range(4), 0, of=hub) == pytest.approx(seconds("all_reduce", range(4), 0) + 6e-3)
    assert seconds("spread", range(2), 0, 2, of=hub) == pytest.approx(seconds("spread", range(2), 0) + 2e-3)
    assert seconds("spread", range(2), 1000, of=hub) == pytest.approx(seconds("spread", range(2), 1000) + 1e-3 + 1e-3)


def test_a_ring_over_hosts_reaches_a_part_of_the_cards():
    # 8 ranks on 2 hosts: without inner time, 2 (k-1)/k n bytes a host pass its cards
    two = replace(TOY, between=replace(TOY.between, by_group={2: figure(TOY.between.bandwidth.value * TOY.between.count / 4)}))
    ranks, n = range(2 * TOY.devices_per_host), 1 << 30
    least = [CollectiveTimes(h, None).seconds("spread", ranks, 0) for h in (TOY, two)]
    whole, part = (CollectiveTimes(h, None).seconds("spread", ranks, n) for h in (TOY, two))
    assert least[0] == least[1]
    over = n / 2 / (TOY.between.bandwidth.value * TOY.between.count)
    assert part - whole == pytest.approx(3 * over, rel=0.1)


def test_a_message_between_programs_may_take_longer_than_one_of_the_communicator():
    far = replace(TOY, between=replace(BETWEEN, message=figure(1e-3)))
    assert [MachinePrices(h, 8, 4).network.path(0, 4).latency for h in (TOY, far)] == [5e-6, 1e-3]
    assert MachinePrices(far, 8, 4, Factors(latency=0.5)).network.path(0, 4).latency == 5e-4
    assert seconds("all_reduce", range(8), BIG, of=far) == seconds("all_reduce", range(8), BIG)
