"""Launched ranks feed the whole batch each: what they feed must be the same, and a feed that differs is named."""

import pytest

from fluidx import native
from fluidx.launch import process_job
from fluidx.native import shared

pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")

SCRIPT = """
import sys
import numpy as np
import fluidx as fx

x, label = fx.data("x", [-1, 2], "float32"), fx.data("label", [-1, 1], "int64")
loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(x, 3), label))
fx.optimizer.SGD(0.1).minimize(loss)
t = fx.DistributeTranspiler("data_parallel")
t.transpile(trainers=fx.world_size())
with fx.ParallelExecutor(t) as exe:
    exe.run_startup()
    for step in range(6):
        other = fx.rank() == 1 and step == int(sys.argv[1])
        feed = {"label": np.arange(6).reshape(6, 1) % 3, "x": np.arange(12, dtype="float32").reshape(6, 2)[::-1 if other else 1]}
        exe.run(feed=feed, fetch_list=[loss])
"""


def launched(tmp_path, script, *args, ranks=3):
    (file := tmp_path / "script.py").write_text(script)
    said = []
    return process_job.run(str(file), [str(a) for a in args], ranks, say=said.append, timeout=20.0), "\n".join(said)


@pytest.mark.parametrize("step", [0, 3])
def test_a_feed_that_differs_between_ranks_is_named(tmp_path, step):
    """The second, fourth, ... run too: orders that differ may begin with an epoch."""
    status, said = launched(tmp_path, SCRIPT, step)
    assert status == 1
    assert "the ranks feed different values of 'x': one on ranks 0, 2, another on rank 1" in said
    assert "draw the batch from the same seed or file on all ranks" in said


def test_the_same_feed_on_all_ranks_is_taken(tmp_path):
    assert launched(tmp_path, SCRIPT, -1) == (0, "")
