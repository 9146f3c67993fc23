"""What happens when a rank that is a process fails, ends, is killed or stopped: all end in time, the report says which, nothing is left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.comm import process_spawner
from fluidx.native import shared
from tests.executor import faulty
from tests.faults.engine import hears_ctrl_c, one_traceback
from tests.sweep import examples

if reason := native.why_not() or shared.why_not():
    pytest.skip(reason, allow_module_level=True)

TIMEOUT = 0.5


def model(how, rank=1, step=2):
    x = fx.data("x", [-1, 4], "float32")
    h = fx.layers.fc(x, 3, act="relu")
    h = fx.ir.Builder(fx.default_main_program().global_block()).t_faulty(h, how=how, rank=rank, step=step)  # THE LINE
    loss = fx.layers.mean(fx.layers.fc(h, 2))
    fx.optimizer.SGD(0.1).minimize(loss)
    return loss


FEED = {"x": np.ones((6, 4), "float32")}


def transpiled(how, ranks=3, strategy="data_parallel", **where):
    loss = model(how, **where)
    t = fx.DistributeTranspiler(strategy)
    t.transpile(trainers=ranks)
    return t, loss


def started(how, ranks=3, strategy="data_parallel", timeout=TIMEOUT, **where):
    t, loss = transpiled(how, ranks, strategy, **where)
    exe = fx.ParallelExecutor(t, places=fx.process_places(ranks, imports=[faulty.__name__]), timeout=timeout)
    exe.run_startup()
    return exe, loss


def gone(pids, limit=5.0):
    """Whether the processes have ended, all of them, soon."""
    deadline = time.monotonic() + limit
    while left := [p for p in pids if os.path.exists(f"/proc/{p}")]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


def fails(exe, loss, steps=5):
    """The report of the run that fails, and in which step it did."""
    pids = [p.pid for p in exe.pool.processes]
    for step in range(steps):
        begin = time.monotonic()
        try:
            exe.run(feed=FEED, fetch_list=[loss])
        except fx.RankError as e:
            assert time.monotonic() - begin < exe.timeout + 5
            assert not gone(pids)
            with pytest.raises(fx.RankError, match="^a rank failed in an earlier run, so the ranks may differ; call run_startup()"):
                exe.run(feed=FEED, fetch_list=[loss])
            return e, step
    raise AssertionError("no run failed")


def says_how_far_all_came(text, ranks, where="step 2"):
    """Behind what a report says of one rank, it says what all of them completed last."""
    each = "".join(rf"\n    rank {r}: .+" for r in range(ranks))
    return re.search(rf"\n  in {where}\n  on host .+, process \d+\n  the last collective that each rank completed:{each}$", text)


def works_again(exe, loss):
    """In new processes, until the same step comes."""
    exe.run_startup()
    assert np.isfinite(exe.run(feed=FEED, fetch_list=[loss])[0]).all()
    exe.close()


STRATEGIES = ["data_parallel", "reduce_broadcast", "ring_optimizer"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_raises_ends_all(strategy):
    exe, loss = started("raise", strategy=strategy, timeout=20)
    e, step = fails(exe, loss)
    assert e.rank == 1 and step == 2
    text = str(e)
    assert text.startswith("rank 1: op t_faulty failed: ZeroDivisionError: of all things\n  in ")
    assert "\n  written at " in text and "test_process_faults.py" in text and says_how_far_all_came(text, 3)
    assert isinstance(e.__cause__.__cause__, ZeroDivisionError)
    works_again(exe, loss)


@pytest.mark.parametrize("how, said", [("interrupt", "KeyboardInterrupt"), ("leave", "SystemExit: 3")])
def test_whatever_a_rank_raises_ends_all(how, said):
    exe, loss = started(how, timeout=20)
    e, _ = fails(exe, loss)
    assert e.rank == 1 and str(e).startswith(f"rank 1: {said}\n  in ") and "t_faulty" in str(e)
    works_again(exe, loss)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how, said", [("exit", "exited with status 7"), ("kill", "was killed by signal 9 (SIGKILL)")])
def test_a_rank_that_ends_ends_all(how, said, strategy):
    exe, loss = started(how, strategy=strategy, timeout=20)
    e, step = fails(exe, loss)
    text = str(e)
    assert e.rank == 1 and step == 2 and text.startswith(f"rank 1: the process {said}\n") and says_how_far_all_came(text, 3)
    waited = text.partition("  rank 0 waited\n  in ")[2] or text.partition("  rank 2 waited\n  in ")[2]
    assert 'group="dp"' in waited.partition("\n")[0]
    works_again(exe, loss)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_is_stopped_ends_all(strategy):
    exe, loss = started("stop", strategy=strategy)
    e, step = fails(exe, loss)
    text = str(e)
    assert e.rank == 1 and step == 2 and says_how_far_all_came(text, 3), text
    assert "rank 1 is stopped, as by SIGSTOP" in text and "0.5 s" in text and 'group="dp"' in text, text
    works_again(exe, loss)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_rank_that_is_lost_between_two_steps_is_named(sign):
    exe, loss = started("raise", step=99)
    exe.run(feed=FEED, fetch_list=[loss])
    os.kill(exe.pool.processes[2].pid, sign)
    e, _ = fails(exe, loss)
    assert e.rank == 2 and (sign.name in str(e)), str(e)
    works_again(exe, loss)


def test_all_ranks_stopped_at_once_are_found_too():
    exe, loss = started("raise", step=99, ranks=2)
    for p in exe.pool.processes:
        os.kill(p.pid, signal.SIGSTOP)
    e, _ = fails(exe, loss)
    assert "the process has been stopped for 0.5 s" in str(e)
    exe.close()


def test_random_moments():
    """Ranks that are killed or stopped whenever it may be, while they run."""
    rng = np.random.default_rng(0)
    exe, loss = started("raise", step=-1)
    for _ in range(examples(2, 50)):
        exe.run_startup()
        victim, sign = int(rng.integers(3)), (signal.SIGKILL, signal.SIGSTOP)[rng.integers(2)]
        pid = exe.pool.processes[victim].pid
        timer = threading.Timer(rng.uniform(0, 0.02), os.kill, [pid, sign])
        timer.start()
        e, _ = fails(exe, loss, steps=100_000)
        timer.join()
        assert e.rank == victim, str(e)
    exe.close()


def test_the_startup_program_may_fail():
    exe, loss = started("raise", step=99)
    os.kill(exe.pool.processes[0].pid, signal.SIGKILL)
    with pytest.raises(fx.RankError, match="rank 0: the process was killed by signal 9") as error:
        exe.run_startup()
    assert error.value.rank == 0 and says_how_far_all_came(str(error.value), 3, "the startup program")
    works_again(exe, loss)


def test_a_module_that_is_not_there_is_named():
    model("raise")
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(trainers=2)
    with pytest.raises(fx.RankError, match="rank 0: ModuleNotFoundError: No module named 'no_such_module'"):
        fx.ParallelExecutor(t, places=fx.process_places(2, imports=["no_such_module"]))


# -- the user's process -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import numpy as np
import fluidx as fx
from tests.executor import test_process_faults as faults

exe, loss = faults.started({how!r}, step={step}, timeout=20)
helper = __import__("fluidx.comm.process_spawner").comm.process_spawner._current.process.pid
print(*[p.pid for p in exe.pool.processes], helper, flush=True)
while True:
    exe.run(feed=faults.FEED, fetch_list=[loss])
"""

# the signal comes when the script begins line number `count` of the modules that have to do with ranks
INTERRUPTED = """
import os, signal, sys
import numpy as np
import fluidx as fx
from tests.executor import test_process_faults as faults

fluidx, python = os.path.dirname(fx.__file__), os.path.dirname(os.__file__)
ours = [f"{{fluidx}}/{{name}}/" for name in ("executor", "comm", "native")]
ours = *ours, *[f"{{python}}/{{name}}.py" for name in ("selectors", "socket", "subprocess", "weakref", "_weakrefset", "contextlib")]
count = {count}

def on_line(frame, event, arg):
    global count
    if event == "line" and (count := count - 1) == 0:
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)
    return on_line

t, loss = faults.transpiled("raise", ranks=2, step=-1)
t.verify()
sys.settrace(lambda frame, event, arg: on_line if frame.f_code.co_filename.startswith(ours) else None)
exe = fx.ParallelExecutor(t, places=fx.process_places(2, imports=[faults.faulty.__name__]), timeout=20)
exe.run_startup()
for step in range(3):
    exe.run(feed=faults.FEED, fetch_list=[loss])
exe.close()
print("through", count)
"""


@pytest.fixture
def run_script():
    """Starts a script and kills it when the test ends."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    started = []

    def run(code, **how):
        p = subprocess.Popen(
            [sys.executable, "-c", code.format(**how)], cwd=root, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hears_ctrl_c,
        )  # fmt: skip
        started.append(p)
        return p

    yield run
    for p in started:
        p.kill()
        p.communicate()


@pytest.fixture
def script(run_script):
    """Starts a script that trains until something happens; also the processes that it has."""

    def run(how="raise", step=99999999):
        p = run_script(SCRIPT, how=how, step=step)
        return p, list(map(int, p.stdout.readline().split()))

    return run


def test_a_script_whose_rank_fails_ends_with_one_report(script):
    p, pids = script("kill", 3)
    _, printed = p.communicate(timeout=30)
    assert p.returncode == 1 and len(pids) == 4 and not gone(pids)
    assert printed.count("RankError: rank 1: the process was killed by signal 9 (SIGKILL)") == 1, printed


def test_nothing_outlives_a_script_that_is_killed(script):
    """Not even a rank that is stopped."""
    p, pids = script()
    os.kill(pids[0], signal.SIGSTOP)
    p.kill()
    p.communicate(timeout=30)
    assert len(pids) == 4 and not gone(pids)


def interrupted(p, printed):
    """Has the script ended as Ctrl-C ends Python, with one message?"""
    return p.returncode == -signal.SIGINT and printed.rstrip().endswith("KeyboardInterrupt") and one_traceback(printed)


def test_ctrl_c_ends_all(script):
    p, pids = script()
    os.killpg(p.pid, signal.SIGINT)  # as a terminal does: the ranks get it too
    _, printed = p.communicate(timeout=30)
    assert interrupted(p, printed) and not gone(pids), printed


@pytest.mark.parametrize("count", [int(n) for n in np.random.default_rng(0).integers(1, 6_600, examples(2, 100))])
def test_ctrl_c_at_any_line_ends_all(run_script, count):
    p = run_script(INTERRUPTED, count=count)
    shown, printed = p.communicate(timeout=60)  # all processes have its output, so none is left
    assert not shown and interrupted(p, printed), shown + printed


def test_ctrl_c_while_the_helper_starts_is_not_reported_by_it(tmp_path, monkeypatch, capfd):
    """An interpreter that has just started would report a Ctrl-C, though the user's process does."""
    (python := tmp_path / "python").write_text(f'#!/bin/sh\nkill -INT $$\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(process_spawner, "_current", None)
    exe, loss = started("raise", step=99)
    assert np.isfinite(exe.run(feed=FEED, fetch_list=[loss])[0]).all()
    exe.close()
    process_spawner._current.close()
    assert capfd.readouterr().err == ""


def test_the_helper_is_left_when_its_end_cannot_be_waited_for(monkeypatch):
    """Ctrl-C within `Popen.poll` leaves the lock taken for which `Popen.wait` waits."""
    monkeypatch.setattr(process_spawner, "_current", None)
    monkeypatch.setattr(process_spawner, "_SOON", 0.1)
    exe, loss = started("raise", step=99)
    helper = process_spawner._current
    helper.process._waitpid_lock.acquire()
    helper.close()
    e, _ = fails(exe, loss)
    assert "was killed by signal 9" in str(e)
    works_again(exe, loss)  # with another helper
    helper.process._waitpid_lock.release()
    assert helper.process.wait() == -signal.SIGKILL
    process_spawner._current.close()


def test_a_helper_that_was_killed_is_replaced(monkeypatch):
    monkeypatch.setattr(process_spawner, "_current", None)
    exe, loss = started("raise", step=99)
    process_spawner._current.process.kill()
    e, _ = fails(exe, loss)
    assert "was killed by signal 9" in str(e)
    works_again(exe, loss)
    process_spawner._current.close()


def test_no_shared_memory_has_a_name():
    before = set(os.listdir("/dev/shm"))
    exe, loss = started("raise", step=99)
    exe.run(feed=FEED, fetch_list=[loss])
    assert set(os.listdir("/dev/shm")) <= before
    exe.close()
