"""What of all that NCCL promises too: processes that have a GPU each, which is played (fake_nccl.py), and meet over it.

Its sums have an order of its own, sends wait for who receives, and nobody sees what the others bring. What NCCL is asked for is in
test_parts.py and test_nccl.py; here are its groups, of processes that tell one another how to connect, and how they hear of failures.
"""

import pytest

from fluidx import native
from fluidx.native import shared
from tests.comm.conformance.test_conformance import GROUPS, SHAPES, WAITS, Processes

pytestmark = pytest.mark.skipif(bool(reason := native.why_not() or shared.why_not()), reason=reason)


@pytest.fixture(scope="module")
def gpus():
    made = Processes()
    yield made
    made.close()


@pytest.mark.parametrize("job, dtype", [("reductions", "float32"), ("scattered", "bfloat16"), ("moves", "bool"), ("messages", "int64")])
def test_collectives_and_messages(gpus, job, dtype):
    for shape in SHAPES:
        for ranks in GROUPS:
            gpus.each(4, "on_gpus", job, ranks, shape, dtype)


def test_several_groups_at_once(gpus):
    assert gpus.each(4, "on_gpus", "overlapping_groups", 20) == [[3, 2, 1, 0]] * 4
    gpus.each(4, "on_gpus", "side_by_side", 50)


@pytest.mark.parametrize("what", [*WAITS, "recv"])
def test_an_abort_wakes_all(gpus, what):
    with pytest.raises(Exception, match="of all things") as error:
        gpus.failing(3, 20.0, "on_gpus", "raises", what, (0, 1, 2), 1)
    assert "ValueError" in f"{type(error.value).__name__} {error.value}"
