"""RankThreads: a job on all ranks at once, the rank that failed first, ranks that are stuck, and Ctrl-C in the caller."""

import threading
import time

import pytest

from fluidx.comm.base import CommAborted, CommTimeout
from fluidx.comm.threads.world import ThreadWorld
from fluidx.executor import CPUPlace
from fluidx.executor.ranks import thread_workers
from fluidx.executor.ranks.thread_workers import Outcome, RankThreads, first_failure, stop


class Failed(Exception):
    """What `fail` was told."""


def fail(error, rank, outcomes, lost):
    raise Failed(type(error), rank, sorted(outcomes), lost)


@pytest.fixture
def ranks():
    """The threads of so many ranks, and their world."""
    made = []

    def make(n):
        world = ThreadWorld(n, 20)
        made.append(RankThreads([CPUPlace()] * n, world, 20, [None] * n))
        return made[-1], world

    yield make
    for threads in made:
        stop(threads.workers)


def test_a_job_gets_the_number_of_its_rank_and_all_run_at_once(ranks):
    threads, world = ranks(3)
    together = threading.Barrier(3, timeout=20)
    assert threads.results([lambda r: (together.wait(), 10 * r)[1]], world, fail) == [0, 10, 20]


def test_second_jobs_run_beside_the_first_ones_whose_values_count(ranks):
    threads, world = ranks(2)
    together = threading.Barrier(4, timeout=20)
    assert threads.results([lambda r: (together.wait(), r)[1], lambda r: (together.wait(), "no")[1]], world, fail) == [0, 1]


def test_one_rank_alone_runs_on_the_thread_of_its_caller(ranks):
    threads, world = ranks(1)
    assert threads.results([lambda r: threading.current_thread()], world, fail) == [threading.current_thread()]
    with pytest.raises(Failed) as failure:
        threads.results([lambda r: 1 // 0], world, fail)
    assert failure.value.args == (ZeroDivisionError, 0, [], [])


def test_the_first_failure_stops_the_others_and_is_the_one_that_is_told(ranks):
    """Rank 1 fails; ranks 0 and 2 wait for it in a barrier, which ends for them."""
    threads, world = ranks(3)

    def job(r):
        if r == 1:
            raise ValueError("mine")
        world.communicator(r).barrier((0, 1, 2))

    with pytest.raises(Failed) as failure:
        threads.results([job], world, fail)
    assert failure.value.args == (ValueError, 1, [0, 1, 2], [])


def test_a_rank_that_is_stuck_after_a_failure_is_given_up(ranks, monkeypatch):
    monkeypatch.setattr(thread_workers, "GRACE", 0.2)
    threads, world = ranks(2)
    go_on = threading.Event()

    def job(r):
        if r == 0:
            raise ValueError("mine")
        go_on.wait(20)

    with pytest.raises(Failed) as failure:
        threads.results([job], world, fail)
    assert failure.value.args == (ValueError, 0, [0], [1])
    go_on.set()


def test_an_interrupted_caller_waits_for_its_ranks_and_is_no_rank(ranks, monkeypatch):
    threads, world = ranks(2)
    ended = []
    collect = threads.collect

    def interrupted(order, wait=None):
        if wait is None:
            raise KeyboardInterrupt
        collect(order, wait)

    monkeypatch.setattr(threads, "collect", interrupted)
    with pytest.raises(Failed) as failure:
        threads.results([lambda r: (time.sleep(0.1), ended.append(r))], world, fail)
    kind, rank, outcomes, lost = failure.value.args
    assert (kind, rank, outcomes, lost) == (KeyboardInterrupt, None, [0, 1], [])


@pytest.mark.parametrize(
    "errors, first",
    [
        ([None, ValueError(), KeyError()], 1),  # of several causes the one of the lowest rank
        ([CommAborted("stopped"), None, ValueError()], 2),  # a rank that was stopped is no cause
        ([CommTimeout("waited"), CommAborted("stopped"), ValueError()], 2),  # nor one that waited in vain, if there is another
        ([CommAborted("stopped"), CommTimeout("waited"), None], 1),
    ],
)
def test_the_cause_of_a_failure(errors, first):
    rank, error = first_failure({r: Outcome(None, e) for r, e in enumerate(errors)})
    assert rank == first and error is errors[first]
