"""Ranks as processes: what they hold can be fetched, saved and set. That they give the bits of threads is in test_bodies.py."""

import os
from functools import partial

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.native import shared
from fluidx.testing.models import classifier, train_single
from tests.executor import bodies

if reason := native.why_not() or shared.why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_communication_on_a_thread_of_its_own(monkeypatch, overlap):
    monkeypatch.setenv("FLUIDX_OVERLAP", overlap)
    small = bodies.Case("mlp classifier", partial(fx.strategies.data_parallel, bucket_mb=1 / 1024, first_bucket_mb=1 / 4096), 2)
    assert bodies.of_ranks(small, fx.process_places(2)) == bodies.of_ranks(small, fx.cpu_places(2))


def test_sums_of_integers_and_of_half_floats():
    """What no C kernel adds is added in NumPy, over the memory of all processes."""
    texts = [
        f"""
program p {{
  rank {r}
  group dp = [0, 1]
  data %a: {dtype}[-1,3] shard(0) over dp
forward:
  %s: {dtype}[3] partial(sum) over dp = reduce_sum(%a) {{dim=[0]}}
  %t: {dtype}[3] = all_reduce(%s) {{group="dp", op="sum"}}
}}
"""
        for dtype in ("i64", "f16")
        for r in range(2)
    ]
    for pair, dtype in ((texts[:2], "int64"), (texts[2:], "float16")):
        programs = [fx.ir.parse_pair(text) for text in pair]
        x = np.arange(12).reshape(4, 3).astype(dtype)
        with fx.ParallelExecutor(programs, places=fx.process_places(2), timeout=10) as exe:
            (found,) = exe.run(feed={"a": x}, fetch_list=["t"])
        assert found.dtype == dtype and np.array_equal(found, x.sum(0))


@pytest.fixture
def pair():
    """A model transpiled for two ranks, and an executor of it over processes that has started."""
    model = classifier()
    t = fx.DistributeTranspiler("zero1")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.process_places(2), timeout=10) as exe:
        exe.run_startup()
        yield model, exe


def test_state_goes_in_and_out(pair):
    model, exe = pair
    name = model.gradients[0][0]
    value = np.arange(exe.state(name).size, dtype="float32").reshape(exe.state(name).shape)
    exe.set_state(name, value)
    assert np.array_equal(exe.state(name), value)
    exe.run(feed=model.feed(8), fetch_list=[model.loss])
    assert not np.array_equal(exe.state(name), value)


def test_state_may_come_before_the_startup_program():
    model = classifier()
    (wanted,), scope = train_single(model, [model.feed(8)], [model.loss])
    exe_one, before = fx.Executor(), fx.executor.Scope()
    exe_one.run(model.startup, scope=before)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.process_places(2), timeout=10) as exe:
        for name in before.local_var_names():
            exe.set_state(name, before.get(name))
        (found,) = exe.run(feed=model.feed(8), fetch_list=[model.loss])
    np.testing.assert_allclose(found, wanted[0], rtol=1e-6)  # float32, summed in another order


def test_what_is_saved_by_processes_is_loaded_by_threads(pair, tmp_path):
    model, exe = pair
    exe.run(feed=model.feed(8), fetch_list=[model.loss])
    fx.io.save_persistables(exe, str(tmp_path), model.main)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=3)
    with fx.ParallelExecutor(t, places=fx.cpu_places(3)) as other:
        other.run_startup()
        fx.io.load_persistables(other, str(tmp_path), model.main)
        for name, _ in model.gradients:
            assert np.array_equal(exe.state(name), other.state(name))


def test_results_are_the_users_own(pair):
    model, exe = pair
    feed = model.feed(8)
    first, each = exe.run(feed=feed, fetch_list=[model.loss]), exe.run(feed=feed, fetch_list=[model.loss], return_merged=False)
    kept = first[0].copy(), each[0][0].copy()
    exe.run(feed=feed, fetch_list=[model.loss])
    exe.close()
    assert np.array_equal(first[0], kept[0]) and np.array_equal(each[0][0], kept[1])


def test_many_kinds_of_feeds_and_fetches(pair):
    """More than there are plans kept for."""
    model, exe = pair
    for rows in [*range(2, 22), 2, 3]:
        (loss,) = exe.run(feed=model.feed(rows), fetch_list=[model.loss])
        assert np.isfinite(loss).all()


def test_a_wrong_feed_is_refused_and_harms_nothing(pair):
    model, exe = pair
    with pytest.raises(fx.FeedError, match="'x'"):
        exe.run(feed={"x": np.ones((8, 5), "float32"), "label": model.feed(8)["label"]}, fetch_list=[model.loss])
    exe.run(feed=model.feed(8), fetch_list=[model.loss])


def test_a_run_before_the_startup_program_is_refused():
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.process_places(2), timeout=10) as exe:
        with pytest.raises(fx.NotInitializedError):
            exe.run(feed=model.feed(8), fetch_list=[model.loss])
        exe.run_startup()
        exe.run(feed=model.feed(8), fetch_list=[model.loss])


def test_two_executors_side_by_side(pair):
    model, exe = pair
    t = fx.DistributeTranspiler("zero1")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.process_places(2), timeout=10) as other:
        other.run_startup()
        for _ in range(3):
            a, b = (e.run(feed=model.feed(8), fetch_list=[model.loss])[0] for e in (exe, other))
            assert np.array_equal(a, b)


def train_and_judge(places, end=lambda exe: None):
    """What one executor finds of another's training: before, between and behind its steps, where something may happen to that."""
    model = classifier()
    t, test = fx.DistributeTranspiler("zero1"), fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    test.transpile(program=model.main.clone(for_test=True), startup_program=model.startup, trainers=2)
    found = []
    with fx.ParallelExecutor(t, places=places, timeout=10) as exe:
        exe.run_startup()
        with fx.ParallelExecutor(test, places=places, scopes=exe.scopes) as judge:
            for rows in (8, 6, 8):
                found.append(judge.run(feed=model.feed(4), fetch_list=[model.loss])[0].item())
                found.append(exe.run(feed=model.feed(rows), fetch_list=[model.loss])[0].item())
            end(exe)
            found.append(judge.run(feed=model.feed(4), fetch_list=[model.loss])[0].item())
    return found


def test_executors_may_have_their_variables_in_common():
    found = train_and_judge(fx.process_places(2))
    assert found == train_and_judge(fx.cpu_places(2)) and len(set(found)) == len(found)
    assert train_and_judge(fx.process_places(2), end=fx.ParallelExecutor.close) == found  # the processes stay until both are closed


def test_executors_that_have_variables_in_common_fail_and_begin_anew_together(pair):
    model, exe = pair
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main.clone(for_test=True), startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.process_places(2), scopes=exe.scopes) as judge:
        before = judge.run(feed=model.feed(4), fetch_list=[model.loss])[0]
        exe.run(feed=model.feed(8), fetch_list=[model.loss])
        os.kill(exe.pool.processes[1].pid, 9)
        for one in (judge, exe):
            with pytest.raises(fx.RankError, match="^rank 1: the process was killed|^a rank failed in an earlier run"):
                one.run(feed=model.feed(4), fetch_list=[model.loss])
        exe.run_startup()
        assert np.array_equal(judge.run(feed=model.feed(4), fetch_list=[model.loss])[0], before)
    exe.run(feed=model.feed(8), fetch_list=[model.loss])


def test_what_cannot_be_is_refused(monkeypatch):
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with pytest.raises(fx.ir.ExecutionError, match="pass scopes=exe.scopes of another executor"):
        fx.ParallelExecutor(t, places=fx.process_places(2), scopes=[fx.executor.Scope()] * 2)
    with pytest.raises(fx.ir.ExecutionError, match="must be all process_places or none"):
        fx.ParallelExecutor(t, places=[*fx.process_places(1), *fx.cpu_places(1)])
    with monkeypatch.context() as patch:
        patch.setenv("FLUIDX_KERNELS", "numpy")
        with pytest.raises(fx.ir.ExecutionError, match="needs the C kernels and shared memory: FLUIDX_KERNELS=numpy; cpu_places"):
            fx.ParallelExecutor(t, places=fx.process_places(2))
    assert fx.process_places(2, imports=["numpy"])[0].imports == ("numpy",)


def test_the_environment_is_that_of_the_moment(monkeypatch, capfd):
    monkeypatch.setenv("FLUIDX_DEBUG", "4")
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.process_places(2), timeout=10) as exe:
        exe.run_startup()
        exe.run(feed=model.feed(8), fetch_list=[model.loss])
    printed = capfd.readouterr().out
    assert "rank 0: " in printed and "rank 1: " in printed and "all_reduce" in printed


def test_nothing_is_left_when_an_executor_is_dropped():
    model = classifier()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=2)
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        exe = fx.ParallelExecutor(t, places=fx.process_places(2), timeout=10)
        exe.run_startup()
        pids = [p.pid for p in exe.pool.processes]
        del exe
        assert not [p for p in pids if os.path.exists(f"/proc/{p}")]
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # the helper that starts processes


def test_one_rank_is_a_process_too_and_a_fork_leaves_it_alone(pair):
    model, two = pair
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=model.main, startup_program=model.startup, trainers=1)
    with fx.ParallelExecutor(t, places=fx.process_places(1), timeout=10) as exe:
        exe.run_startup()
        if not (pid := os.fork()):
            try:
                exe.run(feed=model.feed(8), fetch_list=[model.loss])
            except fx.ir.ExecutionError as e:
                exe.close()
                two.close()
                os._exit(77 if "are processes that belong to process" in str(e) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77
        assert np.isfinite(exe.run(feed=model.feed(8), fetch_list=[model.loss])[0]).all()
        assert np.isfinite(two.run(feed=model.feed(8), fetch_list=[model.loss])[0]).all()


def test_processes_take_no_more_than_they_need(pair):
    """Memory that is shared is taken where it is touched, and plans that are dropped give it back."""
    model, exe = pair
    exe.run(feed=model.feed(8), fetch_list=[model.loss])

    def taken():
        with open(f"/proc/{exe.pool.processes[0].pid}/smaps_rollup") as f:
            return sum(int(line.split()[1]) for line in f if line.startswith("Pss_Shmem")) / 1024

    before = taken()
    for rows in range(20_000, 20_040):
        exe.run(feed=model.feed(rows), fetch_list=[model.loss])
    # 16 plans are kept, each of some 5 MB for 10,000 rows of at most 16 numbers in a handful of values
    assert taken() < before + 16 * 6
