"""Offload: store parameters and optimizer state in host memory if only updates use them, and run the updates on the host."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from ...ir import flow
from ...ir.conversions import Conversions, Order
from ...ir.form_walk import FormWalk
from ...ir.forms import FormChoice, Held, Names, Results, Slots
from ...ir.memory_spaces import elements_read, pattern_in
from ...ir.opdef import Effect, OpDef, opdef
from ...ir.operator import Operator, Role, unary
from ...ir.pass_base import Job, Pass
from ...ir.program import Block, Program, ProgramPair
from ...ir.var import Var
from ...verify.memory_spaces import mixed

HOST, DEVICE = "host", "device"
_TALKS = (Effect.COLLECTIVE, Effect.P2P)
_UPDATES = (Role.OPTIMIZE, Role.LR_SCHED)
_COMPUTES = (Role.FORWARD, Role.LOSS, Role.BACKWARD)


@dataclass(frozen=True)
class Offload(Pass):
    """Run updates on the host, and store there the variables that they write and that forward and backward do not compute with. Sharded
    parameters, the optimizer's state and learning rates are then on the host; a device has gathered parameters, gradients and activations.
    A value that is read in the other memory is copied there before its reader, once in forward and once in backward. What updates read,
    such as gradients, is copied to the host as soon as it is finished, so that it does not stay on the device until the updates. Operators
    without inputs write their results directly into the memory that stores them. Communication runs on the device.
    Source: the CPU offload of ZeRO and of PyTorch's FSDP.
    """

    requires = ("lowered",)
    ensures = ("offloaded",)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        main, startup = pair.main.copy(), pair.startup.copy()
        resting = _resting(main)
        copies = [_offloaded(program, resting) for program in (main, startup)]
        job.log.append(f"on the host: {len(resting)} variables, for which main copies {copies[0]} times between the memories")
        return ProgramPair(main, startup)

    def conversions(self) -> Conversions:
        return MemoryCopies()


class MemoryCopies(Conversions):
    """The conversions of offload, for the proof: copies between the memories, and operators that read and write one memory."""

    def converts(self, op: Operator, block: Block) -> Order | None:
        return () if opdef(op.type).storage.copies_to else None

    def misfit(self, before: Operator, after: Operator, block: Block, made: Block) -> str:
        return mixed(after, made)


def _resting(main: Program) -> set[str]:
    """The persistables that are stored on the host: those that updates write, and those whose elements forward and backward do not read."""
    descs = main.global_block().descs
    used: set[str] = set()
    updated: set[str] = set()
    worked_on: set[str] = set()
    for block in main.blocks:
        for op in block.oplist:
            names = (*op.input_arg_names, *op.output_arg_names)
            used.update(names)
            if op.role in _UPDATES:
                updated.update(op.output_arg_names)
            elif op.role in _COMPUTES and any(n in descs and descs[n].persistable for n in names):
                worked_on.update(op.output_arg_names, elements_read(op, block))
    return {n for n in used if n in descs and descs[n].persistable and (n in updated or n not in worked_on)}


def _moved_for_updates(program: Program, resting: Container[str]) -> set[int]:
    """The operators, by id, that reshape or slice a value which only the host reads: the value is copied once before them."""
    found: set[int] = set()
    block = program.global_block()
    used: set[str] = set()
    by_device: set[str] = set()
    for op in reversed(block.oplist):
        definition, reads, writes = opdef(op.type), flow.reads(program, op), op.output_arg_names
        here = op.role in _UPDATES and definition.effect not in _TALKS
        if op.role is Role.DIST and writes and all(n in resting or n in used and n not in by_device for n in writes):
            here = not definition.control.bodies and pattern_in(op, block).flat_ranges
            found.update([id(op)] if here else ())
        used.update(reads)
        by_device.update(() if here else reads)
    return found


def _offloaded(program: Program, resting: Container[str]) -> int:
    """Put the operators of a program into the two memories, in place. Returns the number of copies between these."""
    walk = _Memories(program, resting)
    walk.run()
    return walk.count


class _Memories(FormWalk):
    """The walk over the two memories. Forward and backward each make their own copies of stored values, and operators that only move a
    value make their own copy; all other readers of a value share one copy. Values in `sent`, which operators of the host read, are copied
    to it when they are written."""

    by_name = True

    def __init__(self, program: Program, resting: Container[str]):
        super().__init__(program)
        self.resting = resting
        self.moved = _moved_for_updates(program, resting)
        self.persistable = [d.name for d in program.global_block().descs.values() if d.persistable]
        self.section = Role.DIST
        self.sent: set[str] = set()
        self.count = 0

    def _begin_block(self, block: Block) -> None:
        super()._begin_block(block)
        for op in () if block.idx else block.oplist:
            if self._on_host(op, opdef(op.type)):
                self.sent.update(elements_read(op, block))

    def _write(self, op: Operator, inputs: Slots | None, outs: Names, results: Results, attrs: Any = None) -> None:
        super()._write(op, inputs, outs, results, attrs)
        for n, (_, form) in zip(outs, results, strict=True):
            if n is not None and form == self.home[n] == DEVICE and n in self.sent and not self.block.idx:
                self.bring(n, HOST, op)

    def bring(self, name: str, form: Any, op: Operator, why: str = "") -> str:
        """All readers on the host share the copy of a value that was sent to it."""
        return super().bring(name, form, op.replace(role=Role.OPTIMIZE) if form == HOST and name in self.sent else op, why)

    def stored(self, d: Var) -> str | None:
        return HOST if d.name in self.resting else DEVICE if d.persistable or d.is_data else None

    def given(self, d: Var) -> str:
        return DEVICE

    def _before(self, op: Operator, reads: Names) -> None:
        """Drop copies of stored values where another section begins, so that none is kept from forward to backward."""
        if op.role is not Role.DIST and op.role is not self.section:
            self.section = op.role
            self.drop_copies(self.persistable)

    def keeps(self, op: Operator) -> bool:
        return op.role is not Role.DIST

    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> FormChoice:
        if to := definition.storage.copies_to:  # a copy that the program has already
            return FormChoice.of([DEVICE if to == HOST else HOST for _ in ins], [Held((to,))] * len(outs))
        here = HOST if self._on_host(op, definition) else DEVICE
        read = op.input_arg_names if op.role is Role.DIST else elements_read(op, self.block)
        return FormChoice.of([here if n in read else None for n in ins], [Held((here,))] * len(outs))

    def _on_host(self, op: Operator, definition: type[OpDef]) -> bool:
        """Does the host run the operator? It runs updates, operators that only move host values, and sources of values stored there."""
        if definition.effect in _TALKS or definition.storage.copies_to:
            return False
        if op.role in _UPDATES:
            return True
        if op.input_arg_names:
            return id(op) in self.moved or op.role is Role.DIST and self._hosted(op.input_arg_names)
        return self._hosted(op.output_arg_names)

    def _hosted(self, names: Sequence[str]) -> bool:
        return bool(names) and all(self.home.get(n) == HOST for n in names)

    def common(self, op: Operator, out: str, held: Sequence[tuple[str, Held]]) -> Held:
        return Held((self.home.get(out, HOST if op.role in _UPDATES else DEVICE),))

    def convert(self, name: str, source: str, target: str, want: str, near: Operator) -> None:
        self.out.append(unary("memcpy_d2h" if want == HOST else "memcpy_h2d", source, target, site=near.site))
        self.count += 1

    def declared(self, d: Var, form: str) -> Var:
        return d if d.on_host is (form == HOST) else d.changed(on_host=form == HOST)

    def copy(self, d: Var, form: str) -> Var:
        return Var(d.name, d.type, d.placement, stop_gradient=True, on_host=form == HOST)
