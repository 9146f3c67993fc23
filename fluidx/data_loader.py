"""Data loaders: batches from a generator, read ahead by a thread, as feeds or for a program that reads them by itself; fluid's
`DataLoader.from_generator`, `PyReader` and `layers.py_reader`.

An iterable loader gives feeds: `for feed in loader(): exe.run(main, feed=feed)`. Other loaders belong to the program in which they were
made: after `start()` each run without a feed takes the next batch, and EOFException ends the epoch; then call `reset()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ._checks import whole, wrong
from .data_feeder import DataFeeder
from .ir import EOFException, FeedError, Variable, default_main_program
from .readers import Reader, batch, buffered

Feed = dict[str, Any]


class GeneratorLoader:
    """The loader that `DataLoader.from_generator` returns. `label` is its name in messages."""

    label = "io.DataLoader"

    def __init__(self, feed_list: Sequence[Variable] | None, capacity: int, iterable: bool, return_list: bool, drop_last: bool = True):
        if not feed_list or isinstance(feed_list, Variable) or not all(isinstance(v, Variable) for v in feed_list):
            raise wrong(f"{self.label}: feed_list must be a list of at least one data Variable, got {feed_list!r:.80}")
        self.feed_list = list(feed_list)
        self.capacity = whole(self.label, "capacity", capacity, 1)
        self.iterable, self.return_list, self.drop_last = bool(iterable), bool(return_list), bool(drop_last)
        self._places = 1
        self._feeds: Callable[[], Iterable[Feed]] | None = None
        self._running: Iterator[Feed] | None = None
        if not self.iterable:
            default_main_program().readers.append(self)

    # -- where batches come from -------------------------------------------------------------------------------------------

    def set_sample_generator(self, reader: Reader, batch_size: int, drop_last: bool = True, places: Any = None) -> GeneratorLoader:
        """Take batches of `batch_size` samples from a reader of samples, each a tuple with a value for each variable of feed_list."""

        def samples() -> Iterator[Any]:
            return (s if isinstance(s, (list, tuple)) else (s,) for s in reader())

        return self.set_sample_list_generator(batch(samples, batch_size, drop_last), places)

    def set_sample_list_generator(self, reader: Reader, places: Any = None) -> GeneratorLoader:
        """Take batches from a reader of lists of samples, as `io.batch` makes one."""
        feeder = DataFeeder(self.feed_list)
        return self._set(lambda: map(feeder.feed, reader()), places)

    def set_batch_generator(self, reader: Reader, places: Any = None) -> GeneratorLoader:
        """Take batches from a reader of tuples of arrays, one for each variable of feed_list."""
        return self._set(lambda: map(self._named, reader()), places)

    def _set(self, feeds: Callable[[], Iterable[Feed]], places: Any) -> GeneratorLoader:
        self._feeds = feeds
        self._places = len(places) if isinstance(places, (list, tuple)) else 1
        return self

    def _named(self, arrays: Any) -> Feed:
        given = arrays if isinstance(arrays, (list, tuple)) else (arrays,)
        if isinstance(arrays, dict):
            return dict(arrays)
        if len(given) != len(self.feed_list):
            names = ", ".join(v.name for v in self.feed_list)
            raise FeedError(f"{self.label}: a batch must have {len(self.feed_list)} arrays ({names}), the generator gave {len(given)}")
        return {v.name: np.asarray(a) for v, a in zip(self.feed_list, given)}

    def _ahead(self) -> Iterator[Feed]:
        if self._feeds is None:
            raise wrong(
                f"{self.label}: it has no data yet; call set_sample_generator, set_sample_list_generator or set_batch_generator "
                "(of a PyReader decorate_...) first"
            )
        return buffered(self._feeds, self.capacity)()

    # -- iterable ---------------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Lists of feeds, one for each of `places`; `run` takes such a list. With `return_list`, lists of lists of arrays.

        At the end, batches for fewer than all places are dropped, unless drop_last=False.
        """
        if not self.iterable:
            raise wrong(f"{self.label}: it was made with iterable=False: call start(), and run the program without a feed")
        return self._groups()

    def _groups(self) -> Iterator[Any]:
        waiting: list[Any] = []
        for feed in self._ahead():
            waiting.append([feed[v.name] for v in self.feed_list] if self.return_list else feed)
            if len(waiting) == self._places:
                yield waiting
                waiting = []
        if waiting and not self.drop_last:
            yield waiting

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    # -- read by the program -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin an epoch."""
        if self.iterable:
            raise wrong(f"{self.label}: it is iterable; write `for feed in loader(): exe.run(main, feed=feed)`, or give iterable=False")
        self._running = self._ahead()

    def reset(self) -> None:
        """End the epoch; the next `start` begins from the first batch."""
        if self.iterable:
            raise wrong(f"{self.label}: it is iterable, each loop over it begins anew; start() and reset() are for iterable=False")
        self._running = None

    def next_feed(self) -> Feed:
        """The next batch. Raises EOFException if there is none."""
        if self._running is None:
            raise FeedError(f"{self.label}: {', '.join(v.name for v in self.feed_list)} are read by the program; call start() before run()")
        for feed in self._running:
            return feed
        raise EOFException(f"{self.label}: there are no batches left; call reset(), then start() for the next epoch")


class DataLoader:
    """`DataLoader.from_generator(...)` returns a loader for the batches of a generator."""

    def __init__(self, dataset: Any = None, *args: Any, **kwargs: Any):
        raise wrong("io.DataLoader: a data set that is indexed is not supported; write io.DataLoader.from_generator(feed_list=...)")

    @staticmethod
    def from_generator(
        feed_list: Sequence[Variable] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
        use_multiprocess: bool = False,
        drop_last: bool = True,
    ) -> GeneratorLoader:
        """A loader for `feed_list`, which a thread fills with `capacity` batches ahead. `use_double_buffer` and `use_multiprocess` have no
        effect.

        >>> import fluidx as fx
        >>> with fx.program_guard(fx.Program(), fx.Program()):
        ...     x = fx.data("x", [None, 2], "float32")
        >>> loader = fx.io.DataLoader.from_generator(feed_list=[x], capacity=4)
        >>> _ = loader.set_sample_generator(lambda: iter([([1, 2],), ([3, 4],), ([5, 6],)]), batch_size=2)
        >>> [feed[0]["x"].tolist() for feed in loader()]
        [[[1.0, 2.0], [3.0, 4.0]]]
        """
        return GeneratorLoader(feed_list, 16 if capacity is None else capacity, iterable, return_list, drop_last)

    @staticmethod
    def from_dataset(dataset: Any, places: Any, drop_last: bool = True) -> GeneratorLoader:
        """fluid's call for its Dataset classes, which fluidx does not have."""
        raise wrong("io.DataLoader: from_dataset is not supported; read the files in a generator: io.DataLoader.from_generator(...)")


class PyReader(GeneratorLoader):
    """fluid's older form of `DataLoader.from_generator`: `decorate_...` in place of `set_...`."""

    label = "io.PyReader"

    def __init__(
        self,
        feed_list: Sequence[Variable] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
    ):
        super().__init__(feed_list, 16 if capacity is None else capacity, iterable, return_list)

    decorate_sample_generator = GeneratorLoader.set_sample_generator
    decorate_sample_list_generator = GeneratorLoader.set_sample_list_generator
    decorate_batch_generator = GeneratorLoader.set_batch_generator
    # names of the readers that layers.py_reader returns
    decorate_paddle_reader = GeneratorLoader.set_sample_list_generator
    decorate_tensor_provider = GeneratorLoader.set_batch_generator


__all__ = ["DataLoader", "GeneratorLoader", "PyReader"]
