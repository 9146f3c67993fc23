"""A rank that waits long for another says so, and goes on waiting."""

import logging
import threading

import numpy as np
import pytest

import fluidx as fx
from fluidx.comm import ThreadWorld
from tests.executor.trip import HOOK, hold

L = fx.layers


class Heard(logging.Handler):
    """What was warned of; a function is called with each text."""

    def __init__(self, then):
        super().__init__()
        self.texts, self.then = [], then

    def emit(self, record):
        self.texts.append((record.levelname, record.getMessage()))
        self.then()


@pytest.fixture
def heard():
    made = []

    def hear(then=lambda: None):
        made.append(Heard(then))
        logging.getLogger("fluidx.comm").addHandler(made[0])
        return made[0].texts

    yield hear
    HOOK.clear()
    for handler in made:
        logging.getLogger("fluidx.comm").removeHandler(handler)


@pytest.fixture(autouse=True, params=["auto", "numpy"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", request.param)
    monkeypatch.setenv("FLUIDX_STALL_SECONDS", "0.02")


def executor(n=3, timeout=20, change=None):
    x = fx.data("x", [-1, 4], "float32")
    h = fx.ir.Builder(fx.default_main_program().global_block()).t_trip(L.fc(x, 3))
    loss = L.mean(L.fc(h, 2))
    fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler("data_parallel").transpile(trainers=n)
    exe = fx.ParallelExecutor(t, timeout=timeout)
    exe.run_startup()
    return exe, {"feed": {"x": np.ones((6, 4), "float32")}, "fetch_list": [loss]}


@pytest.mark.parametrize("overlap", ["0", "1"], ids=["alone", "beside"])
def test_who_waits_for_whom_is_said_once_and_the_run_goes_on(overlap, monkeypatch, heard):
    """The late rank is let go by the warnings of the two others."""
    monkeypatch.setenv("FLUIDX_OVERLAP", overlap)
    exe, run = executor()
    with exe:
        want = exe.run(**run)[0]
        exe.run_startup()
        both = threading.Semaphore(0)
        go = hold(1)
        texts = heard(lambda: (both.release(), go.set() if len(texts) == 2 else None))
        assert np.array_equal(exe.run(**run)[0], want)
        HOOK.clear()
        exe.run(**run)
    assert [level for level, _ in texts] == ["WARNING"] * 2
    assert all(" has waited 0.02 s in all_reduce (sum) of float32[" in t for _, t in texts)
    assert sorted(t.split(" has waited")[0] for _, t in texts) == ["rank 0", "rank 2"]
    # the second one to say it sees both
    assert any(t.endswith(": ranks 0, 2 are here, rank 1 has not arrived; it goes on waiting") for _, t in texts)


def test_the_deadline_stays_where_it_is(heard, monkeypatch):
    exe, run = executor(2, timeout=0.1)
    with exe:
        texts = heard()
        go = hold(0)
        with pytest.raises(fx.RankError, match="waited 0.1 s in all_reduce; rank 0 did not arrive"):
            exe.run(**run)
        go.set()
    assert len(texts) == 1 and texts[0][1].startswith("rank 1 has waited 0.02 s in all_reduce")


def test_messages_are_waited_for_alike(heard):
    world = ThreadWorld(2, 20)
    go = threading.Event()
    texts = heard(go.set)
    a, b = np.arange(3.0), np.zeros(3)
    receiver = threading.Thread(target=world.communicator(1).exchange, args=([], [(b, 0)]))
    receiver.start()
    assert go.wait(20)
    world.communicator(0).exchange([(a, 1)], [])
    receiver.join(20)
    assert np.array_equal(a, b)
    assert [t for _, t in texts] == ["rank 1 has waited 0.02 s in recv from rank 0, which has not arrived; it goes on waiting"]


@pytest.mark.skipif(ThreadWorld(1).shared is None, reason="here ranks do not meet in C")
def test_ranks_that_wait_in_c_say_it_too(heard, monkeypatch, request):
    """A launch, in which no thread is in Python: rank 1 comes to its end without the last meeting."""
    if request.node.callspec.params["kernels"] == "numpy":
        pytest.skip("nothing is launched there")
    loss = L.mean(L.fc(fx.data("x", [-1, 4], "float32"), 2))
    fx.optimizer.SGD(0.1).minimize(loss)
    t = fx.DistributeTranspiler("data_parallel").transpile(trainers=2)
    pairs = [fx.ir.ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)) for r in range(2)]
    main = pairs[1].main.copy()
    main.frozen = False
    block = main.global_block()
    at = max(i for i, op in enumerate(block.oplist) if op.type == "all_reduce")
    op = block.oplist.pop(at)
    block.oplist[:] = [o.renamed({op.output_arg_names[0]: op.input_arg_names[0]}) for o in block.oplist]
    pairs[1] = fx.ir.ProgramPair(main, pairs[1].startup)
    with fx.ParallelExecutor(pairs, timeout=0.1) as exe:
        exe.run_startup()
        texts = heard()
        with pytest.raises(fx.RankError, match="rank 1 did not arrive"):
            exe.run(feed={"x": np.ones((6, 4), "float32")}, fetch_list=[loss])
        assert any(r.step.launch is not None for r in exe._ready.values())
    assert len(texts) == 1 and texts[0][1].endswith("rank 0 is here, rank 1 has not arrived; it goes on waiting")


def test_without_patience_nothing_is_said_before_the_deadline(heard, monkeypatch):
    monkeypatch.setenv("FLUIDX_STALL_SECONDS", "60")
    exe, run = executor(2, timeout=0.05)
    with exe:
        texts = heard()
        go = hold(1)
        with pytest.raises(fx.RankError, match="waited 0.05 s"):
            exe.run(**run)
        go.set()
    assert not texts
