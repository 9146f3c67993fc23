"""The failure or the end of a rank reaches all others by way of rank 0, once; a goodbye is no failure."""

import queue
import socket

import pytest

from fluidx.comm.process_spawner import Channel
from fluidx.comm.tcp.failure_messages import FailureMessages


@pytest.fixture
def three():
    """Rank 0, connected with ranks 1 and 2, and for each rank the failures that it hears of: (text, rank, rank that has ended)."""
    pairs = {rank: [Channel(sock) for sock in socket.socketpair()] for rank in (1, 2)}
    ranks = [FailureMessages(0, {rank: pair[0] for rank, pair in pairs.items()})]
    ranks += [FailureMessages(rank, {0: pairs[rank][1]}) for rank in (1, 2)]
    heard = [queue.SimpleQueue() for _ in ranks]
    for one, found in zip(ranks, heard, strict=True):
        one.listen(lambda failure, gone, found=found: found.put((str(failure), failure.rank, gone)))
    yield ranks, heard
    for pair in pairs.values():
        for channel in pair:
            try:
                channel.sock.shutdown(socket.SHUT_RDWR)  # ends the threads that listen
            except OSError:
                pass
            channel.close()


def test_a_failure_reaches_all_others(three):
    ranks, heard = three
    ranks[2].spread("rank 2: no more memory")
    for rank in (0, 1):
        assert heard[rank].get(timeout=20) == ("rank 2: no more memory", 2, None)
    ranks[0].spread("rank 0: wrong program")  # what rank 0 says next is what rank 2 hears first: its own failure does not come back
    assert heard[2].get(timeout=20) == ("rank 0: wrong program", 0, None)


def test_an_end_without_a_goodbye_is_a_failure(three):
    ranks, heard = three
    ranks[2].peers[0].sock.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1):
        assert heard[rank].get(timeout=20) == ("rank 2: its process has ended", 2, 2)


def test_a_goodbye_is_no_failure(three):
    ranks, heard = three
    ranks[2].goodbye()
    ranks[2].peers[0].sock.shutdown(socket.SHUT_WR)
    ranks[1].spread("rank 1: a later failure")
    assert heard[0].get(timeout=20) == ("rank 1: a later failure", 1, None) and heard[1].empty()
