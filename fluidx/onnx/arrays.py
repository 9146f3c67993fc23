"""NumPy files that commands read and write. Files are not trusted, and pickles are not run: arrays of arrays are read without that."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..files.atomic import write_atomically
from .errors import OnnxError
from .object_arrays import read_object_array


def read_array(path: Path, objects: bool = False) -> np.ndarray:
    """The array that np.save wrote to a file; with `objects`, also one of arrays. Raises OnnxError."""
    found = _read(path, "not an array written by np.save", objects)
    if not isinstance(found, np.ndarray):
        raise OnnxError(f"{path} is not an array written by np.save: it holds several, {', '.join(found) or 'none'}; save only one")
    return found


def read_arrays(path: Path, objects: bool = False) -> dict[str, np.ndarray]:
    """The arrays, by name, that np.savez wrote to a file; with `objects`, also those of arrays. Raises OnnxError."""
    found = _read(path, "not a file of arrays written by np.savez", objects)
    if isinstance(found, np.ndarray):
        way = "np.savez(path, NAME=array, ...) writes arrays with their names"
        raise OnnxError(f"{path} is not a file of arrays written by np.savez: it holds one array without a name; {way}")
    return found


def _read(path: Path, else_what: str, objects: bool) -> Any:
    try:
        with path.open("rb") as stream:
            begins = stream.read(6)
            if begins != b"\x93NUMPY" and begins[:2] != b"PK":
                is_text = begins.isascii() and begins.strip()
                way = "; np.save(path, np.loadtxt(...)) makes an array of text" if is_text else ""
                raise ValueError(f"it does not begin like a NumPy file{way}")
            stream.seek(0)
            if begins[:2] != b"PK":
                return _read_one(partial(np.load, stream, allow_pickle=False), partial(nullcontext, stream), objects)
            all_ = np.load(stream, allow_pickle=False)
            return {n: _read_one(partial(all_.get, n), partial(all_.zip.open, f"{n}.npy"), objects) for n in all_.files}
    except Exception as e:  # the file is not trusted, and NumPy raises errors of many types
        if isinstance(e, OSError) and e.strerror:
            raise OnnxError(f"cannot read {path}: {e.strerror}") from None
        raise OnnxError(f"{path} is {else_what}: {e}") from None


def _read_one(load: Callable[[], np.ndarray], opened: Callable[[], Any], objects: bool) -> np.ndarray:
    """An array by `load`, or one of objects from the stream that `opened` gives."""
    try:
        return load()
    except ValueError as e:
        if not objects or "allow_pickle" not in str(e):
            raise
    with opened() as stream:
        stream.seek(0)
        return read_object_array(stream)


def file_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which a file stores arrays of this dtype: a wider one for dtypes of ml_dtypes, which np.load does not know."""
    if dtype.kind != "V":
        return dtype
    return np.dtype({"int": np.int8, "uint": np.uint8}.get(dtype.name.rstrip("0123456789"), np.float32))


def write_arrays(path: Path, values: Mapping[str, Any]) -> None:
    """Write values as np.savez does. Raises OnnxError for a value that is not supported, before anything is written.

    Element k of a sequence is `name.k`, the entry of a map is `name.key`, an absent value is left out, and a dtype that NumPy lacks becomes
    the next wider one.
    """
    arrays = dict(part for name, value in values.items() for part in _flattened(name, value))

    def write(stream: Any) -> None:
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    write_atomically(str(path), write)


def _flattened(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, (list, dict)):
        for k, element in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flattened(f"{name}.{k}", element)
        return
    if value is None:
        return
    if isinstance(value, (bool, int, float, str, np.generic)):
        value = np.asarray(value, object if isinstance(value, str) else None)
    if not isinstance(value, np.ndarray):
        raise OnnxError(f"output {name!r} is a {type(value).__name__}, which .npz files cannot hold; fx.onnx.session(path).run returns it")
    yield name, value.astype(str if value.dtype.kind == "O" else file_dtype(value.dtype), copy=False)
