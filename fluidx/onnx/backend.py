"""The standard interface of ONNX backends: `prepare`, `run_model`, `run_node`, `supports_device`."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto, NodeProto, helper
from onnx.backend.base import Backend, BackendRep

from .read import read
from .sessions import Session
from .values import type_proto


class FluidxRep(BackendRep):
    """A model that runs."""

    def __init__(self, session: Session):
        self.session = session

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, for inputs in order, or by name."""
        if not isinstance(inputs, (list, tuple, dict)):
            inputs = [inputs]
        return tuple(self.session.run(inputs))


class FluidxBackend(Backend):
    """Runs models on the CPU."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> FluidxRep:
        """A model that runs again and again. Raises OnnxError for one that cannot."""
        return FluidxRep(Session(read(model)))

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(cls, node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        import numpy as np

        given = dict(zip([n for n in node.input if n], [np.asarray(v) for v in inputs]))
        ins = [helper.make_value_info(n, type_proto(v)) for n, v in given.items()]
        outs = [helper.make_empty_tensor_value_info(n) for n in node.output]
        graph = helper.make_graph([node], "node", ins, outs)
        opset = kwargs.get("opset_version")
        imports = [helper.make_opsetid(node.domain, opset)] if opset else None
        return cls.run_model(helper.make_model(graph, opset_imports=imports), list(given.values()), device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":")[0] == "CPU"


prepare, run_model, run_node, supports_device = (
    FluidxBackend.prepare, FluidxBackend.run_model, FluidxBackend.run_node, FluidxBackend.supports_device,
)  # fmt: skip
is_compatible = FluidxBackend.is_compatible

__all__ = ["FluidxBackend", "FluidxRep", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]
