"""Bind a plan to arrays: it becomes a list of calls. A run only makes these calls; it looks up no name, allocates and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..._collector import collections_paused
from ...ir.dtypes import dtype_name, np_dtype
from ...ir.mapped_file import FileRange, MappedFile
from ...ir.opdef import Effect, OpDef, opdef
from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.types import TensorType
from ...ops import kernels
from ...ops.comm.collective_base import native_calls
from ...ops.data.stash import Rows
from ..context import RunContext
from ..error_text import explain, no_memory
from ..plan import allocation
from ..plan.allocation import aligned_bytes, carve, carve_strided, zeros
from ..plan.fusion import fused
from ..plan.planner import plan
from ..plan.records import Plan, Step
from ..plan.selection import Outline
from ..scope import Scope
from .bound_plan import BoundPlan
from .overlap_threads import OverlapThreads, Streams, Threads
from .plan_memory import PlanMemory
from .thread_calls import Call


@collections_paused()
def bind(planned: Plan, scope: Scope, ctx: RunContext, xp: Any = np, room: PlanMemory | None = None) -> BoundPlan:
    """Allocate the arena, or take that of a `room`, and bind every step of the plan. State variables that do not exist yet are created in
    the scope."""
    try:
        return _Binder(planned, scope, ctx, xp, room).bind()
    except MemoryError as e:
        raise no_memory(planned.program, {n: v.type for n, v in planned.values.items()}) from e


def prepare(
    program: Program,
    feed_types: Mapping[str, TensorType],
    fetch: Sequence[str],
    scope: Scope,
    ctx: RunContext,
    xp: Any = np,
    fuse: bool = True,
    overlap: int | None = None,
    outline: Outline | None = None,
) -> BoundPlan:
    """`plan` and `bind` in one. Raises the errors of `plan`."""
    device = "cpu" if xp is np else "cuda"
    planned = plan(program, feed_types, fetch, scope.arrays, ctx, device, fuse=fuse, overlap=overlap, outline=outline)
    return bind(planned, scope, ctx, xp)


class _Binder:
    def __init__(self, plan: Plan, scope: Scope, ctx: RunContext, xp: Any, room: PlanMemory | None):
        self.plan, self.scope, self.ctx, self.xp, self.room = plan, scope, ctx, xp, room
        self.arrays: dict[str, Any] = {}
        self.carved: dict[tuple[bool, int, str, tuple[int, ...]], Any] = {}
        self.private: dict[MappedFile, Any] = {}  # mappings of files that are written in this process
        # keys: is the memory that of the host (for offloaded values)?
        self.modules = {False: xp, True: np}
        self.arenas = {False: _aligned(plan.arena_bytes, xp) if room is None else room.arena, True: _aligned(plan.host_arena_bytes, np)}

    def bind(self) -> BoundPlan:
        plan = self.plan
        bound = BoundPlan(plan, self.ctx, self.xp)
        for name, v in plan.values.items():
            if plan.buffers[v.buffer].kind == "feed" and not v.view_of:
                self.arrays.setdefault(name, self._made(v.type, self.xp) if self.room is None else self.room.feed(name, v.type))
        bound.feeds = [(name, self.arrays[name]) for name in plan.feeds]
        asynchronous = self.ctx.comm is not None and self.ctx.comm.asynchronous
        threads: OverlapThreads = Streams(self.ctx.comm, bound) if asynchronous else Threads(self.ctx, bound)
        for k, step in enumerate(plan.steps):
            if step.waits_for is not None:
                threads.wait(step.op, step.waits_for)
            call = self.step(step)
            if step.overlapped:
                threads.start(k, step, call)
            elif call is not None:
                bound.compute.add(step.op, call, k)
        if plan.waits_at_end is not None:
            threads.wait(plan.steps[-1].op, plan.waits_at_end)
        for track in bound.call_lists:
            track.join()
        bound.fetches = [self.array(n) for n in plan.fetches]
        bound.arrays = self.arrays
        return bound

    # -- arrays -------------------------------------------------------------------------------------------------------------

    def array(self, name: str) -> Any:
        """The array of a value. State comes from the scope; it is created there if this plan is the first to write it."""
        a = self.arrays.get(name)
        if a is None:
            v = self.plan.values[name]
            buffer = self.plan.buffers[v.buffer]
            xp = self.modules[buffer.on_host]
            if v.strided is not None:
                base, start = self.arenas[buffer.on_host], buffer.offset
                if buffer.kind == "state":
                    base, start = self.array(buffer.name).reshape(-1).view(np.uint8), 0
                a = carve_strided(xp, base, start + v.strided.offset, v.type.shape, np_dtype(v.type.dtype), v.strided.strides)
            elif buffer.kind == "arena":
                a = self._carved(buffer.on_host, buffer.offset, v.type)
            else:
                a = self._state(name, v.type, xp) if buffer.kind == "state" else self.arrays[buffer.name]
            self.arrays[name] = a
        return a

    def _carved(self, on_host: bool, offset: int, t: TensorType) -> Any:
        """One array object for one place and type: a result in the place of an operand is the operand's own object, for which NumPy
        does not look into whether the two overlap."""
        key = on_host, offset, t.dtype, t.shape
        a = self.carved.get(key)
        if a is None:
            a = self.carved[key] = carve(self.arenas[on_host], offset, t.shape, np_dtype(t.dtype))
        return a

    @staticmethod
    def _made(t: TensorType, xp: Any) -> Any:
        return (zeros if xp is np else xp.zeros)(t.shape, np_dtype(t.dtype))

    def _state(self, name: str, t: TensorType, xp: Any) -> Any:
        a = self.scope.arrays.get(name)
        # a startup program may find the variable of another model under the same name
        if a is None or (tuple(a.shape), dtype_name(a.dtype)) != (t.shape, t.dtype):
            a = self._made(t, xp)
            self.scope.bind(name, a)
        elif (type(a) is np.ndarray) is not (xp is np):  # set before the program ran here, or by a run elsewhere
            a = a.get() if xp is np else xp.asarray(a)
            self.scope.bind(name, a)
        return a

    # -- steps --------------------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> Call | None:
        """The call of a step; None if it needs none."""
        op, definition = step.op, opdef(step.op.type)
        match step.kernel:
            case "view":
                attrs = op.attrs if step.here is None else step.here.attrs
                views = definition.views_of(self.array(op.input_arg_names[0]), self.ctx, attrs)
                self.arrays.update(zip(op.output_arg_names, views or (), strict=True))
                return None
            case "joined":
                return None
            case "control":
                assert definition.control.bind is not None
                return definition.control.bind(self, op)
            case "exchange":
                return self._exchange(step)
            case "fused":
                aside, before, _ = self._copies(step)
                stored = [n for n in step.writes if n in self.plan.values]

                def array(n: str) -> Any:
                    return aside[n, True] if (n, True) in aside else self.array(n)

                calls = fused(step.ops, stored, array, self._dtype, self._scratch(step))
                return _sequence([*before, kernels.NativeStep(calls)])
            case "nothing":
                for n in op.output_arg_names:  # a state variable is created even if it is empty
                    self.array(n)
                return None
            case "fill":
                assert step.here is not None
                flat = definition.flat_slots(op.outputs, definition.out_slots)
                return partial(_fill, [(self.array(flat[k] or ""), value) for k, value in step.here.fills])
        return self._call(step, op, definition)

    def _call(self, step: Step, op: Operator, definition: type[OpDef]) -> Call:
        """The call of an operator's kernel body, between the copies of operands into scratch and of results from scratch."""
        if (opened := self._view_of_file(step, op, definition)) is not None:
            return opened
        here, communicates = step.here, definition.effect in (Effect.COLLECTIVE, Effect.P2P)
        aside, before, after = self._copies(step)
        read = written = self.array
        if aside:
            read, written = (lambda n, reads=reads: aside[n, reads] if (n, reads) in aside else self.array(n) for reads in (True, False))
        xp, ghosts = self.modules[step.on_host], here is not None and bool(here.ghosts)
        ins, outs = definition.operands(op, read if not ghosts else lambda n: None, written)
        if here is not None and ghosts:
            ins = here.inputs(op, definition, read, lambda t: xp.broadcast_to(xp.zeros((), np_dtype(t.dtype)), t.shape))
        attrs, part = (op.attrs, None) if here is None else (here.attrs, here.part)
        call = kernels.bind(definition, xp, ins, outs, attrs, self.ctx, part, step.kernel, self._scratch(step))
        if after and communicates and self.ctx.comm.asynchronous:
            after.insert(0, partial(_finish, self.ctx.comm))
        return _sequence([*before, call, *after])

    def _view_of_file(self, step: Step, op: Operator, definition: type[OpDef]) -> Call | None:
        """The call of an operator that gives a new state variable the values of a file: the variable is a view of the file."""
        held = definition.storage.held_in_file
        if held is None or self.xp is not np or step.here is not None or not allocation.may_be_elsewhere():
            return None
        (name,), place = op.output_arg_names, held(op.attrs)
        v = self.plan.values[name]
        if place is None or self.plan.buffers[v.buffer].kind != "state" or v.strided is not None or name in self.scope.arrays:
            return None
        if place.offset % place.array.itemsize or place.array.shape != v.type.shape:
            return None
        if place.file not in self.private:
            self.private[place.file] = place.file.private()
        view = np.frombuffer(self.private[place.file], place.array.dtype, place.array.size, place.offset).reshape(v.type.shape)
        self.scope.bind(name, view)
        return _ReadAgain(place, view)

    def _dtype(self, name: str) -> str:
        """The dtype of a value, also of one that a chain does not store."""
        known = self.plan.values.get(name) or self.plan.program.global_block().descs[name]
        return known.type.dtype

    def _scratch(self, step: Step) -> list[Any]:
        """The scratch arrays of a step's kernel body."""
        return [self._carved(step.on_host, s.offset, s.type) for s in step.scratch if not s.of]

    def _copies(self, step: Step) -> tuple[dict[tuple[str, bool], Any], list[Call], list[Call]]:
        """Scratch copies of operands and results, by (name, is an operand); the calls that fill operands; the calls that copy results
        out."""
        aside: dict[tuple[str, bool], Any] = {}
        before: list[Call] = []
        after: list[Call] = []
        for s in step.scratch:
            if s.of:
                a, home, reads = self._carved(step.on_host, s.offset, s.type), self.array(s.of), s.reads
                aside[s.of, reads] = a
                (before if reads else after).append(kernels.copying(self.modules[step.on_host], *((a, home) if reads else (home, a))))
        return aside, before, after

    def _exchange(self, step: Step) -> Call:
        aside, before, _ = self._copies(step)
        sends, recvs = [], []
        for op in step.ops:
            peer = op.attrs["peer"]
            if op.output_arg_names:
                recvs.append((self.array(op.output_arg_names[0]), peer))
            else:
                name = op.input_arg_names[0]
                sends.append((aside[name, True] if (name, True) in aside else self.array(name), peer))
        calls = native_calls(self.ctx, "exchange", sends, recvs)
        exchange = partial(self.ctx.comm.exchange, sends, recvs) if calls is None else kernels.NativeStep(calls)
        return _sequence([*before, exchange])

    def rows(self, name: str) -> Rows:
        """The rows of a value."""
        array = self.array(name)
        return Rows(np if isinstance(array, np.ndarray) else self.xp, array)

    def block_runner(self, idx: int) -> Call:
        """A call that runs the operators of a sub-block in order."""
        pairs = [(self.step(s), s.op) for s in self.plan.bodies[idx]]
        return partial(_run_block, [(call, op) for call, op in pairs if call is not None])


class _ReadAgain:
    """Restores a view of a file in every run but the first, in which it has the file's values."""

    def __init__(self, place: FileRange, view: np.ndarray):
        self.place, self.view, self.is_new = place, view, True

    def __call__(self) -> None:
        if not self.is_new:
            self.place.read_into(self.view)
        self.is_new = False


def _aligned(total: int, xp: Any) -> Any:
    if xp is not np:
        return xp.empty(total, np.uint8)
    return aligned_bytes(total)


def _run_block(pairs: list[tuple[Call, Operator]]) -> None:
    at = None
    try:
        for call, at in pairs:  # noqa: B007
            call()
    except Exception as e:
        explain(at, e)


def _finish(comm: Any) -> None:
    comm.order_after(comm.mark())


def _sequence(steps: list[Call]) -> Call:
    """The calls as one call; a C call if all of them are."""
    if len(steps) == 1:
        return steps[0]
    natives = [s for s in steps if isinstance(s, kernels.NativeStep)]
    if len(natives) == len(steps):
        return kernels.NativeStep([call for s in natives for call in s.calls])
    return partial(_run_all, steps)


def _run_all(steps: list[Call]) -> None:
    for step in steps:
        step()


def _fill(pairs: list[tuple[Any, Any]]) -> None:
    for out, value in pairs:
        out[...] = value
