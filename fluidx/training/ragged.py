"""Examples of several lengths, such as sentences of tokens: a batch is padded to the longest one in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..onnx.errors import OnnxError


class Ragged:
    """Examples one after the other in `values`, example k up to `ends[k]`. Rows of it are an array in which axis 1 has the length of the
    longest, or the next multiple of `multiple`; shorter ones end with `pad`.

    >>> words = Ragged.of([[1, 2, 3], [4]])
    >>> words[np.array([1, 0])].tolist()
    [[4, 0, 0], [1, 2, 3]]
    """

    def __init__(self, values: np.ndarray, ends: np.ndarray, pad: Any = 0, multiple: int = 1):
        self.values, self.ends, self.pad, self.multiple = values, ends, pad, multiple

    @classmethod
    def of(cls, rows: Iterable[Any], what: str = "the array") -> Ragged:
        """The examples of a list of arrays or lists, whose sizes may differ along their first axis."""
        arrays = [_array(row) for row in rows]
        some = next((a for a in arrays if a.size), arrays[0])
        for k, a in enumerate(arrays):
            if not a.ndim or (a.size and a.shape[1:] != some.shape[1:]):
                has = f"{list(a.shape)} in example {k + 1}, and {list(some.shape)} in others"
                raise OnnxError(f"{what} has shape {has}; only the first size may differ")
        full = [a for a in arrays if a.size] or arrays[:1]  # an empty list has no dtype of its own
        return cls(np.concatenate(full), np.cumsum([len(a) if a.size else 0 for a in arrays]))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all rows."""
        return len(self), self._padded(self.lengths), *self.values.shape[1:]

    @property
    def ndim(self) -> int:
        return self.values.ndim + 1

    def __getitem__(self, rows: Any) -> np.ndarray:
        starts, ends = (self.ends - self.lengths)[rows], self.ends[rows]
        made = np.full((len(ends), self._padded(ends - starts), *self.values.shape[1:]), self.pad, self.values.dtype)
        for row, start, end in zip(made, starts.tolist(), ends.tolist(), strict=True):
            row[: end - start] = self.values[start:end]
        return made

    def _padded(self, lengths: np.ndarray) -> int:
        return -(-int(lengths.max(initial=0)) // self.multiple) * self.multiple

    def with_values(self, values: np.ndarray, pad: Any = 0, multiple: int = 1) -> Ragged:
        """Other values at the same places."""
        return Ragged(values, self.ends, pad, multiple)

    def where(self, place: int) -> int:
        """The example of a place in `values`."""
        return int(np.searchsorted(self.ends, place, side="right"))


Values = np.ndarray | Ragged


def _array(row: Any) -> np.ndarray:
    """A row as an array; its elements may be arrays."""
    a = np.asarray(row)
    return a if a.dtype.kind != "O" else np.stack([*a]) if a.size and isinstance(a.flat[0], np.ndarray) else np.array(a.tolist())


def examples_of(given: Any, what: str) -> Values:
    """Arrays as they are; and lists and arrays of arrays as one array, or as examples of several lengths."""
    if isinstance(given, np.ndarray) and given.dtype.kind != "O":
        return given
    if not isinstance(given, (list, tuple, np.ndarray)) or not len(given) or not _is_sequence(given[0]):
        return np.asarray(given)
    return same_or_ragged([*given], what)


def same_or_ragged(rows: Sequence[Any], what: str) -> Values:
    """Rows as one array if all have as many elements, else as examples of several lengths."""
    if len({len(row) if _is_sequence(row) else -1 for row in rows}) > 1:
        return Ragged.of(rows, what)
    try:
        return np.array([_array(row) for row in rows])
    except ValueError:
        raise OnnxError(f"{what} has rows of several shapes; only the first axis of each may differ") from None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)
