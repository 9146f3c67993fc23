"""Split global feeds among ranks and join local values to global ones, by the placements that the programs declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...ir.entries import is_local
from ...ir.errors import FeedError, ProgramError
from ...ir.parts import REDUCE, NoMean, coords_of, cut, feed_placement, holds, intervals, join
from ...ir.program import Program
from ...ir.types import ANY, Own, Placement, show_placement
from ...ir.var import Var
from ..feeds import no_rows

UNEVEN = ("weight", "pad", "drop", "error")


class FeedSplit(NamedTuple):
    """How feeds of given shapes are split. `rows`: {name: {axis: (new size, unit)}} of axes that change size. `cuts`: the index of each
    rank's part (None: no part); None instead of a list if `cut` has to split the value."""

    rows: dict[str, dict[int, tuple[int, int]]]
    cuts: dict[str, list[Any] | None]


class Term(NamedTuple):
    """A part of a global value: the rank that has it, its index in the global value, and the function that adds it to an earlier part
    there."""

    rank: int
    at: tuple[Any, ...]
    add: np.ufunc | None


class FeedSplitter:
    """Splits feeds and joins fetches, by the groups of the rank programs and each rank's coordinates in them."""

    def __init__(self, programs: Sequence[Program]):
        self.groups = programs[0].groups
        self.coords = [coords_of(self.groups, r, programs[0].turns) for r in range(len(programs))]
        self._owners: dict[Placement, list[int]] = {}

    def holders(self, placement: Placement) -> list[int]:
        """For each part of a value with this placement, the first rank that holds it."""
        found = self._owners.get(placement)
        if found is None:
            firsts: dict[tuple, int] = {}
            for rank, coords in enumerate(self.coords):
                if all(e.group in coords for e in placement) and holds(placement, coords):
                    firsts.setdefault(tuple(coords[e.group][0] for e in placement), rank)
            found = self._owners[placement] = list(firsts.values())
        return found

    def cutters(self, placement: Placement, axis: int) -> dict[str, int]:
        """{group: its size} of the groups with several ranks over which an axis is sharded."""
        sizes = {e.group: len(next(iter(self.groups.get(e.group, ())), ())) for e in placement if e.axis == axis}
        return {g: n for g, n in sizes.items() if n > 1}

    # -- out ------------------------------------------------------------------------------------------------------------------

    def split(self, descs: Mapping[str, Var], feed: Mapping[str, np.ndarray], recipe: FeedSplit) -> list[dict[str, np.ndarray]]:
        """Each rank's part of a global feed (views)."""
        feed = self.even_sizes(feed, recipe)
        parts: list[dict[str, np.ndarray]] = [{} for _ in self.coords]
        for name, value in feed.items():
            cuts = recipe.cuts[name]
            if cuts is None:
                for part, coords in zip(parts, self.coords, strict=True):
                    part[name] = cut(value, feed_placement(descs[name].placement), coords)
                continue
            for part, index in zip(parts, cuts, strict=True):
                if index is not None:
                    part[name] = value[index]
        return parts

    def even_sizes(self, feed: Mapping[str, np.ndarray], recipe: FeedSplit) -> Mapping[str, np.ndarray]:
        """The global feed, padded or cut to the sizes in `recipe`."""
        return {n: _take(a, recipe.rows[n]) if n in recipe.rows else a for n, a in feed.items()} if recipe.rows else feed

    def plan_split(self, descs: Mapping[str, Var], feed: Mapping[str, np.ndarray], uneven: str) -> FeedSplit:
        """How feeds of these names and shapes are split.

        Open axes that are sharded over the same groups must have the same size; FeedError otherwise.
        """
        rows = self._changed_sizes(descs, feed, uneven)
        cuts: dict[str, list[Any] | None] = {}
        for name, value in feed.items():
            placement, shape = feed_placement(descs[name].placement), list(value.shape)
            if is_local(placement):
                raise FeedError(f"variable {name!r} is local: each rank has its own, so it cannot be fed")
            for axis, (want, _) in rows.get(name, {}).items():
                shape[axis] = want
            if all(e.axis is not None or e.root is not None for e in placement):
                cuts[name] = [
                    (*(slice(a, b) for a, b in intervals(shape, placement, c)), ...) if holds(placement, c) else None for c in self.coords
                ]
            else:
                cuts[name] = None
        return FeedSplit(rows, cuts)

    def _changed_sizes(
        self, descs: Mapping[str, Var], feed: Mapping[str, np.ndarray], uneven: str
    ) -> dict[str, dict[int, tuple[int, int]]]:
        """{name: {axis: (size, unit)}} of sharded open axes whose size the policy `uneven` changes."""
        changed: dict[str, dict[int, tuple[int, int]]] = {}
        sizes: dict[tuple[str, ...], dict[str, tuple[int, int]]] = {}  # by the groups of the shards: rows and blocks of each feed
        for name, value in feed.items():
            d = descs[name]
            placement = feed_placement(d.placement)
            for axis in dict.fromkeys(e.axis for e in placement if e.axis is not None):
                groups = self.cutters(placement, axis)
                if not groups or d.type.shape[axis] != ANY:
                    continue
                if not value.shape[axis]:
                    raise no_rows(name, d, value.shape)
                rows, unit = value.shape[axis], max(e.unit for e in placement if e.axis == axis)
                seen = sizes.setdefault(tuple(groups), {})
                _check_rows(seen, name, rows, unit)
                want = even_sizes(rows, prod(groups.values()), unit, uneven)
                if want != rows and len({blocks for _, blocks in seen.values()}) > 1:
                    raise FeedError(
                        f"uneven={uneven!r} would change the {rows} rows of {name!r}, and the program does not relate them to the rows "
                        "of the other feeds; use uneven='weight', or feed a multiple"
                    )
                alone = next((g for g, n in groups.items() if Own(g) in d.placement and want < n), None)
                if alone is not None:  # the mean of no rows is undefined
                    raise FeedError(
                        f"variable {name!r} has {rows} row{'s' * (rows != 1)} for {groups[alone]} ranks, each of which trains on its "
                        f"own rows; feed at least {groups[alone]}"
                    )
                if want != rows:
                    changed.setdefault(name, {})[axis] = want, unit
        return changed

    # -- back -----------------------------------------------------------------------------------------------------------------

    def merge(
        self, name: str, values: Sequence[Any], placement: Placement, shape: Sequence[int], terms: Sequence[Term] | None = None
    ) -> Any:
        """The global value of this shape, joined from the ranks' local values (None: no value). FeedError if they do not fit together."""
        if not placement:
            return values[0]
        try:
            return join(values, placement, self.groups, shape) if terms is None else _sum(terms, values, shape)
        except NoMean as e:
            raise FeedError(f"variable {name!r}: {e}") from None
        except (ProgramError, ValueError) as e:
            found = ", ".join(f"{list(v.shape)} on rank {r}" for r, v in enumerate(values) if v is not None)
            raise FeedError(f"variable {name!r} should have shape {list(shape)}, {show_placement(placement)}; found {found}: {e}") from None

    def terms(self, placement: Placement, shape: Sequence[int], ranks: Sequence[int]) -> list[Term] | None:
        """The terms from which `merge` makes a value, computed once for many merges. None for placements other than shards and partial
        values; `join` handles these."""
        if not ranks or not all(e.axis is not None or e.op for e in placement):
            return None
        found: dict[tuple[int, ...], Term] = {}
        begun: set[tuple[int, ...]] = set()
        cut_by = tuple([e for e in placement if not e.op])
        added = next((REDUCE[e.op] for e in placement if e.op), None)
        for rank in ranks:
            coords = self.coords[rank]
            at = (*(slice(a, b) for a, b in intervals(shape, cut_by, coords)), ...)
            where = tuple(coords[e.group][0] for e in cut_by)
            found.setdefault(tuple(coords[e.group][0] for e in placement), Term(rank, at, added if where in begun else None))
            begun.add(where)
        return list(found.values())


def _sum(terms: Sequence[Term], values: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    out = np.empty(tuple(shape), values[terms[0].rank].dtype)
    for rank, at, add in terms:
        if add is None:
            out[at] = values[rank]
        else:
            add(out[at], values[rank], out=out[at], casting="unsafe")
    return out


def _take(value: np.ndarray, sizes: Mapping[int, tuple[int, int]]) -> np.ndarray:
    """The value with axes cut, or padded by repeating the last unit."""
    for axis, (want, unit) in sizes.items():
        at, rows = np.arange(want), value.shape[axis]
        value = value.take(np.where(at < rows, at, np.maximum(rows - unit + (at - rows) % unit, 0)), axis)
    return value


def _check_rows(seen: dict[str, tuple[int, int]], name: str, rows: int, unit: int) -> None:
    """Record the number of rows and of blocks of a feed. FeedError if it differs from another feed in blocks, and neither number of rows is
    a multiple of the other (as it is in a batch of sequences of tokens)."""
    seen[name] = rows, -(-rows // unit)
    for other, (theirs, blocks) in seen.items():
        few, many = sorted((rows, theirs))
        if seen[name][1] != blocks and (not few or many % few):
            raise FeedError(
                "feeds that are split among the ranks must have the same number of rows, or a multiple: "
                f"{other!r} has {theirs}, {name!r} has {rows}"
            )


def even_sizes(rows: int, ranks: int, unit: int, uneven: str) -> int:
    """The number of rows after a policy, for `rows` rows that are split among `ranks` in blocks of `unit`.

    >>> [even_sizes(5, 2, 1, policy) for policy in ("weight", "pad", "drop")]
    [5, 6, 4]
    """
    each = ranks * unit
    if rows % each == 0 or uneven == "weight":
        return rows
    if uneven == "pad":
        return -(-rows // each) * each
    if uneven == "drop":
        if rows < each:
            raise FeedError(f"uneven='drop' would drop all {rows} rows: there are {ranks} ranks; use uneven='weight' or 'pad'")
        return rows // each * each
    raise FeedError(
        f"a batch of {rows} rows does not divide among {ranks} ranks; feed a multiple of {each}, "
        "or choose uneven='weight', 'pad' or 'drop' when making the ParallelExecutor"
    )
