"""Ranks that others start meet at a socket of rank 0: it gives the memory to ranks of its job, whoever else comes."""

import os
import socket
import threading
import time

import pytest

from fluidx import native
from fluidx.comm import local_rendezvous, process_spawner, rendezvous
from fluidx.comm.launch_environment import Launched
from fluidx.ir.errors import ExecutionError
from fluidx.native import shared

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")


class Given:
    """The memory that a rank is given. It lies at one address in all ranks, so the threads here, which stand for ranks, do not map it."""

    make = staticmethod(shared.Memory.make)

    def __init__(self, fd, start, ranks):
        self.fd = fd

    def close(self):
        os.close(self.fd)


@pytest.fixture
def job(request, monkeypatch):
    """Names of a job of its own for this test: its ranks, as `Launched`, two by default."""
    monkeypatch.setattr(local_rendezvous, "Memory", Given)
    monkeypatch.setenv("FLUIDX_JOB_KEY", "the key")
    name = f"{os.getpid()}-{request.node.name}"[:80]
    return lambda rank, ranks=2: Launched("hand", rank, ranks, ranks, name)


class Rank(threading.Thread):
    """A rank that comes to the meeting; `found` is what it has then, or the error."""

    def __init__(self, meet, there, timeout=20.0):
        super().__init__(daemon=True)
        self.meet, self.there, self.timeout, self.found = meet, there, timeout, None
        self.start()

    def run(self):
        try:
            self.found = self.meet(self.there, self.timeout)
        except ExecutionError as e:
            self.found = str(e)

    def end(self):
        self.join(30)
        assert self.found is not None
        return self.found


def first(there, timeout=20.0):
    return Rank(local_rendezvous._gather_ranks, there, timeout)


def other(there, timeout=20.0):
    return Rank(local_rendezvous._reach_first, there, timeout)


def caller(there):
    """Somebody at the door, when there is one."""
    sock = socket.socket(socket.AF_UNIX)
    while sock.connect_ex(local_rendezvous.name_of(there)):
        time.sleep(0.01)
    return sock


JUNK = {
    "nothing": b"",
    "text": b"GET / HTTP/1.0\r\n\r\n",
    "a message of before": b"\x20\0\0\0\0\0\0\0" + b'{"rank": 1, "world_size": 2}    ',
    "a length without end": b"\xff" * 8,
    "a hello of zeros": bytes(rendezvous._HELLO.size),
    "a rank that there cannot be": b"\xff" * rendezvous._HELLO.size,
    "more than a hello": b"\x01" * 5000,
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_whatever_is_said_at_the_door_the_ranks_meet(job, junk):
    """Junk is dropped, and one who stays silent keeps nobody waiting."""
    zero = first(job(0))
    stranger = caller(job(0))
    stranger.sendall(junk)
    if junk:
        stranger.shutdown(socket.SHUT_WR)
    one = other(job(1))
    (peers, _), (there, _) = zero.end(), one.end()
    assert set(peers) == {1} and set(there) == {0}
    try:
        answer = stranger.recv(1 << 16)[rendezvous.GREETING :]  # behind the question for a proof
    except ConnectionResetError:
        answer = b""
    assert b"start" not in answer


def test_who_does_not_know_the_key_has_no_memory(job, monkeypatch):
    zero = first(job(0))
    caller(job(0)).close()  # it has its key by now
    monkeypatch.setenv("FLUIDX_JOB_KEY", "another key")
    assert other(job(1)).end() == "the FLUIDX_JOB_KEY of this process is not that of rank 0; all ranks of a job must have the same"
    monkeypatch.setenv("FLUIDX_JOB_KEY", "the key")
    one = other(job(1))
    assert set(zero.end()[0]) == {1} and set(one.end()[0]) == {0}


def test_who_only_listens_where_rank_0_should_is_not_taken_for_it(job):
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(local_rendezvous.name_of(job(0)))
        door.listen()
        one = other(job(1))
        came, _ = door.accept()
        came.sendall(rendezvous._MAGIC + bytes(rendezvous.NONCE))
        assert len(came.recv(1000)) == rendezvous._HELLO.size
        process_spawner.Channel(came).send({"start": 0, "proof": "00" * 32}, [door.fileno()])
        assert one.end() == "the socket of rank 0 belongs to a process that does not know the FLUIDX_JOB_KEY of this job"


def test_ranks_of_another_size_and_twins_are_told(job):
    zero = first(job(0, 3))
    assert other(job(1, 2)).end() == "this process was launched as one of 2 ranks, and rank 0 as one of 3"
    one = other(job(1, 3))
    assert other(job(0, 3)).end() == "two processes were launched as rank 0; this is the second one"
    two = other(job(2, 3))
    assert set(zero.end()[0]) == {1, 2} and set(one.end()[0]) == set(two.end()[0]) == {0}


def test_a_rank_that_does_not_come_is_named(job):
    zero, one = first(job(0, 3), 0.5), other(job(1, 3))
    text = "rank 2 did not connect within 0.5 s (launched by hand); set FLUIDX_TIMEOUT to wait longer"
    assert (zero.end(), one.end()) == (text, text)


def test_the_helper_that_starts_processes_has_the_time_that_ranks_have(monkeypatch):
    monkeypatch.setenv("FLUIDX_TIMEOUT", "77")
    monkeypatch.setattr(process_spawner, "_on_lasting_thread", lambda make: None)
    assert process_spawner._Spawner().channel.sock.gettimeout() == 77.0
