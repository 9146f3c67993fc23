"""Ceilings of this machine: the speed of a large matrix product and of a large copy, measured once in a process when first needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from .. import native

_N = 512  # rows and columns of the product: 3 MB of operands
PRODUCT_FLOPS = 2 * _N**3
_BYTES = 1 << 26  # of the copy: larger than most caches
_TIMES = 5  # the best of so many measurements


class Ceilings(NamedTuple):
    """The highest rates of `threads` threads: float32 operations of a product and bytes read and written by a copy, both in 10^9 a second;
    and the microseconds of a step on one element."""

    threads: int
    gflops: float
    gbs: float
    call: float = 0.0

    def __str__(self) -> str:
        product, copy = f"a product of {_N}x{_N}x{_N}", f"a copy of {_BYTES >> 20} MB"
        some = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"ceilings, {some}: {self.gflops:.4g} GFLOP/s ({product}), {self.gbs:.4g} GB/s ({copy}), {self.call:.1f} us a step"

    def seconds(self, flops: int, nbytes: int) -> tuple[float, float]:
        """The shortest possible times for these operations and for these bytes.

        >>> Ceilings(1, 50.0, 10.0).seconds(5_000_000, 4_000_000)
        (0.0001, 0.0004)
        """
        return flops / (1e9 * self.gflops), nbytes / (1e9 * self.gbs)


def threads_of(ranks: int) -> int:
    """The number of kernel threads of each rank, if so many ranks share this process."""
    return max(1, (native.num_threads() if native.enabled() else 1) // ranks)


@lru_cache(maxsize=64)
def ceilings(threads: int = 1) -> Ceilings:
    """The ceilings for a number of threads; the first call takes about 0.1 s. NumPy's own products use the threads of its BLAS."""
    return Ceilings(threads, 1e-9 * PRODUCT_FLOPS / _best(product, threads), 2e-9 * _BYTES / _copy(), 1e6 * _least_step())


@lru_cache(maxsize=1)
def _copy() -> float:
    return _best(_copying, 1)


@lru_cache(maxsize=1)
def _least_step() -> float:
    return _best(_adding, 1, 200)


def _adding() -> Callable[[], Any]:
    a, b, c = (np.ones(1, np.float32) for _ in range(3))
    return partial(np.add, a, b, c)


def product() -> Callable[[], Any]:
    """A call of the large product: PRODUCT_FLOPS operations, with the kernel threads of the thread that calls it."""
    a, b, c = (np.full((_N, _N), value, np.float32) for value in (0.5, 0.25, 0))
    call = native.gemm(a, b, c) if native.enabled() else None
    return (lambda: np.dot(a, b, c)) if call is None else native.compile([call])


def _copying() -> Callable[[], Any]:
    a, b = np.ones(_BYTES, np.uint8), np.zeros(_BYTES, np.uint8)
    return lambda: np.copyto(b, a)


def _best(make: Callable[[], Callable[[], Any]], threads: int, count: int = _TIMES) -> float:
    """The shortest time of several calls in seconds, on a separate thread, because a limit of kernel threads belongs to a thread."""
    times: list[float] = []

    def measure() -> None:
        if native.enabled():
            native.use_threads(threads)
        call = make()
        call()
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)

    worker = threading.Thread(target=measure, name="fluidx-ceilings")
    worker.start()
    worker.join()
    return min(times)
