"""Parts of serialized models: the large tensors inside a model file, and the model without them.

A model is a protobuf message, a sequence of fields. The scan reads only their heads; it skips the bytes of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of fields
GRAPH, INITIALIZER, RAW_DATA, _LOCATION = 7, 5, 9, 14  # numbers of fields in onnx.proto


class Skeleton(NamedTuple):
    """A serialized model without the bytes of large initializers. `ranges`: position of an initializer -> offset and number of bytes."""

    data: bytes
    ranges: dict[int, tuple[int, int]]


class _Odd(Exception):
    """The message is damaged, or written in a way that the scan does not know."""


class _Field(NamedTuple):
    number: int
    kind: int
    start: int  # of the head
    content: int  # the value's start
    stop: int


def skeleton(data: memoryview, least: int) -> Skeleton | None:
    """The model without the bytes of initializers of at least `least` bytes; None for a file that only protobuf itself can judge."""
    try:
        fields = list(_fields(data, 0, len(data)))
        graphs = [f for f in fields if f.number == GRAPH]
        if len(graphs) != 1 or graphs[0].kind != _BYTES:
            return None
        ranges: dict[int, tuple[int, int]] = {}
        inner, count = [], 0
        for f in _fields(data, graphs[0].content, graphs[0].stop):
            if f.number != INITIALIZER or f.kind != _BYTES:
                inner.append(bytes(data[f.start : f.stop]))
                continue
            raw = _raw_data(data, f) if f.stop - f.content >= least else None
            if raw is None or raw.stop - raw.content < least:
                inner.append(bytes(data[f.start : f.stop]))
            else:
                ranges[count] = raw.content, raw.stop - raw.content
                inner.append(field_bytes(INITIALIZER, bytes(data[f.content : raw.start]) + bytes(data[raw.stop : f.stop])))
            count += 1
    except _Odd:
        return None
    rest = b"".join(bytes(data[f.start : f.stop]) for f in fields if f.number != GRAPH)
    return Skeleton(rest + field_bytes(GRAPH, b"".join(inner)), ranges)


def _raw_data(data: memoryview, tensor: _Field) -> _Field | None:
    """The one raw_data field of a tensor; None if it is stored otherwise."""
    fields = list(_fields(data, tensor.content, tensor.stop))
    found = [f for f in fields if f.number == RAW_DATA]
    if len(found) != 1 or found[0].kind != _BYTES or any(f.number == _LOCATION for f in fields):
        return None
    return found[0]


def _fields(data: memoryview, at: int, stop: int) -> Iterator[_Field]:
    while at < stop:
        start = at
        tag, at = _varint(data, at, stop)
        kind, content = tag & 7, at
        if kind == _VARINT:
            at = _varint(data, at, stop)[1]
        elif kind == _BYTES:
            size, content = _varint(data, at, stop)
            at = content + size
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise _Odd
        if at > stop:
            raise _Odd
        yield _Field(tag >> 3, kind, start, content, at)


def _varint(data: memoryview, at: int, stop: int) -> tuple[int, int]:
    """A number and the position behind it."""
    value = shift = 0
    while at < stop and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise _Odd


def field_head(number: int, size: int) -> bytes:
    """The head of a field of `size` bytes.

    >>> field_head(7, 300).hex()
    '3aac02'
    """
    out = bytearray([number << 3 | _BYTES])
    while size > 127:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size])


def field_bytes(number: int, content: bytes) -> bytes:
    """A field of bytes: its head and its content."""
    return field_head(number, len(content)) + content


def copied(message: Any, but: str) -> Any:
    """A copy of a message without one of its fields, which is not copied even for a moment."""
    made = type(message)()
    for field, value in message.ListFields():
        if field.name == but:
            continue
        if isinstance(value, (str, bytes, int, float)):
            setattr(made, field.name, value)
        elif hasattr(value, "CopyFrom"):
            getattr(made, field.name).CopyFrom(value)
        else:
            getattr(made, field.name).extend(value)
    return made
