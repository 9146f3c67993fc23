"""What the ranks declare: merged into one, for they must agree in all but what a rank holds for itself."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.program import Program, Var
from ..ir.types import show_placement
from .expressions import Table
from .kinds import Signature
from .mesh import Mesh
from .operators import is_local
from .refuse import Refused, fail


class Declared:
    """The variables of block 0 of all ranks. Raises VerifyError where they do not agree."""

    def __init__(self, mesh: Mesh, table: Table, programs: Sequence[Program], single: bool = False):
        self.mesh, self.programs, self.single = mesh, programs, single
        self.n = len(programs)
        self.vars: dict[str, Var] = {}
        self.differs: dict[str, dict[int, Var]] = {}  # declared by not every rank, or not alike
        self.signatures: dict[str, Signature] = {}
        self.by_rank: dict[str, dict[int, Signature]] = {}  # of what is in `differs`
        kinds: list[tuple[dict[str, Var], list[int]]] = []
        for r, p in enumerate(self.programs):
            descs = p.global_block().descs
            for known, ranks in kinds[:2] + kinds[-1:]:
                if known is descs or known == descs:
                    ranks.append(r)
                    break
            else:
                kinds.append((descs, [r]))
        count: dict[str, int] = {}
        for descs, ranks in kinds:
            for n, d in descs.items():
                count[n] = count.get(n, 0) + len(ranks)
                first = self.vars.setdefault(n, d)
                if first is d or (first.type == d.type and first.placement == d.placement and _flags(first) == _flags(d)):
                    continue
                alike = is_local((first.type, first.placement)) and is_local((d.type, d.placement))
                if not alike or (first.persistable, first.is_data) != (d.persistable, d.is_data):
                    raise fail(
                        self.programs[ranks[0]], -1,
                        f"%{n} is declared {d.type}, {show_placement(d.placement)}, and otherwise by another rank: {first.type}, "
                        f"{show_placement(first.placement)}, persistable {first.persistable}", rank=ranks[0],
                    )  # fmt: skip
                self.differs.setdefault(n, {})
        for n, c in count.items():
            if c < self.n:
                self.differs.setdefault(n, {})
        for n, by_rank in self.differs.items():
            by_rank.update((r, descs[n]) for descs, ranks in kinds if n in descs for r in ranks)
            self.by_rank[n] = {r: table.signature(d.type, () if single else d.placement) for r, d in by_rank.items()}
        named: dict[str, str] = {}
        for n, d in self.vars.items():
            self.signatures[n] = table.signature(d.type, () if single else d.placement)
            for e in self.signatures[n][1]:
                if e.group:
                    named.setdefault(e.group, n)
        for g, n in named.items():
            absent = [r for r in range(self.n) if r not in self.mesh.where.get(g, ())]
            if absent:
                raise fail(
                    self.programs[absent[0]], -1, f"%{n} lies over group {g!r}, and rank {absent[0]} is in no set of it", rank=absent[0]
                )
        self.has_local = any(is_local(s) for s in self.signatures.values())
        for n, d in self.vars.items():
            try:
                self.mesh.canonical(self.signatures[n][1], d.type)
                if is_local(self.signatures[n]) and (d.persistable or d.is_data):
                    raise Refused("what a rank holds for itself cannot be fed or saved")
                if d.persistable and d.is_data:
                    raise Refused("a variable is fed or kept, not both")
            except Refused as e:
                raise fail(self.programs[next(iter(self.differs.get(n, (0,))))], -1, f"%{n}: {e}") from None

    def signature(self, name: str, rank: int) -> Signature:
        mine = self.by_rank.get(name)
        if mine is not None:
            if rank not in mine:
                raise Refused(f"%{name} is not declared")
            return mine[rank]
        found = self.signatures.get(name)
        if found is None:
            raise Refused(f"%{name} is not declared")
        return found


def _flags(d: Var) -> tuple[bool, bool, bool]:
    return d.persistable, d.is_data, d.is_parameter
