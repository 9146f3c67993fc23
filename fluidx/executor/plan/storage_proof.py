"""Proof that the storage of a plan is right: each step reads the bytes that the program wrote last for that value.

The proof uses only the records of the plan, not the code that made them. A walk over the steps tracks which content is in which range of
memory. A write ends all other content that it overlaps. A step that reads ended content is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...ir import flow
from ...ir.dtypes import np_dtype
from ...ir.errors import ExecutionError
from ...ir.opdef import opdef
from ...ir.operator import Operator
from ...ir.sub_blocks import bodies
from ..error_text import where
from .cost import communicates
from .records import Plan, Step


class Span(NamedTuple):
    """Bytes in one memory: the arena (-1), the host arena (-2), or the buffer of a feed or a variable (its number). With a `pitch`, from
    `start` on, only the first `run` bytes of every `pitch` bytes count."""

    space: int
    start: int
    stop: int
    run: int = 0
    pitch: int = 0

    def overlaps(self, other: Span) -> bool:
        if self.space != other.space or max(self.start, other.start) >= min(self.stop, other.stop):
            return False
        if not self.pitch or self.pitch != other.pitch:
            return True
        ahead = (other.start - self.start) % self.pitch
        return ahead < self.run or self.pitch - ahead < other.run


class _Content(NamedTuple):
    """The content that one write left in memory. It is compared by identity."""

    name: str
    span: Span
    step: str


def check_storage(plan: Plan) -> None:
    """Raise ExecutionError unless every step of the plan reads values that are still in memory, and writes nothing over its own operands
    and scratch.

    >>> import fluidx as fx
    >>> from fluidx.executor.plan.dry_run import dry_plan
    >>> main = fx.Program("two")
    >>> with fx.program_guard(main):
    ...     x = fx.data("x", [-1, 4], "float32")
    ...     y = fx.layers.softmax(fx.layers.softmax(x)) + fx.layers.reduce_sum(x)
    >>> planned = dry_plan(main, batch=10)
    >>> check_storage(planned)
    >>> everything_at_0 = tuple([b._replace(offset=0) for b in planned.buffers])
    >>> check_storage(planned._replace(buffers=everything_at_0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fluidx.ir.errors.ExecutionError: plan of program two: step 3 (elementwise_add) reads %softmax_1.tmp_0, ...
    """
    walk = _StorageWalk(plan)
    walk.steps(plan.steps, "step ")
    walk.end_of_run(plan)


class _StorageWalk:
    def __init__(self, plan: Plan):
        self.plan = plan
        self.live: dict[int, list[_Content]] = {}  # by space: content that has not been overwritten
        self.content: dict[str, tuple[_Content, ...]] = {}  # by name: the content written last; several parts for a joined value
        self.ended: dict[int, tuple[_Content, str]] = {}  # by id: content, and the step that overwrote it
        self.strides: dict[str, np.ndarray] = {}  # views, as arrays over a dummy that nothing accesses
        self.running: list[tuple[int, str, list[Span], list[Span]]] = []  # overlapped steps: number, label, spans read and written
        sizes = [*(b.nbytes for b in plan.buffers), *(v.type.nbytes for v in plan.values.values())]
        self.started: set[int] = set()  # overlapped steps that run or have ended
        self.dummy = np.empty(max(sizes, default=1) or 1, np.uint8)
        for name, v in plan.values.items():
            if plan.buffers[v.buffer].kind != "arena" and not v.view_of and v.strided is None:
                self.write(name, "the start of the run")

    def refuse(self, text: str, op: Operator | None) -> None:
        raise ExecutionError(f"plan of {self.plan.program.label()}: {text}; this is a bug in fluidx, not in the program{where(op)}")

    def span(self, name: str) -> Span:
        buffer = self.plan.values[name].buffer
        b = self.plan.buffers[buffer]
        whole = Span(_arena(b.on_host), b.offset, b.offset + b.nbytes) if b.kind == "arena" else Span(buffer, 0, b.nbytes)
        if self.plan.values[name].strided is not None:
            return self.rows(name, whole)
        view = self.strides.get(name)
        if view is None or not view.flags.c_contiguous:
            return whole
        start = whole.start + view.ctypes.data - self.dummy.ctypes.data
        return whole._replace(start=start, stop=start + view.nbytes)

    def rows(self, name: str, whole: Span) -> Span:
        """The bytes of a strided value: rows of equal length at a fixed distance."""
        t, strided = self.plan.values[name].type, self.plan.values[name].strided
        assert strided is not None
        axes = sorted((s, n) for s, n in zip(strided.strides, t.shape, strict=True) if n > 1)
        run = np_dtype(t.dtype).itemsize
        while axes and axes[0][0] == run:
            run *= axes.pop(0)[1]
        pitch, count = (axes[0][0], 1) if axes else (run, 1)
        while axes and axes[0][0] == pitch * count:
            count *= axes.pop(0)[1]
        start = whole.start + strided.offset
        span = whole._replace(start=start, stop=start + pitch * (count - 1) + run, run=run, pitch=pitch)
        if axes or run > pitch or strided.offset < 0 or span.stop > whole.stop:
            size = whole.stop - whole.start
            self.refuse(
                f"%{name} lies in steps of {strided.strides} from byte {strided.offset} on, which are no rows in {size} bytes", None
            )
        return span

    # -- contents -----------------------------------------------------------------------------------------------------------

    def write(self, name: str, label: str) -> None:
        """A step writes a value."""
        made = _Content(name, self.span(name), label)
        self.content[name] = (made,)
        self.end(made.span, f"{label} wrote %{name}")
        self.live.setdefault(made.span.space, []).append(made)

    def end(self, span: Span, why: str) -> None:
        """End all content that overlaps these bytes."""
        there = self.live.get(span.space, [])
        gone = [c for c in there if c.span.overlaps(span)]
        if gone:
            self.live[span.space] = [c for c in there if not c.span.overlaps(span)]
            self.ended.update({id(c): (c, why) for c in gone})

    def read(self, name: str, label: str, op: Operator | None) -> None:
        """Refuse the step unless the last content of a value is still in memory."""
        t = self.plan.values[name].type
        if not t.nbytes or name in self.plan.absent:
            return
        if name not in self.content:
            self.refuse(f"{label} reads %{name}, which nothing has written yet", op)
        for content in self.content[name]:
            if id(content) in self.ended:
                self.refuse(f"{label} reads %{name}, written by {content.step}, where {self.ended[id(content)][1]} meanwhile", op)

    # -- steps --------------------------------------------------------------------------------------------------------------

    def steps(self, steps: Iterable[Step], label: str) -> None:
        for k, step in enumerate(steps):
            label_of = f"{label}{k} ({' + '.join(op.type for op in step.ops)})"
            self.wait(step.waits_for, label_of, step.op)
            if step.kernel == "view":
                self.view(step, label_of)
                continue
            if step.kernel == "joined":
                self.joined(step, label_of)
                continue
            self.step(step, label_of)
            if step.overlapped:
                written = [*(self.span(n) for n in self.writes(step)), *_scratch(step)]
                self.started.add(k)
                self.running.append((k, label_of, [self.span(n) for n in self.reads(step)], written))

    def wait(self, number: int | None, label: str, op: Operator | None) -> None:
        """An overlapped step has ended, and so have the overlapped steps before it."""
        if number is None:
            return
        if number not in self.started:
            self.refuse(f"{label} waits for step {number}, which has not started to overlap with it", op)
        if not self.plan.steps[number].marked:
            self.refuse(f"{label} waits for step {number}, which does not signal its end", op)
        self.running = [r for r in self.running if r[0] > number]

    def end_of_run(self, plan: Plan) -> None:
        self.wait(plan.waits_at_end, "the end", None)
        if self.running:
            self.refuse(f"the run ends before {self.running[0][1]} is waited for", None)
        for name in plan.fetches:
            self.read(name, "the fetch", None)

    def reads(self, step: Step) -> list[str]:
        """The values that a step reads. A value of which it reads only the shape may have been overwritten."""
        if step.kernel in ("nothing", "fill"):
            return []
        here = step.here
        names = step.reads if here is None or not here.ghosts else here.real_inputs(step.op, opdef(step.op.type))
        return list(dict.fromkeys(n for n in names if n in self.plan.values))

    def writes(self, step: Step) -> list[str]:
        return [n for n in step.writes if n in self.plan.values]

    def view(self, step: Step, label: str) -> None:
        """A view has the content of its source, or of some bytes of it, under another name."""
        op, names = step.op, step.op.output_arg_names
        source = op.input_arg_names[0]
        self.read(source, label, op)
        for name in names:
            if self.plan.values[name].buffer != self.plan.values[source].buffer:
                self.refuse(f"{label} makes %{name} a view of %{source}, which lies in another buffer", op)
        definition = opdef(op.type)
        if definition.storage.view is not None:
            views = definition.views_of(self.shadow(source), None, op.attrs if step.here is None else step.here.attrs)
            if views is None:
                self.refuse(f"{label} makes %{names[0]} a view of %{source}, whose layout allows none", op)
            self.strides.update(zip(names, views or (), strict=True))
        for name in names if source in self.content else ():
            self.content[name] = self.content[source]
            if (span := self.span(name)) != self.span(source):
                self.content[name] = (_Content(name, span, ", ".join(dict.fromkeys(c.step for c in self.content[source]))),)
                self.live.setdefault(span.space, []).extend(self.content[name])

    def joined(self, step: Step, label: str) -> None:
        """A joined result has the contents of its operands. They must be at their places in the result."""
        op = step.op
        names, whole = op.input_arg_names, op.output_arg_names[0]
        for name, (_, there) in zip(names, self.part_places(step), strict=True):
            self.read(name, label, op)
            if not there:
                self.refuse(f"{label} needs %{name} at its place in %{whole}, and it is at another place", op)
        self.content[whole] = tuple([c for n in names for c in self.content.get(n, ())])

    def part_places(self, step: Step) -> list[tuple[Any, bool]]:
        """For an operator that joins: the place of each operand in the result, and whether the operand is there."""
        op, values, definition = step.op, self.plan.values, opdef(step.op.type)
        views = definition.storage.operand_views
        if views is None or not definition.in_slots[0].many or step.kernel == "nothing" or len(op.output_arg_names) != 1:
            return []
        whole = op.output_arg_names[0]
        parts = views(self.shadow(whole), [values[n].type.shape for n in op.input_arg_names], **op.attrs)
        return [
            (a, not a.size or values[n].buffer == values[whole].buffer and _place(self.shadow(n)) == _place(a))
            for n, a in zip(op.input_arg_names, parts, strict=True)
        ]

    def join_rest(self, step: Step, label: str, part_places: list[tuple[Any, bool]]) -> None:
        """Operands that are at their places in the result keep their contents; the others are copied there."""
        op, contents = step.op, list[_Content]()
        whole = self.span(op.output_arg_names[0])
        for name, (a, there) in zip(op.input_arg_names, part_places, strict=True):
            if there:
                contents += self.content.get(name, ())
                continue
            start = whole.start + _place(a)[0] - _place(self.shadow(op.output_arg_names[0]))[0]
            target = whole._replace(start=start, stop=start + a.nbytes)
            if not a.flags.c_contiguous or any(target.overlaps(self.span(n)) for n in self.reads(step)):
                self.refuse(f"{label} copies %{name} over its operands", op)
            self.end(target, f"{label} wrote %{op.output_arg_names[0]}")
            contents.append(_Content(op.output_arg_names[0], target, label))
            self.live.setdefault(target.space, []).append(contents[-1])
        self.content[op.output_arg_names[0]] = tuple(contents)

    def shadow(self, name: str) -> np.ndarray:
        """An array over the dummy with the value's offset and strides."""
        if name in self.strides:
            return self.strides[name]
        t, strided = self.plan.values[name].type, self.plan.values[name].strided
        if strided is not None:
            self.span(name)  # refuses a value that exceeds its buffer
        offset, strides = (0, None) if strided is None else strided
        return np.ndarray(t.shape, np_dtype(t.dtype), buffer=self.dummy, offset=offset, strides=strides)

    def same_bytes(self, name: str, other: str) -> bool:
        """Are two values of one type contiguous, and in the same bytes?"""
        a, b = self.shadow(name), self.shadow(other)
        return a.flags.c_contiguous and b.flags.c_contiguous and _place(a) == _place(b)

    def step(self, step: Step, label: str) -> None:
        op, reads, writes = step.op, self.reads(step), self.writes(step)
        for n in reads:
            self.read(n, label, op)
        if step.kernel == "control":
            self.control(step, label)
            reads += [n for body in bodies(op) for n in body.results(op)]
        scratch = _scratch(step)
        self.check_spans(op, [self.span(n) for n in (*reads, *writes)], scratch, label)
        if not step.overlapped:
            if self.running and communicates(step):
                self.refuse(f"{label} communicates while {self.running[0][1]} communicates too", op)
            self.check_running(label, op, [self.span(n) for n in reads], [*(self.span(n) for n in writes), *scratch])
        part_places = self.part_places(step)
        if any(there and a.size for a, there in part_places):
            self.join_rest(step, label, part_places)
            return
        for n in writes:
            self.check_overwrite(step, n, reads, writes, label)
        for span in scratch:
            self.end(span, f"{label} used scratch")
        for n in writes:
            self.write(n, label)

    def check_spans(self, op: Operator, taken: list[Span], scratch: list[Span], label: str) -> None:
        """Scratch must not overlap anything else of its step, and all bytes must be inside of the arena."""
        for k, span in enumerate(scratch):
            if any(span.overlaps(other) for other in (*taken, *scratch[:k])):
                self.refuse(f"{label} has scratch at {span.start}, over its operands, results or other scratch", op)
        for span in (*taken, *scratch):
            if span.space < 0 and not 0 <= span.start <= span.stop <= (size := self.plan.nbytes("arena", on_host=span.space == -2)):
                self.refuse(f"{label} uses bytes {span.start} to {span.stop} of an arena of {size}", op)

    def check_overwrite(self, step: Step, name: str, reads: list[str], writes: list[str], label: str) -> None:
        """A result may overwrite an operand only if the kernel reads each element before it writes it."""
        span, values = self.span(name), self.plan.values
        for other in writes:
            if other != name and span.overlaps(self.span(other)):
                self.refuse(f"{label} writes %{name} and %{other} into the same bytes", step.op)
        for other in reads:
            if not span.overlaps(self.span(other)) or any(s.of == name and not s.reads for s in step.scratch):
                continue
            same = values[name].type == values[other].type and self.same_bytes(name, other)
            if not (same and (other, name) in self.inplace(step)):
                self.refuse(f"{label} writes %{name} over its operand %{other}", step.op)

    def inplace(self, step: Step) -> Iterator[tuple[str, str]]:
        """The (operand, result) pairs of a step that may share storage."""
        first = opdef(step.op.type)
        if step.kernel == "fused" and first.native.tail:  # it reads its operands again after it writes its first result
            pairs = [(a, b) for a, b in first.storage.inplace if b != first.outputs[0]]
            yield from ((step.op.inputs[a][0], step.op.outputs[b][0]) for a, b in pairs if step.op.outputs.get(b))
            return
        if step.kernel in ("fused", "control"):
            yield from ((n, out) for n in step.reads for out in step.writes if step.kernel == "fused" or n == out)
        for op in step.ops:
            for a, b in opdef(op.type).storage.inplace:
                yield from ((n, out) for n in op.inputs.get(a, ())[:1] for out in op.outputs.get(b, ())[:1])

    def check_running(self, label: str, op: Operator, reads: list[Span], writes: list[Span]) -> None:
        """A step must not touch values that are still being sent or received. Overlapped steps themselves run in order."""
        for _, other, sent, received in self.running:
            for span in (*reads, *writes):
                if any(span.overlaps(s) for s in received) or span in writes and any(span.overlaps(s) for s in sent):
                    self.refuse(f"{label} uses bytes {span.start} to {span.stop} before {other} is waited for", op)

    def control(self, step: Step, label: str) -> None:
        """Each sub-block may have run or not. A loop body starts with the contents that its last iteration left."""
        live, content, ended = self.live, self.content, self.ended
        over: dict[int, tuple[_Content, str]] = {}
        for body in bodies(step.op):
            self.live = {space: list(found) for space, found in live.items()}
            self.content, self.ended = dict(content), dict(ended)
            for _ in range(2 if opdef(step.op.type).control.repeats else 1):
                self.steps(self.plan.bodies.get(body.idx, ()), f"{label}, block {body.idx}, step ")
            for n in body.results(step.op):
                self.read(n, label, step.op)
            over.update(self.ended)
        self.live = {space: [c for c in found if id(c) not in over] for space, found in live.items()}
        self.content, self.ended = content, {**ended, **over}
        for n in flow.writes(self.plan.program, step.op):
            if n in self.plan.values and n not in step.writes:
                self.write(n, label)


def _scratch(step: Step) -> list[Span]:
    return [Span(_arena(step.on_host), s.offset, s.offset + s.type.nbytes) for s in step.scratch]


def _arena(on_host: bool) -> int:
    return -2 if on_host else -1


def _place(a: np.ndarray) -> tuple[int, list[int]]:
    """The address of an array, and the strides of its axes above size 1."""
    return a.ctypes.data, [s for s, n in zip(a.strides, a.shape, strict=True) if n > 1]
