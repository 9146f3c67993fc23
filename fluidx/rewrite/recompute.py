"""Recompute: values of the forward pass are computed again where the backward pass reads them, in a program that has its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir import flow
from ..ir.operator import Operator, Role, rename_slots
from ..ir.pass_base import Job, Pass, named
from ..ir.program import Block, Program
from ..recompute_segments import RecomputedValues, Segments, automatic


@named
@dataclass(frozen=True, repr=False)
class Recompute(Pass):
    """Keep only what is read behind the cuts of the forward pass, and compute the values between them again for the backward pass.

    The cuts are those of `append_backward(checkpoints="auto")`, with what the backward pass reads as the values that are kept otherwise.
    Results are equal bit by bit: the copy of a random operator draws the same numbers. Operators with effects, those with sub-blocks and
    those that read what they or later operators overwrite, such as a batch_norm, run once. A transpile proves the ranks against the program
    without recompute.

    >>> import fluidx as fx
    >>> main, startup = fx.Program("deep"), fx.Program("deep_startup")
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     h = fx.data("x", [-1, 8], "float32")
    ...     for _ in range(6):
    ...         h = fx.layers.fc(h, 8, act="tanh")
    ...     _ = fx.optimizer.SGD(0.1).minimize(fx.layers.mean(h))
    >>> again = Recompute().run(main)
    >>> len(again.ops) - len(main.ops), fx.strategies.zero1().with_rewrites(Recompute())
    (6, zero1().with_rewrites(Recompute()))
    """

    def rewrite(self, program: Program, job: Job) -> Program:
        made = program.copy()
        block = made.global_block()
        ops = list(block.oplist)
        start = next((k for k, op in enumerate(ops) if op.role is Role.BACKWARD), len(ops))
        segments = _segments(made, ops[:start], ops[start:])
        if not segments.cuts:
            job.log.append(f"Recompute changed nothing: the backward pass of {program.label()} reads no values between two cuts")
            return made
        last_write = {n: k for k, op in enumerate(ops[:start]) for n in flow.writes(made, op)}
        again = RecomputedValues(block, ops[:start], last_write, segments)
        block.oplist = ops[:start]
        for op in ops[start:]:
            block.oplist.append(_reading_again(op, block, again, last_write) if op.role is Role.BACKWARD else op)
        return made


def _reading_again(op: Operator, block: Block, again: RecomputedValues, last_write: Mapping[str, int]) -> Operator:
    """An operator of the backward pass that reads second values. They are computed before it, if they are not yet."""
    reads = {n: again.value(n, last_write[n]).name for n in dict.fromkeys(op.input_arg_names) if n in last_write}
    changed = {n: other for n, other in reads.items() if n != other}
    return op.replace(inputs=rename_slots(op.inputs, changed)) if changed else op


def _segments(program: Program, before: list[Operator], behind: list[Operator]) -> Segments:
    """The segments of a program with these operators before its backward pass, and these from there on."""
    block = program.global_block()
    backward = [op for op in behind if op.role is Role.BACKWARD]
    read = {n for op in backward for n in op.input_arg_names}
    found = automatic(block, before, [not read.isdisjoint(op.output_arg_names) for op in before])
    keep = found.keep | _inside(program) | _unsteady(program, before, behind)
    return Segments(keep, found.cuts)


def _inside(program: Program) -> set[str]:
    """The variables that operators in sub-blocks name."""
    return {n for b in program.blocks[1:] for op in b.oplist for n in (*op.input_arg_names, *op.output_arg_names)}


def _unsteady(program: Program, before: list[Operator], behind: list[Operator]) -> set[str]:
    """The results of operators before the backward pass that would be others if they were computed again: because a value that an operator
    reads is overwritten before that, by itself or by another one, or the result itself is."""
    last = max((k for k, op in enumerate(behind) if op.role is Role.BACKWARD), default=-1)
    writers = flow.definitions(program, [*before, *behind[: last + 1]])
    found = {n for n, at in writers.items() if len(at) > 1}
    for k, op in enumerate(before):
        if any(at[-1] >= k for at in map(writers.get, op.input_arg_names) if at):
            found.update(op.output_arg_names)
    return found
