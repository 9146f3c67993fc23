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
from fluidx.comm.mpi import mpirun
from fluidx.launch import command as run
from fluidx.launch import process_job, report
from fluidx.launch.metrics import Log, Told
from fluidx.native import shared

SCRIPT = str(Path(__file__).with_name("launch_script.py"))
pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")


def launched(tmp_path, what="", strategy="data_parallel", ranks=2, status=0, timeout=10.0, **how):
    """What each rank of the script wrote down, and what the launcher said."""
    said = []
    found = process_job.run(SCRIPT, [strategy, str(tmp_path), what], ranks, say=said.append, timeout=timeout, **how)
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
merge = exe.programs.splitter.merge


def merge_late(*args):  # when rank 0 has closed its executor and has written over all memory that this gave back
    deadline = time.monotonic() + 20
    while fx.rank() and not done.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    return merge(*args)


exe.programs.splitter.merge = merge_late
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
    assert process_job.run(str(script), [str(tmp_path / "done")], 2, say=said.append, timeout=30.0) == 0, said
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
        "import pathlib, sys, time\nimport fluidx as fx\nfrom fluidx.comm.launched_rank import member\n"
        "while fx.rank() == 0 and not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.01)\nmember().meet()\n"
    )
    said, go = [], tmp_path / "go"
    assert process_job.run(str(script), [str(go)], 2, say=lambda text: (said.append(text), go.touch()), timeout=20) == 0
    assert re.search(r"^fluidx run: rank 1 has waited 0.05 s in .*, rank 0 has not arrived; it goes on waiting$", said[0])


def test_the_same_script_runs_on_threads(tmp_path):
    done = command("-n", "3", SCRIPT, "zero3", tmp_path, "")
    assert (done.returncode, done.stdout) == (0, "rank 0 is done\n")
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["world_size"] == 3 and found["steps"] == one_device(np.ones((4, 2)))[0]


ON_ONE_DEVICE = """
import numpy as np
import fluidx as fx

x = fx.data("x", [-1, 2], "float32")
loss = fx.layers.mean(fx.layers.fc(x, 1))
fx.optimizer.SGD(0.1).minimize(loss)
exe = fx.Executor()
exe.run(fx.default_startup_program())
exe.run(feed={"x": np.ones((4, 2), "float32")}, fetch_list=[loss])
"""
ON_RANKS = """
t = fx.DistributeTranspiler("data_parallel").transpile(trainers=fx.world_size())
with fx.ParallelExecutor(t) as ranks:
    ranks.run_startup()
"""


@pytest.mark.parametrize(
    "ranks, script, named", [(3, ON_ONE_DEVICE, True), (1, ON_ONE_DEVICE, False), (3, ON_ONE_DEVICE + ON_RANKS, False)]
)
def test_a_script_that_uses_no_ranks_is_named(tmp_path, ranks, script, named):
    (tmp_path / "train.py").write_text(script)
    done = command("-n", ranks, tmp_path / "train.py")
    assert done.returncode == 0
    assert ("an Executor does not use the 3 ranks of -n. To use them, give exe.run fx.CompiledProgram(main)" in done.stderr) == named


@pytest.mark.parametrize(
    "what, status, message",
    [
        ("raise", 1, "rank 1: ValueError: no more data\n"),
        ("exit", 3, "rank 1: its script exited with status 3\n"),
        ("kill", 137, "rank 1: its process was killed by signal 9 (SIGKILL)\n"),
        ("leave", 1, "rank 1 did not arrive: its script had ended\n"),
        ("other ranks", 1, "was launched as 2 by fluidx run; transpile it with trainers=fx.world_size(), or launch 3"),
        ("other feed", 1, "rank 0: run with feed x: float32[6, 4], fetch"),
        ("another program", 1, "  rank 0: param %w: f32[4,2]\n  rank 1: param %w: f32[4,3]\n  the first operator that differs is\n"),
        ("another strategy", 1, '\n  rank 1: strategy "zero1()"\n  the first operator that differs is\n  rank 0: '),
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
    assert said[1:] == ["fluidx run: restarting all 2 ranks (restart 1 of 2)"]


@pytest.mark.parametrize(
    "lost, least, ranks, last",
    [
        ([1, 1, 0], None, [4, 4, 4], "restarting all 4 ranks (restart 2 of 3)"),
        ([1, 2, 0], 1, [4, 3, 1], "restarting on 1 of 3 ranks (restart 2 of 3); the global batch stays, each rank computes 1/1 of it"),
        ([1, 1, 0], 3, [4, 3], "2 of 3 ranks are left, fewer than --min-ranks 3: no restart"),
        ([4, 1, 0], 2, [4, 4, 3], "restarting on 3 of 4 ranks (restart 2 of 3); the global batch stays, each rank computes 1/3 of it"),
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
            return process_job.Ended(bool(gone), "", bool(gone), gone)

        def left(self):
            return {}

    status = process_job.run(SCRIPT, [], 4, restarts=3, say=said.append, least=least, job=Job)
    assert (started, said[-1], status) == (ranks, f"fluidx run: {last}", int(len(started) < len(lost)))


@pytest.mark.parametrize("what, ranks", [("raise", {1}), ("kill", {1}), ("leave", {1}), ("other feed", {0, 1})])
def test_which_ranks_failed_by_themselves(tmp_path, what, ranks):
    job = process_job.ProcessJob(SCRIPT, ["data_parallel", str(tmp_path), what], 2, timeout=1.0)
    assert job.run().lost == len(ranks) and report.lost(job.failures) == ranks


def test_what_all_ranks_print_stands_behind_their_number(tmp_path, capfd):
    launched(tmp_path, everything=True)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] rank 0 is done", "[1] rank 1 is done"]


@pytest.mark.mpi
@pytest.mark.skipif(bool(mpirun.why_not()), reason=mpirun.why_not())
def test_ranks_that_mpirun_starts_are_watched_shown_and_started_again_alike(tmp_path, capfd):
    said, log = [], tmp_path / "log"
    args = ["data_parallel", str(tmp_path), "kill"]
    assert run.run(SCRIPT, args, 3, "mpi", None, restarts=1, timeout=20, everything=True, metrics=log, say=said.append, least=2) == 0
    assert said[0].startswith("fluidx run: rank 1: its process was killed by signal 9 (SIGKILL)\n")
    assert said[1].startswith("fluidx run: restarting on 2 of 3 ranks (restart 1 of 1); ") and len(said) == 2
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


def command(*args, **how):
    return subprocess.run([sys.executable, "-m", "fluidx.cli", "run", *map(str, args)], capture_output=True, text=True, timeout=60, **how)


@pytest.fixture
def run_here(monkeypatch):
    """For a script that runs in this process: what that changes is as before when the test ends."""
    for name in ("CPU_NUM", "FLUIDX_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    for name, value in (("argv", sys.argv), ("path", sys.path[:]), ("excepthook", sys.excepthook)):
        monkeypatch.setattr(sys, name, value)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder to start in, with a package of which one module prints how it was started, and fails."""
    (folder := tmp_path / "package").mkdir()
    (folder / "__init__.py").touch()
    (folder / "other.py").write_text("import sys\n")
    (folder / "train.py").write_text("from .other import sys\nprint(sys.argv[1:], __name__)\n1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    return tmp_path


def test_a_module_with_options_of_its_own_and_only_its_part_of_the_traceback(package):
    done = command("-n", "2", "-m", "package.train", "--steps", "5", "-n", "3", "--", "--metrics", cwd=package)
    assert (done.returncode, done.stdout) == (1, "['--steps', '5', '-n', '3', '--', '--metrics'] __main__\n")
    where = f'  File "{package}/package/train.py", line 3, in <module>\n    1 / 0\n'
    assert done.stderr.replace("    ~~^~~\n", "") == f"Traceback (most recent call last):\n{where}ZeroDivisionError: division by zero\n"


def test_a_module_on_ranks_that_are_processes(package, monkeypatch, capfd):
    monkeypatch.chdir(package)
    said = []
    assert process_job.run("package.train", ["--steps"], 2, say=said.append, timeout=10.0, module=True) == 1
    assert capfd.readouterr().out == "['--steps'] __main__\n" and re.match(r"fluidx run: rank \d: ZeroDivisionError", said[0])


def test_ranks_run_where_no_standard_file_is_open(tmp_path):
    words = f"exec {sys.executable} -m fluidx.cli run -n 2 --backend processes {SCRIPT} data_parallel {tmp_path} '' <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", words], timeout=60).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_ctrl_c_is_one_line_where_ranks_are_threads(tmp_path, run_here):
    (script := tmp_path / "script.py").write_text("raise KeyboardInterrupt\n")
    done = CliRunner().invoke(cli.main, ["run", "-n", "2", str(script)])
    assert (done.exit_code, done.output) == (130, "fluidx run: interrupted by SIGINT\n")


# -- what is logged -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_line_of_json_for_each_run_that_fetches(tmp_path, run_here, capfd, backend):
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


def shown(folder):
    """What TensorBoard shows of a folder: (step, value) by tag."""
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_what_rank_0_fetches_once_also_behind_a_restart(tmp_path):
    """The first start ends in step 2, and the second begins with step 0: what the first wrote of these steps is not shown twice."""
    assert shown(tmp_path) == {}
    folder, args, said = tmp_path / "runs" / "a", ["data_parallel", str(tmp_path), "kill"], []
    status = run.run(SCRIPT, args, 2, "processes", None, 1, 10.0, False, tmp_path / "log", said.append, tensorboard=folder)
    assert status == 0 and len(list(folder.iterdir())) == 2 and len((tmp_path / "log").read_text().splitlines()) == 5
    assert shown(folder) == {"reduce_sum_0.tmp_0": [(k, total) for k, ((total,), _) in enumerate(one_device(np.ones((4, 2)))[0])]}


def test_another_program_is_another_run_of_tensorboard_and_nan_is_shown(tmp_path):
    assert shown(tmp_path) == {}
    with Log(tensorboard=tmp_path) as log:
        for program, step, loss in [("train", 7, 0.5), ("valid/1", 0, 0.25), ("train", 8, None)]:
            log.take({"loss": loss, "program": program, "step": step, "time": 100.0 + step, "rate": None})
    ((_, first), (_, last)) = shown(tmp_path)["loss"]
    assert first == 0.5 and np.isnan(last) and shown(tmp_path / "valid_1") == {"loss": [(0, 0.25)]}


def test_without_tensorboard_the_extra_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    done = CliRunner().invoke(cli.main, ["run", "-n", "2", "--tensorboard", str(tmp_path / "runs"), SCRIPT])
    assert done.exit_code == 2 and "pip install -e '.[tensorboard]'" in done.output and not (tmp_path / "runs").exists()


# -- options -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        (["--hosts", SCRIPT], "--hosts needs --backend processes, mpi or nccl: threads run on this host"),
        (["--restarts", "1"], "--restarts and --output all need --backend processes, mpi or nccl"),
        (["--elastic"], "--elastic and --min-ranks need --backend processes, mpi or nccl: threads are one process"),
        (["--backend", "processes", "--elastic"], "give --restarts too"),
        (["--backend", "processes", "-n", "257"], "cannot allocate memory for 257 processes: at most 256 ranks share memory"),
        (["--backend", "mpi", "-n", "257"], "cannot allocate memory for 257 processes: at most 256 ranks share memory"),
        (["--backend", "mpi", "--hosts", os.devnull], f"--hosts: {os.devnull} names no host"),
        (["-m", "no.such.module"], "-m: no module 'no' here or on Python's path"),
        (["--backend", "processes", "--restarts", "1", "--min-ranks", "3"], "--min-ranks 3 is more than the 2 ranks of -n"),
        (["--metrics", "/nowhere/log"], "--metrics: /nowhere/log cannot be written: No such file or directory"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    done = CliRunner().invoke(cli.main, ["run", "-n", "2", *options, SCRIPT])
    assert done.exit_code == 2 and message in done.output


def test_how_many_ranks_has_to_be_said(monkeypatch):
    monkeypatch.delenv("PET_NPROC_PER_NODE", raising=False)
    assert "give the number of ranks with -n" in CliRunner().invoke(cli.main, ["run", SCRIPT]).output
