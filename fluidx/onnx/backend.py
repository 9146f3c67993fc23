"""The standard interface of ONNX backends: `prepare`, `run_model`, `run_node`, `supports_device`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import ModelProto, NodeProto, helper
from onnx.backend.base import Backend, BackendRep, Device, DeviceType, namedtupledict

from .errors import OnnxError
from .read import read
from .sessions import Session, host_value
from .values import type_proto


class FluidxRep(BackendRep):
    """A prepared model."""

    def __init__(self, session: Session):
        self.session = session
        self._outputs = namedtupledict("Outputs", session.outputs)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs as a named tuple, for inputs in order, by name, or for a single input. Raises OnnxError."""
        return self._outputs(*self.session.run(inputs if isinstance(inputs, (list, tuple, dict)) else [inputs]))


class FluidxBackend(Backend):
    """Runs models on the CPU."""

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether `prepare` takes the model."""
        try:
            cls.prepare(model, device, **kwargs)
        except OnnxError:
            return False
        return True

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> FluidxRep:
        """A prepared model for many runs. Raises OnnxError if the model cannot run or the device is not supported."""
        _check_device(device)
        return FluidxRep(Session(read(model)))

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """The outputs of a model for one run."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(cls, node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs of one node that have a name, for its inputs by name or in their order.

        The node is of opset `opset_version`, by default the newest. Raises OnnxError.
        """
        names = list(dict.fromkeys(n for n in node.input if n))
        given = {n: host_value(v) for n, v in _by_name(node, names, inputs).items() if v is not None}
        ins = [helper.make_value_info(n, type_proto(v)) for n, v in given.items()]
        outs = [helper.make_empty_tensor_value_info(n) for n in node.output if n]
        alone = NodeProto()
        alone.CopyFrom(node)
        alone.input[:] = [n if n in given else "" for n in node.input]
        opset = kwargs.get("opset_version")
        imports = [helper.make_opsetid(node.domain, opset)] if opset else kwargs.get("opset_imports")
        model = helper.make_model(helper.make_graph([alone], "node", ins, outs), opset_imports=imports)
        return cls.run_model(model, given, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on a device, such as "CPU" or "CUDA:1"."""
        try:
            return bool(Device(device).type == DeviceType.CPU)
        except (AttributeError, ValueError):  # not a device, or the machine has no device of that number
            return False


def _check_device(device: str) -> None:
    if not FluidxBackend.supports_device(device):
        raise OnnxError(f"device {device!r}: models run on the CPU, device='CPU'")


def _by_name(node: NodeProto, names: list[str], inputs: Any) -> Mapping[str, Any]:
    """The values fed to a node, by names of its inputs. A name that occurs twice is fed once, or as often as it occurs."""
    if isinstance(inputs, Mapping):
        return inputs
    fed = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    every = [n for n in node.input if n]
    fits = next((n for n in (names, every, list(node.input)) if len(n) == len(fed)), None)
    if fits is None:
        reads = ", ".join(names) or "nothing"
        raise OnnxError(f"node {node.name or node.op_type!r} ({node.op_type}) reads {reads}; {len(fed)} values are fed")
    return {n: v for n, v in zip(fits, fed) if n}


prepare, run_model, run_node, supports_device = (
    FluidxBackend.prepare, FluidxBackend.run_model, FluidxBackend.run_node, FluidxBackend.supports_device,
)  # fmt: skip
is_compatible = FluidxBackend.is_compatible

__all__ = ["FluidxBackend", "FluidxRep", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]
