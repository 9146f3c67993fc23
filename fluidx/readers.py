"""Readers: functions without arguments that return an iterable of samples, and functions that combine readers, under fluid's names.

A reader may be called repeatedly; each call starts its data from the beginning.

>>> numbers = lambda: iter(range(5))
>>> [batch for batch in batch(numbers, batch_size=2)()]
[[0, 1], [2, 3], [4]]
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ._checks import whole, wrong
from .ir import FluidxError

Reader = Callable[[], Iterable[Any]]
_POLL = 0.05  # seconds between two checks whether the reading side is closed


class ComposeNotAligned(FluidxError, ValueError):
    """Readers that are read together have different numbers of samples."""


def _checked(owner: str, reader: Any) -> Reader:
    if not callable(reader):
        raise wrong(f"io.{owner}: a reader must be a function that gives an iterable, got {type(reader).__name__}: {reader!r:.60}")
    return reader


def batch(reader: Reader, batch_size: int, drop_last: bool = False) -> Callable[[], Iterator[list[Any]]]:
    """A reader of lists of `batch_size` samples. The last list may be shorter; `drop_last` leaves it out."""
    reader, size = _checked("batch", reader), whole("io.batch", "batch_size", batch_size, 1)

    def batches() -> Iterator[list[Any]]:
        samples = iter(reader())
        while found := list(itertools.islice(samples, size)):
            if len(found) == size or not drop_last:
                yield found

    return batches


def shuffle(reader: Reader, buf_size: int) -> Callable[[], Iterator[Any]]:
    """A reader that takes `buf_size` samples at a time and gives them in random order.

    The order comes from Python's `random`: launched ranks, which must all read the same, call `random.seed` with one seed.
    """
    reader, size = _checked("shuffle", reader), whole("io.shuffle", "buf_size", buf_size, 1)

    def shuffled() -> Iterator[Any]:
        samples = iter(reader())
        while found := list(itertools.islice(samples, size)):
            random.shuffle(found)
            yield from found

    return shuffled


def cache(reader: Reader) -> Callable[[], Iterator[Any]]:
    """A reader that keeps all samples in memory: the given one is read once, at the first call."""
    reader = _checked("cache", reader)
    kept: list[list[Any]] = []

    def cached() -> Iterator[Any]:
        if not kept:
            kept.append(list(reader()))
        return iter(kept[0])

    return cached


def firstn(reader: Reader, n: int) -> Callable[[], Iterator[Any]]:
    """A reader of the first `n` samples."""
    reader, n = _checked("firstn", reader), whole("io.firstn", "n", n, 0)
    return lambda: itertools.islice(iter(reader()), n)


def chain(*readers: Reader) -> Callable[[], Iterator[Any]]:
    """A reader of all samples of the first reader, then of the second, and so on."""
    checked = [_checked("chain", r) for r in readers]
    return lambda: itertools.chain.from_iterable(r() for r in checked)


def compose(*readers: Reader, check_alignment: bool = True) -> Callable[[], Iterator[tuple[Any, ...]]]:
    """A reader whose samples join the samples of all readers to one flat tuple: (1, 2) and 3 give (1, 2, 3).

    Raises ComposeNotAligned if one reader ends before another; without `check_alignment` it ends with the shortest.
    """
    checked = [_checked("compose", r) for r in readers]

    def composed() -> Iterator[tuple[Any, ...]]:
        rows = itertools.zip_longest(*(r() for r in checked), fillvalue=_END) if check_alignment else zip(*(r() for r in checked))
        for k, row in enumerate(rows):
            if any(v is _END for v in row):
                ended = next(i for i, v in enumerate(row) if v is _END)
                raise ComposeNotAligned(f"io.compose: reader {ended} has {k} samples, another has more; check_alignment=False cuts it")
            yield tuple(itertools.chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in row))

    return composed


def map_readers(func: Callable[..., Any], *readers: Reader) -> Callable[[], Iterator[Any]]:
    """A reader of the results of `func` on one sample of each reader."""
    checked = [_checked("map_readers", r) for r in readers]
    return lambda: map(func, *(r() for r in checked))


def buffered(reader: Reader, size: int) -> Callable[[], Iterator[Any]]:
    """A reader whose samples another thread reads ahead, at most `size` of them."""
    reader, size = _checked("buffered", reader), whole("io.buffered", "size", size, 1)
    return lambda: _in_order([lambda put: _put_all(put, reader())], size)


def xmap_readers(
    mapper: Callable[[Any], Any], reader: Reader, process_num: int, buffer_size: int, order: bool = False
) -> Callable[[], Iterator[Any]]:
    """A reader of the results of `mapper` on each sample, computed in `process_num` threads; with `order` in the order of the samples.

    At most `buffer_size` results are kept until they are read.
    """
    reader, count = _checked("xmap_readers", reader), whole("io.xmap_readers", "process_num", process_num, 1)
    size = whole("io.xmap_readers", "buffer_size", buffer_size, 1)

    def mapped() -> Iterator[Any]:
        samples, lock = enumerate(reader()), threading.Lock()

        def work(put: Callable[[Any], bool]) -> None:
            while True:
                with lock:
                    k, sample = next(samples, (-1, None))
                if k < 0 or not put((k, mapper(sample))):
                    return

        waiting: dict[int, Any] = {}
        expected = 0
        for k, made in _in_order([work] * count, size):
            if not order:
                yield made
                continue
            waiting[k] = made
            while expected in waiting:
                yield waiting.pop(expected)
                expected += 1

    return mapped


def multiprocess_reader(readers: Sequence[Reader], use_pipe: bool = True, queue_size: int = 1000) -> Callable[[], Iterator[Any]]:
    """A reader of the samples of all readers, each read by a separate process, in the order of arrival.

    `use_pipe` has no effect. Samples are sent between processes, so `pickle` must support them.
    """
    checked = [_checked("multiprocess_reader", r) for r in readers]
    if not checked:
        raise wrong("io.multiprocess_reader: readers must be a list of at least one reader")
    size = whole("io.multiprocess_reader", "queue_size", queue_size, 1)

    def read() -> Iterator[Any]:
        # readers are mostly closures, which cannot be pickled, so the process must be a fork
        forks = multiprocessing.get_context("fork")
        found = forks.Queue(size)
        processes = [forks.Process(target=_send_all, args=(r, found), daemon=True) for r in checked]
        for p in processes:
            p.start()
        try:
            left = len(processes)
            while left:
                kind, value = _received(found, processes)
                if kind == "error":
                    raise FluidxError(f"io.multiprocess_reader: a reader failed in its process: {value}")
                if kind == "end":
                    left -= 1
                else:
                    yield value
        finally:
            for p in processes:
                p.terminate()
                p.join()

    return read


def _send_all(reader: Reader, found: Any) -> None:
    try:
        for sample in reader():
            found.put(("sample", sample))
        found.put(("end", None))
    except BaseException as e:
        found.put(("error", f"{type(e).__name__}: {e}"))


def _received(found: Any, processes: Sequence[Any]) -> tuple[str, Any]:
    while True:
        try:
            return found.get(timeout=1.0)
        except queue.Empty:
            if dead := [p for p in processes if p.exitcode not in (None, 0)]:
                raise FluidxError(f"io.multiprocess_reader: the process of a reader ended with status {dead[0].exitcode}") from None


# -- threads that read ahead ----------------------------------------------------------------------------------------------------

_END = object()


class _Failed:
    def __init__(self, error: BaseException):
        self.error = error


def _put_all(put: Callable[[Any], bool], samples: Iterable[Any]) -> None:
    for sample in samples:
        if not put(sample):
            return


def _in_order(workers: Sequence[Callable[[Callable[[Any], bool]], None]], size: int) -> Iterator[Any]:
    """The values that threads put, in order of arrival; an error of a thread is raised here. Threads end soon after the iterator is
    closed."""
    made: queue.Queue[Any] = queue.Queue(size)
    stopped = threading.Event()

    def put(value: Any) -> bool:
        """Put a value into the queue; False if the reading side is closed."""
        while not stopped.is_set():
            try:
                made.put(value, timeout=_POLL)
                return True
            except queue.Full:
                continue
        return False

    def run(work: Callable[[Callable[[Any], bool]], None]) -> None:
        try:
            work(put)
            put(_END)
        except BaseException as e:
            put(_Failed(e))

    for work in workers:
        threading.Thread(target=run, args=(work,), name="fluidx-reader", daemon=True).start()
    try:
        left = len(workers)
        while left:
            value = made.get()
            if isinstance(value, _Failed):
                raise value.error
            if value is _END:
                left -= 1
            else:
                yield value
    finally:
        stopped.set()


__all__ = [
    "ComposeNotAligned", "batch", "buffered", "cache", "chain", "compose", "firstn", "map_readers", "multiprocess_reader", "shuffle",
    "xmap_readers",
]  # fmt: skip
