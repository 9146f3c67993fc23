"""OffloadActivations: values that forward computes for backward are in host memory in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import flow
from ..ir.conversions import Conversions, Order
from ..ir.errors import ProgramError
from ..ir.opdef import opdef
from ..ir.operator import Operator, Role, rename_slots, unary
from ..ir.pass_base import ONE_DEVICE, Job, Pass, named
from ..ir.program import Block, Program
from ..ir.types import ANY, TensorType
from ..ir.unique_name import unused

_ROWS = 1024  # the size assumed for an open axis


@named
@dataclass(frozen=True, repr=False)
class OffloadActivations(Pass):
    """Values that forward computes and backward reads are copied to host memory after their last reader in forward, and back to the device
    before backward reads them: those of at least `least_mb` MiB, with 1024 for an open axis.

    They are copied back in sections: a section is the values whose first reader in backward is one operator. It is copied back when the
    section `ahead` places before it begins, so at most `ahead` + 1 sections are on the device. The first `ahead` sections of backward stay
    there. Views of a value, such as reshapes, are made again from its copy. Values that blocks read, and those that are written twice, stay
    as they are. Results are equal bit by bit. On CPUs both memories are one.
    Source: `save_on_cpu` of PyTorch, and the activation offloading of ZeRO-Infinity (Rajbhandari et al. 2021).

    >>> import fluidx as fx
    >>> main, startup = fx.Program("deep"), fx.Program("deep_startup")
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     h = fx.data("x", [-1, 8], "float32")
    ...     for _ in range(4):
    ...         h = fx.layers.fc(h, 8, act="tanh", bias_attr=False)
    ...     _ = fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    >>> made = OffloadActivations(least_mb=0).run(main)
    >>> [op.input_arg_names[0] for op in made.ops if op.type == "memcpy_d2h"]
    ['fc_0.tmp_1', 'fc_1.tmp_1', 'fc_2.tmp_1']
    """

    least_mb: float = 1.0
    ahead: int = 1
    requires = (ONE_DEVICE,)

    def __post_init__(self) -> None:
        if isinstance(self.least_mb, bool) or not isinstance(self.least_mb, (int, float)) or not self.least_mb >= 0:
            raise ProgramError(f"offload_activations: least_mb is a number of MiB, 0 or more, got {self.least_mb!r}")
        if isinstance(self.ahead, bool) or not isinstance(self.ahead, int) or self.ahead < 1:
            raise ProgramError(f"offload_activations: ahead is a number of sections, 1 or more, got {self.ahead!r}")

    def rewrite(self, program: Program, job: Job) -> Program:
        made = program.copy()
        found = _ActivationCopies(made, self.least_mb * 2**20)
        sections = found.sections()[self.ahead :]
        if not sections:
            what = f"backward of {program.label()} reads no value of {self.least_mb} MiB late enough"
            if not any(op.role is Role.BACKWARD for op in program.ops):
                what = f"{program.label()} computes no gradients; call minimize first"
            job.log.append(f"OffloadActivations changed nothing: {what}")
            return made
        starts = [found.first[section[0]] for section in found.sections()]
        for section, start in zip(sections, starts, strict=False):
            for name in section:
                found.send(name, start)
        made.global_block().oplist = found.written()
        return made

    def conversions(self) -> Conversions:
        return _ActivationConversions()


class _ActivationConversions(Conversions):
    """The conversions of this rewrite, for the proof: copies between the memories."""

    def converts(self, op: Operator, block: Block) -> Order | None:
        return () if opdef(op.type).storage.copies_to else None

    def misfit(self, before: Operator, after: Operator, block: Block, made: Block) -> str:
        read = next((n for n in after.input_arg_names if (d := made.find(n)) is not None and d.on_host), "")
        return f"reads %{read} on the host" if read else ""


@dataclass
class _KeptValue:
    """A value that forward computes and backward reads, alone or as a view of it. Numbers are those of operators."""

    last: int  # the last operator of forward that reads or makes it
    readers: dict[int, list[str]] = field(default_factory=dict)  # operator of backward -> the names that it reads: the value, or views


class _ActivationCopies:
    """The values that forward computes for backward, and the copies between the memories."""

    def __init__(self, program: Program, least: float):
        self.program, self.block, self.least = program, program.global_block(), least
        self.ops: Sequence[Operator] = self.block.oplist
        self.start = next((k for k, op in enumerate(self.ops) if op.role is Role.BACKWARD), len(self.ops))
        self.maker = {n: op for op in self.ops[: self.start] for n in op.output_arg_names}
        self.values = self._values()
        self.first = {name: min(v.readers) for name, v in self.values.items()}
        self.behind: dict[int, list[Operator]] = {}  # operators that follow the operator of this number
        self.before: dict[int, list[Operator]] = {}
        self.renamed: dict[int, dict[str, str]] = {}

    def _values(self) -> dict[str, _KeptValue]:
        """The values that may be copied, by name."""
        fixed = self._fixed()
        found: dict[str, _KeptValue] = {}
        for k, op in enumerate(self.ops):
            for n in dict.fromkeys((*op.input_arg_names, *(op.output_arg_names if k < self.start else ()))):
                root = self._root(n, fixed)
                if root is None:
                    continue
                value = found.setdefault(root, _KeptValue(k))
                if k < self.start:
                    value.last = k
                else:
                    value.readers.setdefault(k, []).append(n)
        return {n: v for n, v in found.items() if v.readers and self._nbytes(n) >= self.least}

    def _fixed(self) -> set[str]:
        """The values that stay: those that exist before the step, are written twice, or are read or written with blocks."""
        fixed: set[str] = set()
        seen: set[str] = set()
        for block in self.program.blocks:
            for op in block.oplist:
                reads, writes = flow.touches(self.program, op)
                if block.idx or op.sub_blocks():
                    fixed.update(reads, writes)
                fixed.update(n for n in writes if n in seen)
                seen.update(writes)
        return fixed

    def _root(self, name: str, fixed: set[str]) -> str | None:
        """The value of which `name` is a view; itself if it is no view; None if it stays on the device."""
        while True:
            op, d = self.maker.get(name), self.block.find(name)
            if op is None or d is None or d.persistable or d.is_data or d.on_host or name in fixed or d.type.__class__ is not TensorType:
                return None
            if not self._is_view(op):
                return name
            name = op.input_arg_names[0]

    def _is_view(self, op: Operator) -> bool:
        return opdef(op.type).storage.view is not None and len(op.input_arg_names) == len(op.output_arg_names) == 1

    def _nbytes(self, name: str) -> int:
        t = self.block.desc(name).type
        return t.nbytes * _ROWS ** sum(n == ANY for n in t.shape)

    def sections(self) -> list[list[str]]:
        """The values, in the order in which backward reads them first; those that one operator reads first are together."""
        found: dict[int, list[str]] = {}
        for name, at in self.first.items():
            found.setdefault(at, []).append(name)
        return [found[at] for at in sorted(found)]

    def send(self, name: str, start: int) -> None:
        """Copy a value to the host after forward, and back before operator `start`; readers in backward get the second copy."""
        value, maker = self.values[name], self.maker[name]
        host, back = self._declared(f"{name}.host", name, on_host=True), self._declared(f"{name}.device", name)
        near = self.ops[value.last]
        sent = unary("memcpy_d2h", name, host, site=maker.site).replace(role=Role.FORWARD, device=maker.device)
        self.behind.setdefault(value.last, []).append(sent)
        fetched = unary("memcpy_h2d", host, back, site=near.site).replace(role=Role.BACKWARD, device=maker.device)
        self.before.setdefault(start, []).append(fetched)
        views = {name: back}
        for k in sorted(value.readers):
            for n in value.readers[k]:
                self.renamed.setdefault(k, {})[n] = self._view(n, views, k)

    def _view(self, name: str, views: dict[str, str], at: int) -> str:
        """The second one of a view, which is taken before operator `at` if it was not taken before."""
        if name not in views:
            op = self.maker[name]
            source = self._view(op.input_arg_names[0], views, at)
            views[name] = self._declared(f"{name}.device", name)
            again = op.replace(
                inputs=rename_slots(op.inputs, {op.input_arg_names[0]: source}), outputs=rename_slots(op.outputs, {name: views[name]}),
                role=Role.BACKWARD, role_var=(),
            )  # fmt: skip
            self.before.setdefault(at, []).append(again)
        return views[name]

    def _declared(self, base: str, name: str, on_host: bool = False) -> str:
        d = self.block.desc(name)
        made = unused(base, self.block.descs)
        attrs = {} if on_host else {"copy_of": name}
        self.block.descs[made] = d.changed(name=made, stop_gradient=True, on_host=on_host, attrs=attrs)
        return made

    def written(self) -> list[Operator]:
        """The operators with the copies."""
        out: list[Operator] = []
        for k, op in enumerate(self.ops):
            out += self.before.get(k, ())
            changed = self.renamed.get(k)
            out.append(op.replace(inputs=rename_slots(op.inputs, changed)) if changed else op)
            out += self.behind.get(k, ())
        return out


__all__ = ["OffloadActivations"]
