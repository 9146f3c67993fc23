"""How ranks on several hosts connect by TCP, and what each of them says if one ends or fails before all are connected. Ranks are threads
here, and one of them is played by hand."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest

from fluidx.comm.launch_environment import Launched
from fluidx.comm.rendezvous import RankMeeting, answer, prove
from fluidx.comm.tcp import rendezvous
from fluidx.comm.tcp.rendezvous import _connection, hosts_of
from fluidx.ir.errors import ExecutionError
from fluidx.testing.tcp import free_port

KEY = "the key of these tests"
ENDED = "rank 2 ended before all ranks had connected"


@pytest.fixture
def job(monkeypatch):
    """The launched ranks of a job on four hosts."""
    monkeypatch.setenv("FLUIDX_JOB_KEY", KEY)
    address = f"127.0.0.1:{free_port()}"
    return [Launched("a test", rank, 4, 1, "job", address) for rank in range(4)]


def joined(job, ranks, timeout):
    """Join each of these ranks on a thread: the threads, and by rank the connections or the error with the seconds that it took."""
    found, began = {}, time.monotonic()

    def run(rank):
        try:
            found[rank] = rendezvous.join(job[rank], timeout)
        except ExecutionError as e:
            found[rank] = str(e), time.monotonic() - began

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    return threads, found


def first_connection(there, door):
    """Connect as a rank to rank 0, and hear where the others listen."""
    host, port = there.address.split(":")
    while True:
        try:
            sock = socket.create_connection((host, int(port)), 20)
            break
        except OSError:
            time.sleep(0.02)
    channel = prove(sock, RankMeeting(there, KEY), "rank 0")
    channel.send({"at": list(door.getsockname()), "here": 1, "name": socket.gethostname(), "shares": False})
    assert len(answer(channel, 0)[0]["table"]) == 4
    return channel


def close(found):
    for one in found.values():
        for link in one.links.values():
            link.close()
        for channel in one.failures.peers.values():
            channel.close()


def test_all_ranks_are_connected_with_all_others(job):
    threads, found = joined(job, range(4), 20)
    for thread in threads:
        thread.join(30)
    assert {rank: sorted(one.links) for rank, one in found.items()} == {r: [k for k in range(4) if k != r] for r in range(4)}
    assert all(one.hosts == [(0,), (1,), (2,), (3,)] for one in found.values())
    close(found)


def test_the_rank_that_ends_before_others_reach_it_is_named_by_all(job):
    """Rank 2 hears where the others listen and dies. Ranks 0 and 1 wait for it, and rank 3 is refused at its socket."""
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threads, found = joined(job, (0, 1, 3), 20)
        channel = first_connection(job[2], door)
    channel.close()
    for thread in threads:
        thread.join(30)
    assert {rank: text for rank, (text, _) in found.items()} == {0: ENDED, 1: ENDED, 3: ENDED}
    assert max(seconds for _, seconds in found.values()) < 10  # and not the 20 of the deadline


def test_the_rank_that_ends_after_rank_0_is_connected_is_named(job):
    """Rank 0 has all of its connections, and hears of the end as a rank that runs does; ranks 1 and 3 still wait for rank 2."""
    threads, found = joined(job, (0, 1, 3), 20)
    with socket.create_server(("127.0.0.1", 0)) as door:
        channel = first_connection(job[2], door)
        host, port = job[0].address.split(":")
        link = prove(socket.create_connection((host, int(port)), 20), RankMeeting(job[2], KEY, 0, "messages"), "rank 0")
        threads[0].join(20)
        found[0].failures.listen(lambda failure, gone: None)
    link.close()
    channel.close()
    for thread in threads:
        thread.join(30)
    assert [found[1][0], found[3][0]] == [ENDED, ENDED]
    close({0: found[0]})


def test_the_reason_of_a_rank_that_cannot_reach_another_is_that_of_all(job, monkeypatch):
    """A firewall stands between ranks 3 and 2."""
    connection = rendezvous._connection

    def stopped(at, own, deadline):
        if threading.current_thread().name == "rank 3" and there and at[1] == there[1]:
            raise OSError(113, "No route to host")
        return connection(at, own, deadline)

    mesh = rendezvous._mesh

    def seen(launched, key, channels, rows, *rest):
        nonlocal there
        there = tuple(rows[2]["at"])
        return mesh(launched, key, channels, rows, *rest)

    there, heard = None, {}
    monkeypatch.setattr(rendezvous, "_connection", stopped)
    monkeypatch.setattr(rendezvous, "_mesh", seen)
    threads, found = joined(job, range(4), 20)
    for rank in (0, 1):
        threads[rank].join(30)
        found[rank].failures.listen(lambda failure, gone, rank=rank: heard.setdefault(rank, str(failure)))
    for thread in threads:
        thread.join(30)
    until = time.monotonic() + 20
    while len(heard) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    (text,) = {found[rank][0] for rank in (2, 3)}
    assert "cannot reach the socket of rank 2 at 127.0.0.1:" in text and text.endswith(
        "within 20 s: No route to host; check FLUIDX_INTERFACE and firewalls; FLUIDX_TIMEOUT gives it more time"
    )
    assert heard == {0: text, 1: text}  # they were connected with all others
    close({rank: found[rank] for rank in (0, 1)})


@pytest.mark.parametrize("failure", [OSError(113, "No route to host"), KeyboardInterrupt()])
def test_no_socket_is_left_open_if_ranks_do_not_connect(job, monkeypatch, failure):
    """Rank 3 has heard where the others listen, and fails or is interrupted as it connects to them."""
    made, times, connection, reach = [], [], rendezvous._connection, rendezvous._reach

    class Noted(socket.socket):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            made.append(self)

    def stopped(*args):
        times.extend([1] * (threading.current_thread().name == "rank 3"))
        if threading.current_thread().name == "rank 3" and sum(times) == 2:
            raise failure
        return connection(*args)

    def reached_at_once(*args):
        time.sleep(0.5)  # rank 0 listens by now, so that one attempt is enough
        return reach(*args)

    monkeypatch.setattr(socket, "socket", Noted)
    monkeypatch.setattr(rendezvous, "_connection", stopped)
    monkeypatch.setattr(rendezvous, "_reach", reached_at_once)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)  # of the interrupted one
    threads, found = joined(job, range(4), 20)
    for thread in threads:
        thread.join(30)
    assert all("No route to host" in text or text == "rank 3 ended before all ranks had connected" for text, _ in found.values())
    assert len(found) == (4 if isinstance(failure, OSError) else 3)
    assert len(made) > 8 and [s for s in made if s.fileno() >= 0] == []


# -- hosts and addresses ---------------------------------------------------------------------------------------------------------


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
