"""External tensors of a model: read only from files in the model's folder, and only with the size that shape and type need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..executor.plan.allocation import copied, zeros
from ..ir.errors import ProgramError
from ..ir.mapped_file import FileRange
from . import limits
from .errors import OnnxError
from .mapped_tensors import hold_tensor, map_tensor
from .values import numpy_dtype


def external_tensors(model: Any) -> list[Any]:
    """The external tensors of a model."""
    from onnx import TensorProto, external_data_helper

    tensors = [*external_data_helper._get_all_tensors(model), *(t for g in _training_graphs(model) for t in g.initializer)]
    return [t for t in tensors if t.data_location == TensorProto.EXTERNAL]


def _training_graphs(model: Any) -> list[Any]:
    return [graph for info in model.training_info for graph in (info.initialization, info.algorithm)]


def load_external_tensors(model: Any, path: Path, mapped: bool = False) -> None:
    """Load the external tensors of a model. If the model file is a link, the folder of its target is allowed too.

    If there are `limits.MAPPED` bytes of them, or if `mapped`, large initializers stay in their file (mapped_tensors.py). Raises OnnxError
    before anything is read if a file is outside of the folder or too short, if the size differs from that of shape and type, or if the
    machine has too little memory for tensors that are read.
    """
    from onnx import TensorProto

    tensors = external_tensors(model)
    parts = [_location(t, path) for t in tensors]
    stays = set[int]()
    if mapped or sum(size for _, _, size in parts) >= limits.MAPPED:
        large = {id(t) for graph in (model.graph, *_training_graphs(model)) for t in graph.initializer}
        stays = {k for k, (t, (_, _, size)) in enumerate(zip(tensors, parts, strict=True)) if id(t) in large and can_be_mapped(t, size)}
    total = sum(size for k, (_, _, size) in enumerate(parts) if k not in stays)
    if total > limits.MEMORY:
        raise OnnxError(f"the external tensors of {path} have {total} bytes, and this machine has {limits.MEMORY}")
    for k, (tensor, (file, start, size)) in enumerate(zip(tensors, parts, strict=True)):
        if k in stays:
            map_tensor(tensor, file, start, size)
            continue
        try:
            with file.open("rb") as f:
                f.seek(start)
                tensor.raw_data = f.read(size)
        except OSError as e:
            raise OnnxError(f"tensor {tensor.name!r} is stored in {file}, which cannot be read: {e.strerror}") from None
        if len(tensor.raw_data) != size:
            raise OnnxError(f"tensor {tensor.name!r} is stored in {file}, which became shorter while it was read")
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def map_inner_tensors(model: Any, path: Path, ranges: Mapping[int, tuple[int, int]]) -> None:
    """Let initializers of a model be ranges of its own file. Raises OnnxError if a size differs from that of shape and type."""
    for k, (offset, size) in ranges.items():
        tensor = model.graph.initializer[k]
        if size != (needs := _bytes(tensor)):
            shape = f"{list(tensor.dims)} of {_dtype(tensor)}"
            raise OnnxError(f"tensor {tensor.name!r} has {size} bytes in {path}, but its shape {shape} needs {needs}")
        map_tensor(tensor, path.resolve(), offset, size)


def hold_inner_tensors(model: Any, data: bytes | memoryview, ranges: Mapping[int, tuple[int, int]]) -> list[np.ndarray]:
    """Let initializers of a model be arrays with these ranges of its bytes, or of its mapped file, and give the arrays. One that is no such
    array has its bytes back."""
    held = []
    for k, (offset, size) in ranges.items():
        tensor = model.graph.initializer[k]
        try:
            dtype = numpy_dtype(tensor.data_type)
            view = np.frombuffer(data[offset : offset + size], dtype).reshape(tuple(tensor.dims))
        except (OnnxError, TypeError, ValueError):
            tensor.raw_data = bytes(data[offset : offset + size])
            continue
        place = FileRange.of(view)
        array = copied(view) if place is None else zeros(view.shape, dtype)
        if place is not None:
            place.read_into(array)
        array.setflags(write=False)
        if array.base is not None:
            array.base.setflags(write=False)
        hold_tensor(tensor, array)
        held.append(array)
    return held


def can_be_mapped(tensor: Any, size: int) -> bool:
    """Is a tensor large, with an array that is its bytes?"""
    return size >= limits.MAPPED_TENSOR and size == prod(tensor.dims) * numpy_dtype(tensor.data_type).itemsize


def _location(tensor: Any, path: Path) -> tuple[Path, int, int]:
    """The file of an external tensor, its offset, and its number of bytes."""
    place = {e.key: e.value for e in tensor.external_data}
    where = place.get("location", "")
    who = f"tensor {tensor.name!r} is stored in {where!r:.200}"
    if not where:
        raise OnnxError(f"tensor {tensor.name!r} is stored in another file, but its external_data names none; export the model again")
    file = _file(who, where, path)
    has, needs = file.stat().st_size, _bytes(tensor)
    start, count = _number(who, "offset", place.get("offset", "0")), _number(who, "length", place.get("length", str(needs)))
    if count != needs:
        raise OnnxError(f"{who} with a length of {count} bytes, but its shape {list(tensor.dims)} of {_dtype(tensor)} needs {needs}")
    if start + count > has:
        raise OnnxError(f"{who}, bytes {start} to {start + count}; the file has {has}: it is incomplete, or belongs to another model")
    return file, start, count


def _file(who: str, where: str, path: Path) -> Path:
    if "\0" in where:
        raise OnnxError(f"{who}, but a file name cannot contain NUL")
    inside = {path.parent.resolve(), path.resolve().parent}
    try:
        file = (path.parent / where).resolve()
        if not any(file.is_relative_to(folder) for folder in inside):
            raise OnnxError(f"{who}, outside of the model's folder; move it beside the model")
        if file.is_file():
            return file
    except OSError as e:  # the name is too long, or the folder may not be read
        raise OnnxError(f"{who}, but there is no such file: {e.strerror}") from None
    except RuntimeError:
        raise OnnxError(f"{who}, which is a link to itself") from None
    raise OnnxError(f"{who}, but there is no such file beside the model; copy it from where the model was written")


def _number(who: str, what: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise OnnxError(f"{who} at the {what} {text!r:.40}, which is not a number of bytes")
    return int(text)


def _bytes(tensor: Any) -> int:
    """The number of bytes of a tensor. Raises OnnxError for a shape that does not fit in memory, and for strings."""
    try:
        dtype = numpy_dtype(tensor.data_type)
        limits.checked_shape(tensor.dims, 1)
    except ProgramError as e:
        raise OnnxError(f"tensor {tensor.name!r}: {e}") from None
    if dtype.kind == "O":
        raise OnnxError(f"tensor {tensor.name!r} has strings, which a model cannot store in another file")
    short = re.fullmatch(r"(?:u?int|float)([24])(?:_.*)?", dtype.name)  # several numbers in a byte
    return -(-prod(tensor.dims) * int(short[1]) // 8) if short else prod(tensor.dims) * dtype.itemsize


def _dtype(tensor: Any) -> str:
    return numpy_dtype(tensor.data_type).name
