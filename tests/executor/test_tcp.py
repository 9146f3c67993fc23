"""Ranks on two hosts that TCP connects: what threads give they give, bit for bit, as over MPI."""

import pytest

from fluidx import native
from fluidx.native import shared
from fluidx.testing.tcp import TcpProcesses
from tests.executor import bodies
from tests.executor.test_mpi import (
    test_a_profiler_sees_all_ranks_by_one_clock,
    test_a_rank_needs_its_own_programs_only,
    test_state_is_set_and_read_and_every_rank_sees_what_each_fetched,
    test_strategies_give_the_bits_of_threads,
    test_what_is_rounded_is_rounded_alike_and_may_be_sent_beside_compute,
)

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
assert test_a_profiler_sees_all_ranks_by_one_clock and test_a_rank_needs_its_own_programs_only  # they use the ranks of this module
assert test_state_is_set_and_read_and_every_rank_sees_what_each_fetched and test_strategies_give_the_bits_of_threads
assert test_what_is_rounded_is_rounded_alike_and_may_be_sent_beside_compute


@pytest.fixture(scope="module")
def ranks():
    started = TcpProcesses(4)
    ranks = started.ranks(4, 30.0, here=2)
    ranks.each(f"{bodies.__name__}:take_part")
    yield ranks
    started.close()
