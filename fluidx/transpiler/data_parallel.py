"""AllReduceGrads: every rank gets the whole gradient and optimizes for itself."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.operator import Operator, Role
from .places import is_trainable_pair, reduced_name
from .rewrite import Job, Pass, Writer, each_op


@dataclass(frozen=True)
class AllReduceGrads(Pass):
    """Behind the operator that finishes a parameter's gradient, all_reduce it over the group; later readers take the result.

    The reduction is the one by which the ranks' losses combine: the mean for a mean loss, the sum for a summed one.
    Source: "AllReduce" in Paddle's NCCL design document.
    """

    group: str = "dp"

    def run(self, job: Job) -> None:
        if not job.loss_op:
            return
        renamed: dict[str, str] = {}

        def visit(writer: Writer, op: Operator) -> None:
            if renamed and op.role is not Role.BACKWARD:
                op = op.renamed(renamed)
            writer.keep(op)
            for _, grad in is_trainable_pair(writer.block.descs, op):
                like = writer.block.descs[grad]
                if not like.placement:
                    job.skipped.append(f"{grad} is the same on every rank already")
                    continue
                name = reduced_name(grad, job.loss_op)
                writer.declare(name, like)
                renamed[grad] = name
                writer.builder(near=op).all_reduce(grad, group=self.group, op=job.loss_op, name=name)

        each_op(job.main, visit)
