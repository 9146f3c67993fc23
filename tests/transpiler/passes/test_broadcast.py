"""Initial values come from their owners: balanced ones, or the root that is asked for."""

import pytest

import fluidx as fx
from fluidx.testing.models import integer_mlp
from fluidx.transpiler.passes.broadcast import BroadcastStartup


def roots(root):
    model = integer_mlp(optimizer=fx.optimizer.Momentum(0.5, 0.9))
    strategy = fx.strategies.data_parallel(bucket_mb=0).replace("startup", BroadcastStartup(root=root))
    t = fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=3)
    t.verify()
    return [op.attrs["root"] for op in t.startup.ops if op.type == "broadcast"]


def test_parameters_and_state_come_from_any_root():
    assert roots(2) == [2] * 9  # four parameters, their velocities, the learning rate
    assert len(roots(None)) == 9 and set(roots(None)) == {0, 1, 2}


def test_a_root_outside_of_the_group_is_refused():
    for root in (3, -1, "x", True, 1.5):
        with pytest.raises(fx.TranspileError, match=f"^BroadcastStartup: root={root!r} is not a rank of dp, which has 3$"):
            roots(root)
