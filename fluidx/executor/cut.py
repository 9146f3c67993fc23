"""Runs of programs with operators whose results have sizes that values decide: planned segment by segment, each when its sizes are known.

Between two segments stands an operator that is handed values on the host. What one makes and others read is copied out of its plan and into
theirs; state stays where it is. The plan of a segment is kept for the next time that its sizes recur.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir.errors import ExecutionError, ProgramError
from ..ir.opdef import opdef
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.types import TensorType
from ..ops.shared.arrays import to_host
from ..ops.shared.types import type_of
from . import watch
from .bind import prepare
from .bound import Bound
from .context import RunContext
from .outline import Outline
from .plan import Plan, Step, Value
from .scope import Scope
from .segments import Segment
from .sizes import by_name, with_sizes
from .told import explain, site

Find = Callable[[Outline, tuple, Callable[[], Bound]], Bound]


class Cut:
    """A program in segments. `find(outline, types, make)` gives the plan of a segment that was made for such feeds, or keeps what `make`
    makes."""

    def __init__(
        self,
        program: Program,
        segments: Sequence[Segment],
        fetch: Sequence[str],
        scope: Scope,
        ctx: RunContext,
        xp: Any,
        fuse: bool,
        find: Find,
    ):
        self.program, self.segments, self.fetch, self.scope = program, segments, fetch, scope
        self.ctx, self.xp, self.fuse, self.find = ctx, xp, fuse, find

    def run(self, feed: Mapping[str, Any], watched: watch.Asked) -> list[Any]:
        """One run: the plans of the segments one after the other, and the operators between them."""
        values = dict(feed)
        for planned, host, keeps in self.segments:
            if planned is not None:
                bound = self._bound(planned, values)
                made = bound.run(values, watch.look(bound, watched))
                values.update(zip(planned.fetch, made if self.xp is np else map(self.xp.asnumpy, made), strict=True))
            if host is not None:
                values.update(self._call(host, values, feed, watched))
            values = {n: v for n, v in values.items() if n in keeps}
        return [_copied(values[n], self.xp) for n in self.fetch]

    def _bound(self, planned: Outline, values: Mapping[str, Any]) -> Bound:
        types = {n: type_of(values[n]) for n in planned.given}

        def make() -> Bound:
            return prepare(self.program, types, planned.fetch, self.scope, self.ctx, self.xp, self.fuse, outline=planned)

        return self.find(planned, tuple(types.values()), make)

    # -- operators between plans ------------------------------------------------------------------------------------------------

    def _call(self, op: Operator, values: Mapping[str, Any], fed: Collection[str], watched: watch.Asked) -> dict[str, Any]:
        """What an operator makes of values, which are the host's; state that it makes goes into the scope."""
        definition = opdef(op.type)
        ins = {n: self._value(n, op, values) for n in op.input_arg_names}
        told = {"ctx": self.ctx} if definition.takes_ctx else {}
        assert definition.kernel is not None
        start = watch.clock()
        try:
            declared = self._types(op, ins)
            given = definition.arrange(op.inputs, value=ins.__getitem__)
            with np.errstate(all="ignore"):
                results = definition.kernel(np, *given, **op.attrs, **told)
            made = [(n, np.asarray(v)) for n, v in by_name(op, definition, results)]
        except Exception as e:
            explain(op, e)
        for n, value in made:
            self._check(op, n, declared[n], value)
        outs = dict(made)
        self._look(op, ins, outs, watched, start, watch.clock())
        state = [n for n in outs if n not in fed and (d := self.program.global_block().find(n)) is not None and d.persistable]
        for n in state:
            self._keep(n, outs.pop(n))
        return outs

    def _value(self, name: str, op: Operator, values: Mapping[str, Any]) -> Any:
        if name in values:
            return values[name]
        found = self.scope.arrays.get(name)
        if found is None:
            raise ProgramError(f"op {op.type} reads {name!r}, which has no value; run the startup program first{site(op)}")
        return to_host(self.xp, found)

    def _types(self, op: Operator, ins: Mapping[str, Any]) -> dict[str, TensorType]:
        """What the type rule says of the results, from the sizes of the operands."""
        definition = opdef(op.type)
        types = definition.arrange(op.inputs, value=lambda n: type_of(ins[n]))
        try:
            return dict(by_name(op, definition, self.program.infer(definition, types, op.attrs)))
        except ProgramError as e:
            raise with_sizes(e, op) from None

    def _check(self, op: Operator, name: str, declared: TensorType, value: Any) -> None:
        if not declared.accepts(type_of(value)):
            explain(op, ExecutionError(f"op {op.type} made {type_of(value)} of {name!r}, which its type rule says is {declared}"))

    def _keep(self, name: str, value: Any) -> None:
        """Write state, which may change its sizes."""
        old = self.scope.arrays.get(name)
        if old is not None and old.shape == value.shape and old.dtype == value.dtype:
            self.scope.set(name, value)
        else:
            self.scope.bind(name, _copied(value, self.xp))

    def _look(self, op: Operator, ins: Mapping[str, Any], outs: Mapping[str, Any], watched: watch.Asked, start: int, stop: int) -> None:
        """Let whoever looks on see the operator as a plan of one step."""
        if not (watch.watchers or watched.apart):
            return
        values = {n: Value(type_of(a), 0) for n, a in {**ins, **outs}.items()}
        bound = Bound(Plan(self.program, (Step((op,), "host"),), {}, values, (), 0, (), (), ()), self.ctx, np)
        bound.arrays = dict(outs)
        bound.compute.add(op, _nothing, 0)
        after = watch.look(bound, watched)
        if after is not None:
            try:
                after(0, op, start, stop)
            except Exception as e:
                explain(op, e)


def _copied(value: Any, xp: Any) -> Any:
    """A value of the caller's own: a result may be part of an operand."""
    return xp.asarray(np.array(value)) if isinstance(value, np.ndarray) else value


def _nothing() -> None:
    pass
