"""Arrays in files that are mapped into memory: a program can hold more values than the machine has memory.

Values are read where they are needed. Large copies read the file itself, so that they leave no pages of the mapping in memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

_BLOCK = 16 << 20  # bytes that one read takes


class MappedFile(mmap.mmap):
    """A file of which arrays are views, read only. It stays open as long as an array uses it; a file that replaces it has no effect.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as f:
    ...     _ = f.write(np.arange(6, dtype="int32").tobytes()); f.flush()
    ...     mapped = MappedFile.of(f.fileno())
    >>> mapped.array(8, (2, 2), np.dtype("int32")).tolist()
    [[2, 3], [4, 5]]
    """

    fd: int

    @classmethod
    def of(cls, fd: int) -> MappedFile:
        """Map an open file, of at least one byte. It may be closed afterwards."""
        self = cls(fd, 0, access=mmap.ACCESS_READ)
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd).atexit = False
        return self

    def array(self, offset: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """The array at an offset, as a view that cannot be written."""
        return np.frombuffer(self, dtype, prod(shape), offset).reshape(shape)

    def private(self) -> mmap.mmap:
        """Another mapping of the file, that can be written: a page is copied when it is first written, and the file never changes."""
        return mmap.mmap(self.fd, 0, access=mmap.ACCESS_COPY)


class MemoryFile:
    """A file without a name, in memory where the system can do that: arrays that are written to it one by one and then mapped. What reads
    them shares their pages.

    >>> stored = MemoryFile()
    >>> place = stored.add(np.arange(3.0))
    >>> stored.mapped().array(place, (3,), np.dtype("float64")).tolist()
    [0.0, 1.0, 2.0]
    """

    def __init__(self) -> None:
        make = getattr(os, "memfd_create", None)
        self._stream: Any = tempfile.TemporaryFile() if make is None else os.fdopen(make("fluidx"), "w+b")

    def add(self, array: np.ndarray) -> int:
        """Write an array. Returns its offset, at the begin of a page."""
        offset = -(-int(self._stream.tell()) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._stream.seek(offset)
        self._stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return offset

    def mapped(self) -> MappedFile:
        """The file with all arrays, at least one. It takes no more."""
        with self._stream as stream:
            stream.flush()
            return MappedFile.of(stream.fileno())


def owner(array: np.ndarray) -> Any:
    """The object that owns the memory of an array; None if NumPy does."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


class FileRange:
    """The place in a file of an array that is a view of a MappedFile."""

    def __init__(self, file: MappedFile, offset: int, array: np.ndarray):
        self.file, self.offset, self.array = file, offset, array

    @staticmethod
    def of(array: np.ndarray) -> FileRange | None:
        """The place of an array; None for arrays in memory, and for views with gaps."""
        base = owner(array)
        if not isinstance(base, MappedFile) or not array.flags.c_contiguous or not array.size:
            return None
        return FileRange(base, array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data, array)

    def blocks(self) -> Iterator[Any]:
        """The bytes in blocks, read from the file."""
        left, offset, buffer = self.array.nbytes, self.offset, np.empty(min(_BLOCK, self.array.nbytes), np.uint8)
        while left:
            block = buffer[: min(left, _BLOCK)]
            self._read(block, offset)
            yield block
            left, offset = left - block.size, offset + block.size

    def read_into(self, out: np.ndarray, start: int = 0) -> None:
        """Fill a contiguous array with the elements from number `start` on, in order; they are converted to its dtype.

        Raises OSError if the file has become shorter since it was mapped."""
        flat, width = out.reshape(-1), self.array.dtype.itemsize
        same, many = out.dtype == self.array.dtype, _BLOCK // width
        for k in range(0, flat.size, many):
            part = flat[k : k + many]
            block = part if same else np.empty(part.size, self.array.dtype)
            self._read(block.view(np.uint8), self.offset + (start + k) * width)
            if not same:
                part[...] = block

    def release(self) -> None:
        """Give back the memory of pages of the mapping that were read. They are read again where they are needed."""
        start = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (self.offset + self.array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def _read(self, out: np.ndarray, offset: int) -> None:
        view = out.data
        while view:
            got = os.preadv(self.file.fd, [view], offset)
            if not got:
                raise OSError(f"a file of weights ends at byte {offset}, expected {view.nbytes} more: it was shortened while it was in use")
            view, offset = view[got:], offset + got
