"""Tensors of a model whose bytes are elsewhere: in a file, of which their array is a view, or in an array that a session holds."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..ir.mapped_file import MappedFile
from .errors import OnnxError

_MARK = secrets.token_hex(16)  # only this process can have written it: a model that was read from elsewhere cannot name files

_HELD = "held "
_held: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()  # arrays by number, while somebody has them
_open: WeakValueDictionary[tuple[str, str], MappedFile] = WeakValueDictionary()  # by path and state of the file, while an array uses it


def map_tensor(tensor: Any, file: Path, offset: int, size: int) -> None:
    """Let a tensor be the bytes of a file that was checked before."""
    from onnx import TensorProto

    state = _state(file)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    said = {"location": file.name, "basepath": str(file.parent), "offset": offset, "length": size, "checksum": f"{_MARK} {state}"}
    for key, value in said.items():
        tensor.external_data.add(key=key, value=str(value))


def hold_tensor(tensor: Any, array: np.ndarray) -> None:
    """Let a tensor be an array, for as long as somebody has the array."""
    from onnx import TensorProto

    number = f"{_HELD}{secrets.token_hex(16)}"
    _held[number] = array
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in {"location": "memory", "checksum": f"{_MARK} {number}"}.items():
        tensor.external_data.add(key=key, value=value)


def is_mapped(tensor: Any) -> bool:
    """Did `map_tensor` or `hold_tensor` write the place of an external tensor?"""
    return any(e.key == "checksum" and e.value.startswith(_MARK) for e in tensor.external_data)


def mapped_array(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """The array of a mapped tensor. Raises OnnxError if its file was replaced or changed since the model was read."""
    place = {e.key: e.value for e in tensor.external_data}
    state = place["checksum"].partition(" ")[2]
    if state.startswith(_HELD):
        return _held[state]
    path = os.path.join(place["basepath"], place["location"])
    file = _open.get((path, state))
    if file is None:
        try:
            with open(path, "rb") as stream:
                found = _state(stream.fileno())
                if found != state:
                    said = "which was changed since the model was read; load it again"
                    raise OnnxError(f"tensor {tensor.name!r} is stored in {path}, {said}")
                file = _open[path, state] = MappedFile.of(stream.fileno())
        except OSError as e:
            raise OnnxError(f"tensor {tensor.name!r} is stored in {path}, which cannot be read: {e.strerror}") from None
    return file.array(int(place["offset"]), tuple(tensor.dims), dtype)


def _state(file: Path | int) -> str:
    """What differs between two files, or two states of a file, at one path."""
    s = os.stat(file)
    return f"{s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns}"
