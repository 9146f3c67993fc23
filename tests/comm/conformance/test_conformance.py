"""What every communicator keeps, whatever is behind it: each test runs over each body that there is."""

import inspect
import re
import sys

import pytest

from fluidx import native
from fluidx.comm import CommError, CommTimeout
from fluidx.comm.base import AsynchronousCommunicator, Communicator
from fluidx.comm.hosts.message_collectives import MessageCommunicator
from fluidx.comm.hosts.multi_host import HostsCommunicator
from fluidx.comm.nccl import NcclCommunicator
from fluidx.comm.processes import ProcessCommunicator
from fluidx.comm.threads.communicator import ThreadCommunicator
from fluidx.comm.threads.native_calls import NativeCommunicator
from fluidx.native import shared
from fluidx.testing import each_rank
from fluidx.testing.mpi import MpiProcesses, why_not
from fluidx.testing.processes import ProcessRanks
from fluidx.testing.tcp import TcpProcesses
from tests.comm.conformance import jobs
from tests.sweep import some

# nothing, one element, odd sizes; and larger than what the last to arrive does for all, than a block, than a message that is copied
SHAPES = [(0,), (1,), (3,), (7, 3), (4099,), (3, 11_003)]
GROUPS = [(1,), (2, 0), (0, 1, 3), (3, 1, 0, 2)]  # of four ranks, in orders of their own


class Threads:
    missing = "ranks 1, 2"  # as one of four ranks says it

    def __init__(self):
        self.each = lambda n, job, *args: each_rank(n, lambda comm: getattr(jobs, job)(comm, *args))
        self.failing = lambda n, timeout, job, *args: each_rank(n, lambda comm: getattr(jobs, job)(comm, *args), timeout)

    def close(self):
        pass


class Processes:
    """The ranks of a number live as long as the tests: what one test does must not show in the next."""

    missing = "ranks 1, 2"

    def __init__(self):
        self.ranks = {}

    def each(self, n, job, *args):
        if n not in self.ranks:
            self.ranks[n] = ProcessRanks(n)
        return self.ranks[n].each(f"{jobs.__name__}:{job}", args)

    def failing(self, n, timeout, job, *args):
        """With ranks that end with the test."""
        ranks = ProcessRanks(n, timeout)
        try:
            return ranks.each(f"{jobs.__name__}:{job}", args)
        finally:
            ranks.close()

    def close(self):
        for ranks in self.ranks.values():
            ranks.close()


class Mpi:
    """One mpirun for all tests of this folder. Its ranks send messages, as those do that are one on each host."""

    how = {}
    missing = "ranks 1, 2"
    start = MpiProcesses

    def __init__(self, four_processes):
        self.job, self.ranks = four_processes(self.start), {}

    def each(self, n, job, *args):
        if n not in self.ranks:
            self.ranks[n] = self.job.ranks(n, 20.0, **self.how)
        return self.ranks[n].each(f"{jobs.__name__}:{job}", args)

    def failing(self, n, timeout, job, *args):
        return self.job.ranks(n, timeout, **self.how).each(f"{jobs.__name__}:{job}", args)

    def close(self):
        """The processes live on."""


class TwoHosts(Mpi):
    """Ranks that play two hosts: the first half share memory, and so does the second."""

    how = {"share": True, "hosts": 2}
    missing = "rank 1"  # those of this host

    def each(self, n, job, *args):
        if n not in self.ranks:  # a process takes its arrays from the latest memory that it shares
            self.ranks.clear()
        return super().each(n, job, *args)

    def failing(self, n, timeout, job, *args):
        self.ranks.clear()
        return super().failing(n, timeout, job, *args)


class Tcp(Mpi):
    """Ranks that are connected by TCP, each on a host of its own."""

    start = TcpProcesses


class TcpTwoHosts(TwoHosts):
    """Half of the ranks on each of two hosts that TCP connects."""

    missing = "rank [12]"  # of the host on which the deadline passes first
    start = TcpProcesses

    def each(self, n, job, *args):
        self.how = {"here": n // 2}
        return super().each(n, job, *args)

    def failing(self, n, timeout, job, *args):
        self.how = {"here": n // 2 if n % 2 == 0 else 1}
        return super().failing(n, timeout, job, *args)


BODIES = {
    "threads in C": Threads, "threads on locks": Threads, "processes": Processes, "mpi": Mpi, "mpi, two hosts": TwoHosts, "tcp": Tcp,
    "tcp, two hosts": TcpTwoHosts,
}  # fmt: skip


def _why_not(body):
    if body.startswith("mpi") and ((reason := why_not()) or body == "mpi"):
        return reason
    if body == "tcp" and not sys.platform.startswith("linux"):
        return "connections by TCP wait on epoll, which is part of Linux"
    return native.why_not() or ("" if body.startswith("threads") else shared.why_not())


@pytest.fixture(scope="module", params=BODIES)
def body(request, four_processes):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "threads on locks":
            patch.setenv("FLUIDX_KERNELS", "numpy")
        elif reason := _why_not(request.param):
            pytest.skip(reason)
        kind = BODIES[request.param]
        made = kind(four_processes) if issubclass(kind, Mpi) else kind()
        yield made
        made.close()


@pytest.mark.parametrize(
    "body", [ThreadCommunicator, NativeCommunicator, ProcessCommunicator, MessageCommunicator, NcclCommunicator, HostsCommunicator]
)
def test_every_body_has_all_calls(body):
    """With the parameters of the protocol, in its order."""
    for protocol in (Communicator, AsynchronousCommunicator) if body.asynchronous else (Communicator,):
        for name, call in vars(protocol).items():
            if name.startswith("_") or (body.asynchronous and name in ("reach", "follow")):  # for threads beside one another
                continue
            if inspect.isfunction(call):
                found, wanted = (list(inspect.signature(c).parameters)[1:] for c in (getattr(body, name), call))
                assert len(found) == len(wanted) and (protocol is AsynchronousCommunicator or found == wanted), name


@pytest.mark.parametrize("dtype", jobs.DTYPES)
@pytest.mark.parametrize("job", ["reductions", "scattered"])
def test_reductions(body, job, dtype):
    for shape, ranks in some(2, SHAPES, GROUPS):
        body.each(4, job, ranks, shape, dtype)


@pytest.mark.parametrize("dtype", jobs.MOVED)
@pytest.mark.parametrize("job", ["moves", "messages"])
def test_moves(body, job, dtype):
    for shape, ranks in some(2, SHAPES, GROUPS):
        body.each(4, job, ranks, shape, dtype)


@pytest.mark.parametrize("size", [1, 6000])
def test_messages_are_there_when_they_are_asked_for(body, size):
    body.each(2, "many_ahead", 200, size)


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("size", [101, 40_003])
def test_every_rank_has_the_same_bits_and_every_run_and_every_body(body, size, op):
    found = body.each(4, "bits", size, op)
    assert found == body.each(4, "bits", size, op) and all(f == found[0] for f in found)
    assert found[0] == each_rank(4, lambda comm: jobs.bits(comm, size, op))[0]


def test_several_groups_at_once(body):
    assert body.each(4, "overlapping_groups", 20) == [[3, 2, 1, 0]] * 4
    body.each(4, "side_by_side", 50)


def test_two_threads_of_a_rank_wait_for_one_another(body):
    body.failing(2, 10.0, "paces", 50)


WAITS = ["barrier", "all_reduce", "all_gather", "int"]


@pytest.mark.parametrize("what", WAITS)
def test_a_passed_deadline_names_who_is_missing(body, what):
    with pytest.raises(CommTimeout, match=f"waited 0.3 s in .*; {body.missing} did not arrive") as error:
        body.failing(4, 0.3, "without", what, (0, 1, 2, 3), (1, 2))
    assert error.value.rank == int(re.search(r"ranks? (\d)[^;]* did not arrive", str(error.value))[1])


@pytest.mark.parametrize("what", ["recv", "send"])
def test_a_passed_deadline_names_the_peer(body, what):
    with pytest.raises(CommTimeout, match="waited 0.3 s in (recv from|send to) rank 1; rank 1 did not arrive"):
        body.failing(2, 0.3, "without", what, (0, 1), (1,))


@pytest.mark.parametrize("what", [*WAITS, "recv"])
def test_an_abort_wakes_all(body, what):
    with pytest.raises(Exception, match="of all things") as error:
        body.failing(3, 20.0, "raises", what, (0, 1, 2), 1)
    assert "ValueError" in f"{type(error.value).__name__} {error.value}"


@pytest.mark.parametrize("how", ["shape", "op", "call", "root", "dtype", "part", "message"])
def test_ranks_that_disagree_are_told(body, how):
    with pytest.raises(CommError, match="^ranks disagree: rank [01] ") as error:
        body.failing(2, 5.0, "disagree", how)
    assert not isinstance(error.value, CommTimeout)
