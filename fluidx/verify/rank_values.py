"""What the ranks hold under their names: one value for all ranks where they hold the same, and what some hold for themselves."""

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


class Holdings:
    """The variables of block 0 of all ranks. `started`: the state with which they begin; None for startup, which begins with none.
    `depth`: in how many blocks of the ranks' programs it stands; rounds of loops are told by it."""

    def __init__(self, values: ProgramValues, declared: Declarations, started: Started | None, depth: int = 0):
        self.values, self.declared, self.started, self.depth = values, declared, started, depth
        self.table, self.mesh, self.n = values.table, values.mesh, declared.n
        self.shared: dict[str, int] = {}
        self.own: dict[str, dict[int, int]] = {}  # what some ranks hold under a name, where not all hold the same
        self._owners: dict[int, Collection[int]] = {}
        self._filled: dict[tuple[str, tuple[int, ...]], Collection[int]] = {}
        self._rooted: dict[int, bool] = {}
        self.by_all: set[str] = set()  # what all ranks wrote together
        self.empty: set[tuple[str, int]] = set()  # what a rank wrote of which it has no elements
        self.unwritten: set[str] = set()  # what all hold as they began with it
        # state that some rank may be without, until it is written
        self.unsure = {n for n, d in declared.vars.items() if d.persistable and started is not None and not started.everywhere(n)}

    def initial(self, name: str, rank: int) -> int:
        """What a variable holds before any operator has written it."""
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

    def begin(self, name: str, outside: Holdings) -> None:
        """Hold what the ranks hold outside of a branch that begins."""
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
        if name in outside.by_all:
            self.by_all.add(name)
        else:
            self.empty.update((name, r) for r in range(self.n) if (name, r) in outside.empty)

    def agreed(self, name: str) -> int:
        """What all ranks hold under a name; UNDEFINED where they do not hold the same."""
        return UNDEFINED if name in self.own else self.shared.get(name, UNDEFINED)

    def mine(self, name: str, rank: int) -> int:
        """What one rank holds under a name; UNDEFINED for nothing."""
        return self.own.get(name, {}).get(rank, self.shared.get(name, UNDEFINED))

    def owners(self, signature: Signature) -> Collection[int]:
        """The ranks that hold elements of a value, in order."""
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
                # of a value that has no elements at all, none of them lacks any
                owners = holders if 0 in t.shape else [r for r in holders if 0 not in self.mesh.local_shape(placement, t.shape, r)]
                found = dict.fromkeys(owners).keys() if len(owners) < self.n else found
            self._owners[id(signature)] = found
        return found

    def _at_first_root(self, placement: Placement) -> Collection[int]:
        """The ranks at the first root of a placement, in order; all ranks where it has none."""
        for e in placement:
            if e.root is not None and e.group not in self.mesh.turns and e.group not in self.mesh.axes:
                return sorted([members[e.root] for members in self.mesh.groups[e.group] if e.root < len(members)])
        return range(self.n)

    def _owners_of_pieces(self, group: str, bounds: Offsets) -> Collection[int]:
        """The ranks whose range has elements, where every rank is in the group."""
        filled = bounds.filled
        found = self._filled.get((group, filled))
        if found is None:
            ranks = sorted(members[k] for members in self.mesh.groups[group] for k in filled)
            found = self._filled[group, filled] = dict.fromkeys(ranks).keys() if len(ranks) < self.n else range(self.n)
        return found

    def read(self, name: str, rank: int, anywhere: bool = False) -> int:
        """What a rank holds, EMPTY where its part has no elements; `anywhere`: or, where it holds nothing, what those hold that do."""
        signature = self.declared.signature(name, rank)
        mine = self.own.get(name)
        if is_local(signature[1]):
            value = None if mine is None else mine.get(rank)
            if value is None:
                raise Refusal(f"%{name} is read before any operator defines it")
            if value == UNDEFINED:
                raise NotHere(f"%{name} is undefined on rank {rank}")
            return value
        t, placement = signature
        if placement:
            placement = self.mesh.canonical(placement, t)
            if not self.mesh.holds(placement, rank):
                if not anywhere:
                    raise NotHere(f"%{name} is {show_placement(placement)}, and rank {rank} holds nothing of it")
                return self.current(name, rank)
        if name in self.unsure and not self.made(name, rank):
            raise self._unstarted(name, rank)
        value = self.shared.get(name) if mine is None or rank not in mine else mine[rank]
        if value is None:
            value = self.initial(name, rank)
        if value == UNDEFINED:
            raise NotHere(f"%{name} is undefined on rank {rank}")
        if not placement or rank in self.owners(signature):
            return value
        self.made_by(name, rank)
        return EMPTY

    def rooted(self, signature: Signature) -> bool:
        """Is a value at roots only?"""
        found = self._rooted.get(id(signature))  # equal signatures are one object
        if found is None:
            t, placement = signature
            found = self._rooted[id(signature)] = any(e.root is not None for e in self.mesh.canonical(placement, t))
        return found

    def made_by_all(self, name: str, signature: Signature) -> None:
        """Raise NotHere unless every rank made a value, with elements or without."""
        if name in self.unsure:
            for rank in range(self.n):
                if not self.made(name, rank):
                    raise self._unstarted(name, rank)
            return
        d = self.declared.vars[name]
        owners = range(self.n) if d.is_data or (d.persistable and self.started is not None) else self.owners(signature)
        if len(owners) < self.n:
            for rank in range(self.n):
                if rank not in owners:
                    self.made_by(name, rank)

    def made_by(self, name: str, rank: int) -> None:
        """Raise NotHere unless a rank that has no elements of a value made it all the same: operators of plans read what is defined."""
        if not self.made(name, rank):
            raise NotHere(f"%{name} is read before any operator of rank {rank} defines it")

    def made(self, name: str, rank: int) -> bool:
        """Has a rank something under a name, with elements or without? State has what startup gave it."""
        if name in self.by_all or (name, rank) in self.empty:
            return True
        if name in self.unsure:
            if rank in self.own.get(name, ()) or (self.started is not None and self.started.on(name, rank)):
                return True
            return name in self.shared and name not in self.unwritten and rank in self.owners(self.declared.signature(name, rank))
        d = self.declared.vars[name]
        return d.is_data or (d.persistable and self.started is not None)

    def _unstarted(self, name: str, rank: int) -> Refusal:
        return Refusal(f"%{name} is read, and the startup program of rank {rank} does not write it; write it there")

    def current(self, name: str, rank: int) -> int:
        """What the ranks hold that hold elements of a value."""
        mine = self.own.get(name, {})
        owners = self.owners(self.declared.signature(name, rank))
        value = next((mine[o] for o in owners if mine.get(o, -1) >= 0), self.shared.get(name))
        if name in self.unsure:
            for owner in owners:
                if not self.made(name, owner):
                    raise self._unstarted(name, owner)
        if value is None:
            value = self.initial(name, rank)
        if value < 0:
            raise NotHere(f"%{name} is undefined")
        return value

    def write(self, name: str, rank: int, value: int) -> None:
        mine = self.own.get(name)
        if mine is None:
            mine = self.own[name] = {}
        mine[rank] = value
        if name in self.declared.differs:
            return
        signature = self.declared.signatures[name]
        if is_local(signature[1]):
            return
        owners = self.owners(signature)
        self.by_all.discard(name)
        if rank not in owners:
            self.empty.add((name, rank))
        if len(mine) < len(owners):
            return
        held = [mine.get(o, UNDEFINED) for o in owners]
        value = next((v for v in held if v >= 0), UNDEFINED)
        if value >= 0 and all(v == value or v == EMPTY for v in held):
            self.shared[name] = value
            self.unwritten.discard(name)
            del self.own[name]

    def value(self, name: str, rank: int) -> int | None:
        """What a rank holds now; None for nothing."""
        try:
            return self.read(name, rank)
        except Refusal:
            return None


class AllRanks:
    """Block 0, for all ranks together."""

    rank = None

    def __init__(self, held: Holdings):
        self.held, self.depth = held, held.depth
        self.signature = held.declared.of_first().__getitem__

    def read(self, name: str) -> int:
        held = self.held
        value = held.shared.get(name)
        if value is None:
            value = held.initial(name, 0)
        if value < 0:
            raise NotHere(f"%{name} is not always defined")
        signature = self.signature(name)
        if signature[1]:
            if held.rooted(signature):
                raise NotHere(f"%{name} is {show_placement(signature[1])}, and every rank reads it")
        if (signature[1] or name in held.unsure) and name not in held.by_all:
            held.made_by_all(name, signature)
        return value

    def write(self, name: str, value: int) -> None:
        self.held.shared[name] = value
        self.held.by_all.add(name)
        self.held.own.pop(name, None)


class RootRanks(AllRanks):
    """Block 0, for all ranks that have what is at these roots: the entries of roots in its placement."""

    def __init__(self, held: Holdings, roots: Placement):
        super().__init__(held)
        self.roots = roots

    def read(self, name: str) -> int:
        held = self.held
        signature = self.signature(name)
        if not held.rooted(signature):
            return super().read(name)
        if any(e.root is not None and e not in self.roots for e in signature[1]):
            raise NotHere(f"%{name} is {show_placement(signature[1])}, and an operator at {show_placement(self.roots)} reads it")
        value = held.shared.get(name)
        if value is None:
            value = held.initial(name, 0)
        if value < 0:
            raise NotHere(f"%{name} is not always defined")
        if name not in held.by_all:
            held.made_by_all(name, signature)
        return value


class PerRank:
    """Block 0, for one rank."""

    def __init__(self, held: Holdings, rank: int):
        self.held, self.rank, self.depth = held, rank, held.depth

    def signature(self, name: str) -> Signature:
        return self.held.declared.signature(name, self.rank)

    def read(self, name: str) -> int:
        value = self.held.read(name, self.rank)
        return self.held.current(name, self.rank) if value == EMPTY else value

    def write(self, name: str, value: int) -> None:
        self.held.write(name, self.rank, value)


def rank_of(scope: Any) -> int | None:
    """The rank that a scope is of; None for all ranks."""
    while not isinstance(scope, (AllRanks, PerRank)):
        scope = scope.outside
    return scope.rank
