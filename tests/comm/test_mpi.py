"""Ranks that mpirun starts: sharing memory on one host, and on two hosts that namespaces play. The conformance suite has the rest."""

import numpy as np
import pytest

from fluidx.comm import CommTimeout
from fluidx.testing import each_rank
from fluidx.testing.mpi import MpiProcesses, why_not
from tests.comm.conformance import jobs
from tests.comm.hosts import two_hosts

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(reason := why_not()), reason=reason)]
ALL = (0, 1, 2, 3)


def job(ranks, name, *args):
    return ranks.each(f"{jobs.__name__}:{name}", args)


def shares(comm):
    return comm.world.memory is not None


class _Counting:
    """A communicator of MPI that notes to whom it sends how many bytes. Lines are made in the call in which they are used."""

    def __init__(self, comm):
        self.comm, self.sent = comm, []

    def __getattr__(self, name):
        def call(data, to, tag):
            if "send" in name.lower():
                self.sent.append([to, len(data[0])])
            return getattr(self.comm, name)(data, to, tag)

        return call


def counted(world, call):
    """What this rank sends in a call."""
    counting, plain = _Counting(world.comm), world.comm
    world.comm = counting
    call()
    world.comm = plain
    return counting.sent


def sent(comm, size):
    """What this rank sends in an all_reduce."""
    x = np.full(size, comm.rank, "float32")
    found = counted(comm.world.between, lambda: comm.all_reduce(x, x, "sum", ALL))
    assert (x == 6).all()
    return found


def sent_with_root(comm, rows, root, hosts):
    """The bytes of data that this rank sends in a scatter, and in a gather."""
    world, whole, part = comm.world.between if hosts else comm.world, np.arange(4.0 * rows), np.empty(rows)
    scatter = counted(world, lambda: comm.scatter([*whole.reshape(4, rows)], part, root, ALL))
    assert (part == whole.reshape(4, rows)[comm.rank]).all()
    gather = counted(world, lambda: comm.gather(part, [*whole.reshape(4, rows)], root, ALL))
    return [sum(nbytes for _, nbytes in sent if nbytes > 4096) for sent in (scatter, gather)]  # the rest are texts


def as_threads(name, *args):
    return each_rank(4, lambda comm: getattr(jobs, name)(comm, *args))


def check_all(ranks):
    """Some of everything, and the same bits as rank threads have."""
    for shape in (3,), (5, 20_011):
        for name in ("reductions", "scattered", "moves", "messages"):
            job(ranks, name, ALL[::-1], shape, "bfloat16")
    assert job(ranks, "bits", 40_003, "avg") == as_threads("bits", 40_003, "avg")
    job(ranks, "overlapping_groups", 5)


@pytest.fixture(scope="module")
def host(four_processes):
    return four_processes(MpiProcesses)


def test_ranks_of_one_host_share_memory(host):
    ranks = host.ranks(4, 20.0, share=True)
    assert ranks.each(f"{__name__}:shares") == [True] * 4
    check_all(ranks)
    job(ranks, "paces", 20)


def test_ranks_of_hosts_that_have_different_numbers_of_them_do_what_threads_do(host):
    check_all(host.ranks(4, 20.0, share=True, hosts=3))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_hosts(tmp_path_factory.mktemp("hosts"), 2) as (prefix, file, environ):
        started = MpiProcesses(4, prefix, file, environ)
        yield started
        started.close()


def test_ranks_of_two_hosts_do_what_threads_do(hosts):
    ranks = hosts.ranks(4, 20.0, share=True)
    assert ranks.each(f"{__name__}:shares") == [False] * 4  # hosts have no memory in common
    check_all(ranks)


def test_between_hosts_goes_what_other_hosts_have_to_know_and_nothing_else(host):
    """Little goes from the first rank of each host to that of the other. Of what is large each rank adds a half with its neighbour on its
    host, which goes to the other host once: as terms added up, or as the sum."""
    ranks = host.ranks(4, 20.0, share=True, hosts=2)
    little, large = (ranks.each(f"{__name__}:sent", [size]) for size in (100, 1 << 18))
    assert [[to for to, _ in by_rank] for by_rank in little] == [[2], [], [0], []]
    heads = [by_rank[0] for by_rank in (large[0], large[2])]
    assert [to for to, _ in heads] == [2, 0] and all(nbytes <= 512 for _, nbytes in heads)
    data = [large[0][1:], large[1], large[2][1:], large[3]]
    assert [sum(nbytes for _, nbytes in by_rank) for by_rank in data] == [1 << 19] * 4
    assert [{to for to, _ in by_rank} for by_rank in data] == [{2}, {3}, {0}, {1}]


@pytest.mark.parametrize("hosts", [False, True])
def test_a_root_sends_each_other_rank_its_part_and_gets_a_part_from_each(host, hosts):
    """Of a value of 8 MiB the root sends three quarters and gets three quarters; the others send or get a quarter."""
    ranks, quarter = host.ranks(4, 20.0, **({"share": True, "hosts": 2} if hosts else {})), 2 << 20
    found = ranks.each(f"{__name__}:sent_with_root", [quarter // 8, 1, hosts])
    assert found == [[0, quarter], [3 * quarter, 0], [0, quarter], [0, quarter]]


def test_between_hosts_too_a_passed_deadline_names_who_is_missing_and_an_abort_wakes_all(hosts):
    with pytest.raises(CommTimeout, match="waited 0.5 s in all_reduce .*; ranks 1, 3 did not arrive"):
        job(hosts.ranks(4, 0.5), "without", "all_reduce", ALL, (1, 3))
    with pytest.raises(CommTimeout, match="rank 2 waited 0.5 s in all_reduce; rank 3 did not arrive"):  # not who waits for its host
        job(hosts.ranks(4, 0.5, share=True), "without", "all_reduce", ALL, (3,))
    for share in (False, True):
        with pytest.raises(Exception, match="ValueError.*of all things"):
            job(hosts.ranks(4, 20.0, share), "raises", "barrier", ALL, 1)
