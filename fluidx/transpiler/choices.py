"""Where a parameter rests or is updated: everywhere, at a root, in flat pieces at balanced roots, or cut along an axis.

Each choice is a function of all those parameters together: {name: placement over the group}, None standing for everywhere. One for rest may
say in `units(params)` which parameters come into use together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.program import Var
from ..ir.types import At, Entry, Pieces, Shard
from .roots import Chunk, assign, chunk_bytes, cut


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

    def chunks(self, params: Mapping[str, Var], ranks: int) -> list[Chunk]:
        """Who is responsible for which elements."""
        return assign([Chunk(n, 0, d.type.numel, d.type.nbytes) for n, d in params.items()], ranks, self.method)


@dataclass(frozen=True)
class InPieces:
    """Parameters are cut into chunks of at most `chunk_mb` MiB, and the chunks dealt to balanced roots.

    A rank's chunks of a parameter lie together. A parameter all of whose chunks went to one rank lies at that root.
    """

    chunk_mb: float = 4.0
    method: str = "greedy"

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        held: dict[str, list[int]] = {n: [0] * ranks for n in params}
        for c in self.chunks(params, ranks):
            held[c.param][c.root] += c.stop - c.start
        out: dict[str, Entry | None] = {}
        for name, sizes in held.items():
            roots = [r for r, size in enumerate(sizes) if size]
            if len(roots) == 1:
                out[name] = At(roots[0], group)
                continue
            bounds = [0]
            for size in sizes:
                bounds.append(bounds[-1] + size)
            out[name] = Pieces(tuple(bounds), group)
        return out

    def chunks(self, params: Mapping[str, Var], ranks: int) -> list[Chunk]:
        """Who is responsible for which elements."""
        size = chunk_bytes(sum(d.type.nbytes for d in params.values()), ranks, self.chunk_mb)
        chunks = []
        for n, d in params.items():  # what another axis cuts has no flat ranges: it stays in one piece
            each = max(size, d.type.nbytes) if d.placement else size
            chunks += cut(n, d.type.numel, d.type.nbytes // max(1, d.type.numel), each)
        return assign(chunks, ranks, self.method)


@dataclass(frozen=True)
class Sharded:
    """Each parameter is cut along its first axis that divides evenly, or else its longest; one element or none stays everywhere."""

    def entries(self, params: Mapping[str, Var], group: str, ranks: int) -> dict[str, Entry | None]:
        return {n: self._entry(d, group, ranks) for n, d in params.items()}

    @staticmethod
    def _entry(d: Var, group: str, ranks: int) -> Entry | None:
        taken = {e.axis for e in d.placement if isinstance(e, Shard)}
        shape = d.type.shape
        free = [k for k in range(len(shape)) if shape[k] > 1 and k not in taken]
        if not free:
            return None
        even = [k for k in free if shape[k] % ranks == 0]
        return Shard(even[0] if even else max(free, key=lambda k: shape[k]), group)
