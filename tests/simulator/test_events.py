"""Schedules of two and three ranks, worked out by hand, against the event simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluidx.ir.errors import ExecutionError
from fluidx.simulator.critical_path import critical_path
from fluidx.simulator.events import simulate_events
from fluidx.simulator.fair_share import Flow, fair_rates
from fluidx.simulator.folding import RankItems, fold, unfolded
from fluidx.simulator.network import PortFigures, hosts_with_ports, shared_link
from fluidx.simulator.schedule import Compute, Exchange, Meeting, Wait

IDLE = shared_link(0.0, 1.0)
KINDS = ("compute", "meeting", "ring")


def compute(seconds, beside=False):
    return Compute((0,), (float(seconds),), beside=beside)


def all_reduce(seconds, members=(0, 1), group="dp", beside=False):
    return Meeting((0,), group, tuple(members), float(seconds), beside=beside)


def run(*ranks, network=IDLE, slow=None, slowdown=1.0):
    return simulate_events(unfolded(ranks, slow), network, slowdown)


def ends(result):
    """When each rank ends."""
    return [max(s.ended for s in spans) for spans in result.spans]


# -- meetings -----------------------------------------------------------------------------------------------------------------


def test_serial_communication_is_the_sum():
    rank = [compute(2), all_reduce(3), compute(1)]
    assert ends(run(rank, rank)) == [6, 6]


def test_a_meeting_begins_when_the_last_member_has_come():
    result = run([compute(1), all_reduce(3), compute(1)], [compute(4), all_reduce(3), compute(2)])
    assert ends(result) == [8, 9]
    assert result.spans[0][1].came == 1 and result.spans[0][1].began == 4
    assert result.spans[0][1].late == (1, 1) and result.spans[1][1].late is None


def test_communication_beside_compute_is_hidden():
    rank = [compute(1), all_reduce(3, beside=True), compute(5), Wait((0,), item=1), compute(1)]
    assert ends(run(rank, rank)) == [7, 7]


def test_what_compute_does_not_hide_is_exposed():
    rank = [compute(1), all_reduce(5, beside=True), compute(2), Wait((0,), item=1), compute(1)]
    result = run(rank, rank)
    assert ends(result) == [7, 7]
    assert result.spans[0][3].came == 3 and result.spans[0][3].ended == 6


def test_the_communication_stream_keeps_its_order():
    # the second all_reduce is ready at 2 and has to wait for the first, which ends at 6
    rank = [compute(1), all_reduce(5, beside=True), compute(1), all_reduce(1, beside=True), compute(1), Wait((0,), item=3)]
    assert ends(run(rank, rank)) == [7, 7]


def test_compute_on_the_communication_stream_is_in_its_order():
    rank = [compute(1), all_reduce(2, beside=True), compute(1, beside=True), compute(1), Wait((0,), item=2)]
    assert ends(run(rank, rank)) == [4, 4]


def test_compute_is_slower_while_communication_is_under_way():
    # 3 s of compute from 1 s on; while the meeting lasts, from 1 to 3, only half of it: 1 s of work is done at 3, the other 2 by 5
    rank = [compute(1), all_reduce(2, beside=True), compute(3), Wait((0,), item=1)]
    assert ends(run(rank, rank, slowdown=2.0)) == [5, 5]


def test_waiting_for_others_slows_nobody_down():
    first = [compute(1), all_reduce(1, beside=True), compute(2), Wait((0,), item=1)]
    late = [compute(9), all_reduce(1, beside=True), Wait((0,), item=1)]
    result = run(first, late, slowdown=2.0)
    assert result.spans[0][2].ended == 3 and ends(result) == [10, 10]


def test_a_slow_rank_computes_longer_and_communicates_as_fast():
    rank = [compute(2), all_reduce(3), compute(1)]
    assert ends(run(rank, rank, slow={1: 1.5})) == [7, 7.5]


def test_two_groups():
    # ranks 0, 1 and ranks 0, 2: rank 2 computes for 10
    result = run(
        [compute(1), all_reduce(1, (0, 1), "a"), all_reduce(1, (0, 2), "b")],
        [compute(1), all_reduce(1, (0, 1), "a"), compute(1)],
        [compute(10), all_reduce(1, (0, 2), "b")],
    )
    assert ends(result) == [11, 3, 11]


def test_meetings_in_another_order_never_end():
    with pytest.raises(ExecutionError, match=r"the ranks wait for each other: rank 0 never ends item 0.*2 of 2 schedules"):
        run([all_reduce(1, group="a"), all_reduce(1, group="b")], [all_reduce(1, group="b"), all_reduce(1, group="a")])


# -- messages -----------------------------------------------------------------------------------------------------------------


def send(to, nbytes, beside=False):
    return Exchange((0,), sends=((to, nbytes),), beside=beside)


def receive(source, nbytes, beside=False):
    return Exchange((0,), receives=((source, nbytes),), beside=beside)


def test_a_large_message_waits_for_its_receiver():
    # latency 1, 10 bytes at 5 a second: 3 s from the time at which both have come
    result = run([send(1, 10), compute(1)], [compute(4), receive(0, 10)], network=shared_link(1.0, 5.0))
    assert ends(result) == [8, 7]


def test_a_large_message_waits_for_its_sender():
    result = run([compute(4), send(1, 10)], [receive(0, 10), compute(2)], network=shared_link(1.0, 5.0))
    assert ends(result) == [7, 9]
    assert result.spans[1][0].late == (0, 1)


def test_the_sender_of_an_eager_message_goes_on():
    # it is on its way from 0 to 3, and is there when the receiver comes at 4
    result = run([send(1, 10), compute(1)], [compute(4), receive(0, 10), compute(1)], network=shared_link(1.0, 5.0, eager=10))
    assert ends(result) == [1, 5]


def test_an_eager_message_that_is_still_on_its_way_is_waited_for():
    result = run([compute(2), send(1, 10)], [compute(4), receive(0, 10)], network=shared_link(1.0, 5.0, eager=10))
    assert ends(result) == [2, 5]


@pytest.mark.parametrize("late", [0, 1])
def test_an_eager_message_on_its_way_slows_the_compute_of_who_waits_for_it(late):
    # 10 bytes from 0 to 3. The receiver comes at 0 or 1 and computes for 3 meanwhile, at half speed until 3: it does (3 - late) / 2 of it
    receiver = [*([compute(late)] if late else []), receive(0, 10, beside=True), compute(3), Wait((0,), item=late)]
    for ranks in ([[send(1, 10)], receiver], [[compute(0), send(1, 10)], receiver]):
        result = run(*ranks, network=shared_link(1.0, 5.0, eager=10), slowdown=2.0)
        assert ends(result)[1] == 3 + 3 - (3 - late) / 2


def test_two_messages_share_a_link():
    # 10 and 20 bytes at 10 a second: both get 5 until 2, then 10 are left of the second at 10 a second
    result = run([send(2, 10)], [send(3, 20)], [receive(0, 10)], [receive(1, 20)], network=shared_link(0.0, 10.0))
    assert ends(result) == [2, 3, 2, 3]


def test_messages_of_a_server_divide_its_port_before_they_start():
    # 20 and 10 bytes at 30 a second: 20 and 10 a second for them, also while the other one is not there
    network = hosts_with_ports([0, 0, 0], PortFigures(0.0, 30.0), PortFigures(0.0, 1.0))
    server, second = [Exchange((0,), ((1, 20), (2, 10)), ())], [receive(0, 10)]
    assert ends(run(server, [receive(0, 20)], second, network=network)) == [1, 1, 1]
    assert ends(run(server, [receive(0, 20)], [compute(0.5), *second], network=network)) == [1.5, 1, 1.5]
    gathered = [Exchange((0,), (), ((1, 20), (2, 10)))]
    assert ends(run(gathered, [send(0, 20)], [compute(2), send(0, 10)], network=network)) == [3, 1, 3]


def test_devices_of_a_host_share_its_network_card():
    # two messages between hosts at 10 a second together; one inside a host at 100
    network = hosts_with_ports([0, 0, 1, 1], PortFigures(0.0, 100.0), PortFigures(0.0, 10.0))
    result = run([send(2, 50)], [send(3, 50)], [receive(0, 50)], [receive(1, 50)], network=network)
    assert ends(result) == [10, 10, 10, 10]
    assert ends(run([send(1, 50)], [receive(0, 50)], network=network)) == [0.5, 0.5]


def test_both_directions_of_a_shared_link_have_one_rate():
    # alone, each message would have 10 a second; together they have 12, and the second one goes on alone with 10
    alone, hub = PortFigures(0.0, 10.0), PortFigures(0.0, 10.0, shared=12.0)
    ranks = [Exchange((0,), ((1, 60),), ((1, 100),))], [Exchange((0,), ((0, 100),), ((0, 60),))]
    for inside, between, host_of in ((hub, alone, [0, 0]), (alone, hub, [0, 1])):
        assert ends(run(*ranks, network=hosts_with_ports(host_of, inside, between))) == [14, 14]
    assert ends(run(*ranks, network=hosts_with_ports([0, 0], alone, hub))) == [10, 10]


def test_a_ring_of_three_hand_worked():
    # reduce_scatter and all_gather of 3 blocks: 4 rounds of 1 s of latency and 10 bytes at 10 a second on links of their own
    network = hosts_with_ports([0, 1, 2], PortFigures(0.0, 1.0), PortFigures(1.0, 10.0))
    ranks = [[Exchange((0,), (((r + 1) % 3, 10),), (((r - 1) % 3, 10),)) for _ in range(4)] for r in range(3)]
    assert ends(run(*ranks, network=network)) == [8, 8, 8]


def test_messages_that_nobody_receives_are_refused():
    with pytest.raises(ExecutionError, match="rank 0 sends rank 1 1 messages, which receives 0"):
        run([send(1, 10)], [compute(1)])


def test_a_thousand_short_items_are_no_recursion():
    ranks = [[send(1, 0) for _ in range(5000)], [receive(0, 0) for _ in range(5000)]]
    assert ends(run(*ranks, network=shared_link(0.0, 1.0, eager=1))) == [0, 0]


def test_a_pipeline_of_two_stages_one_forward_one_backward():
    # forward 1, backward 2, 3 micro-batches, free messages. Stage 0: F F B F B . B, stage 1 after each other. By hand:
    # stage 0 F1 0-1, F2 1-2; stage 1 F1 1-2, B1 2-4, F2 4-5, B2 5-7, F3 7-8, B3 8-10; stage 0 B1 4-6, F3 6-7, B2 7-9, B3 10-12
    def f(to=None, of=None):
        return [*([receive(of, 0)] if of is not None else []), compute(1), *([send(to, 0)] if to is not None else [])]

    def b(to=None, of=None):
        return [*([receive(of, 0)] if of is not None else []), compute(2), *([send(to, 0)] if to is not None else [])]

    first = [*f(to=1), *f(to=1), *b(of=1), *f(to=1), *b(of=1), *b(of=1)]
    second = [*f(of=0), *b(to=0), *f(of=0), *b(to=0), *f(of=0), *b(to=0)]
    result = run(first, second, network=shared_link(0.0, 1.0, eager=1))
    assert ends(result) == [12, 10]


# -- rates --------------------------------------------------------------------------------------------------------------------


def test_what_a_limited_flow_leaves_goes_to_the_others():
    rates = fair_rates({"a": Flow({"x": 1}, 1.0), "b": Flow({"x": 1}), "c": Flow({"x": 1})}, {"x": 9.0})
    assert rates == {"a": 1.0, "b": 4.0, "c": 4.0}


def test_a_flow_that_stands_for_several_takes_their_share():
    assert fair_rates({"a": Flow({"x": 3}), "b": Flow({"x": 1})}, {"x": 8.0}) == {"a": 2.0, "b": 2.0}


@given(st.lists(st.lists(st.sampled_from("xyz"), min_size=1, max_size=3, unique=True), min_size=1, max_size=6),
       st.tuples(*[st.floats(0.5, 100)] * 3))  # fmt: skip
def test_fair_rates_fill_a_link_of_every_flow_and_overfill_none(paths, sizes):
    capacity = dict(zip("xyz", sizes, strict=True))
    rates = fair_rates({k: Flow(dict.fromkeys(p, 1)) for k, p in enumerate(paths)}, capacity)
    load = {link: sum(rates[k] for k, p in enumerate(paths) if link in p) for link in capacity}
    assert all(load[link] <= capacity[link] * (1 + 1e-9) for link in capacity)
    for k, p in enumerate(paths):  # each flow has a full link on which nobody is faster: no rate can grow without a slower one falling
        full = [link for link in p if load[link] >= capacity[link] * (1 - 1e-9)]
        assert any(all(rates[j] <= rates[k] * (1 + 1e-9) for j, q in enumerate(paths) if link in q) for link in full)


# -- properties ---------------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw):
    """Programs of 2 to 4 ranks that do the same kinds of things in one order: meetings of all, and rings of messages."""
    n = draw(st.integers(2, 4))
    ranks = [[] for _ in range(n)]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(KINDS))
        beside = draw(st.booleans())
        size, nbytes = draw(st.integers(0, 4)), draw(st.integers(0, 40))
        for r, items in enumerate(ranks):
            if kind == "compute":
                items.append(compute(draw(st.integers(0, 4))))
            elif kind == "meeting":
                items.append(all_reduce(size, range(n), beside=beside))
            else:
                items.append(Exchange((0,), (((r + 1) % n, nbytes),), (((r - 1) % n, nbytes),), beside=beside))
            if items[-1].beside and draw(st.booleans()):
                items.append(Wait((0,), item=len(items) - 1))
    return ranks


@settings(max_examples=60, deadline=None)
@given(programs())
def test_never_below_the_compute_and_the_path_is_the_whole_run(ranks):
    folded = unfolded(ranks)
    result = simulate_events(folded, shared_link(0.5, 10.0))
    assert result.seconds >= max(s.compute_seconds for s in folded.schedules)
    parts = critical_path(folded, result)
    assert sum(p.seconds for p in parts) == pytest.approx(result.seconds, rel=1e-9, abs=1e-9)  # sums of floats in another order
    assert all(a.stop == b.start for a, b in zip(parts, parts[1:], strict=False))


@settings(max_examples=40, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_relabelled_ranks_take_as_long(ranks, random):
    new = list(range(len(ranks)))
    random.shuffle(new)
    moved = [None] * len(ranks)
    for old, items in enumerate(ranks):
        moved[new[old]] = [
            Meeting(i.steps, i.group, tuple(new[m] for m in i.members), i.seconds, beside=i.beside) if isinstance(i, Meeting)
            else Exchange(i.steps, tuple((new[p], b) for p, b in i.sends), tuple((new[p], b) for p, b in i.receives), beside=i.beside)
            if isinstance(i, Exchange) else i
            for i in items
        ]  # fmt: skip
    one, other = (simulate_events(unfolded(r), shared_link(0.5, 10.0)).seconds for r in (ranks, moved))
    assert one == pytest.approx(other, rel=1e-9)  # fair rates are added in another order


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 6), st.lists(st.tuples(st.sampled_from(["compute", "meeting", "ring"]), st.integers(0, 5)), max_size=8), st.booleans()
)
def test_folded_equals_unfolded(n, parts, slow):
    template, own = [], [{} for _ in range(n)]
    for kind, size in parts:
        if kind == "compute":
            template.append(compute(size))
        elif kind == "meeting":
            template.append(all_reduce(size, range(n)))
        else:
            for r in range(n):
                own[r][len(template)] = (((r + 1) % n, size),), (((r - 1) % n, size),)
            template.append(Exchange((0,), *own[0][len(template)]))
    ranks = [RankItems(template, {"dp": tuple(range(n))}, own[r]) for r in range(n)]
    late = {1: 2.0} if slow else {}
    hosts = [r // 2 for r in range(n)]
    ports = hosts_with_ports(hosts, PortFigures(0.1, 8.0), PortFigures(0.4, 4.0))
    for network, host_of in ((shared_link(0.5, 10.0), [0] * n), (ports, hosts)):
        folded = fold(ranks, late, host_of, network)
        if not slow and len(set(host_of)) == 1:
            assert len(folded.schedules) == 1
        whole = simulate_events(unfolded([r.own() for r in ranks], late), network)
        assert simulate_events(folded, network).seconds == pytest.approx(whole.seconds, rel=1e-9)
