"""Layers for inputs that a program reads from a loader: py_reader, read_file, double_buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import wrong
from ..data_loader import PyReader
from ..ir import Variable, unique_name
from .declare import fluid_data


def py_reader(
    capacity: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any],
    lod_levels: Sequence[int] | None = None,
    name: str | None = None,
    use_double_buffer: bool = True,
) -> PyReader:
    """A loader with new variables of these shapes and dtypes, which `read_file` returns. The program reads their values from the loader.

    `reader.decorate_paddle_reader(...)` sets the source of batches, and `reader.start()` starts an epoch. At its end a run raises
    EOFException; call `reader.reset()` then.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     reader = fx.layers.py_reader(capacity=4, shapes=[(-1, 2), (-1, 1)], dtypes=["float32", "int64"])
    ...     x, label = fx.layers.read_file(reader)
    ...     y = fx.layers.scale(x, 2.0)
    >>> reader.decorate_paddle_reader(fx.io.batch(lambda: iter([([1, 2], 0), ([3, 4], 1)]), batch_size=2)) is reader
    True
    >>> reader.start()
    >>> fx.Executor().run(main, fetch_list=[y])[0].tolist()
    [[2.0, 4.0], [6.0, 8.0]]
    >>> try:
    ...     fx.Executor().run(main, fetch_list=[y])
    ... except fx.core.EOFException:
    ...     reader.reset()
    """
    if not isinstance(shapes, (list, tuple)) or not isinstance(dtypes, (list, tuple)) or len(shapes) != len(dtypes):
        raise wrong("layers.py_reader: shapes and dtypes must be lists of the same length, an entry for each variable")
    levels = list(lod_levels) if lod_levels is not None else [0] * len(shapes)
    base = name or unique_name.generate("py_reader")
    read = [fluid_data(f"{base}_data_{k}", s, d, level) for k, (s, d, level) in enumerate(zip(shapes, dtypes, levels))]
    return PyReader(read, capacity, use_double_buffer, iterable=False)


def create_py_reader_by_data(
    capacity: int, feed_list: Sequence[Variable], name: str | None = None, use_double_buffer: bool = True
) -> PyReader:
    """`py_reader` for existing variables."""
    return PyReader(feed_list, capacity, use_double_buffer, iterable=False)


def read_file(reader: PyReader) -> Any:
    """The variables that a reader fills: a Variable, or a list if there are several."""
    return _reader("read_file", reader).feed_list[0] if len(reader.feed_list) == 1 else list(reader.feed_list)


def double_buffer(reader: PyReader, place: Any = None, name: str | None = None) -> PyReader:
    """The reader itself, which always reads ahead."""
    return _reader("double_buffer", reader)


def _reader(owner: str, reader: Any) -> PyReader:
    if not isinstance(reader, PyReader):
        raise wrong(f"layers.{owner}: expected a reader of layers.py_reader, got {type(reader).__name__}: {reader!r:.60}")
    return reader


__all__ = ["create_py_reader_by_data", "double_buffer", "py_reader", "read_file"]
