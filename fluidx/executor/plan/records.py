"""The records of a plan: steps with kernels, values with storage, scratch and waits, for given sizes.

A plan is immutable and allocates nothing. `bind` turns it into calls over arrays. `str(plan)` shows it.
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
    Device memory and host memory have an arena each."""

    kind: str  # "arena", "feed" or "state"
    name: str  # the value that it was first allocated for
    nbytes: int
    start: int
    stop: int
    offset: int = 0
    on_host: bool = False


class StridedView(NamedTuple):
    """The place of a non-contiguous value in its buffer: offset in bytes, and strides in bytes."""

    offset: int
    strides: tuple[int, ...]


class Value(NamedTuple):
    """A value: its local type and the number of its buffer. `view_of` names the value of which it is a view. A value that has `strided` but
    is no view is written with strides: inside another value, or so that a later operator is a view of it."""

    type: TensorType
    buffer: int
    view_of: str = ""
    strided: StridedView | None = None


class Scratch(NamedTuple):
    """Bytes of the arena for one step only. `of` names the operand that is copied there (`reads`), or the result that is first written
    there; the copy converts the dtype if it differs. Without `of` it is scratch of the kernel."""

    type: TensorType
    offset: int
    of: str = ""
    reads: bool = False


class Step(NamedTuple):
    """One call of a run. `kernel` is "numpy", "native" or "any" for an operator's kernel body. The other kinds are:

    view      no call: the results are views of the operand
    joined    no call: the operands were written at their places in the result
    control   one of the sub-blocks runs, or one runs repeatedly
    exchange  neighbouring sends and receives start together
    fused     a chain of elementwise operators, in one pass over memory; results that nothing else reads are not stored
    fill      the results are constants, because this rank has no terms to reduce
    nothing   no call: this rank has no element of the results
    """

    ops: tuple[Operator, ...]
    kernel: str
    here: LocalOp | None = None  # the operator as this rank runs it, if that differs
    scratch: tuple[Scratch, ...] = ()
    overlapped: bool = False  # it starts when the earlier compute steps have ended, and runs at the same time as later ones
    waits_for: int | None = None  # the number of an overlapped step that must end before this one starts
    marked: bool = False  # a later step waits for it
    on_host: bool = False  # the host computes it in host memory, whatever the rank's device is

    @property
    def op(self) -> Operator:
        return self.ops[0]

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that the operators read, without those that an earlier operator of the chain computed."""
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
    """A compiled program for given sizes: everything that `bind` needs, and the costs of a run."""

    program: Program
    steps: tuple[Step, ...]
    bodies: Mapping[int, tuple[Step, ...]]  # steps of sub-blocks, by their number
    values: Mapping[str, Value]
    buffers: tuple[Buffer, ...]
    arena_bytes: int
    feeds: tuple[str, ...]  # in the order of the feed; only those of which this rank reads a part
    fetches: tuple[str, ...]
    fetch_types: tuple[TensorType, ...]  # global types
    absent: frozenset[str] = frozenset()  # values that other ranks hold and this one does not
    waits_at_end: int | None = None
    host_arena_bytes: int = 0  # of the arena in host memory, for offloaded values

    def all_steps(self) -> Iterator[Step]:
        """The steps, then the steps of sub-blocks."""
        yield from self.steps
        for steps in self.bodies.values():
            yield from steps

    def nbytes(self, kind: str, on_host: bool = False) -> int:
        """The bytes of all buffers of a kind in device memory, or in host memory. For "arena": the size of the arena."""
        if kind == "arena":
            return self.host_arena_bytes if on_host else self.arena_bytes
        return sum(b.nbytes for b in self.buffers if b.kind == kind and b.on_host is on_host)

    @property
    def peak_bytes(self) -> int:
        """The device memory of a run on this rank: state, feeds and the arena."""
        return self.nbytes("state") + self.nbytes("feed") + self.arena_bytes

    @property
    def host_bytes(self) -> int:
        """The host memory of a run, for offloaded values. On a CPU, device memory and host memory are the same."""
        return self.nbytes("state", on_host=True) + self.host_arena_bytes

    def cost(self, step: Step) -> Cost:
        """Bytes that a step reads and writes on this rank, and its arithmetic operations. Computed when it is called.

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
        """The bytes that each thread keeps for C kernels, once for all plans. Computed when it is read."""
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
        if ring := step.op.attrs.get("ring"):
            notes.append(f"ring {ring}")
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
