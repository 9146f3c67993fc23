"""`fluidx simulate` as a user calls it."""

import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main as fluidx


@pytest.fixture
def file(tmp_path):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        h = fx.data("x", [-1, 64], "float32")
        loss = fx.layers.mean(fx.layers.fc(fx.layers.fc(h, 64, act="relu"), 64))
        fx.optimizer.Adam(0.1).minimize(loss)
    fx.io.save_text(fx.ProgramPair(main, startup), tmp_path / "mlp.txt")
    return str(tmp_path / "mlp.txt")


def call(*args):
    return CliRunner().invoke(fluidx, ["simulate", *map(str, args)])


def test_it_says_time_memory_and_why(file):
    result = call(file, "--cluster", "dgx-a100", "--batch", 64, "-n", 4)
    assert result.exit_code == 0, result.output
    for said in ("data_parallel() on 4 ranks", "not calibrated: figures of dgx-a100", "no schedule is faster than", "-bound: ", "memory"):
        assert said in result.output


def test_all_devices_of_the_cluster_are_the_default(file):
    assert "on 8 ranks" in call(file, "--cluster", "dgx-a100", "--batch", 64).output
    assert "on 16 ranks" in call(file, "--cluster", "dgx-a100", "--batch", 64, "--hosts", 2).output


def test_a_mesh_lies_on_as_many_hosts_as_it_needs(file):
    result = call(file, "--cluster", "dgx-a100", "--batch", 64, "-n", "dp=16", "--strategy", "zero1")
    assert result.exit_code == 0 and "on 16 ranks" in result.output


@pytest.mark.parametrize("what", ["network=0.5", "bucket_mb=100", "hosts=2", "compute=2,latency=0"])
def test_what_if(file, what):
    result = call(file, "--cluster", "dgx-a100", "--batch", 64, "--what-if", what)
    assert result.exit_code == 0, result.output
    assert f"what if {what.split(',')[0]}" in result.output


@pytest.mark.parametrize("runtime", ["ddp", "horovod"])
def test_runtimes_of_others(file, runtime):
    result = call(file, "--cluster", "dgx-a100", "--batch", 64, "--strategy", "data_parallel{bucket_mb=0}", "--runtime", runtime)
    assert result.exit_code == 0, result.output


def test_more_micro_batches_than_the_program_writes(file):
    args = (file, "--cluster", "dgx-a100", "--batch", 1024, "-n", 2, "--strategy", "micro_batches{count=3}")
    few, many = call(*args), call(*args, "--micro-batches", 16)
    assert few.exit_code == 0 and many.exit_code == 0, few.output + many.output
    assert few.output != many.output


def test_the_timeline_is_written_and_compared_with(file, tmp_path):
    out = tmp_path / "out.json"
    assert call(file, "--cluster", "dgx-a100", "--batch", 64, "-n", 2, "--perfetto", out).exit_code == 0
    result = call(file, "--cluster", "dgx-a100", "--batch", 64, "-n", 2, "--against", out, "--table")
    assert "measured" in result.output and "all_reduce" in result.output


@pytest.mark.parametrize(
    "args, said",
    [
        (["--cluster", "dgx-a10", "--batch", 64], "dgx-a100"),
        (["--cluster", "dgx-a100"], "batch size"),
        (["--cluster", "dgx-a100", "--batch", 64, "-n", 12], "12 ranks do not fill hosts of 8 devices"),
        (["--cluster", "dgx-a100", "--batch", 64, "--hosts", 1, "-n", 16], "16 ranks need 2 hosts of 8 devices, and hosts is 1"),
        (["--cluster", "dgx-a100", "--batch", 64, "--what-if", "bucket_mp=4"], "bucket_mb"),
        (["--cluster", "dgx-a100", "--batch", 64, "--what-if", "network"], "has no number"),
        (["--cluster", "dgx-a100", "--batch", 64, "--what-if", "hosts=1.5"], "whole number"),
        (["--cluster", "dgx-a100", "--batch", 64, "--slow", "x=2"], "3=1.2"),
        (["--cluster", "dgx-a100", "--batch", 64, "--slow", "1=1e999"], "has no number"),
        (["--cluster", "dgx-a100", "--batch", 64, "--slow", "1=2,1=3"], "two numbers for 1"),
        (["--cluster", "dgx-a100", "--batch", 64, "--what-if", "network=0"], "above 0"),
        (["--cluster", "dgx-a100", "--batch", 64, "-n", "dp=2,dp=4"], "an axis twice"),
        (["--cluster", "dgx-a100", "--batch", 64, "-n", 2, "--slow", "5=2"], "there is no rank 5"),
        (["--batch", 64], "--cluster"),
        (["--cluster", "dgx-a100", "--batch", 64, "--against", __file__], "no timeline of fluidx trace"),
    ],
)
def test_wrong_input(file, args, said):
    result = call(file, *args)
    assert result.exit_code != 0 and said in result.output
    assert "Traceback" not in result.output and not isinstance(result.exception, (KeyError, TypeError, AttributeError))
