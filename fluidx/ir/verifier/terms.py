"""Symbolic values: what a variable holds, as an expression over the step's inputs.

A value is one of
    ("G", e)      the expression e, the same on every rank
    ("L", e)      the expression e of this rank's own rows
    ("S", items)  a weighted sum of expressions of named ranks, items = ((e, rank or None), weight) ...
    ("T", values, sizes)  several values packed one behind the other
    ("U",)        nothing: the value exists on another rank only
Expressions are numbers in one table, so equal expressions have equal numbers. Sums, slices of flat arrays and elementwise
operators on slices are kept in normal form, which is what makes a chunked, distributed update equal to the whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Value = tuple
UNDEFINED: Value = ("U",)


class TermError(Exception):
    """A value is used in a way that would give a wrong result; the message says how."""


class Terms:
    """The table of expressions of one verification."""

    def __init__(self, ranks: int, combine: str):
        self.ranks = ranks
        self.combine = combine  # "avg" or "sum": how the ranks' losses make the loss
        self.ids: dict[Any, int] = {}
        self.keys: list[Any] = []
        self._split: dict[int, tuple[int, int, int, int] | None] = {}
        self.zero = self.intern(("const", 0.0))

    def intern(self, key: Any) -> int:
        e = self.ids.get(key)
        if e is None:
            e = self.ids[key] = len(self.keys)
            self.keys.append(key)
        return e

    # -- sums -------------------------------------------------------------------------------------------------------------

    def items(self, e: int) -> tuple[tuple[int, float], ...]:
        key = self.keys[e]
        return key[1] if key[0] == "lin" else () if e == self.zero else ((e, 1.0),)

    def lin(self, weighted: Iterable[tuple[int, float]]) -> int:
        """The sum of weighted expressions, in normal form."""
        total: dict[int, float] = {}
        for e, w in weighted:
            for atom, v in self.items(e):
                total[atom] = total.get(atom, 0.0) + v * w
        total = {e: _rounded(w) for e, w in total.items() if abs(w) > 1e-15}
        total = self._join_norms(total)
        if not total:
            return self.zero
        if len(total) == 1:
            ((e, w),) = total.items()
            if w == 1.0:
                return e
        return self.intern(("lin", tuple(sorted(total.items()))))

    def _join_norms(self, total: dict[int, float]) -> dict[int, float]:
        """Squared norms of all slices of one array, equally weighted, are the squared norm of the array."""
        found: dict[tuple[int, float, int], list[tuple[int, int, int]]] = {}
        for e, w in total.items():
            key = self.keys[e]
            if key[0] == "op" and key[1] == "squared_l2_norm" and (s := self.split(key[3][0][1])) is not None:
                base, start, stop, size = s
                found.setdefault((base, w, size), []).append((start, stop, e))
        out = dict(total)
        for (base, w, size), pieces in found.items():
            pieces.sort()
            if covers([(a, b) for a, b, _ in pieces], size):
                for _, _, e in pieces:
                    del out[e]
                key = self.keys[pieces[0][2]]
                whole = self.intern((*key[:3], (("G", base),), *key[4:]))
                out[whole] = out.get(whole, 0.0) + w
        return out

    # -- slices of flat arrays ---------------------------------------------------------------------------------------------

    def chunk(self, e: int, start: int, stop: int, size: int) -> int:
        """Elements [start, stop) of an array of `size` elements."""
        key = self.keys[e]
        if key[0] == "const" or (start, stop) == (0, size):
            return e
        if key[0] == "chunk":
            return self.intern(("chunk", key[1], key[2] + start, key[2] + stop, key[4]))
        if key[0] == "lin":
            return self.lin((self.chunk(a, start, stop, size), w) for a, w in key[1])
        return self.intern(("chunk", e, start, stop, size))

    def split(self, e: int) -> tuple[int, int, int, int] | None:
        """(array, start, stop, size) if the expression is one slice of an expression over whole arrays."""
        if e in self._split:
            return self._split[e]
        key, out = self.keys[e], None
        if key[0] == "chunk":
            out = key[1:]
        elif key[0] == "lin":
            parts = [(self.split(a), w) for a, w in key[1]]
            if all(p is not None for p, _ in parts) and len({p[1:] for p, _ in parts}) == 1:  # type: ignore[index]
                out = (self.lin((p[0], w) for p, w in parts), *parts[0][0][1:])  # type: ignore[index]
        self._split[e] = out
        return out

    def join(self, pieces: Sequence[tuple[int, int, int]], size: int) -> int | None:
        """The array whose slices the pieces (start, stop, e) are; None when they are not."""
        pieces = sorted(pieces)
        if not covers([(a, b) for a, b, _ in pieces], size):
            return None
        bases = set()
        for a, b, e in pieces:
            if self.keys[e][0] == "const":
                bases.add(e)
                continue
            s = self.split(e)
            if s is None or (s[1], s[2], s[3]) != (a, b, size):
                return None
            bases.add(s[0])
        return bases.pop() if len(bases) == 1 else None

    # -- operators -----------------------------------------------------------------------------------------------------------

    def apply(
        self, type_: str, attrs: tuple, ins: tuple, slots: tuple, out: int, elementwise: bool, small: Sequence[bool]
    ) -> tuple[str, int]:
        """Output number `out` of an operator on values ("G"|"L", e). An elementwise operator on slices is a slice of it on wholes."""
        kind = "L" if any(k == "L" for k, _ in ins) else "G"
        if elementwise:
            splits = [self.split(e) for _, e in ins]
            ranges = {s[1:] for s in splits if s is not None}
            fits = zip(splits, small, ins, strict=True)
            if len(ranges) == 1 and all(s is not None or tiny or self.keys[e][0] == "const" for s, tiny, (_, e) in fits):
                whole = tuple((k, s[0] if s else e) for (k, e), s in zip(ins, splits, strict=True))
                e = self.intern(("op", type_, attrs, whole, slots, out))
                return kind, self.chunk(e, *ranges.pop())
        return kind, self.intern(("op", type_, attrs, ins, slots, out))

    def of(self, value: Value, rank: int) -> list[tuple[tuple[int, int | None], float]]:
        """A value as terms of named ranks."""
        if value[0] == "S":
            return list(value[1])
        if value[0] == "U":
            raise TermError("the value exists on its root only")
        if value[0] == "T":
            raise TermError("the value is several values, packed")
        if value[0] == "P":
            raise TermError("only some chunks of the parameter were handed back")
        who = rank if value[0] == "L" else None
        return [((e, who), w) for e, w in self.items(value[1])]

    def total(self, terms: Iterable[tuple[tuple[int, int | None], float]]) -> Value:
        """The sum of terms. Equal shares of every rank are the value of one device on the whole batch."""
        sums: dict[tuple[int, int | None], float] = {}
        for atom, w in terms:
            sums[atom] = sums.get(atom, 0.0) + w
        shared = [(e, w) for (e, r), w in sums.items() if r is None]
        local: dict[int, dict[int, float]] = {}
        for (e, r), w in sums.items():
            if r is not None:
                local.setdefault(e, {})[r] = w
        rest: list[tuple[tuple[int, int | None], float]] = []
        share = 1.0 / self.ranks if self.combine == "avg" else 1.0
        for e, by_rank in local.items():
            if len(by_rank) == self.ranks and len(set(map(_rounded, by_rank.values()))) == 1:
                shared.append((e, next(iter(by_rank.values())) / share))
            else:
                rest += [((e, r), w) for r, w in by_rank.items()]
        whole = self.lin(shared)
        if not rest:
            return ("G", whole)
        rest += [((e, None), w) for e, w in self.items(whole)]
        return ("S", tuple(sorted(rest, key=lambda x: (x[0][0], -1 if x[0][1] is None else x[0][1]))))

    def scaled(self, value: Value, factor: float, rank: int) -> Value:
        return self.total((atom, w * factor) for atom, w in self.of(value, rank)) if value[0] == "S" else (
            value[0], self.lin([(value[1], factor)])
        )  # fmt: skip

    def chunked(self, value: Value, start: int, stop: int, size: int) -> Value:
        if value[0] == "S":
            return ("S", tuple(((self.chunk(e, start, stop, size), r), w) for (e, r), w in value[1]))
        if value[0] in ("U", "P", "T"):
            return value
        return (value[0], self.chunk(value[1], start, stop, size))

    # -- for messages -----------------------------------------------------------------------------------------------------------

    def describe(self, value: Value) -> str:
        """A few words for a person: which ranks contribute with which weights, or what the value is."""
        if value[0] == "S":
            by: dict[float, list[int]] = {}
            for (_, r), w in value[1]:
                if r is not None:
                    by.setdefault(w, []).append(r)
            lists = ((w, sorted(set(rs))) for w, rs in by.items())
            return "; ".join(f"{w:g} x rank{'s' * (len(rs) > 1)} {', '.join(map(str, rs))}" for w, rs in lists) or "a sum"
        if value[0] == "U":
            return "undefined here (it is on its root only)"
        if value[0] == "T":
            return "several values, packed"
        if value[0] == "P":
            return "only partly updated"
        return ("the same on all ranks: " if value[0] == "G" else "of the rank's own rows: ") + self.show(value[1])

    def show(self, e: int, depth: int = 3) -> str:
        key = self.keys[e]
        if depth == 0:
            return "..."
        if key[0] == "op":
            return f"{key[1]}({', '.join(self.show(x, depth - 1) for _, x in key[3][:4])})"
        if key[0] == "lin":
            return " + ".join((f"{w:g} " if w != 1 else "") + self.show(a, depth - 1) for a, w in key[1][:4])
        if key[0] == "chunk":
            return f"{self.show(key[1], depth)}[{key[2]}:{key[3]}]"
        if key[0] == "seed":
            return f"{self.show(key[1], depth)} weighed by rows"
        return f"{key[1]}"


def covers(ranges: Sequence[tuple[int, int]], size: int) -> bool:
    """Do sorted ranges follow each other from 0 to `size` without gap or overlap?"""
    at = 0
    for a, b in ranges:
        if a != at:
            return False
        at = b
    return at == size


def _rounded(w: float) -> float:
    # weights are products and sums of a few 1/n; a wrong one is wrong by far more than the ninth digit
    return float(f"{w:.9g}")
