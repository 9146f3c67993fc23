"""Ranks that are processes with a GPU each, played by threads: how they connect, and how they hear of one another's failures."""

import sys
import threading

import numpy as np
import pytest

from fluidx.comm import CommAborted, CommError, CommTimeout, ThreadWorld
from fluidx.testing import each_rank
from tests.comm import fake_nccl


class Host(ThreadWorld):
    """What ranks meet by on the host."""

    threaded = True


class Ways(fake_nccl.Threads):
    """Counts the ids, and what comes of them. One that is `broken` makes none, and one that `hangs` connects nobody."""

    def __init__(self):
        super().__init__()
        self.made, self.joined, self.broken, self.hangs = [], [], None, False

    def unique_id(self):
        self.made.append(threading.current_thread().name)
        if self.broken:
            raise self.broken
        return super().unique_id()

    def connect(self, n, uid, rank):
        self.joined.append(uid)
        if self.hangs:
            threading.Event().wait()  # as NCCL does for a member that never comes
        return super().connect(n, uid, rank)


@pytest.fixture
def ways(monkeypatch):
    made = Ways()
    modules, made.calls = fake_nccl.modules(made)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def on_ranks(n, job, timeout=20.0):
    """What `job(communicator)` gives on each rank. The first failure is raised; all are told of it on the host."""
    from fluidx.comm.nccl import LaunchedNcclWorld

    host = Host(n, timeout)

    def one(comm):
        world = LaunchedNcclWorld([host.communicator(comm.rank)], [comm.rank])
        try:
            return job(world.communicator(comm.rank))
        except CommAborted:
            raise
        except Exception as e:
            world.abort(e)
            raise
        finally:
            world.close()

    return each_rank(n, one, timeout)


def total(comm, ranks):
    x = np.array([10.0**comm.rank]).view(fake_nccl.Array)
    comm.all_reduce(x, x, "sum", ranks)
    comm.wait()
    return x.item()


def test_the_members_of_a_group_connect_and_no_other_rank_takes_part(ways):
    def job(comm):
        if comm.rank == 1:
            return None
        comm.init_group((2, 0))
        return total(comm, (2, 0)), total(comm, (comm.rank,))

    assert on_ranks(3, job) == [(101, 1), None, (101, 100)]
    assert len(ways.made) == 3 and sorted(map(ways.joined.count, set(ways.joined))) == [1, 1, 2]


def test_groups_with_members_in_common_have_ids_of_their_own(ways):
    found = on_ranks(3, lambda comm: [total(comm, g) for g in ((0, 1), (1, 2), (2, 1, 0)) if comm.rank in g])
    assert found == [[11, 111], [11, 110, 111], [110, 111]] and len(ways.made) == 3


def test_a_rank_that_cannot_make_an_id_ends_the_others(ways):
    ways.broken = fake_nccl.NcclError("unhandled system error")
    with pytest.raises(CommError, match="^rank 1: NCCL get_unique_id failed: unhandled system error$"):
        on_ranks(2, lambda comm: comm.init_group((1, 0)))


def test_a_member_that_does_not_come_is_named(ways):
    with pytest.raises(CommTimeout, match="rank 0 waited 0.2 s in broadcast; rank 1 did not arrive") as error:
        on_ranks(2, lambda comm: None if comm.rank else comm.init_group((0, 1)), timeout=0.2)
    assert error.value.rank == 1


def test_connecting_has_a_deadline(ways):
    ways.hangs = True
    with pytest.raises(CommTimeout, match=r"^rank \d waited 0.2 s for NCCL to connect ranks 0, 1$"):
        on_ranks(2, lambda comm: comm.init_group((0, 1)), timeout=0.2)


def test_a_rank_that_connects_hears_of_a_failure(ways):
    ways.hangs = True
    came = threading.Event()

    def job(comm):
        if comm.rank == 1:
            comm.world.unique_id((0, 1), 1)  # and then it does not connect
            raise ValueError("of all things")
        with pytest.raises(CommAborted, match="of all things"):
            comm.init_group((0, 1))
        came.set()

    with pytest.raises(ValueError, match="of all things"):
        on_ranks(2, job)
    assert came.is_set()


def test_a_failure_ends_what_gpus_do_also_where_a_thread_waits_for_one(ways):
    """As when it copies from the GPU: nothing but an abort of the communicators, by another thread, ends that."""
    waits, aborted, told = threading.Event(), threading.Event(), []

    def job(comm):
        total(comm, (0, 1))
        if comm.rank == 1:
            assert waits.wait(20.0)
            raise ValueError("of all things")
        comm._comms[0, 1].abort = aborted.set
        waits.set()
        assert aborted.wait(20.0)
        with pytest.raises(CommAborted, match="of all things") as error:  # what was aborted is done, and of no use
            comm.wait()
        told.append(error)

    with pytest.raises(ValueError, match="of all things"):
        on_ranks(2, job)
    assert told


def test_a_passed_deadline_aborts_all(ways):
    def job(comm):
        total(comm, (0, 1))
        comm.stream.done = False
        comm.wait()

    with pytest.raises(CommTimeout, match=r"^rank \d waited 0.2 s for NCCL$"):
        on_ranks(2, job, timeout=0.2)
    assert sorted(ways.calls[-2:]) == [("abort", 0), ("abort", 1)]


def test_communicators_are_given_back_at_the_end(ways):
    """By a call that lets what was sent leave."""
    on_ranks(2, lambda comm: total(comm, (0, 1)))
    assert sorted(ways.calls[-2:]) == [("destroy", 0), ("destroy", 1)]
