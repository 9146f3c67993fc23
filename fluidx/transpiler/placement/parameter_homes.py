"""Choices of where parameters are stored or updated: on every rank, at a root, in flat pieces at balanced roots, or sharded along an axis.

A choice maps all parameters together to {name: entry over the group}; None means every rank. A choice with a method `seen(main)` is given
the program first. A choice of storage placements may have `units(params)`, which lists the parameters that are gathered together.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import inf
from typing import Any

from ...ir import flow
from ...ir.errors import TranspileError
from ...ir.offsets import Offsets
from ...ir.operator import Operator
from ...ir.parts import bounds
from ...ir.program import Program
from ...ir.types import At, Entry, Pieces, Shard
from ...ir.var import Var
from ..cluster import SERVERS
from .roots import RootChunk, assign, chunk_bytes, cut, fill


@dataclass(frozen=True)
class Everywhere:
    """Every rank updates every parameter."""

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        return dict.fromkeys(params)


EVERYWHERE = Everywhere()


@dataclass(frozen=True)
class AtRoots:
    """Each parameter is updated by one rank; `method` balances the roots (see roots.assign)."""

    method: str = "greedy"

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        return {c.param: At(c.root, group) for c in self.chunks(params, ranks)}

    def chunks(self, params: Mapping[str, Var], ranks: int) -> list[RootChunk]:
        """Who is responsible for which elements."""
        return assign([RootChunk(n, 0, d.type.numel, d.type.nbytes) for n, d in params.items()], ranks, self.method)


@dataclass(frozen=True)
class InPieces:
    """Parameters are cut into chunks of at most `chunk_mb` MiB, which are assigned to balanced roots. A rank's chunks of a parameter are
    contiguous. A parameter all of whose chunks are on one rank is placed at that root.
    """

    chunk_mb: float = 4.0
    method: str = "greedy"

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        return _in_pieces(self.chunks(params, ranks), group, ranks)

    def chunks(self, params: Mapping[str, Var], ranks: int) -> list[RootChunk]:
        """Who is responsible for which elements."""
        size = chunk_bytes(sum(d.type.nbytes for d in params.values()), ranks, self.chunk_mb)
        chunks = []
        for n, d in params.items():  # a parameter that another axis cuts has no flat ranges: it stays in one piece
            each = max(size, d.type.nbytes) if d.placement else size
            chunks += cut(n, d.type.numel, d.type.nbytes // max(1, d.type.numel), each)
        return assign(chunks, ranks, self.method)


@dataclass(frozen=True)
class OnServers:
    """Parameters are placed on the last `servers` ranks of the group `ps`, in at most as many slices of at least `min_block` elements.
    Slices are assigned to the servers in turn, or by a hash of their names. Source: `slice_variable` of fluid's DistributeTranspiler.
    """

    servers: int
    min_block: int = 8192
    method: str = "round_robin"
    group: str = SERVERS

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        chunks = []
        for n, d in params.items():
            size = d.type.nbytes // max(1, d.type.numel)
            slices = max(1, min(self.servers, d.type.numel // self.min_block))
            chunks += cut(n, d.type.numel, size, -(-d.type.numel // slices) * size)
        first = ranks - self.servers
        dealt = [c._replace(root=first + c.root) for c in assign(chunks, self.servers, self.method)]
        return _in_pieces(dealt, group, ranks)


def _in_pieces(chunks: Sequence[RootChunk], group: str, ranks: int) -> dict[str, Entry | None]:
    """The entries of parameters whose chunks have roots: a rank's chunks of a parameter are contiguous."""
    held: dict[str, dict[int, int]] = {}
    for c in chunks:
        sizes = held.setdefault(c.param, {})
        sizes[c.root] = sizes.get(c.root, 0) + c.stop - c.start
    return {name: pieces_of(sizes, group, ranks) for name, sizes in held.items()}


def pieces_of(sizes: Mapping[int, int], group: str, ranks: int) -> At | Pieces:
    """The entry of a value of which each rank has `sizes[rank]` elements; a rank that is not in `sizes` has none.

    >>> print(pieces_of({1: 2, 2: 1}, "dp", 3), pieces_of({1: 3}, "dp", 3))
    pieces(0, 0, 2, 3) over dp at(1) over dp
    """
    roots = [r for r, size in sizes.items() if size]
    return At(roots[0], group) if len(roots) == 1 else Pieces(Offsets.of_sizes(sizes, ranks), group)


@dataclass(frozen=True)
class Sharded:
    """Each parameter is cut along its first axis that divides evenly, or else its longest; parameters of at most one element are
    replicated."""

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        return {n: self._entry(d, group, ranks) for n, d in params.items()}

    @staticmethod
    def _entry(d: Var, group: str, ranks: int) -> Entry | None:
        taken = {e.axis for e in d.placement if e.axis is not None}
        shape = d.type.shape
        free = [k for k in range(len(shape)) if shape[k] > 1 and k not in taken]
        if not free:
            return None
        even = [k for k in free if shape[k] % ranks == 0]
        return Shard(even[0] if even else max(free, key=lambda k: shape[k]), group)


def even_pieces(params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry]:
    """The entries of parameters that are concatenated, with the whole cut evenly.

    >>> from fluidx.ir import TensorType, Var
    >>> sizes = {"a": 6, "b": 2, "c": 4}
    >>> {n: e.bounds for n, e in even_pieces({n: Var(n, TensorType("float32", (k,))) for n, k in sizes.items()}, "dp", 2).items()}
    {'a': (0, 6, 6), 'b': (0, 0, 2), 'c': (0, 0, 4)}
    """
    sizes = [d.type.numel for d in params.values()]
    return {n: Pieces(cut, group) for n, cut in zip(params, Offsets.within(bounds(sum(sizes), ranks), sizes), strict=True)}


@dataclass(frozen=True)
class InBuckets:
    """Parameters are in buckets of at most `mb` MiB, the first of `first_mb`, and each bucket is cut evenly into flat ranges. Buckets take
    the parameters in the order in which backward finishes their gradients, so the gradients of a bucket are finished at about the same
    time. A parameter that another axis cuts is cut as in Sharded; a parameter of one element is replicated.
    """

    mb: float = 25.0
    first_mb: float = 1.0

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        out = Sharded().entries({n: d for n, d in params.items() if d.placement}, group, ranks)
        for bucket in self.buckets(params):
            out.update(even_pieces({n: params[n] for n in bucket}, group, ranks))
        return out

    def buckets(self, params: Mapping[str, Var]) -> list[list[str]]:
        """The parameters of each bucket; a bucket has one dtype."""
        of: dict[str, list[str]] = {}
        for n, d in params.items():
            if not d.placement and d.type.numel > 1:
                of.setdefault(d.type.dtype, []).append(n)
        return [b for names in of.values() for b in fill({n: params[n].type.nbytes for n in names}, self.mb, self.first_mb)]


@dataclass(frozen=True)
class InFlatUnits:
    """A unit's parameters are concatenated, and the whole is cut evenly: a rank has one flat range of the unit. `by`: a unit has at most so
    many MiB, or one larger parameter, in the order in which the program reads them; or "scope": a unit has the parameters that operators of
    one fx.name_scope read first. A unit has one flat range for each dtype. Parameters of one element are replicated. A parameter that
    another axis cuts is cut as in Sharded, since a value with flat ranges has no other cut.
    """

    by: float | str = 25.0
    first: Mapping[str, Operator] = field(default_factory=dict, repr=False, compare=False)  # the first operator that reads each parameter

    def seen(self, main: Program) -> InFlatUnits:
        """The choice for the parameters of this program."""
        return replace(self, first=first_reads(main))

    def units(self, params: Mapping[str, Var]) -> list[list[str]]:
        """The parameters that are gathered together."""
        order = {n: k for k, n in enumerate(self.first)}
        names = sorted(params, key=lambda n: order.get(n, inf))
        if self.by == "scope":
            scopes: dict[str, list[str]] = {}
            for n in names:
                scopes.setdefault(scope_of(self.first.get(n)), []).append(n)
            return list(scopes.values())
        return fill({n: params[n].type.nbytes for n in names}, float(self.by), float(self.by))

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        found: dict[str, Entry | None] = Sharded().entries({n: d for n, d in params.items() if d.placement}, group, ranks)
        for unit in self.units(params):
            alike: dict[str, dict[str, Var]] = {}
            for d in map(params.__getitem__, unit):
                if d.type.numel > 1 and not d.placement:
                    alike.setdefault(d.type.dtype, {})[d.name] = d
            for together in alike.values():
                found.update(even_pieces(together, group, ranks))
        return found


def first_reads(main: Program) -> dict[str, Operator]:
    """The first operator that reads each variable."""
    first: dict[str, Operator] = {}
    for op in main.global_block().oplist:
        for n in flow.reads(main, op):
            first.setdefault(n, op)
    return first


def scope_of(op: Operator | None) -> str:
    """The fx.name_scope in which an operator was written; "" if there is none."""
    return op.site.function.rpartition("/")[0] if op is not None and op.site is not None else ""


Reshard = bool | int | tuple[str, ...]  # which units are resharded after forward: all, none, so many first ones, or those of these scopes


def reshards(name: str, given: Any) -> Reshard:
    """The option reshard_after_forward of a strategy. Raises TranspileError for anything else."""
    if isinstance(given, bool) or isinstance(given, int) and given >= 0:
        return given
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, (list, tuple)) else ()
    if patterns and all(isinstance(p, str) and p for p in patterns):
        return patterns
    raise TranspileError(
        f"{name}: reshard_after_forward is True, False, a number of units, or names of fx.name_scope such as 'block*', got {given!r}"
    )


def matching_scopes(main: Program, params: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The parameters whose first reader is in a scope that a pattern names, or in a scope within it. Raises TranspileError for a pattern
    that names none."""
    first = first_reads(main)
    scopes = {n: scope_of(first.get(n)) for n in params}
    for p in patterns:
        if not any(_names(p, scope) for scope in scopes.values()):
            known = ", ".join(sorted(filter(None, set(scopes.values())))[:8]) or "none"
            raise TranspileError(
                f"reshard_after_forward: no parameter of {main.label()} is first read in a scope {p!r}; scopes of fx.name_scope: {known}"
            )
    return {n for n, scope in scopes.items() if any(_names(p, scope) for p in patterns)}


def _names(pattern: str, scope: str) -> bool:
    return fnmatchcase(scope, pattern) or fnmatchcase(scope, f"{pattern}/*")


def staying(units: Sequence[Sequence[str]], reshard: Reshard, matching: Container[str]) -> list[Sequence[str]]:
    """The units that stay gathered from forward to backward, of those that forward gathers, in order: the last one, and those that are not
    resharded. `matching` are the parameters in the scopes that `reshard` names.

    >>> units = [["a"], ["b"], ["c"], ["d"]]
    >>> staying(units, True, ()), staying(units, 2, ()), staying(units, ("block0",), {"a"})
    ([['d']], [['c'], ['d']], [['b'], ['c'], ['d']])
    """
    if isinstance(reshard, tuple):
        return [u for k, u in enumerate(units) if k == len(units) - 1 or not any(n in matching for n in u)]
    return list(units[-1:] if reshard is True else units[min(int(reshard), max(0, len(units) - 1)) :])
