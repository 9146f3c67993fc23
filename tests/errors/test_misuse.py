"""What new users get wrong in the first hour: each error says what was expected, and what to write."""

import subprocess
import sys

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir.errors import nearest

L = fx.layers
X = np.ones((4, 2), "float32")


def training():
    x, y = fx.data("x", [-1, 2], "float32"), fx.data("y", [-1, 1], "int64")
    loss = L.mean(L.softmax_with_cross_entropy(L.fc(x, 3), y))
    test = fx.default_main_program().clone(for_test=True)
    fx.optimizer.SGD(0.1).minimize(loss)
    return loss, test


def transpiled(n=2):
    training()
    return fx.DistributeTranspiler("data_parallel").transpile(trainers=n)


def said(error, call):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value).split("\n")[0]


@pytest.mark.parametrize(
    "places, shown", [(fx.CPUPlace(), "CPUPlace: CPUPlace"), (2, "int: 2"), ("cpu", "str: 'cpu'"), (["cpu"], "list: ['cpu']")]
)
def test_places_of_ranks_are_a_list_of_places(places, shown):
    t = transpiled()
    assert said(fx.ProgramError, lambda: fx.ParallelExecutor(t, places=places)) == (
        f"ParallelExecutor: places must be a list of places, one for each rank, such as fluidx.cpu_places(2), got {shown}"
    )


def test_the_place_of_an_executor_is_one_place():
    text = "Executor: place must be one place such as fluidx.CPUPlace() or fluidx.CUDAPlace(0), got"
    assert said(fx.ProgramError, lambda: fx.Executor("cpu")) == f"{text} str: 'cpu'"
    several = "list: [CPUPlace, CPUPlace]; ParallelExecutor(t, places=...) runs on several"
    assert said(fx.ProgramError, lambda: fx.Executor(fx.cpu_places(2))) == f"{text} {several}"


def test_an_executor_given_the_transpiler_names_who_runs_it():
    t = transpiled()
    assert said(fx.ProgramError, lambda: fx.Executor(t)).endswith("; ParallelExecutor(t) runs what was transpiled")
    assert said(fx.FeedError, lambda: fx.Executor().run(t)) == (
        "run takes a Program, got DistributeTranspiler; ParallelExecutor(t) runs what was transpiled"
    )


@pytest.mark.parametrize(
    "act, text",
    [
        ("Relu", "layers.fc: unknown act 'Relu'; did you mean 'relu'? There are: abs, brelu, ceil, "),
        (L.relu, "did you mean 'relu'? There are: "),
        ("quantum", "layers.fc: unknown act 'quantum'; There are: abs, "),
        ("mish", "unknown act 'mish'; write x * layers.tanh(layers.softplus(x)) There are: "),  # fluid's table comes first
    ],
)
def test_an_unknown_activation_is_answered_by_the_nearest_and_the_list(act, text):
    x = fx.data("x", [-1, 2], "float32")
    found = said(fx.ProgramError, lambda: L.fc(x, 2, act=act))
    assert text in found and "thresholded_relu" in found


def test_unnamed_programs_are_told_apart_by_the_lines_that_made_them():
    one, other = fx.Program(), fx.Program()
    line = 1 + test_unnamed_programs_are_told_apart_by_the_lines_that_made_them.__code__.co_firstlineno
    with fx.program_guard(one, fx.Program()):
        x = fx.data("x", [-1, 2], "float32")
    with fx.program_guard(other, fx.Program()):
        z = L.scale(fx.data("z", [-1, 2], "float32"), 2.0)
    made = f"the program made at test_misuse.py:{line}"
    assert said(fx.ProgramError, lambda: one.global_block().var("w")).startswith(f"{made} has no variable 'w'")
    assert said(fx.FeedError, lambda: fx.Executor().run(one, feed={"x": X}, fetch_list=[x, z])) == (
        f"fetch_list has variable {z.name!r} of {made}, which is not the program that runs; run that program, or write the layers inside "
        "program_guard(program, startup) of the one that runs"
    )
    assert fx.Program("net").global_block().program.label() == "program net"


def test_a_forgotten_program_guard_is_named():
    main = fx.Program("net")
    loss, test = training()  # into the default program
    exe = fx.Executor()
    hint = "which program net does not declare; program main, the default program, does: write layers inside program_guard("
    assert hint in said(fx.FeedError, lambda: exe.run(main, feed={"x": X}))
    assert hint in said(fx.FeedError, lambda: exe.run(main, fetch_list=[loss.name]))
    with fx.program_guard(fx.Program("empty"), fx.Program()):
        assert "which program empty does not declare; it has no operators: it is the default program; give run() the one" in said(
            fx.FeedError, lambda: exe.run(feed={"x": X})
        )
    exe.run(fx.default_startup_program())  # a copy of a program has its variables
    assert exe.run(test, feed={"x": X, "y": np.zeros((4, 1), "int64")}, fetch_list=[loss])[0].shape == (1,)


@pytest.mark.parametrize(
    "declared, shape, hint",
    [
        ([-1, 1], (4,), "; feed x.reshape(-1, 1)"),
        ([-1], (4, 1), "; feed x.reshape(-1)"),
        ([-1, 1, 2, 3], (4, 6), "; feed x.reshape(-1, 1, 2, 3)"),
        ([-1, 2, 3], (2, 3), "; feed x[None], a batch of one"),
        ([-1, 2], (4, 3), ""),
        ([-1, -1], (4,), ""),
        ([-1, 1], (), ""),
    ],
)
def test_a_feed_of_another_number_of_axes_says_how_it_is_reshaped(declared, shape, hint):
    y = L.scale(x := fx.data("x", declared, "float32"), 2.0)
    given = np.ones(shape, "float32")
    text = f"variable 'x' is declared {x.type}, the feed has shape {list(shape)}{hint}"
    assert said(fx.FeedError, lambda: fx.Executor().run(feed={"x": given}, fetch_list=[y])) == text
    if "reshape" in hint or "None" in hint:
        fixed = eval(hint.removeprefix("; feed ").partition(", a batch")[0], {"x": given})
        fx.Executor().run(feed={"x": fixed}, fetch_list=[y])


def test_a_batch_of_no_rows_is_not_trained_on():
    loss, test = training()
    exe, empty = fx.Executor(), {"x": X[:0], "y": np.zeros((0, 1), "int64")}
    exe.run(fx.default_startup_program())
    text = "variable 'x' is declared f32[-1,2], the feed has shape [0, 2]: a batch of no rows; leave it out"
    assert said(fx.FeedError, lambda: exe.run(feed=empty, fetch_list=[loss])) == text
    assert exe.run(test, feed=empty, fetch_list=["fc_0.tmp_1"])[0].shape == (0, 3)  # nothing is trained


def test_suggestions_are_near_or_not_made():
    assert nearest("sequence_mask", ["reduce_max", "mean"], "there are") == "there are: mean, reduce_max"
    assert nearest("CompiledProgram", ["Program"], "it has") == "it has: Program"
    assert nearest("bucket_size", ["bucket_mb", "group"]) == "did you mean 'bucket_mb'?"


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: fx.DataLoader, "fluidx has no 'DataLoader'; it is fluidx.io.DataLoader"),
        (lambda: L.DataLoader, "fluidx.layers has no layer 'DataLoader'; it is fluidx.io.DataLoader"),
        (lambda: fx.dynamic_lstm, "fluidx has no 'dynamic_lstm'; sequences are padded: write layers.rnn("),
    ],
)
def test_a_name_of_another_module_is_found_there(call, text):
    assert said(AttributeError, call).startswith(text)


@pytest.mark.parametrize(
    "op, text",
    [
        ("sequence_mask", "layers.sequence_mask writes it"), ("dynamic_lstm", "sequences are padded"), ("meann", "did you mean 'mean'?"),
    ],
)  # fmt: skip
def test_an_op_of_fluid_s_is_answered_by_its_table(op, text):
    block = fx.default_main_program().global_block()
    assert f"there is no op {op!r}; {text}" in said(fx.ProgramError, lambda: block.append_op(op, {"X": ["x"]}, {"Out": ["o"]}))


def test_after_ctrl_c_the_next_run_says_what_to_do(monkeypatch):
    t = transpiled()
    with fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        monkeypatch.setattr(exe.group.threads, "hand_out", lambda order: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            exe.run_startup()
        text = "an earlier run was interrupted, so the ranks may differ; call run_startup(), then load a checkpoint if there is one"
        assert said(fx.RankError, lambda: exe.run(feed={"x": X, "y": np.zeros((4, 1), "int64")})) == text


def test_packages_of_extras_are_installed_from_a_checkout(monkeypatch):
    """No index has fluidx: `pip install 'fluidx[onnx]'` fails."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from fluidx.onnx.errors import need_onnx

    assert said(fx.FluidxError, need_onnx).endswith("not installed; in a checkout of fluidx: pip install -e '.[onnx]'")


def test_a_submodule_is_imported_before_the_others_without_a_question_for_names():
    """The import system asks a package for a submodule before it loads it; what asks other modules then would load them half."""
    code = "import fluidx.checkpoint, fluidx.io; fluidx.io.load"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == ""
