"""The training that the fault suite starts: one argument says, as JSON, on what it runs and which rank fails where."""

import json
import os
import sys
import time

import numpy as np

import fluidx as fx
from tests.executor import faulty

given = json.loads(sys.argv[1])
how, victim, step, ranks = (given[k] for k in ("how", "rank", "step", "ranks"))
os.environ["FLUIDX_TIMEOUT"] = f"{given['deadline']:g}"
launched = given["body"] in ("run", "mpi", "hosts", "tcp hosts")


def written(width):
    """The model, in which one operator fails on one rank in one step."""
    x = fx.data("x", [-1, 4], "float32")
    h, in_operator = x, how in faulty.HOW and not (launched and how == "leave")
    for layer in range(4):
        h = fx.layers.fc(h, width, act="relu")
        if layer == given["place"] and in_operator:
            h = fx.ir.Builder(fx.default_main_program().global_block()).t_faulty(h, how=how, rank=victim, step=step)  # THE LINE
    loss = fx.layers.mean(h)
    fx.optimizer.Momentum(learning_rate=0.01, momentum=0.5).minimize(loss)
    return loss


def transpiled(width):
    with fx.unique_name.guard(), fx.program_guard(fx.Program("main"), fx.Program("startup")):
        loss = written(width)
        return fx.DistributeTranspiler(getattr(fx.strategies, given["strategy"])()).transpile(trainers=ranks), loss


def programs():
    """What is run: where one process has all ranks, perhaps another program for one of them."""
    mine = 5 + (how == "other program" and launched and fx.rank() == victim)
    t, loss = transpiled(mine)
    if how != "other program" or launched:
        return t, loss
    other, _ = transpiled(6)
    of = [other if r == victim else t for r in range(ranks)]
    return [fx.ProgramPair(p.get_trainer_program(r), p.get_startup_program(r)) for r, p in enumerate(of)], loss


places = {"threads": lambda: fx.cpu_places(ranks), "processes": lambda: fx.process_places(ranks, imports=[faulty.__name__])}
t, loss = programs()
faulty.note() if how == "other program" else None
with fx.ParallelExecutor(t, places=None if launched else places[given["body"]]()) as exe:
    exe.run_startup()
    for k in range(1_000_000 if how in ("ctrl-c", "parent killed") else step + 3):
        if launched and how == "leave" and fx.rank() == victim and k == step:
            faulty.note()
            sys.exit(3)
        if k == step and fx.rank() == 0:
            print("here", flush=True)
        exe.run(feed={"x": np.ones((ranks + 1, 4), "float32")}, fetch_list=[loss])
print("through", time.time(), os.getpid())
