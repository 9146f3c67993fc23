"""What every World keeps, whatever is behind it: each test runs over each body that there is."""

import inspect

import pytest

from fluidx.comm import CommAborted
from fluidx.comm.base import LocalWorld, World
from fluidx.comm.hosts.multi_host import HostsWorld
from fluidx.comm.mpi.world import MpiWorld
from fluidx.comm.multi_rank_world import MultiRankWorld
from fluidx.comm.nccl import LaunchedNcclWorld, NcclWorld
from fluidx.comm.processes import ProcessWorld
from fluidx.comm.tcp.world import TcpWorld
from fluidx.comm.threads.world import ThreadWorld
from tests.comm.conformance.test_conformance import body

assert body  # a fixture


LAUNCHED = [ProcessWorld, MpiWorld, TcpWorld, HostsWorld]


@pytest.mark.parametrize("world", [ThreadWorld, MultiRankWorld, NcclWorld, LaunchedNcclWorld, *LAUNCHED])
def test_every_world_has_all_calls(world):
    """With the parameters of the protocol, in its order."""
    for protocol in (World, LocalWorld) if world in (ThreadWorld, NcclWorld) else (World,):
        for name, call in vars(protocol).items():
            if inspect.isfunction(call) and not name.startswith("_"):
                found, wanted = (list(inspect.signature(c).parameters) for c in (getattr(world, name), call))
                assert found[: len(wanted)] == wanted, name


def test_a_world_knows_its_ranks_and_begins_runs(body):
    assert body.each(3, "world_of_ranks") == [[3, True]] * 3


def test_the_first_reason_of_a_failure_reaches_every_rank(body):
    with pytest.raises((CommAborted, ValueError), match="of all things"):
        body.failing(3, 10.0, "fails_for_all")


def test_ranks_of_other_processes_have_no_communicator_here(body):
    body.each(2, "others_are_elsewhere")
