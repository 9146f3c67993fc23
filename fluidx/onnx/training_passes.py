"""Passes that turn a program for inference into one for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..initializer import derive_seed
from ..ir import Block, Operator, Program, ProgramPair, flow
from ..ir.errors import nearest
from ..ir.pass_base import ONE_DEVICE, Job, Pass
from .errors import OnnxError


@dataclass(frozen=True)
class ActivateBatchNorms(Pass):
    """Batch normalizations whose output or a parameter matches a pattern use the statistics of the batch and update the running ones.

    No gradient changes running statistics. Raises OnnxError for a pattern without a match, and where the model computes the statistics.
    """

    patterns: tuple[str, ...] = ("*",)
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        known = [n for op in block.oplist if op.type == "batch_norm" for n in (*op.outputs["Y"], *op.input_arg_names[1:])]
        _check_all_match(self.patterns, known, "batch_norm", "values and parameters of batch normalizations are")
        block.oplist = [self._active(block, op) if op.type == "batch_norm" else op for op in block.oplist]
        return new

    def _active(self, block: Block, op: Operator) -> Operator:
        matches = _match((*op.outputs["Y"], *op.input_arg_names[1:]), self.patterns)
        running = {slot: op.inputs[slot] for slot in ("Mean", "Variance")}
        for slot, (name,) in running.items():
            if block.desc(name).is_parameter:
                exclude_from_training(block, name)
            elif matches:
                raise OnnxError(f"{op.to_string()}: {slot} is computed in the model and cannot be updated; leave it out of batch_norm=")
        if not matches:
            return op
        for slot in ("MeanOut", "VarianceOut"):
            block.descs.pop(op.outputs[slot][0], None)
        outs = {**op.outputs, "MeanOut": running["Mean"], "VarianceOut": running["Variance"]}
        return op.replace(outputs=outs, attrs={**op.attrs, "is_test": False})


@dataclass(frozen=True)
class ActivateDropouts(Pass):
    """Dropout drops again, at `rate`, or at the rate of each operator."""

    rate: float | None = None
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        block.oplist = [self._active(block, op) if op.type == "dropout" else op for op in block.oplist]
        return new

    def _active(self, block: Block, op: Operator) -> Operator:
        (x,), (y,) = op.inputs["X"], op.outputs["Out"]
        mask = op.outputs.get("Mask") or (f"{y}.mask",)
        block.create_var(mask[0], block.desc(x).type.shape, "uint8", stop_gradient=True)
        rate = op.attrs["dropout_prob"] if self.rate is None else self.rate
        attrs = {**op.attrs, "is_test": False, "dropout_prob": rate, "seed": op.attrs["seed"] or derive_seed(block.program, y)}
        return op.replace(outputs={**op.outputs, "Mask": mask}, attrs=attrs)


@dataclass(frozen=True)
class FreezeParameters(Pass):
    """Parameters that match a pattern are not trained. Raises OnnxError for a pattern without a match."""

    patterns: tuple[str, ...] = ("*",)
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        names = [p.name for p in program.all_parameters()]
        _check_all_match(self.patterns, names, "freeze", "the parameters are")
        new = program.copy()
        for name in names:
            if _match((name,), self.patterns):
                exclude_from_training(new.global_block(), name)
        return new


@dataclass(frozen=True)
class KeepNeeded(Pass):
    """Drop operators and variables that `targets` do not need, also from the startup program."""

    targets: tuple[str, ...]
    requires = (ONE_DEVICE,)

    def rewrite_pair(self, pair: ProgramPair, job: Job) -> ProgramPair:
        main, startup = pair.main.copy(), pair.startup.copy()
        block, begin = main.global_block(), startup.global_block()
        block.oplist = flow.live_ops(main, self.targets, given=set())
        used = {n for op in block.oplist for n in (*flow.reads(main, op), *flow.writes(main, op))} | set(self.targets)
        dead = {n for n, d in block.descs.items() if n not in used and not d.is_data}
        block.descs = {n: d for n, d in block.descs.items() if n not in dead}
        begin.descs = {n: d for n, d in begin.descs.items() if n not in dead}
        begin.oplist = [op for op in begin.oplist if not dead.issuperset(op.output_arg_names)]
        return ProgramPair(main, startup)


@dataclass(frozen=True)
class DropUnneeded(Pass):
    """Drop operators that `targets` do not need, and what they compute. Parameters stay: other outputs are written with them."""

    targets: tuple[str, ...]
    requires = (ONE_DEVICE,)

    def rewrite(self, program: Program, job: Job) -> Program:
        new = program.copy()
        block = new.global_block()
        block.oplist = flow.live_ops(new, self.targets, given=set())
        used = {n for op in block.oplist for n in (*flow.reads(new, op), *flow.writes(new, op))}
        block.descs = {n: d for n, d in block.descs.items() if n in used or d.persistable or d.is_data}
        return new


def _match(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(n, p) for n in names for p in patterns)


def exclude_from_training(block: Block, parameter: str) -> None:
    """Do not train that parameter."""
    desc = block.desc(parameter)
    block.declare(desc.changed(stop_gradient=True, attrs={**desc.attrs, "trainable": False}))


def _check_all_match(patterns: Sequence[str], names: Sequence[str], option: str, what: str) -> None:
    for p in patterns:
        if p != "*" and not _match(names, (p,)):
            raise OnnxError(f"set_training: {option} names {p!r}, but nothing has that name; {nearest(p, set(names), what)}")
