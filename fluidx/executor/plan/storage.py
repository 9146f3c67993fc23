"""Storage assignment: which values share storage, because one is a view of the other or overwrites it in place, and for how long.

Ops make their views on shadow arrays, which have shapes and strides and share one dummy buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from ...ir.dtypes import HALVES, dtype_name, np_dtype
from ...ir.errors import ProgramError
from ...ir.memory_spaces import on_host, runs_on_host
from ...ir.opdef import Effect, OpDef, opdef
from ...ir.operator import Operator
from ...ir.types import TensorType
from ...ops.kernels import KernelBody, wide_type
from ..context import RunContext
from .allocation import Interval, assign
from .in_place_assembly import may_assemble
from .liveness import FOREVER, Liveness, nested, times
from .rank_view import LocalOp
from .records import Buffer, Scratch, StridedView, Value
from .selection import Outline
from .shadows import Shadows
from .sizes import RankSizes
from .strided_results import Destination, Readers, start_of

COMMUNICATES = (Effect.COLLECTIVE, Effect.P2P)

Unit = tuple[Operator, ...]  # one operator, or a chain


class _Shadows(dict[str, np.ndarray]):
    """Shadow arrays by name. That of a value that is no view is contiguous, and made when it is first read."""

    def __init__(self, shadows: Shadows, types: Mapping[str, TensorType]):
        self.shadows, self.types = shadows, types

    def __missing__(self, name: str) -> np.ndarray:
        a = self[name] = self.shadows.of(self.types[name])
        return a


@dataclass(eq=False, slots=True)
class Root(Interval):
    """One piece of storage, shared by a value and its views."""

    kind: str  # as in Buffer
    aliases: list[str] = field(default_factory=list)
    number: int = -1  # of the buffer that it becomes
    offset: int = 0  # in the arena
    on_host: bool = False


@dataclass(eq=False, slots=True)
class UnplacedScratch:
    """Scratch of one operator, before it has an offset."""

    type: TensorType
    root: Root
    of: str  # as in Scratch
    reads: bool


@dataclass(eq=False, slots=True)
class PlanNode:
    """A step while it is planned: an operator that runs, or a chain, with the decisions so far."""

    ops: tuple[Operator, ...]
    definition: type[OpDef]
    index: float  # an integer for a unit, a fraction in a sub-block
    here: LocalOp | None = None  # the operator as this rank runs it, if that differs
    made: str = ""  # "view" or "joined" (see Step): no call is needed for the results
    on_host: bool = False
    scratch: list[UnplacedScratch] = field(default_factory=list)

    @property
    def op(self) -> Operator:
        return self.ops[0]


class _View(NamedTuple):
    """A view of a shadow array: its shadow, and its offset in bytes. `is_recorded`: the plan gives its offset and strides."""

    shadow: np.ndarray
    offset: int
    is_recorded: bool


class StorageAssignment:
    """Assigns storage to the results of units (operators or chains), one after the other: `place(i, unit)`, then `finish()`."""

    def __init__(self, sizes: RankSizes, shadows: Shadows, ctx: RunContext, outline: Outline, lives: Liveness):
        self.sizes, self.shadows, self.ctx = sizes, shadows, ctx
        self.state, self.pairs = outline.fact(_state), outline.fact(_in_place)
        self.on_host = on_host(outline.program)
        self.spans: Mapping[Any, tuple[int, int]] = lives.spans
        self.last, self.writers = lives.last, dict(lives.writers)
        self.types, self.program = sizes.types, sizes.program
        self.roots: dict[str, Root] = {}
        self.shadow = _Shadows(shadows, sizes.types)
        self.view_of: dict[str, str] = {}
        self.strided: dict[str, StridedView] = {}
        self._nbytes: dict[int, int] = {}  # by the id of a type
        self._views: dict[tuple, list[_View] | None] = {}  # by op, and by the ids of attributes, operand and types, which the plan has
        self.starts: dict[str, int] = {}  # byte offset of a value in its storage, if it is not 0
        self.inside: dict[int, set[int]] = {}  # operator id -> numbers of the operands that are written inside the operator's result
        self.nodes: list[PlanNode] = []
        self.inner: dict[int, list[PlanNode]] = {}
        self.all_scratch: list[UnplacedScratch] = []
        self.halves = any(t.dtype in HALVES for t in self.types.values())
        self.outline = outline
        self.readers = Readers(sizes, shadows, ctx, outline, self._is_made_once, partial(may_assemble, self))

    # -- roots --------------------------------------------------------------------------------------------------------------

    def new_root(self, name: str, kind: str, start: float, stop: float) -> Root:
        """New storage for a value."""
        t = self.types[name]
        nbytes = self._nbytes.get(id(t))
        if nbytes is None:
            nbytes = self._nbytes[id(t)] = t.nbytes
        if start in self.spans:
            start = self.spans[start][0]
        root = self.roots[name] = Root(nbytes, start, stop, kind, [name], -1, 0, name in self.on_host)
        return root

    def _root(self, name: str, i: float) -> Root:
        r = self.roots.get(name)
        if r is not None:
            return r
        if self.sizes.only_on_others(name):
            return self.new_root(name, "arena", i, self.last.get(name, i))
        return self.new_root(name, "state", -1, FOREVER)  # first touched here: persistable state

    def fetched(self, name: str) -> None:
        """Give storage to a fetched value that no operator touches. Raises ProgramError if it has no value."""
        if name not in self.roots:
            if name not in self.state:
                raise ProgramError(f"variable {name!r} has no value to fetch: no operator that runs defines it")
            self.new_root(name, "state", -1, FOREVER)

    # -- one operator -------------------------------------------------------------------------------------------------------

    def place(self, i: int, unit: Unit) -> PlanNode:
        """Assign storage to the results in the sub-blocks of unit `i`, then to its own results."""
        if self.outline.runs_blocks and unit[0].sub_blocks():
            count = sum(1 for _ in nested(self.program, unit[0]))
            self._place_bodies(unit[0], iter(times(i, count)))
        return self._place(i, unit)

    def _place_bodies(self, op: Operator, at: Iterator[float]) -> None:
        for b in op.sub_blocks():
            self.inner[b] = []
            for inner in self.program.blocks[b].oplist:
                self._place_bodies(inner, at)
                self.inner[b].append(self._place(next(at), (inner,)))

    def _place(self, i: float, unit: Unit) -> PlanNode:
        op = unit[0]
        definition = opdef(op.type)
        here = self.sizes.here.get(id(op))
        node = PlanNode(unit, definition, i, here, on_host=bool(self.on_host) and runs_on_host(op, self.on_host))
        if len(unit) > 1:
            self._place_chain(node)
            return node
        inside = self.inside.get(id(op), ())
        if inside and all(k in inside or not self.types[n].nbytes for k, n in enumerate(op.input_arg_names)):
            node.made = "joined"
            return node
        read = op.input_arg_names if here is None or not here.ghosts else here.real_inputs(op, definition)
        roots, outs = self.roots, op.output_arg_names
        ins = {n: roots[n] if n in roots else self._root(n, i) for n in read}
        views = definition.storage.view is not None or definition.storage.view_ctx is not None
        if views and all(map(self._is_new, outs)) and self._try_view(node):
            return node
        if inside:  # the other operands are copied into the result
            return node
        elsewhere = () if definition.control.bodies else self._place_at_destinations(self._destinations(node), i)
        self._results(node, ins, [n for n in outs if n not in elsewhere])
        if definition.effect in COMMUNICATES:  # values that are sent must be contiguous
            for n in read:
                if not self.shadow[n].flags.c_contiguous:
                    self.add_scratch(node, self.types[n], n, reads=True)
        return node

    def _results(self, node: PlanNode, ins: Mapping[str, Root], outs: Iterable[str]) -> None:
        """Storage for these results of a single operator, or of the first operator of a chain."""
        op, definition, i = node.op, node.definition, node.index
        pairs = self.pairs[id(op)]
        for name in outs:
            source = pairs.get(name)
            if source not in ins:  # only its shape is read: a chain that computes it may not store it
                source = None
            if name in self.roots or name in self.state:
                root = self._root(name, i)
                # writing over an input is allowed only if the op declares exactly this pair
                if not definition.control.bodies and any(r is root and not source == n == name for n, r in ins.items()):
                    self.add_scratch(node, self.types[name], name)
                root.stop = max(root.stop, self.last.get(name, i))
            else:
                self._new(name, i, [source] if source is not None else [], ins)

    def _place_chain(self, node: PlanNode) -> None:
        """Results that are read after the chain get storage, if possible that of a dead operand; the others get none."""
        i = node.index
        ins: dict[str, Root] = {}
        made: set[str] = set()
        taken: set[str] = set()
        for op in node.ops:
            ins.update({n: self._root(n, i) for n in op.input_arg_names if n not in made})
            made.update(op.output_arg_names)
        self._results(node, ins, node.op.output_arg_names[1:])
        made_last = [op.output_arg_names[0] for op in node.ops if self.last[op.output_arg_names[0]] > i]
        elsewhere = self._place_at_destinations(self.readers.early_destinations(i, node.ops, made_last), i)
        for op in node.ops:
            name = op.output_arg_names[0]
            if self.last[name] > i and name not in elsewhere:
                # an operator with a tail reads its operands again and again while it writes
                self._new(name, i, [n for n in ins if n not in taken and not node.definition.native.tail], ins)
                taken.update(n for n, r in ins.items() if r is self.roots[name])

    def _new(self, name: str, i: float, sources: Iterable[str], ins: Mapping[str, Root]) -> None:
        """Storage for a new result: that of the first operand in `sources` that is dead, or new storage."""
        for source in sources:
            if self._may_reuse(source, name, i, ins):
                root = self.roots[name] = self.roots[source]
                root.aliases.append(name)
                root.stop = self.last.get(name, i)
                return
        self.new_root(name, "arena", i, max(self.last.get(name, i), i))

    def _destinations(self, node: PlanNode) -> Mapping[str, Destination]:
        """Destinations of results: allocate a result at the destination of the only operator that moves it."""
        early = self.readers.early_destinations(node.index, node.ops, node.op.output_arg_names)
        return early if early or node.definition.storage.strided is None else self.readers.destinations(node.op)

    def _place_at_destinations(self, destinations: Mapping[str, Destination], i: float) -> Collection[str]:
        """Give storage to the results that have a destination; return their names."""
        for name, (shadow, strided, join, number) in destinations.items():
            if join is None:
                self.new_root(name, "arena", i, self.last[name])
            else:
                whole = join.output_arg_names[0]
                root = self.roots[name] = self._root(whole, i) if whole in self.state else self._room(whole, join, i)
                strided = strided._replace(offset=strided.offset + self.starts.get(whole, 0))
                root.aliases.append(name)
                root.stop = max(root.stop, self.last[name])
                self.inside.setdefault(id(join), set()).add(number)
                self.writers[whole] = []  # parts that are in place when `join` runs stay there
            self.shadow[name], self.strided[name], self.starts[name] = shadow, strided, strided.offset
        return destinations

    def _room(self, whole: str, join: Operator, i: float) -> Root:
        """Storage for the result of `join`, allocated when its first part is written; inside a later join's result if there is one."""
        if whole not in self.roots and not self._place_at_destinations(self.readers.early_destinations(i, (join,), (whole,)), i):
            return self.new_root(whole, "arena", i, self.last[whole])
        return self.roots[whole]

    def _is_new(self, name: str) -> bool:
        return name not in self.roots and name not in self.state

    def _is_made_once(self, name: str) -> bool:
        return self._is_new(name) and len(self.writers.get(name, ())) == 1

    def add_scratch(self, node: PlanNode, t: TensorType, of: str = "", reads: bool = False) -> None:
        start, stop = self.spans.get(node.index, (node.index, node.index))
        node.scratch.append(UnplacedScratch(t, Root(t.nbytes, start, stop, "arena", on_host=node.on_host), of, reads))
        self.all_scratch.append(node.scratch[-1])

    def dtype(self, name: str) -> str:
        return self.types[name].dtype

    def has_halves(self, node: PlanNode) -> bool:
        """Does the operator of a step read or write 16-bit floats?"""
        return any(self.types[n].dtype in HALVES for n in node.op.input_arg_names + node.op.output_arg_names)

    def widen(self, node: PlanNode, device: str) -> None:
        """Add float32 scratch for each 16-bit operand and result, if the kernel bodies of the op do not take 16-bit floats."""
        op, definition, types = node.op, node.definition, self.types
        if not definition.widens(device, [types[n] for n in op.output_arg_names]):
            return
        here = node.here or self._of_shapes(op, definition)
        if here.ghosts:
            node.here = here = here._replace(ghosts={k: wide_type(t) for k, t in here.ghosts.items()})
        read = here.real_inputs(op, definition)
        have = {(a.of, a.reads): a for a in node.scratch}
        for n, reads in dict.fromkeys([*[(n, True) for n in read], *[(n, False) for n in op.output_arg_names]]):
            t = types[n]
            if t.dtype not in HALVES:
                continue
            if (aside := have.get((n, reads))) is None:
                self.add_scratch(node, wide_type(t), n, reads)
            else:
                aside.type = wide_type(t)
                aside.root.nbytes = aside.type.nbytes

    def _of_shapes(self, op: Operator, definition: type[OpDef]) -> LocalOp:
        """Mark 16-bit operands of which only the shape is read, so that they are not converted."""
        ins, outs = (
            [None if n is None else self.types[n] for n in definition.flat_slots(slots, which)]
            for slots, which in ((op.inputs, definition.in_slots), (op.outputs, definition.out_slots))
        )
        told = definition.pattern_of(ins, outs, op.attrs).shape_only
        return LocalOp(op.attrs, ghosts={k: t for k in told if (t := ins[k]) is not None and t.dtype in HALVES})

    def operands(self, node: PlanNode) -> tuple[list[Any], list[Any]]:
        """The inputs and outputs of an operator as shadow arrays, as its kernel body gets them: copies in scratch are contiguous."""
        op = node.op
        read = written = self.shadow.__getitem__
        if node.scratch:
            aside = {(a.of, a.reads): self.shadows.of(a.type) for a in node.scratch if a.of}
            read, written = (lambda n, reads=reads: aside.get((n, reads), self.shadow[n]) for reads in (True, False))
        if node.here is None or not node.here.ghosts:
            return node.definition.operands(op, read, written)
        outs = node.definition.arrange(op.outputs, node.definition.out_slots, written)
        return node.here.inputs(op, node.definition, read, lambda t: np.broadcast_to(np.zeros((), np_dtype(t.dtype)), t.shape)), outs

    def asked(self, node: PlanNode, body: KernelBody) -> Sequence[TensorType]:
        """The types of the scratch arrays that a kernel body of the operator's op needs."""
        if body.scratch is None:
            return ()
        types, aside = self.types, {(a.of, a.reads): a.type for a in node.scratch}
        op, definition, here = node.op, node.definition, node.here
        ins, outs = definition.operands(op, lambda n: aside.get((n, True), types[n]), lambda n: aside.get((n, False), types[n]))
        if here is None:
            return body.scratch(ins, outs, op.attrs)
        if here.ghosts:  # their local values may be other parts than the operator works on
            ins = here.inputs(op, definition, lambda n: aside.get((n, True), types[n]), lambda t: t)
        return body.scratch(ins, outs, here.attrs)

    def _may_reuse(self, source: str, name: str, i: float, ins: Mapping[str, Root]) -> bool:
        """May a result reuse the storage of a dead operand?"""
        root = self.roots[source]
        return (
            root.kind == "arena"
            and root.stop <= i
            and self.types[source] == self.types[name]
            and (not self.moved(source) or self._covers_storage(source, root))
            and all(r is not root or n == source for n, r in ins.items())
        )

    def _covers_storage(self, name: str, root: Root) -> bool:
        """Is a value contiguous, and does it fill its storage?"""
        a = self.shadow[name]
        return a.nbytes == root.nbytes and a.flags.c_contiguous

    def moved(self, name: str) -> bool:
        """Is a value a view, or strided?"""
        return name in self.view_of or name in self.strided

    def _try_view(self, node: PlanNode) -> bool:
        op, i, outs = node.op, node.index, node.op.output_arg_names
        source = op.input_arg_names[0]
        root, stop = self.roots[source], max([self.last.get(n, i) for n in outs])
        if self._later_writes(root, i, stop) or any(w > i for n in outs for w in self.writers.get(n, ())):
            return False  # one of the two names is written while the other is still in use
        attrs, x = op.attrs if node.here is None else node.here.attrs, self.shadow[source]
        key = (node.definition, id(attrs), id(x), *[id(self.types[n]) for n in outs])
        if key not in self._views:
            self._views[key] = self._made_views(node.definition, attrs, x, [self.types[n] for n in outs])
        found = self._views[key]
        if found is None:
            return False
        # a split into many views is a copy instead if a reader does not accept the strides
        if node.definition.out_slots[0].many and not all(map(self.readers.accept, outs, [view.shadow for view in found])):
            return False
        root.aliases += outs
        root.stop = max(root.stop, stop)
        start = self.starts.get(source, 0)
        for n, view in zip(outs, found, strict=True):
            self.starts[n] = start + view.offset
            if view.is_recorded:
                self.strided[n] = StridedView(self.starts[n], view.shadow.strides)
            self.roots[n], self.shadow[n], self.view_of[n] = root, view.shadow, source
        node.made = "view"
        return True

    def _made_views(
        self, definition: type[OpDef], attrs: Mapping[str, Any], x: np.ndarray, types: Sequence[TensorType]
    ) -> list[_View] | None:
        """The views of `x` that are results of these types; None if the op cannot make them."""
        found = definition.views_of(x, self.ctx, attrs)
        if found is None or [(a.shape, dtype_name(a.dtype)) for a in found] != [(t.shape, t.dtype) for t in types]:
            return None
        # recorded if the view depends on the rank, because a shared plan does not name the rank
        on_rank = definition.storage.view_ctx is not None
        return [_View(self.shadows.like(a), start_of(a) - start_of(x), on_rank and a.flags.c_contiguous) for a in found]

    def _later_writes(self, root: Root, i: float, stop: float) -> bool:
        """Is a value of this storage overwritten by name between operator `i` and `stop`? In-place reuse never happens while a view
        lives."""
        return any(i < w <= stop for n in root.aliases for w in self.writers.get(n, ()))

    # -- offsets ------------------------------------------------------------------------------------------------------------

    def finish(self) -> tuple[dict[str, Value], tuple[Buffer, ...], tuple[int, int]]:
        """Values, buffers, and the sizes of the device arena and the host arena. It also gives offsets to all scratch."""
        types, view_of = self.types, self.view_of
        roots: list[Root] = []
        for r in self.roots.values():
            if r.number < 0:
                r.number = len(roots)
                roots.append(r)
        shared = [r for r in (*roots, *[a.root for a in self.all_scratch]) if r.kind == "arena"]
        totals = _laid_out([r for r in shared if not r.on_host]), _laid_out([r for r in shared if r.on_host])
        strided = self.strided.get
        new, at = tuple.__new__, view_of.get  # as Value(...), which takes twice as long
        values = {n: new(Value, (types[n], r.number, at(n, ""), strided(n))) for n, r in self.roots.items()}
        buffers = tuple([Buffer(r.kind, r.aliases[0], r.nbytes, ceil(r.start), ceil(r.stop), r.offset, r.on_host) for r in roots])
        return values, buffers, totals

    def placed(self, node: PlanNode) -> tuple[Scratch, ...]:
        """The scratch of an operator with its offsets, after `finish`."""
        return tuple([Scratch(a.type, a.root.offset, a.of, a.reads) for a in node.scratch]) if node.scratch else ()


def _laid_out(roots: Sequence[Root]) -> int:
    """Give each root an offset in one arena; return the arena's size."""
    offsets, total = assign(roots)
    for r, offset in zip(roots, offsets, strict=True):
        r.offset = offset
    return total


def _state(outline: Outline) -> frozenset[str]:
    """The state variables of the program."""
    return frozenset([n for n, d in outline.program.global_block().descs.items() if d.persistable])


_NO_PAIRS: Mapping[str, str] = {}


def _in_place(outline: Outline) -> dict[int, Mapping[str, str]]:
    inside = [inner for op in outline.ops for _, inner in nested(outline.program, op)] if outline.runs_blocks else []
    return {id(op): _pairs(op) for op in (*outline.ops, *inside)}


def _pairs(op: Operator) -> Mapping[str, str]:
    """{result: operand} for the results of an operator that may overwrite an operand in place."""
    if not (pairs := opdef(op.type).storage.inplace):
        return _NO_PAIRS
    ins, outs = op.inputs, op.outputs
    return {outs[b][0]: ins[a][0] for a, b in pairs if ins.get(a) and outs.get(b)}
