"""A few faults of the suite (`make faults` has hundreds): one of each failure, on the body where it is cheapest."""

import pytest

from fluidx import native
from fluidx.native import shared
from tests.faults import engine

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")
SAMPLE = [
    ("raise", "threads"), ("leave", "processes"), ("exit", "run"), ("kill", "run"), ("stop", "run"), ("other program", "run"),
    ("ctrl-c", "processes"), ("parent killed", "run"),
]  # fmt: skip


@pytest.mark.parametrize("how, body", SAMPLE)
def test_all_end_in_time_with_one_report_and_nothing_is_left(how, body):
    outcome = engine.run(engine.drawn(how, body, seed=1))
    assert not outcome.wrong, outcome.printed


@pytest.mark.mpi
@pytest.mark.parametrize("how, body", [("kill", "mpi"), ("stop", "hosts")])
def test_so_it_is_with_ranks_that_mpirun_started(how, body):
    if reason := engine.why_not(body):
        pytest.skip(reason)
    outcome = engine.run(engine.drawn(how, body, seed=1))
    assert not outcome.wrong, outcome.printed


def test_so_it_is_with_ranks_on_two_hosts_that_tcp_connects():
    if reason := engine.why_not("tcp hosts"):
        pytest.skip(reason)
    outcome = engine.run(engine.drawn("kill", "tcp hosts", seed=1))
    assert not outcome.wrong, outcome.printed


def test_the_sample_has_every_failure():
    assert {how for how, _ in SAMPLE} == set(engine.FAILURES)
