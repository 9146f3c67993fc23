"""What an ONNX model can get wrong."""

from __future__ import annotations

from ..ir.errors import ProgramError, install


class OnnxError(ProgramError):
    """A model cannot be read, or holds what fluidx does not know; the text names the node."""


def need_onnx() -> None:
    """Raise OnnxError where the package that reads and writes models is not installed."""
    from importlib.util import find_spec

    if find_spec("onnx") is None:
        raise OnnxError(f"ONNX models are read and written with the package onnx, which is not installed; {install('onnx')}")
