"""The nets that the onnx package holds without weights, with weights drawn from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .suite import model_of, other_cases


class Light(NamedTuple):
    """A net as wheels.Real has them."""

    case: Any
    atol: float = 1e-4

    @property
    def name(self) -> str:
        return self.case.name.replace("test_", "light_")

    @property
    def package(self) -> str:
        return "onnx"

    version, kind = "", "image classification"

    def feed(self, seed: int = 0) -> dict[str, np.ndarray]:
        model, rng = model_of(self.case), np.random.default_rng(seed)
        held = {t.name for t in model.graph.initializer}
        shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input if i.name not in held}
        return {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}

    def model(self, folder: Path | None = None) -> bytes:
        """The file, its ConstantOfShape nodes replaced: vectors lie between 0.5 and 1.5, so that variances may, other weights are He's."""
        from onnx import numpy_helper

        model, rng = model_of(self.case), np.random.default_rng(1)
        sizes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        drawn, nodes = {}, []
        for node in model.graph.node:
            if node.op_type != "ConstantOfShape" or node.input[0] not in sizes:
                nodes.append(node)
                continue
            shape = sizes[node.input[0]].tolist()
            fan = max(int(np.prod(shape[1:])), 1)
            weights = rng.standard_normal(shape) * np.sqrt(2 / fan) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
            drawn[node.output[0]] = weights.astype("float32")
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in drawn.items())
        model.ir_version = max(model.ir_version, 4)  # below it initializers have to be inputs
        return bytes(model.SerializeToString())


def lights() -> list[Light]:
    return [Light(case) for case in other_cases("real").values()]
