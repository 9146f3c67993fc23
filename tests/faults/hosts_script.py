"""What test_hosts.py starts on hosts that TCP connects: a training on small whole numbers, in which something may happen to a rank."""

import json
import os
import signal
import sys

import numpy as np

import fluidx as fx

given = json.loads(sys.argv[1])
what, strategy, out = given.get("what"), given.get("strategy", "zero1"), given["out"]
victim = given.get("rank") == fx.rank()
main, startup = fx.Program("net"), fx.Program("net_startup")
with fx.program_guard(main, startup), fx.unique_name.guard():
    x = fx.data("x", [-1, 4], "float32")
    width = 3 if victim and what == "other program" else 2
    weight = fx.ParamAttr("w", initializer=fx.initializer.ConstantInitializer(1.0))
    loss = fx.layers.reduce_sum(fx.layers.fc(x, width, param_attr=weight, bias_attr=False))
    fx.optimizer.SGD(1.0).minimize(loss)
t = fx.DistributeTranspiler(getattr(fx.strategies, strategy)())
t.transpile(program=main, startup_program=startup, trainers=fx.world_size())
with fx.ParallelExecutor(t) as exe:
    exe.run_startup()
    losses = []
    for step in range(3):
        if step == 2 and what == "wait":  # until the test has done something
            with open(os.path.join(out, f"here-{fx.rank()}"), "w"):
                pass
            while not os.path.exists(os.path.join(out, "on")):
                pass
        if victim and step == 2:
            if what == "raise":
                raise ValueError("no more data")
            if what == "exit":
                sys.exit(3)
            if what in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        rows = 4 if victim and what == "other feed" and step == 2 else 8
        (value,) = exe.run(feed={"x": np.arange(rows * 4, dtype="float32").reshape(rows, 4) % 5 - 2}, fetch_list=[loss])
        losses.append(value.item())
    print(json.dumps([losses, exe.state("w").tolist()]))
