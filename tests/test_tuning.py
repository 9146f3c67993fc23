"""Choosing a strategy's options by their times, which a clock of the test's gives."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor import Scope
from fluidx.ir import ProgramPair
from fluidx.launch import process_job
from fluidx.native import shared
from fluidx.testing.models import classifier
from fluidx.transpiler import Pass, strategies
from fluidx.tuning import Tried

tuning_script = str(Path(__file__).with_name("tuning_script.py"))


class Clock:
    """Time that passes in runs only: each one takes the next of `seconds`."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.rest = 0.0, iter(seconds)
        real = fx.ParallelExecutor.run

        def run(exe, *args, **options):
            self.now += next(self.rest)
            return real(exe, *args, **options)

        monkeypatch.setattr(fx.ParallelExecutor, "run", run)

    def __call__(self):
        return self.now


@pytest.fixture
def model():
    return classifier(fx.optimizer.Momentum(0.1, 0.9), width=4)


def tune(m, strategy, candidates, **options):
    return fx.tune(strategy, candidates, m.main, m.startup, m.feed(6), fx.cpu_places(2), **options)


def test_the_shortest_median_wins_and_the_first_steps_do_not_count(model, monkeypatch):
    """Steps of 1 ms and one of 100 against steps of 2: a single slow step changes nothing."""
    times = [9, 0.001, 0.1, 0.001] + [0.0, 0.002, 0.002, 0.002]
    found = tune(model, "ring_optimizer", {"chunk_mb": [1, 4]}, steps=3, warm_up=1, clock=Clock(monkeypatch, times))
    assert found.options == {"chunk_mb": 1} and found.strategy == strategies.ring_optimizer(chunk_mb=1)
    assert [len(one.seconds) for one in found.tried] == [3, 3]
    assert [one.median for one in found.tried] == pytest.approx([0.001, 0.002])  # differences of floats


def test_all_combinations_are_tried_or_those_that_are_given(model, monkeypatch):
    grid, clock = {"chunk_mb": [1, 4], "roots": ["greedy", "hash"]}, Clock(monkeypatch, [4, 3, 2, 1] + [1, 2])
    four = tune(model, "ring_optimizer", grid, steps=1, warm_up=0, clock=clock)
    assert [tuple(one.options.values()) for one in four.tried] == [(1, "greedy"), (1, "hash"), (4, "greedy"), (4, "hash")]
    assert four.options == {"chunk_mb": 4, "roots": "hash"}
    named = [{}, {"chunk_mb": 2}]
    two = tune(model, strategies.ring_optimizer, named, steps=1, warm_up=0, clock=clock)
    assert [one.options for one in two.tried] == named and two.options == {}


def test_nothing_that_exists_is_touched(model):
    """Neither parameters in training, nor the scope of the process, nor the program."""
    t = fx.DistributeTranspiler("data_parallel").transpile(program=model.main, startup_program=model.startup, trainers=2)
    text, scope = model.main.to_string(), Scope()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as exe, fx.scope_guard(scope):
        exe.run_startup()
        exe.run(feed=model.feed(6), fetch_list=[model.loss])
        before = {p: exe.state(p).copy() for p, _ in model.gradients}
        tune(model, "data_parallel", [{}], steps=2)
        assert all(np.array_equal(exe.state(p), value) for p, value in before.items())
    assert not scope.arrays and model.main.to_string() == text and not fx.global_scope().arrays


def test_what_a_strategy_refuses_is_passed_over_and_said(model, tmp_path, monkeypatch):
    log = tmp_path / "tune.csv"
    clock = Clock(monkeypatch, [0.004, 0.002])
    found = tune(model, "ring_optimizer", {"chunk_mb": [-1, 4]}, steps=2, warm_up=0, log=log, clock=clock)
    assert found.options == {"chunk_mb": 4} and not found.tried[0].seconds
    with open(log, newline="", encoding="utf-8") as file:
        head, refused, taken = csv.reader(file)
    assert head == ["chunk_mb", "median ms", "least ms", "steps", "refused because"]
    assert refused[:4] == ["-1", "", "", "0"] and refused[4] == found.tried[0].why != ""
    assert taken == ["4", "3.000", "2.000", "2", ""]


def test_a_feed_may_change_from_step_to_step(model):
    seen = []

    def feed(k):
        seen.append(k)
        return model.feed(6, k)

    fx.tune("zero1", [{}], model.main, model.startup, feed, fx.cpu_places(2), steps=2, warm_up=1, fetch_list=[model.loss])
    assert seen == [0, 1, 2]


WRONG = [
    ("zero1", {"bucket_mb": 5}, "tune needs a list of values for 'bucket_mb', such as {'bucket_mb': [5]}, got 5"),
    ("zero1", {"algorithm": "ring"}, "tune needs a list of values for 'algorithm', such as {'algorithm': ['ring']}, got 'ring'"),
    ("zero1", [1, 2], "tune needs lists of values for options, or a list: [{'chunk_mb': 1}, {'chunk_mb': 4}], got 1"),
    ("zero1", 5, "tune needs lists of values for options, or a list: [{'chunk_mb': 1}, {'chunk_mb': 4}], got 5"),
    (strategies.zero1(), [{}], "tune needs the name of a strategy, or a function from options to a strategy, got zero1()"),
    (
        "ring_optimizer",
        {"chunk_bm": [1], "roots": ["greedy", "hash"]},
        "tune: none of 2 combinations worked:\n"
        "  {'chunk_bm': 1, 'roots': 'greedy'}: ring_optimizer has no option 'chunk_bm'; did you mean 'chunk_mb'?\n"
        "  {'chunk_bm': 1, 'roots': 'hash'}: ring_optimizer has no option 'chunk_bm'; did you mean 'chunk_mb'?",
    ),
    (
        lambda chunk_mb: None,
        {"chunk_mb": [1]},
        "tune: none of 1 combinations worked:\n  {'chunk_mb': 1}: the function returned no strategy, got None",
    ),
    (
        "parameter_server",
        {"servers": [2]},
        "tune: none of 1 combinations worked:\n  {'servers': 2}: parameter_server(servers=2, min_block=8192, split='round_robin') leaves "
        "no trainer among 2 places",
    ),
]


def test_servers_take_their_places_from_the_trainers(model):
    def on_four(servers, **options):
        given = "parameter_server", {"servers": servers}, model.main, model.startup, model.feed(6), fx.cpu_places(4)
        return fx.tune(*given, steps=1, warm_up=0, **options).tried

    assert [len(one.seconds) for one in on_four([1, 2])] == [1, 1]  # three trainers and a server, two and two
    two = on_four([1, 2, 3], trainers=2)
    assert [len(one.seconds) for one in two] == [1, 1, 0]
    assert two[2].why == "the program was transpiled for 5 ranks, 4 places were given"


@dataclass(frozen=True)
class Forgets(Pass):
    """Leaves the update of a parameter out."""

    def rewrite_pair(self, pair, job):
        main = pair.main.copy()
        block = main.global_block()
        block.oplist = [op for op in block.oplist if op.type != "momentum"]
        return ProgramPair(main, pair.startup)


def test_a_choice_that_fails_later_on_is_passed_over_too(model, tmp_path):
    """One cannot be proved, one stumbles, and where one cannot be fed there is no other left."""

    def make(how):
        if how == "stumbles":
            return {}["stumbles"]
        return strategies.data_parallel().after("place", Forgets()) if how == "forgets" else strategies.zero1()

    log = tmp_path / "tune.csv"
    found = tune(model, make, {"how": ["forgets", "stumbles", "plain"]}, steps=1, log=log)
    assert found.options == {"how": "plain"} and found.strategy == strategies.zero1()
    with open(log, newline="", encoding="utf-8") as file:
        assert [row[-1] for row in csv.reader(file)][1:] == [one.why for one in found.tried]
    assert "does not hold one device's value" in found.tried[0].why and found.tried[1].why == "KeyError: 'stumbles'"
    unfed = {"x": model.feed(6)["x"]}
    with pytest.raises(fx.TranspileError, match=r":\n  \{'how': 'plain'\}: .*label.*\n  \{'how': 'stumbles'\}: KeyError") as e:
        fx.tune(make, {"how": ["plain", "stumbles"]}, model.main, model.startup, unfed, fx.cpu_places(2))
    assert isinstance(e.value.__cause__, fx.FluidxError)


def test_what_cannot_be_tuned_is_refused(model):
    with pytest.raises(fx.TranspileError, match=r"^tune has no candidates; give lists of values by option, such as \{'chunk_mb'"):
        tune(model, "ring_optimizer", {})
    with pytest.raises(fx.TranspileError, match="^tune needs steps >= 1 and warm_up >= 0, got steps=0, warm_up=2$"):
        tune(model, "ring_optimizer", [{}], steps=0)
    for strategy, given, text in WRONG:
        with pytest.raises(fx.TranspileError) as caught:
            tune(model, strategy, given)
        assert str(caught.value) == text
    for options, text in [({"steps": "3"}, "got steps='3', warm_up=2"), ({"warm_up": 1.5}, "got steps=5, warm_up=1.5")]:
        with pytest.raises(fx.TranspileError, match=f"{text}$"):
            tune(model, "ring_optimizer", [{}], **options)
    with pytest.raises(fx.TranspileError, match=r"^tune needs a list of places, such as fx.cpu_places\(2\), got 2$"):
        fx.tune("zero1", [{}], model.main, model.startup, model.feed(6), 2)


def test_a_median_of_an_even_number_lies_between():
    assert Tried({}, (1.0, 3.0)).median == 2.0


@pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
def test_ranks_that_each_run_the_script_go_by_the_times_of_rank_0(tmp_path):
    said = []
    assert process_job.run(tuning_script, [str(tmp_path)], 2, say=said.append, timeout=10.0) == 0, said
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [{"bucket_mb": 1}, [[1], [2]]]
    assert len((tmp_path / "log").read_text().splitlines()) == 3
