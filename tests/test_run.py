"""`fluidx run`: the same script on threads and on processes; what ends one rank ends all, with one report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fluidx import cli, native
from fluidx.comm import mpirun, nursery
from fluidx.comm.launched import found
from fluidx.config import ConfigError
from fluidx.launch import command as run
from fluidx.launch import launcher, report
from fluidx.launch.metrics import Told
from fluidx.native import shared

SCRIPT = str(Path(__file__).with_name("launch_script.py"))
pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")


def launched(tmp_path, what="", strategy="data_parallel", ranks=2, status=0, timeout=10.0, **how):
    """What each rank of the script wrote down, and what the launcher said."""
    said = []
    found = launcher.run(SCRIPT, [strategy, str(tmp_path), what], ranks, say=said.append, timeout=timeout, **how)
    assert found == status, said
    return [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(ranks) if (tmp_path / f"{r}.json").exists()], said


def one_device(w):
    """The script's training by hand: loss = sum(x @ w), so the gradient of w is the sum of x's rows in each column."""
    x, steps = (np.arange(24) % 5 - 2.0).reshape(6, 4), []
    for _ in range(3):
        steps.append([[(x @ w).sum()], (x @ w).tolist()])
        w = w - x.sum(0)[:, None]
    return steps, w.tolist()


@pytest.mark.parametrize("strategy", ["data_parallel", "ring_optimizer", "zero3"])
def test_every_rank_has_one_devices_answers(tmp_path, strategy):
    found, said = launched(tmp_path, strategy=strategy, ranks=3)
    steps, w = one_device(np.ones((4, 2)))
    assert [(f["rank"], f["world_size"]) for f in found] == [(0, 3), (1, 3), (2, 3)]
    assert all(f["steps"] == steps and f["w"] == w for f in found)
    assert said == []


LENT = """
import gc, sys, time
from pathlib import Path
import numpy as np
import fluidx as fx
from fluidx.native.shared import take

done = Path(sys.argv[1])
with fx.program_guard(fx.Program("lent"), fx.Program()):
    y = fx.layers.scale(fx.data("x", [-1, 1024], "float32"), 2.0)
    t = fx.DistributeTranspiler().transpile(trainers=fx.world_size())
exe = fx.ParallelExecutor(t)
exe.run_startup()
merge = exe.dealer.merge


def merge_late(*args):  # when rank 0 has closed its executor and has written over all memory that this gave back
    deadline = time.monotonic() + 20
    while fx.rank() and not done.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    return merge(*args)


exe.dealer.merge = merge_late
(found,) = exe.run(feed={"x": np.ones((4, 1024), "float32")}, fetch_list=[y])
exe.close()
del exe, merge, merge_late
gc.collect()
if fx.rank() == 0:
    room = [take(1 << k) for k in range(6, 20) for _ in range(64)]
    for a in room:
        a[:] = 7
    done.touch()
assert (found == 2).all(), found
"""


def test_what_a_rank_gave_at_last_stays_until_others_have_read_it(tmp_path):
    """One rank may have closed its executor, and work on, while another one still joins what both were to give."""
    script, said = tmp_path / "script.py", []
    script.write_text(LENT)
    assert launcher.run(str(script), [str(tmp_path / "done")], 2, say=said.append, timeout=30.0) == 0, said
    assert (tmp_path / "done").exists()


def test_a_rank_needs_its_own_programs_only(tmp_path):
    found, _ = launched(tmp_path, "own pair", "ring_optimizer")
    assert all(f["steps"] == one_device(np.ones((4, 2)))[0] for f in found)


def test_state_is_set_and_read_as_on_one_device(tmp_path):
    found, _ = launched(tmp_path, "set state", "zero3")
    assert all((f["steps"], f["w"]) == one_device(np.arange(8.0).reshape(4, 2)) for f in found)


def test_what_is_saved_is_loaded(tmp_path):
    found, _ = launched(tmp_path, "save", "zero3")
    assert all(f["loaded"] == f["w"] and f["restored"] == [{"next": 3}, f["w"]] for f in found)


def test_a_slow_rank_is_named_before_the_deadline(tmp_path, monkeypatch):
    """Rank 0 goes on when it sees that the launcher has said so: it writes nothing, and what the other one prints is not shown."""
    monkeypatch.setenv("FLUIDX_STALL_SECONDS", "0.05")
    (script := tmp_path / "slow.py").write_text(
        "import pathlib, sys, time\nimport fluidx as fx\nfrom fluidx.comm.member import member\n"
        "while fx.rank() == 0 and not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.01)\nmember().meet()\n"
    )
    said, go = [], tmp_path / "go"
    assert launcher.run(str(script), [str(go)], 2, say=lambda text: (said.append(text), go.touch()), timeout=20) == 0
    assert re.search(r"^fluidx run: rank 1 has waited 0.05 s in .*, rank 0 has not arrived; it goes on waiting$", said[0])


def test_the_same_script_runs_on_threads(tmp_path):
    done = command("-n", "3", SCRIPT, "zero3", tmp_path, "")
    assert (done.returncode, done.stdout) == (0, "rank 0 is done\n")
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["world_size"] == 3 and found["steps"] == one_device(np.ones((4, 2)))[0]


@pytest.mark.parametrize(
    "what, status, message",
    [
        ("raise", 1, "rank 1: ValueError: no more data\n"),
        ("exit", 3, "rank 1: its script exited with status 3\n"),
        ("kill", 137, "rank 1: its process was killed by signal 9 (SIGKILL)\n"),
        ("leave", 1, "rank 1 did not come: its script had come to its end\n"),
        ("other ranks", 1, "was launched as 2 by fluidx run; transpile it with trainers=fx.world_size(), or launch 3"),
        ("other feed", 1, "rank 0 runs on x: float32[6, 4] and fetches"),
        ("another program", 1, "\n  rank 0: param %w: f32[4,2]\n  rank 1: param %w: f32[4,3]\n"),
    ],
)  # fmt: skip
def test_what_ends_a_rank_ends_all_with_one_report(tmp_path, what, status, message):
    found, (report,) = launched(tmp_path, what, status=status, timeout=1.0 if what == "leave" else 10.0)
    assert found == [] or what == "leave"
    assert message in report and "the last collective that each rank completed:\n    rank 0: " in report


def test_a_report_shows_the_users_line(tmp_path):
    _, (report,) = launched(tmp_path, "raise", status=1)
    assert f'File "{SCRIPT}", line' in report and 'raise ValueError("no more data")' in report and "fluidx/executor" not in report


def test_ranks_are_started_again(tmp_path):
    found, said = launched(tmp_path, "kill", restarts=2)
    assert [f["restart"] for f in found] == ["1", "1"]
    assert said[1:] == ["fluidx run: starting all 2 ranks again, restart 1 of 2"]


@pytest.mark.parametrize(
    "lost, least, ranks, last",
    [
        ([1, 1, 0], None, [4, 4, 4], "starting all 4 ranks again, restart 2 of 3"),
        ([1, 2, 0], 1, [4, 3, 1], "starting again on 1 of 3 ranks, restart 2 of 3; a step's whole batch stays, a rank takes 1/1 of it"),
        ([1, 1, 0], 3, [4, 3], "2 of 3 ranks are left, and --min-ranks asks for 3: the script is not started again"),
        ([4, 1, 0], 2, [4, 4, 3], "starting again on 3 of 4 ranks, restart 2 of 3; a step's whole batch stays, a rank takes 1/3 of it"),
    ],
)
def test_who_is_started_again(lost, least, ranks, last):
    """What fails on all ranks is no rank's fault. Failures come in the order of `lost`, which ends with a run that goes well."""
    started, said = [], []

    class Job:
        def __init__(self, script, args, ranks, restart, say):
            started.append(ranks)

        def run(self):
            gone = lost[len(started) - 1]
            return launcher.Ended(bool(gone), "", bool(gone), gone)

    status = launcher.run(SCRIPT, [], 4, restarts=3, say=said.append, least=least, job=Job)
    assert (started, said[-1], status) == (ranks, f"fluidx run: {last}", int(len(started) < len(lost)))


@pytest.mark.parametrize("what, ranks", [("raise", {1}), ("kill", {1}), ("leave", {1}), ("other feed", {0, 1})])
def test_which_ranks_failed_by_themselves(tmp_path, what, ranks):
    job = launcher.Job(SCRIPT, ["data_parallel", str(tmp_path), what], 2, timeout=1.0)
    assert job.run().lost == len(ranks) and report.lost(job.failures) == ranks


def test_what_all_ranks_print_stands_behind_their_number(tmp_path, capfd):
    launched(tmp_path, everything=True)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] rank 0 is done", "[1] rank 1 is done"]


@pytest.mark.mpi
@pytest.mark.skipif(bool(mpirun.why_not()), reason=mpirun.why_not())
def test_ranks_that_mpirun_starts_are_watched_shown_and_started_again_alike(tmp_path, capfd):
    said, log = [], tmp_path / "log"
    args = ["data_parallel", str(tmp_path), "kill"]
    assert run.run(SCRIPT, args, 2, "mpi", None, restarts=1, timeout=20, everything=True, metrics=log, say=said.append) == 0
    assert said[0].startswith("fluidx run: rank 1: its process was killed by signal 9 (SIGKILL)\n")
    assert said[1:] == ["fluidx run: starting all 2 ranks again, restart 1 of 1"]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] rank 0 is done", "[1] rank 1 is done"]
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == [0, 1, 0, 1, 2]  # rank 1 is killed in step 2 of the first run


def test_rank_0_alone_prints(tmp_path, capfd):
    launched(tmp_path)
    assert capfd.readouterr().out == "rank 0 is done\n"


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_stays_behind_a_launcher_that_is_ended(tmp_path, number, status):
    script = tmp_path / "wait.py"
    script.write_text("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    args = [sys.executable, "-m", "fluidx.cli", "run", "-n", "2", "--backend", "processes", "--output", "all", str(script)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
        job.send_signal(number)
        assert job.wait(30) == status
        assert ("interrupted by" in job.stderr.read()) == (number != signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):  # the system kills them, one after the other
        assert time.monotonic() < deadline


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def command(*args):
    return subprocess.run([sys.executable, "-m", "fluidx.cli", "run", *map(str, args)], capture_output=True, text=True, timeout=60)


# -- what is logged -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_line_of_json_for_each_run_that_fetches(tmp_path, monkeypatch, capfd, backend):
    for name in ("CPU_NUM", "FLUIDX_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")  # and back, when this test ends
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
    args = ["data_parallel", str(tmp_path), ""]
    status = run.run(SCRIPT, args, 2, backend, None, 0, None, False, tmp_path / "log", print)
    assert (status, *capfd.readouterr()) == (0, "rank 0 is done\n", "")  # no line that moves where there is no terminal
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    totals = [total for (total,), _ in one_device(np.ones((4, 2)))[0]]
    assert [(line["program"], line["step"], line["reduce_sum_0.tmp_0"]) for line in lines] == [("net", k, t) for k, t in enumerate(totals)]
    assert "fc_0.tmp_0" not in lines[0] and lines[0]["rate"] is None  # [6, 2], and nothing ran before
    assert all(line["rate"] > 0 and line["time"] >= before["time"] for before, line in zip(lines, lines[1:], strict=False))


def test_the_rate_follows_the_clock_and_json_has_no_nan():
    lines, times = [], iter([10.0, 12.0, 13.0])
    told = Told(lines.append, lambda: next(times))
    for step, value in enumerate((1.0, np.inf, np.nan)):
        told("net", step, ["loss", "many"], [np.array([value], "float32"), np.zeros(2)])
    told("net", 3, [], [])
    assert [line["rate"] for line in lines] == [None, 0.5, pytest.approx(1 / (0.9 * 2 + 0.1 * 1))]
    assert [line["loss"] for line in lines] == [1.0, None, None] and "many" not in lines[0]


# -- options, and other launchers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (["--backend", "nccl"], "GPUs are ranks of one process, places=fx.cuda_places()"),
        (["--hosts", SCRIPT], "--hosts: ranks that are threads are on this host; --backend mpi has several"),
        (["--restarts", "1"], "--restarts and --output all are of --backend processes and mpi"),
        (["--backend", "mpi", "--elastic"], "--elastic and --min-ranks are of --backend processes; start a job of mpi anew on fewer ranks"),
        (["--backend", "processes", "--elastic"], "give --restarts, how often it may be"),
        (["--backend", "processes", "--restarts", "1", "--min-ranks", "3"], "--min-ranks 3 is more than the 2 ranks of -n"),
        (["--metrics", "/nowhere/log"], "--metrics: /nowhere/log cannot be written: No such file or directory"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    done = CliRunner().invoke(cli.main, ["run", "-n", "2", *options, SCRIPT])
    assert done.exit_code == 2 and message in done.output


def test_how_many_ranks_has_to_be_said(monkeypatch):
    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)
    assert "how many ranks? give -n" in CliRunner().invoke(cli.main, ["run", SCRIPT]).output


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
        ({"FLUIDX_RANK": "0"}, "FLUIDX_RANK is set, and nothing says how many ranks there are; set FLUIDX_WORLD_SIZE"),
        ({"FLUIDX_RANK": "2", "FLUIDX_WORLD_SIZE": "2"}, "FLUIDX_RANK: expected a rank below 2, which FLUIDX_WORLD_SIZE says, found 2"),
        ({**TORCHRUN, "RANK": "one"}, "RANK: expected a whole number, 0 or more, found 'one'"),
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
            started.append((rank, nursery.start("fluidx.testing.started:started", given, [out.fileno(), err.fileno()])))
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


@pytest.mark.parametrize("what, message", [("kill", "rank 1: its process has ended"), ("raise", "no more data")])
def test_their_failures_end_them_all(tmp_path, what, message):
    (_, error, status), (_, _, other) = by_hand(tmp_path, [0, 1], 2, what, FLUIDX_RESTART="0")
    assert status == 1 and other != 0 and message in error


def test_who_is_missing_is_said(tmp_path):
    (_, error, status), _ = by_hand(tmp_path, [0, 2], 4, FLUIDX_TIMEOUT="1")
    assert status == 1 and "ranks 1, 3 have not come within 1 s, as launched by torchrun" in error
