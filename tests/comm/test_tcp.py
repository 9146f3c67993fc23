"""Ranks that TCP connects: what a link does with messages, what goes between hosts, and interfaces. The conformance suite has the rest."""

import gc
import socket
import time

import numpy as np
import pytest

from fluidx.comm.base import CommError
from fluidx.comm.tcp import interfaces
from fluidx.comm.tcp.link import TcpLink
from fluidx.comm.tcp.rendezvous import _connection, hosts_of
from fluidx.comm.tcp.world import TcpWorld
from fluidx.config import ConfigError
from fluidx.ir.errors import ExecutionError
from fluidx.testing import each_rank
from fluidx.testing.tcp import TcpProcesses, free_port
from tests.comm.conformance import jobs

ALL = (0, 1, 2, 3, 4, 5)


@pytest.fixture
def pair():
    """The worlds of two ranks, in this process."""
    door = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(door.getsockname())
    other, _ = door.accept()
    worlds = [TcpWorld(r, {1 - r: TcpLink(1 - r, sock)}, 2, 0.3, lambda text: None) for r, sock in enumerate((one, other))]
    yield worlds
    for world in worlds:
        world.close()
    for sock in (door, one, other):
        sock.close()


def numbers(*values):
    return np.array(values, "float64")


def test_messages_with_one_tag_keep_their_order_and_those_with_another_pass_them(pair):
    first, second = pair
    for tag, value in ((7, 1.0), (8, 2.0), (7, 3.0)):
        first.finish(first.send(numbers(value), 1, tag), "send")
    got = [np.empty(1) for _ in range(3)]
    for place, tag in zip(got, (8, 7, 7), strict=True):
        second.finish(second.receive(place, 0, tag), "receive")
    assert [a.item() for a in got] == [2.0, 1.0, 3.0]


def test_a_message_that_is_on_its_way_finds_its_place(pair):
    """More than the system holds: it is half here before anybody asks for it."""
    first, second = pair
    much, got = np.arange(2_000_000.0), np.empty(2_000_000)
    leaving, little = first.send(much, 1, 7), np.empty(1)
    second.finish(second.send(numbers(5.0), 0, 9), "send")
    first.finish(first.receive(little, 1, 9), "receive")
    second.links[0].read()
    posted = second.receive(got, 0, 7)
    while not all(request.done for _, request in [*posted, *leaving]):
        first._look(0.01)
        second._look(0.01)
    assert little.item() == 5.0 and np.array_equal(got, much)


def test_a_large_posted_message_has_left_when_its_receiver_asks_for_it(pair):
    first, second = pair
    much, got = np.ones(100_000), np.empty(100_000)
    posted = first.post(much, 1, 7)
    second._look(0.05)
    first._look(0.05)
    assert not posted[0][1].done
    second.finish(second.receive(got, 0, 7), "receive")
    first.finish(posted, "send")
    assert (got == 1).all()


def test_a_little_posted_message_may_change_at_once(pair):
    first, second = pair
    x, got = numbers(4.0), np.empty(1)
    assert first.post(x, 1, 7) == []
    x[:] = 0
    second.finish(second.receive(got, 0, 7), "receive")
    assert got.item() == 4.0


def test_a_message_that_does_not_fit_is_an_error_and_the_next_one_arrives(pair):
    first, second = pair
    for value in (numbers(1.0, 2.0), numbers(3.0)):
        first.finish(first.send(value, 1, 7), "send")
    place = numbers(0.0)
    with pytest.raises(CommError, match="rank 1 in recv: from rank 0, a message of 16 bytes arrived where 8 were expected"):
        second.finish(second.receive(place, 0, 7), "recv")
    assert place.item() == 0.0
    second.finish(second.receive(place, 0, 7), "recv")
    assert place.item() == 3.0


def test_a_rank_that_has_ended_is_not_waited_for_until_the_deadline(pair):
    first, second = pair
    second.timeout = 60.0
    first.links[1].sock.close()
    first.links = {}
    first._by_file = {}
    with pytest.raises(CommError, match="rank 1 waited in recv; rank 0 did not arrive: its process has ended"):
        second.finish(second.receive(np.empty(1), 0, 7), "recv")


def test_a_world_that_is_dropped_ends_its_thread_and_one_that_is_closed_its_sockets(pair):
    first, second = pair
    first.close()
    assert all(link.sock.fileno() == -1 for link in first.links.values()) and first._ready.closed and not first._pusher.is_alive()
    thread, link = second._pusher, second.links[0]
    del pair[1], second
    gc.collect()
    thread.join(5)
    assert not thread.is_alive() and not link.closed


# -- between hosts ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_hosts():
    """Two ranks on each of three hosts."""
    started = TcpProcesses(6)
    yield started.ranks(6, 20.0, here=2)
    started.close()


def sent(comm, how, size):
    """The bytes of data that this rank sends in a sum over all ranks, as one collective or as a sum over rails."""
    before, counted = TcpLink._say, []

    def say(link, kind, tag, *data):
        counted.append(data[0].nbytes if data else 0)
        before(link, kind, tag, *data)

    TcpLink._say = say
    try:
        x = np.full(size, comm.rank + 1.0, "float32")
        if how == "all_reduce":
            comm.all_reduce(x, x, "sum", ALL)
        else:
            first, half = comm.rank // 2 * 2, np.empty(size // 2, "float32")
            comm.reduce_scatter([x[: size // 2], x[size // 2 :]], half, "sum", (first, first + 1))
            comm.all_reduce(half, half, "sum", tuple(range(comm.rank % 2, 6, 2)))
            comm.all_gather(half, [x[: size // 2], x[size // 2 :]], (first, first + 1))
        assert (x == 21).all()
    finally:
        TcpLink._say = before
    return sum(n for n in counted if n > 4096)


def test_what_a_host_sends_for_a_large_sum(three_hosts):
    """S bytes over three hosts: in rank order the sum passes each link once on its way, and once back, so a host in the middle sends 2 S;
    over rails, in another order, each host sends 4/3 S, as in a ring."""
    size = 3 << 16
    for how, wanted in (("all_reduce", [1, 2, 1]), ("rails", [4 / 3] * 3)):
        by_rank = three_hosts.each(f"{__name__}:sent", [how, size])
        assert [sum(by_rank[h : h + 2]) / (4 * size) for h in (0, 2, 4)] == pytest.approx(wanted), how


def test_three_hosts_have_the_bits_of_threads(three_hosts):
    for size in (101, 40_003):
        wanted = each_rank(6, lambda comm, size=size: jobs.bits(comm, size, "avg"))
        assert three_hosts.each(f"{jobs.__name__}:bits", [size, "avg"]) == wanted


# -- hosts and interfaces --------------------------------------------------------------------------------------------------------


def test_ranks_of_a_host_are_found_from_their_numbers():
    assert hosts_of([{"here": n} for n in (2, 2, 1, 3, 3, 3)]) == [(0, 1), (0, 1), (2,), (3, 4, 5), (3, 4, 5), (3, 4, 5)]


def test_a_connection_of_a_socket_to_itself_is_none(monkeypatch):
    """Where nobody listens yet, the system may choose for a caller just the port that it calls, and TCP connects the socket to itself."""
    port = free_port()

    class OnThatPort(socket.socket):
        def bind(self, at):
            super().bind((at[0], port))

    monkeypatch.setattr(socket, "socket", OnThatPort)
    with pytest.raises(ConnectionRefusedError):
        _connection(("127.0.0.1", port), "127.0.0.1", time.monotonic() + 20)


def test_ranks_of_a_host_have_one_host_name():
    said = "ranks 0, 1 were launched as the ranks of one host, and are on several: rank 0 on a, rank 1 on b;"
    with pytest.raises(ExecutionError, match=said):
        hosts_of([{"here": 2, "name": "a"}, {"here": 2, "name": "b"}])


@pytest.mark.parametrize("here", [(2, 1, 1), (1, 2), (3, 3)])
def test_numbers_of_ranks_that_do_not_fit_are_refused(here):
    with pytest.raises(ExecutionError, match=r"all say \[.*\] ranks; ranks of a host must have consecutive numbers"):
        hosts_of([{"here": n} for n in here])


def test_an_interface_is_chosen_by_its_name_or_its_address(monkeypatch):
    monkeypatch.setenv("FLUIDX_INTERFACE", "")
    assert interfaces.chosen() is None
    for name in ("lo", "127.0.0.1", "127.0.0.7"):
        monkeypatch.setenv("FLUIDX_INTERFACE", name)
        assert interfaces.chosen() == ("127.0.0.1" if name == "lo" else name)
    for name in ("eth77", "192.0.2.1"):
        monkeypatch.setenv("FLUIDX_INTERFACE", name)
        with pytest.raises(ConfigError, match=rf"has no interface '{name}'; its interfaces are (.*, )?lo \(127\.0\.0\.1\)"):
            interfaces.chosen()
