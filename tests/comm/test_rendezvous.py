"""Ranks that others start meet at a socket of rank 0: it gives the memory to ranks of its job, whoever else comes."""

import os
import socket
import subprocess
import sys
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


@pytest.mark.parametrize("said, found", {
    b"[1, 2]": "what listens as rank 0 sends messages that are not those of a job of fluidx",
    b"no JSON": "what listens as rank 0 sends messages that are not those of a job of fluidx",
    b"[" * 60000: "what listens as rank 0 sends messages that are not those of a job of fluidx",
    b'{"no": "' + b"a" * (1 << 16) + b'"}': "what listens as rank 0 sends messages that are not those of a job of fluidx",
    b'{"no": "go away"}': "go away",
    b"": "rank 0 ended before all ranks had connected",
    None: "rank 0 has not answered in time: it may wait for other ranks; set FLUIDX_TIMEOUT to wait longer",
}.items(), ids=["a list", "no JSON", "a deep list", "too long", "a refusal", "the end", "nothing"])  # fmt: skip
def test_an_answer_before_the_proof_is_an_object_and_short(said, found):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.2 if said is None else 20.0)
        if said:
            threading.Thread(target=theirs.sendall, args=(len(said).to_bytes(8, "little") + said,), daemon=True).start()
        elif said is not None:
            theirs.close()
        with pytest.raises(ExecutionError) as e:
            rendezvous.answer(process_spawner.Channel(ours), 0, most=1 << 16)
    assert str(e.value) == found


def test_a_proof_is_valid_for_one_meeting(job):
    meetings = [rendezvous.RankMeeting(job(1), "the key", host, purpose) for host in (0, 1) for purpose in ("", "memory", "messages")]
    assert len({one.proof(bytes(rendezvous.NONCE), 1) for one in meetings}) == len(meetings)


def test_a_rank_that_ends_while_all_are_told_is_named_to_those_that_are_left():
    arrivals = rendezvous.Arrivals(rendezvous.RankMeeting(Launched("hand", 0, 4, 4, "a"), "the key"), (1, 2, 3))
    pairs = {rank: socket.socketpair() for rank in (1, 2, 3)}
    arrivals.peers = {rank: process_spawner.Channel(ours) for rank, (ours, _) in pairs.items()}
    pairs[2][1].close()
    with pytest.raises(ExecutionError, match="rank 2 ended before all ranks had connected") as e:
        arrivals.send_all({"start": 7})
    arrivals.refuse_all(str(e.value))
    there = {rank: process_spawner.Channel(pairs[rank][1]) for rank in (1, 3)}
    for ours, _ in pairs.values():
        ours.close()
    assert there[3].receive()[0] == {"no": "rank 2 ended before all ranks had connected"}
    assert there[1].receive()[0] == {"start": 7}
    with pytest.raises(EOFError):  # what it reads next is that rank 0 has ended, and not a goodbye
        there[1].receive()
    for channel in there.values():
        channel.close()


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


def test_a_fork_of_a_rank_does_not_say_goodbye():
    code = (
        "import os, sys\nfrom fluidx.comm.launch_environment import Launched\nfrom fluidx.comm.launched_rank import _look_after\n"
        "_look_after(Launched('hand', 0, 2, 2, 'a'), print, lambda: print('bye', os.getpid() == me), [], lambda: [])\n"
        "me = os.getpid()\nif child := os.fork():\n    os.waitpid(child, 0)\nsys.exit()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "bye True\n"), done.stderr
