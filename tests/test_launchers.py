"""Ranks that others start: what launchers say in the environment, how the ranks find each other and end, mpirun and its hosts."""

import json
import os
import re
import sys

import numpy as np
import pytest

from fluidx import native
from fluidx.comm import process_spawner
from fluidx.comm.launch_environment import found
from fluidx.comm.mpi import mpirun
from fluidx.config import ConfigError
from fluidx.launch.remote_hosts import Far, Words, lines, unreachable
from fluidx.launch.report import Failure, report
from fluidx.native import shared
from tests.test_run import SCRIPT, one_device

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "a",
    "PMIX_RANK": "1",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    "environ, by, rank, ranks, here",
    [
        (TORCHRUN, "torchrun", 3, 4, 4),
        ({**TORCHRUN, **OPEN_MPI, **SLURM}, "torchrun", 3, 4, 4),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "torchrun", 1, 2, 2),  # one terminal for each rank
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"}, "torchrun", 1, 2, 1),  # one pod for each rank
        (OPEN_MPI, "Open MPI", 1, 4, 2),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "MPICH (Hydra)", 0, 2, 2),
        ({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}, "MPICH (Hydra)", 2, 4, 4),
        (SLURM, "SLURM", 2, 4, 2),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "a", "FLUIDX_WORLD_SIZE": "2"}, "PMIx", 1, 2, 2),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1"}, "Kubernetes", 1, 2, 1),
        ({**TORCHRUN, "FLUIDX_RANK": "0", "FLUIDX_WORLD_SIZE": "2"}, "FLUIDX_RANK", 0, 2, 2),
    ],
)  # fmt: skip
def test_who_launched_a_rank_is_in_its_environment(environ, by, rank, ranks, here):
    assert found(environ)[:4] == (by, rank, ranks, here)


POD = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    "environ, address, here",
    [
        (TORCHRUN, "node0:29500", 4),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "node0:29501", 4),  # torchrun listens at the port itself
        ({**TORCHRUN, "MASTER_ADDR": "fd00::1"}, "[fd00::1]:29500", 4),
        ({**TORCHRUN, "FLUIDX_ADDRESS": "other:1", "FLUIDX_LOCAL_WORLD_SIZE": "2"}, "other:1", 2),
        (POD, "pod-0:23456", 1),
        (OPEN_MPI, "", 2),
        ({**SLURM, "FLUIDX_ADDRESS": "node0:29500"}, "node0:29500", 2),
        ({"FLUIDX_RANK": "0", "FLUIDX_WORLD_SIZE": "4", "FLUIDX_ADDRESS": "node0:29500"}, "node0:29500", 1),
        ({"FLUIDX_RANK": "0", "FLUIDX_WORLD_SIZE": "4", "FLUIDX_ADDRESS": "[::1]:29500"}, "[::1]:29500", 4),
        ({"FLUIDX_RANK": "0", "FLUIDX_WORLD_SIZE": "4", "FLUIDX_ADDRESS": "a:1", "FLUIDX_LOCAL_WORLD_SIZE": "2"}, "a:1", 2),
    ],
)  # fmt: skip
def test_where_rank_0_listens_for_other_hosts(environ, address, here):
    assert (found(environ).address, found(environ).here) == (address, here)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the batch script itself, which is no step of the job
        {"WORLD_SIZE": "4", "MASTER_ADDR": "node0"},
    ],
)
def test_a_process_that_nobody_launched(environ):
    assert found(environ) is None


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"FLUIDX_RANK": "0"}, "FLUIDX_RANK is set, but not the number of ranks; set FLUIDX_WORLD_SIZE"),
        ({"FLUIDX_RANK": "2", "FLUIDX_WORLD_SIZE": "2"}, "FLUIDX_RANK: expected a rank below 2 (FLUIDX_WORLD_SIZE), found 2"),
        ({**TORCHRUN, "RANK": "one"}, "RANK: expected a whole number, 0 or more, found 'one'"),
        ({**TORCHRUN, "FLUIDX_ADDRESS": "node0"}, "FLUIDX_ADDRESS: expected host:port, found 'node0'"),
        ({**TORCHRUN, "FLUIDX_ADDRESS": "fd00::1:5"}, "FLUIDX_ADDRESS: expected host:port, found 'fd00::1:5'"),
        ({**TORCHRUN, "FLUIDX_LOCAL_WORLD_SIZE": "0"}, "FLUIDX_LOCAL_WORLD_SIZE: expected an integer above 0, found '0'"),
    ],
)
def test_numbers_that_make_no_sense(environ, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        found(environ)


def test_ranks_of_one_job_have_one_name_and_other_jobs_another():
    jobs = [found({**TORCHRUN, "RANK": rank, "TORCHELASTIC_RUN_ID": run}).job for rank, run in [("0", "a"), ("1", "a"), ("0", "b")]]
    assert jobs[0] == jobs[1] != jobs[2]


def by_hand(tmp_path, ranks, of, what="", **environ):
    """Start the script as another launcher would, a process for each rank; what each printed, and the status that it ended with."""
    started = []
    for rank in ranks:
        own = {"RANK": str(rank), "WORLD_SIZE": str(of), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(tmp_path), **environ}
        given = {"environ": own, "script": SCRIPT, "args": ["zero1", str(tmp_path), what]}
        with (tmp_path / f"{rank}.out").open("w") as out, (tmp_path / f"{rank}.err").open("w") as err:
            started.append((rank, process_spawner.start("fluidx.testing.started:started", given, [out.fileno(), err.fileno()])))
    found = []
    for rank, process in started:
        process.channel.sock.settimeout(30)
        assert process.channel.sock.recv(1) == b""  # its end
        found.append(((tmp_path / f"{rank}.out").read_text(), (tmp_path / f"{rank}.err").read_text(), process.end()))
    return found


def test_ranks_that_another_launcher_started_meet_on_their_host(tmp_path):
    first, second = by_hand(tmp_path, [0, 1], 2)
    assert first == ("rank 0 is done\n", "fluidx: 2 ranks, launched by torchrun\n", 0) and second == ("rank 1 is done\n", "", 0)
    assert [json.loads((tmp_path / f"{r}.json").read_text())["steps"] for r in (0, 1)] == [one_device(np.ones((4, 2)))[0]] * 2


@pytest.mark.parametrize(
    "what, begins, message",
    [
        ("kill", "ended in the middle of the script\n  after step 1", "rank 1: its process has ended"),
        ("raise", "failed", "rank 0: stopped because another rank failed: rank 1: ValueError: no more data"),
    ],
)
def test_their_failures_end_them_all_with_one_report(tmp_path, what, begins, message):
    """Rank 0 tells of rank 1 where that cannot."""
    (_, error, status), (_, own, other) = by_hand(tmp_path, [0, 1], 2, what, FLUIDX_RESTART="0")
    done = "\n  the last collective that each rank completed:\n    rank 0: all_gather of float32[4] among ranks 0, 1"
    assert (error + own).count(f"fluidx: rank 1 of 2, on host {os.uname().nodename}, {begins}{done}") == 1
    assert status == 1 and other != 0 and message in error and "fluidx: rank 0 of 2, on" not in error and "Traceback" not in error


def test_who_is_missing_is_said(tmp_path):
    for _, error, status in by_hand(tmp_path, [0, 2], 4, FLUIDX_TIMEOUT="1"):
        assert status == 1 and "ranks 1, 3 did not connect within 1 s (launched by torchrun); set FLUIDX_TIMEOUT to wait longer" in error


# -- mpirun, and hosts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_mpi, status, own", [(True, 137, -9), (True, 3, 3), (True, 9, 9), (False, 9, -9), (False, 3, 3)])
def test_a_rank_s_end_by_that_of_mpirun(monkeypatch, open_mpi, status, own):
    """Open MPI's ends as a shell does, with 128 more than a signal's number, and Hydra with that number."""
    monkeypatch.setattr(mpirun, "program", lambda: "mpirun")
    monkeypatch.setattr(mpirun, "_is_open_mpi", lambda found: open_mpi)
    assert mpirun.ended(status) == own


HOSTS = [("a", 2), ("10.0.0.2", 2), ("spare", 1)]


@pytest.mark.parametrize(
    "ends, gone, lost, left",
    [
        ({0: "stopped", 1: "lost", 2: "left"}, (), {1}, [("a", 1), ("10.0.0.2", 2), ("spare", 1)]),
        ({0: "stopped", 1: "stopped"}, (), {2, 3}, [("a", 2), ("spare", 1)]),  # a host whose ranks said nothing
        ({}, {"10.0.0.2"}, {2, 3}, [("a", 2), ("spare", 1)]),
        ({0: "waited", 1: "waited"}, (), {3}, [("a", 2), ("10.0.0.2", 1), ("spare", 1)]),
        ({0: "left", 1: "stopped", 2: "stopped", 3: "stopped"}, (), {0}, [("a", 1), ("10.0.0.2", 2), ("spare", 1)]),
        ({}, (), {0, 1, 2, 3}, [("spare", 1)]),
    ],
)
def test_which_ranks_on_hosts_are_lost_and_what_is_left(ends, gone, lost, left):
    """Ranks 0 and 1 are on a, whose own name is longer, 2 and 3 on a host that is known by its address."""
    far = Far(4, HOSTS)
    for rank, host in [(2, "b"), (1, "a.cluster"), (3, "b"), (0, "a.cluster")]:
        far.take({"rank": rank, "host": host, "process": 1})
    for rank, how in ends.items():
        far.take({"rank": rank, "how": how, "at": 3 if how == "waited" else None})
        far.take({"rank": rank, "how": "ended"})  # what a rank says first holds
    assert (far.lost(gone), far.left(gone)) == (lost, left)


def test_what_ranks_on_hosts_say_makes_one_report():
    """Rank 1 was killed in an all_reduce, which rank 0 of another host has seen end; rank 2 was stopped, went on, and was stopped again."""
    far = Far(3, [("a", 1), ("b", 2)])
    for rank, host in enumerate("abb"):
        far.take({"rank": rank, "host": host, "process": 70 + rank})
    assert not far.failed()
    far.take({"rank": 0, "how": "stopped", "text": "stopped because another rank failed", "trail": ["all_reduce", "", "", 4]})
    assert not far.failed() and far.seen() is None
    for halted in (True, False, True):
        far.take({"rank": 2, "halted": halted, "trail": ["broadcast", "", "", 4]})
    assert not far.failed()
    killed = Failure(1, "lost", "its process was killed by signal 9 (SIGKILL)", status=137)
    far.take({**killed._asdict(), "trail": ["broadcast", "all_reduce", "\n  in mul", 4]})
    assert far.failed() and report(far.seen()).splitlines() == [
        "rank 1: its process was killed by signal 9 (SIGKILL)",
        "  in mul",
        "  in step 4",
        "  on host b, process 71",
        "  the last collective that each rank completed:",
        "    rank 0: all_reduce: stopped",
        "    rank 1: broadcast; then it was in all_reduce",
        "    rank 2: broadcast: its process was stopped, as by SIGSTOP",
    ]


def test_who_is_to_blame_is_told_from_whom_mpi_ended_because_of_it():
    """Whichever is heard of first."""
    for others in ({0: "left", 2: "stopped"}, {2: "stopped", 0: "left"}):
        far = Far(3, HOSTS)
        for rank, how in [*others.items(), (1, "lost")]:
            far.take({"rank": rank, "host": "a", "process": 1})
            far.take({"rank": rank, "how": how, "text": "its process ended"})
        assert report(far.seen()).startswith("rank 1: its process ended\n") and far.lost() == {1}


def test_without_hosts_nothing_tells_one_rank_from_another():
    assert Far(2, ()).lost() == {0, 1}


@pytest.mark.mpi
@pytest.mark.skipif(bool(mpirun.why_not()), reason=mpirun.why_not())
def test_hosts_that_cannot_be_reached_are_named():
    here = os.uname().nodename
    assert unreachable([(here, 1), ("nowhere.invalid", 1)]) == {"nowhere.invalid"}


def test_what_ranks_say_of_themselves_is_taken_out_of_what_is_shown(capsys):
    heard = []
    words = Words(sys.stdout, "job", heard.append)
    one, other = ({"rank": 1, "text": "a b " * 999}, {"rank": 2, "text": "é\n"})
    (mine,) = lines("job", "2.7", other)
    first, *rest, last = lines("job", "1.7", one)
    cut = b"fluidx job 3.7\nfluidx job 3.7 1 {\n"
    for part in (b"first\nhalf a line" + first, *rest, mine[:9], mine[9:], b"\nfluidx jobs\n", last, cut):
        words.take(part)
    assert heard == [other, one] and all(len(line) < 1000 for line in (first, *rest, last))
    assert capsys.readouterr().out == "first\nhalf a line\n\nfluidx jobs\n"


def test_hosts_are_read_from_files_of_both_kinds(tmp_path):
    (file := tmp_path / "hosts").write_text("# ours\na slots=2 max_slots=4\n\nb.cluster:3 # MPICH's\nc\na slots = 1\n")
    assert mpirun.hosts_of(file) == [("a", 3), ("b.cluster", 3), ("c", None)]
