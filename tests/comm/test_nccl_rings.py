"""Rings over NCCL: a communicator and a stream each, and order between two only where calls touch the same memory."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fluidx.comm.nccl_rings import RingOrder
from fluidx.ir import opdef
from fluidx.testing import each_rank
from tests.comm import fake_nccl
from tests.comm.test_nccl import BOTH, Array, Stream, calls, world

assert world  # a fixture


@pytest.fixture
def rings(world, monkeypatch):
    """The communicators of rank 0 on two rings, whose streams say their numbers."""
    made = []

    def stream(non_blocking):
        made.append(Stream(world.log, f"ring {len(made)}"))
        return made[-1]

    monkeypatch.setattr(sys.modules["cupy.cuda"], "Stream", stream)
    c = world.communicator(0)
    c.ring(1).init_group(BOTH)
    c.init_group(BOTH)
    del world.log[:]
    return world, c


def test_nccl_init_makes_a_communicator_for_each_ring(world):
    c = world.communicator(0)
    init = opdef("nccl_init")
    context = SimpleNamespace(comm=c, group=lambda name: BOTH)
    init.native.bind([], [], {"group": "dp", "rings": 3}, context)()
    assert [e[1] for e in calls(world, "init")] == [2, 2, 2] and len({e[2] for e in calls(world, "init")}) == 3
    assert c.ring(0) is c and c.ring(2) is c.ring(1).ring(2) and len({c.ring(k) for k in range(3)}) == 3
    world.close()
    assert len(calls(world, "abort")) == 3


def test_two_ranks_find_each_other_on_each_ring(world):
    for rank in BOTH:
        for k in range(2):
            world.communicator(rank).ring(k).init_group(BOTH)
    ids = [e[2] for e in calls(world, "init")]
    assert ids[:2] == ids[2:] and ids[0] != ids[1]


def test_collectives_on_two_rings_wait_for_compute_only(rings):
    world, c = rings
    c.all_reduce(Array(100, (4,)), Array(200, (4,)), "sum", BOTH)
    c.ring(1).all_reduce(Array(300, (4,)), Array(400, (4,)), "sum", BOTH)
    c.ring(1).all_reduce(Array(100, (4,)), Array(500, (4,)), "sum", BOTH)  # both only read 100
    assert [e[1:3] for e in calls(world, "wait")] == [
        ("ring 0", "event of compute"), ("ring 1", "event of compute"), ("ring 1", "event of compute"),
    ]  # fmt: skip
    assert [e[-1] for e in calls(world, "allReduce")] == ["ring 0", "ring 1", "ring 1"]


@pytest.mark.parametrize("x, out", [(200, 600), (212, 600), (600, 100), (600, 212), (600, 200)])
def test_a_call_waits_for_one_on_another_ring_that_touches_its_memory(rings, x, out):
    """Reads what was written, overwrites what was read, overwrites what was written."""
    world, c = rings
    c.all_reduce(Array(100, (4,)), Array(200, (4,)), "sum", BOTH)
    del world.log[:]
    c.ring(1).all_reduce(Array(x, (4,)), Array(out, (4,)), "sum", BOTH)
    assert calls(world, "wait") == [("wait", "ring 1", "event of compute"), ("wait", "ring 1", "event of ring 0")]


def test_compute_waits_for_all_rings_and_then_nothing_waits_for_what_was_before(rings):
    world, c = rings
    c.all_reduce(Array(100, (4,)), Array(200, (4,)), "sum", BOTH)
    c.ring(1).all_reduce(Array(300, (4,)), Array(400, (4,)), "sum", BOTH)
    token = c.mark()
    c.ring(1).all_reduce(Array(700, (4,)), Array(800, (4,)), "sum", BOTH)  # not in the token
    del world.log[:]
    c.order_after(token)
    assert world.log == [("wait", "compute", "event of ring 0"), ("wait", "compute", "event of ring 1")]
    del world.log[:]
    c.all_reduce(Array(400, (4,)), Array(200, (4,)), "sum", BOTH)
    c.all_reduce(Array(800, (4,)), Array(200, (4,)), "sum", BOTH)
    assert [e[2] for e in calls(world, "wait")] == ["event of compute", "event of compute", "event of ring 1"]


def test_a_new_ring_begins_after_what_runs(world):
    c = world.communicator(0)
    c.all_reduce(Array(100, (4,)), Array(200, (4,)), "sum", BOTH)
    del world.log[:]
    c.ring(1)
    assert calls(world, "record", "wait") == [("record", "comm"), ("wait", "comm", "event of comm")]


def test_many_calls_are_not_kept_for_ever():
    log = []
    order = RingOrder()
    for k in range(2):
        order.add(k, Stream(log, f"ring {k}"))
    for k in range(1000):
        order.after(0, [Array(1000 * k, (4,))], [])
    assert len(order._started) <= 64
    del log[:]
    order.before(1, [], [Array(0, (4,))])  # the first call is over for ring 1, which has waited for it
    assert log == []
    order.before(1, [], [Array(999_000, (4,))])
    assert log == [("wait", "ring 1", "event of ring 0")]


def test_the_rings_of_played_gpus_give_the_same_sums(monkeypatch):
    modules, noted = fake_nccl.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    from fluidx.comm.nccl import NcclWorld

    gpus = NcclWorld([0, 1, 2], timeout=5.0)

    def job(comm):
        c = gpus.communicator(comm.rank)
        out = []
        for k in range(6):
            x = np.full(5, float(10 * comm.rank + k)).view(fake_nccl.Array)
            c.ring(k % 2).all_reduce(x, x, "sum", (0, 1, 2))
            out.append(x)
        c.wait()
        return [x[0] for x in out]

    assert each_rank(3, job) == [[30.0 + 3 * k for k in range(6)]] * 3
    assert noted.count(("allReduce", 0)) == 6


def test_other_worlds_have_one_ring():
    def job(comm):
        return comm.ring(0) is comm and comm.ring(3) is comm

    assert each_rank(2, job) == [True, True]
