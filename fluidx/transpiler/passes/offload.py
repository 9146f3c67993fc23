"""Offload: what only updates work on lives in the memory of the host, and updates run there."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from ...ir import flow
from ...ir.memory_spaces import elements_read, pattern_in
from ...ir.opdef import Effect, OpDef, opdef
from ...ir.operator import Operator, Role, unary
from ...ir.program import Block, Program, ProgramPair, Var
from ...ir.unique_name import unused
from ..pass_base import Job, Pass

_TALKS = (Effect.COLLECTIVE, Effect.P2P)
_UPDATES = (Role.OPTIMIZE, Role.LR_SCHED)
_COMPUTES = (Role.FORWARD, Role.LOSS, Role.BACKWARD)


@dataclass(frozen=True)
class Offload(Pass):
    """Run updates on the host, and keep there what they write and what forward and backward do not work on.

    Parameters that rest cut, the optimizer's state and learning rates are then on the host; a device has parameters in use, gradients and
    activations. What is read in the other memory is copied there in front of its reader, by forward and by backward each for itself.
    Sources write what they define where it rests. Communication is the device's.
    Source: the CPU offload of ZeRO and of PyTorch's FSDP.
    """

    requires = ("lowered",)
    ensures = ("offloaded",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        main, startup = pair.main.copy(), pair.startup.copy()
        resting = _resting(main)
        copies = [_Offloading(program, resting).run() for program in (main, startup)]
        job.log.append(f"on the host: {len(resting)} variables, for which main copies {copies[0]} times between the memories")
        return ProgramPair(main, startup)


def _resting(main: Program) -> set[str]:
    """The persistables that rest on the host: those that updates write, and those on whose elements forward and backward do not work."""
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
    """The operators, by id, that lay out anew what the host alone reads: that is copied in one piece in front of them."""
    found: set[int] = set()
    block = program.global_block()
    used: set[str] = set()
    by_device: set[str] = set()
    for op in reversed(block.oplist):
        definition, reads, writes = opdef(op.type), flow.reads(program, op), op.output_arg_names
        here = op.role in _UPDATES and definition.effect not in _TALKS
        if op.role is Role.DIST and writes and all(n in resting or n in used and n not in by_device for n in writes):
            here = not definition.bodies and pattern_in(op, block).laid
            found.update([id(op)] if here else ())
        used.update(reads)
        by_device.update(() if here else reads)
    return found


class _Offloading:
    """Puts the operators of one program into the two memories, in place. `run` gives the number of copies written."""

    def __init__(self, program: Program, resting: Iterable[str]):
        self.program = program
        self.block = program.global_block()
        self.hosted = set(resting)  # what lies on the host, of all that has a place
        self.placed = {n for n, d in self.block.descs.items() if d.persistable or d.is_data}
        self.moved = _moved_for_updates(program, self.hosted)
        self.copies: dict[str, str] = {}  # of values, in the other memory
        self.section = Role.DIST
        self.count = 0

    def run(self) -> int:
        self._block(self.block)
        for block in self.program.blocks:
            for n, d in block.descs.items():
                if n in self.hosted and not d.on_host:
                    block.descs[n] = d.changed(on_host=True)
        return self.count

    def _block(self, block: Block) -> None:
        outer, self.block = self.block, block
        ops, block.oplist = block.oplist, []
        for op in ops:
            definition = opdef(op.type)
            if op.role is not Role.DIST and op.role is not self.section:
                self._turn(op.role)
            if definition.bodies:
                self._control(op, definition)
            else:
                self._operator(op, definition)
        self.block = outer

    def _turn(self, role: Role) -> None:
        """Operators of this role follow: copies of what rests are made anew, so that none is kept from forward to backward."""
        self.section = role
        descs = self.program.global_block().descs
        self.copies = {n: copy for n, copy in self.copies.items() if n not in descs or not descs[n].persistable}

    # -- one operator ----------------------------------------------------------------------------------------------------

    def _operator(self, op: Operator, definition: type[OpDef]) -> None:
        here = self._on_host(op, definition)
        away = {n for n in op.input_arg_names if (n in self.hosted) is not here}
        if away and op.role is not Role.DIST:
            away.intersection_update(elements_read(op, self.block))
        read = {n: self._copied(n, op) for n in sorted(away)}
        made = {n: self._new(n, here) for n in op.output_arg_names if n in self.placed and (n in self.hosted) is not here}
        new = op.renamed(read)
        if made:
            new = new.replace(outputs={s: tuple([made.get(n, n) for n in names]) for s, names in op.outputs.items()})
        self.block.oplist.append(new)
        self._forget(op.output_arg_names)
        for n in op.output_arg_names:
            if n in made:
                self._copy(made[n], n, op)
            elif n not in self.placed:
                self._place(n, here)

    def _on_host(self, op: Operator, definition: type[OpDef]) -> bool:
        """Does the host run it: an update, what moves only what lies there, or a source of what rests there?"""
        if definition.effect in _TALKS:
            return False
        if op.role in _UPDATES:
            return True
        if op.input_arg_names:
            return id(op) in self.moved or op.role is Role.DIST and self.hosted.issuperset(op.input_arg_names)
        return bool(op.output_arg_names) and self.hosted.issuperset(op.output_arg_names)

    def _copied(self, name: str, op: Operator) -> str:
        """The name of a copy in the other memory; what only moves the value takes one of its own."""
        alone = op.role is Role.DIST
        if not alone and name in self.copies:
            return self.copies[name]
        copy = self._new(name, name not in self.hosted)
        self._copy(name, copy, op)
        if not alone:
            self.copies[name] = copy
        return copy

    def _copy(self, source: str, target: str, near: Operator) -> None:
        kind = "memcpy_d2h" if target in self.hosted else "memcpy_h2d"
        self.block.oplist.append(unary(kind, source, target, site=near.site))
        self.count += 1

    def _new(self, name: str, on_host: bool) -> str:
        """Declare a value like one of the other memory."""
        copy = unused(f"{name}.{'host' if on_host else 'device'}", self.block.find)
        d = self.block.desc(name)
        self.block.descs[copy] = Var(copy, d.type, d.placement, stop_gradient=True)
        self._place(copy, on_host)
        return copy

    def _place(self, name: str, on_host: bool) -> None:
        self.placed.add(name)
        if on_host:
            self.hosted.add(name)

    def _forget(self, names: Iterable[str]) -> None:
        """What was copied of these is not their value any more."""
        for n in names:
            self.copies.pop(n, None)

    # -- operators that run blocks ---------------------------------------------------------------------------------------

    def _control(self, op: Operator, definition: type[OpDef]) -> None:
        """Each operator of a block has its own memory; all blocks leave a result in one. What decides is read wherever it lies."""
        self._forget(flow.writes(self.program, op))
        outer, here = self.copies, op.role in _UPDATES
        for n in op.output_arg_names:
            if n not in self.placed:
                self._place(n, here)
        attrs = dict(op.attrs)
        for which, results in definition.bodies.items():
            self.copies = dict(outer)
            block = self.program.blocks[op.attrs[which].idx]
            self._block(block)
            if results:
                attrs[results] = tuple([self._left(block, n, out, op) for n, out in zip(attrs[results], op.output_arg_names, strict=True)])
        self.copies = outer
        self.block.oplist.append(op if attrs == op.attrs else op.replace(attrs=attrs))

    def _left(self, block: Block, name: str, out: str, op: Operator) -> str:
        """The name under which a block leaves a result in the memory of the operator's."""
        if (name in self.hosted) is (out in self.hosted):
            return name
        outer, self.block = self.block, block
        copy = self._copied(name, op)
        self.block = outer
        return copy
