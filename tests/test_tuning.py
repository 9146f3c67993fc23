"""Choosing a strategy's options by their times, which a clock of the test's gives."""

import csv

import numpy as np
import pytest

import fluidx as fx
from fluidx.executor import Scope
from fluidx.testing.models import classifier
from fluidx.transpiler import strategies
from fluidx.tuning import Tried


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


def test_what_cannot_be_tuned_is_refused(model):
    with pytest.raises(fx.TranspileError, match=r"^tune has no candidates; give lists of values by option, such as \{'chunk_mb'"):
        tune(model, "ring_optimizer", {})
    with pytest.raises(fx.TranspileError, match="^tune takes steps of at least 1 and warm_up of at least 0, got steps=0, warm_up=2$"):
        tune(model, "ring_optimizer", [{}], steps=0)
    with pytest.raises(fx.TranspileError, match=r"^tune: none of 1 choices can be; of \{'chunk_bm': 1\}: .*did you mean 'chunk_mb'"):
        tune(model, "ring_optimizer", {"chunk_bm": [1]})


def test_a_median_of_an_even_number_lies_between():
    assert Tried({}, (1.0, 3.0)).median == 2.0
