"""Ranks that mpirun starts: sharing memory on one host, and on two hosts that namespaces play. The conformance suite has the rest."""

import pytest

from fluidx.comm import CommTimeout
from fluidx.comm.processes import ProcessCommunicator
from fluidx.testing import each_rank
from fluidx.testing.mpi import Job, why_not
from tests.comm.conformance import jobs
from tests.comm.hosts import two_hosts

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(reason := why_not()), reason=reason)]
ALL = (0, 1, 2, 3)


def job(ranks, name, *args):
    return ranks.each(f"{jobs.__name__}:{name}", args)


def shares(comm):
    return isinstance(comm, ProcessCommunicator)


def as_threads(name, *args):
    return each_rank(4, lambda comm: getattr(jobs, name)(comm, *args))


def check_all(ranks):
    """Some of everything, and the same bits as rank threads have."""
    for shape in (3,), (5, 20_011):
        for name in ("reductions", "scattered", "moves", "messages"):
            job(ranks, name, ALL[::-1], shape, "bfloat16")
    assert job(ranks, "bits", 40_003, "avg") == as_threads("bits", 40_003, "avg")
    job(ranks, "overlapping_groups", 5)


def test_ranks_of_one_host_share_memory():
    started = Job(4)
    try:
        ranks = started.ranks(4, 20.0, share=True)
        assert ranks.each(f"{__name__}:shares") == [True] * 4
        check_all(ranks)
        job(ranks, "paces", 20)
    finally:
        started.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts"), 2) as (prefix, file, environ):
        started = Job(4, prefix, file, environ)
        yield started
        started.close()


def test_ranks_of_two_hosts_do_what_threads_do(hosts):
    ranks = hosts.ranks(4, 20.0, share=True)
    assert ranks.each(f"{__name__}:shares") == [False] * 4  # hosts have no memory in common
    check_all(ranks)


def test_between_hosts_too_a_passed_deadline_names_who_is_missing_and_an_abort_wakes_all(hosts):
    with pytest.raises(CommTimeout, match="waited 0.5 s in all_reduce .*; ranks 1, 3 did not arrive"):
        job(hosts.ranks(4, 0.5), "without", "all_reduce", ALL, (1, 3))
    with pytest.raises(Exception, match="ValueError.*of all things"):
        job(hosts.ranks(4, 20.0), "raises", "barrier", ALL, 1)
