"""What test_tuning.py starts on two ranks that each run the script: to each another choice seems the faster one."""

import json
import sys

import fluidx as fx
from fluidx.testing.models import classifier

folder, rank = sys.argv[1], fx.rank()
model = classifier(fx.optimizer.Momentum(0.1, 0.9), width=4)
clock = iter([0, 1, 0, 2] if rank == 0 else [0, 4, 0, 3]).__next__
found = fx.tune(
    "data_parallel", {"bucket_mb": [1, 4]}, model.main, model.startup, model.feed(8), None,
    steps=1, warm_up=0, log=f"{folder}/log", clock=clock,
)  # fmt: skip
t = fx.DistributeTranspiler(found.strategy)
t.transpile(program=model.main, startup_program=model.startup, trainers=fx.world_size())
with fx.ParallelExecutor(t) as exe:
    exe.run_startup()
    exe.run(feed=model.feed(8))
with open(f"{folder}/{rank}.json", "w") as f:
    json.dump([found.options, [one.seconds for one in found.tried]], f)
