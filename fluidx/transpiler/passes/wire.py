"""Wire: send gradients as 16-bit floats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import ceil, log2

from ...ir.dtypes import HALVES, SHORT
from ...ir.opdef import Effect, opdef
from ...ir.operator import Operator, Role, op_types
from ...ir.parts import entry_of
from ...ir.pass_base import Job, Pass
from ...ir.program import Program
from ...ir.program_rewriter import Writer
from ...ir.types import Partial, TensorType
from ...ir.var import Var
from ..scheduling.delay_together import Waiting, first_readers


@dataclass(frozen=True)
class Wire(Pass):
    """Cast final gradients to `dtype` before the collectives that add them up, and cast the sums back where they are read. Gradients are
    multiplied by `scale` before, and divided by it afterwards. By default, float16 gradients are divided by the number of ranks, rounded up
    to a power of two: then the sum is no larger than one gradient, and the division loses no bit. bfloat16 has the range of float32 and
    needs no scale. Gradients that backward still reads are not cast, and neither are other sums: a norm that is a sum of squares would
    overflow.
    Source: Horovod's Compression.fp16, prescale_factor and postscale_factor.
    """

    dtype: str = "float16"
    scale: float | None = None
    requires = ("lowered",)

    def rewrite(self, program: Program, job: Job) -> Program:
        writer = Writer(program)
        readers = first_readers(program, {t for t in op_types(writer.old) if opdef(t).effect is Effect.COLLECTIVE})
        gradients = {g for op in writer.old for g in op.role_var[1::2]}
        waiting, sent = Waiting(program), 0
        for op in writer.old:
            waiting.before([op])
            if op.role is Role.DIST and op.input_arg_names and gradients.issuperset(op.input_arg_names):
                gradients.update(op.output_arg_names)  # packed, or between two collectives
            if readers.get(id(op)) is Role.OPTIMIZE and gradients.issuperset(op.input_arg_names) and self._adds_up(writer, op):
                self._send(writer, op, waiting)
                sent += 1
            else:
                writer.keep(op)
        waiting.rest()
        if gradients and not sent and job.mesh.world_size > 1:
            job.unused.append(f"wire={self.dtype!r} narrows nothing: no gradient of {program.label()} that is sent has more than 16 bits")
        return writer.program

    def _adds_up(self, writer: Writer, op: Operator) -> bool:
        """Does an operator add up values of ranks in more than 16 bits?"""
        if not op.input_arg_names:
            return False
        d, group = writer.block.desc(op.input_arg_names[0]), _summed_over(op)
        left = entry_of(writer.block.desc(op.output_arg_names[0]).placement, group)
        return d.type.is_float and d.type.dtype not in HALVES and entry_of(d.placement, group) == Partial("sum", group) != left

    def _send(self, writer: Writer, op: Operator, waiting: Waiting) -> None:
        b, x, out = writer.builder(near=op), op.input_arg_names[0], op.output_arg_names[0]
        wide, short, scale = writer.block.desc(x).type.dtype, SHORT[self.dtype], self._scale(b.group_size(_summed_over(op)))
        if scale != 1.0:
            x = b.scale(x, scale=scale, suffix="scaled").name
        narrowed = b.narrow(x, dtype=self.dtype, suffix=short)
        whole = writer.block.desc(out)
        sent = writer.block.declare(Var(f"{out}.{short}", TensorType(self.dtype, whole.type.shape), whole.placement, stop_gradient=True))
        b.emit(op.type, narrowed, name=sent.name, **op.attrs)
        waiting.add((out,), partial(self._receive, writer, op, sent, wide, scale))

    @staticmethod
    def _receive(writer: Writer, op: Operator, sent: Var, wide: str, scale: float) -> None:
        b, out = writer.builder(near=op), {"Out": op.output_arg_names[0]}
        if scale == 1.0:
            b.widen(sent, dtype=wide, out=out)
        else:
            b.scale(b.widen(sent, dtype=wide, suffix="wide"), scale=1.0 / scale, out=out)

    def _scale(self, ranks: int) -> float:
        if self.scale is not None:
            return self.scale
        return 2.0 ** -ceil(log2(ranks)) if self.dtype == "float16" else 1.0


def _summed_over(op: Operator) -> str:
    """The group whose ranks hold the terms of the sum."""
    return op.attrs.get("trainers") or op.attrs["group"]
