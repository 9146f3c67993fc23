"""Which sends and receives start together."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Operator, ProgramError
from fluidx.ir.message_batches import forwarded, spans
from fluidx.testing import run_ranks


def send(x, batch=""):
    return Operator("send", {"X": (x,)}, {}, {"peer": 1, "group": "dp", "batch": batch})


def recv(y, batch=""):
    return Operator("recv", {}, {"Out": (y,)}, {"peer": 1, "group": "dp", "batch": batch, "shape": (2,), "dtype": "float32"})


def relu(x, y):
    return Operator("relu", {"X": (x,)}, {"Out": (y,)})


def test_neighbours_of_one_batch_start_together():
    ops = [send("a", "1"), recv("b", "1"), recv("c", "2"), relu("b", "d"), send("d", "2"), send("c"), recv("e"), recv("f", "1")]
    assert spans(ops) == {0: (0, 1), 1: (0, 1), 2: (2, 2), 4: (4, 4), 7: (7, 7)}
    assert spans([]) == {} and spans([relu("a", "b")]) == {}


@pytest.mark.parametrize("first", [True, False])
def test_a_send_of_what_the_same_batch_receives_is_found(first):
    ops = [send("x", "1"), recv("x", "1")] if first else [recv("x", "1"), send("x", "1")]
    ops.append(recv("y", "1"))
    assert forwarded(ops, (0, 2)).type == "send"
    assert forwarded([send("x", "1"), recv("y", "1")], (0, 1)) is None
    assert forwarded([recv("x", "1"), send("x", "2")], spans([recv("x", "1"), send("x", "2")])[1]) is None


def there_and_back(batches):
    """Rank 0 sends x, rank 1 sends on what came, rank 0 receives it."""
    programs = []
    for r in range(2):
        p = fx.Program("ranks")
        p.groups = {"dp": ((0, 1),)}
        with fx.program_guard(p, fx.Program()):
            x = fx.data("x", [2], "float32")
            b = fx.ir.Builder(p.global_block())
            if r == 0:
                b.send(x, peer=1, group="dp")
                b.recv(peer=1, shape=(2,), group="dp", name="got")
            else:
                b.recv(peer=0, shape=(2,), group="dp", batch=batches[0], name="got")
                b.send("got", peer=0, group="dp", batch=batches[1])
        programs.append(p)
    return programs


def test_a_program_that_forwards_within_a_batch_is_refused_and_one_that_does_not_runs():
    feeds = [{"x": np.float32([1, 2])}, {"x": np.float32([0, 0])}]
    assert [r[0].tolist() for r in run_ranks(there_and_back(("in", "out")), feeds, ["got"])] == [[1, 2], [1, 2]]
    with pytest.raises(ProgramError, match="op send sends 'got', which another operator of batch 'both' receives; give it a batch"):
        run_ranks(there_and_back(("both", "both")), feeds, ["got"], timeout=2.0)
