"""Ranks that TCP connects: what goes between hosts, and the bits of a sum. The conformance suite has the rest."""

import numpy as np
import pytest

from fluidx.comm.tcp.link import TcpLink
from fluidx.testing import each_rank
from fluidx.testing.tcp import TcpProcesses
from tests.comm.conformance import jobs

ALL = (0, 1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def three_hosts():
    """Two ranks on each of three hosts."""
    started = TcpProcesses(6)
    yield started.ranks(6, 20.0, here=2)
    started.close()


def sent(comm, how, size):
    """The bytes of data that this rank sends in a sum over all ranks, as one collective or as a sum over rails."""
    before, counted = TcpLink._say, []

    def say(link, kind, tag, *data):
        counted.append(data[0].nbytes if data else 0)
        before(link, kind, tag, *data)

    TcpLink._say = say
    try:
        x = np.full(size, comm.rank + 1.0, "float32")
        if how == "all_reduce":
            comm.all_reduce(x, x, "sum", ALL)
        else:
            first, half = comm.rank // 2 * 2, np.empty(size // 2, "float32")
            comm.reduce_scatter([x[: size // 2], x[size // 2 :]], half, "sum", (first, first + 1))
            comm.all_reduce(half, half, "sum", tuple(range(comm.rank % 2, 6, 2)))
            comm.all_gather(half, [x[: size // 2], x[size // 2 :]], (first, first + 1))
        assert (x == 21).all()
    finally:
        TcpLink._say = before
    return sum(n for n in counted if n > 4096)


def test_what_a_host_sends_for_a_large_sum(three_hosts):
    """S bytes over three hosts: in rank order the sum passes each link once on its way, and once back, so a host in the middle sends 2 S;
    over rails, in another order, each host sends 4/3 S, as in a ring."""
    size = 3 << 16
    for how, wanted in (("all_reduce", [1, 2, 1]), ("rails", [4 / 3] * 3)):
        by_rank = three_hosts.each(f"{__name__}:sent", [how, size])
        assert [sum(by_rank[h : h + 2]) / (4 * size) for h in (0, 2, 4)] == pytest.approx(wanted), how


def test_three_hosts_have_the_bits_of_threads(three_hosts):
    for size in (101, 40_003):
        wanted = each_rank(6, lambda comm, size=size: jobs.bits(comm, size, "avg"))
        assert three_hosts.each(f"{jobs.__name__}:bits", [size, "avg"]) == wanted
