"""Compile a program once, for one set of feed shapes and fetches, into a flat list of calls over preallocated buffers.

Walking a plan looks nothing up by name, allocates nothing and decides nothing. Lifetimes, views and in-place results are
worked out here, on `shadow` arrays that have shapes and strides but share one dummy buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np

from ..comm.base import CommError
from ..ir import flow
from ..ir.batches import forwarded, spans
from ..ir.bodies import bodies
from ..ir.dtypes import np_dtype
from ..ir.errors import ExecutionError, FeedError, FluidxError, NotInitializedError, ProgramError, nearest
from ..ir.opdef import Effect, OpDef, opdef
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.types import TensorType, show_placement
from .context import RunContext
from .feeds import dtype_name
from .local import Here, Locals, takes
from .memory import Interval, assign, carve
from .scope import Scope
from .streams import Access
from .streams import waits as stream_waits

Step = Callable[[], Any]
_FOREVER = 1 << 60


@dataclass(eq=False)
class _Root:
    """One piece of storage, shared by a value and its views."""

    kind: str  # "temp", "feed" or "state"
    nbytes: int
    start: int
    stop: int
    offset: int = 0
    aliases: list[str] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


@dataclass
class _Node:
    """An operator with what was decided about it."""

    op: Operator
    definition: type[OpDef]
    index: int
    view: bool = False
    scratch: tuple[str, ...] = ()  # outputs that are computed aside and copied, because storage overlaps an input
    here: Here | None = None  # what it does on this rank, where that is not what it says

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.op.attrs if self.here is None else self.here.attrs


class Plan:
    """What `Executor.run` walks: `steps` are calls without arguments, `step_ops` the operators they came from."""

    def __init__(self, program: Program, ctx: RunContext, xp: Any):
        self.program = program
        self.ctx = ctx
        self.xp = xp
        self.feeds: list[tuple[str, Any]] = []
        self.steps: list[Step] = []
        self.step_ops: list[Operator] = []
        self.arrays: dict[str, Any] = {}
        self.fetches: list[Any] = []
        self.fetch_types: list[TensorType] = []  # of the whole values, wherever their parts lie
        self.absent: Container[str] = ()  # values that other ranks hold and this one does not
        self.arena_bytes = 0
        self._rest: Iterator[Step] = iter(())

    def run(self, feed: Mapping[str, Any]) -> list[Any]:
        """Copy the feeds in, make every call, copy the fetches out."""
        for name, buffer in self.feeds:
            value = feed[name]
            if type(buffer) is np.ndarray:
                np.copyto(buffer, value)
            else:
                buffer.set(np.ascontiguousarray(value))
        self._rest = rest = iter(self.steps)
        try:
            with np.errstate(all="ignore"):  # overflow and 0/0 are values; FLUIDX_CHECK_NAN finds where they come from
                for step in rest:
                    step()
        except Exception as e:
            _explain(self.running(), e)
        return [f.copy() for f in self.fetches]

    def run_watched(self, feed: Mapping[str, Any], after: Callable[[int, Operator], None]) -> list[Any]:
        """`run`, with `after(i, op)` called behind every step: for traces and NaN checks."""
        steps = self.steps

        def watched(i: int) -> None:
            steps[i]()
            after(i, self.step_ops[i])

        self.steps = [partial(watched, i) for i in range(len(steps))]
        try:
            return self.run(feed)
        finally:
            self.steps = steps

    def running(self) -> Operator | None:
        """The operator that the latest run has come to; None before the first."""
        at = len(self.steps) - operator.length_hint(self._rest) - 1
        return self.step_ops[at] if 0 <= at < len(self.step_ops) else None


def _explain(op: Operator | None, error: Exception) -> NoReturn:
    """Raise `error` as one that names the operator and the user's line."""
    if op is None or (isinstance(error, ExecutionError) and error.operator is not None):
        raise error
    text = told_as(error)
    what = text if isinstance(error, ExecutionError) and text.startswith(f"op {op.type}") else f"op {op.type} failed: {text}"
    told = ExecutionError(f"{what}{where(op)}")
    told.operator = op
    raise told from error


def told_as(error: BaseException) -> str:
    """The error's text; with its type in front where the text was not written for fluidx's users."""
    if isinstance(error, (FluidxError, CommError)):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def where(op: Operator | None) -> str:
    """Lines that show an operator and the user's line; nothing for None."""
    return "" if op is None else f"\n  in {op.to_string()}{_site(op)}"


def _site(op: Operator) -> str:
    return f"\n  written at {op.site}" if op.site else ""


def compile_plan(
    program: Program,
    feed_types: Mapping[str, TensorType],
    fetch: Sequence[str],
    scope: Scope,
    ctx: RunContext,
    xp: Any = np,
) -> Plan:
    """Plan `program` for feeds of these types, which are those of the whole values, as in the program; of a rank program it is one
    rank's part that is planned and run. Raises FeedError, NotInitializedError or ProgramError before anything runs.
    """
    return _Planner(program, feed_types, fetch, scope, ctx, xp).compile()


class _Planner:
    def __init__(
        self, program: Program, feed_types: Mapping[str, TensorType], fetch: Sequence[str], scope: Scope, ctx: RunContext, xp: Any
    ):
        self.program, self.feed_types, self.fetch, self.scope, self.ctx, self.xp = program, feed_types, fetch, scope, ctx, xp
        self.block = program.global_block()
        self.nested = len(program.blocks) > 1
        self.local = Locals.of(program, ctx)
        self.types: dict[str, TensorType] = {}  # of what lies on this rank
        self.here: dict[int, Here] = {}  # by id of the operator
        self.roots: dict[str, _Root] = {}
        self.shadow: dict[str, np.ndarray] = {}
        self.last: dict[str, int] = {}
        self.writers: dict[str, list[int]] = {}
        self.nodes: list[_Node] = []
        self.inner: dict[int, list[_Node]] = {}
        self.arrays: dict[str, Any] = {}
        self.spans: dict[int, tuple[int, int]] = {}

    def compile(self) -> Plan:
        ops = self.live_ops()
        self.check_feeds(ops)
        self.find_spans(ops)
        size = self.infer(ops)
        self.lifetimes(ops)
        self.dummy = np.empty(max(size, 1), np.uint8)
        for name in self.feed_types:
            if name in self.types:
                self.new_root(name, "feed", -1, _FOREVER)
        for i, op in enumerate(ops):
            self.nodes.append(self.place(i, op))
        return self.bind()

    # -- which operators run ------------------------------------------------------------------------------------------------

    def bodies(self, op: Operator) -> Iterable[int]:
        """The sub-blocks that an operator runs."""
        return op.sub_blocks() if self.nested else ()

    def real_reads(self, op: Operator) -> Iterable[str]:
        """What an operator reads, without that of which it reads the shape only; once the types are known."""
        here = self.here.get(id(op)) if self.here else None
        return flow.reads(self.program, op) if here is None or not here.ghosts else here.real_inputs(op, opdef(op.type))

    def live_ops(self) -> list[Operator]:
        """Operators that a fetch, a persistable variable or an effect needs. A value that is fed is not computed."""
        descs = self.block.descs

        def keep(op: Operator) -> bool:
            if flow.acts(self.program, op):
                return True
            return any((d := descs.get(n)) is not None and d.persistable for n in flow.writes(self.program, op))

        given = {n for n in self.feed_types if (d := descs.get(n)) is not None and not d.is_data}
        return flow.live_ops(self.program, self.fetch, keep, given)

    def check_feeds(self, ops: list[Operator]) -> None:
        data = {n: d for n, d in self.block.descs.items() if d.is_data}
        for name in self.feed_types:
            if name not in self.block.descs:
                raise FeedError(f"feed names {name!r}, which {self.program.label()} does not declare; {nearest(name, data, 'it takes')}")
        for op in ops:
            for n in flow.reads(self.program, op):
                if n in data and n not in self.feed_types:
                    raise FeedError(f"feed is missing variable {n!r} ({data[n].type}), which op {op.type} reads{_site(op)}")
        for n in self.fetch:
            if n in data and n not in self.feed_types:
                raise FeedError(f"feed is missing variable {n!r} ({data[n].type}), which is fetched")

    def find_spans(self, ops: list[Operator]) -> None:
        """Fill `spans`: (first, last) of the neighbouring sends and receives that start together."""
        self.spans = spans(ops)
        for span in sorted(set(self.spans.values())):
            if (op := forwarded(ops, span)) is not None:
                raise ProgramError(
                    f"op {op.type} sends {op.input_arg_names[0]!r}, which another operator of batch {op.attrs['batch']!r} receives; "
                    f"give it a batch of its own{where(op)}"
                )

    def lifetimes(self, ops: list[Operator]) -> None:
        for i, op in enumerate(ops):
            last = self.spans.get(i, (i, i))[1]  # what a batch sends is read until the whole batch is through
            written = flow.writes(self.program, op)
            for n in (*self.real_reads(op), *written):
                self.last[n] = last
            for n in written:
                self.writers.setdefault(n, []).append(i)
        for n in self.fetch:
            self.last[n] = _FOREVER

    # -- types with every size known ----------------------------------------------------------------------------------------

    def infer(self, ops: list[Operator]) -> int:
        """Fill `types`; return the largest number of bytes of one value."""
        for n, t in self.feed_types.items():
            self.define(n, t)
        uninitialized: list[str] = []
        self._infer_ops(ops, uninitialized)
        for n in self.fetch:
            if n not in self.types:
                self.known(n, None, uninitialized)
        if uninitialized:
            names = list(dict.fromkeys(uninitialized))
            listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise NotInitializedError(
                f"{listed} {'has' if len(names) == 1 else 'have'} no value in this scope; run the startup program first: "
                "exe.run(startup), or run_startup() on many ranks"
            )
        return max((t.nbytes for t in self.types.values()), default=1)

    def define(self, name: str, whole: TensorType) -> None:
        """Give a value its type, from that of the whole value."""
        if self.local is not None and name in self.local.places:
            self.local.wholes[name] = whole
            self.types[name] = self.local.type_of(name, whole)
        else:
            self.types[name] = whole

    def whole(self, name: str) -> TensorType:
        """The type of the whole value, of which a rank may hold a part."""
        t = self.local.wholes.get(name) if self.local is not None else None
        return t or self.types[name]

    def _elsewhere(self, name: str) -> bool:
        """Do only other ranks hold anything of the value?"""
        return self.local is not None and name not in self.scope.arrays and self.local.nothing_of(name)

    def known(self, name: str, op: Operator | None, uninitialized: list[str]) -> TensorType:
        """The type of what lies here of a value that is read."""
        t = self.types.get(name)
        if t is not None:
            return t
        d = self.block.find(name)
        if d is not None and self._elsewhere(name) and d.type.numel >= 0:
            self.define(name, d.type)  # what a broadcast from another rank is given here, say: it is not looked at
            return self.types[name]
        if d is not None and d.persistable:
            whole, want = d.type, d.type
            found = self.scope.arrays.get(name)
            have = None if found is None else TensorType(dtype_name(found.dtype), tuple(found.shape))
            if self.local is not None and name in self.local.places:
                whole = whole if have is None else self.local.state_type(name, whole, have)
                want = self.local.type_of(name, whole)
            if have is None:
                uninitialized.append(name)
            elif not want.accepts(have):
                part = "" if want == whole else f" on this rank, its part of {d.type}"
                raise FeedError(f"variable {name!r} is declared {want}{part}, this scope holds {have}; run the startup program again")
            self.define(name, whole if have is None or want is not whole else have)
            return self.types[name]
        if op is None:
            raise ProgramError(f"variable {name!r} has no value to fetch: no operator defines it")
        raise ProgramError(f"op {op.type} reads {name!r} before any operator defines it{_site(op)}")

    def _infer_ops(self, ops: Sequence[Operator], uninitialized: list[str]) -> None:
        for op in ops:
            definition = opdef(op.type)
            if self.bodies(op):
                for b in self.bodies(op):
                    self._infer_ops(self.program.blocks[b].oplist, uninitialized)
                handed = {body.attr: body.results(op) for body in bodies(op) if body.results_attr}
                for k, n in enumerate(op.output_arg_names if handed else ()):
                    made = {attr: self.known(names[k], op, uninitialized) for attr, names in handed.items()}
                    if len(set(made.values())) > 1:
                        found = " and ".join(f"{t} in {attr}" for attr, t in made.items())
                        raise ProgramError(f"op {op.type}: {n!r} is {found}{_site(op)}")
                    self.define(n, self.whole(next(iter(handed.values()))[k]))
                for n in op.input_arg_names:
                    self.known(n, op, uninitialized)
                continue
            ins = {slot: [self.known(n, op, uninitialized) for n in names] for slot, names in op.inputs.items()}
            if self.local is not None and self.local.touches(op):
                self._infer_placed(self.local, op, definition, ins)
                continue
            for n, t in self._results(op, definition, ins):
                old = self.types.get(n)
                if old is not None and old != t:
                    raise ProgramError(f"op {op.type} writes {t} into {n!r}, which holds {old}{_site(op)}")
                self.types[n] = t

    @staticmethod
    def _results(op: Operator, definition: type[OpDef], ins: Mapping[str, list[TensorType]]) -> list[tuple[str, TensorType]]:
        try:
            results = definition.infer_outputs(ins, op.attrs)
        except ProgramError as e:
            raise ProgramError(f"{e}\n  in op {op.type}, with the sizes that were fed{_site(op)}") from None
        out: list[tuple[str, TensorType]] = []
        for slot, result in zip(definition.out_slots, results, strict=True):
            out += zip(op.outputs.get(slot.name, ()), result if slot.many else [result], strict=False)
        return out

    def _infer_placed(self, local: Locals, op: Operator, definition: type[OpDef], ins: Mapping[str, list[TensorType]]) -> None:
        """Types of results that lie somewhere. The rule is asked about whole values, or about what lies here where that is all there is."""
        if local.speaks_locally(op, definition):
            for n, t in self._results(op, definition, ins):
                self._define_part(local, op, n, t)
        else:
            wholes = {slot: [self.whole(n) for n in names] for slot, names in op.inputs.items()}
            for n, t in self._results(op, definition, wholes):
                if n in self.types and self.whole(n) != t:
                    raise ProgramError(f"op {op.type} writes {t} into {n!r}, which holds {self.whole(n)}{_site(op)}")
                self.define(n, t)
        here = local.look(op, definition, self.types)
        if here is not None:
            self.here[id(op)] = here

    def _define_part(self, local: Locals, op: Operator, name: str, t: TensorType) -> None:
        """Give a value its type from that of the part that lies here."""
        if name in local.own or name not in local.places:
            if self.types.get(name, t) != t:
                raise ProgramError(f"op {op.type} writes {t} into {name!r}, which holds {self.types[name]}{_site(op)}")
            self.types[name] = t
            return
        if name not in self.types:
            self.define(name, local.descs[name].type)
        if self.types[name] != t:
            raise ProgramError(
                f"op {op.type} writes {t} into {name!r}, of which {self.types[name]} lies here: it is {self.whole(name)} "
                f"{show_placement(local.places[name])}{_site(op)}"
            )

    # -- storage ----------------------------------------------------------------------------------------------------------

    def fake(self, t: TensorType) -> np.ndarray:
        return np.ndarray(t.shape, np_dtype(t.dtype), buffer=self.dummy)

    def new_root(self, name: str, kind: str, start: int, stop: int) -> _Root:
        t = self.types[name]
        start = self.spans.get(start, (start, start))[0]
        root = _Root(kind, t.nbytes, start, stop, aliases=[name], writes=[start])
        self.roots[name], self.shadow[name] = root, self.fake(t)
        return root

    def root(self, name: str, i: int) -> _Root:
        r = self.roots.get(name)
        if r is not None:
            return r
        if self._elsewhere(name):
            return self.new_root(name, "temp", i, self.last.get(name, i))
        return self.new_root(name, "state", -1, _FOREVER)  # first touched here: persistable state

    def is_state(self, name: str) -> bool:
        d = self.block.find(name)
        return d is not None and d.persistable

    def place(self, i: int, op: Operator, inner: bool = False) -> _Node:
        """Decide where the outputs of operator `i` live."""
        definition = opdef(op.type)
        here = self.here.get(id(op)) if self.here else None
        node = _Node(op, definition, i, here=here)
        read = op.input_arg_names if here is None or not here.ghosts else here.real_inputs(op, definition)
        for n in read:
            self.root(n, i)
        for b in self.bodies(op):
            self.inner[b] = [self.place(i, o, inner=True) for o in self.program.blocks[b].oplist]
        outs = op.output_arg_names
        fixed = [n for n in outs if n in self.roots or self.is_state(n)]
        views = definition.view is not None or definition.view_ctx is not None
        if views and not fixed and len(outs) == 1 and not inner and self._try_view(node, outs[0]):
            return node
        ins = [(n, self.roots[n]) for n in read]
        pairs = dict(self._inplace_pairs(op, definition))
        scratch = []
        for name in outs:
            if name in self.roots or self.is_state(name):
                root = self.root(name, i)
                # written where an input is read: fine only if the op says so for exactly this pair
                clash = [n for n, r in ins if r is root and not (pairs.get(name) == n and n == name)]
                if clash and not self.bodies(op):
                    scratch.append(name)
                root.writes.append(i)
                root.stop = max(root.stop, self.last.get(name, i))
                continue
            source = pairs.get(name)
            if source is not None and not inner and self._may_take(source, name, i, ins):
                root = self.roots[source]
                root.aliases.append(name)
                root.writes.append(i)
                root.stop = self.last.get(name, i)
                self.roots[name], self.shadow[name] = root, self.fake(self.types[name])
                continue
            # values of a loop body live as long as the loop's operator
            self.new_root(name, "temp", i, max(self.last.get(name, i), i))
        node.scratch = tuple(scratch)
        return node

    @staticmethod
    def _inplace_pairs(op: Operator, definition: type[OpDef]) -> list[tuple[str, str]]:
        out = []
        for a, b in definition.inplace:
            if op.inputs.get(a) and op.outputs.get(b):
                out.append((op.outputs[b][0], op.inputs[a][0]))
        return out

    def _may_take(self, source: str, name: str, i: int, ins: list[tuple[str, _Root]]) -> bool:
        root, a = self.roots[source], self.shadow[source]
        return (
            root.kind == "temp"
            and root.stop <= i
            and self.types[source] == self.types[name]
            and a.nbytes == root.nbytes
            and a.flags.c_contiguous
            and all(r is not root or n == source for n, r in ins)
        )

    def _try_view(self, node: _Node, out: str) -> bool:
        op, i = node.op, node.index
        source = op.input_arg_names[0]
        root, stop = self.roots[source], self.last.get(out, node.index)
        if self._later_writes(root, i, stop) or any(w > i for w in self.writers.get(out, ())):
            return False  # one of the two names gets a value of its own while the other is in use
        shadow = node.definition.view_of(self.shadow[source], self.ctx, node.attrs)
        if shadow is None or (shadow.shape, dtype_name(shadow.dtype)) != (self.types[out].shape, self.types[out].dtype):
            return False
        root.aliases.append(out)
        root.stop = max(root.stop, stop)
        self.roots[out], self.shadow[out] = root, shadow
        node.view = True
        return True

    def _later_writes(self, root: _Root, i: int, stop: int) -> bool:
        """Is the storage overwritten by name between operator `i` and `stop`? In-place results never are while a view is alive."""
        return any(i < w <= stop for n in root.aliases for w in self.writers.get(n, ()))

    # -- binding ------------------------------------------------------------------------------------------------------------

    def bind(self) -> Plan:
        plan = Plan(self.program, self.ctx, self.xp)
        waits = self._waits() if self.ctx.comm is not None and self.ctx.comm.asynchronous else {}
        temps = list({id(r): r for r in self.roots.values() if r.kind == "temp"}.values())
        offsets, total = assign([Interval(r.nbytes, r.start, r.stop) for r in temps])
        for r, offset in zip(temps, offsets, strict=True):
            r.offset = offset
        self.arena = self._arena(total)
        plan.arena_bytes = total
        for name in self.feed_types:
            if name in self.roots:
                self.arrays[name] = self.xp.empty(self.types[name].shape, np_dtype(self.types[name].dtype))
                if self.local is None or name not in self.local.absent:
                    plan.feeds.append((name, self.arrays[name]))
        marks: dict[int, Any] = {}
        waited = set(waits.values())
        for k, stop in self._order():
            node = self.nodes[k]
            if k in waits:
                self._emit(plan, node.op, partial(_wait, self.ctx.comm, marks, waits[k]))
            step = self._exchange(self.nodes[k:stop]) if k in self.spans else self._step(node)
            if step is not None:
                self._emit(plan, node.op, step)
            if k in waited:
                self._emit(plan, node.op, partial(_mark, self.ctx.comm, marks, k))
        if len(self.nodes) in waits:
            self._emit(plan, self.nodes[-1].op, partial(_wait, self.ctx.comm, marks, waits[len(self.nodes)]))
        plan.fetches = [self.array(n) for n in self.fetch]
        plan.fetch_types = [self.whole(n) for n in self.fetch]
        plan.arrays = self.arrays
        if self.local is not None:
            plan.absent = self.local.absent
        return plan

    def _order(self) -> Iterator[tuple[int, int]]:
        """(first, last + 1) of the nodes that become one step each: sends and recvs of one batch go together."""
        k = 0
        while k < len(self.nodes):
            stop = self.spans[k][1] + 1 if k in self.spans else k + 1
            yield k, stop
            k = stop

    def _waits(self) -> dict[int, int]:
        """Node before which to wait -> communication node to wait for, when communication has a stream of its own.

        Storage that is being sent or received stays taken until the wait.
        """
        order = list(self._order())
        accesses = []
        for k, stop in order:
            nodes = self.nodes[k:stop]
            read = [n for node in nodes for n in self.real_reads(node.op)]
            written = [n for node in nodes if not node.view for n in flow.writes(self.program, node.op)]
            reads: frozenset[Any] = frozenset(id(self.roots[n]) for n in read if n in self.roots)
            writes: frozenset[Any] = frozenset(id(self.roots[n]) for n in written if n in self.roots)
            accesses.append(Access(reads, writes, nodes[0].definition.effect in (Effect.COLLECTIVE, Effect.P2P)))
        by_id: dict[Any, _Root] = {id(r): r for r in self.roots.values()}
        out = {}
        for j, met in stream_waits(accesses).items():
            at = order[j][0] if j < len(order) else len(self.nodes)
            out[at] = order[met[-1]][0]
            for i in met:
                for r in accesses[i].reads | accesses[i].writes:
                    by_id[r].stop = max(by_id[r].stop, at)
        return out

    @staticmethod
    def _emit(plan: Plan, op: Operator, step: Step) -> None:
        plan.steps.append(step)
        plan.step_ops.append(op)

    def _arena(self, total: int) -> Any:
        if self.xp is not np:
            return self.xp.empty(total, np.uint8)
        raw = np.empty(total + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + total]

    def array(self, name: str) -> Any:
        """The array of a value; state comes from the scope, made there when this plan is the first to write it."""
        a = self.arrays.get(name)
        if a is not None:
            return a
        t = self.types.get(name)
        d = self.block.find(name)
        root = self.roots.get(name)
        if root is not None and root.kind == "temp":
            assert t is not None
            a = carve(self.arena, root.offset, t.shape, np_dtype(t.dtype))
        elif d is not None and d.persistable:
            a = self.scope.arrays.get(name)
            # a startup program may find the variable of another model under the same name
            if a is None or (t is not None and (tuple(a.shape), dtype_name(a.dtype)) != (t.shape, t.dtype)):
                t = t or d.type
                a = self.xp.zeros(t.shape, np_dtype(t.dtype))
                self.scope.bind(name, a)
            elif (type(a) is np.ndarray) is not (self.xp is np):  # set before the program ran here, or by a run elsewhere
                a = a.get() if self.xp is np else self.xp.asarray(a)
                self.scope.bind(name, a)
        else:
            raise ProgramError(f"variable {name!r} has no value to fetch: no operator that runs defines it")
        self.arrays[name] = a
        return a

    def _slots(self, slots: Mapping[str, tuple[str, ...]], which: Any, definition: type[OpDef], get: Callable[[str], Any]) -> list[Any]:
        return definition.arrange({s: [get(n) for n in names] for s, names in slots.items()}, which)

    def _exchange(self, nodes: list[_Node]) -> Step:
        before: list[Step] = []
        sends, recvs = [], []
        for node in nodes:
            peer = node.op.attrs["peer"]
            if node.op.type == "send":
                sends.append((self._tight(self.array(node.op.input_arg_names[0]), before), peer))
            else:
                recvs.append((self.array(node.op.output_arg_names[0]), peer))
        exchange = partial(self.ctx.comm.exchange, sends, recvs)
        return partial(_sequence, [*before, exchange]) if before else exchange

    def _tight(self, a: Any, before: list[Step]) -> Any:
        """`a`, or a contiguous array that a step put on `before` fills with it."""
        if a.flags.c_contiguous:
            return a
        tight = self.xp.empty(a.shape, a.dtype)
        before.append(partial(_copy, self.xp, tight, a))
        return tight

    def _step(self, node: _Node) -> Step | None:
        op, definition, xp = node.op, node.definition, self.xp
        if node.view:
            source, out = op.input_arg_names[0], op.output_arg_names[0]
            self.arrays[out] = definition.view_of(self.array(source), self.ctx, node.attrs)
            return None
        if self.bodies(op):
            return definition.bind_control(self, op)  # type: ignore[attr-defined]
        here = node.here
        if here is not None and here.skip:
            for n in op.output_arg_names:  # state is made even where it is empty
                self.array(n)
            return None
        before: list[Step] = []
        after: list[Step] = []

        def get_in(name: str) -> Any:
            a = self.array(name)
            return self._tight(a, before) if definition.effect in (Effect.COLLECTIVE, Effect.P2P) else a

        def get_out(name: str) -> Any:
            a = self.array(name)
            if name in node.scratch:
                aside = xp.empty(a.shape, a.dtype)
                after.append(partial(_copy, xp, a, aside))
                return aside
            return a

        if here is not None and here.fills:
            flat = definition.flat_slots(op.outputs, definition.out_slots)
            return partial(_fill, [(self.array(flat[k] or ""), value) for k, value in here.fills])
        if here is not None and here.ghosts:
            ins = self._with_ghosts(op, definition, here, get_in)
        else:
            ins = self._slots(op.inputs, definition.in_slots, definition, get_in)
        outs = self._slots(op.outputs, definition.out_slots, definition, get_out)
        main = _call(xp, definition, op, ins, outs, self.ctx, here)
        if not before and not after:
            return main
        if after and definition.effect in (Effect.COLLECTIVE, Effect.P2P) and self.ctx.comm.asynchronous:
            after.insert(0, partial(_finish, self.ctx.comm))
        return partial(_sequence, [*before, *([main] if main else []), *after])

    def _with_ghosts(self, op: Operator, definition: type[OpDef], here: Here, get: Callable[[str], Any]) -> list[Any]:
        """The inputs, with arrays that have nothing but a shape where only that is read and another one lies here."""
        k, given = 0, {}
        for slot in definition.in_slots:
            names = op.inputs.get(slot.name, ())
            given[slot.name] = [self._ghost(here.ghosts[j]) if j in here.ghosts else get(n) for j, n in enumerate(names, k)]
            k += len(names) if slot.many else 1
        return definition.arrange(given, definition.in_slots)

    def _ghost(self, t: TensorType) -> Any:
        return self.xp.broadcast_to(self.xp.zeros((), np_dtype(t.dtype)), t.shape)

    def block_runner(self, idx: int) -> Step:
        """A call that runs the operators of a sub-block in order."""
        pairs = [(self._step(n), n.op) for n in self.inner[idx]]
        return partial(_run_block, [(step, op) for step, op in pairs if step is not None])


def _run_block(pairs: list[tuple[Step, Operator]]) -> None:
    at = None
    try:
        for step, at in pairs:  # noqa: B007
            step()
    except Exception as e:
        _explain(at, e)


def _mark(comm: Any, marks: dict[int, Any], k: int) -> None:
    marks[k] = comm.mark()


def _wait(comm: Any, marks: dict[int, Any], k: int) -> None:
    comm.order_after(marks[k])


def _finish(comm: Any) -> None:
    comm.order_after(comm.mark())


def _sequence(steps: list[Step]) -> None:
    for step in steps:
        step()


def _copy(xp: Any, out: Any, x: Any) -> None:
    if xp is np:
        np.copyto(out, x, casting="unsafe")
    else:
        out[...] = x


def _fill(pairs: list[tuple[Any, Any]]) -> None:
    for out, value in pairs:
        out[...] = value


def _call(
    xp: Any, definition: type[OpDef], op: Operator, ins: list[Any], outs: list[Any], ctx: RunContext, here: Here | None = None
) -> Step | None:
    """Bind one operator: its own `bind`, or its kernel with every argument in place."""
    attrs, part = (op.attrs, None) if here is None else (here.attrs, here.part)
    if definition.bind is not None:
        told = {"part": part} if part is not None and takes(definition.bind, "part") else {}
        step = definition.bind(xp, ins, outs, attrs, ctx, **told)
        if step is not None:
            return step
    if definition.kernel is None:
        if definition.view is None:
            raise ProgramError(f"op {op.type} has no kernel for {getattr(xp, '__name__', xp)}")
        return partial(_copy_view, xp, outs[0], partial(definition.view_of, ins[0], ctx, attrs))
    kwargs = dict(attrs)
    if definition.takes_ctx:
        kwargs["ctx"] = ctx
    if definition.takes_part:
        kwargs["part"] = part
    if definition.takes_out:
        return partial(definition.kernel, xp, *ins, out=outs[0] if len(outs) == 1 else tuple(outs), **kwargs)
    return partial(_copy_results, xp, partial(definition.kernel, xp, *ins, **kwargs), outs)


def _copy_view(xp: Any, out: Any, view: Step) -> None:
    _copy(xp, out, view())


def _copy_results(xp: Any, kernel: Step, outs: list[Any]) -> None:
    results = kernel()
    if len(outs) == 1 and not isinstance(results, tuple):
        results = (results,)
    for out, result in zip(outs, results, strict=True):
        if isinstance(out, list):
            for o, r in zip(out, result, strict=True):
                _copy(xp, o, r)
        elif out is not None:
            _copy(xp, out, result)
