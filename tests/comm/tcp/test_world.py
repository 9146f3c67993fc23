"""Messages between two ranks over a connection: their order, their place, and the end of a rank or of its world."""

import gc
import socket

import numpy as np
import pytest

from fluidx.comm.base import CommError
from fluidx.comm.tcp.link import TcpLink
from fluidx.comm.tcp.world import TcpWorld


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
