"""The planner: for one set of feed shapes and fetches it chooses the operators that run, their sizes, storage, kernels and waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ... import config, native
from ..._collector import collections_paused
from ...ir.program import Program
from ...ir.types import TensorType
from ..context import RunContext
from ..error_text import no_memory
from .casts import without_casts
from .fusion import chains
from .kernel_selection import Chooser, KernelAnswers, PartChoice
from .liveness import FOREVER, lifetimes
from .overlap import NOTHING, OverlappedSteps, Span, on_stream, on_thread
from .plan_cache import keep, kept, plan_key
from .records import Plan, Step
from .segments import check_whole
from .selection import Outline
from .shadows import Shadows
from .sizes import RankSizes
from .storage import PlanNode, StorageAssignment
from .storage_proof import check_storage


@collections_paused()
def plan(
    program: Program,
    feed_types: Mapping[str, TensorType],
    fetch: Sequence[str],
    held: Mapping[str, Any],
    ctx: RunContext,
    device: str = "cpu",
    natively: bool | None = None,
    fuse: bool = True,
    rewrite: bool | None = None,
    overlap: int | None = None,
    outline: Outline | None = None,
) -> Plan:
    """Plan `program` for feeds of these types. Types are global, as in the program; a rank program is planned for its rank's part.

    - `held`: the arrays of the scope; only their dtypes and shapes are used.
    - `natively`: may C kernels be used? None: yes if they are built and FLUIDX_KERNELS allows it.
    - `fuse`: may a chain of operators be one step?
    - `rewrite`: are operators simplified (fluidx.rewrite)? No bit changes. None: yes if `fuse` and FLUIDX_REWRITE allow it.
    - `overlap`: the bytes of communication that a second thread of a CPU rank must at least hide to be used. None: no second thread.
    - `outline`: the operators to plan. None: all that the fetches need, in one plan.

    Raises FeedError, NotInitializedError or ProgramError.

    >>> import fluidx as fx
    >>> main = fx.Program("double")
    >>> with fx.program_guard(main):
    ...     y = fx.layers.scale(fx.data("x", [-1, 2], "float32"), scale=2.0)
    >>> print(plan(main, {"x": TensorType("float32", (8, 2))}, [y.name], {}, RunContext(), natively=False))
    plan of program double: 1 steps, arena 64 bytes, feeds 64, state 0
        0 numpy    scale: %x f32[8,2] feed -> %scale_0.tmp_0 f32[8,2] at 0
    """
    if outline is None:
        outline = Outline.of(program, feed_types, fetch)
        check_whole(outline)
    sizes = RankSizes(program, held, ctx)
    sizes.infer(outline, feed_types)
    natively = device == "cpu" and (native.enabled() if natively is None else natively)
    if (fuse and config.rewrites()) if rewrite is None else rewrite:
        outline = _simplified(sizes, outline, natively if device == "cpu" else None)
    key = plan_key(sizes, outline, ctx, device, natively, fuse, overlap)
    if (known := kept(outline, key, sizes, ctx)) is not None:
        return known
    try:
        planned, of_parts = _planned(sizes, outline, feed_types, ctx, device, natively, fuse, overlap)
    except MemoryError as e:
        raise no_memory(program, sizes.types) from e
    keep(outline, key, planned, sizes, of_parts)
    return planned


def _planned(
    sizes: RankSizes, outline: Outline, feed_types: Mapping[str, TensorType], ctx: RunContext, device: str, natively: bool, fuse: bool,
    overlap: int | None,
) -> tuple[Plan, list[PartChoice]]:  # fmt: skip
    """The plan of operators whose sizes are known, and the kernel choices that depend on the rank's part."""
    program, fetch = outline.program, outline.fetch
    shadows = Shadows(sizes.types.values())
    if natively and fuse:
        outline = without_casts(outline, sizes, shadows, ctx)
    answers = KernelAnswers.of(device, natively)
    layouts = answers.plain(sizes.types)
    units = chains(sizes, shadows, outline, layouts) if natively and fuse else [(op,) for op in outline.ops]
    counts = tuple(map(len, units))
    lives = lifetimes(outline, counts, sizes) if sizes.here else outline.fact(lifetimes, counts)
    storage = StorageAssignment(sizes, shadows, ctx, outline, lives)
    spans = lives.spans
    absent = frozenset(sizes.local.absent) if sizes.local is not None else frozenset()
    for name in feed_types:
        if name in sizes.types and name not in absent:
            storage.new_root(name, "feed", -1, FOREVER)
    nodes = [storage.place(i, unit) for i, unit in enumerate(units)]
    for n in fetch:
        storage.fetched(n)
    chooser = here = Chooser(storage, device, natively, answers, layouts)
    if device != "cpu" and storage.on_host:
        kinds = KernelAnswers.of("cpu", native.enabled())
        here = Chooser(storage, "cpu", native.enabled(), kinds, kinds.plain(sizes.types))
    kernels = {id(node): (here if node.on_host else chooser).kernel(node) for some in (nodes, *storage.inner.values()) for node in some}
    order = list(_order(nodes, spans))
    overlapped = _overlapped(storage, nodes, order, overlap)
    marked = set(overlapped.waits.values())
    values, buffers, totals = storage.finish()

    def step(some: Sequence[PlanNode], k: int | None = None) -> Step:
        first = some[0]
        kernel = "exchange" if k is not None and first.index in spans else kernels[id(first)]
        ops, scratch = first.ops, storage.placed(first)
        for node in some[1:] if len(some) > 1 else ():
            ops, scratch = ops + node.ops, scratch + storage.placed(node)
        if k is None:
            return Step(ops, kernel, first.here, scratch, on_host=first.on_host)
        return Step(ops, kernel, first.here, scratch, k in overlapped.steps, overlapped.waits.get(k), k in marked, first.on_host)

    planned = Plan(
        program,
        tuple([step(nodes[k:stop], j) for j, (k, stop) in enumerate(order)]),
        {b: tuple([step([node]) for node in some]) for b, some in storage.inner.items()},
        values,
        buffers,
        totals[0],
        tuple([n for n in feed_types if n in values and n not in absent]),
        tuple(fetch),
        tuple([sizes.whole(n) for n in fetch]),
        absent,
        overlapped.waits.get(len(order)),
        totals[1],
    )
    if config.verify_all():
        check_storage(planned)
    return planned, chooser.of_parts if here is chooser else chooser.of_parts + here.of_parts


def _simplified(sizes: RankSizes, outline: Outline, natively: bool | None) -> Outline:
    """The outline after rewriting. An operator that now reads other names keeps its `LocalOp`."""
    found, left = outline.simplified(sizes.types, natively)
    if sizes.here and found.renamed:
        before = {id(new): id(op) for op, new in found.renamed}
        for op in found.ops:
            if (here := sizes.here.get(before.get(id(op), -1))) is not None:
                sizes.here[id(op)] = here
    return left


def _order(nodes: Sequence[PlanNode], spans: Mapping[int, Span]) -> Iterator[Span]:
    """(first, last + 1) of the nodes that become one step: the sends and recvs of a batch are one step."""
    k = 0
    while k < len(nodes):
        stop = spans[k][1] + 1 if k in spans else k + 1
        yield k, stop
        k = stop


def _overlapped(storage: StorageAssignment, nodes: Sequence[PlanNode], order: Sequence[Span], least: int | None) -> OverlappedSteps:
    comm = storage.ctx.comm
    if comm is not None and comm.asynchronous:
        return on_stream(storage, nodes, order)
    return NOTHING if least is None else on_thread(storage, nodes, order, least)
