"""Ranks that keep to the cores that they are given."""

import os
import threading

import numpy as np
import pytest

import fluidx as fx
from fluidx.comm.threads.world import ThreadWorld
from fluidx.config import ConfigError, affinity
from fluidx.executor.ranks import affinity as affinities
from fluidx.executor.ranks.thread_workers import RankThreads
from fluidx.testing.models import classifier

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let threads choose their cores")


@pytest.mark.parametrize(
    "here, ranks, shares",
    [([0, 1, 2, 3], 2, [{0, 1}, {2, 3}]), ([0, 2, 5], 2, [{0}, {2, 5}]), ([4], 3, [{4}] * 3), ([0, 1], 3, [{0}, {0}, {1}])],
)
def test_auto_gives_every_rank_an_equal_share(here, ranks, shares, monkeypatch):
    monkeypatch.setenv("FLUIDX_AFFINITY", "auto")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(here))
    assert affinities.cores_of(ranks) == shares


@pytest.mark.parametrize("text", ["1-0", "a", "0;;1", "-1", "0,"])
def test_what_names_no_cores_is_refused(text):
    with pytest.raises(ConfigError, match="^environment variable FLUIDX_AFFINITY: expected auto, or cores for each rank such as 0-3;4-7"):
        affinity({"FLUIDX_AFFINITY": text})


def test_cores_that_do_not_fit_are_named(monkeypatch):
    core = min(os.sched_getaffinity(0))
    t = fx.DistributeTranspiler("data_parallel").transpile(program=classifier().main, startup_program=classifier().startup, trainers=2)
    monkeypatch.setenv("FLUIDX_AFFINITY", f"{core}")
    with pytest.raises(fx.ExecutionError, match="^FLUIDX_AFFINITY names cores for 1 rank, there are 2$"):
        fx.ParallelExecutor(t)
    monkeypatch.setenv("FLUIDX_AFFINITY", f"{core};99999")
    with pytest.raises(fx.ExecutionError, match="^FLUIDX_AFFINITY gives rank 1 core 99999; this process has "):
        fx.ParallelExecutor(t)


def test_cores_that_the_machine_does_not_have_are_named_on_one_rank_too(monkeypatch):
    t = fx.DistributeTranspiler("data_parallel").transpile(program=classifier().main, startup_program=classifier().startup, trainers=1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5})
    monkeypatch.setenv("FLUIDX_AFFINITY", "0-99")
    with pytest.raises(fx.ExecutionError, match="^FLUIDX_AFFINITY gives rank 0 cores 3-4, 6-99; this process has 0-2, 5$"):
        fx.ParallelExecutor(t)


def test_one_rank_keeps_to_its_cores(monkeypatch):
    core = min(os.sched_getaffinity(0))
    t = fx.DistributeTranspiler("data_parallel").transpile(program=classifier().main, startup_program=classifier().startup, trainers=1)
    monkeypatch.setenv("FLUIDX_AFFINITY", f"{core}")
    with fx.ParallelExecutor(t) as exe:
        assert exe.group.on_all_ranks(lambda rank: os.sched_getaffinity(0)) == [{core}]


@pytest.mark.parametrize("overlap", ["0", "1"], ids=["alone", "beside"])
def test_ranks_run_on_their_cores_and_the_caller_where_it_did(overlap, monkeypatch):
    before = os.sched_getaffinity(0)
    core = max(before)
    m = classifier()
    t = fx.DistributeTranspiler("data_parallel").transpile(program=m.main, startup_program=m.startup, trainers=2)

    def answers():
        with fx.ParallelExecutor(t, timeout=20) as exe:
            exe.run_startup()
            found = [exe.run(feed=m.feed(8, k), fetch_list=[m.loss])[0] for k in range(3)]
            where, done = {}, threading.Barrier(2)
            exe.group.on_all_ranks(lambda rank: (where.update({rank: os.sched_getaffinity(0)}), done.wait(10)))
            return found, where

    want, where = answers()
    assert where == {0: before, 1: before}
    monkeypatch.setenv("FLUIDX_AFFINITY", f"{core};{core}")
    monkeypatch.setenv("FLUIDX_OVERLAP", overlap)
    found, where = answers()
    assert where == {0: {core}, 1: {core}} and os.sched_getaffinity(0) == before
    assert np.array_equal(found, want)


def test_without_a_word_no_thread_is_moved(monkeypatch):
    monkeypatch.delenv("FLUIDX_AFFINITY", raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: pytest.fail("a thread was moved"))
    with affinities.kept_to(None):
        assert affinities.cores_of(3) == [None] * 3
    assert RankThreads([], ThreadWorld(2), 1.0).cores == []
