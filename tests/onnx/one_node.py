"""One node at a time: what it gives, in fluidx and in ONNX Runtime, and its gradient against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

import fluidx as fx
from fluidx.executor import Executor
from fluidx.executor.scope import Scope
from fluidx.onnx import backend
from fluidx.onnx.importer import Importer
from fluidx.onnx.read import NEWEST
from fluidx.testing import numeric_grad

OPSET = 21  # one for which ONNX Runtime has all that tests ask it for


def model(op: str, inputs: list[Any], outputs: int = 1, known: tuple[int, ...] = (), **attrs: Any) -> Any:
    """A model of one node; inputs that are None are left out, those in `known` are part of the model."""
    names = [f"x{k}" if v is not None else "" for k, v in enumerate(inputs)]
    results = [f"y{k}" for k in range(outputs)]
    fed = [k for k, v in enumerate(inputs) if v is not None and k not in known]
    infos = [helper.make_tensor_value_info(names[k], helper.np_dtype_to_tensor_dtype(inputs[k].dtype), inputs[k].shape) for k in fed]
    held = [numpy_helper.from_array(inputs[k], names[k]) for k in known if inputs[k] is not None]
    ends = [helper.make_empty_tensor_value_info(n) for n in results]
    graph = helper.make_graph([helper.make_node(op, names, results, **attrs)], op, infos, ends, held)
    opsets = [helper.make_opsetid(d, 1 if d else OPSET) for d in dict.fromkeys(("", attrs.get("domain", "")))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def given(inputs: list[Any], known: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    return {f"x{k}": v for k, v in enumerate(inputs) if v is not None and k not in known}


def ran(op: str, inputs: list[Any], outputs: int = 1, known: tuple[int, ...] = (), **attrs: Any) -> Any:
    """What fluidx gives; a list where there are several outputs."""
    found = backend.prepare(model(op, inputs, outputs, known, **attrs)).run(given(inputs, known))
    return list(found) if outputs > 1 else found[0]


def by_runtime(op: str, inputs: list[Any], outputs: int = 1, known: tuple[int, ...] = (), **attrs: Any) -> Any:
    """What ONNX Runtime gives; the test is skipped without it."""
    import pytest

    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(model(op, inputs, outputs, known, **attrs).SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, given(inputs, known))
    return found if outputs > 1 else found[0]


def check_gradient(
    op: str, inputs: list[Any], outputs: int = 1, wrt: tuple[int, ...] = (0,), known: tuple[int, ...] = (), **attrs: Any
) -> None:
    """The gradients of a weighed sum of the outputs to the inputs `wrt`, of float64, equal central differences to 6 digits.

    Central differences of float64 are right to about 9 digits.
    """
    found, _, loss = gradients_of(op, inputs, outputs, wrt, known, **attrs)
    for k, g in zip(wrt, found):
        np.testing.assert_allclose(g, numeric_grad(loss, inputs[k]), rtol=1e-6, atol=1e-6, err_msg=f"{op}, operand {k}")


def gradients_of(
    op: str, inputs: list[Any], outputs: int = 1, wrt: tuple[int, ...] = (0,), known: tuple[int, ...] = (), **attrs: Any
) -> tuple[list[np.ndarray], list[np.ndarray], Callable[[np.ndarray], float]]:
    """(gradients to the inputs `wrt`, the weights of the outputs, what gives their weighed sum for the inputs as they are then)."""
    main, startup = fx.Program("node"), fx.Program("node_startup")
    node = model(op, inputs, outputs, known, **attrs).graph.node[0]
    with fx.program_guard(main, startup):
        importer = Importer(main, startup, {"": NEWEST})
        importer.env.update({f"x{k}": inputs[k] for k in known})
        data = {n: importer.data(n, v.shape, str(v.dtype)) for n, v in given(inputs, known).items()}
        importer.run_nodes([node])
        results = [importer.lookup(n) for n in node.output]
        weights = [np.random.default_rng(k).normal(size=r.shape) for k, r in enumerate(results)]
        b = importer.b
        total = b.sum([b.reduce_sum(b.elementwise_mul(r, importer.variable(w))) for r, w in zip(results, weights)])
        wanted = fx.gradients(total, [data[f"x{k}"] for k in wrt])
    executor, scope = Executor(), Scope()
    executor.run(startup, scope=scope)
    feed = given(inputs, known)

    def loss(_: np.ndarray) -> float:
        return executor.run(main, feed=feed, fetch_list=[total], scope=scope)[0].item()

    return executor.run(main, feed=feed, fetch_list=wanted, scope=scope), weights, loss


__all__ = ["by_runtime", "check_gradient", "gradients_of", "model", "ran"]
