"""What a program does with given sizes, as data: steps with their kernels, values and the storage they lie in, scratch, waits.

Nothing is allocated for a plan, and none of it changes: `bind` turns one into calls over arrays. `str(plan)` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.types import TensorType
from .cost import Cost, step_cost, thread_bytes
from .rank_view import LocalOp


class Buffer(NamedTuple):
    """Storage that values share: bytes of the arena from operator `start` to operator `stop`, a fed array, or a variable of the scope.
    Each of the two memories has an arena of its own."""

    kind: str  # "arena", "feed" or "state"
    name: str  # the value it was made for
    nbytes: int
    start: int
    stop: int
    offset: int = 0
    on_host: bool = False


class StridedView(NamedTuple):
    """Where in its buffer a value lies that is not in one piece: bytes from the start, and distances of neighbours along its axes."""

    offset: int
    strides: tuple[int, ...]


class Value(NamedTuple):
    """A value: its type on this rank, and the number of the buffer that it lies in. `view_of` names the value that it is a view of;
    one that is no view and has `lies` was made in strides, inside another value or for a view of it."""

    type: TensorType
    buffer: int
    view_of: str = ""
    strided: StridedView | None = None


class Scratch(NamedTuple):
    """Bytes of the arena that one step alone uses. `of` names the operand that is copied there (`reads`), or the result that is made
    there first, converted where the type differs; without it the kernel asked for them."""

    type: TensorType
    offset: int
    of: str = ""
    reads: bool = False


class Step(NamedTuple):
    """One call of a run. `kernel` is "numpy", "native" or "any" for an operator's body, else what is done instead:

    view      nothing: the results are views of the operand
    joined    nothing: the operands were made where the result has them
    control   one of the sub-blocks runs, or one runs again and again
    exchange  neighbouring sends and receives start together
    fused     a chain of elementwise operators, which goes over memory once; what nothing else reads is not stored
    fill      the results are constants, because this rank has no terms to reduce
    nothing   no part of the results lies here
    """

    ops: tuple[Operator, ...]
    kernel: str
    here: LocalOp | None = None  # what it does on this rank, where that is not what it says
    scratch: tuple[Scratch, ...] = ()
    overlapped: bool = False  # it starts when the steps before it that are not are through, and runs beside those behind it
    waits_for: int | None = None  # the number of a step beside the others that has to be through before
    marked: bool = False  # a later step waits for it
    on_host: bool = False  # the host computes it, in its memory, whatever device the rank works on

    @property
    def op(self) -> Operator:
        return self.ops[0]

    @property
    def reads(self) -> tuple[str, ...]:
        """What the operators read, but for what one of a chain made before."""
        names: dict[str, None] = {}
        made: set[str] = set()
        for op in self.ops:
            names.update(dict.fromkeys(n for n in op.input_arg_names if n not in made))
            if self.kernel == "fused":
                made.update(op.output_arg_names)
        return tuple(names)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(n for op in self.ops for n in op.output_arg_names)


class Plan(NamedTuple):
    """What `bind` needs to run a program with these sizes, and what one can know of that run before."""

    program: Program
    steps: tuple[Step, ...]
    bodies: Mapping[int, tuple[Step, ...]]  # steps of sub-blocks, by their number
    values: Mapping[str, Value]
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    feeds: tuple[str, ...]  # in the order of the feed; those of which this rank reads a part
    fetches: tuple[str, ...]
    fetch_types: tuple[TensorType, ...]  # of the whole values, wherever their parts lie
    absent: frozenset[str] = frozenset()  # values that other ranks hold and this one does not
    waits_at_end: int | None = None
    host_arena_bytes: int = 0  # of the arena in the memory of the host, for values that are said to lie there

    def all_steps(self) -> Iterator[Step]:
        """The steps, and those of sub-blocks behind them."""
        yield from self.steps
        for steps in self.bodies.values():
            yield from steps

    def nbytes(self, kind: str, on_host: bool = False) -> int:
        """Bytes of all buffers of a kind in the memory of the rank's device, or of the host; of the arena, which they share, its size."""
        if kind == "arena":
            return self.host_arena_bytes if on_host else self.arena_bytes
        return sum(b.nbytes for b in self.buffers if b.kind == kind and b.on_host is on_host)

    @property
    def peak_bytes(self) -> int:
        """What a run on this rank takes of the memory of its device: state, feeds and the arena."""
        return self.nbytes("state") + self.nbytes("feed") + self.arena_bytes

    @property
    def host_bytes(self) -> int:
        """What it takes of the memory of the host for what is said to lie there. On a CPU that is one memory with the device's."""
        return self.nbytes("state", on_host=True) + self.host_arena_bytes

    def cost(self, step: Step) -> Cost:
        """Bytes that a step reads and writes on this rank, and its arithmetic operations; worked out when asked.

        >>> import fluidx as fx
        >>> from fluidx.executor.plan.dry_run import dry_plan
        >>> main = fx.Program("rows")
        >>> with fx.program_guard(main):
        ...     _ = fx.layers.softmax(fx.data("x", [-1, 4], "float32"))
        >>> planned = dry_plan(main, batch=10)
        >>> planned.cost(planned.steps[0])
        Cost(read=160, written=160, flops=200)
        """
        return step_cost(step, self.values)

    @property
    def thread_bytes(self) -> int:
        """What each thread at work keeps for C kernels, once for all plans; asked of them when it is asked for."""
        return max((thread_bytes(step, self.values) for step in self.all_steps()), default=0)

    def __str__(self) -> str:
        threads = f", each thread {self.thread_bytes}" if self.thread_bytes else ""
        host = f", on the host arena {self.host_arena_bytes}, state {self.nbytes('state', on_host=True)}" if self.host_bytes else ""
        lines = [
            f"plan of {self.program.label()}: {len(self.steps)} steps, arena {self.arena_bytes} bytes, "
            f"feeds {self.nbytes('feed')}, state {self.nbytes('state')}{host}{threads}"
        ]
        lines += [self._line(k, step) for k, step in enumerate(self.steps)]
        for idx, steps in self.bodies.items():
            lines += [f"block {idx}:", *(self._line(k, step) for k, step in enumerate(steps))]
        if self.waits_at_end is not None:
            lines.append(f"end: waits for step {self.waits_at_end}")
        return "\n".join(lines)

    def _line(self, k: int, step: Step) -> str:
        reads = ", ".join(self._where(n) for n in step.reads if n in self.values)
        writes = ", ".join(self._where(n) for n in step.writes if n in self.values)
        notes = [f"scratch {s.of and s.of + ' '}{s.type} at {s.offset}" for s in step.scratch]
        if step.on_host:
            notes.append("on the host")
        if step.overlapped:
            notes.append("beside compute")
        if step.waits_for is not None:
            notes.append(f"waits for step {step.waits_for}")
        told = f"  [{'; '.join(notes)}]" if notes else ""
        return f"{k:5d} {step.kernel:8} {' + '.join(op.type for op in step.ops)}: {reads or '()'} -> {writes or '()'}{told}"

    def _where(self, name: str) -> str:
        v = self.values[name]
        b = self.buffers[v.buffer]
        said = f"%{name} {v.type} " + (f"at {b.offset}" if b.kind == "arena" else b.kind) + (" of the host" if b.on_host else "")
        if v.strided is not None:
            said += f"+{v.strided.offset} in steps of {','.join(map(str, v.strided.strides))}"
        return said + (f" as %{v.view_of}" if v.view_of else "")
