"""Segmented runs: programs with data-dependent sizes, or with values that only the host has, are planned segment by segment.

A segment is planned when its sizes are known. Between two segments runs an operator that gets host values. If it has sub-blocks, these run
as separate programs, iteration by iteration. Values that other segments read are copied from one plan to the next; state stays in place.
The plan of a segment is cached for its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir import flow
from ...ir.dtypes import np_dtype
from ...ir.errors import ExecutionError, ProgramError
from ...ir.opdef import OpDef, opdef
from ...ir.operator import Operator
from ...ir.sub_blocks import bodies
from ...ir.types import TensorType
from ...ir.valuetypes import AnyRankType, ValueType, unlike
from ...ops.shared.arrays import to_host
from ...ops.shared.types import type_of
from ..error_text import explain, site
from ..plan.records import Plan, Step, Value
from ..plan.segments import Segment
from ..plan.selection import Outline
from ..plan.sizes import by_name, with_sizes
from ..run import observers
from ..run.bound_plan import BoundPlan
from .sub_program import BodyProgram, body_program

if TYPE_CHECKING:
    from .segment_cache import RunBuilder


class SegmentedRun:
    """Runs an outline in segments."""

    def __init__(self, outline: Outline, segments: Sequence[Segment], builder: RunBuilder):
        self.program, self.fetch, self.segments, self.builder = outline.program, outline.fetch, segments, builder
        self.scope, self.ctx, self.xp = builder.scope, builder.ctx, builder.xp
        self.bodies: dict[int, BodyProgram] = {}

    def run(self, feed: Mapping[str, Any], watched: observers.ObserverSettings) -> list[Any]:
        """One run: the plans of the segments in order, and the operators between them."""
        values = dict(feed)
        for planned, host, keeps in self.segments:
            if planned is not None:
                values.update(self._run(planned, {n: values[n] for n in planned.given}, watched))
            if host is not None:
                values.update(self._call(host, values, feed, watched))
            values = {n: v for n, v in values.items() if n in keeps}
        return [_copied(self._rows(n, values[n], counted=True), self.xp) for n in self.fetch]

    def _run(self, outline: Outline, feed: Mapping[str, Any], watched: observers.ObserverSettings) -> dict[str, Any]:
        """Run a part of the program; its results, on the host."""
        block = outline.program.global_block()
        feed = {n: self._rows(n, v, counted=True) for n, v in feed.items()}
        types = {n: type_of(v) if isinstance(v, np.ndarray) else block.desc(n).type for n, v in feed.items()}
        ready = self.builder.part(outline, types)
        made = ready.run(feed, watched) if isinstance(ready, SegmentedRun) else ready.run(feed, observers.after_step(ready, watched))
        return dict(zip(outline.fetch, made if self.xp is np else [to_numpy(self.xp, v) for v in made], strict=True))

    # -- operators between plans ------------------------------------------------------------------------------------------------

    def _call(self, op: Operator, values: Mapping[str, Any], fed: Collection[str], watched: observers.ObserverSettings) -> dict[str, Any]:
        """Run an operator on host values; its results. State that it writes goes into the scope."""
        definition = opdef(op.type)
        if definition.control.bodies:
            return self._without_state(self._run_bodies(op, values, watched), fed)
        ins = {n: self._value(n, op, values) for n in op.input_arg_names}
        told = ({"ctx": self.ctx} if definition.takes_ctx else {}) | ({"part": None} if definition.takes_part else {})
        start = observers.clock()
        try:
            declared = self._types(op, ins)
            given = definition.arrange(op.inputs, value=ins.__getitem__)
            with np.errstate(all="ignore"):
                results = self._results(definition, given, {**op.attrs, **told}, declared)
            made = [(n, v if _not_array(declared[n]) else np.asarray(v)) for n, v in by_name(op, definition, results)]
        except Exception as e:
            explain(op, e)
        for n, value in made:
            self._check(op, n, declared[n], value)
        outs = dict(made)
        self._look(op, ins, outs, watched, start, observers.clock())
        return self._without_state(outs, fed)

    def _without_state(self, made: dict[str, Any], fed: Collection[str]) -> dict[str, Any]:
        """Write state into the scope; return the other values."""
        state = [n for n in made if n not in fed and (d := self.program.global_block().find(n)) is not None and d.persistable]
        for n in state:
            self._keep(n, made.pop(n))
        return made

    def _run_bodies(self, op: Operator, values: Mapping[str, Any], watched: observers.ObserverSettings) -> dict[str, Any]:
        """Run an operator with sub-blocks; its results. Each execution of a sub-block is planned with the sizes of its values at that
        time."""
        now = _CurrentValues(lambda n: self._value(n, op, values))
        found = {body.idx: body for body in bodies(op)}

        def run_block(idx: int) -> None:
            body = self.bodies.get(idx)
            if body is None:
                body = self.bodies[idx] = body_program(self.program, op, found[idx])
            made = self._run(body.outline, {n: now[n] for n in body.outline.given}, watched)
            now.update({name: made[inner] for name, inner in body.gives.items()})

        run: Any = opdef(op.type).control.run_reference
        run(op, now, run_block, self.ctx)
        made = {n: now[n] for n in flow.writes(self.program, op)}
        block = self.program.global_block()
        for n, value in made.items():
            self._check(op, n, block.desc(n).type, value)
        return made

    @staticmethod
    def _results(definition: type[OpDef], given: list[Any], told: dict[str, Any], declared: Mapping[str, ValueType]) -> Any:
        """The results of a kernel, or of a view, for these values."""
        if definition.kernel is None:
            assert definition.storage.view is not None
            return definition.storage.view(given[0], **told)
        if not definition.takes_out:
            return definition.kernel(np, *given, **told)
        if any(map(_not_array, declared.values())):  # no array to write into: the result is the operand itself
            assert definition.rewrite.identity_if is not None
            return given[0]
        outs = [np.empty(t.shape, np_dtype(t.dtype)) for t in declared.values()]
        many = len(definition.out_slots) > 1 or definition.out_slots[0].many
        definition.kernel(np, *given, out=(outs if definition.out_slots[0].many else tuple(outs)) if many else outs[0], **told)
        return outs if many else outs[0]

    def _value(self, name: str, op: Operator, values: Mapping[str, Any]) -> Any:
        if name in values:
            return self._rows(name, values[name], counted=bool(op.sub_blocks()))
        found = self.scope.arrays.get(name)
        if found is None:
            raise ProgramError(f"op {op.type} reads {name!r}, which has no value; run the startup program first{site(op)}")
        return to_host(self.xp, found)

    def _rows(self, name: str, value: Any, counted: bool = False) -> Any:
        """A value. For a stash, which plans share, the rows that are written so far; with `counted`, only if the stash does not grow."""
        rows = self.ctx.stashes.get(name)
        return value if rows is None or (counted and rows.grows) else to_host(self.xp, rows.written())

    def _types(self, op: Operator, ins: Mapping[str, Any]) -> dict[str, ValueType]:
        """The types of the results by the type rule, for the sizes of the operands."""
        definition = opdef(op.type)
        block = self.program.global_block()

        def known(name: str) -> ValueType:
            declared = block.desc(name).type
            return declared if _not_array(declared) else type_of(ins[name])

        types = definition.arrange(op.inputs, value=known)
        try:
            return dict(by_name(op, definition, self.program.infer(definition, types, op.attrs)))
        except ProgramError as e:
            raise with_sizes(e, op) from None

    def _check(self, op: Operator, name: str, declared: ValueType, value: Any) -> None:
        if why := unlike(value, declared):
            explain(op, ExecutionError(f"op {op.type} computed a value of {name!r} that does not fit its type rule: {why}"))

    def _keep(self, name: str, value: Any) -> None:
        """Write a state variable; its size may change."""
        old = self.scope.arrays.get(name)
        if old is not None and old.shape == value.shape and old.dtype == value.dtype:
            self.scope.set(name, value)
        else:
            self.scope.bind(name, _copied(value, self.xp))

    def _look(
        self, op: Operator, ins: Mapping[str, Any], outs: Mapping[str, Any], watched: observers.ObserverSettings, start: int, stop: int
    ) -> None:
        """Show the operator to observers, as a plan of one step."""
        if not (observers.watchers or watched.unfused):
            return
        ins, outs = ({n: a for n, a in side.items() if isinstance(a, np.ndarray) and a.dtype.kind != "O"} for side in (ins, outs))
        values = {n: Value(type_of(a), 0) for n, a in {**ins, **outs}.items()}
        bound = BoundPlan(Plan(self.program, (Step((op,), "host"),), {}, values, (), 0, (), (), ()), self.ctx, np)
        bound.arrays = dict(outs)
        bound.compute.add(op, _nothing, 0)
        after = observers.after_step(bound, watched)
        if after is not None:
            try:
                after(0, op, start, stop)
            except Exception as e:
                explain(op, e)


class _CurrentValues(dict[str, Any]):
    """Values while sub-blocks run. A value that no sub-block has written yet is the one from before."""

    def __init__(self, before: Callable[[str], Any]):
        super().__init__()
        self.before = before

    def __missing__(self, name: str) -> Any:
        value = self[name] = self.before(name)
        return value


def _not_array(t: ValueType) -> bool:
    """Is a value of this type not an array?"""
    return not isinstance(t, (TensorType, AnyRankType))


def to_numpy(xp: Any, value: Any) -> Any:
    """Copy a value to the host. Lists, dicts and None are on the host already."""
    return value if value is None or isinstance(value, (list, dict)) else xp.asnumpy(value)


def _copied(value: Any, xp: Any) -> Any:
    """A copy for the caller: a result may share memory with an operand."""
    if isinstance(value, list):
        return [_copied(v, np) for v in value]
    if not isinstance(value, np.ndarray):
        return dict(value) if isinstance(value, dict) else value
    return np.array(value) if value.dtype.kind == "O" else xp.asarray(np.array(value))


def _nothing() -> None:
    pass
