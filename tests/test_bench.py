"""`fluidx bench`: its feeds, its figures, and the command as a user calls it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.bench.feeds import numbers_below, synthetic_feed
from fluidx.bench.throughput import RankResult, SyntheticBenchmark, row
from fluidx.cli import main as fluidx

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    "script, known", [("train", "float32, bfloat16"), ("infer", "float32, bfloat16, int8"), ("products", "float32, bfloat16, float16")]
)
def test_the_repositorys_benchmarks_refuse_another_precision(script, known):
    run = subprocess.run([sys.executable, BENCHMARKS / f"{script}.py", "--precision", "float8"], capture_output=True, text=True)
    assert run.returncode and run.stderr == f"--precision float8: expected one of {known}\n"


def call(*args):
    return CliRunner().invoke(fluidx, ["bench", *map(str, args)])


def perceptron(rows=-1):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.layers.fc(fx.data("x", [rows, 8], "float32"), 16, act="relu")
        label = fx.data("label", [rows, 1], "int64")
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(h, 5), label))
        fx.optimizer.SGD(0.1).minimize(loss)
    return fx.ProgramPair(main, startup)


@pytest.fixture
def file(tmp_path):
    pair = perceptron()
    fx.io.save_text(pair, tmp_path / "mlp.txt")
    return tmp_path / "mlp.txt"


# -- feeds --------------------------------------------------------------------------------------------------------------------


def test_whole_numbers_are_those_that_tables_and_losses_take():
    main = fx.Program("ids")
    with fx.program_guard(main), fx.unique_name.guard():
        ids, label = fx.data("ids", [-1, 3], "int64"), fx.data("label", [-1, 1], "int64")
        h = fx.layers.embedding(fx.layers.unsqueeze(ids, [2]), [70, 4])
        h = fx.embedding(ids, [50, 4]) + h
        logits = fx.layers.fc(h, 7)
        fx.layers.softmax_with_cross_entropy(logits, label)
    assert numbers_below(main, "ids") == 50 and numbers_below(main, "label") == 7
    feed = synthetic_feed(main, 40, ranks=2)
    assert feed["ids"].shape == (80, 3) and 40 < feed["ids"].max() < 50 and feed["label"].max() == 6


def test_a_number_that_nothing_bounds_is_zero():
    main = fx.Program("plain")
    with fx.program_guard(main):
        fx.layers.scale(fx.data("n", [-1, 2], "int32"), 2.0)
    assert not synthetic_feed(main, 4)["n"].any()


def test_open_sizes_are_asked_for():
    main = fx.Program("open")
    with fx.program_guard(main):
        fx.layers.scale(fx.data("x", [-1, -1, 3], "float32"), 2.0)
    with pytest.raises(fx.FeedError, match="say how many a step has on each rank, with --batch"):
        synthetic_feed(main, None)
    with pytest.raises(fx.FeedError, match="--feed x=32x8x3"):
        synthetic_feed(main, 4)
    with pytest.raises(fx.FeedError, match="'y', which program open is not fed; it is fed: x"):
        synthetic_feed(main, 4, 1, {"y": (2, 3)})
    assert synthetic_feed(main, None, 3, {"x": (2, 5, 3)})["x"].shape == (6, 5, 3)


# -- figures ------------------------------------------------------------------------------------------------------------------


def test_rates_and_efficiency_by_hand():
    one, two = RankResult(1, 10, (0.5, 0.5, 9.0)), RankResult(2, 20, (0.625,), predicted=0.5)
    assert one.rate == 20 and two.rate == 32 and two.efficiency(one) == 0.8 and two.error == pytest.approx(-0.2)
    assert row(two, one).split() == ["2", "20", "625.00", "(625.00", "..", "625.00)", "32.0", "16.0", "80.0%", "500.00", "-20.0%"]


def test_every_rank_has_its_rows_and_a_fixed_batch_is_shared():
    pair, fixed = perceptron(), perceptron(12)
    assert SyntheticBenchmark(pair, None, [2], 3).feed(2)["x"].shape == (6, 8)
    assert SyntheticBenchmark(fixed, None, [2], None).feed(2)["x"].shape == (12, 8)


# -- the command --------------------------------------------------------------------------------------------------------------


def test_a_program_is_measured_on_every_number_of_ranks(file):
    result = call(file, "-n", "2,1", "--batch", 4, "--steps", 2, "--warm-up", 1, "--strategy", "zero1")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "mlp: zero1, ranks as threads, 2 steps each"
    assert [line.split()[:2] for line in lines[3:5]] == [["1", "4"], ["2", "8"]] and lines[3].endswith("100.0%")


def test_the_prediction_is_beside_it(file):
    result = call(file, "-n", 2, "--batch", 4, "--steps", 1, "--cluster", "dgx-a100")
    assert result.exit_code == 0, result.output
    assert "predicted ms   error" in result.output


def test_more_ranks_than_cores_are_said(file, monkeypatch):
    monkeypatch.setattr("fluidx.native.cores", lambda: 1)
    result = call(file, "-n", 2, "--batch", 4, "--steps", 1, "--cluster", "dgx-a100")
    assert "2 ranks take turns on 1 cores" in result.output and "lower bounds" in result.output


def test_the_gpt_is_measured_without_a_batch():
    result = call("gpt", "-n", 1, "--steps", 1, "--warm-up", 0)
    assert result.exit_code == 0 and result.output.startswith("gpt: data_parallel")


def test_an_onnx_model_is_measured(tmp_path):
    pytest.importorskip("onnx")
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x = fx.data("x", [-1, 8], "float32")
        y = fx.layers.fc(fx.layers.fc(x, 16, act="relu"), 5)
    scope = fx.executor.Scope()
    exe = fx.Executor()
    exe.run(startup, scope=scope)
    with fx.scope_guard(scope):
        fx.onnx.save(main, tmp_path / "net.onnx", fetches=[y], scope=scope)
    result = call(tmp_path / "net.onnx", "-n", "1,2", "--batch", 4, "--steps", 1)
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) >= 5


@pytest.mark.parametrize(
    "args, said",
    [
        (["gtp"], "did you mean 'gpt'"),
        ([__file__, "--batch", 4], "is not a program"),
        (["FILE"], "with --batch 32"),
        (["FILE", "--batch", 0], "--batch"),
        (["FILE", "--batch", 4, "-n", "1,x"], "each 1 or more"),
        (["FILE", "--batch", 4, "-n", "0"], "each 1 or more"),
        (["FILE", "--batch", 4, "--strategy", "zero9"], "zero1"),
        (["FILE", "--batch", 4, "--feed", "y=2x3"], "'y'"),
        (["FILE", "--batch", 4, "--feed", "x=2x9"], "the shape given is [2, 9]"),
        (["FILE", "--batch", 4, "--cluster", "dgx-a10"], "dgx-a100"),
    ],
)
def test_wrong_input(file, args, said):
    result = call(*[file if a == "FILE" else a for a in args])
    assert result.exit_code != 0 and said in result.output, result.output
    assert "Traceback" not in result.output


def test_a_program_without_startup_is_refused(tmp_path):
    fx.io.save_text(perceptron().main, tmp_path / "main.txt")
    assert "has no startup section" in call(tmp_path / "main.txt", "--batch", 4).output


def test_resnet50_has_the_parameters_of_the_paper():
    from fluidx.bench.models import resnet50

    trained = [p for p in resnet50().main.all_parameters() if p.trainable]
    assert sum(int(np.prod(p.shape)) for p in trained) == 25_557_032
