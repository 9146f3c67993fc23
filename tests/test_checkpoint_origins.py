"""Checkpoints that were written with another optimizer, of ranks, or by other tools: the error says so, and what to write."""

import pickle
import re
import zipfile

import numpy as np
import pytest

import fluidx as fx
from fluidx.io import CheckpointError


def program(optimizer=None):
    main, startup = fx.Program("net"), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 2], "float32"), 1, name="fc"))
        if optimizer is not None:
            optimizer.minimize(loss)
    fx.Executor().run(startup)
    return main


WAYS = {
    "one file": (lambda main, path: fx.io.save(main, path / "m"), lambda main, path: fx.io.load(main, path / "m")),
    "sharded": (lambda main, path: fx.io.save(main, path, sharded=True), lambda main, path: fx.io.load(main, path)),
    "vars": (
        lambda main, path: fx.io.save_persistables(None, path, main),
        lambda main, path: fx.io.load_persistables(None, path, main),
    ),
    "vars in one": (
        lambda main, path: fx.io.save_persistables(None, path, main, "all"),
        lambda main, path: fx.io.load_persistables(None, path, main, "all"),
    ),
}
ONLY = {
    "fx.io.load(program, path, executor, var_list=program.all_parameters())": ("one file", "sharded"),
    "fx.io.load_params(executor, dirname, program)": ("vars", "vars in one"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_another_optimizer_is_named_as_such(tmp_path, way):
    save, load = WAYS[way]
    save(program(fx.optimizer.Adam(0.1)), tmp_path)
    main = program(fx.optimizer.Momentum(0.1, 0.9))
    before = fx.global_scope().get("fc.w_0").copy()
    with pytest.raises(CheckpointError) as error:
        load(main, tmp_path)
    first, second = str(error.value).split("\n")
    assert re.fullmatch(
        r".* was written with another optimizer: it holds '\S+', '\S+', '\S+' and \d more, and the program has 'fc.w_0_velocity_0', "
        r"'fc.b_0_velocity_0'",
        first,
    )
    (call,) = [c for c, ways in ONLY.items() if way in ways]
    assert second == f"  load parameters only, the optimizer begins anew: {call}"
    assert np.array_equal(fx.global_scope().get("fc.w_0"), before)


def test_the_calls_that_load_parameters_only_do(tmp_path):
    for way in ("one file", "vars"):
        WAYS[way][0](main := program(fx.optimizer.Adam(0.1)), tmp_path)
    saved = fx.global_scope().get("fc.w_0").copy()
    main = program(fx.optimizer.Momentum(0.1, 0.9))
    for load in (
        lambda: fx.io.load(main, tmp_path / "m", fx.Executor(), var_list=main.all_parameters()),
        lambda: fx.io.load_params(fx.Executor(), tmp_path, main),
    ):
        fx.global_scope().set("fc.w_0", np.zeros((2, 1), "float32"))
        load()
        assert np.array_equal(fx.global_scope().get("fc.w_0"), saved)


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_parameters_alone_is_named_as_such(tmp_path, way):
    save, load = WAYS[way]
    save(program(), tmp_path)
    said = "was written without an optimizer's state: it holds parameters, and the program has 'fc.w_0_velocity_0', "
    with pytest.raises(CheckpointError, match=said):
        load(program(fx.optimizer.Momentum(0.1, 0.9)), tmp_path)


def test_what_only_ranks_hold_is_saved_with_their_executor(tmp_path):
    with fx.scope_guard(fx.Scope()):
        main, startup = fx.Program("net"), fx.Program()
        with fx.program_guard(main, startup), fx.unique_name.guard():
            fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 2], "float32"), 1)))
        t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
        with fx.ParallelExecutor(t) as exe:
            exe.run_startup()
            with pytest.raises(fx.NotInitializedError) as error:
                fx.io.save(main, tmp_path / "m")
            assert str(error.value) == (
                "cannot save variable 'fc_0.w_0': it has no value in this scope; run the startup program first, or give executor=exe where "
                "the ranks of a ParallelExecutor have run it"
            )
            fx.io.save(main, tmp_path / "m", executor=exe)


def of_pytorch(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("w/data.pkl", pickle.dumps({}))


def of_old_pytorch(path):
    path.write_bytes(pickle.dumps({"w": [1.0]}, 2))


@pytest.mark.parametrize("write", [of_pytorch, of_old_pytorch])
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_file_of_pytorch_says_how_it_is_brought_over(tmp_path, write, name):
    write(tmp_path / name)
    with pytest.raises(CheckpointError) as error:
        fx.io.load(program(), tmp_path / name)
    said = str(error.value)
    assert said.startswith(f"{tmp_path / name} is PyTorch's format, a pickle, ")
    assert all(way in said for way in ("model.state_dict()", "fx.io.set_program_state", "fx.onnx.load"))


def test_a_file_of_numpy_is_read_by_numpy(tmp_path):
    main = program()
    np.savez(tmp_path / "w.npz", **{"fc.w_0": np.ones((2, 1), "float32")})
    with pytest.raises(CheckpointError, match=r"w.npz is NumPy's format; write fx.io.set_program_state\(program, dict\(np.load\('"):
        fx.io.load(main, tmp_path / "w.npz")
    fx.io.set_program_state(main, dict(np.load(tmp_path / "w.npz")))
    assert fx.global_scope().get("fc.w_0").tolist() == [[1.0], [1.0]]
