"""Ranks on two and three hosts that TCP connects give what one device gives, and each fault ends all of them with the right report."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fluidx import cli, native
from fluidx.native import shared
from tests.comm.hosts import hosts as made_hosts
from tests.comm.hosts import two_hosts
from tests.faults.hosts_job import HostsJob
from tests.sweep import ALL

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
LATE = 3.0  # seconds that ranks wait for one another where one does not come


@pytest.fixture(scope="module")
def three():
    with made_hosts(3) as found:
        yield found


@pytest.fixture
def job(three, tmp_path):
    started = []

    def make(n=2, **how):
        started.append(HostsJob(tmp_path, three[:n], **how))
        return started[-1]

    yield make
    for one in started:
        one.close()


def one_device():
    """By hand: loss = sum(x @ w), so the gradient of w is the sum of x's rows in each column."""
    x, w, losses = (np.arange(32) % 5 - 2.0).reshape(8, 4), np.ones((4, 2)), []
    for _ in range(3):
        losses.append((x @ w).sum())
        w = w - x.sum(0)[:, None]
    return [losses, w.tolist()]


@pytest.mark.parametrize("n, here, strategy", [(2, 2, "zero1"), (3, 2, "data_parallel"), (2, 1, "zero3"), (3, 1, "ring_optimizer")])
def test_hosts_without_mpi_give_what_one_device_gives(job, n, here, strategy):
    for status, out, error in job(n, here=here, strategy=strategy).start().end().values():
        assert (status, json.loads(out)) == (0, one_device()), error


def test_the_variables_of_torchrun_are_enough_and_the_interface_is_found(job):
    made = job()
    address, port = made.address.split(":")
    for rank in range(4):
        own = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": rank % 2, "MASTER_ADDR": address, "MASTER_PORT": port}
        plain = dict.fromkeys(("FLUIDX_RANK", "FLUIDX_WORLD_SIZE", "FLUIDX_LOCAL_WORLD_SIZE", "FLUIDX_ADDRESS", "FLUIDX_INTERFACE"), "")
        made.each[rank] = {**own, **plain}
    found = made.start().end()
    assert [json.loads(found[rank][1]) for rank in range(4)] == [one_device()] * 4
    assert found[0][2].startswith("fluidx: 4 ranks, launched by torchrun, over TCP\n")


# -- faults in a run: which rank, what the reporting rank prints, and what each other one ----------------------------------------


def killed(rank, by, on):
    last = "\n    rank {}: .*" * 4
    known = "\n  the last collective that each rank completed:" + last.format(*range(4))
    report = rf"fluidx: rank {rank} of 4, on host {on}, ended in the middle of the script\n  after step 1{known}"
    return "kill", rank, {by: report}, f"rank {rank}: its process has ended"


def raised(rank, on):
    error = "ValueError: no more data"
    return "raise", rank, {rank: rf"fluidx: rank {rank} of 4, on host {on}, failed\n(.*\n)*{error}"}, f"rank {rank}: {error}"


CALLS = r"the ranks make different calls: ranks 0, 1, 2: run with feed x: float32\[8, 4\], .*; rank 3: run with feed x: float32\[4, 4\]"
PROGRAMS = r"the ranks do not run the same program: .*\n  ranks 0, 1, 3: param %w: f32\[4,2\]\n  rank 2: param %w: f32\[4,3\]"
RUNS = {
    "kill -9 of rank 0": killed(0, 1, "{0}"),
    "kill -9 of a rank beside rank 0": killed(1, 0, "{0}"),
    "kill -9 of the leader of another host": killed(2, 3, "{1}"),
    "kill -9 of another rank of another host": killed(3, 2, "{1}"),
    "an error on rank 0": raised(0, "{0}"),
    "an error on another host": raised(3, "{1}"),
    "a leader stops, as by SIGSTOP": ("stop", 2, {}, "waited 3 s in compare_calls; rank 2 did not arrive"),
    "another rank stops": ("stop", 3, {}, "waited 3 s in compare_calls; rank 3 did not arrive"),
    "rank 0 stops": ("stop", 0, {}, "waited 3 s in compare_calls; rank 0 did not arrive"),
    "a script that ends early": ("exit", 2, {}, "rank 2 did not arrive"),
    "another feed": ("other feed", 3, {}, CALLS),
    "another program": ("other program", 2, {}, PROGRAMS),
}
SAMPLE = (
    "kill -9 of the leader of another host",
    "kill -9 of another rank of another host",
    "a leader stops, as by SIGSTOP",
    "another feed",
)


@pytest.mark.parametrize("fault", RUNS if ALL else SAMPLE)
def test_a_fault_in_a_run_ends_all_ranks_with_its_reason(job, three, fault):
    what, victim, reports, said = RUNS[fault]
    made = job(what=what, rank=victim, timeout=LATE if what in ("stop", "exit") else 20.0)
    found = made.start().end([victim] if what == "stop" else [])
    names = [host.name for host in three]
    for rank, (status, out, error) in found.items():
        assert out == "" and status != 0, (rank, out)
        if rank in reports:
            assert re.search(reports[rank].format(*names), error), (rank, error)
        elif rank != victim:
            assert re.search(said, error), (rank, error)
    printed = "".join(error for _, _, error in found.values())
    assert len(re.findall("ended in the middle|, failed\n", printed)) == 1 or what not in ("kill", "raise"), printed


@pytest.mark.skipif(not ALL, reason="of the whole suite")
def test_a_host_that_is_lost_is_reported_by_rank_0(job, three):
    made = job(what="wait").start()
    _until_all_are_there(made)
    for rank in (2, 3):
        made.processes[rank].end()
    (made.folder / "on").touch()
    found = made.end()
    first = re.search(r"fluidx: rank ([23]) of 4, on host (\S+), ended in the middle of the script", found[0][2])
    assert first and first[2] == three[1].name, found
    assert re.search(r"rank [23]: its process has ended", found[1][2])


def test_a_cable_that_is_pulled_is_a_deadline_on_each_side(job, three):
    if not three[1].enter:
        pytest.skip("only a network of its own can be cut")
    made = job(what="wait", timeout=LATE).start()
    _until_all_are_there(made)
    cable = [*three[1].enter, "ip", "link", "set", "cable"]
    subprocess.run([*cable, "down"], check=True)
    try:
        (made.folder / "on").touch()
        found = made.end()
    finally:
        subprocess.run([*cable, "up"], check=True)
    for rank, (status, out, error) in found.items():
        others = "[23]" if rank < 2 else "[01]"
        assert status == 1 and out == "" and re.search(f"waited 3 s in .*; ranks? {others}.* did not arrive", error), (rank, error)


def _until_all_are_there(made):
    deadline = time.monotonic() + 60
    while len(list(made.folder.glob("here-*"))) < made.n:
        assert time.monotonic() < deadline, made.said(0)
        time.sleep(0.05)


# -- faults before all have connected -------------------------------------------------------------------------------------------


def there(made):
    """Where rank 0 listens."""
    host, _, port = made.address.rpartition(":")
    return host, int(port)


def ended(found, rank, said):
    status, out, error = found[rank]
    assert status == 1 and out == "" and re.search(said, error), (rank, error)


def test_a_wrong_key_is_refused_and_named(job):
    found = job(each={2: {"FLUIDX_JOB_KEY": "another"}}, timeout=LATE).start().end()
    ended(found, 2, "the FLUIDX_JOB_KEY of this process is not that of rank 0; all ranks of a job must have the same")
    for rank in (0, 1, 3):
        ended(found, rank, "rank 2 did not connect within 3 s .*; rank 2 was refused: the FLUIDX_JOB_KEY of this process is not that")


def test_without_a_key_nothing_is_sent_and_what_to_do_is_said(job):
    found = job(each={rank: {"FLUIDX_JOB_KEY": ""} for rank in range(4)}).start().end()
    for rank in range(4):
        ended(found, rank, r"ranks on several hosts need a secret that all of them know .*: set FLUIDX_JOB_KEY to one text on all hosts")


def test_a_rank_of_another_size_is_told(job):
    found = job(each={3: {"FLUIDX_WORLD_SIZE": "5"}}, timeout=LATE).start().end()
    ended(found, 3, "this process was launched as one of 5 ranks, and rank 0 as one of 4")
    ended(found, 0, "rank 3 did not connect within 3 s .*; rank 3 was refused: this process was launched as one of 5 ranks")


def test_a_rank_that_does_not_come_is_named_on_all_ranks(job):
    found = job(each={3: None}, timeout=LATE).start().end()
    for rank in range(3):
        ended(found, rank, r"rank 3 did not connect within 3 s \(launched by FLUIDX_RANK\); set FLUIDX_TIMEOUT to wait longer")


def test_without_rank_0_the_others_say_where_they_look_for_it(job):
    made = job(each={0: None, 1: None}, timeout=LATE)
    found = made.start().end()
    said = rf"cannot reach the socket of rank 0 at {made.address} within 3 s: .*; check that rank 0 has started, FLUIDX_ADDRESS"
    for rank in (2, 3):
        ended(found, rank, said)


def test_a_second_process_for_a_rank_is_refused(job):
    made = job(each={3: None}, timeout=20.0).start()
    made.start_rank(2, name="twin")
    deadline = time.monotonic() + 60
    while not (twin := next((name for name in (2, "twin") if "launched as" in made.said(name)[1]), None)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    made.start_rank(3)
    found = made.end()
    ended(found, twin, "two processes were launched as rank 2; this is the second one")
    assert [status for name, (status, _, _) in found.items() if name != twin] == [0] * 4


def test_hosts_that_say_different_numbers_of_ranks_are_refused_on_all_ranks(job):
    found = job(each={2: {"FLUIDX_LOCAL_WORLD_SIZE": "1"}}).start().end()
    for rank in range(4):
        ended(found, rank, r"all say \[2, 2, 1, 2\] ranks; ranks of a host must have consecutive numbers")


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.0\r\n\r\n", bytes(72), b"\xff" * 5000, b""], ids=["a request", "zeros", "a lot", "nothing"]
)
def test_what_is_no_rank_does_not_disturb(job, three, junk):
    made = job(each={3: None}).start()
    code = (
        "import socket, sys, time\nend = time.monotonic() + 30\nwhile time.monotonic() < end:\n    s = socket.socket()\n"
        f"    if s.connect_ex({there(made)!r}) == 0: break\n    time.sleep(0.05)\n"
        f"s.sendall({junk!r})\nprint(len(s.recv(1000)))\n"
    )
    done = subprocess.run([*three[1].enter, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "40\n", done.stderr  # the greeting, and nothing else
    made.start_rank(3)
    assert [status for status, _, _ in made.end().values()] == [0] * 4


def test_a_port_that_is_taken_is_named(job, three):
    made = job(each={1: None, 2: None, 3: None}, timeout=LATE)
    code = f"import socket\ns = socket.create_server({there(made)!r})\nprint(1, flush=True)\ninput()"
    with subprocess.Popen([*three[0].enter, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        made.start_rank(0)
        ended(
            made.end(),
            0,
            f"rank 0 cannot listen at {made.address} .*: Address already in use; another program listens there: choose another",
        )
        other.stdin.close()


def test_another_program_at_the_address_is_not_taken_for_rank_0(job, three):
    made = job(each={0: None, 1: None, 3: None}, timeout=LATE)
    code = (
        f"import socket\nd = socket.create_server({there(made)!r})\n"
        "print(1, flush=True)\ns = d.accept()[0]\ns.sendall(b'SSH-2.0-another' * 9)\ninput()"
    )
    with subprocess.Popen([*three[0].enter, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        made.start_rank(2)
        ended(made.end(), 2, f"the socket of rank 0 at {made.address} belongs to another program, and not to rank 0 of a job of fluidx")
        other.stdin.close()


def test_an_interface_that_there_is_not_is_named_with_those_that_there_are(job, three):
    found = job(each={rank: {"FLUIDX_INTERFACE": "ib7"} for rank in range(4)}).start().end()
    for rank in range(4):
        ended(found, rank, r"FLUIDX_INTERFACE: host \S+ has no interface 'ib7'; its interfaces are (.*, )?lo \(127\.0\.0\.1\)")


def test_rank_0_refuses_an_address_that_is_not_its_interface(job):
    made = job(each={0: {"FLUIDX_INTERFACE": "127.0.0.1"}, 1: None, 2: None, 3: None})
    address, port = made.address.split(":")
    said = rf"rank 0 listens on 127\.0\.0\.1 \(FLUIDX_INTERFACE\), and {made.address} is another address of its host, {address}: set "
    ended(made.start().end(), 0, said + rf"FLUIDX_ADDRESS=127\.0\.0\.1:{port} on all hosts")


def test_ranks_of_one_host_that_are_on_several_are_refused(job, three):
    if not three[1].enter:
        pytest.skip("hosts that are played by addresses have one name")
    each = {rank: {"FLUIDX_LOCAL_WORLD_SIZE": "3" if rank < 3 else "1"} for rank in range(4)}
    found = job(each=each).start().end()
    names = ", ".join(f"rank {rank} on {three[rank // 2].name}" for rank in range(3))
    for rank in range(4):
        ended(found, rank, f"ranks 0, 1, 2 were launched as the ranks of one host, and are on several: {names}; ranks of a host must have")


def test_a_rank_beside_rank_0_is_reached_though_their_host_has_a_name_of_its_loopback(job, three):
    """As on Debian, where a host's own name is 127.0.1.1: ranks 0 and 1 use that, and the other host the address of the network."""
    if not three[1].enter:
        pytest.skip("only a host with a network of its own has a loopback of its own")
    made = job()
    port = made.address.rpartition(":")[2]
    for rank in range(4):
        made.each[rank] = {"FLUIDX_INTERFACE": ""} | ({"FLUIDX_ADDRESS": f"127.0.1.1:{port}"} if rank < 2 else {})
    for status, out, error in (found := made.start().end()).values():
        assert (status, json.loads(out)) == (0, one_device()), error
    assert f"fluidx: rank 0 listens at port {port} of all interfaces of host {three[0].name}; FLUIDX_INTERFACE chooses one\n" in found[0][2]


def test_an_address_that_cannot_be_reached_is_named(job):
    found = (
        job(each={0: None, 1: None, 3: None, 2: {"FLUIDX_ADDRESS": "nowhere.invalid:29500", "FLUIDX_INTERFACE": ""}}, timeout=1.0)
        .start()
        .end()
    )
    ended(found, 2, r"host \S+ cannot reach the socket of rank 0 at nowhere\.invalid:29500 within 1 s: .*FLUIDX_INTERFACE and firewalls")


def test_who_listens_can_be_seen_on_the_chosen_interface_only(job, three):
    """Rank 0 waits for a rank that does not come; meanwhile its port is open at its own address, and not at that of the host's loopback."""
    made = job(each={3: None}, timeout=LATE).start()
    port, deadline = int(made.address.rpartition(":")[2]), time.monotonic() + 30
    enter = three[0].enter

    def opened(address):
        code = f"import socket\nprint(socket.socket().connect_ex(({address!r}, {port})))"
        return subprocess.run([*enter, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"

    while not opened(three[0].address):
        assert time.monotonic() < deadline
    assert not opened("127.0.0.1")
    made.end()


# -- fluidx run --hosts, without MPI ------------------------------------------------------------------------------------------------


def run_on_hosts(script, folder, prefix, hosts, environ, ranks=4):
    words = [sys.executable, "-m", "fluidx.cli", "run", "-n", str(ranks), "--backend", "processes", "--hosts", hosts, *script]
    environ = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([*prefix, *words], env=environ, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def test_a_command_in_place_of_ssh_that_is_not_there_is_named(tmp_path):
    given = json.dumps([[["192.0.2.1", 1]], ["true"]])
    environ = {**os.environ, "FLUIDX_SSH": "no-such-ssh -q", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-m", "fluidx.launch.agents_main", given]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    said = "fluidx: cannot run no-such-ssh to reach host 192.0.2.1: No such file or directory; install it, or set FLUIDX_SSH to another "
    said += "command\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_what_an_agent_prints_last_is_shown_and_its_signal_is_a_status(tmp_path):
    """A command in place of ssh that is killed by a signal: shells call that 128 + 15."""
    (agent := tmp_path / "agent").write_text("#!/bin/sh\necho fluidx agent 5000\nseq 20000\nkill -TERM $$\n")
    agent.chmod(0o755)
    given = json.dumps([[["192.0.2.1", 1]], ["true"]])
    environ = {**os.environ, "FLUIDX_SSH": str(agent), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-m", "fluidx.launch.agents_main", given]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (143, "".join(f"{k}\n" for k in range(1, 20001))), done.stderr


def test_fluidx_run_starts_ranks_on_hosts_without_mpi(tmp_path):
    script = Path(__file__).with_name("hosts_script.py")
    with two_hosts(tmp_path, 2) as where:
        done = run_on_hosts([str(script), json.dumps({"out": str(tmp_path)})], tmp_path, *where)
    assert done.returncode == 0 and [json.loads(line) for line in done.stdout.splitlines()] == [one_device()] * 4, done.stderr
    assert done.stderr.count("fluidx: 4 ranks, launched by FLUIDX_RANK, over TCP\n") == 1


def test_every_rank_has_the_key_and_no_command_line(tmp_path):
    (script := tmp_path / "key.py").write_text(
        "import glob, os\nimport fluidx as fx\nkey, found = os.environ['FLUIDX_JOB_KEY'].encode(), []\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n    try:\n        found += [path] * (key in open(path, 'rb').read())\n"
        "    except OSError:\n        pass\nprint(fx.rank(), os.environ['FLUIDX_LOCAL_WORLD_SIZE'], len(key), len(found))\n"
    )
    with two_hosts(tmp_path, 2) as where:
        done = run_on_hosts([str(script)], tmp_path, *where, ranks=3)
    assert sorted(done.stdout.splitlines()) == ["0 2 32 0", "1 2 32 0", "2 1 32 0"], done.stderr


@pytest.mark.skipif(not ALL, reason="of the whole suite")
def test_a_host_on_which_nothing_can_be_started_is_named(tmp_path):
    (hosts := tmp_path / "hosts").write_text("localhost slots=1\nnowhere.invalid slots=1\n")
    script = Path(__file__).with_name("hosts_script.py")
    where = [], str(hosts), {**os.environ, "FLUIDX_SSH": "false"}
    done = run_on_hosts([str(script), json.dumps({"out": str(tmp_path)})], tmp_path, *where, ranks=2)
    assert done.returncode == 1 and done.stderr.endswith("rank 1 failed; nothing can be started on nowhere.invalid\n"), done.stderr


def test_hosts_with_too_little_room_are_refused_before_anything_starts(tmp_path):
    (hosts := tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    done = CliRunner().invoke(cli.main, ["run", "-n", "4", "--backend", "processes", "--hosts", str(hosts), __file__])
    said = "--hosts: 4 ranks do not fit on the hosts, which have 3 slots: a 1, b 2; give the hosts more slots, or -n fewer ranks"
    assert done.exit_code == 2 and said in done.output
