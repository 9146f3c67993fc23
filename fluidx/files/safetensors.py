"""Read and write safetensors files (https://github.com/huggingface/safetensors): a length, a JSON header, the bytes of the arrays.

The safetensors package cannot give bfloat16 to NumPy and writes in place; this reads every dtype fluidx has and replaces a file whole.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from ..ir import as_dtype, nearest, np_dtype
from .atomic import VERSION, CheckpointError, Write, check_version, write_atomically

_CODES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_DTYPES = {code: name for name, code in _CODES.items()}
_HEADER_LIMIT = 100_000_000  # the format's own bound
_MAX_AXES = 32
_NUMBER = re.compile("[0-9]{1,9}")
_SUMS = "crc32"  # the key of the metadata that holds the checksums, as JSON, by name


def save_arrays(path: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] = {}) -> None:
    """Write a file of named arrays, with strings as metadata."""
    write_atomically(path, arrays_in(path, arrays, metadata))


def arrays_in(path: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] = {}) -> Write:
    """A function that writes the content of a file of arrays. The metadata have a checksum of each array and of the other metadata.

    Raises CheckpointError, which names the path, for an array that the format cannot hold.
    """
    header: dict[str, Any] = {}
    metadata = {"format": "fluidx", "version": str(VERSION), **metadata}
    sums, offset = {"": _sum_of(metadata)}, 0
    for name in sorted(arrays):
        array = arrays[name]
        if name in ("", "__metadata__"):
            raise CheckpointError(f"a variable cannot be saved under the name {name!r}; the file format uses it")
        code = _CODES.get(as_dtype(array.dtype))
        if code is None:
            has = f"the format has {', '.join(_CODES)}"
            raise CheckpointError(f"cannot write {path}: variable {name!r} is {array.dtype}; {has}: cast it to one of them")
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        sums[name] = _sum(name, code, array)
        offset += array.nbytes
    header["__metadata__"] = metadata | {_SUMS: json.dumps(sums)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(f"cannot write {path}: its header has {len(text)} bytes, the format allows {_HEADER_LIMIT}")

    def write(stream: Any) -> None:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for name in sorted(arrays):
            stream.write(_bytes(arrays[name]))

    return write


def _bytes(array: np.ndarray) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""


def _sum(name: str, code: Any, array: np.ndarray) -> int:
    return zlib.crc32(_bytes(array), zlib.crc32(f"{name} {code} {list(array.shape)}".encode()))


def _sum_of(metadata: Mapping[str, str]) -> int:
    return zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())


_SUFFIX = ".safetensors"
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_FROM_TORCH = (
    "is PyTorch's format, a pickle, which may run anything when it is read, so fluidx does not read it\n"
    "  in PyTorch, write np.savez('w.npz', **{k: v.numpy() for k, v in model.state_dict().items()}), and here "
    "fx.io.set_program_state(program, {'fc_0.w_0': w['0.weight'].T, ...}) with w = np.load('w.npz'); or export the model to ONNX, "
    "torch.onnx.export, and read it with fx.onnx.load"
)


def _foreign(path: str) -> str:
    """A hint for a file of another known format; "" otherwise."""
    from zipfile import BadZipFile, ZipFile

    try:
        with open(path, "rb") as stream:
            head = stream.read(4)
        members = ZipFile(path).namelist() if head == b"PK\x03\x04" else []
    except (OSError, BadZipFile):
        return ""
    if head.startswith(_PICKLES) or any(name.endswith("data.pkl") for name in members):
        return f"{path} {_FROM_TORCH}"
    if members and all(name.endswith(".npy") for name in members):
        return f"{path} is NumPy's format; write fx.io.set_program_state(program, dict(np.load({path!r})))"
    return ""


class ArrayFile:
    """An open file of arrays: `names`, `metadata`, and `array(name)`, which reads one. The header is checked when it is opened.

    Raises CheckpointError if something is missing or damaged; it names the file, and the array if there is one.
    """

    def __init__(self, path: str):
        self.path = path
        try:
            self._stream = open(path, "rb")
        except OSError as e:
            if why := _foreign(path.removesuffix(_SUFFIX)):
                raise CheckpointError(why) from None
            raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
        try:
            self._read_header()
        except BaseException:
            self._stream.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._stream.fileno()).st_size
        length = int.from_bytes(self._stream.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT, size - 8):
            raise self._damaged(f"its header should have {length} bytes, the file has {size}" if size >= 8 else f"it has only {size} bytes")
        try:
            header = json.loads(self._stream.read(length).decode("utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as e:
            raise self._damaged(f"its header is not JSON ({str(e)[:80]})") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is not a table")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._damaged("its __metadata__ is not a table of strings")
        self._sums = self._checksums(metadata)
        self.metadata: dict[str, str] = metadata
        self._start = 8 + length
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        spans = []
        for name, entry in header.items():
            dtype, shape, begin, end = self._entry(name, entry)
            self._entries[name] = dtype, shape, begin
            spans.append((begin, end, name))
        at = 0
        for begin, end, name in sorted(spans):
            if begin != at:
                raise self._damaged(f"array {name!r} starts at byte {begin}, expected {at}")
            at = end
        if at != size - self._start:
            raise self._damaged(f"its arrays need {at} bytes, found {size - self._start}")
        if self._sums and self._sums.keys() != self._entries.keys():
            raise self._damaged("its checksums are of other arrays than it has")

    def _checksums(self, metadata: dict[str, str]) -> dict[str, int]:
        """Take the checksums of arrays out of the metadata; {} for a file that fluidx did not write."""
        if ours := metadata.get("format") == "fluidx":
            version = metadata.get("version")
            check_version(self.path, int(version) if version and _NUMBER.fullmatch(version) else version)
        if _SUMS not in metadata:
            if ours:
                raise self._damaged("it has no checksums, which fluidx writes")
            return {}
        try:
            sums = json.loads(metadata.pop(_SUMS))
            if sums.pop("") == _sum_of(metadata):
                return sums
        except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
            pass
        raise self._damaged("its metadata do not have the checksum that was written with them")

    def _entry(self, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
        try:
            code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"the entry of array {name!r} is incomplete") from None
        if not isinstance(code, str) or code not in _DTYPES:
            raise self._damaged(f"array {name!r} has dtype {code!r}; {nearest(str(code), _DTYPES, 'fluidx reads')}")
        numbers = [*shape, begin, end] if isinstance(shape, list) and len(shape) <= _MAX_AXES else [None]
        if not all(type(n) is int and 0 <= n < 2**62 for n in numbers) or prod(max(n, 1) for n in shape) >= 2**58:
            raise self._damaged(f"the shape or offsets of array {name!r} are not a list of sizes")
        dtype = _DTYPES[code]
        if end - begin != prod(shape) * np_dtype(dtype).itemsize:
            need = prod(shape) * np_dtype(dtype).itemsize
            raise self._damaged(f"array {name!r} of {dtype}{shape} needs {need} bytes, its entry gives {end - begin}")
        return dtype, tuple(shape), begin, end

    def _damaged(self, why: str) -> CheckpointError:
        if foreign := _foreign(self.path):
            return CheckpointError(foreign)
        return CheckpointError(f"{self.path} is not a complete safetensors file: {why}")

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def type_of(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape) of an array."""
        if name not in self._entries:
            raise CheckpointError(f"{self.path} holds no variable {name!r}; {nearest(name, self._entries, 'it holds')}")
        return self._entries[name][:2]

    def array(self, name: str) -> np.ndarray:
        """The array of that name, read from the file."""
        dtype, shape = self.type_of(name)
        array = np.empty(shape, np_dtype(dtype))
        self._stream.seek(self._start + self._entries[name][2])
        if array.size and self._stream.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
            raise self._damaged(f"it ends within array {name!r}")  # it was truncated after it was opened
        if dtype == "bool" and array.size and (array.view(np.uint8) > 1).any():
            raise self._damaged(f"array {name!r} is bool and holds a byte that is neither 0 nor 1")
        if self._sums and self._sums[name] != _sum(name, _CODES[dtype], array):
            raise self._damaged(f"array {name!r} does not have the checksum that was written with it; bytes of it were changed")
        return array

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out
