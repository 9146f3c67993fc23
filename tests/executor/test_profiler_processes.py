"""A profiler sees ranks that are processes as it sees threads: those of its own script, and those that each run the script."""

import json

import pytest

import fluidx as fx
from fluidx import native
from fluidx.executor.run import observers
from fluidx.launch import process_job
from fluidx.native import shared
from tests.executor import profiled_script as script

if reason := native.why_not() or shared.why_not():
    pytest.skip(reason, allow_module_level=True)


def seen(places, **profile):
    """The model's two runs on ranks, as a profiler saw them."""
    model, t = script.built(len(places))
    found = fx.profiler.Profile(**profile)
    with fx.ParallelExecutor(t, places=places, timeout=10) as exe:
        exe.run_startup()
        observers.watchers.append(found)
        try:
            script.train(exe, model)
        finally:
            observers.watchers.remove(found)
    return found


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_rows_of_processes_are_those_of_threads(monkeypatch, overlap):
    monkeypatch.setenv("FLUIDX_OVERLAP", overlap)
    threads, processes = seen(fx.cpu_places(2)), seen(fx.process_places(2))
    assert script.facts(processes) == script.facts(threads)
    assert script.runs(processes) == script.runs(threads) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [len(run.times) for run in processes.runs] == [len(run.times) for run in sorted(threads.runs, key=lambda r: (r.step, r.rank))]
    assert {run.threads for run in processes.runs} == {run.threads for run in threads.runs}
    assert all(row[-1].startswith(f"{script.__file__}:") for row in script.facts(processes))


def test_ranks_that_are_processes_have_tracks_by_one_clock(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUIDX_OVERLAP", "0")
    profile = seen(fx.process_places(2))
    profile.save(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = sorted(e["args"]["name"] for e in events if e["name"] == "thread_name")
    assert names == ["rank 0", "rank 0: communication", "rank 1", "rank 1: communication"]
    script.check_clocks(profile)


def test_runs_beyond_a_limit_are_not_looked_at():
    assert script.runs(seen(fx.process_places(2), limit=1)) == [(0, 0), (0, 1)]


def test_ranks_share_the_threads_that_there_are_when_they_run():
    model, t = script.built(2)
    before, found = native.num_threads(), []
    try:
        with fx.ParallelExecutor(t, places=fx.process_places(2), timeout=10) as exe:
            exe.run_startup()
            for threads in (4, 7, 1):
                fx.set_num_threads(threads)
                with fx.profiler.profiler() as profile:
                    exe.run(feed=model.feed(threads), fetch_list=[model.loss])
                found.append({run.threads for run in profile.runs})
    finally:
        fx.set_num_threads(before)
    assert found == [{2}, {3}, {1}]


def test_every_rank_of_a_launched_script_sees_all_and_one_writes(tmp_path):
    said = []
    assert process_job.run(script.__file__, [str(tmp_path)], 2, say=said.append, timeout=10.0) == 0, said
    found = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    runs = [[step, rank] for step in (0, 1) for rank in (0, 1)]
    assert [one["both"] for one in found] == [runs, runs]
    assert [one["alone"] for one in found] == [None, [[2, 0], [2, 1], [3, 0], [3, 1]]]  # rank 1 alone asked
    assert found[0]["facts"] == found[1]["facts"] == json.loads(json.dumps(script.facts(seen(fx.cpu_places(2)))))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"rank 0", "rank 1"}
    assert (tmp_path / "wrote").read_text() == "0"
