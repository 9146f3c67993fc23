"""A rank's contribution to a collective call, and the work of collectives in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from ..native.world import dtype_text
from .base import UFUNCS

BLOCK = 32 * 1024  # elements reduced at a time: the block stays in the second-level cache
NOTHING = np.empty(0, np.uint8)

Block = Callable[[np.dtype], np.ndarray]  # returns scratch of BLOCK elements of a dtype


class Contribution:
    """One rank's contribution to a collective call: the name, the reduction, the root and the arrays.

    If every rank has a part for each other rank, `gives` are the parts by receiver, and `takes` the arrays that receive the others' parts.
    """

    kept = True  # does the flight recorder keep it as the last completed call?
    __slots__ = ("what", "x", "out", "op", "root", "gives", "takes", "dtype", "size")

    def __init__(self, what: str, x: Any = NOTHING, out: Any = NOTHING, op: str = "", root: int = -1, gives: Any = None, takes: Any = None):
        self.what, self.x, self.out, self.op, self.root, self.gives, self.takes = what, x, out, op, root, gives, takes
        array = x if isinstance(x, np.ndarray) else x[0] if x else NOTHING
        self.dtype = array.dtype
        self.size = x.size if array is x else sum(a.size for a in x)

    @property
    def call(self) -> str:
        """The part of the text that must be equal on all ranks: without shapes if each rank has parts of its own."""
        if self.x is NOTHING:
            return self.what
        root = "" if self.root < 0 else f", root {self.root}" if self.op else f" from index {self.root}"
        how = f" ({self.op}{root})" if self.op else root
        return f"{self.what}{how} of {dtype_text(self.dtype)}" + (str(list(self.x.shape)) if self.gives is None else "")

    def __str__(self) -> str:
        if self.gives is None:
            return self.call
        return self.call + (str(list(self.x.shape)) if isinstance(self.x, np.ndarray) else f" in {len(self.x)} parts")


def work(slots: Sequence[Contribution], first: int, end: int, block: Block) -> None:
    """Do the share of the members `first` to `end` of the work of a collective. `slots` are all contributions, in order."""
    if (do := _WORK.get(slots[0].what)) is not None:
        do(slots, first, end, block)


def _broadcast(slots: Sequence[Contribution], first: int, end: int, block: Block) -> None:
    source = slots[slots[0].root].x
    for s in slots[first:end]:
        if s.out is not source:
            np.copyto(s.out, source)


def _reduce_share(slots: Sequence[Contribution], first: int, end: int, block: Block) -> None:
    """Each member reduces a range of the elements for all receivers, so that the root is no bottleneck."""
    n, size, root = len(slots), slots[0].size, slots[0].root
    share = slice(size * first // n, size * end // n)
    outs = slots if root < 0 else slots[root : root + 1]
    reduce_into([s.x.reshape(-1)[share] for s in slots], [s.out.reshape(-1)[share] for s in outs], slots[0].op, block)


def _move(slots: Sequence[Contribution], first: int, end: int, block: Block) -> None:
    for k in range(first, end):
        for place, source in zip(slots[k].takes, slots, strict=True):
            np.copyto(place, source.gives[k])


def _reduce_parts(slots: Sequence[Contribution], first: int, end: int, block: Block) -> None:
    for k in range(first, end):
        reduce_into([s.gives[k] for s in slots], [slots[k].out], slots[0].op, block)


_WORK = {
    "broadcast": _broadcast, "all_reduce": _reduce_share, "reduce": _reduce_share, "all_gather": _move, "all_to_all": _move,
    "scatter": _move, "gather": _move, "reduce_scatter": _reduce_parts,
}  # fmt: skip


def reduce_into(ins: list, outs: list, op: str, block: Block) -> None:
    """The reduction of `ins`, in rank order, into each of `outs`; 16-bit floats are added in float32."""
    n = len(ins)
    scratch = block(wide(ins[0].dtype))
    arrays = _flat(*ins, *outs)
    ins, outs = arrays[:n], arrays[n:]
    for at in _blocks(ins[0].shape):
        terms = [x[at] for x in ins]
        total = scratch[: terms[0].size].reshape(terms[0].shape)
        add_up(terms, op, total)
        settle(total, op, n)
        for o in outs:
            o[at] = total


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype in which a reduction adds."""
    return np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype


def add_up(terms: Sequence[np.ndarray], op: str, total: np.ndarray) -> None:
    """Reduce terms in order into `total`; the first term may be a partial result. `settle` completes the reduction after the last term."""
    ufunc, kwargs = UFUNCS[op], dict[str, Any](casting="unsafe")
    if terms[-1].dtype != total.dtype:
        kwargs["dtype"] = total.dtype
    if len(terms) == 1:
        np.copyto(total, terms[0])
    else:
        ufunc(terms[0], terms[1], out=total, **kwargs)
    for term in terms[2:]:
        ufunc(total, term, out=total, **kwargs)


def settle(total: np.ndarray, op: str, n: int) -> None:
    if op == "avg":
        np.divide(total, n, out=total, casting="unsafe")


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Indices that split an array of this shape into blocks of at most BLOCK elements."""
    size = prod(shape)
    if size <= BLOCK:
        yield ()
        return
    row = size // shape[0]
    if row > BLOCK:
        for i in range(shape[0]):
            for rest in _blocks(shape[1:]):
                yield (i, *rest)
        return
    step = BLOCK // row
    for a in range(0, shape[0], step):
        yield (slice(a, a + step),)


def _flat(*arrays: np.ndarray) -> list[np.ndarray]:
    """The arrays, flattened if all of them are contiguous."""
    return [a.reshape(-1) for a in arrays] if all(a.flags.c_contiguous for a in arrays) else list(arrays)
