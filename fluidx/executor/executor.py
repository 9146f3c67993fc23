"""Executor: run a program on one device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .. import config
from ..ir.defaults import default_main_program
from ..ir.errors import ExecutionError, FeedError, explains_arguments
from ..ir.program import Program
from ..ir.types import TensorType
from . import launched_alone
from .context import RunContext
from .dynamic.segment_cache import RunBuilder, ScopedCache
from .dynamic.segmented_run import SegmentedRun, to_numpy
from .feeds import check_feed, check_fetch, check_rows, check_sizes, feed_types, fetch_names, one_feed, read_feed, sizes_of
from .places import CPUPlace, Place, array_module, as_place, using
from .plan.segments import segments
from .plan.selection import Outline
from .run.bound_plan import BoundPlan
from .run.observers import after_step, listeners, notify_listeners, settings, watchers
from .run.patched_plans import GrowingSizes
from .scope import Scope, global_scope

_MAX_PLANS = 32  # plans kept by one executor; a plan holds its buffers
_MAX_SEGMENTS = 128  # plans of segments, for programs that are cut at data-dependent sizes


class Compiled(Protocol):
    """A program with a `run_on` method of its own: fluidx.compiler.CompiledProgram."""

    def run_on(self, executor: Executor, feed: Any, fetch_list: Any, scope: Scope | None, return_numpy: bool, return_merged: bool) -> Any:
        """Run on the executor; the result is that of `Executor.run`."""


class Executor:
    """Runs programs on one device. Plans are made once per program version, feed shapes and fetch list, and reused.

    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup):
    ...     x = fx.data("x", [-1, 2], "float32")
    ...     y = fx.layers.scale(x, scale=2.0)
    >>> exe = fx.Executor(fx.CPUPlace())
    >>> exe.run(main, feed={"x": np.ones((1, 2), "float32")}, fetch_list=[y])[0].tolist()
    [[2.0, 2.0]]
    """

    @explains_arguments
    def __init__(self, place: Place | None = None):
        if place is None:
            config.device()  # an invalid FLUIDX_DEVICE raises here, though only ranks use it
        self.place = CPUPlace() if place is None else as_place(place)
        self._xp = array_module(self.place)
        self._ready: ScopedCache[BoundPlan | SegmentedRun] = ScopedCache(_MAX_PLANS)
        self._segments: ScopedCache[BoundPlan | SegmentedRun] = ScopedCache(_MAX_SEGMENTS)
        self._growing: ScopedCache[GrowingSizes] = ScopedCache(_MAX_PLANS)
        self._closed = False
        self._lock = threading.RLock()  # a plan's buffers serve one run at a time

    @explains_arguments
    def run(
        self,
        program: Program | Compiled | None = None,
        feed: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        fetch_list: Any = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = True,
        return_merged: bool = True,
        use_prune: bool = False,
    ) -> list[Any]:
        """Run the program, or a CompiledProgram, once and return the fetched values, one NumPy array each.

        `feed` maps names to arrays. Axis 0 is the batch if the variable was declared with -1. Operators whose results are not needed do
        not run. `return_numpy=False` leaves values on the device. The other arguments are fluid's and have no effect: plans are always
        cached, and each fetch gives one value. Calls from several threads wait for one another.

        Raises FeedError (a feed or fetch is missing, unknown or has a wrong shape), NotInitializedError (the startup program was not run)
        or ExecutionError (an operator failed, or FLUIDX_CHECK_NAN found a NaN). Each names the operator and the line that wrote it.
        """
        if self._closed:
            raise ExecutionError("this executor is closed; make a new one")
        program = program if program is not None else default_main_program()
        if not isinstance(program, Program) and hasattr(program, "run_on"):
            return program.run_on(self, feed, fetch_list, scope, return_numpy, return_merged)
        if not isinstance(program, Program):
            ranks = "; ParallelExecutor(t) runs what was transpiled" if hasattr(program, "get_trainer_program") else ""
            raise FeedError(f"run takes a Program, got {type(program).__name__}{ranks}")
        if program.rank is not None and program.world_size > 1:
            raise ExecutionError(
                f"{program.label()} is rank {program.rank} of {program.world_size}; run all ranks together: "
                "ParallelExecutor(transpiler, places=...)"
            )
        scope = scope or global_scope()
        if scope.newer_on_ranks is not None or scope.parent is not None:
            scope.sync()
        if scope.same_on_ranks is not None and writes_state(program):
            scope.same_on_ranks = None
        if program.readers:
            feed = read_feed(program.readers, feed)
        arrays = check_feed(program, feed if feed.__class__ is dict else one_feed(feed))
        names = fetch_names(fetch_list, program.global_block().descs)
        with self._lock, using(self.place):
            watched = settings()
            ready = self._made_ready(program, arrays, names, scope, fuse=not watched.unfused, watched=bool(watchers))
            ready.ctx.step = scope.steps.get(program, 0)
            values = ready.run(arrays, watched) if isinstance(ready, SegmentedRun) else ready.run(arrays, after_step(ready, watched))
            scope.steps[program] = ready.ctx.step + 1
            if listeners:
                notify_listeners(program.name, ready.ctx.step, names, values)
            return values if not return_numpy or self._xp is np else [to_numpy(self._xp, v) for v in values]

    def _made_ready(
        self, program: Program, arrays: Mapping[str, Any], names: list[str], scope: Scope, fuse: bool, watched: bool
    ) -> BoundPlan | SegmentedRun:
        key = (id(program), program.version, id(scope), tuple(names), sizes_of(arrays), fuse, watched)
        found = self._ready.find(key, scope)
        if found is not None:
            return found
        of_all = (*key[:4], *arrays)
        growing = self._growing.find(of_all, scope) if fuse and not watched else None
        if growing is not None and (known := growing.known(tuple([getattr(a, "shape", ()) for a in arrays.values()]))) is not None:
            return known
        launched_alone.warn_if_alone(program)
        check_fetch(program, names)
        check_sizes(program.global_block().descs, arrays)
        check_rows(program, arrays)
        types = feed_types(program, arrays)
        outline = Outline.of(program, types, names)
        ctx = RunContext(groups=dict.fromkeys(program.groups, (0,)), turns=program.turns)
        if program.groups:
            from ..comm.threads.world import ThreadWorld

            ctx.comm = ThreadWorld(1).communicator(0)
        builder = RunBuilder(scope, ctx, self._xp, fuse, self._segments)
        if fuse and not watched and (patched := self._patched(builder, outline, types, of_all, growing)) is not None:
            return patched
        return self._ready.keep(key, builder.ready(outline, types), scope, program)

    def _patched(
        self, builder: RunBuilder, outline: Outline, types: Mapping[str, Any], of_all: tuple, growing: GrowingSizes | None
    ) -> BoundPlan | None:
        """A plan by patching, if the sizes of the feeds grow from run to run."""
        if self._xp is not np or any(type(t) is not TensorType for t in types.values()) or outline.fact(segments):
            return None
        if growing is None:
            growing = self._growing.keep(of_all, builder.growing(outline, types), builder.scope, outline)
        return growing.ready(tuple([t.shape for t in types.values()]))

    def train_from_dataset(self, *args: Any, **kwargs: Any) -> Any:
        """fluid's call for its Dataset classes, which fluidx does not have. ExecutionError says what to write instead."""
        raise ExecutionError(
            "fluidx has no Dataset classes: read the files in a generator, io.DataLoader.from_generator(feed_list=...), and call run() for "
            "each batch"
        )

    infer_from_dataset = train_from_dataset

    def close(self) -> None:
        """Drop plans and their buffers; the executor cannot run afterwards."""
        self._ready.clear()
        self._segments.clear()
        self._growing.clear()
        self._closed = True


def writes_state(program: Program) -> bool:
    """Does a program write a persistable variable?"""
    known = program.notes.get(writes_state)
    if known is None or known[0] != program.version:
        writes = any(block.desc(n).persistable for block in program.blocks for op in block.oplist for n in op.output_arg_names)
        known = program.notes[writes_state] = program.version, writes
    return known[1]
