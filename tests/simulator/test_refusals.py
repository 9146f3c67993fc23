"""Wrong inputs of predictions: each error names the thing, what was expected, and what was found."""

import json

import pytest

import fluidx as fx
from fluidx.hardware import load, save


@pytest.fixture(scope="module")
def t():
    main, startup = fx.Program("line"), fx.Program("line_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 64], "float32"), 64)))
    return fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=4)


@pytest.fixture(scope="module")
def found(t):
    return fx.simulate(t, cluster="dgx-a100", batch=64)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"exact": "a"}, "exact must be a number of ranks, 0 or more, such as 64, got 'a'"),
        ({"exact": -1}, "exact must be .*, got -1"),
        ({"exact": True}, "exact must be .*, got True"),
        ({"fetch": 3}, "fetch is a list of names of variables, got 3"),
        ({"fetch": ["nothing"]}, "fetch names 'nothing', which program line does not have"),
        ({"cluster": "a\0.json"}, "cluster file a\0.json cannot be read"),
        ({"batch": 64.0}, "batch must be the number of rows of a step, at least 1, got 64.0"),
        ({"slow": {4: 1.5}}, "there is no rank 4; the ranks are 0 to 3"),
        ({"runtime": "dpp"}, "unknown runtime 'dpp'; did you mean 'ddp'"),
    ],
)
def test_arguments_that_mean_nothing(t, options, message):
    with pytest.raises(fx.FluidxError, match=message):
        fx.simulate(t, **{"cluster": "dgx-a100", "batch": 64, **options})


@pytest.mark.parametrize("measured", [3, None, ["trace.json"], b"trace.json"])
def test_a_measured_run_is_a_profile_or_a_path(found, measured):
    with pytest.raises(fx.ExecutionError, match="a measured run is a Profile, or the path of a timeline that fluidx trace wrote, got"):
        found.against(measured)


@pytest.mark.parametrize(
    "events, message",
    [
        ([3], "'int' object has no attribute 'get'"),
        ([{"ph": "X", "tid": 0, "ts": 0, "dur": 1}], "an event of it has no 'cat'"),
        ([{"ph": "X", "cat": "run", "tid": 0, "dur": "b", "args": {"program": "p"}}], "unsupported operand"),
    ],
)
def test_files_that_are_no_timelines(found, tmp_path, events, message):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(fx.ExecutionError, match=f"t.json is no timeline of fluidx trace: .*{message}.*; fluidx trace FILE -o"):
        found.against(path)


def test_files_that_cannot_be_written(found, tmp_path):
    for path, why in (("/nonexist/a.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(fx.ExecutionError, match=f"cannot write the timeline to .*: {why}; give a file in a folder that exists"):
            found.save(path)
    with pytest.raises(fx.ExecutionError, match="a timeline is written to the path of a file, such as 'timeline.json', got 3"):
        found.save(3)
    with pytest.raises(fx.FluidxError, match="cannot write the cluster file /nonexist/a.json: No such file or directory"):
        save(load("dgx-a100"), "/nonexist/a.json")


@pytest.mark.parametrize("factors", [{"network": float("inf")}, {"compute": True}, {"latency": -1}, {"compute": 0}])
def test_factors_of_what_if_are_finite_and_not_below_0(found, factors):
    with pytest.raises(fx.ExecutionError, match=f"what_if: {next(iter(factors))} must be a factor"):
        found.what_if(**factors)


def test_numbers_of_rows_and_of_ranks_that_are_shown(found):
    for call in (lambda: found.table(limit="a"), lambda: found.table(limit=-1)):
        with pytest.raises(fx.ExecutionError, match="profiler: limit must be a number of rows, at least 1, got"):
            call()
    with pytest.raises(fx.ExecutionError, match="most must be an integer of at least 1, got 0"):
        found.profile(0)
    with pytest.raises(fx.ExecutionError, match="compared_with takes another prediction, which fx.simulate returns, got 3"):
        found.compared_with(3)


def test_lists_of_a_plan_are_lists(t):
    main, startup = fx.Program("line"), fx.Program("line_startup")
    for options, message in (({"wire": 3}, "plan: wire is a dtype or a list"), ({"strategies": 3}, "plan: strategies is a list of names")):
        with pytest.raises(fx.TranspileError, match=message):
            fx.plan(main, startup, cluster="dgx-a100", batch=64, ranks=4, **options)
