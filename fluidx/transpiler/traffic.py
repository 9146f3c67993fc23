"""How many bytes a rank sends over each group in one run of its program, computed without running it."""

from __future__ import annotations

from ..ir.opdef import Effect, opdef
from ..ir.operator import Operator
from ..ir.parts import Coords, coords_of, local_shape
from ..ir.program import Block, Program
from ..ir.types import ANY, TensorType
from ..view.diff import show_bytes


class Traffic(dict[str, float]):
    """{group: bytes} that a rank sends; `operators` is the number of operators that send. `copied` are the bytes that it copies between
    device memory and host memory, which are not sent.

    A collective without an algorithm counts as the best algorithm in which all ranks send equally much (Thakur et al. 2005): an all_reduce
    among n ranks sends 2(n-1)/n of its value; all_gather, reduce_scatter, broadcast and reduce send (n-1)/n, all_to_all
    (n-1)/n^2. So do scatter_parts and gather_parts, on average over the ranks. A send counts its own bytes.
    """

    operators: int = 0
    copied: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.values())

    def __str__(self) -> str:
        sent = [f"{show_bytes(round(n))} over {g}" for g, n in self.items()] or ["nothing is sent"]
        return ", ".join([*sent, *([f"{show_bytes(round(self.copied))} to and from the host"] if self.copied else [])])


def traffic(program: Program, rank: int, batch: int = 1) -> Traffic:
    """The bytes that a rank sends in one run of its program if every open axis has the size `batch`. Each block counts once.

    >>> text = '''
    ... program p {
    ...   group dp = [0, 1]
    ...   data %x: f32[4] partial(sum) over dp
    ... dist:
    ...   %y: f32[4] = all_reduce(%x) {group="dp", op="sum"}
    ... }
    ... '''
    >>> print(traffic(Program.parse_from_string(text), rank=0))
    16 B over dp
    """
    found, coords = Traffic(), coords_of(program.groups, rank, program.turns)
    for block in program.blocks:
        for op in block.oplist:
            definition = opdef(op.type)
            if definition.effect is Effect.P2P and op.inputs:
                share = 1.0
            elif definition.comm.sent is not None and op.attrs["group"] in coords:
                share = definition.comm.sent(coords[op.attrs["group"]][1], _local_type(op, block, coords, batch), op.attrs)
            else:
                if definition.storage.copies_to:
                    found.copied += _local_type(op, block, coords, batch).nbytes
                continue
            group = op.attrs["group"]
            found[group] = found.get(group, 0) + share * _local_type(op, block, coords, batch).nbytes
            found.operators += 1
    return found


def _local_type(op: Operator, block: Block, coords: Coords, batch: int) -> TensorType:
    """The type of the value that the ranks of the operator's group hold together; for a message, the type of the sender's local value."""
    d = block.desc(op.input_arg_names[0])
    shape = [batch if s == ANY else s for s in d.type.shape]
    mine = () if opdef(op.type).effect is Effect.P2P or "group" not in op.attrs else (op.attrs["group"],)
    others = tuple(e for e in d.placement if e.group and e.group not in mine and not e.op)
    return TensorType(d.type.dtype, local_shape(shape, others, coords))
