"""Values of parameters in a model that is written: large ones are written to the file one by one, and never held together.

A graph first gets placeholders, tensors without data. `save` streams their values into the model's file, or into a second file beside it;
`to_onnx` fills them in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, BinaryIO

import numpy as np

from ..files.atomic import write_atomically, write_in_order
from . import limits
from .errors import OnnxError
from .external_data import external_tensors
from .file_parts import GRAPH, INITIALIZER, RAW_DATA, copied, field_bytes, field_head
from .values import array_of, numpy_dtype

ValueOf = Callable[[str], np.ndarray]

_LEAST = 1024  # bytes of a value that is stored outside of the model's own file, as in onnx.save_model
_LIMIT = limits.PROTOBUF - (1 << 20)
_PAGE, _LINE = 4096, 64  # offsets of large and of small values in a file: readers map pages


def placeholder(name: str, code: int, shape: tuple[int, ...]) -> Any:
    """A tensor whose data follow later; None for one that is too small for that."""
    from onnx import TensorProto

    if code == TensorProto.STRING or prod(shape) * numpy_dtype(code).itemsize < _LEAST:
        return None
    return TensorProto(name=name, data_type=code, dims=shape, data_location=TensorProto.EXTERNAL)


def fill(tensor: Any, value: np.ndarray) -> None:
    """Give a placeholder its data."""
    tensor.ClearField("data_location")
    del tensor.external_data[:]
    tensor.raw_data = checked(tensor, value).tobytes()


def checked(tensor: Any, value: np.ndarray) -> np.ndarray:
    """The value, contiguous. Raises OnnxError if it is not of the declared type."""
    wanted = numpy_dtype(tensor.data_type), tuple(tensor.dims)
    if (value.dtype, value.shape) != wanted:
        said = f"{wanted[0]}{list(wanted[1])}, its value is {value.dtype}{list(value.shape)}"
        raise OnnxError(f"cannot save {tensor.name!r}: it is declared {said}")
    return np.asarray(value, order="C")


def size_of(tensor: Any) -> int:
    """The bytes of a placeholder's data."""
    return prod(tensor.dims) * numpy_dtype(tensor.data_type).itemsize


class ModelFile:
    """A model with placeholders, to be written to `path`. `external`: the name of a second file for their values, "" for none."""

    def __init__(self, model: Any, path: Any, external_data: bool | str):
        self.model, self.path = model, os.fspath(path)
        self.values = external_tensors(model)
        for t in self.values:
            del t.external_data[:]
        self.external = self._beside(external_data)
        if self.external:
            offset = 0
            for t in self.values:
                offset = _aligned(offset, size_of(t))
                for key, said in (("location", self.external), ("offset", str(offset)), ("length", str(size_of(t)))):
                    t.external_data.add(key=key, value=said)
                offset += size_of(t)

    def _beside(self, external_data: bool | str) -> str:
        name = f"{os.path.basename(self.path)}.data"
        size = self.model.ByteSize() + sum(size_of(t) + 32 for t in self.values)
        if external_data == "auto":
            return name if size > _LIMIT else ""
        if external_data is False and size > _LIMIT:
            way = "external_data=True puts weights into a file beside it"
            raise OnnxError(f"the model has {size} bytes, but protobuf writes at most {_LIMIT}; {way}")
        if isinstance(external_data, bool):
            return name if external_data else ""
        if not isinstance(external_data, str) or os.path.basename(external_data) != external_data or external_data in ("", ".", ".."):
            raise OnnxError(f'external_data is True, False, "auto" or the name of a file beside the model, got {external_data!r}')
        if external_data == os.path.basename(self.path):
            raise OnnxError(f"external_data: {external_data!r} is the model's own file; give another name")
        return external_data

    def write(self, value_of: ValueOf, writes: bool) -> None:
        """Write the files, if this process `writes`. Every process reads every value in the same order, also after an error of writing:
        values are joined from all ranks."""
        streamed = self.values
        if not self.external:
            streamed = [t for t in self._initializers() if _is_open(t)]
            for t in self.values[len(streamed) :]:  # of the training step, behind those of the graph
                fill(t, value_of(t.name))
        left = (checked(t, value_of(t.name)) for t in streamed)
        try:
            if writes and self.external:
                self._write_both(left)
            elif writes:
                write_atomically(self.path, lambda stream: self._write_one(stream, left))
        finally:
            for _ in left:
                pass

    def _initializers(self) -> list[Any]:
        return list(self.model.graph.initializer)

    def _write_both(self, values: Iterator[np.ndarray]) -> None:
        """Write the values and the model; both are complete before either replaces an older file."""
        text = self.model.SerializeToString()

        def write(data: BinaryIO) -> None:
            for t in self.values:
                data.write(bytes(_aligned(data.tell(), size_of(t)) - data.tell()))
                _write_array(data, next(values))

        beside = os.path.join(os.path.dirname(self.path), self.external)
        write_in_order({beside: write, self.path: lambda stream: stream.write(text)})

    def _write_one(self, stream: BinaryIO, values: Iterator[np.ndarray]) -> None:
        """Write the message field by field; protobuf would need the whole of it in memory."""
        own, heads = copied(self.model.graph, but="initializer").SerializeToString(), [_Head(t) for t in self._initializers()]
        stream.write(copied(self.model, but="graph").SerializeToString())
        stream.write(field_head(GRAPH, len(own) + sum(h.size for h in heads)))
        stream.write(own)
        for h in heads:
            stream.write(h.data)
            if h.is_open:
                _write_array(stream, next(values))


def write_model(model: Any, path: Any) -> None:
    """Write a model, of which large tensors may be in the files that it was read from."""
    arrays = {t.name: array_of(t) for t in external_tensors(model)}
    ModelFile(model, path, "auto").write(arrays.__getitem__, writes=True)


class _Head:
    """The bytes of an initializer, or those before its data if these follow. `size` is that of the whole."""

    def __init__(self, tensor: Any):
        self.is_open = _is_open(tensor)
        if not self.is_open:
            self.data = field_bytes(INITIALIZER, tensor.SerializeToString())
            self.size = len(self.data)
            return
        begin = type(tensor)(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims).SerializeToString()
        begin += field_head(RAW_DATA, size_of(tensor))
        head = field_head(INITIALIZER, len(begin) + size_of(tensor))
        self.data, self.size = head + begin, len(head) + len(begin) + size_of(tensor)


def _is_open(tensor: Any) -> bool:
    return bool(tensor.data_location == tensor.EXTERNAL)


def _write_array(stream: BinaryIO, value: np.ndarray) -> None:
    stream.write(value.reshape(-1).view(np.uint8).data)


def _aligned(offset: int, size: int) -> int:
    """The next offset for a value of `size` bytes."""
    line = _PAGE if size >= limits.MAPPED_TENSOR else _LINE
    return -(-offset // line) * line
