"""ChannelsLast: convert images to [n, h, w, c] in segments where the convolutions gain more time than the transposes at the borders
cost."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..ir import flow
from ..ir.conversions import Conversions, Order
from ..ir.errors import ProgramError
from ..ir.form_walk import FormWalk
from ..ir.forms import FormChoice, Held, Names
from ..ir.opdef import Effect, OpDef, opdef
from ..ir.operator import Operator
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Block, Program
from ..ir.sub_blocks import bodies
from ..ir.types import ANY, TensorType
from ..ir.var import Var

_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # transposes to channels last and back
_NCHW, _NHWC = "NCHW", "NHWC"
_WIDE = 16  # channels from which a convolution is faster with channels last

# Nanoseconds on one core, measured over ResNet's and LeNet's shapes (benchmarks/rewrites.py): what an arithmetic operation of a wide
# convolution gains, what one of a narrow or grouped convolution loses, and the cost of transposing an element at a border.
_GAIN, _LOSS, _BORDER = 0.0006, 0.008, 1.2


@named
@dataclass(frozen=True, repr=False)
class ChannelsLast(Pass):
    """Use channels last in convolutions, pooling, batch normalization and the elementwise operators between them.

    Transposes are inserted at the borders. Forward and backward are converted together; filters and their gradients are not changed. A
    segment is a set of operators connected by images. It is converted if that saves time: convolutions with 16 channels or more on both
    sides gain about an eighth, others lose more than that, and each image that crosses the border costs time by its elements. `always`
    converts every segment with a convolution. Bodies of branches and loops have their own segments; loop-carried values keep their original
    layout between iterations. Results differ by rounding. Fetched values keep their layout; operators on values of which ranks hold parts
    are not converted.
    """

    always: bool = False
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        turns: dict[int, _Turn] = {}
        exits: set[str] = set()
        for block in program.blocks:
            found = _Segments(program, block, job)
            for segment in found.segments():
                if self._wins(found, segment, job):
                    turns.update((id(found.ops[k]), found.turns[k]) for k in segment.ops)
                    exits.update(segment.exits)
        return _turned(program, turns, exits) if turns else program

    def conversions(self) -> Conversions:
        return ImageTransposes()

    def _wins(self, found: _Segments, segment: _ImageSegment, job: Job) -> bool:
        if not found.convolves(segment) or self.always:
            return self.always and found.convolves(segment)
        gain = sum(found.gain(k) for k in segment.ops)
        cost = _BORDER * sum(found.elements(n) for n in (*segment.entries, *segment.exits))
        if gain <= cost:
            first = found.ops[segment.ops[0]]
            job.log.append(
                f"{type(self).__name__} kept {len(segment.ops)} operators from {first.to_string()} on: a row gains {gain / 1e3:.1f} us "
                f"and costs {cost / 1e3:.1f} us at the borders"
            )
        return gain > cost


class _Turn(NamedTuple):
    """An operator with channels last: the images that it reads and writes, and its new attributes."""

    images: tuple[str, ...]
    attrs: Mapping[str, Any]


@dataclass
class _ImageSegment:
    """Operators connected by images, by index; images that come from outside, and images that outside operators read."""

    ops: list[int] = field(default_factory=list)
    entries: tuple[str, ...] = ()
    exits: tuple[str, ...] = ()


class _Segments:
    """The segments of one block."""

    def __init__(self, program: Program, block: Block, job: Job):
        self.block, self.ops = block, block.oplist
        self.makers, self.uses = flow.definitions(program, self.ops), flow.uses(program, self.ops)
        self.kept, self.fed = {*(job.fetched(program) if block.idx == 0 else _handed_out(program, block.idx))}, job.fed
        self.carried = {n for n in self.makers if n not in block.descs} if block.idx else set()
        self.turns = {k: t for k, op in enumerate(self.ops) if (t := self._turn(op)) is not None}

    def segments(self) -> list[_ImageSegment]:
        """All of them, in the order of their first operators."""
        of: dict[int, _ImageSegment] = {}
        seen: dict[str, int] = {}
        for k, turn in self.turns.items():
            mine = of[k] = _ImageSegment([k])
            for n in turn.images:
                if n in self.carried:  # between iterations, and after a branch, it has its original layout
                    continue
                if n in seen and (other := of[seen[n]]) is not mine:
                    other.ops += mine.ops
                    of.update(dict.fromkeys(mine.ops, other))
                    mine = other
                seen[n] = k
        found = list({id(s): s for s in of.values()}.values())
        for s in found:
            s.ops.sort()
            inside, images = set(s.ops), dict.fromkeys(n for k in s.ops for n in self.turns[k].images)
            carried = self.carried
            s.entries = tuple(n for n in images if n not in carried and not inside.issuperset(self.makers.get(n, [-1])))
            read_elsewhere = (n for n in images if n in self.kept or n in carried or not inside.issuperset(self.uses.get(n, ())))
            s.exits = tuple(n for n in read_elsewhere if n not in s.entries)
        return found

    # -- which operators can be converted -------------------------------------------------------------------------------------

    def _turn(self, op: Operator) -> _Turn | None:
        definition, names = opdef(op.type), (*op.input_arg_names, *op.output_arg_names)
        if definition.effect is not Effect.PURE or definition.control.bodies or not names:
            return None
        if any((d := self.block.find(n)) is None or d.placement for n in names):
            return None
        if definition.rewrite.layout is not None:
            attr, slots = definition.rewrite.layout
            images = [n for s in slots for n in (*op.inputs.get(s, ()), *op.outputs.get(s, ()))]
            attrs = {attr: "NHWC"} if op.attrs[attr] == "NCHW" else None
        else:
            images = [n for n in names if self.block.desc(n).type.ndim == 4]
            attrs = self._elementwise(op, images)
        if attrs is None or not images or not all(self._is_image(n) for n in images):
            return None
        turn = _Turn(tuple(dict.fromkeys(images)), {**op.attrs, **attrs})
        return turn if self._agrees(op, turn) else None

    def _agrees(self, op: Operator, turn: _Turn) -> bool:
        """Does the type rule give results with the transposed shapes? It does not for a reshape, whose attributes contain sizes."""
        definition = opdef(op.type)

        def type_of(name: str) -> TensorType:
            t = self.block.desc(name).type
            return _last(t) if name in turn.images else t

        try:
            made = definition.infer_outputs({s: [type_of(n) for n in names] for s, names in op.inputs.items()}, turn.attrs)
        except ProgramError:
            return False
        for (slot, _, many), types in zip(definition.out_slots, made, strict=True):
            if not all(type_of(n).accepts(t) for n, t in zip(op.outputs.get(slot, ()), types if many else [types], strict=False)):
                return False
        return True

    def _is_image(self, name: str) -> bool:
        """Is it an image that is written once in a run, or that comes from outside?"""
        d, made = self.block.desc(name), self.makers.get(name, ())
        if name in self.carried:
            return d.type.ndim == 4
        return d.type.ndim == 4 and (not made or len(made) == 1 and not (d.is_data or d.persistable or name in self.fed))

    def _elementwise(self, op: Operator, images: Sequence[str]) -> dict[str, Any] | None:
        """The attributes for channels last of an operator that computes elementwise on images and possibly a per-channel value, or that
        sums images to such a value or to one number, by the access pattern. None for other operators."""
        definition, types = opdef(op.type), {n: self.block.desc(n).type for n in (*op.input_arg_names, *op.output_arg_names)}
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        if len({types[n].shape for n in images}) != 1:
            return None
        p = definition.pattern_of([types[n] if n else None for n in ins], [types[n] if n else None for n in outs], op.attrs)
        axes = {tuple(found) for n, found in zip((*ins, *outs), (*p.ins, *p.outs), strict=True) if n in images and found is not None}
        factors = [f for order in axes for axis in order for f in axis]
        if p.whole or p.needs_part or p.runs or len(axes) != 1 or len(set(factors)) < len(factors):
            return None
        (order,) = axes
        left = set(factors).difference(p.reduced)
        rest = [n for n in (*ins, *outs) if n is not None and n not in images]
        if any(n in rest and not left <= set(order[1] if types[n].numel != 1 else ()) for n in outs):
            return None
        if all(types[n].numel == 1 for n in rest):
            return {"axis": -1} if rest and "axis" in op.attrs else {}
        by_channel = all(types[n].numel == 1 or types[n].shape == (types[images[0]].shape[1],) for n in rest)
        return {"axis": 3} if by_channel and op.attrs.get("axis") == 1 else None

    # -- gain and cost ---------------------------------------------------------------------------------------------------------

    def gain(self, k: int) -> float:
        """Nanoseconds that a convolution gains for each row of the batch."""
        op = self.ops[k]
        definition, turn = opdef(op.type), self.turns[k]
        if not self._has_filter(op, turn) or definition.arithmetic.flops is None:
            return 0.0
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        flops = definition.arithmetic.flops(self._row(ins), self._row(outs), op.attrs)
        channels = [self.block.desc(n).type.shape[1] for n in turn.images]
        wide = min(channels) >= _WIDE and op.attrs["groups"] == 1
        return flops * (_GAIN if wide else -_LOSS)

    def _has_filter(self, op: Operator, turn: _Turn) -> bool:
        return any(self.block.desc(n).type.ndim == 4 and n not in turn.images for n in op.input_arg_names)

    def convolves(self, segment: _ImageSegment) -> bool:
        return any(self._has_filter(self.ops[k], self.turns[k]) for k in segment.ops)

    def _row(self, names: Iterable[str | None]) -> list[TensorType | None]:
        """The types with a batch of one row."""
        types = (None if n is None else self.block.desc(n).type for n in names)
        return [t and t.with_shape(1 if d == ANY else d for d in t.shape) for t in types]

    def elements(self, name: str) -> int:
        """Elements that a transpose moves for each row; 0 if it only changes the shape."""
        (t,) = self._row([name])
        assert t is not None
        return t.numel if _moves(self.block.desc(name).type) else 0


def _handed_out(program: Program, idx: int) -> list[str]:
    """The names that a block returns to the operator that runs it."""
    return [n for b in program.blocks for op in b.oplist for body in bodies(op) if body.idx == idx for n in body.results(op)]


# -- the new program ---------------------------------------------------------------------------------------------------------------------


def _turned(program: Program, turns: Mapping[int, _Turn], exits: Container[str]) -> Program:
    """The program in which the operators in `turns`, by id, use channels last."""
    made = program.copy()
    _Layouts(made, turns, exits).run()
    gone = _named(program).difference(_named(made))
    for block in made.blocks:
        block.descs = {n: d for n, d in block.descs.items() if n not in gone or d.is_data or d.persistable}
    return made


def _named(program: Program) -> set[str]:
    """The names that operators use."""
    ops = [op for block in program.blocks for op in block.oplist]
    handed = (n for op in ops for body in bodies(op) for n in body.results(op))
    return {n for op in ops for n in (*op.input_arg_names, *op.output_arg_names)}.union(handed)


class _Layouts(FormWalk):
    """The walk over layouts. The forms are channels first, the home form of every variable, and channels last."""

    def __init__(self, program: Program, turns: Mapping[int, _Turn], exits: Container[str]):
        super().__init__(program)
        self.turns, self.exits = turns, exits
        self.inside: set[int] = set()  # blocks with converted operators, in them or in inner blocks
        for block in reversed(program.blocks):
            if block.idx in self.inside or any(id(op) in turns for op in block.oplist):
                self.inside.update((block.idx, block.parent_idx))

    def stored(self, d: Var) -> str:
        return _NCHW

    given = stored

    def enters(self, op: Operator) -> bool:
        return not self.inside.isdisjoint(op.sub_blocks())

    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> FormChoice | None:
        turn = self.turns.get(id(op))
        if turn is None:
            return None
        made = [Held((_NHWC if n in turn.images else _NCHW,)) for n in outs]
        return FormChoice.of([_NHWC if n in turn.images else None for n in ins], made, definition.complete_attrs(turn.attrs))

    def returns(self, name: str, op: Operator) -> bool:
        return name in self.exits

    def convert(self, name: str, source: str, target: str, want: str, near: Operator) -> None:
        """Transpose, with a contiguous result: kernels read contiguous images."""
        d = self.block.desc(name)
        copied = _moves(d.type)
        view = self.declare(f"{target}.turned", self.copy(d, want)) if copied else target
        attrs = opdef("transpose").complete_attrs({"axis": _LAST if want == _NHWC else _FIRST})
        turn = near.replace(type="transpose", inputs={"X": (source,)}, outputs={"Out": (view,)}, attrs=attrs, role_var=())
        self.out.append(turn)
        if copied:
            self.out.append(turn.replace(type="assign", inputs={"X": (view,)}, outputs={"Out": (target,)}, attrs={}))

    def declared(self, d: Var, form: str) -> Var:
        return d

    def copy(self, d: Var, form: str) -> Var:
        t = d.type if form == _NCHW else _last(d.type)
        return Var(d.name, t, stop_gradient=d.stop_gradient)

    def ending(self, form: str) -> str:
        return form.lower()

    def numbered(self, k: int) -> str:
        return "_" * k


def _last(t: TensorType) -> TensorType:
    """The type of an image with channels last."""
    return t.with_shape(t.shape[k] for k in _LAST)


def _moves(t: TensorType) -> bool:
    """Does a transpose move elements of an image, or only change the shape?"""
    _, c, h, w = t.shape
    return c != 1 and (h, w) != (1, 1)


# -- for the proof -----------------------------------------------------------------------------------------------------------------------


class ImageTransposes(Conversions):
    """The conversions of this rewrite, for the proof: transposes to channels last and back, and copies. By its declaration, an operator
    with channels last equals the operator with channels first on transposed images."""

    def converts(self, op: Operator, block: Block) -> Order | None:
        if op.type == "transpose" and op.attrs["axis"] in (_LAST, _FIRST):
            return op.attrs["axis"]
        return () if op.type == "assign" else None

    def results(self, before: Operator, after: Operator, block: Block, orders: Sequence[Order]) -> list[Order] | str:
        definition = opdef(before.type)
        if not any(orders) and before.attrs == after.attrs and definition.rewrite.layout is None:
            return super().results(before, after, block, orders)
        if any(order not in ((), _LAST) for order in orders):
            return "reads an image with its axes in another order than channels last"
        if definition.rewrite.layout is not None:
            return self._by_slots(before, after, definition, orders)
        types = {n: block.desc(n).type for n in (*before.input_arg_names, *before.output_arg_names)}
        made: list[Order] = [_LAST if types[n].ndim == 4 else () for n in before.output_arg_names]
        ins, outs = definition.flat_slots(before.inputs, definition.in_slots), definition.flat_slots(before.outputs, definition.out_slots)
        turned = {n for n, order in zip((n for n in ins if n is not None), orders, strict=True) if order}
        turned.update(n for n, order in zip(before.output_arg_names, made, strict=True) if order)
        found = [[None if n is None else types[n] for n in names] for names in (ins, outs)]
        last = [[_last(types[n]) if n in turned else None if n is None else types[n] for n in names] for names in (ins, outs)]
        p, q = definition.pattern_of(found[0], found[1], before.attrs), definition.pattern_of(last[0], last[1], after.attrs)
        if not same_access((*p.ins, *p.outs), (*q.ins, *q.outs), [n in turned for n in (*ins, *outs)]):
            return "does something else with channels last"
        return made

    def _by_slots(self, before: Operator, after: Operator, definition: type[OpDef], orders: Sequence[Order]) -> list[Order] | str:
        attr, slots = definition.rewrite.layout  # type: ignore[misc]
        last = before.attrs[attr] != after.attrs[attr]
        if {**before.attrs, attr: ""} != {**after.attrs, attr: ""} or last and after.attrs[attr] != "NHWC":
            return "has other attributes"
        where = [slot for slot, names in before.inputs.items() for _ in names]
        for slot, order in zip(where, orders, strict=True):
            if order != (_LAST if last and slot in slots else ()):
                return f"reads {slot} in another layout than its {attr}={after.attrs[attr]!r} says"
        return [_LAST if last and slot in slots else () for slot, names in before.outputs.items() for _ in names]


def same_access(first: Sequence[Any], second: Sequence[Any], turned: Sequence[bool]) -> bool:
    """Are two access patterns equal, except for the order of axes of converted operands and the names of factors?"""
    names: dict[Any, Any] = {}
    for mine, its, is_turned in zip(first, second, turned, strict=True):
        if mine is None or its is None:
            if mine is not its:
                return False
            continue
        axes = [mine[k] for k in _LAST] if is_turned else list(mine)
        if [len(axis) for axis in axes] != [len(axis) for axis in its]:
            return False
        for f, g in zip((f for axis in axes for f in axis), (g for axis in its for g in axis), strict=True):
            if names.setdefault(f, g) != g:
                return False
    return len(set(names.values())) == len(names)
