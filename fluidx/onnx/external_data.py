"""Tensors that lie in files beside a model: read where they are in its folder and of the size that their shape and type need."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

from ..ir.errors import ProgramError
from . import limits
from .errors import OnnxError
from .values import numpy_dtype


def outside(model: Any) -> list[Any]:
    """The tensors of a model that lie in other files."""
    from onnx import TensorProto, external_data_helper

    return [t for t in external_data_helper._get_all_tensors(model) if t.data_location == TensorProto.EXTERNAL]


def load_outside(model: Any, path: Path) -> None:
    """Load the tensors that lie in files beside the model; of a model that is a link, also beside what it links to.

    Raises OnnxError, before anything is read, for a place outside of the folder, for one that the file does not have, and for sizes that
    are not those of the tensor's shape and type or beyond the memory of the machine.
    """
    from onnx import TensorProto

    tensors = outside(model)
    parts = [_part(t, path) for t in tensors]
    total = sum(size for _, _, size in parts)
    if total > limits.MEMORY:
        raise OnnxError(f"the tensors beside {path} come to {total} bytes, and this machine has {limits.MEMORY}")
    for tensor, (file, start, size) in zip(tensors, parts, strict=True):
        try:
            with file.open("rb") as f:
                f.seek(start)
                tensor.raw_data = f.read(size)
        except OSError as e:
            raise OnnxError(f"tensor {tensor.name!r} lies in {file}, which cannot be read: {e.strerror}") from None
        if len(tensor.raw_data) != size:
            raise OnnxError(f"tensor {tensor.name!r} lies in {file}, which became shorter while it was read")
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _part(tensor: Any, path: Path) -> tuple[Path, int, int]:
    """The file that a tensor lies in, where, and how many bytes it has."""
    place = {e.key: e.value for e in tensor.external_data}
    where = place.get("location", "")
    who = f"tensor {tensor.name!r} lies in {where!r:.200}"
    if not where:
        raise OnnxError(f"tensor {tensor.name!r} lies in another file, and its external_data names none; export the model again")
    file = _file(who, where, path)
    has, needs = file.stat().st_size, _bytes(tensor)
    start, count = _number(who, "offset", place.get("offset", "0")), _number(who, "length", place.get("length", str(needs)))
    if count != needs:
        raise OnnxError(f"{who} with a length of {count} bytes, and its shape {list(tensor.dims)} of {_dtype(tensor)} needs {needs}")
    if start + count > has:
        raise OnnxError(f"{who}, bytes {start} to {start + count}; the file has {has}: it is not whole, or of another model")
    return file, start, count


def _file(who: str, where: str, path: Path) -> Path:
    if "\0" in where:
        raise OnnxError(f"{who}, and no file has a NUL in its name")
    inside = {path.parent.resolve(), path.resolve().parent}
    try:
        file = (path.parent / where).resolve()
        if not any(file.is_relative_to(folder) for folder in inside):
            raise OnnxError(f"{who}, outside of the model's folder; move it beside the model")
        if file.is_file():
            return file
    except OSError as e:  # a name that is too long, a folder that may not be read
        raise OnnxError(f"{who}, and there is no such file: {e.strerror}") from None
    except RuntimeError:
        raise OnnxError(f"{who}, which is a link that leads to itself") from None
    raise OnnxError(f"{who}, and there is no such file beside the model; copy it from where the model was written")


def _number(who: str, what: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise OnnxError(f"{who} at the {what} {text!r:.40}, which is no number of bytes")
    return int(text)


def _bytes(tensor: Any) -> int:
    """The bytes of a tensor of that shape and type. Raises OnnxError for a shape that no memory holds, and for a type without bytes."""
    try:
        dtype = numpy_dtype(tensor.data_type)
        limits.room(tensor.dims, 1)
    except ProgramError as e:
        raise OnnxError(f"tensor {tensor.name!r}: {e}") from None
    if dtype.kind == "O":
        raise OnnxError(f"tensor {tensor.name!r} is of strings, which a model holds itself and not in another file")
    short = re.fullmatch(r"(?:u?int|float)([24])(?:_.*)?", dtype.name)  # several numbers to a byte
    return -(-prod(tensor.dims) * int(short[1]) // 8) if short else prod(tensor.dims) * dtype.itemsize


def _dtype(tensor: Any) -> str:
    return numpy_dtype(tensor.data_type).name
