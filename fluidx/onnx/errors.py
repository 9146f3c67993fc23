"""The error class of ONNX models."""

from __future__ import annotations

from ..ir.errors import ProgramError, install


class OnnxError(ProgramError):
    """A model cannot be read or exported, or has something that fluidx does not support. The text names the node."""


def need_onnx() -> None:
    """Raise OnnxError if the package onnx is not installed."""
    from importlib.util import find_spec

    if find_spec("onnx") is None:
        raise OnnxError(f"ONNX models need the package onnx, which is not installed; {install('onnx')}")
