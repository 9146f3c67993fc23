"""DataFeeder: turn lists of samples, as readers return them, into the arrays that `run(feed=...)` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ._checks import whole, wrong
from .ir import ANY, FeedError, Program, Variable, default_main_program, np_dtype
from .ir.dtypes import kept


class DataFeeder:
    """Joins samples into one array for each variable of `feed_list` (Variables, or names in `program`). `place` has no effect.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     image, label = fx.data("image", [-1, 2, 2], "float32"), fx.data("label", [-1, 1], "int64")
    ...     feeder = fx.DataFeeder([image, label], place=None)
    >>> feed = feeder.feed([([1, 2, 3, 4], 0), ([5, 6, 7, 8], 1)])
    >>> {name: (array.dtype.name, array.shape) for name, array in feed.items()}
    {'image': ('float32', (2, 2, 2)), 'label': ('int64', (2, 1))}
    """

    def __init__(self, feed_list: Sequence[Variable | str], place: Any = None, program: Program | None = None):
        if isinstance(feed_list, (str, Variable)) or not feed_list:
            raise wrong(f"DataFeeder: feed_list must be a list of at least one Variable or name, got {feed_list!r}")
        block = (default_main_program() if program is None else program).global_block()
        self.place = place
        self.variables: list[Variable] = []
        for v in feed_list:
            if not isinstance(v, (str, Variable)):
                raise wrong(f"DataFeeder: feed_list must hold Variables or names, got {type(v).__name__}: {v!r}")
            self.variables.append(block.var(v) if isinstance(v, str) else v)

    @property
    def feed_names(self) -> list[str]:
        """The names of the variables that are fed."""
        return [v.name for v in self.variables]

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, np.ndarray]:
        """The samples as `{name: array}`. Each sample has one value for each variable, in the order of feed_list.

        A value of another shape with as many elements is reshaped, as in fluid. Raises FeedError that names the variable and the
        sample when it does not fit.
        """
        columns: list[list[np.ndarray]] = [[] for _ in self.variables]
        for i, sample in enumerate(iterable):
            if not isinstance(sample, (list, tuple)) or len(sample) != len(self.variables):
                found = f"{len(sample)} values" if isinstance(sample, (list, tuple)) else type(sample).__name__
                raise FeedError(f"sample {i} must have {len(self.variables)} values ({', '.join(self.feed_names)}), found {found}")
            for v, value, column in zip(self.variables, sample, columns):
                column.append(_one(v, value, i))
        if not columns[0]:
            raise FeedError(f"there are no samples to feed to {', '.join(self.feed_names)}")
        return {v.name: _join(v, column) for v, column in zip(self.variables, columns)}

    def feed_parallel(self, iterable: Iterable[Iterable[Sequence[Any]]], num_places: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        """One feed for each batch, for a run on `num_places` places."""
        batches = list(iterable)
        if num_places is not None and len(batches) != whole("DataFeeder.feed_parallel", "num_places", num_places, 1):
            raise FeedError(f"{num_places} places need as many batches, found {len(batches)}")
        for batch in batches:
            yield self.feed(batch)

    def decorate_reader(
        self, reader: Callable[[], Iterable[Any]], multi_devices: bool, num_places: int | None = None, drop_last: bool = True
    ) -> Callable[[], Iterator[Any]]:
        """A reader of feeds from a reader of batches.

        With `multi_devices` each item is a list of `num_places` feeds; batches left over at the end are dropped, or refused (FeedError)
        with drop_last=False.
        """
        if not multi_devices:
            return lambda: (self.feed(batch) for batch in reader())
        if num_places is None:
            from .config import cpu_num

            num_places = cpu_num()
        count = whole("DataFeeder.decorate_reader", "num_places", num_places, 1)

        def feeds() -> Iterator[list[dict[str, np.ndarray]]]:
            waiting: list[Any] = []
            for batch in reader():
                waiting.append(batch)
                if len(waiting) == count:
                    yield list(self.feed_parallel(waiting, count))
                    waiting = []
            if waiting and not drop_last:
                raise FeedError(f"{len(waiting)} batches are left over for {count} places; drop_last=True drops them")

        return feeds


def _one(v: Variable, value: Any, i: int) -> np.ndarray:
    """One sample's value of a variable: its dtype, and its shape without the batch axis."""
    want = np_dtype(v.dtype)
    try:
        array = np.asarray(value)
        if array.dtype == object:
            raise ValueError("ragged")
    except (TypeError, ValueError):
        raise FeedError(f"sample {i}: variable {v.name!r} needs numbers of shape {list(v.shape[1:])}, found {value!r:.60}") from None
    try:
        array = kept(array, want)
    except ValueError as e:
        found = f"found {array.dtype.name}; convert it first" if str(e).startswith("has") else f"the sample {e}"
        raise FeedError(f"sample {i}: variable {v.name!r} is {v.dtype}, {found}") from None
    shape = v.shape[1:]
    if len(array.shape) == len(shape) and all(a in (ANY, b) for a, b in zip(shape, array.shape)):
        return array.astype(want)
    try:
        return array.astype(want).reshape(shape) if shape.count(ANY) < 2 else _misfit(array)
    except ValueError:
        raise FeedError(f"sample {i}: variable {v.name!r} needs shape {list(shape)}, found {list(array.shape)}") from None


def _misfit(array: np.ndarray) -> np.ndarray:
    raise ValueError(f"{array.shape} has more than one open axis to fill")


def _join(v: Variable, column: list[np.ndarray]) -> np.ndarray:
    rows = v.shape[0] if v.ndim else 1
    if rows not in (ANY, len(column)):
        raise FeedError(f"variable {v.name!r} has shape {list(v.shape)}: it needs {rows} samples, found {len(column)}")
    if not v.ndim:
        return column[0]
    for i, array in enumerate(column):
        if array.shape != column[0].shape:
            first = list(column[0].shape)
            raise FeedError(f"sample {i}: variable {v.name!r} has shape {list(array.shape)}, sample 0 has {first}; pad them to one shape")
    return np.stack(column)
