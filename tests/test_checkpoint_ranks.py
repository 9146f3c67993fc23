"""Checkpoints of ranks that are processes of one script: each writes its own file, and all are put in place together or none."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.launch import launcher
from fluidx.native import shared

from . import checkpoint_script as script
from . import saving

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")


def launched(folder, what, ranks=2, status=0, said=None, **how):
    """What each rank found and wrote, or what the launcher said."""
    said = [] if said is None else said
    ended = launcher.run(script.__file__, [what, str(folder)], ranks, say=said.append, timeout=10.0, **how)
    assert ended == status, said
    return said if status else [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks) if (folder / f"{r}.json").exists()]


def contents(folder):
    """The files that hold what was saved. Manifests name the moment."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != "__manifest__.json" and p.suffix != ".json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.mark.parametrize("places", [fx.cpu_places, fx.process_places])
def test_each_rank_writes_its_file_and_the_bytes_are_those_of_one_process(tmp_path, places):
    main, y, loss, t = script.built(2)
    with fx.ParallelExecutor(t, places=places(2)) as exe:
        exe.run_startup()
        script.train(exe, loss, 2)
        values = script.saved(str(tmp_path / "one"), main, y, loss, exe)
    (tmp_path / "ranks").mkdir()
    first, second = launched(tmp_path / "ranks", "saved")
    assert first["found"] == second["found"] == values
    assert "rank-00000" in first["wrote"] and second["wrote"] == ["rank-00001"]
    assert contents(tmp_path / "ranks") == contents(tmp_path / "one")
    with fx.scope_guard(fx.Scope()):
        model, feeds, fetches = fx.io.load_inference_model(tmp_path / "ranks" / "model", fx.Executor())
        (got,) = fx.Executor().run(model, feed=script.FEED, fetch_list=fetches)
    assert np.array_equal(got, script.FEED["x"] @ final_weights())


def final_weights():
    """By hand, after four steps: the gradient is the sum of x's rows; a step takes it off, and half of what the last one took."""
    gradient, velocity, w = script.FEED["x"].sum(0)[:, None], 0.0, np.ones((4, 2), "float32")
    for _ in range(4):
        velocity = 0.5 * velocity + gradient
        w = w - velocity
    return w


def test_what_a_script_does_not_wait_for_is_in_place_when_it_ends(tmp_path):
    launched(tmp_path, "not_waited_for")
    assert fx.io.CheckpointManager(tmp_path).steps() == [2]


def test_a_folder_that_ranks_do_not_share_is_refused_with_what_would_be_missing(tmp_path):
    host = os.uname().nodename
    (first, _), (second, _) = (one["found"] for one in launched(tmp_path, "elsewhere"))
    assert first == second and first.startswith("cannot save in run: it is not one folder for all ranks.")
    assert f"what would be missing is rank-00001.safetensors of {host}. Give a folder that all hosts share" in first
    assert contents(tmp_path) == {}


def test_what_one_rank_cannot_write_is_said_on_all_and_the_old_one_is_left(tmp_path):
    first, second = (one["found"] for one in launched(tmp_path, "full"))
    step = str(tmp_path / "step-0000000001")
    assert first == second and first[0] == f"cannot write {step}: File too large (on host {os.uname().nodename})"
    assert first[1] == {} and sorted(os.listdir(step)) == [
        "__manifest__.json",
        "program.txt",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


def test_a_rank_that_saves_alone_is_told_so(tmp_path):
    (report,) = launched(tmp_path, "one_alone", status=1)
    assert "the ranks do different things: rank 0 reads 'w'; rank 1 runs on x: float32[6, 4]" in report
    assert not (Path(tmp_path) / "model").exists()


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
    assert said[1:] == ["fluidx run: starting again on 2 of 3 ranks, restart 1 of 1; a step's whole batch stays, a rank takes 1/2 of it"]


# -- killed ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ranks", "ranks behind"])
def test_a_rank_or_the_launcher_killed_at_any_moment_leaves_one_whole_set(tmp_path, kind):
    """FLUIDX_KILLS=N kills so often."""
    draw, main, path = np.random.default_rng(3), saving.trained()[0], tmp_path / "run"
    command = [sys.executable, "-m", "fluidx.cli", "run", "-n", "2", "--backend", "processes", saving.__file__, kind, str(path)]
    for _ in range(int(os.environ.get("FLUIDX_KILLS", "1"))):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
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
            if kind == "ranks":
                fx.io.load(main, path)
                assert saving.values() in ({last}, {last + 1})  # what was saved last, or what was being saved
                fx.io.save(main, path, sharded=True)
            else:
                checkpoints.restore(main)
                assert saving.values() in ({last - 1}, {last})  # what was in place when the last one was begun, or that
                checkpoints.save(last + 1, main)
                assert sorted(os.listdir(path)) == [f"step-{step:010d}" for step in checkpoints.steps()]
        assert [p for p in path.rglob("*") if p.name.startswith(".")] == []
        if kind == "ranks behind":
            shutil.rmtree(path)  # the next job's steps begin with 0 again
