"""Channels last inside convolutional segments: images become [n, h, w, c] where the convolutions win more than the borders cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..ir import flow
from ..ir.errors import ProgramError
from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Program
from ..ir.types import ANY, TensorType
from ..ir.unique_name import unused
from ..ir.var import Var
from .base import with_ops

_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # transposes to channels last and back
_WIDE = 16  # channels from which a convolution is faster with channels last

# Nanoseconds on one core, measured over ResNet's and LeNet's shapes (benchmarks/rewrites.py): what an arithmetic operation of a wide
# convolution gains, what one of a narrow or grouped convolution loses, and what it takes to transpose an element at a border.
_GAIN, _LOSS, _BORDER = 0.0006, 0.008, 1.2


@named
@dataclass(frozen=True, repr=False)
class ChannelsLast(Pass):
    """Images with channels last in convolutions, pooling, batch normalization and what works element by element between them.

    Transposes stand at the borders. Forward and backward are turned alike; filters and their gradients stay as they are. A segment, all
    operators that images connect, is turned where it wins: convolutions of 16 channels and more on both sides gain about an eighth, others
    lose more than that, and an image that crosses the border costs by its elements. `always` turns every segment with a convolution.
    Results differ by rounding. What is fetched has its own layout; operators over values of which ranks hold parts stay.
    """

    always: bool = False
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        found = _Segments(program, job)
        turned = [s for s in found.segments() if self._wins(found, s, job)]
        return found.turned(turned) if turned else program

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
    """How an operator is with channels last: the images that it reads and writes, and its attributes."""

    images: tuple[str, ...]
    attrs: Mapping[str, Any]


@dataclass
class _ImageSegment:
    """Operators that images connect, by index; images that come in from elsewhere, and those that others read."""

    ops: list[int] = field(default_factory=list)
    entries: tuple[str, ...] = ()
    exits: tuple[str, ...] = ()


class _Segments:
    def __init__(self, program: Program, job: Job):
        self.program, self.ops = program, program.global_block().oplist
        self.descs = program.global_block().descs
        self.makers, self.uses = flow.definitions(program), flow.uses(program)
        self.kept, self.fed = set(job.fetched(program)), job.fed
        self.turns = {k: t for k, op in enumerate(self.ops) if (t := self._turn(op)) is not None}

    def segments(self) -> list[_ImageSegment]:
        """All of them, in the order of their first operators."""
        of: dict[int, _ImageSegment] = {}
        seen: dict[str, int] = {}
        for k, turn in self.turns.items():
            mine = of[k] = _ImageSegment([k])
            for n in turn.images:
                if n in seen and (other := of[seen[n]]) is not mine:
                    other.ops += mine.ops
                    of.update(dict.fromkeys(mine.ops, other))
                    mine = other
                seen[n] = k
        found = list({id(s): s for s in of.values()}.values())
        for s in found:
            s.ops.sort()
            inside, images = set(s.ops), dict.fromkeys(n for k in s.ops for n in self.turns[k].images)
            s.entries = tuple(n for n in images if not inside.issuperset(self.makers.get(n, [-1])))
            read_elsewhere = (n for n in images if n in self.kept or not inside.issuperset(self.uses.get(n, ())))
            s.exits = tuple(n for n in read_elsewhere if n not in s.entries)
        return found

    # -- what operators can ---------------------------------------------------------------------------------------------------

    def _turn(self, op: Operator) -> _Turn | None:
        definition, names = opdef(op.type), (*op.input_arg_names, *op.output_arg_names)
        if definition.effect is not Effect.PURE or definition.bodies or not names:
            return None
        if any((d := self.descs.get(n)) is None or d.placement for n in names):
            return None
        if definition.layout is not None:
            attr, slots = definition.layout
            images = [n for s in slots for n in (*op.inputs.get(s, ()), *op.outputs.get(s, ()))]
            attrs = {attr: "NHWC"} if op.attrs[attr] == "NCHW" else None
        else:
            images = [n for n in names if self.descs[n].type.ndim == 4]
            attrs = self._elementwise(op, images)
        if attrs is None or not images or not all(self._is_image(n) for n in images):
            return None
        turn = _Turn(tuple(dict.fromkeys(images)), {**op.attrs, **attrs})
        return turn if self._agrees(op, turn) else None

    def _agrees(self, op: Operator, turn: _Turn) -> bool:
        """Are the results images of the turned shapes? Those of a reshape, whose attributes name sizes, are not."""
        definition = opdef(op.type)

        def type_of(name: str) -> TensorType:
            t = self.descs[name].type
            return t.with_shape(t.shape[k] for k in _LAST) if name in turn.images else t

        try:
            made = definition.infer_outputs({s: [type_of(n) for n in names] for s, names in op.inputs.items()}, turn.attrs)
        except ProgramError:
            return False
        for (slot, _, many), types in zip(definition.out_slots, made, strict=True):
            if not all(type_of(n).accepts(t) for n, t in zip(op.outputs.get(slot, ()), types if many else [types], strict=False)):
                return False
        return True

    def _is_image(self, name: str) -> bool:
        """Is it an image with one value in a run, or one that comes from outside?"""
        d, made = self.descs[name], self.makers.get(name, ())
        return d.type.ndim == 4 and (not made or len(made) == 1 and not (d.is_data or d.persistable or name in self.fed))

    def _elementwise(self, op: Operator, images: Sequence[str]) -> dict[str, Any] | None:
        """Attributes for channels last of an operator that works element by element over images, and perhaps a value by channel, or sums
        images up to such a value or one number. None for others: the access pattern says."""
        definition, types = opdef(op.type), {n: self.descs[n].type for n in (*op.input_arg_names, *op.output_arg_names)}
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        if len({types[n].shape for n in images}) != 1:
            return None
        p = definition.pattern_of([types[n] if n else None for n in ins], [types[n] if n else None for n in outs], op.attrs)
        axes = {tuple(found) for n, found in zip((*ins, *outs), (*p.ins, *p.outs), strict=True) if n in images and found is not None}
        factors = [f for order in axes for axis in order for f in axis]
        if p.whole or p.told or p.runs or len(axes) != 1 or len(set(factors)) < len(factors):
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

    # -- what it is worth ------------------------------------------------------------------------------------------------------

    def gain(self, k: int) -> float:
        """Nanoseconds that a convolution gains for each row of the batch."""
        op = self.ops[k]
        definition, turn = opdef(op.type), self.turns[k]
        if not self._has_filter(op, turn) or definition.flops is None:
            return 0.0
        ins, outs = definition.flat_slots(op.inputs, definition.in_slots), definition.flat_slots(op.outputs, definition.out_slots)
        flops = definition.flops(self._row(ins), self._row(outs), op.attrs)
        channels = [self.descs[n].type.shape[1] for n in turn.images]
        wide = min(channels) >= _WIDE and op.attrs["groups"] == 1
        return flops * (_GAIN if wide else -_LOSS)

    def _has_filter(self, op: Operator, turn: _Turn) -> bool:
        return any(self.descs[n].type.ndim == 4 and n not in turn.images for n in op.input_arg_names)

    def convolves(self, segment: _ImageSegment) -> bool:
        return any(self._has_filter(self.ops[k], self.turns[k]) for k in segment.ops)

    def _row(self, names: Iterable[str | None]) -> list[TensorType | None]:
        """Types with one row in the batch."""
        types = (None if n is None else self.descs[n].type for n in names)
        return [t and t.with_shape(1 if d == ANY else d for d in t.shape) for t in types]

    def elements(self, name: str) -> int:
        """Elements that a transpose moves for each row; none where it only counts the axes anew."""
        (t,) = self._row([name])
        assert t is not None
        return t.numel if self._moves(name) else 0

    def _moves(self, name: str) -> bool:
        _, c, h, w = self.descs[name].type.shape
        return c != 1 and (h, w) != (1, 1)

    # -- the new program ---------------------------------------------------------------------------------------------------------

    def turned(self, segments: Sequence[_ImageSegment]) -> Program:
        """A program in which these have channels last."""
        inside = {k: s for s in segments for k in s.ops}
        self.last = {n: self._fresh(f"{n}.nhwc") for s in segments for k in s.ops for n in self.turns[k].images}
        made = self.program.copy()
        self.block = made.global_block()
        for n, name in self.last.items():
            self._declare(name, n, _LAST)
        ready: set[str] = set()
        out: list[Operator] = []
        for k, op in enumerate(self.ops):
            if k not in inside:
                out.append(op)
                continue
            s = inside[k]
            for n in s.entries:
                if n in op.input_arg_names and n not in ready:
                    out += self._transposed(op, n, n, self.last[n], _LAST)
                    ready.add(n)
            names = {n: self.last[n] for n in self.turns[k].images}
            out.append(op.renamed(names, outputs=True).replace(attrs=opdef(op.type).complete_attrs(self.turns[k].attrs)))
            for n in s.exits:
                if n in op.output_arg_names:
                    out += self._transposed(op, n, self.last[n], n, _FIRST)
        return with_ops(made, out)

    def _transposed(self, near: Operator, image: str, x: str, name: str, order: tuple[int, ...]) -> list[Operator]:
        """Operators that make `name` of `x`, one of which is `image`, in one piece: kernels work on whole images."""
        view = self._fresh(f"{name}.turned") if self._moves(image) else name
        attrs = opdef("transpose").complete_attrs({"axis": order})
        turn = near.replace(type="transpose", inputs={"X": (x,)}, outputs={"Out": (view,)}, attrs=attrs, role_var=())
        if view == name:
            return [turn]
        self._declare(view, image, order if order == _LAST else (0, 1, 2, 3))
        return [turn, turn.replace(type="assign", inputs={"X": (view,)}, outputs={"Out": (name,)}, attrs={})]

    def _declare(self, name: str, image: str, order: Sequence[int]) -> None:
        old = self.descs[image]
        t = old.type.with_shape(old.type.shape[k] for k in order)
        self.block.descs[name] = Var(name, t, stop_gradient=old.stop_gradient)

    def _fresh(self, name: str) -> str:
        return unused(name, self.descs, "_".__mul__)
