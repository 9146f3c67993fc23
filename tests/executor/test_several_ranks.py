"""A launched process holds several ranks: they are threads of it, and meet those of the other processes in shared memory."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.launch import process_job
from fluidx.native import shared

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")

NET = """
import os
import sys
import numpy as np
import fluidx as fx

def trained(strategy, ranks, places):
    main, startup = fx.Program("net"), fx.Program("net_startup")
    main.random_seed = startup.random_seed = 3
    with fx.program_guard(main, startup), fx.unique_name.guard():
        y = fx.layers.fc(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 6, act="relu"), 2)
        loss = fx.layers.mean(y * y)
        fx.optimizer.Adam(0.1).minimize(loss)
    t = fx.DistributeTranspiler(getattr(fx.strategies, strategy)()).transpile(program=main, startup_program=startup, trainers=ranks)
    with fx.ParallelExecutor(t, places=places, timeout=20) as exe:
        exe.run_startup()
        found = []
        for k in range(3):
            feed = {"x": np.random.default_rng(k).standard_normal((10, 4), "float32")}
            found += exe.run(feed=feed, fetch_list=[loss, y])
        local = exe.run(feed=feed, fetch_list=[y], return_merged=False)[0]
        assert [len(part) for part in local] == [2, 3, 2, 3]
        name = main.all_parameters()[0].name
        exe.set_state(name, exe.state(name) + 1)
        found += [exe.state(p.name) for p in main.all_parameters()]
        fx.io.save(main, sys.argv[2], exe, sharded=True)
        exe.set_state(name, np.zeros_like(exe.state(name)))
        fx.io.load(main, sys.argv[2], exe)
        assert np.array_equal(exe.state(name), found[6])
        return found
"""
TRAIN = f"""{NET}
found = trained(sys.argv[1], 4, fx.cpu_places(2))
if fx.rank() == 0:
    np.savez(sys.argv[3], *found)
"""
FAIL = f"""{NET}
from fluidx.executor.ranks.published_rank import PublishedRank
walk, what = PublishedRank.walk, sys.argv[3]

def faulty(self, bound, step, *rest):
    if step == 2 and self.local.rank == 3:
        if what == "killed":
            os.kill(os.getpid(), 9)
        raise ValueError("of all things")
    walk(self, bound, step, *rest)

PublishedRank.walk = faulty
trained("data_parallel", 4, fx.cpu_places(2))
"""


def launched(tmp_path, script, *args):
    (file := tmp_path / "script.py").write_text(script)
    said = []
    return process_job.run(str(file), [str(a) for a in args], 2, say=said.append, timeout=20.0), "\n".join(said)


@pytest.mark.parametrize("overlap", ["0", "1"], ids=["alone", "overlapped"])
@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "ring_optimizer"])
def test_two_processes_of_two_ranks_have_the_bits_of_four_threads(strategy, overlap, tmp_path, monkeypatch):
    monkeypatch.setenv("FLUIDX_OVERLAP", overlap)
    status, said = launched(tmp_path, TRAIN, strategy, tmp_path / "many", tmp_path / "found.npz")
    assert status == 0, said
    here = {}
    exec(NET, here)
    monkeypatch.setattr("sys.argv", ["script", strategy, str(tmp_path / "one")])
    want = here["trained"](strategy, 4, fx.cpu_places(4))
    with np.load(tmp_path / "found.npz") as found:
        assert len(found.files) == len(want) and all(np.array_equal(found[f"arr_{k}"], a) for k, a in enumerate(want))


@pytest.mark.parametrize("what, text", [("raises", "rank 3: ValueError: of all things"), ("killed", "killed by signal 9 (SIGKILL)")])
def test_the_failure_of_one_rank_ends_all_processes(what, text, tmp_path):
    status, said = launched(tmp_path, FAIL, "data_parallel", tmp_path / "folder", what)
    assert status != 0 and text in said, said


def test_places_that_are_no_share_of_the_ranks_are_refused(tmp_path):
    """Each process would train by itself."""
    status, said = launched(tmp_path, f"{NET}\ntrained('data_parallel', 2, fx.cpu_places(2))", "data_parallel", tmp_path / "folder")
    assert status != 0 and "each of them would train alone, on 2 places of its own" in said
