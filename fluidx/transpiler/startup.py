"""InitGroups and BroadcastStartup: create the communicators, then give every rank the same initial values."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.operator import Operator, Role
from ..ir.types import Shard
from ..ir.verifier import loss_seeds
from .rewrite import Job, Pass, Writer, each_op
from .roots import Chunk, assign


@dataclass(frozen=True)
class InitGroups(Pass):
    """Declare the cluster's groups in both programs and put one nccl_init for each at the head of startup."""

    def run(self, job: Job) -> None:
        groups = job.cluster.groups()
        job.main.groups = dict(groups)
        job.startup.groups = dict(groups)
        writer = Writer(job.startup)
        for group in groups:
            writer.builder().nccl_init(group=group)
        for op in writer.old:
            writer.keep(op)


@dataclass(frozen=True)
class BroadcastStartup(Pass):
    """Broadcast every persistable that startup creates from its owner, optimizer state included.

    Parameters belong to their root card where the strategy chose one, everything else is spread over the ranks by bytes. A variable that
    lives on one rank only (`owner`) is not broadcast.
    """

    group: str = "dp"

    def run(self, job: Job) -> None:
        if job.world_size == 1:
            return
        descs = job.startup.global_block().descs
        made = {n for op in job.startup.global_block().oplist for n in op.output_arg_names}
        shared = [d for n, d in descs.items() if n in made and d.persistable and not d.attrs.get("owner")]
        owner = {c.param: c.root for c in reversed(job.roots) if c.start == 0}
        rest = [Chunk(d.name, 0, d.type.numel, d.type.nbytes) for d in shared if d.name not in owner]
        owner.update({c.param: c.root for c in assign(rest, job.world_size)})
        last = {n: k for k, op in enumerate(job.startup.global_block().oplist) for n in op.output_arg_names}
        writer = Writer(job.startup)
        for k, op in enumerate(writer.old):
            writer.keep(op)
            for n in op.output_arg_names:
                d = descs.get(n)
                if d is not None and d.persistable and not d.attrs.get("owner") and last[n] == k:
                    writer.builder(near=op).broadcast(n, group=self.group, root=owner[n], out={"Out": n})


@dataclass(frozen=True)
class WeightUnevenBatch(Pass):
    """Scale the seed of every loss's gradient by the rank's share of the batch, so that an uneven last batch gives one device's gradients.

    For a mean that is the rank's rows over the mean rows of a rank; for a sum it is 1, and 0 on a rank without rows of its own.
    """

    group: str = "dp"

    def run(self, job: Job) -> None:
        if not job.loss_op or job.world_size == 1:
            return
        seeds = loss_seeds(job.main)
        renamed: dict[str, str] = {}

        def visit(writer: Writer, op: Operator) -> None:
            op = op.renamed(renamed) if renamed and op.role is Role.BACKWARD else op
            writer.keep(op)
            made = op.output_arg_names
            if made and made[0] in seeds:
                seed = made[0]
                writer.declare(f"{seed}.weight", writer.block.descs[seed])
                renamed[seed] = f"{seed}.weight"
                writer.builder(Role.BACKWARD, near=op).batch_weight(seed, group=self.group, op=job.loss_op, name=f"{seed}.weight")

        each_op(job.main, visit)


@dataclass(frozen=True)
class ShardRandom(Pass):
    """Tell random operators on split rows to draw the rank's slice of what one device would draw."""

    def run(self, job: Job) -> None:
        for block in job.main.blocks:
            for k, op in enumerate(block.oplist):
                if "sharded" not in op.attrs:
                    continue
                places = [p for n in op.input_arg_names if (d := block.find(n)) for p in d.placement]
                if any(p == Shard(0, p.group) for p in places):
                    block.oplist[k] = op.replace(attrs={**op.attrs, "sharded": True})
