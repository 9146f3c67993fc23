"""A program of twelve variables, saved again and again: `python -m tests.saving KIND FOLDER` does so until it is killed."""

import sys

import numpy as np

import fluidx as fx


def program():
    main = fx.Program("p")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        held = [main.global_block().create_var(f"v{k}", [500], "float32", persistable=True) for k in range(12)]
        total = fx.layers.sum(held)
    return main, total


def fill(value):
    for k in range(12):
        fx.global_scope().set(f"v{k}", np.full(500, value, "float32"))


def values():
    return {float(v) for k in range(12) for v in fx.global_scope().get(f"v{k}")}


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

if __name__ == "__main__":
    kind, path = sys.argv[1:]
    main, total = program()
    for value in range(100000):
        fill(value)
        SAVES[kind](main, total, path)
        print(value, flush=True)
