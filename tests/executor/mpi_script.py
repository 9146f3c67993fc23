"""What test_mpi.py starts with mpirun: a training in which something may happen to rank 1."""

import os
import sys

import numpy as np

import fluidx as fx

what, places = sys.argv[1], fx.mpi_places() if sys.argv[2] == "places" else None
x = fx.data("x", [-1, 4], "float32")
y = fx.layers.fc(x, 2, param_attr=fx.ParamAttr("w", initializer=fx.initializer.ConstantInitializer(1.0)), bias_attr=False)
loss = fx.layers.reduce_sum(y)
fx.optimizer.SGD(1.0).minimize(loss)
t = fx.DistributeTranspiler("zero3")
t.transpile(trainers=fx.world_size())
feed = {"x": np.arange(24, dtype="float32").reshape(6, 4) % 5 - 2}
with fx.ParallelExecutor(t, places=places) as exe:
    exe.run_startup()
    for step in range(3):
        if fx.rank() == 1 and step == 2:
            if what == "raise":
                raise ValueError("no more data")
            if what == "leave":
                sys.exit(0)
            if what == "kill":
                os.kill(os.getpid(), 9)
        (value,) = exe.run(feed=feed, fetch_list=[loss])
    print(f"rank {fx.rank()} of {fx.world_size()} has {value.item()} and {exe.state('w').sum()}", flush=True)
