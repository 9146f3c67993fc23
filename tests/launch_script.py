"""What the tests of `fluidx run` start: a training on small whole numbers, so that any order of sums gives the same bits."""

import json
import os
import sys

import numpy as np

import fluidx as fx

strategy, answers, what = sys.argv[1:4]
if what == "another strategy" and fx.rank() == 1:
    strategy = "zero1"
main, startup = fx.Program("net"), fx.Program("net_startup")
with fx.program_guard(main, startup), fx.unique_name.guard():
    x = fx.data("x", [-1, 4], "float32")
    width = 3 if what == "another program" and fx.rank() == 1 else 2
    whole = fx.initializer.ConstantInitializer(1.0)
    y = fx.layers.fc(x, width, param_attr=fx.ParamAttr("w", initializer=whole), bias_attr=False)
    if what == "own pair":  # with an array that its text names by digest
        y = y + fx.layers.reduce_sum(fx.layers.assign(np.arange(400.0, dtype="float32") - 199.5))
    loss = fx.layers.reduce_sum(y)
    fx.optimizer.SGD(1.0).minimize(loss)
t = fx.DistributeTranspiler(getattr(fx.strategies, strategy)())
t.transpile(program=main, startup_program=startup, trainers=fx.world_size() + (what == "other ranks"))
own = fx.ProgramPair(t.get_trainer_program(fx.rank()), t.get_startup_program(fx.rank()))
found = {"rank": fx.rank(), "world_size": fx.world_size(), "restart": os.environ.get("FLUIDX_RESTART")}
with fx.ParallelExecutor(own if what == "own pair" else t) as exe:
    exe.run_startup()
    if what == "set state":
        exe.set_state("w", np.arange(8, dtype="float32").reshape(4, 2))
    steps = []
    for step in range(3):
        at_rank_1 = fx.rank() == 1 and step == 2 and found["restart"] == "0"
        if at_rank_1 and what == "raise":
            raise ValueError("no more data")
        if at_rank_1 and what == "exit":
            sys.exit(3)
        if at_rank_1 and what == "leave":
            sys.exit(0)
        if at_rank_1 and what == "kill":
            os.kill(os.getpid(), 9)
        rows = 4 if at_rank_1 and what == "other feed" else 6
        total, every = exe.run(feed={"x": np.arange(rows * 4, dtype="float32").reshape(rows, 4) % 5 - 2}, fetch_list=[loss, y])
        steps.append([total.tolist(), every.tolist()])
    found.update(steps=steps, w=exe.state("w").tolist())
    if what == "save":
        fx.io.save(main, os.path.join(answers, "model"), exe)
        exe.set_state("w", np.zeros((4, 2), "float32"))
        fx.io.load(main, os.path.join(answers, "model"), exe)
        found["loaded"] = exe.state("w").tolist()
        checkpoints = fx.io.CheckpointManager(os.path.join(answers, "checkpoints"))
        checkpoints.save(3, main, exe, extra={"next": 3})
        exe.set_state("w", np.zeros((4, 2), "float32"))
        found["restored"] = checkpoints.restore(main, exe), exe.state("w").tolist()
with open(os.path.join(answers, f"{fx.rank()}.json"), "w") as f:
    json.dump(found, f)
print(f"rank {fx.rank()} is done")
