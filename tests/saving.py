"""A program of twelve variables, saved again and again: `python -m tests.saving KIND FOLDER` does so until it is killed.

`fluidx run -n 2 --backend processes tests/saving.py KIND FOLDER` does it on ranks, which write down their processes' numbers; so does
`python -m tests.saving KIND FOLDER` on ranks that it starts.
"""

import os
import sys

import numpy as np

import fluidx as fx

KILLS = int(os.environ.get("FLUIDX_TEST_KILLS", "1"))  # how often each test kills
SECONDS = 60 + 10 * KILLS  # that such a test has


def program():
    main = fx.Program("p")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        held = [main.global_block().create_var(f"v{k}", [500], "float32", persistable=True) for k in range(12)]
        total = fx.layers.sum(held)
    return main, total


def trained():
    """A program with twelve variables of the same names, which ranks hold parts of."""
    main, startup = fx.Program("p"), fx.Program("s")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x = fx.data("x", [-1, 50], "float32")
        held = [fx.layers.fc(x, 10, param_attr=f"v{k}", bias_attr=False) for k in range(12)]
        fx.optimizer.SGD(0.0).minimize(fx.layers.reduce_sum(fx.layers.sum(held)))
    return main, startup


def fill(value):
    for k in range(12):
        fx.global_scope().set(f"v{k}", np.full(500, value, "float32"))


def values():
    return {float(v) for k in range(12) for v in fx.global_scope().get(f"v{k}").flat}


SAVES = {
    "program": lambda main, total, path: fx.io.save(main, f"{path}/m"),
    "sharded": lambda main, total, path: fx.io.save(main, path, sharded=True),
    "vars": lambda main, total, path: fx.io.save_persistables(None, path, main),
    "model": lambda main, total, path: fx.io.save_inference_model(path, [], [total], None, main),
}
LOADS = {
    "program": lambda main, path: fx.io.load(main, f"{path}/m"),
    "sharded": lambda main, path: fx.io.load(main, path),
    "vars": lambda main, path: fx.io.load_persistables(None, path, main),
    "model": lambda main, path: fx.io.load_inference_model(path, None),
}


def on_ranks(save, path, places=None):
    main, startup = trained()
    t = fx.DistributeTranspiler("fsdp")
    t.transpile(program=main, startup_program=startup, trainers=fx.world_size() if places is None else len(places))
    with fx.ParallelExecutor(t, places=places) as exe:
        for rank, pid in {fx.rank(): os.getpid()}.items() if places is None else enumerate(p.pid for p in exe.pool.processes):
            with open(f"{path}.rank-{rank}", "w") as f:
                print(pid, file=f)
        exe.run_startup()
        for value in range(100000):
            for k in range(12):
                exe.set_state(f"v{k}", np.full((50, 10), value, "float32"))
            save(value, main, exe)
            if fx.rank() == 0:
                print(value, flush=True)


if __name__ == "__main__":
    kind, path = sys.argv[1:]
    whose, _, behind = kind.partition(" ")
    if whose in ("ranks", "places"):
        at_once = lambda value, main, exe: fx.io.save(main, path, exe, sharded=True)  # noqa: E731
        save = fx.io.CheckpointManager(path, keep=2, asynchronous=True).save if behind else at_once
        on_ranks(save, path, fx.process_places(2) if whose == "places" else None)
    main, total = program()
    for value in range(100000):
        fill(value)
        SAVES[kind](main, total, path)
        print(value, flush=True)
