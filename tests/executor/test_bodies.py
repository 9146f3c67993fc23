"""Every strategy over everything that ranks can be, 2 and 4 of them: threads, processes, and MPI processes that send messages or share
memory give the same bits, and where sums are exact those of one device.

A test loops over all strategies, for MPI is started once, and names what differs. MPI on two hosts is in test_mpi.py.
"""

from functools import cache

import pytest

import fluidx as fx
from fluidx import native
from fluidx.comm.mpi import mpirun, start
from fluidx.native import shared
from fluidx.testing.mpi import MpiProcesses
from tests.executor import bodies
from tests.executor.bodies import EXACT, cases, of_one_device, of_ranks
from tests.sweep import some

every_number = pytest.mark.parametrize("ranks", [2, 4])


@cache
def threads(ranks):
    return {name: of_ranks(case, fx.cpu_places(ranks)) for name, case in cases(ranks).items()}


def differing(found, wanted):
    """The names of the cases and of the values that are not as wanted."""
    return {case: wrong for case in wanted if (wrong := [name for name, bits in wanted[case].items() if found[case][name] != bits])}


def test_every_strategy_of_the_catalogue_is_met():
    met = {case.strategy().name for case in cases(4).values()}
    assert met == set(fx.strategies.CATALOGUE)


@every_number
def test_threads_give_one_devices_bits_where_sums_are_exact(ranks):
    one = {name: of_one_device(case.model) for name, case in cases(ranks).items() if case.model in EXACT}
    assert not differing(threads(ranks), one)


@every_number
@pytest.mark.skipif(bool(reason := native.why_not() or shared.why_not()), reason=reason)
def test_processes_give_the_bits_of_threads(ranks):
    found = {name: of_ranks(case, fx.process_places(ranks)) for name, case in cases(ranks).items()}
    assert not differing(found, threads(ranks))


@pytest.fixture(scope="module")
def job():
    if reason := start.why_not() or mpirun.why_not():
        pytest.skip(reason)
    started = MpiProcesses(4)
    yield started
    started.close()


@pytest.mark.mpi
@pytest.mark.parametrize("ranks, share, names", [
    (2, False, [*cases(2)]),
    (4, False, [*cases(4)]),
    (4, True, [name for (name,) in some(2, [*cases(4)])]),  # by the code of processes
], ids=["2 ranks by messages", "4 ranks by messages", "4 ranks in shared memory"])  # fmt: skip
def test_mpi_gives_the_bits_of_threads(job, ranks, share, names):
    among = job.ranks(ranks, 30.0, share)
    among.each(f"{bodies.__name__}:take_part")
    wanted = {name: threads(ranks)[name] for name in names}
    for rank, found in enumerate(among.each(f"{bodies.__name__}:over_mpi", [names])):
        assert not differing(dict(zip(names, found, strict=True)), wanted), f"rank {rank}"
