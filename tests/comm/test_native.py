"""Ranks that meet in C, from blocks of calls: what goes wrong there, who is told what, and that nothing is lost when all come at once."""

import re
import threading

import ml_dtypes
import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.comm import CommAborted, CommError, CommTimeout, ThreadWorld, flight_recorder
from fluidx.comm.base import REDUCE_OPS
from fluidx.native import world as worlds
from fluidx.testing import each_rank
from fluidx.testing.models import classifier

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=[0, worlds.SPIN_US], ids=["asleep", "awake"])
def spin(request, monkeypatch):
    """Whether ranks sleep at once when they wait."""
    monkeypatch.setattr(worlds, "SPIN_US", request.param)


def fails(n, job, timeout=0.2):
    with pytest.raises(CommError) as error:
        each_rank(n, job, timeout)
    assert not [t for t in threading.enumerate() if t.name.startswith("fluidx-test")]
    return error.value


def ones(size=4, dtype="float32"):
    return np.ones(size, dtype)


# -- many at once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 4097])
def test_ten_thousand_meetings_in_a_row_lose_none(n, size, spin):
    """Each doubles what it finds for the next, so a rank that is early or late once gives another number."""
    everyone, rounds, repeats = tuple(range(n)), (10_000 if size == 1 else 1_000) // 20, 20

    def job(comm):
        x, y = np.zeros(size), np.full(size, float(comm.rank))
        calls = [*comm.calls.all_reduce(y, x, "max", everyone), *comm.calls.broadcast(x, y, 0, everyone)]
        block = native.compile(calls * (repeats // 2))
        for k in range(rounds):
            y[:] = n * k + comm.rank
            block()
            if not np.all(y == n * k + n - 1):
                return k, y
        return None

    assert each_rank(n, job) == [None] * n


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("size", [3, 20_000])
def test_messages_around_a_ring_keep_their_order(n, size, spin):
    """8-byte messages are copied when they are sent, 160 KB are read where they lie."""

    def job(comm):
        after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
        x, y = np.full(size, float(comm.rank)), np.empty(size)
        forth = comm.calls.exchange([(x, after)], [(y, before)])
        back = comm.calls.exchange([(y, before)], [(x, after)])
        block = native.compile((forth + back) * 5)
        for k in range(300):
            x[:] = comm.rank + n * k
            block()
            if not (np.all(x == comm.rank + n * k) and np.all(y == before + n * k)):
                return k, x, y
        return None

    assert each_rank(n, job) == [None] * n


def test_groups_meet_side_by_side_and_alone_within_one_block(spin):
    groups = [(0, 2), (1, 3)]

    def job(comm):
        mine, alone, everyone = groups[comm.rank % 2], (comm.rank,), (3, 1, 0, 2)
        x, y = np.full(3, 10.0**comm.rank), np.zeros(3)
        calls = [
            *comm.calls.all_reduce(x, y, "sum", mine),
            *comm.calls.all_reduce(y, y, "avg", alone),
            *comm.calls.broadcast(y, y, 2, everyone),
            *comm.calls.barrier(everyone),
        ]
        native.compile(calls * 500)()
        return y.tolist()

    assert each_rank(4, job) == [[101.0] * 3] * 4


def test_parts_of_any_size_also_none_within_one_block(spin):
    marks = [0, 3, 3, 10_003]

    def job(comm):
        whole, part = np.zeros(10_003), np.zeros(marks[comm.rank + 1] - marks[comm.rank])
        mine = [whole[a:b] for a, b in zip(marks, marks[1:], strict=False)]
        terms = np.arange(10_003.0)
        cut = [terms[a:b] for a, b in zip(marks, marks[1:], strict=False)]
        empty = np.empty((0, 3))
        calls = [
            *comm.calls.reduce_scatter(cut, part, "sum", (0, 1, 2)),
            *comm.calls.all_gather(part, mine, (0, 1, 2)),
            *comm.calls.all_reduce(empty, empty, "sum", (0, 1, 2)),
            *comm.calls.exchange([(empty, (comm.rank + 1) % 3)], [(empty, (comm.rank - 1) % 3)]),
        ]
        native.compile(calls * 20)()
        return np.array_equal(whole, 3 * np.arange(10_003.0))

    assert each_rank(3, job) == [True] * 3


def test_one_rank_comes_from_a_block_and_another_from_python():
    def job(comm):
        x, y = np.full(5000, 1.0 + comm.rank), np.empty(5000)
        peer = 1 - comm.rank
        block = native.compile([*comm.calls.all_reduce(x, y, "sum", (0, 1)), *comm.calls.exchange([(y, peer)], [(x, peer)])])
        for _ in range(50):
            x[:] = 1.0 + comm.rank
            if comm.rank:
                block()
            else:
                comm.all_reduce(x, y, "sum", (0, 1))
                comm.exchange([(y, 1)], [(x, 1)])
        return x[[0, -1]].tolist()

    assert each_rank(2, job) == [[3, 3]] * 2


@pytest.mark.parametrize("size", [6, 9000])
def test_what_c_does_not_add_is_added_between_two_meetings(size):
    def job(comm):
        found = []
        for dtype in ("int64", "float16", BF16, "bool"):
            x = np.ones(size, dtype)
            assert comm.calls.all_reduce(x, x, "sum", (0, 1, 2)) is None
            comm.all_reduce(x, x, "sum", (0, 1, 2))
            found.append(float(x.min()))
        return found

    assert each_rank(3, job) == [[3, 3, 3, 1]] * 3


def test_strided_arrays_are_staged():
    def job(comm):
        table = np.zeros((6, 4))
        x, out = table[:, comm.rank], table[:, 3]
        x[:] = comm.rank + 1
        assert comm.calls.all_reduce(x, out, "sum", (0, 1)) is None
        comm.all_reduce(x, out, "sum", (0, 1))
        comm.broadcast(out, x, 1, (0, 1))
        comm.exchange([(table[0, ::2], 1 - comm.rank)], [(table[1, ::2], 1 - comm.rank)])
        return table[0].tolist(), table[1].tolist()

    assert each_rank(2, job) == [([3, 0, 0, 3], [0, 0, 0, 3]), ([0, 3, 0, 3], [3, 3, 0, 3])]


# -- failures ----------------------------------------------------------------------------------------------------------------


def test_a_disagreement_within_blocks_names_both_calls_and_the_number_of_its_own(spin):
    def job(comm):
        x, y = ones(), ones(4 + comm.rank)
        calls = [*comm.calls.barrier((0, 1)), *comm.calls.all_reduce(x, x, "sum", (0, 1)), *comm.calls.all_reduce(y, y, "avg", (0, 1))]
        native.compile(calls)()

    e = fails(2, job, 20)
    assert str(e) == "ranks disagree: rank 0 is in all_reduce (avg) of float32[4], rank 1 in all_reduce (avg) of float32[5]"
    assert e.rank == 1 and e.call == 2 and type(e) is CommError


@pytest.mark.parametrize("wrong", ["dtype", "call", "work"])
def test_ranks_disagree_though_one_would_work_in_c_and_one_in_python(wrong, spin):
    def job(comm):
        if comm.rank == 0:
            native.compile(comm.calls.all_reduce(ones(), ones(), "sum", (0, 1)))()
        elif wrong == "dtype":
            comm.all_reduce(ones(4, "int32"), ones(4, "int32"), "sum", (0, 1))
        elif wrong == "call":
            comm.barrier((0, 1))
        else:
            comm.all_reduce(ones(4, "float16"), ones(4, "float16"), "max", (0, 1))

    told = {"dtype": "all_reduce (sum) of int32[4]", "call": "barrier", "work": "all_reduce (max) of float16[4]"}[wrong]
    assert str(fails(2, job, 20)) == f"ranks disagree: rank 0 is in all_reduce (sum) of float32[4], rank 1 in {told}"


def test_a_timeout_within_a_block_names_who_is_missing(spin):
    def job(comm):
        calls = [*comm.calls.barrier((0, 1, 2, 3)), *comm.calls.all_reduce(ones(9000), ones(9000), "sum", (0, 1, 2, 3))]
        native.compile(calls if comm.rank % 2 else calls[:1])()

    e = fails(4, job)
    assert isinstance(e, CommTimeout) and e.rank == 0 and e.call == 1
    assert str(e).endswith("waited 0.2 s in all_reduce; ranks 0, 2 did not arrive")


def test_a_timeout_of_a_message_within_a_block(spin):
    def job(comm):
        calls = comm.calls.exchange([(ones(), 1 - comm.rank)], [(ones(), 1 - comm.rank)])
        native.compile(calls * (2 - comm.rank))()

    e = fails(2, job)
    assert isinstance(e, CommTimeout) and e.call == 1 and str(e) == "rank 0 waited 0.2 s in recv from rank 1; rank 1 did not arrive"


@pytest.mark.parametrize("what", ["meeting", "recv", "send"])
def test_an_abort_wakes_who_sleeps_in_a_block(what, spin):
    """The block begins with a meeting of both ranks, so the abort comes when rank 0 is in it."""
    world, x = ThreadWorld(2, timeout=30), ones(100_000)
    comms = [world.communicator(r) for r in range(2)]
    last = {
        "meeting": lambda c: c.all_reduce(x, x, "sum", (0, 1)),
        "recv": lambda c: c.exchange([], [(x, 1)]),
        "send": lambda c: c.exchange([(x, 1)], []),
    }
    block, errors = native.compile([*comms[0].calls.barrier((0, 1)), *last[what](comms[0].calls)]), []

    def rank():
        try:
            block()
        except CommError as e:
            errors.append(e)

    for _ in range(20):
        t = threading.Thread(target=rank)
        t.start()
        comms[1].barrier((0, 1))
        world.abort(ValueError("gone \0 ü"))
        t.join(10)
        assert not t.is_alive()
        world.reset()
    assert [type(e) for e in errors] == [CommAborted] * 20
    assert {(str(e), e.call) for e in errors} == {("stopped because another rank failed: gone   ü", 1)}


def test_what_was_made_before_a_failure_works_after_a_reset(spin):
    world = ThreadWorld(2, timeout=20)
    comms = [world.communicator(r) for r in range(2)]
    xs = [np.zeros(5000), np.zeros(5000)]
    blocks = [native.compile([*c.calls.all_reduce(x, x, "sum", (0, 1)), *c.calls.exchange([(x[:2], 1 - c.rank)], [(x[2:4], 1 - c.rank)])])
              for c, x in zip(comms, xs, strict=True)]  # fmt: skip

    def both(jobs):
        outcomes = [None, None]

        def rank(r):
            try:
                jobs[r]()
            except CommError as e:
                outcomes[r] = e
                world.abort(e)

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return outcomes

    comms[0].exchange([(xs[0][:3], 1)], [])  # a message that nobody takes
    wrong = native.compile([*comms[1].calls.barrier((0, 1))])
    for k in range(1, 30):
        assert all(isinstance(e, CommError) for e in both([blocks[0], wrong]))
        world.reset()
        for x in xs:
            x[:] = k
        assert both(blocks) == [None, None]
        assert all(np.all(x == 2 * k) for x in xs)


def test_a_refused_message_does_not_touch_the_receiver(spin):
    y = np.full(3, 7.0)

    def job(comm):
        if comm.rank == 0:
            native.compile([*comm.calls.exchange([(ones(4, "float64"), 1)], []), *comm.calls.barrier((0, 1))])()
        else:
            native.compile(comm.calls.exchange([], [(y, 0)]))()

    assert str(fails(2, job, 20)) == "ranks disagree: rank 1 expects float64[3] from rank 0, which sent float64[4]"
    assert y.tolist() == [7, 7, 7]


def test_a_world_ends_with_the_last_block_that_meets_there():
    world = ThreadWorld(1)
    x = ones()
    block = native.compile(world.communicator(0).calls.all_reduce(x, x, "prod", (0,)))
    del world
    block()
    assert x.tolist() == [1, 1, 1, 1]


def test_c_reduces_by_every_op():
    assert set(worlds._HOW) - {""} == set(REDUCE_OPS)


# -- programs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "ring_optimizer", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "beside"])
def test_a_training_step_of_a_rank_is_one_call_into_c(strategy, overlap, monkeypatch):
    """Of each of its threads."""
    monkeypatch.setenv("FLUIDX_OVERLAP", str(int(overlap)))
    m = classifier(fx.optimizer.Adam(0.01), width=8)
    t = fx.DistributeTranspiler(strategy)
    t.transpile(program=m.main, startup_program=m.startup, trainers=3)
    with fx.ParallelExecutor(t, timeout=20) as exe:
        exe.run_startup()
        exe.run(feed=m.feed(12), fetch_list=[m.loss])
        for bound in next(iter(exe._ready.values())).step.bounds:
            assert [len(track._calls) for track in bound.call_lists] == [1] * (1 + overlap), bound.plan


def test_the_trace_of_such_a_step_has_a_line_for_each_collective(monkeypatch, capsys):
    m = classifier(width=8)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(program=m.main, startup_program=m.startup, trainers=2)
    with fx.ParallelExecutor(t, timeout=20) as exe:
        exe.run_startup()
        monkeypatch.setenv("FLUIDX_DEBUG", "4")
        exe.run(feed=m.feed(4), fetch_list=[m.loss])
    out = capsys.readouterr().out
    wanted = sum(op.type == "all_reduce" for op in t.get_trainer_program(0).global_block().oplist)
    for r in range(2):  # two ranks print at once, so a line may not begin where it should
        assert len(re.findall(rf"rank {r}: +\d+ +[\d.]+ us  all_reduce -> ", out)) == wanted > 0


# -- the flight recorder -----------------------------------------------------------------------------------------------------


def test_a_flight_recorder_has_what_each_rank_completed_last_and_what_it_was_in(spin):
    """Both reduce, then rank 1 sends a message that rank 0 takes, then rank 0 alone comes to a barrier."""
    left = {}

    def job(comm):
        comm.all_reduce(ones(3), np.zeros(3, "float32"), "sum", (0, 1))
        if comm.rank == 1:
            comm.exchange([(ones(2), 0)], [])
            left["world"] = comm.world.shared
            return
        comm.exchange([], [(np.zeros(2, "float32"), 1)])
        comm.barrier((0, 1))

    assert isinstance(fails(2, job), CommTimeout)
    world = left["world"]
    assert [world.latest(r, done=True) for r in (0, 1)] == ["recv of float32[2] from rank 1", "send of float32[2] to rank 0"]
    assert [world.latest(r) for r in (0, 1)] == ["barrier among ranks 0, 1", "send of float32[2] to rank 0"]
    assert [world.inside(r) for r in (0, 1)] == [True, False]
    assert flight_recorder.last_collectives(flight_recorder.flight_records(world, 2)).splitlines()[2:] == [
        "    rank 0: recv of float32[2] from rank 1; then it was in barrier among ranks 0, 1",
        "    rank 1: send of float32[2] to rank 0",
    ]


def test_what_is_met_elsewhere_is_noted(spin):
    """What fails is never got behind, and what is not kept leaves what was before it."""
    world = ThreadWorld(2, 1.0).shared
    with world.noted(1, "a"):
        assert (world.latest(1), world.latest(1, done=True), world.inside(1), world.inside(0)) == ("a", "", True, False)
    assert (world.latest(1, done=True), world.inside(1)) == ("a", False)
    with world.noted(1, "b", kept=False):
        pass
    assert (world.latest(1), world.latest(1, done=True), world.inside(1)) == ("b", "a", False)
    with pytest.raises(KeyError), world.noted(1, "c"):
        raise KeyError
    assert (world.latest(1), world.latest(1, done=True), world.inside(1)) == ("c", "a", True)


def test_a_trail_says_which_operator_a_rank_is_at(spin):
    world = ThreadWorld(2, 1.0).shared
    trail = world.trail(1)
    assert world.whereabouts(1) == ("", 0)
    trail[0], trail[1] = world.at("in %y = relu(%x)"), 7
    assert (world.whereabouts(1), world.whereabouts(0)) == (("in %y = relu(%x)", 7), ("", 0))
