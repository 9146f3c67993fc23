"""The two threads of a rank, which tell each other how far they have come."""

import threading

import pytest

from fluidx import native
from fluidx.comm import CommAborted, ThreadWorld


def called(comm, name, beside, at):
    """Make a call of a communicator as a plan does: in C where there is one."""
    if comm.calls is None:
        getattr(comm, name)(beside, at)
    else:
        native.compile(getattr(comm.calls, name)(beside, at))()


def follower(comm, beside, at, seen):
    """A thread that waits until the other one has come to `at`."""

    def work():
        try:
            called(comm, "follow", beside, at)
            seen.append(at)
        except CommAborted as e:
            seen.append(str(e))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("beside", [False, True])
def test_one_waits_until_the_other_has_come_so_far(beside):
    comm, seen = ThreadWorld(2, 20).communicator(1), []
    waits = follower(comm, beside, 3, seen)
    for at in (1, 2):
        called(comm, "reach", not beside, at)
    called(comm, "reach", beside, 9)  # how far it is itself says nothing
    assert not seen
    called(comm, "reach", not beside, 3)
    waits.join(20)
    assert seen == [3]
    for at in (1, 2, 3):  # what has been reached is not waited for
        called(comm, "follow", beside, at)


def test_ranks_and_runs_do_not_hear_of_each_other():
    world = ThreadWorld(2, 20)
    comms, seen = [world.communicator(r) for r in range(2)], []
    called(comms[0], "reach", False, 5)
    world.begin()
    waits = [follower(comm, True, 1, seen) for comm in comms]
    assert not seen
    for comm in comms:
        called(comm, "reach", False, 1)
    for w in waits:
        w.join(20)
    assert seen == [1, 1]


@pytest.mark.parametrize("beside", [False, True])
def test_a_world_that_fails_lets_nobody_wait(beside):
    """Without a deadline of its own: the other thread may compute for longer than that."""
    world, seen = ThreadWorld(2, 0.01), []
    waits = follower(world.communicator(0), beside, 1, seen)
    world.abort(ValueError("of all things"))
    waits.join(20)
    assert seen == ["stopped because another rank failed: of all things"]
    follower(world.communicator(1), beside, 1, seen).join(20)
    assert len(seen) == 2
