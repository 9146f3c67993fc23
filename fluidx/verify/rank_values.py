"""The owners_value values of all ranks' variables: one atom for all ranks if they agree, else a value for each rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..ir.entries import is_local
from ..ir.offsets import Offsets
from ..ir.types import Placement, show_placement
from .declarations import Declarations
from .mesh import partial
from .operator_check import Signature
from .refusal import NotHere, Refusal
from .started import Started
from .values import EMPTY, UNDEFINED, ProgramValues


class VariableValues:
    """The values of the variables of block 0 of all ranks.

    `started`: the state before the run; None for startup, which begins without state. `depth`: the nesting depth of the block in the ranks'
    programs, which identifies the rounds of a loop.
    """

    def __init__(self, values: ProgramValues, declared: Declarations, started: Started | None, depth: int = 0):
        self.values, self.declared, self.started, self.depth = values, declared, started, depth
        self.table, self.mesh, self.n = values.table, values.mesh, declared.n
        self.shared: dict[str, int] = {}
        self.own: dict[str, dict[int, int]] = {}  # name -> {rank: value}, if ranks do not all have the same value
        self._owners: dict[int, Collection[int]] = {}
        self._filled: dict[tuple[str, tuple[int, ...]], Collection[int]] = {}
        self._rooted: dict[int, bool] = {}
        self._held: dict[tuple[int, int], bool] = {}
        self.written_by_all: set[str] = set()  # names that were last written on all ranks at once
        self.empty: set[tuple[str, int]] = set()  # (name, rank) that were written with an empty part
        self.unwritten: set[str] = set()  # names that still have their initial value
        # state that some rank may not have until it is written
        self.maybe_unwritten = {n for n, d in declared.vars.items() if d.persistable and started is not None and not started.everywhere(n)}

    def initial(self, name: str, rank: int) -> int:
        """The value of a variable before any operator has written it."""
        t, placement = self.declared.signature(name, rank)
        d = self.declared.vars[name]
        if d.is_data:
            e = self.table.symbol("data", name, t)
        elif d.persistable and self.started is not None:
            e = self.table.symbol("state", name, t)
        else:
            raise Refusal(f"%{name} is read before any operator defines it")
        placement = self.mesh.canonical(placement, t)
        a = self.values.term(e, placement, ("initial", name)) if partial(placement) else self.values.atom(e, placement)
        self.shared[name] = a
        self.unwritten.add(name)
        return a

    def start_from(self, name: str, outside: VariableValues) -> None:
        """Copy the value of a name from outside, at the start_from of a branch."""
        if name in outside.own:
            self.own[name] = dict(outside.own[name])
        elif name not in outside.shared:
            d = outside.declared.vars[name]
            if d.is_data or (d.persistable and outside.started is not None):
                outside.initial(name, next(iter(outside.declared.differs.get(name, (0,)))))
        if name in outside.shared:
            self.shared[name] = outside.shared[name]
            if name in outside.unwritten:
                self.unwritten.add(name)
        if name in outside.written_by_all:
            self.written_by_all.add(name)
        else:
            self.empty.update((name, r) for r in range(self.n) if (name, r) in outside.empty)

    def common_value(self, name: str) -> int:
        """The value of a name on all ranks; UNDEFINED if it differs between ranks."""
        return UNDEFINED if name in self.own else self.shared.get(name, UNDEFINED)

    def by_rank(self, name: str, rank: int) -> int:
        """The value of a name on one rank, or UNDEFINED."""
        return self.own.get(name, {}).get(rank, self.shared.get(name, UNDEFINED))

    def owners(self, signature: Signature) -> Collection[int]:
        """The ranks that have elements of a value, in order."""
        found = self._owners.get(id(signature))
        if found is None:
            t, declared = signature
            placement = self.mesh.canonical(declared, t)
            found = range(self.n)
            some = [members for e in declared if len(members := self.mesh.where.get(e.group, found)) < self.n]
            if len(placement) == 1 and placement[0].bounds is not None and not some and 0 not in t.shape:
                found = self._owners_of_pieces(placement[0].group, placement[0].bounds)
            elif some or any(e.is_cut or e.root is not None for e in placement):
                near = self._at_first_root(placement)
                holders = [r for r in near if all(r in members for members in some) and self.mesh.holds(placement, r)]
                # if the value has no elements at all, all its holders count
                owners = holders if 0 in t.shape else [r for r in holders if 0 not in self.mesh.local_shape(placement, t.shape, r)]
                found = dict.fromkeys(owners).keys() if len(owners) < self.n else found
            self._owners[id(signature)] = found
        return found

    def _at_first_root(self, placement: Placement) -> Collection[int]:
        """The ranks at the first root of a placement, in order; all ranks if it has no root."""
        for e in placement:
            if e.root is not None and e.group not in self.mesh.turns and e.group not in self.mesh.axes:
                return sorted([members[e.root] for members in self.mesh.groups[e.group] if e.root < len(members)])
        return range(self.n)

    def _owners_of_pieces(self, group: str, bounds: Offsets) -> Collection[int]:
        """The ranks whose range has elements; every rank is in the group."""
        filled = bounds.filled
        found = self._filled.get((group, filled))
        if found is None:
            ranks = sorted(members[k] for members in self.mesh.groups[group] for k in filled)
            found = self._filled[group, filled] = dict.fromkeys(ranks).keys() if len(ranks) < self.n else range(self.n)
        return found

    def read(self, name: str, rank: int, anywhere: bool = False) -> int:
        """The value of a name on a rank; EMPTY if its part has no elements.

        With `anywhere`, a rank without the value gets that of the ranks that have it.
        """
        signature = self.declared.signature(name, rank)
        by_rank = self.own.get(name)
        if is_local(signature[1]):
            value = None if by_rank is None else by_rank.get(rank)
            if value is None:
                raise Refusal(f"%{name} is read before any operator defines it")
            if value == UNDEFINED:
                raise NotHere(f"%{name} is undefined on rank {rank}")
            return value
        placement = signature[1]
        if placement:
            if not self._holds(signature, rank):
                if not anywhere:
                    placement = self.mesh.canonical(placement, signature[0])
                    raise NotHere(f"%{name} is {show_placement(placement)}, so rank {rank} does not have it")
                return self.owners_value(name, rank)
        if name in self.maybe_unwritten and not self.is_defined(name, rank):
            raise self._unstarted(name, rank)
        value = self.shared.get(name) if by_rank is None or rank not in by_rank else by_rank[rank]
        if value is None:
            value = self.initial(name, rank)
        if value == UNDEFINED:
            raise NotHere(f"%{name} is undefined on rank {rank}")
        if not placement or rank in self.owners(signature):
            return value
        self.require(name, rank)
        return EMPTY

    def _holds(self, signature: Signature, rank: int) -> bool:
        """True if a rank has a part of a value, which may be empty."""
        key = id(signature), rank  # equal signatures are one object
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = self.mesh.holds(self.mesh.canonical(signature[1], signature[0]), rank)
        return found

    def rooted(self, signature: Signature) -> bool:
        """True if a value is at roots only."""
        found = self._rooted.get(id(signature))  # equal signatures are one object
        if found is None:
            t, placement = signature
            found = self._rooted[id(signature)] = any(e.root is not None for e in self.mesh.canonical(placement, t))
        return found

    def require_on_all(self, name: str, signature: Signature) -> None:
        """Raise NotHere unless a value, which may be empty, is defined on every rank."""
        if name in self.maybe_unwritten:
            for rank in range(self.n):
                if not self.is_defined(name, rank):
                    raise self._unstarted(name, rank)
            return
        d = self.declared.vars[name]
        owners = range(self.n) if d.is_data or (d.persistable and self.started is not None) else self.owners(signature)
        if len(owners) < self.n:
            for rank in range(self.n):
                if rank not in owners:
                    self.require(name, rank)

    def require(self, name: str, rank: int) -> None:
        """Raise NotHere unless a value is defined on a rank. This is needed for empty parts too, because kernels read them."""
        if not self.is_defined(name, rank):
            raise NotHere(f"%{name} is read before any operator of rank {rank} defines it")

    def is_defined(self, name: str, rank: int) -> bool:
        """True if a value, which may be empty, is defined on a rank. State is defined by startup."""
        if name in self.written_by_all or (name, rank) in self.empty:
            return True
        if name in self.maybe_unwritten:
            if rank in self.own.get(name, ()) or (self.started is not None and self.started.on(name, rank)):
                return True
            return name in self.shared and name not in self.unwritten and rank in self.owners(self.declared.signature(name, rank))
        d = self.declared.vars[name]
        return d.is_data or (d.persistable and self.started is not None)

    def _unstarted(self, name: str, rank: int) -> Refusal:
        return Refusal(f"%{name} is read, and the startup program of rank {rank} does not write it; write it there")

    def owners_value(self, name: str, rank: int) -> int:
        """The value of a name on the ranks that have elements of it."""
        by_rank = self.own.get(name, {})
        owners = self.owners(self.declared.signature(name, rank))
        value = next((by_rank[o] for o in owners if by_rank.get(o, -1) >= 0), self.shared.get(name))
        if name in self.maybe_unwritten:
            for owner in owners:
                if not self.is_defined(name, owner):
                    raise self._unstarted(name, owner)
        if value is None:
            value = self.initial(name, rank)
        if value < 0:
            raise NotHere(f"%{name} is undefined")
        return value

    def write(self, name: str, rank: int, value: int) -> None:
        by_rank = self.own.get(name)
        if by_rank is None:
            by_rank = self.own[name] = {}
        by_rank[rank] = value
        if name in self.declared.differs:
            return
        signature = self.declared.signatures[name]
        if is_local(signature[1]):
            return
        owners = self.owners(signature)
        self.written_by_all.discard(name)
        if rank not in owners:
            self.empty.add((name, rank))
        if len(by_rank) < len(owners):
            return
        rank_values = [by_rank.get(o, UNDEFINED) for o in owners]
        value = next((v for v in rank_values if v >= 0), UNDEFINED)
        if value >= 0 and all(v == value or v == EMPTY for v in rank_values):
            self.shared[name] = value
            self.unwritten.discard(name)
            del self.own[name]

    def value(self, name: str, rank: int) -> int | None:
        """The value of a name on a rank; None if it has none."""
        try:
            return self.read(name, rank)
        except Refusal:
            return None


class AllRanks:
    """Reads and writes of block 0 on all ranks at once."""

    rank = None

    def __init__(self, rank_values: VariableValues):
        self.rank_values, self.depth = rank_values, rank_values.depth
        self.signature = rank_values.declared.of_first().__getitem__

    def read(self, name: str) -> int:
        rank_values = self.rank_values
        value = rank_values.shared.get(name)
        if value is None:
            value = rank_values.initial(name, 0)
        if value < 0:
            raise NotHere(f"%{name} is not always defined")
        signature = self.signature(name)
        if signature[1]:
            if rank_values.rooted(signature):
                raise NotHere(f"%{name} is {show_placement(signature[1])}, but every rank reads it")
        if (signature[1] or name in rank_values.maybe_unwritten) and name not in rank_values.written_by_all:
            rank_values.require_on_all(name, signature)
        return value

    def write(self, name: str, value: int) -> None:
        self.rank_values.shared[name] = value
        self.rank_values.written_by_all.add(name)
        self.rank_values.own.pop(name, None)


class RootRanks(AllRanks):
    """Reads and writes of block 0 on the ranks at some roots, which are given as placement entries."""

    def __init__(self, rank_values: VariableValues, roots: Placement):
        super().__init__(rank_values)
        self.roots = roots

    def read(self, name: str) -> int:
        rank_values = self.rank_values
        signature = self.signature(name)
        if not rank_values.rooted(signature):
            return super().read(name)
        if any(e.root is not None and e not in self.roots for e in signature[1]):
            raise NotHere(f"%{name} is {show_placement(signature[1])}, and an operator at {show_placement(self.roots)} reads it")
        value = rank_values.shared.get(name)
        if value is None:
            value = rank_values.initial(name, 0)
        if value < 0:
            raise NotHere(f"%{name} is not always defined")
        if name not in rank_values.written_by_all:
            rank_values.require_on_all(name, signature)
        return value


class PerRank:
    """Reads and writes of block 0 on one rank."""

    def __init__(self, rank_values: VariableValues, rank: int):
        self.rank_values, self.rank, self.depth = rank_values, rank, rank_values.depth

    def signature(self, name: str) -> Signature:
        return self.rank_values.declared.signature(name, self.rank)

    def read(self, name: str) -> int:
        value = self.rank_values.read(name, self.rank)
        return self.rank_values.owners_value(name, self.rank) if value == EMPTY else value

    def write(self, name: str, value: int) -> None:
        self.rank_values.write(name, self.rank, value)


def rank_of(scope: Any) -> int | None:
    """The rank of a scope; None for all ranks."""
    while not isinstance(scope, (AllRanks, PerRank)):
        scope = scope.outside
    return scope.rank
