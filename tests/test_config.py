"""Environment variables: those that do not exist are named, and values that cannot be used, on any number of ranks."""

import warnings

import pytest

import fluidx as fx
from fluidx import config
from fluidx.testing.models import classifier


@pytest.mark.parametrize(
    "name, hint",
    [
        ("FLUIDX_TIMEOUTS", "did you mean FLUIDX_TIMEOUT?"),
        ("FLUIDX_THREAD", "did you mean FLUIDX_THREADS?"),
        ("FLUIDX_COLOUR", "fluidx env lists all"),  # the prefix alone makes no name near
    ],
)
def test_a_variable_that_nothing_reads_is_named_once(name, hint, monkeypatch):
    monkeypatch.setattr(config, "_looked", False)
    monkeypatch.setenv(name, "5")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fx.Executor()
        fx.Executor()
    assert [str(w.message) for w in seen] == [f"environment variable {name}: fluidx has no such variable; {hint}"]


def test_variables_that_are_read_are_no_matter(monkeypatch):
    for row in config.describe():
        monkeypatch.setenv(row.name, "")
    assert config.unknown() == {} and config.unknown({"FLUIDX_RANK": "0", "CPU_NUM": "2", "FLUIDXES": "1"}) == {}


@pytest.mark.parametrize("make", [lambda t: fx.Executor(), lambda t: fx.ParallelExecutor(t)], ids=["Executor", "ParallelExecutor"])
def test_a_device_that_there_is_not_is_named_on_one_rank(make, monkeypatch):
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel").transpile(program=model.main, startup_program=model.startup, trainers=1)
    monkeypatch.setenv("FLUIDX_DEVICE", "gpu")
    with pytest.raises(config.ConfigError, match="^environment variable FLUIDX_DEVICE: expected cpu or cuda, found 'gpu'$"):
        make(t)


def test_a_rank_that_nobody_launched_computes_on_the_device_that_is_asked_for(monkeypatch):
    """And not on the CPU instead: without CuPy or a GPU that is an error."""
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel").transpile(program=model.main, startup_program=model.startup, trainers=1)
    monkeypatch.setenv("FLUIDX_DEVICE", "cuda")
    if fx.is_compiled_with_cuda():
        assert fx.ParallelExecutor(t).places == [fx.CUDAPlace(0)]
    else:
        with pytest.raises(fx.FluidxError, match=r"^CUDAPlace\(0\)"):
            fx.ParallelExecutor(t)
