"""Broken models: mutations of the official cases, and what a model must not bring about, whatever it holds.

`python -m tests.onnx.fuzzing [--seconds N] [--seed N]` breaks models until the time is over, each in a process that may die.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper

from fluidx import FluidxError
from fluidx.onnx import backend

from . import suite

NUMBERS = [0, 1, -1, 2, -2, 7, -7, 63, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e30, float("nan"), float("inf"), float("-inf")]


def tried(model: Any, inputs: list[Any]) -> str:
    """The error that a model ends with, "" where it gives something. What is no FluidxError is raised."""
    try:
        with np.errstate(all="ignore"):
            backend.prepare(model).run(inputs)
    except FluidxError as e:
        assert str(e)
        return str(e)
    return ""


# -- mutations: each changes a model in place, or gives bytes ---------------------------------------------------------------------------


def _attribute(model: Any, draw: random.Random) -> None:
    """Another value of an attribute, of its type or another."""
    node = draw.choice(model.graph.node)
    names = [a.name for a in node.attribute] + [*schema.attributes] if (schema := _schema(model, node)) else []
    if not names:
        return
    name = draw.choice(names)
    kept = [a for a in node.attribute if a.name != name]
    old = next((a for a in node.attribute if a.name == name), None)
    del node.attribute[:]
    node.attribute.extend(kept)
    if old is not None and old.type == AttributeProto.INTS and draw.random() < 0.5:
        values = list(old.ints)
        if values:
            values[draw.randrange(len(values))] = draw.choice(NUMBERS)
        node.attribute.append(helper.make_attribute(name, values, attr_type=AttributeProto.INTS))
    elif old is None or old.type != AttributeProto.INT or draw.random() < 0.3:
        value = draw.choice([draw.choice(NUMBERS), draw.choice(FLOATS), "x", "", [draw.choice(NUMBERS)] * draw.choice([1, 2, 5]), [0.5]])
        node.attribute.append(helper.make_attribute(name, value))
    else:
        node.attribute.append(helper.make_attribute(name, draw.choice(NUMBERS)))


def _schema(model: Any, node: Any) -> Any:
    opset = next((o.version for o in model.opset_import if o.domain == node.domain), 1)
    try:
        return onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None


def _operands(model: Any, draw: random.Random) -> None:
    """Fewer or more operands, or others."""
    node = draw.choice(model.graph.node)
    names = [i.name for i in model.graph.input] + [n for other in model.graph.node for n in other.output] + ["", "nowhere"]
    kind = draw.randrange(4)
    if kind == 0 and node.input:
        del node.input[draw.randrange(len(node.input))]
    elif kind == 1:
        node.input.append(draw.choice(names))
    elif node.input:
        node.input[draw.randrange(len(node.input))] = draw.choice(names)


def _results(model: Any, draw: random.Random) -> None:
    """Fewer or more outputs of a node, or one twice."""
    node = draw.choice(model.graph.node)
    if draw.random() < 0.5 and node.output:
        del node.output[draw.randrange(len(node.output))]
    else:
        node.output.append(draw.choice([*node.output, "more", ""]))


def _operator(model: Any, draw: random.Random) -> None:
    """Another operator, another domain, or another opset."""
    node, kind = draw.choice(model.graph.node), draw.randrange(3)
    if kind == 0:
        node.op_type = draw.choice(["Add", "Conv", "If", "Loop", "Concat", "Reshape", "LSTM", "Einsum", "Nothing", ""])
    elif kind == 1:
        node.domain = draw.choice(["ai.onnx.ml", "com.example", "ai.onnx"])
    else:
        model.opset_import[0].version = draw.choice([0, 1, 6, 8, 13, 28, 29, 2**40, -1])


def _order(model: Any, draw: random.Random) -> None:
    """Nodes in another order, or a ring of them."""
    nodes = [n.__deepcopy__({}) for n in model.graph.node]
    draw.shuffle(nodes)
    if draw.random() < 0.5 and nodes[0].input and nodes[-1].output:
        nodes[0].input[0] = nodes[-1].output[0]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _bytes(model: Any, draw: random.Random) -> bytes:
    """The file cut, or with other bytes in it."""
    data = bytearray(model.SerializeToString())
    if draw.random() < 0.3:
        return bytes(data[: draw.randrange(len(data))])
    for _ in range(draw.choice([1, 1, 2, 8])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


MUTATIONS: tuple[Callable[[Any, random.Random], Any], ...] = (_attribute, _attribute, _operands, _results, _operator, _order, _bytes)


def mutated(model: Any, draw: random.Random) -> Any:
    """A broken copy of a model, as a ModelProto or bytes."""
    new = onnx.ModelProto()
    new.CopyFrom(model)
    return draw.choice(MUTATIONS)(new, draw) or new


def fed(inputs: list[Any], draw: random.Random) -> list[Any]:
    """Inputs, now and then with one of another value, type or shape, or without the last."""
    if not inputs or draw.random() < 0.6:
        return inputs
    k, new = draw.randrange(len(inputs)), list(inputs)
    if not isinstance(new[k], np.ndarray) or draw.random() < 0.2:
        return new[:-1]
    how = draw.randrange(4)
    if how == 0 and new[k].dtype.kind in "iu" and new[k].size:
        new[k] = new[k].copy()
        new[k].flat[draw.randrange(new[k].size)] = draw.choice([v for v in NUMBERS if v in range(*_bounds(new[k].dtype))])
    elif how == 1:
        new[k] = np.zeros((3,) * draw.randrange(4), new[k].dtype)
    elif how == 2:
        new[k] = np.zeros(new[k].shape, draw.choice(["float32", "int64", "bool", "float16", object]))
    else:
        new[k] = new[k][None]
    return new


def _bounds(dtype: np.dtype) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max) + 1


# -- the long run -----------------------------------------------------------------------------------------------------------------------


def _broken(case: Any, seed: int) -> tuple[Any, list[Any]]:
    draw = random.Random(f"{case.name} {seed}")
    inputs = next(iter(suite.data_of(case)))[0]
    return mutated(suite.model_of(case), draw), fed(list(inputs), draw)


def _in_child(names: list[str], cases: dict[str, Any], seed: int, limit: float) -> Iterator[tuple[str, str]]:
    """(name, what went wrong) of cases, broken by a seed; those after one that kills the process go on in another."""
    import os
    import signal
    import traceback

    while names:
        receive, send = os.pipe()
        child = os.fork()
        if not child:
            os.close(receive)
            with os.fdopen(send, "w") as out:
                for name in names:
                    out.write(f"> {name}\n")
                    out.flush()
                    began = time.process_time()
                    signal.setitimer(signal.ITIMER_VIRTUAL, 4 * limit)  # ends the process: what goes on for ever is told too
                    try:
                        tried(*_broken(cases[name], seed))
                        if time.process_time() - began > limit:
                            out.write(f"! took {time.process_time() - began:.1f} s\n")
                    except BaseException as e:
                        last = traceback.extract_tb(e.__traceback__)[-1]
                        out.write(f"! {type(e).__name__}: {str(e)[:200]!r} at {last.filename.rsplit('/', 1)[-1]}:{last.lineno}\n")
            os._exit(0)
        os.close(send)
        at = 0
        with os.fdopen(receive) as lines:
            for line in lines:
                if line.startswith("> "):
                    at = names.index(line[2:].rstrip("\n"))
                elif line.startswith("! "):
                    yield names[at], line[2:].rstrip("\n")
        _, status = os.waitpid(child, 0)
        if not status:
            return
        yield names[at], f"the process ended with {os.waitstatus_to_exitcode(status)}"
        names = names[at + 1 :]


def limited() -> None:
    """Bounds that make a slow machine small, so that what passes them is met."""
    from fluidx.onnx import limits

    limits.MEMORY, limits.ROUNDS = 2**26, 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=3, help="CPU seconds that one model may take")
    args = parser.parse_args()
    import re

    limited()
    cases = {n: c for n, c in suite.cases().items() if c.kind != "real" and re.search(args.only, n)}
    end, seed, found, count = time.monotonic() + args.seconds, args.seed, 0, 0
    while time.monotonic() < end:
        names = random.Random(seed).sample(sorted(cases), len(cases))
        for start in range(0, len(names), 100):
            for name, why in _in_child(names[start : start + 100], cases, seed, args.limit):
                found += 1
                print(f"{name} seed {seed}: {why}", flush=True)
            count += len(names[start : start + 100])
            if time.monotonic() > end:
                break
        seed += 1
    print(f"{count} broken models, {found} findings")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
