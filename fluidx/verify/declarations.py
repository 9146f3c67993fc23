"""The declarations of all ranks, merged. Ranks must agree on every variable that is not local to a rank."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.change_stamps import Twins, Variables, regrouped
from ..ir.entries import is_local
from ..ir.program import Program
from ..ir.types import show_placement
from ..ir.var import Var
from .mesh import RankGroups
from .normal_form import ExpressionTable
from .operator_check import Signature
from .refusal import Refusal, fail


class Signatures(dict[str, Signature]):
    """Signatures by name. A name that is not declared is refused."""

    def __missing__(self, name: str) -> Signature:
        raise Refusal(f"%{name} is not declared")


class Declarations:
    """The variables of block 0 of all ranks. Raises VerifyError if the ranks do not agree."""

    def __init__(self, mesh: RankGroups, table: ExpressionTable, programs: Sequence[Program], twins: Twins, single: bool = False):
        self.mesh, self.programs, self.single = mesh, programs, single
        self.n = len(programs)
        self.vars: dict[str, Var] = {}
        self.differs: dict[str, dict[int, Var]] = {}  # variables that some ranks do not declare, or declare differently
        self.signatures = Signatures()
        self.by_rank: dict[str, dict[int, Signature]] = {}  # for the names in `differs`
        self._equally: dict[str, bool] = {}
        self.helpers: set[int] = set()  # ranks without feeds and state: they need not declare replicated values
        twins = regrouped(twins, lambda p: Variables(p.global_block().descs))
        if differs := self._merge(twins):
            self.differs = {n: {} for n in self.vars if n in differs}
            self._by_rank(twins, table)
        apart = {g: [r for r in range(self.n) if r not in where] for g, where in mesh.where.items()}
        for n, d in self.vars.items():
            self.signatures[n] = signature = table.signature(d.type, () if single else d.placement)
            for e in signature[1]:
                outside = apart.get(e.group) and [r for r in apart[e.group] if r in self.differs.get(n, range(self.n))]
                if outside:
                    program, r = self.programs[outside[0]], outside[0]
                    raise fail(program, -1, f"%{n} is placed over group {e.group!r}, and rank {r} is in no set of it", rank=r)
        self.has_local = any(is_local(s[1]) for s in self.signatures.values())
        for n, d in self.vars.items():
            try:
                self.mesh.canonical(self.signatures[n][1], d.type)
                if is_local(self.signatures[n][1]) and (d.persistable or d.is_data):
                    raise Refusal("a local variable cannot be fed or be state")
                if d.persistable and d.is_data:
                    raise Refusal("a variable cannot be both data and state")
            except Refusal as e:
                raise fail(self.programs[next(iter(self.differs.get(n, (0,))))], -1, f"%{n}: {e}") from None

    def _merge(self, twins: Twins) -> set[str]:
        """Fill `vars`; return the names that some ranks do not declare, or declare differently."""
        differs: set[str] = set()
        base = Variables(twins[0][0].global_block().descs)
        known = self.vars = dict(base.items())
        added: dict[str, None] = {}  # names that rank 0 does not declare
        for program, ranks in twins[1:]:
            theirs, there = base.unlike(Variables(program.global_block().descs))
            for n, d in theirs.items():
                first = known.get(n)
                if first is None:
                    known[n] = d
                    added[n] = None
                    continue
                if first is d or (first.type == d.type and first.placement == d.placement and _flags(first) == _flags(d)):
                    continue
                both_local = is_local(first.placement) and is_local(d.placement)
                if not both_local or (first.persistable, first.is_data, first.on_host) != (d.persistable, d.is_data, d.on_host):
                    raise fail(
                        program, -1,
                        f"%{n} is declared {d.type}, {show_placement(d.placement)}, and differently by another rank: {first.type}, "
                        f"{show_placement(first.placement)}, persistable {first.persistable}, on_host {first.on_host}", rank=ranks[0],
                    )  # fmt: skip
                differs.add(n)
            differs.update(n for n in there if n not in theirs)
        return differs.union(added)

    def _by_rank(self, twins: Twins, table: ExpressionTable) -> None:
        for program, ranks in twins:
            descs = program.global_block().descs
            if not any(d.persistable or d.is_data for d in descs.values()):
                self.helpers.update(ranks)
            for n, by_rank in self.differs.items():
                d = descs.get(n)
                if d is not None:
                    by_rank.update(dict.fromkeys(ranks, d))
                    s = table.signature(d.type, () if self.single else d.placement)
                    self.by_rank.setdefault(n, {}).update(dict.fromkeys(ranks, s))

    def signature(self, name: str, rank: int) -> Signature:
        mine = self.by_rank.get(name)
        if mine is not None:
            if rank not in mine:
                raise Refusal(f"%{name} is not declared")
            return mine[rank]
        return self.signatures[name]

    def is_declared_equally(self, name: str) -> bool:
        """True if the ranks that declare a variable do so with one type and placement."""
        found = self._equally.get(name)
        if found is None:
            found = self._equally[name] = len(set(map(id, self.by_rank.get(name, {}).values()))) < 2  # equal signatures are one object
        return found

    def of_first(self) -> Signatures:
        """The signatures of rank 0."""
        if not self.by_rank:
            return self.signatures
        common = {n: s for n, s in self.signatures.items() if n not in self.by_rank}
        return Signatures(common | {n: of[0] for n, of in self.by_rank.items() if 0 in of})


def _flags(d: Var) -> tuple[bool, ...]:
    return d.persistable, d.is_data, d.is_parameter, d.on_host
