"""Steps that are one call into C on every rank: who does them, and what becomes of errors, interrupts and crowds there."""

import gc
import os
import signal
import socket
import threading
import weakref

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.comm import CommAborted, ThreadWorld
from fluidx.native import world as worlds
from fluidx.native.world import NativeWorld

L = fx.layers
pytestmark = pytest.mark.skipif(ThreadWorld(1).shared is None, reason="here ranks do not meet in C")


@pytest.fixture(params=[0, worlds.SPIN_US], ids=["asleep", "awake"])
def spin(request, monkeypatch):
    """Whether threads sleep at once when they wait."""
    monkeypatch.setattr(worlds, "SPIN_US", request.param)


@pytest.fixture(autouse=True, params=["0", "1"], ids=["alone", "beside"])
def overlap(request, monkeypatch):
    """Whether ranks have a second thread, which communicates."""
    monkeypatch.setenv("FLUIDX_OVERLAP", request.param)


@pytest.fixture
def launches(monkeypatch):
    """The threads that launched, one entry a launch."""
    seen = []
    real = NativeWorld.launcher

    def launcher(self, *args):
        run = real(self, *args)

        def launch(feeds):
            seen.append(threading.current_thread())
            return run(feeds)

        return launch

    monkeypatch.setattr(NativeWorld, "launcher", launcher)
    return seen


def model():
    x, label = fx.data("x", [-1, 4], "float32"), fx.data("label", [-1, 1], "int64")
    logits = L.fc(L.fc(x, 5, act="relu"), 3)
    loss = L.mean(L.softmax_with_cross_entropy(logits, label))
    fx.optimizer.SGD(0.1).minimize(loss)
    return loss, logits


def feed(rows=12):
    rng = np.random.default_rng(rows)
    return {"x": rng.standard_normal((rows, 4), "float32"), "label": rng.integers(0, 3, (rows, 1))}


def ranks(n=3, timeout=20, change=None):
    loss, logits = model()
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(trainers=n)
    pairs = [fx.ir.ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)) for r in range(n)]
    if change is not None:
        for r, pair in enumerate(pairs):
            main = pair.main.copy()
            main.frozen = False
            change(r, main.global_block())
            pairs[r] = fx.ir.ProgramPair(main, pair.startup)
    exe = fx.ParallelExecutor(pairs, timeout=timeout)
    exe.run_startup()
    return exe, loss, logits


def without_last_all_reduce(rank):
    """Let a rank come to its end without the last meeting, so that the others wait for it."""

    def change(r, block):
        if r == rank:
            at = max(i for i, op in enumerate(block.oplist) if op.type == "all_reduce")
            op = block.oplist.pop(at)
            block.oplist[:] = [o.renamed({op.output_arg_names[0]: op.input_arg_names[0]}) for o in block.oplist]

    return change


# -- what is computed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_step_in_c_has_the_bits_of_one_in_python(n, spin, launches, monkeypatch):
    """Also with far more ranks than cores, and rows that do not divide."""
    exe, loss, logits = ranks(n)

    def steps():
        exe.run_startup()
        return [exe.run(feed=feed(rows), fetch_list=[loss, logits]) for rows in (24, 13, 24, 13)]

    with exe:
        found = steps()
        assert len(launches) == 4 and set(launches) == {threading.current_thread()}
        monkeypatch.setattr(exe.group, "launcher", lambda bounds: None)
        exe._ready.clear()
        wanted = steps()
    assert len(launches) == 4
    for a, b in zip(found, wanted, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_is_fetched_stays_as_it_was(launches):
    """Fetches are the caller's own, whatever the next step writes."""
    exe, loss, logits = ranks(2)
    with exe:
        kept = exe.run(feed=feed(), fetch_list=[loss, logits]), exe.run(feed=feed(), fetch_list=[logits, "x"], return_merged=False)
        copies = [[np.array(v) for v in k] for k in kept]
        exe.run(feed=feed(14), fetch_list=[loss, logits])
        exe.run(feed={k: v[::-1] for k, v in feed().items()}, fetch_list=[logits, "x"], return_merged=False)
        assert all(np.array_equal(a, b) for k, c in zip(kept, copies, strict=True) for a, b in zip(k, c, strict=True))
    assert len(launches) == 4


def test_feeds_of_any_layout_are_taken():
    exe, loss, logits = ranks(2)
    given = feed()
    with exe:
        exe.run_startup()
        wanted = exe.run(feed=given, fetch_list=[logits])[0]
        for x in (np.asfortranarray(given["x"]), np.repeat(given["x"], 2, 1)[:, ::2], given["x"].tolist()):
            exe.run_startup()
            assert np.array_equal(exe.run(feed={**given, "x": x}, fetch_list=[logits])[0], wanted)


def test_feeds_in_any_order_share_what_was_made():
    exe, loss, _ = ranks(2)
    given = feed()
    with exe:
        for _ in range(2):
            exe.run(feed=given, fetch_list=[loss])
            exe.run(feed=dict(reversed(given.items())), fetch_list=[loss])
        assert len(exe._ready) == 1


def test_one_rank_needs_no_other_thread(launches):
    exe, loss, _ = ranks(1)
    with exe:
        before = threading.active_count()
        assert np.isfinite(exe.run(feed=feed(), fetch_list=[loss])[0]).all()
        assert threading.active_count() == before and not launches


def test_a_profiler_sees_the_steps_of_a_launch(launches):
    exe, loss, _ = ranks(2)
    with exe:
        exe.run(feed=feed(), fetch_list=[loss])
        assert len(launches) == 1
        with fx.profiler.profiler():
            exe.run(feed=feed(), fetch_list=[loss])
        assert len(launches) == 1


# -- what goes wrong ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_on_any_rank_stops_all_and_names_it(bad, spin, launches):
    """Rank 0's on the caller's own thread, too."""
    exe, loss, _ = ranks(3)
    wrong = feed()
    wrong["label"][4 * bad + 3] = 7
    with exe:
        wanted = exe.run(feed=feed(), fetch_list=[loss])[0]
        for _ in range(3):
            with pytest.raises(fx.RankError) as error:
                exe.run(feed=wrong, fetch_list=[loss])
            assert error.value.rank == bad
            assert str(error.value).startswith(f"rank {bad}: op softmax_with_cross_entropy: label 7 is out of range for 3 classes")
            assert "in model" in str(error.value) and "test_launch.py" in str(error.value)
            _, *done = str(error.value).split("\n  the last collective that each rank completed:")[1].splitlines()
            assert [line.split(" of ")[0] for line in done] == [f"    rank {r}: all_reduce (sum)" for r in range(3)]
            assert f"\n  on host {socket.gethostname()}, process {os.getpid()}\n" in str(error.value)
            with pytest.raises(fx.RankError, match="^a rank failed in an earlier run"):
                exe.run(feed=feed(), fetch_list=[loss])
            exe.run_startup()
            assert np.array_equal(exe.run(feed=feed(), fetch_list=[loss])[0], wanted)
    assert len(launches) == 7


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_ends_early_is_waited_for_and_named(early, spin, launches):
    exe, loss, _ = ranks(2, timeout=0.15, change=without_last_all_reduce(early))
    with exe, pytest.raises(fx.RankError) as error:
        exe.run(feed=feed(), fetch_list=[loss])
    assert error.value.rank == early and launches
    assert f"waited 0.15 s in all_reduce; rank {early} did not arrive" in str(error.value)
    assert f"rank {early} reached the end of its program\n  in step 0\n  on host " in str(error.value)


def interrupt_when(ready):
    """A thread that presses Ctrl-C once `ready()` holds."""

    def press():
        while not ready():
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C interrupts: a shell starts what runs in the background so that it does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system cannot send signals to threads")
@pytest.mark.parametrize("early", [0, 1])
def test_ctrl_c_ends_a_wait_in_c(early, spin, launches):
    """One rank waits for another, which has come to its end, and would for a minute: rank 0 in a meeting, or the caller for rank 1."""
    exe, loss, _ = ranks(2, timeout=60, change=without_last_all_reduce(early))
    with exe:
        thread = interrupt_when(lambda: bool(launches))
        with pytest.raises(KeyboardInterrupt):
            exe.run(feed=feed(), fetch_list=[loss])
        thread.join()
        with pytest.raises(fx.RankError, match="^an earlier run was interrupted"):
            exe.run(feed=feed(), fetch_list=[loss])
        exe.run_startup()  # on the same threads, of which none is lost
        assert all(w.thread.is_alive() for w in exe.group.threads.workers)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_an_interrupt_at_any_moment_of_a_step_leaves_an_executor_that_works(spin, launches):
    """The moments are spread over some steps; a step ends or is interrupted, and what follows a start is always the same."""
    exe, loss, _ = ranks(3)
    given = feed()
    want = exe.run(feed=given, fetch_list=[loss])[0]

    def ring(*_):
        raise KeyboardInterrupt

    before, pressed = signal.signal(signal.SIGALRM, ring), 0
    try:
        for k in range(60):
            exe.run_startup()
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6 * (k + 1))
                try:
                    for _ in range(20):
                        exe.run(feed=given, fetch_list=[loss])
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pressed += 1
            exe.run_startup()
            assert np.array_equal(exe.run(feed=given, fetch_list=[loss])[0], want)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert pressed and launches
    exe.close()


def test_an_exception_of_a_signal_s_handler_is_raised_by_the_run(launches):
    exe, loss, _ = ranks(2, timeout=60, change=without_last_all_reduce(1))

    class Enough(Exception):
        pass

    def handler(*_):
        raise Enough

    before = signal.signal(signal.SIGINT, handler)
    try:
        thread = interrupt_when(lambda: bool(launches))
        with exe, pytest.raises(Enough):
            exe.run(feed=feed(), fetch_list=[loss])
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)


# -- who else is there -------------------------------------------------------------------------------------------------------


def test_several_executors_launch_from_several_threads_at_once(spin):
    """More ranks than cores, all at the same time."""
    made = []
    for _ in range(4):
        with fx.program_guard(fx.Program(), fx.Program()):
            made.append(ranks(2)[:2])
    want = [exe.run(feed=feed(), fetch_list=[loss])[0] for exe, loss in made]
    errors = []

    def work(k):
        exe, loss = made[k]
        try:
            for _ in range(20):
                exe.run_startup()
                assert np.array_equal(exe.run(feed=feed(), fetch_list=[loss])[0], want[k])
                for _ in range(10):
                    exe.run(feed=feed(), fetch_list=[loss])
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    for exe, _ in made:
        exe.close()


def test_a_thread_that_waits_in_c_keeps_no_executor():
    exe, loss, _ = ranks(2)
    exe.run(feed=feed(), fetch_list=[loss])
    threads, gone = [w.thread for w in exe.group.threads.workers], weakref.ref(exe)
    del exe
    gc.collect()
    assert gone() is None
    for t in threads:
        t.join(5)
        assert not t.is_alive()


def test_a_rank_that_was_left_behind_gets_no_launch(launches):
    """A stuck thread stays with its world; the threads of the new one do the next launches."""
    exe, loss, _ = ranks(2)
    with exe:
        want = exe.run(feed=feed(), fetch_list=[loss])[0]
        go, old = threading.Event(), [w.thread for w in exe.group.threads.workers]
        exe.group.timeout = exe.group.threads.timeout = 0.1

        def stuck(rank):
            if rank == 1:
                go.wait(20)
            else:
                raise CommAborted("this rank gives up")

        with pytest.raises(fx.RankError):
            exe.group.on_all_ranks(stuck)
        exe.run_startup()
        assert np.array_equal(exe.run(feed=feed(), fetch_list=[loss])[0], want)
        assert not set(old) & {w.thread for w in exe.group.threads.workers} and len(launches) == 2
        go.set()
        for t in old:
            t.join(5)
            assert not t.is_alive()


# -- the function in C -------------------------------------------------------------------------------------------------------


def served(world, n):
    """Threads that serve ranks 1 to n - 1 of a world until they are knocked at."""
    threads = [threading.Thread(target=world.serve, args=(r,)) for r in range(1, n)]
    for t in threads:
        t.start()
    return threads


def test_feeds_reach_their_ranks_and_blocks_run_once(spin):
    n = 4
    world = ThreadWorld(n, 20)
    comms, everyone = [world.communicator(r) for r in range(n)], tuple(range(n))
    buffers, sums = [np.zeros(5000) for _ in range(n)], [np.zeros(5000) for _ in range(n)]
    blocks = [native.compile(c.calls.all_reduce(x, y, "sum", everyone)) for c, x, y in zip(comms, buffers, sums, strict=True)]
    launch = world.shared.launcher(blocks, [[x] for x in buffers], [None] * n)
    threads = served(world.shared, n)
    for k in range(200):
        world.shared.expect()
        assert launch(tuple([np.full(5000, float(r + k)) for r in range(n)])) is None
        assert all((y == 6 + n * k).all() for y in sums)
    for r, t in enumerate(threads, 1):
        world.shared.knock(r)
        t.join()


def test_a_launch_refuses_what_does_not_fit():
    world = ThreadWorld(2, 20).shared
    x = [np.zeros(3) for _ in range(2)]
    blocks = [native.compile([]) for _ in x]
    launch = world.launcher(blocks, [[a] for a in x], [None, None])
    threads = served(world, 2)
    for wrong, message in [
        ((x[0],), "^a launch takes a tuple of 2 feeds$"),
        ([*x], "^a launch takes a tuple of 2 feeds$"),
        ((x[0], np.zeros(4)), "^feed 1 of a launch has 32 bytes instead of 24$"),
        ((x[0], np.zeros(6)[::2]), "not C-contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            launch(wrong)
    assert launch(tuple(x)) is None
    with pytest.raises(ValueError, match="^a launch is for 2 ranks$"):
        world.launcher(blocks[:1], [[]], [None])
    with pytest.raises(TypeError, match="^a launch is made of blocks, and of tuples of arrays for their feeds$"):
        world.launcher([print, len], [[], []], [None, None])
    with pytest.raises(ValueError, match="^there is no rank 2$"):
        world.knock(2)
    world.knock(1)
    threads[0].join()


def test_a_knock_before_a_thread_serves_is_not_lost():
    world = ThreadWorld(2, 20).shared
    world.knock(1)
    world.serve(1)  # returns


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say where a thread may run")
def test_a_thread_that_makes_room_may_run_where_it_might():
    """Ranks that meet many times, among more threads than cores, are still allowed all cores."""
    allowed, n = os.sched_getaffinity(0), 2
    world = ThreadWorld(n, 20)
    after = []

    def job(r):
        x = np.ones(9000)
        native.compile(world.communicator(r).calls.all_reduce(x, x, "avg", (0, 1)) * 500)()
        after.append(os.sched_getaffinity(0))

    for _ in range(4):
        threads = [threading.Thread(target=job, args=(r,)) for r in range(n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert after == [allowed] * 8
