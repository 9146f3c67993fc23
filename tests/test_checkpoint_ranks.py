"""Checkpoints of ranks that are processes of one script: each writes its own file, and all are put in place together or none."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.ranks.background_writer import SharedCopy
from fluidx.io import CheckpointError, CheckpointManager
from fluidx.launch import process_job
from fluidx.native import shared

from . import checkpoint_script as script
from . import saving

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")


def launched(folder, what, ranks=2, status=0, said=None, **how):
    """What each rank found and wrote, or what the launcher said."""
    said = [] if said is None else said
    ended = process_job.run(script.__file__, [what, str(folder)], ranks, say=said.append, timeout=10.0, **how)
    assert ended == status, said
    return said if status else [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks) if (folder / f"{r}.json").exists()]


def contents(folder):
    """The files that hold what was saved. Manifests name the moment."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != "__manifest__.json" and p.suffix != ".json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def test_each_rank_writes_its_file_and_the_bytes_are_those_of_one_process(tmp_path):
    first, second = launched(tmp_path, "saved")
    assert "rank-00000" in first["wrote"] and second["wrote"] == ["rank-00001"]
    bytes_of_ranks = contents(tmp_path)
    for places in (fx.cpu_places(2), fx.process_places(2)):
        main, y, loss, t = script.built(2)
        with fx.ParallelExecutor(t, places=places) as exe:
            exe.run_startup()
            script.train(exe, loss, 2)
            values = script.saved(str(tmp_path / "one"), main, y, loss, exe)
        assert first["found"] == second["found"] == values
        assert contents(tmp_path / "one") == bytes_of_ranks
    with fx.scope_guard(fx.Scope()):
        model, feeds, fetches = fx.io.load_inference_model(tmp_path / "model", fx.Executor())
        (got,) = fx.Executor().run(model, feed=script.FEED, fetch_list=fetches)
    assert np.array_equal(got, script.FEED["x"] @ final_weights())


def final_weights(steps=4):
    """By hand, after so many steps: the gradient is the sum of x's rows; a step takes it off, and half of what the last one took."""
    gradient, velocity, w = script.FEED["x"].sum(0)[:, None], 0.0, np.ones((4, 2), "float32")
    for _ in range(steps):
        velocity = 0.5 * velocity + gradient
        w = w - velocity
    return w


def test_what_a_script_does_not_wait_for_is_in_place_when_it_ends(tmp_path):
    launched(tmp_path, "not_waited_for")
    assert fx.io.CheckpointManager(tmp_path).steps() == [2]


def test_a_folder_that_ranks_do_not_share_is_refused_on_all_with_what_is_missing(tmp_path):
    first, second = (one["found"] for one in launched(tmp_path, "elsewhere"))
    host = os.uname().nodename
    assert first[0] == second[0] and first[0].startswith("cannot save in run: not all hosts share this folder.")
    assert f"the checkpoint would lack rank-00001.safetensors of {host}. Use a folder that all hosts share" in first[0]
    assert second[1] == "cannot read run: No such file or directory" and first[1] == f"{second[1]} (rank 1, on host {host})"
    assert first[2] == second[2]  # they go on
    assert sorted(contents(tmp_path)) == ["run/program.txt", "run/rank-00000.safetensors", "run/rank-00001.safetensors"]


def test_what_one_rank_cannot_write_is_said_on_all_and_the_old_one_is_left(tmp_path):
    first, second = (one["found"] for one in launched(tmp_path, "full"))
    step = str(tmp_path / "step-0000000001")
    assert second[0] == f"cannot write {step}: File too large"
    assert first[0] == f"{second[0]} (rank 1, on host {os.uname().nodename})" and first[1:] == second[1:]
    assert first[1] == {} and sorted(os.listdir(step)) == [
        "__manifest__.json",
        "program.txt",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def test_executors_of_a_script_may_have_their_variables_in_common(tmp_path):
    wanted = [(script.FEED["x"] @ final_weights(steps)).tolist() for steps in (2, 4)]
    assert [one["found"] for one in launched(tmp_path, "judged")] == [wanted, wanted]


def test_rank_0_writes_an_onnx_model_of_what_all_hold(tmp_path):
    pytest.importorskip("onnx")
    assert [one["wrote"] for one in launched(tmp_path, "exported")] == [["net"], []]
    model = fx.onnx.load(str(tmp_path / "net.onnx"))
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model.startup, scope=scope)
    (got,) = exe.run(model.program, feed={model.feeds[0].name: script.FEED["x"]}, fetch_list=model.fetches, scope=scope)
    assert np.array_equal(got, script.FEED["x"] @ final_weights(2))


def test_a_rank_that_saves_alone_is_told_so(tmp_path):
    (report,) = launched(tmp_path, "one_alone", status=1)
    assert "the ranks make different calls: rank 0: read 'w'; rank 1: run with feed x: float32[6, 4]" in report
    assert not (Path(tmp_path) / "model").exists()


# -- ranks that are processes beside the script's ----------------------------------------------------------------------------------------


@pytest.fixture
def beside():
    """A training on two such ranks, behind two steps."""
    main, _, loss, t = script.built(2)
    with fx.ParallelExecutor(t, places=fx.process_places(2), timeout=1) as exe:
        exe.run_startup()
        script.train(exe, loss, 2)
        yield main, loss, exe


def test_a_rank_that_cannot_write_its_file_says_so_and_the_old_one_is_left(tmp_path, beside):
    main, loss, exe = beside
    fx.io.save(main, tmp_path / "c", exe, sharded=True, extra={"next": 2})
    before, values = contents(tmp_path), script.train(exe, loss, 1)
    resource.prlimit(exe.pool.processes[1].pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=f"^cannot write {tmp_path / 'c'}: File too large$"):
        fx.io.save(main, tmp_path / "c", exe, sharded=True)
    assert contents(tmp_path) == before
    assert fx.io.load(main, tmp_path / "c", exe) == {"next": 2} and script.train(exe, loss, 1) == values  # the ranks go on


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_process_does_not_live_to_write_is_written_all_the_same(tmp_path, monkeypatch, beside, how):
    main, loss, exe = beside
    w, asked = exe.state("w"), SharedCopy.ask

    def ask(aside, *message):
        if aside.process is exe.pool.processes[1]:
            os.kill(aside.process.pid, how)
            aside.timeout = 0.1
        return asked(aside, *message)

    monkeypatch.setattr(SharedCopy, "ask", ask)
    checkpoints = CheckpointManager(tmp_path, asynchronous=True)
    checkpoints.save(2, main, exe)
    checkpoints.wait()
    with pytest.raises(fx.RankError, match="^rank 1"):
        script.train(exe, loss, 1)
    exe.run_startup()
    assert checkpoints.restore(main, exe) == {} and np.array_equal(exe.state("w"), w)
    assert sorted(p.name for p in (tmp_path / "step-0000000002").iterdir()) == [
        "__manifest__.json", "program.txt", "rank-00000.safetensors", "rank-00001.safetensors",
    ]  # fmt: skip


def test_what_is_written_while_the_ranks_end_is_as_it_was_when_it_was_saved(tmp_path, beside):
    main, loss, exe = beside
    w, checkpoints = exe.state("w"), CheckpointManager(tmp_path, asynchronous=True)
    checkpoints.save(2, main, exe)
    script.train(exe, loss, 1)
    exe.close()
    checkpoints.wait()
    with fx.scope_guard(fx.Scope()):
        checkpoints.restore(main)
        assert np.array_equal(fx.global_scope().get("w"), w)


# -- all that a training goes on from -------------------------------------------------------------------------------------------------


def training():
    """Dropout, a loss scale that grows with every second step, a rate that falls, Adam, and samples fed in an order of their own."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    main.random_seed = startup.random_seed = 5
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x, label = fx.data("x", [-1, 4], "float32"), fx.data("label", [-1, 1], "int64")
        hidden = fx.layers.dropout(fx.layers.fc(x, 6, act="relu"), 0.5)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(hidden, 2), label))
        adam = fx.optimizer.Adam(fx.layers.exponential_decay(0.1, decay_steps=2, decay_rate=0.5))
        optimizer = fx.mixed_precision.decorate(adam, init_loss_scaling=8.0, incr_every_n_steps=2)
        optimizer.minimize(loss)
    t = fx.DistributeTranspiler("fsdp")
    t.transpile(program=main, startup_program=startup, trainers=2)
    return main, loss, fx.DataFeeder([x, label]), t


def test_random_numbers_rate_scale_optimizer_and_data_go_on_together_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    samples = [(rng.standard_normal(4).astype("float32"), int(rng.integers(2))) for _ in range(64)]
    order = rng.permutation(64).tolist()

    def train(first, last, saved_at=None):
        """The losses of some steps, and all state behind them."""
        main, loss, feeder, t = training()
        losses, at = [], 0
        with (
            fx.ParallelExecutor(t, places=fx.process_places(2)) as exe,
            fx.io.CheckpointManager(tmp_path, asynchronous=True) as checkpoints,
        ):
            exe.run_startup()
            if first:
                at = checkpoints.restore(main, exe)["samples"]
                assert at == 8 * first
            for step in range(first, last):
                losses.append(exe.run(feed=feeder.feed([samples[k] for k in order[at : at + 8]]), fetch_list=[loss])[0].tolist())
                at += 8
                if step + 1 == saved_at:
                    checkpoints.save(step + 1, main, exe, extra={"samples": at})
            return losses, {v.name: exe.state(v.name).tolist() for v in main.list_vars() if v.persistable}

    losses, state = train(0, 7, saved_at=3)
    assert train(3, 7) == (losses[3:], state)
    assert state["loss_scaling_0"] == [8 * 2.0**3] and state["num_good_steps_0"] == [1]  # seven steps: it grew three times


# -- with the ranks that are left ---------------------------------------------------------------------------------------------------


def test_two_of_three_ranks_go_on_and_find_what_one_device_finds(tmp_path):
    said = []
    first, second = launched(tmp_path, "elastic", 3, said=said, restarts=1, least=1)
    main, startup, _, loss = script.net()
    with fx.scope_guard(fx.Scope()):
        exe = fx.Executor()
        exe.run(startup)
        losses = [exe.run(main, feed=script.feed(step), fetch_list=[loss])[0].item() for step in range(8)]
        w = fx.global_scope().get("w").tolist()
    assert first["found"] == second["found"] == [2, 4, losses[4:], w]
    assert said[0].startswith("fluidx run: rank 2: its process was killed by signal 9")
    assert said[1:] == ["fluidx run: restarting on 2 of 3 ranks (restart 1 of 1); the global batch stays, each rank computes 1/2 of it"]


# -- killed ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(saving.SECONDS)
@pytest.mark.parametrize("kind", ["ranks", "ranks behind", "places", "places behind"])
def test_a_rank_or_who_started_it_killed_at_any_moment_leaves_one_whole_set(tmp_path, kind):
    """FLUIDX_TEST_KILLS=N kills so often."""
    draw, main, path = np.random.default_rng(3), saving.trained()[0], tmp_path / "run"
    launch = ["fluidx.cli", "run", "-n", "2", "--backend", "processes", saving.__file__]
    behind, command = "behind" in kind, [sys.executable, "-m", *(["tests.saving"] if "places" in kind else launch), kind, str(path)]
    for _ in range(saving.KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as job:
            lines = [job.stdout.readline() for _ in range(3)]
            assert lines == ["0\n", "1\n", "2\n"]
            ranks = [int((tmp_path / f"run.rank-{r}").read_text()) for r in range(2)]
            time.sleep(draw.uniform(0, 0.1))  # what is tested holds for every moment; this one is drawn
            os.kill(draw.choice([*ranks, job.pid]), 9)
            last = int([*lines, *job.stdout.read().split()][-1])
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{pid}") for pid in ranks):  # the system ends them with the launcher
            assert time.monotonic() < deadline
        with fx.scope_guard(fx.Scope()):
            checkpoints = fx.io.CheckpointManager(path)
            if not behind:
                fx.io.load(main, path)
                assert saving.values() in ({last}, {last + 1})  # what was saved last, or what was being saved
                fx.io.save(main, path, sharded=True)
            else:
                checkpoints.restore(main)
                assert saving.values() in ({last - 1}, {last})  # what was in place when the last one was begun, or that
                checkpoints.save(last + 1, main)
                assert sorted(os.listdir(path)) == [f"step-{step:010d}" for step in checkpoints.steps()]
        assert [p for p in path.rglob("*") if p.name.startswith(".")] == []
        if behind:
            shutil.rmtree(path)  # the next job's steps begin with 0 again
