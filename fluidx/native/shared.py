"""Shared memory of ranks that are processes, with their world in it.

All processes map it at the same address, so an address in it is valid in each of them: a rank accesses the other ranks' arrays in place.
The world is at the front; behind it each rank has its own part, from which it allocates arrays. The memory has no name in a file system. It
is freed when the last process that maps it has ended, in any way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from . import NativeCall, _module, address
from .world import SPIN_US, NativeWorld, log

MOST_RANKS = 256  # of a world, as meet.h has it

_WORLD_BYTES = 256 << 20  # for the world, its meetings and mailboxes; memory is taken where it is touched
_WORLD = b"fluidx._native.world"  # the name of a world's capsule, as worlds.c has it
_FIRST, _STEP, _TRIES = 1 << 44, 1 << 40, 64  # where there is room in an address space of 47 bits, far from what systems put there
_MOST_KNOWN = 1024
_MOST = 32 << 40  # bytes for all ranks' parts
_MAP_FIXED_NOREPLACE, _MAP_NORESERVE = 0x100000, 0x4000


def why_not() -> str:
    """The reason why processes cannot share memory here; "" if they can."""
    if sys.platform == "linux" and sys.maxsize > 1 << 32:
        return ""
    return f"processes share memory on Linux with addresses of 64 bits only, this is {sys.platform}"


class Memory:
    """Shared memory for a number of ranks. It is mapped into this process as long as it is used."""

    def __init__(self, fd: int, start: int, ranks: int):
        """Map the file `fd` at the address `start`. Raises OSError if the addresses are not free."""
        self.fd, self.start, self.ranks = fd, start, ranks
        self.size = _size(ranks)
        _map(fd, start, self.size)
        self.unmap = weakref.finalize(self, _unmap, start, self.size)
        self.unmap.atexit = False

    @staticmethod
    def make(ranks: int) -> Memory:
        """Allocate new memory, all zero. Raises OSError, also for more ranks than a world can have."""
        if ranks > MOST_RANKS:
            raise OSError(f"at most {MOST_RANKS} ranks share memory")
        fd = os.memfd_create("fluidx")
        try:
            os.ftruncate(fd, _size(ranks))
            for k in range(_TRIES):
                try:
                    return Memory(fd, _FIRST + k * max(_STEP, -(-_size(ranks) // _STEP) * _STEP), ranks)
                except FileExistsError:  # the memory of another executor is there
                    continue
            raise OSError(f"no room for {_size(ranks)} bytes in the address space")
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the file, so that no other process can map it. Existing mappings stay."""
        os.close(self.fd)

    def part(self, rank: int) -> tuple[int, int]:
        """Address and size of the part from which a rank allocates its arrays."""
        return self.start + _WORLD_BYTES + rank * _part(self.ranks), _part(self.ranks)

    def holds(self, a: np.ndarray) -> bool:
        """Is an array in this memory?"""
        return not a.size or self.start <= address(a) < self.start + self.size

    def array(self, at: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """The contiguous array at an address."""
        nbytes = prod(shape) * dtype.itemsize
        if not self.start <= at <= at + nbytes <= self.start + self.size:
            raise ValueError(f"{nbytes} bytes at {at:#x} are outside of the memory that ranks share")
        raw: Any = (ctypes.c_char * nbytes).from_address(at)
        raw.memory = self  # mapped as long as there are views
        return np.frombuffer(raw, dtype, prod(shape)).reshape(tuple(shape))

    def world(self, timeout: float) -> NativeWorld:
        """Make the world. The process that allocated the memory calls it before any rank joins."""
        return NativeWorld(_module().world(self.ranks, timeout, SPIN_US * 1000, self.start, _WORLD_BYTES))

    def look(self, rank: int) -> NativeWorld:
        """The world for a process that is not a rank and only reads."""
        return NativeWorld(_module().join(self.start, *self.part(rank)))

    def join(self, rank: int, stall: float) -> SharedWorld:
        """The world for the process of a rank."""
        capsule = _module().join(self.start, *self.part(rank))
        _module().watch(capsule, rank, stall, log.warning)
        return SharedWorld(capsule)


def make_world_in(memory: np.ndarray, ranks: int, timeout: float) -> int:
    """Make a further world in zero bytes of shared memory; its address, for `world_at`."""
    _module().world(ranks, timeout, SPIN_US * 1000, address(memory), memory.nbytes)
    return address(memory)


def world_at(at: int, ranks: Sequence[int], stall: float) -> SharedWorld:
    """A further world in the shared memory, for this process's `ranks` in it. Arrays stay in the memory of the world that was joined."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule, tell = make(at, _WORLD, None), log.warning
    for rank in ranks:
        _module().watch(capsule, rank, stall, tell)
    return SharedWorld(capsule)


class SharedWorld(NativeWorld):
    """The world in the process of a rank. Other processes read this rank's calls, so their words are in shared memory."""

    def __init__(self, capsule: Any):
        super().__init__(capsule)
        self._known: dict[bytes, list[list[np.ndarray]]] = {}

    def _call(self, words: Sequence[int], texts: list[np.ndarray]) -> NativeCall:
        there = take(8 * (1 + len(words))).view(np.int64)
        there[0], there[1:] = len(words), words
        texts.append(there)
        return NativeCall("meet_at", (address(there[1:]),))

    def _lasting(self, data: np.ndarray) -> np.ndarray:
        there = take(data.size)
        there[:] = data
        return there

    def brought(self, ranks: tuple[int, ...]) -> list[list[list[np.ndarray]]]:
        """For each member of a group, its input and output arrays in the latest collective call. Valid until the next one."""
        return [self._arrays_at(at) for at in self._module.brought(self.meeting(ranks))]

    def _arrays_at(self, at: int) -> list[list[np.ndarray]]:
        """The arrays that the words of a call describe, cached by the words."""
        words = ctypes.string_at(at, 8 * ctypes.c_int64.from_address(at - 8).value)
        if words not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[words] = _brought(at)
        return self._known[words]


def take(nbytes: int) -> np.ndarray:
    """`nbytes` zero bytes from this rank's part of the shared memory. MemoryError if there are no more."""
    at = _module().take(max(nbytes, 1))
    raw: Any = (ctypes.c_char * max(nbytes, 1)).from_address(at)
    weakref.finalize(raw, _module().give, at).atexit = False
    found = np.frombuffer(raw, np.uint8, nbytes)
    if nbytes < _LARGE:
        found[:] = 0
    return found


# blocks of this size are zero when they are allocated: twice heap.c's limit, because a block may be up to 1.5 times as large as requested
_LARGE = 2 << 20

# the numbers in meet.h
_GIVES, _TAKES, _ARRAYS = 12, 13, 14
_AT, _TEXT, _AXES, _SIZES = range(4)


def _brought(at: int) -> list[list[np.ndarray]]:
    words = ctypes.cast(at, ctypes.POINTER(ctypes.c_int64))
    gives, takes = (abs(words[k]) for k in (_GIVES, _TAKES))
    arrays = [_array(words, words[_ARRAYS + k]) for k in range(gives + takes)]
    return [arrays[:gives], arrays[gives:]]


def _array(words: Any, k: int) -> np.ndarray:
    axes = words[k + _AXES]
    shape, strides = (tuple(words[k + _SIZES + j * axes : k + _SIZES + (j + 1) * axes]) for j in (0, 1))
    dtype = _dtype(ctypes.string_at(words[k + _TEXT]).decode().partition("[")[0])
    # a view's memory begins at its first element: no operand of a communicator has a negative stride
    nbytes = dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if prod(shape) else 0
    raw: Any = (ctypes.c_char * nbytes).from_address(words[k + _AT])
    return np.ndarray(shape, dtype, raw, 0, strides)


@cache
def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def _part(ranks: int) -> int:
    """Address space for a rank: four times the machine's memory, because blocks are larger than requested and freed blocks wait for
    reuse."""
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return min(4 * memory, _MOST // ranks) // (1 << 20) * (1 << 20)


def _size(ranks: int) -> int:
    return _WORLD_BYTES + ranks * _part(ranks)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(fd: int, start: int, size: int) -> None:
    flags = mmap.MAP_SHARED | _MAP_FIXED_NOREPLACE | _MAP_NORESERVE
    found = _libc().mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found == start:
        return
    if found in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))  # FileExistsError if the addresses are in use
    _unmap(found, size)  # a kernel that does not know the flag
    raise FileExistsError(f"there is something at {start:#x}")


def _unmap(start: int, size: int) -> None:
    _libc().munmap(start, size)
