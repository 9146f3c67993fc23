"""Plan a program without state and feeds: sizes come from its declarations, and open sizes from arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...ir import flow
from ...ir.dtypes import np_dtype
from ...ir.errors import FeedError, nearest
from ...ir.flow import leaves
from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.parts import Coords, holds, local_type
from ...ir.program import Program
from ...ir.types import ANY, Placement, TensorType
from ..context import RunContext
from ..feeds import check_sizes
from .planner import plan
from .records import Plan


def dry_plan(
    program: Program,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
    fetch: Sequence[str] | None = None,
    fuse: bool = True,
    overlap: int | None = None,
    device: str = "cpu",
) -> Plan:
    """The plan for feeds of these shapes. A feed without a shape has `batch` rows on its open first axis. The plan of a rank program is
    that rank's. `fuse`, `overlap` and `device` are arguments of `plan`; a rank on another device than "cpu" communicates on a stream.

    `fetch` are names; the default is the results that no operator reads. Raises FeedError for a shape of an unknown feed, a shape that does
    not fit, and an open axis without a size.

    >>> import fluidx as fx
    >>> main = fx.Program("double")
    >>> with fx.program_guard(main):
    ...     y = fx.layers.scale(fx.data("x", [-1, 2], "float32"), scale=2.0)
    >>> print(dry_plan(main, {"x": (8, 2)}))
    plan of program double: 1 steps, arena 64 bytes, feeds 64, state 0
        0 ... scale: %x f32[8,2] feed -> %scale_0.tmp_0 f32[8,2] at 0
    """
    block = program.global_block()
    data = {n: d.type for n, d in block.descs.items() if d.is_data}
    shapes = shapes or {}
    for n in shapes:
        if n not in data:
            raise FeedError(f"a shape is given for {n!r}, which {program.label()} is not fed; {nearest(n, data, 'it is fed')}")
    ranks = range(program.world_size) if program.rank is None else [program.rank]
    groups = {g: program.group_ranks(g, ranks[0]) for g in program.groups}
    comm: Any = None if device == "cpu" else _StreamCommunicator()
    ctx = RunContext(ranks[0], program.world_size, comm, groups, program.turns)
    if program.rank is None:  # an Executor runs it on one device: placements are annotations for a transpile
        ctx = RunContext(groups=dict.fromkeys(program.groups, (0,)), turns=program.turns)
    feeds = {n: _shaped(n, t, shapes.get(n), batch) for n, t in data.items() if n in shapes or _is_read(program, n)}
    check_sizes(block.descs, feeds)
    fetched = leaves(program) if fetch is None else fetch
    return plan(program, feeds, fetched, _state(program, ctx), ctx, device, fuse=fuse, overlap=overlap)


class _StreamCommunicator:
    """Stands for the communicator of a rank whose calls only start the work: a plan asks no more of it."""

    asynchronous = True
    calls = None


def _shaped(name: str, declared: TensorType, shape: Sequence[int] | None, batch: int | None) -> TensorType:
    if shape is None:
        first, *rest = declared.shape or (1,)
        if ANY in rest or (first == ANY and batch is None):
            raise FeedError(f"variable {name!r} is declared {declared}: give its open sizes, with a batch size or a shape such as "
                            f"{name}={'x'.join('8' if d == ANY else str(d) for d in declared.shape)}")  # fmt: skip
        return declared if first != ANY else declared.with_shape((batch or 0, *rest))
    given = TensorType(declared.dtype, tuple(shape))
    if not declared.accepts(given):
        raise FeedError(f"variable {name!r} is declared {declared}, the shape given is {list(shape)}")
    return given


def _is_read(program: Program, name: str) -> bool:
    """Is a variable read, or does an operator need its size?"""
    return any(name in flow.reads(program, op) or name in _asked(op) for op in program.global_block().oplist)


def _asked(op: Operator) -> list[str]:
    axes = opdef(op.type).control.open_axes
    return [] if axes is None else [name for name, _, _ in axes(op.attrs)]


def _state(program: Program, ctx: RunContext) -> dict[str, np.ndarray]:
    """Arrays with the shapes of this rank's state variables, without memory."""
    coords = ctx.coords()
    held: dict[str, np.ndarray] = {}
    known: dict[tuple[int, int], np.ndarray | None] = {}  # by the ids of a type and a placement: many variables have both alike
    for n, d in program.global_block().descs.items():
        if d.persistable and not d.is_data:
            alike = id(d.type), id(d.placement)
            if alike not in known:
                known[alike] = _array(d.type, d.placement if program.rank is not None else (), coords)
            if (a := known[alike]) is not None:
                held[n] = a
    return held


def _array(t: TensorType, placement: Placement, coords: Coords) -> np.ndarray | None:
    """An array with the shape of a rank's part, without memory; None if the rank has none, or its shape is open."""
    if not holds(placement, coords):
        return None
    t = local_type(t, placement, coords)
    return None if ANY in t.shape else np.broadcast_to(np.zeros((), np_dtype(t.dtype)), t.shape)
