"""Checkpoints: resumed bit for bit, by other ranks too; killed at any moment, the old one or the new one is there, whole."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import fluidx as fx
from fluidx.io import CheckpointError, CheckpointManager

from . import saving

ROOT = Path(__file__).parents[1]

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((8, 4)).astype("float32"), RNG.integers(0, 2, (8, 1))


def built(optimizer=fx.optimizer.Adam):
    """A program with all that a resumed training needs: dropout's random numbers, a schedule's counter, an optimizer's state."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    main.random_seed = startup.random_seed = 5
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x, y = fx.data("x", [-1, 4], "float32"), fx.data("y", [-1, 1], "int64")
        hidden = fx.layers.dropout(fx.layers.fc(x, 6, act="tanh"), 0.5)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(hidden, 2), y))
        rate = fx.layers.exponential_decay(0.1, decay_steps=2, decay_rate=0.5)
        optimizer(rate).minimize(loss)
    return main, startup, loss


def ranks(strategy, n=2, **net):
    main, startup, loss = built(**net)
    t = fx.DistributeTranspiler(fx.strategies.get(strategy))
    t.transpile(program=main, startup_program=startup, trainers=n)
    exe = fx.ParallelExecutor(t, places=fx.cpu_places(n))
    exe.run_startup()
    return main, loss, exe


def steps(exe, loss, n):
    return [exe.run(feed={"x": X, "y": Y}, fetch_list=[loss])[0].item() for _ in range(n)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "ring_optimizer"])
def test_the_same_ranks_go_on_bit_for_bit(tmp_path, name, sharded):
    main, loss, exe = ranks(name)
    with exe:
        steps(exe, loss, 3)
        fx.io.save(main, tmp_path / "c", exe, sharded=sharded, extra={"row": 24})
        expected = steps(exe, loss, 3)
    main, loss, exe = ranks(name)
    with exe:
        assert fx.io.load(main, tmp_path / "c", exe) == {"row": 24}
        assert steps(exe, loss, 3) == expected


def test_replicas_go_on_with_what_each_has(tmp_path):
    main, loss, exe = ranks("replicas")
    with exe:
        steps(exe, loss, 2)
        fx.io.save(main, tmp_path / "c", exe, sharded=True)
        expected = steps(exe, loss, 3)
    main, loss, exe = ranks("replicas")
    with exe:
        fx.io.load(main, tmp_path / "c", exe)
        assert steps(exe, loss, 3) == expected


def test_what_each_rank_has_not_sent_yet_is_kept(tmp_path):
    def compressed(rate):
        return fx.optimizer.DGCMomentum(rate, momentum=0.9, rampup_begin_step=0, sparsity=[0.75])

    main, loss, exe = ranks("data_parallel", optimizer=compressed)
    with exe:
        steps(exe, loss, 3)
        fx.io.save(main, tmp_path / "c", exe, sharded=True)
        expected = steps(exe, loss, 3)
    main, loss, exe = ranks("data_parallel", optimizer=compressed)
    with exe:
        fx.io.load(main, tmp_path / "c", exe)
        assert steps(exe, loss, 3) == expected


def test_other_ranks_strategies_and_one_device_go_on_with_the_whole_values(tmp_path):
    main, loss, exe = ranks("fsdp", n=4)
    with exe:
        steps(exe, loss, 2)
        fx.io.save(main, tmp_path / "c", exe, sharded=True)
        values = {v.name: exe.state(v.name) for v in main.list_vars() if v.persistable}
        expected = steps(exe, loss, 2)
    assert len([f for f in os.listdir(tmp_path / "c") if f.startswith("rank-")]) == 4
    main, loss, exe = ranks("zero1", n=3)
    with exe:
        fx.io.load(main, tmp_path / "c", exe)
        assert all(np.array_equal(exe.state(n), v) for n, v in values.items())
        assert np.allclose(steps(exe, loss, 2), expected, rtol=1e-5)  # sums of float32 over 3 ranks instead of 4
    fx.io.consolidate(tmp_path / "c", tmp_path / "one")
    assert fx.io.load_program(tmp_path / "one") == main
    for place in ("c", "one"):
        main, startup, loss = built()
        with fx.scope_guard(fx.Scope()):
            exe = fx.Executor()
            exe.run(startup)
            fx.io.load(main, tmp_path / place)
            assert all(np.array_equal(fx.global_scope().get(n), v) for n, v in values.items())
            got = [exe.run(main, feed={"x": X, "y": Y}, fetch_list=[loss])[0].item() for _ in range(2)]
            assert np.allclose(got, expected, rtol=1e-5)


def test_every_flipped_bit_is_found(tmp_path):
    main, startup, _ = built()
    with fx.scope_guard(fx.Scope()):
        fx.Executor().run(startup)
        fx.io.save(main, tmp_path / "m")
        fx.io.save(main, tmp_path / "c", sharded=True)
        fx.io.save_persistables(None, tmp_path / "v", main)
        fx.io.load(main, tmp_path / "m")
        rng = np.random.default_rng(0)
        loads = {
            tmp_path / "m.safetensors": lambda: fx.io.load(fx.io.load_program(tmp_path / "m"), tmp_path / "m"),
            tmp_path / "c" / "rank-00000.safetensors": lambda: fx.io.load(main, tmp_path / "c"),
            tmp_path / "c" / "__manifest__.json": lambda: fx.io.load(main, tmp_path / "c"),
            tmp_path / "v" / "fc_0.w_0": lambda: fx.io.load_persistables(None, tmp_path / "v", main),
        }
        for path, load in loads.items():
            whole = path.read_bytes()
            for at in rng.integers(0, len(whole), 60).tolist():
                path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
                with pytest.raises(CheckpointError):
                    load()
            path.write_bytes(whole)
            load()


def test_what_a_checkpoint_lacks_or_has_otherwise_is_said_and_nothing_is_set(tmp_path):
    main, startup, _ = built()
    with fx.scope_guard(fx.Scope()):
        fx.Executor().run(startup)
        fx.io.save(main, tmp_path / "c", sharded=True)
        before = fx.global_scope().get("fc_0.w_0")
        other = fx.Program("other")
        for name, shape in (("fc_0.w_0", [4, 6]), ("fc_1.w_0", [7, 2])):
            other.global_block().create_var(name, shape, "float32", persistable=True)
        with pytest.raises(CheckpointError, match=r"c: variable 'fc_1.w_0' should be f32\[7,2\], the checkpoint has f32\[6,2\]"):
            fx.io.load(other, tmp_path / "c")
        other = fx.Program("other")
        other.global_block().create_var("more", [1], "float32", persistable=True)
        with pytest.raises(CheckpointError, match="c has no variable 'more', which program other needs"):
            fx.io.load(other, tmp_path / "c")
        assert np.array_equal(fx.global_scope().get("fc_0.w_0"), before)
        os.remove(tmp_path / "c" / "rank-00000.safetensors")
        with pytest.raises(CheckpointError, match="cannot read .*rank-00000.safetensors: No such file or directory"):
            fx.io.load(main, tmp_path / "c")
        manifest = tmp_path / "c" / "__manifest__.json"
        said = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**said, "version": 9}))
        with pytest.raises(CheckpointError, match="has version 9, and this fluidx reads up to 1"):
            fx.io.load(main, tmp_path / "c")
        save_file({"fc_0.w_0": before}, tmp_path / "m.safetensors", {"format": "fluidx", "version": "2"})
        with pytest.raises(CheckpointError, match="m.safetensors has version 2, and this fluidx reads up to 1"):
            fx.io.load(main, tmp_path / "m")
        for broken in ("", "{", "[]", "{}", json.dumps({**said, "files": {"../x": {}}})):
            manifest.write_text(broken)
            with pytest.raises(CheckpointError, match="__manifest__.json is (damaged|not a manifest)"):
                fx.io.load(main, tmp_path / "c")
        (tmp_path / "empty").mkdir()
        with pytest.raises(CheckpointError, match="empty has no checkpoint"):
            fx.io.load(main, tmp_path / "empty")


@pytest.mark.parametrize("sharded", [False, True])
def test_what_json_cannot_say_is_refused_before_anything_is_written(tmp_path, sharded):
    with pytest.raises(CheckpointError, match=r"extra must be what JSON can say, .*ndarray.*; arrays: array.tolist\(\)"):
        fx.io.save(fx.Program("empty"), tmp_path / "c", sharded=sharded, extra={"rows": np.ones(2)})
    with pytest.raises(fx.ProgramError, match="extra must be a dictionary, got list"):
        fx.io.save(fx.Program("empty"), tmp_path / "c", sharded=sharded, extra=[1])
    assert os.listdir(tmp_path) == []


def test_metadata_of_other_tools_are_not_taken_for_ones_own(tmp_path):
    main = fx.Program("net")
    main.global_block().create_var("w", [2], "float32", persistable=True)
    save_file({"w": np.ones(2, "float32")}, tmp_path / "m.safetensors", {"step": "epoch 3", "extra": "none"})
    with fx.scope_guard(fx.Scope()):
        assert fx.io.load(main, tmp_path / "m") == {} and fx.global_scope().get("w").tolist() == [1, 1]


def test_a_manager_keeps_the_newest_and_goes_on_from_them(tmp_path):
    main, loss, exe = ranks("data_parallel")
    with exe, CheckpointManager(tmp_path / "run", keep=2, asynchronous=True) as checkpoints:
        assert checkpoints.restore(main, exe) is None and checkpoints.latest() is None
        for step in range(1, 5):
            steps(exe, loss, 1)
            checkpoints.save(step, main, exe, extra={"step": step})
        expected = steps(exe, loss, 2)  # while the last may still be written: it has copies
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4] and sorted(os.listdir(tmp_path / "run")) == ["step-0000000003", "step-0000000004"]
    main, loss, exe = ranks("data_parallel")
    with exe:
        checkpoints = CheckpointManager(tmp_path / "run")
        assert checkpoints.restore(main, exe) == {"step": 4}
        assert steps(exe, loss, 2) == expected
        with pytest.raises(CheckpointError, match="has no checkpoint of step 1; there are: 3, 4"):
            checkpoints.restore(main, exe, step=1)


def test_a_damaged_checkpoint_stops_neither_others_nor_its_own_renewal(tmp_path):
    main = fx.Program("net")
    main.global_block().create_var("w", [2], "float32", persistable=True)
    checkpoints = CheckpointManager(tmp_path)
    with fx.scope_guard(fx.Scope()):
        for step in (1, 2, 3):
            fx.global_scope().set("w", np.full(2, step, "float32"))
            checkpoints.save(step, main)
        (tmp_path / "step-0000000003" / "__manifest__.json").write_text("{")
        (tmp_path / "step-0000000009").write_text("no checkpoint")
        with pytest.raises(CheckpointError, match="step-0000000003.__manifest__.json is damaged.*; older checkpoints: 1, 2"):
            checkpoints.restore(main)
        checkpoints.restore(main, step=2)
        assert fx.global_scope().get("w").tolist() == [2, 2]
        checkpoints.save(3, main)
        assert checkpoints.steps() == [1, 2, 3] and checkpoints.restore(main) == {}


def test_a_checkpoint_that_is_removed_while_it_is_looked_for_gives_way_to_the_newer_one(tmp_path, monkeypatch):
    main = fx.Program("net")
    main.global_block().create_var("w", [1], "float32", persistable=True)
    load = fx.checkpoint.load_shards
    with fx.scope_guard(fx.Scope()):
        fx.global_scope().set("w", np.ones(1, "float32"))
        trains, evaluates = (CheckpointManager(tmp_path, keep=1) for _ in range(2))
        trains.save(1, main, extra={"step": 1})

        def late(*args):
            if trains.latest() == 1:
                trains.save(2, main, extra={"step": 2})
            return load(*args)

        monkeypatch.setattr(fx.checkpoint, "load_shards", late)
        assert evaluates.restore(main) == {"step": 2}


def test_what_was_saved_last_stays_beside_later_steps(tmp_path):
    main = fx.Program("net")
    main.global_block().create_var("w", [2], "float32", persistable=True)
    checkpoints = CheckpointManager(tmp_path, keep=2)
    with fx.scope_guard(fx.Scope()):
        fx.global_scope().set("w", np.ones(2, "float32"))
        for step in (10, 20):
            checkpoints.save(step, main)
        for step in (4, 5):  # the training began anew
            with pytest.warns(UserWarning, match=f"has a checkpoint of step 20; restore\\(\\) loads it instead of step {step}"):
                checkpoints.save(step, main)
        assert checkpoints.steps() == [5, 10, 20]


def test_a_file_and_a_folder_of_one_name_are_told_apart(tmp_path):
    main = fx.Program("net")
    main.global_block().create_var("w", [1], "float32", persistable=True)
    with fx.scope_guard(fx.Scope()):
        for value, sharded in ((1, False), (2, True)):
            fx.global_scope().set("w", np.float32([value]))
            fx.io.save(main, tmp_path / "m", sharded=sharded)
        with pytest.raises(CheckpointError, match=r"is a checkpoint, and so is the folder .*m; load '.*m.safetensors' or '.*m/'"):
            fx.io.load(main, tmp_path / "m")
        for path, value in (("m.safetensors", 1), ("m/", 2)):
            fx.io.load(main, f"{tmp_path}/{path}")
            assert fx.global_scope().get("w").tolist() == [value]
        fx.io.save(main, tmp_path / "n.safetensors", sharded=True)
        fx.io.load(main, tmp_path / "n.safetensors")
        (tmp_path / "k").mkdir()  # of something else
        fx.io.save(main, tmp_path / "k")
        fx.io.load(main, tmp_path / "k")


def test_a_write_behind_the_training_tells_of_its_failure(tmp_path):
    main, startup, _ = built()
    with fx.scope_guard(fx.Scope()):
        fx.Executor().run(startup)
        (tmp_path / "run").write_text("no folder")
        checkpoints = CheckpointManager(tmp_path / "run", asynchronous=True)
        checkpoints.save(1, main)
        with pytest.raises(CheckpointError, match="cannot write .*run"):
            checkpoints.wait()


# -- killed ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(saving.SECONDS)
@pytest.mark.parametrize("kind", list(saving.SAVES))
def test_killed_at_any_moment_one_whole_set_is_left(tmp_path, kind):
    """FLUIDX_TEST_KILLS=N kills so often."""
    main, total = saving.program()
    draw, command = np.random.default_rng(3), [sys.executable, "-m", "tests.saving", kind, str(tmp_path)]
    for _ in range(saving.KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as victim:
            assert victim.stdout.readline() == "0\n"
            time.sleep(draw.uniform(0, 0.05))  # what is tested holds for every moment; this one is drawn
            victim.kill()
            last = int((["0"] + victim.stdout.read().split())[-1])
        with fx.scope_guard(fx.Scope()):
            saving.LOADS[kind](main, tmp_path)
            assert saving.values() in ({last}, {last + 1})  # what was saved last, or what was being saved
            saving.SAVES[kind](main, total, tmp_path)
        assert [f for f in os.listdir(tmp_path) if f.startswith(".")] == []
