"""Random feeds of a program: normal floats, and whole numbers that the operators that read them accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..ir import ANY, Program
from ..ir.dtypes import np_dtype
from ..ir.errors import FeedError, nearest
from ..ir.operator import Operator
from ..ir.types import TensorType

_SAME = ("reshape", "unsqueeze", "squeeze", "flatten", "cast", "transpose", "slice", "split", "expand")  # hand on the numbers they read


def synthetic_feed(
    program: Program, rows: int | None, ranks: int = 1, shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, np.ndarray]:
    """A feed of `rows` rows for each of some ranks; `shapes` has the shapes of feeds on a rank. Raises FeedError for an open size that is
    not said, and for a shape of an unknown feed.

    >>> from fluidx.bench.models import gpt
    >>> feed = synthetic_feed(gpt().main, 4, ranks=2)
    >>> [(name, a.shape, int(a.max()) < 1000) for name, a in feed.items()]
    [('tokens', (8, 128), True), ('targets', (8, 128, 1), True)]
    """
    data = {n: d.type for n, d in program.global_block().descs.items() if d.is_data and _is_read(program, n)}
    for name in shapes or {}:
        if name not in data:
            raise FeedError(f"a shape is given for {name!r}, which {program.label()} is not fed; {nearest(name, data, 'it is fed')}")
    rng = np.random.default_rng(0)
    found = {}
    for name, t in data.items():
        shape, dtype = _shape(name, t, rows, ranks, (shapes or {}).get(name)), np_dtype(t.dtype)
        if dtype.kind in "iu":
            found[name] = rng.integers(0, numbers_below(program, name), shape).astype(dtype)
        elif dtype.kind == "b":
            found[name] = np.ones(shape, dtype)
        else:
            found[name] = rng.standard_normal(shape, "float32").astype(dtype)
    return found


def _shape(name: str, declared: TensorType, rows: int | None, ranks: int, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is not None and not declared.accepts(TensorType(declared.dtype, tuple(given))):
        raise FeedError(f"variable {name!r} is declared {declared}, the shape given is {list(given)}")
    first, *rest = given or declared.shape or (1,)
    is_open = bool(declared.shape) and declared.shape[0] == ANY
    if given is None and is_open:
        if rows is None:
            raise FeedError(f"the rows of {name!r} are open: say how many a step has on each rank, with --batch 32")
        first = rows
    if ANY in rest:
        example = "x".join(["32", *("8" if d == ANY else str(d) for d in rest)])
        raise FeedError(f"variable {name!r} is declared {declared}: give its open sizes, the rows of a rank first: --feed {name}={example}")
    return (first * ranks if is_open else first, *rest)


def _is_read(program: Program, name: str) -> bool:
    return any(name in op.input_arg_names for block in program.blocks for op in block.oplist)


def open_feeds(program: Program) -> list[str]:
    """The feeds whose number of rows is open."""
    return [n for n, d in program.global_block().descs.items() if d.is_data and d.type.shape and d.type.shape[0] == ANY]


def numbers_below(program: Program, name: str) -> int:
    """The bound of whole numbers that a feed may have: the rows of the table that it looks up, or the classes of a loss; 1 if nothing is
    known, for which 0 is fed."""
    same = {name}
    bounds: list[int] = []
    for op in program.global_block().oplist:
        if same.isdisjoint(op.input_arg_names):
            continue
        bounds += _bounds(program, op, same)
        if op.type in _SAME:
            same.update(op.output_arg_names)
    return min([b for b in bounds if b > 0], default=1)


def _bounds(program: Program, op: Operator, same: set[str]) -> Iterator[int]:
    """The bounds that one operator sets for the numbers that it reads."""
    descs = program.global_block().descs

    def reads(slot: str) -> bool:
        return not same.isdisjoint(op.inputs.get(slot, ()))

    if reads("Ids") and op.inputs.get("W"):
        yield descs[op.inputs["W"][0]].type.shape[0]
    elif reads("Label"):
        others = [n for slot, names in op.inputs.items() if slot != "Label" for n in names]
        yield from [descs[n].type.shape[-1] for n in others[:1] if descs[n].type.is_float]
    elif isinstance(op.attrs.get("depth"), int):
        yield op.attrs["depth"]
