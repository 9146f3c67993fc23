"""PackSmall: small messages to or from one root travel as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ...ir.operator import Operator, Role
from ...ir.program import Block, ProgramPair, Var
from ...ir.types import ANY, Shard, TensorType
from ..pass_ import Job, Pass
from .waves import FROM_OWNERS, TO_OWNERS


@dataclass(frozen=True)
class PackSmall(Pass):
    """Of neighbouring collectives of one wave, pack those to or from one root, of one reduction and dtype, that carry less than `small_kb`
    KiB each. `types`: the kinds, as of GatherWaves."""

    small_kb: float = 64.0
    types: tuple[tuple[str, ...], ...] = (TO_OWNERS, FROM_OWNERS)
    requires = ("lowered",)

    def run(self, pair: ProgramPair, job: Job) -> ProgramPair:
        main = pair.main.copy()
        block = main.global_block()
        out: list[Operator] = []
        for kind, run in groupby(block.oplist, key=self._kind):
            ops = list(run)
            out += ops if kind is None else self._packed(block, ops)
        block.oplist = out
        return ProgramPair(main, pair.startup)

    def _kind(self, op: Operator) -> tuple | None:
        kind = next((k for k, types in enumerate(self.types) if op.type in types), None)
        return None if kind is None else (kind, op.attrs["group"], op.attrs["wave"])

    def _packed(self, block: Block, ops: list[Operator]) -> Iterator[Operator]:
        together: dict[object, list[Operator]] = {}
        for k, op in enumerate(ops):
            d = block.desc(op.input_arg_names[0])
            t = d.type
            small = (
                "root" in op.attrs
                and not any(isinstance(e, Shard) for e in d.placement)
                and ANY not in t.shape
                and t.nbytes < self.small_kb * 1024
            )
            # terms over another group stay apart from whole values
            together.setdefault((op.type, *op.attrs.values(), t.dtype, d.placement) if small else k, []).append(op)
        before: list[Operator] = []
        middle: list[Operator] = []
        behind: list[Operator] = []
        for members in together.values():
            if len(members) == 1:
                middle += members
                continue
            first = members[0]
            xs, outs = [op.input_arg_names[0] for op in members], [op.output_arg_names[0] for op in members]
            whole = f"{xs[0]}.packed"
            sizes = [block.desc(x).type for x in xs]
            packed = TensorType(sizes[0].dtype, (sum(t.numel for t in sizes),))
            made = f"{outs[0]}.packed"
            for name, like in ((whole, xs[0]), (made, outs[0])):
                block.descs[name] = Var(name, packed, block.desc(like).placement, stop_gradient=True)
            before.append(Operator("pack", {"X": tuple(xs)}, {"Out": (whole,)}, {}, role=Role.DIST, site=first.site))
            middle.append(first.replace(inputs={"X": (whole,)}, outputs={"Out": (made,)}))
            shapes = {"shapes": tuple(t.shape for t in sizes)}
            behind.append(Operator("unpack", {"X": (made,)}, {"Out": tuple(outs)}, shapes, role=Role.DIST, site=first.site))
        yield from (*before, *middle, *behind)
