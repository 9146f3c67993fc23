"""What happens when a rank fails, stalls or disagrees: every rank ends in time, the message says which, and nothing is left behind."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import classifier
from tests.executor.trip import HOOK

L = fx.layers


@pytest.fixture(autouse=True, params=["0", "1"], ids=["alone", "beside"])
def overlap(request, monkeypatch):
    """Whether ranks have a second thread, which communicates."""
    monkeypatch.setenv("FLUIDX_OVERLAP", request.param)


@pytest.fixture(autouse=True)
def clean():
    HOOK.clear()
    before = set(threading.enumerate())
    yield
    HOOK.clear()
    gc.collect()
    deadline = time.monotonic() + 5
    while left := [t for t in threading.enumerate() if t not in before]:
        assert time.monotonic() < deadline, f"threads left behind: {left}"
        time.sleep(0.01)


def model():
    x = fx.data("x", [-1, 4], "float32")
    h = L.fc(x, 3, act="relu")
    h = fx.ir.Builder(fx.default_main_program().global_block()).t_trip(h)  # THE LINE
    loss = L.mean(L.fc(h, 2))
    fx.optimizer.SGD(0.1).minimize(loss)
    return loss


def feed(rows=6):
    return {"x": np.random.default_rng(0).standard_normal((rows, 4), "float32")}


def ranks(loss_of=model, n=3, timeout=0.2, change=None, strategy="data_parallel"):
    loss = loss_of()
    t = fx.DistributeTranspiler(strategy)
    t.transpile(trainers=n)
    if change is not None:
        t = Changed(t, change)
    exe = fx.ParallelExecutor(t, timeout=timeout)
    exe.run_startup()
    return exe, loss


class Changed:
    """A transpile whose rank programs were edited by hand."""

    def __init__(self, t, change):
        self.t, self.change = t, change

    def __getattr__(self, name):
        return getattr(self.t, name)

    def get_trainer_program(self, rank):
        p = self.t.get_trainer_program(rank).copy()
        p.frozen = False
        self.change(rank, p.global_block())
        return p


def fails(exe, loss, given=None, limit=2.0):
    """The RankError of a run; the run ends in time, and the next is refused until startup."""
    begin = time.monotonic()
    with pytest.raises(fx.RankError) as error:
        exe.run(feed=given or feed(), fetch_list=[loss])
    assert time.monotonic() - begin < limit
    with pytest.raises(fx.RankError) as refused:
        exe.run(feed=feed(), fetch_list=[loss])
    interrupted = isinstance(error.value.__cause__, KeyboardInterrupt)
    why, end = ("an earlier run was interrupted", "") if interrupted else ("a rank failed in an earlier run", " (")
    assert str(refused.value).startswith(f"{why}, so the ranks may differ; call run_startup(), then load a checkpoint if there is one{end}")
    return error.value


def works_again(exe, loss):
    HOOK.clear()
    exe.run_startup()
    assert np.isfinite(exe.run(feed=feed(), fetch_list=[loss])[0]).all()
    exe.close()


def on_rank(rank, action):
    HOOK["call"] = lambda ctx: action() if ctx.rank == rank else None


def throw(error):
    raise error


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "ring_optimizer"])
def test_a_rank_that_raises_ends_all(strategy):
    exe, loss = ranks(timeout=20, strategy=strategy)
    on_rank(1, lambda: throw(ZeroDivisionError("of all things")))
    e = fails(exe, loss)
    assert e.rank == 1
    assert str(e).startswith("rank 1: op t_trip failed: ZeroDivisionError: of all things\n  in ")
    assert "test_faults.py" in str(e) and "in model" in str(e)
    assert isinstance(e.__cause__.__cause__, ZeroDivisionError)
    works_again(exe, loss)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()], ids=repr)
def test_whatever_a_rank_raises_ends_all(error):
    exe, loss = ranks(timeout=20)
    on_rank(2, lambda: throw(error))
    e = fails(exe, loss)
    assert e.rank == 2 and type(error).__name__ in str(e) and "t_trip" in str(e) and "test_faults.py" in str(e)
    works_again(exe, loss)


def test_bad_rows_of_one_rank_name_it():
    def build():
        x, label = fx.data("x", [-1, 4], "float32"), fx.data("label", [-1, 1], "int64")
        loss = L.mean(L.softmax_with_cross_entropy(L.fc(x, 3), label))
        fx.optimizer.SGD(0.1).minimize(loss)
        return loss

    exe, loss = ranks(build, timeout=20)
    labels = np.array([0, 1, 2, 0, 1, 3]).reshape(6, 1)  # the third rank's last row
    begin = time.monotonic()
    with pytest.raises(fx.RankError) as error:
        exe.run(feed={**feed(), "label": labels}, fetch_list=[loss])
    assert time.monotonic() - begin < 2
    assert error.value.rank == 2
    assert str(error.value).startswith("rank 2: op softmax_with_cross_entropy: label 3 is out of range") or "3" in str(error.value)
    assert "test_faults.py" in str(error.value)
    exe.run_startup()
    exe.run(feed={**feed(), "label": labels % 3}, fetch_list=[loss])
    exe.close()


def test_a_rank_that_stalls_is_left_behind():
    exe, loss = ranks(timeout=0.15)
    go, writes = threading.Event(), []
    on_rank(1, lambda: writes.append(go.wait(10)))
    e = fails(exe, loss)
    text = str(e)
    assert e.rank == 1
    assert "waited 0.15 s in all_reduce; rank 1 did not arrive" in text
    assert "rank 1 is stuck\n  in " in text and "t_trip" in text and "test_faults.py" in text
    HOOK.clear()
    exe.run_startup()
    (one,) = exe.run(feed=feed(), fetch_list=[loss])
    weights = [s.get(p.name) for s in exe.scopes for p in fx.default_main_program().all_parameters()]
    go.set()  # now the old thread goes on, and must find nothing to spoil
    time.sleep(0.05)
    assert writes == [True]
    for a, b in zip(weights, [s.get(p.name) for s in exe.scopes for p in fx.default_main_program().all_parameters()], strict=True):
        assert np.array_equal(a, b)
    exe.run_startup()
    assert np.array_equal(exe.run(feed=feed(), fetch_list=[loss])[0], one)
    exe.close()


def test_closing_does_not_wait_for_a_stalled_rank():
    exe, loss = ranks(timeout=0.1)
    go = threading.Event()
    on_rank(0, lambda: go.wait(10))
    fails(exe, loss)
    begin = time.monotonic()
    exe.close()
    assert time.monotonic() - begin < 1
    go.set()


def drop(kind, rank):
    def change(r, block):
        if r == rank:
            at = next(i for i, op in enumerate(block.oplist) if op.type == kind)
            op = block.oplist.pop(at)
            names = {op.output_arg_names[0]: op.input_arg_names[0]}
            block.oplist[:] = [o.renamed(names) for o in block.oplist]

    return change


def test_a_rank_whose_program_misses_a_collective():
    exe, loss = ranks(change=drop("all_reduce", 1), timeout=0.15)
    e = fails(exe, loss)
    assert "ranks disagree: rank " in str(e) or "did not arrive" in str(e)
    assert "all_reduce" in str(e) and "rank 1" in str(e)
    exe.close()


def test_a_rank_that_came_to_its_end_early_is_named():
    def change(r, block):
        if r == 1:
            block.oplist[:] = [o for o in block.oplist if o.type not in ("all_reduce", "sgd")]

    exe, loss = ranks(change=change, timeout=0.15)
    e = fails(exe, loss)
    assert e.rank == 1
    assert "waited 0.15 s in all_reduce; rank 1 did not arrive" in str(e)
    assert "rank 1 reached the end of its program\n  in step 0\n  on host " in str(e)
    exe.close()


def test_of_many_collectives_in_one_call_the_one_that_waits_is_named():
    """Rank 1 leaves the last all_reduce out, of a model whose whole step may be one call into C."""

    def build():
        loss = L.mean(L.fc(L.fc(fx.data("x", [-1, 4], "float32"), 3, act="relu"), 2))
        fx.optimizer.SGD(0.1).minimize(loss)
        return loss

    made = []

    def change(r, block):
        last = max(i for i, op in enumerate(block.oplist) if op.type == "all_reduce")
        made.append(block.oplist[last].output_arg_names[0])
        if r == 1:
            op = block.oplist.pop(last)
            block.oplist[:] = [o.renamed({op.output_arg_names[0]: op.input_arg_names[0]}) for o in block.oplist]

    exe, loss = ranks(build, change=change, timeout=0.15)
    e = fails(exe, loss)
    assert e.rank == 1 and "op all_reduce failed: rank " in str(e)
    assert "waited 0.15 s in all_reduce; rank 1 did not arrive" in str(e) and f"in %{made[0]} = all_reduce(" in str(e)
    assert "rank 1 reached the end of its program\n  in step 0\n  on host " in str(e)
    exe.close()


@pytest.mark.parametrize("timeout", [0.15, 20])
def test_shapes_that_differ_when_they_meet(timeout):
    def change(r, block):
        if r == 2:
            at = next(i for i, op in enumerate(block.oplist) if op.type == "all_reduce")
            x = block.oplist[at].input_arg_names[0]
            block.append_op("reshape", {"X": x}, {"Out": "flat"}, {"shape": (-1, 1)})
            op = block.oplist.pop()
            out = block.oplist[at].output_arg_names[0]
            shape = block.descs[x].type.shape
            block.append_op("all_reduce", {"X": "flat"}, {"Out": "flat.sum"}, dict(block.oplist[at].attrs))
            reduced = block.oplist.pop()
            block.append_op("reshape", {"X": "flat.sum"}, {"Out": out}, {"shape": shape})
            back = block.oplist.pop()
            block.oplist[at : at + 1] = [op, reduced, back]

    exe, loss = ranks(change=change, timeout=timeout)
    e = fails(exe, loss)
    assert "ranks disagree: rank " in str(e) and "op all_reduce failed" in str(e)
    exe.close()


def test_a_failing_startup_is_reported_and_can_be_repeated():
    exe, loss = ranks(timeout=20)
    first = exe.group.ranks[0]
    first.compile = lambda *a: throw(OSError("disk full"))
    with pytest.raises(fx.RankError, match="^rank 0: OSError: disk full\n  in the startup program\n  on host "):
        exe.run_startup()
    with pytest.raises(fx.RankError, match="a rank failed in an earlier run"):
        exe.run(feed=feed(), fetch_list=[loss])
    del first.compile
    works_again(exe, loss)


def test_an_interrupt_of_the_caller_stops_the_ranks(monkeypatch):
    exe, loss = ranks(timeout=20)
    gate = threading.Event()
    HOOK["call"] = lambda ctx: gate.wait(0.1) if ctx.rank == 0 else None
    real, calls = exe.group.threads.collect, []

    def collect(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args)

    exe.run(feed=feed(), fetch_list=[loss])
    monkeypatch.setattr(exe.group.threads, "collect", collect)
    with pytest.raises(KeyboardInterrupt):
        exe.run(feed=feed(), fetch_list=[loss])
    with pytest.raises(fx.RankError, match="an earlier run was interrupted"):
        exe.run(feed=feed(), fetch_list=[loss])
    works_again(exe, loss)


def test_an_executor_that_nobody_holds_ends_its_threads():
    exe, loss = ranks()
    exe.run(feed=feed(), fetch_list=[loss])
    threads = [w.thread for w in exe.group.threads.workers]
    del exe, loss
    gc.collect()
    for t in threads:
        t.join(2)
        assert not t.is_alive()


def test_many_failures_in_a_row_leave_nothing():
    exe, loss = ranks(n=4, timeout=20)
    want = exe.run(feed=feed(8), fetch_list=[loss])[0]
    for k in range(30):
        on_rank(k % 4, lambda: throw(ValueError("again")))
        with pytest.raises(fx.RankError, match=f"^rank {k % 4}: op t_trip failed: ValueError: again"):
            exe.run(feed=feed(8), fetch_list=[loss])
        HOOK.clear()
        exe.run_startup()
        assert np.array_equal(exe.run(feed=feed(8), fetch_list=[loss])[0], want)
    exe.close()


# -- looking at every operator -----------------------------------------------------------------------------------------------


def test_the_first_nan_names_its_operator(monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")
    x = fx.data("x", [-1, 2], "float32")
    with np.errstate(all="ignore"):
        y = L.mean(L.relu(L.log(L.scale(x, 2.0))))
        exe = fx.Executor()
        exe.run(feed={"x": np.ones((2, 2), "float32")}, fetch_list=[y])
        for value, what in [(-1, "a NaN"), (0, "an infinity")]:
            with pytest.raises(fx.ExecutionError) as error:
                exe.run(feed={"x": np.full((2, 2), value, "float32")}, fetch_list=[y])
            assert str(error.value).startswith(
                f"op log made {what} in 'log_0.tmp_0'\n  in %log_0.tmp_0 = log(%scale_0.tmp_0)\n  written at "
            )
            assert error.value.operator.type == "log"


def test_large_doubles_are_no_infinity(monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")
    x = fx.data("x", [1], "float64")
    assert fx.Executor().run(feed={"x": np.array([1e300])}, fetch_list=[L.scale(x, 2.0)])[0] == 2e300


@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_first_nan_of_a_rank_names_both(monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")

    def build():
        x = fx.data("x", [-1, 4], "float32")
        loss = L.mean(L.fc(L.sqrt(x), 2))
        fx.optimizer.SGD(0.1).minimize(loss)
        return loss

    exe, loss = ranks(build, timeout=20)
    with np.errstate(all="ignore"):
        bad = np.ones((6, 4), "float32")
        bad[2] = -1  # of the second rank
        with pytest.raises(fx.RankError) as error:
            exe.run(feed={"x": bad}, fetch_list=[loss])
    assert error.value.rank == 1
    assert str(error.value).startswith("rank 1: op sqrt made a NaN in 'sqrt_0.tmp_0'")
    exe.close()


@pytest.mark.parametrize("strategy", ["reduce_broadcast", "ring_optimizer"])
def test_values_that_are_undefined_off_their_root_raise_no_alarm(strategy, monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "1")
    m = classifier(width=4)
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=m.main, startup_program=m.startup, trainers=3)
    with fx.ParallelExecutor(t, timeout=20) as exe:
        exe.run_startup()
        for plan in range(3):
            exe.run(feed=m.feed(6, plan), fetch_list=[m.loss])
        for plans in exe._ready.values():
            for p in plans.step.bounds:
                for name, a in p.arrays.items():
                    if p.plan.buffers[p.plan.values[name].buffer].kind == "arena" and a.dtype == np.float32:  # neither state nor a feed
                        a[...] = np.nan
        exe.run(feed=m.feed(6), fetch_list=[m.loss])


def test_the_trace_prints_each_operator_with_its_time(monkeypatch, capsys):
    monkeypatch.setenv("FLUIDX_DEBUG", "4")
    x = fx.data("x", [-1, 2], "float32")
    y = L.relu(L.tanh(x))
    fx.Executor().run(feed={"x": np.ones((3, 2), "float32")}, fetch_list=[y])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(a, unit, op, out) for a, _, unit, op, _, out in (line[:6] for line in lines)] == [
        ("0", "us", "tanh", "%tanh_0.tmp_0[3,"),
        ("1", "us", "relu", "%relu_0.tmp_0[3,"),
    ]
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(trainers=2)
    with fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        capsys.readouterr()
        exe.run(feed={"x": np.ones((4, 2), "float32")}, fetch_list=[y])
    out = capsys.readouterr().out
    assert out.count("rank 0: ") == 2 and out.count("rank 1: ") == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_is_told_that_it_has_no_ranks():
    """In a process of its own, which has started no threads before."""
    code = """
        import os, sys, warnings
        import numpy as np
        import fluidx as fx
        warnings.simplefilter("ignore")  # of newer Pythons, that a process with threads forks
        main, startup = fx.Program(), fx.Program()
        with fx.program_guard(main, startup):
            y = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 2]), 2))
            fx.optimizer.SGD(0.1).minimize(y)
        t = fx.DistributeTranspiler().transpile(program=main, startup_program=startup, trainers=2)
        exe = fx.ParallelExecutor(t, places=fx.cpu_places(2))
        exe.run_startup()
        alone = fx.Executor()
        alone.run(startup)
        feed = {"x": np.ones((4, 2), "float32")}
        (before,) = alone.run(main, feed=feed, fetch_list=[y])
        child = os.fork()
        if child == 0:
            try:
                exe.run(feed=feed, fetch_list=[y])
            except fx.ExecutionError as e:
                assert "after the fork" in str(e)
                alone.run(main, feed=feed, fetch_list=[y])
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        exe.run(feed=feed, fetch_list=[y])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["7"], done.stdout + done.stderr
