"""What listeners are told of the runs of ranks: `fluidx run --metrics` and TensorBoard write that."""

import numpy as np

import fluidx as fx
from fluidx.launch.metrics import heard
from tests.executor.test_parallel import pairs
from tests.executor.test_rank_programs import feed, ring

L = fx.layers


def told_of(merged):
    """A step of two ranks that fetch the sum of 0..7, a value of the whole batch and a parameter; and what was told of it."""
    x = fx.data("x", [-1, 2], "float32")
    ones = fx.ParamAttr("w", initializer=fx.initializer.ConstantInitializer(1.0))
    loss = L.reduce_sum(L.fc(x, 1, param_attr=ones, bias_attr=False))
    fx.optimizer.SGD(0.0).minimize(loss)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(trainers=2)
    records = []
    with heard(records.append), fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        given = {"x": np.arange(8, dtype="float32").reshape(4, 2)}
        values = exe.run(fetch_list=[loss, "fc_0.tmp_0"], feed=given, return_merged=merged)
    return values, records, loss.name


def test_listeners_hear_the_global_value_also_where_each_rank_gets_its_own():
    values, (record,), loss = told_of(merged=False)
    assert [v.item() for v in values[0]] == [6.0, 22.0]  # each rank's rows
    assert (record["step"], record[loss], len(record)) == (0, 28.0, 5)  # with program, time and rate


def test_what_has_no_global_value_is_left_out():
    """`flat` is local to each rank, `sum0` lies on rank 0 alone; neither is a scalar, and the step is told."""
    records = []
    with heard(records.append), fx.ParallelExecutor(pairs(ring(2, [0, 8, 12])), timeout=10) as exe:
        exe.run_startup()
        exe.run(feed=feed(4), fetch_list=["flat", "sum0"], return_merged=False)
    assert [{k for k in r if k not in ("time", "rate")} for r in records] == [{"program", "step"}]
