"""Symbolic expressions of values, over the feeds and the state at the begin of a step. Equal expressions have one number.

Expressions are kept in a normal form, so that different ways to compute one value get one number:

- `lin`: a weighted sum of expressions that are no sums; integers have integer weights only;
- `view`, `slice`, `rows`: results of reshape, chunk, pack, unpack and concat along axis 0. A slice is a range of a flat array; rows are
  several of these, concatenated. Adjacent slices of one array are joined, and all slices of an array are the array;
- `strided`: a slice along other axes (see slices_nd.py);
- `one`: ones of a dtype and shape; a constant is a multiple of it;
- `terms`: the sum of the terms that some ranks have of a sum over ranks; the terms of all ranks are the sum;
- `adaptive`, `met`, `products`: adaptive sums (see adasum.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import accumulate
from math import isfinite, prod
from typing import Any

from ..ir.dtypes import FLOATS
from ..ir.offsets import Offsets
from ..ir.operator import BlockRef
from ..ir.types import ANY, Placement, TensorType
from .adasum import AdasumMeaning, Span
from .describe import show
from .refusal import Refusal
from .slices_nd import SlicesND

_MOST = 64  # a sum with more terms is not flattened into another sum, so that long chains cost linear time
_EXACT = 1 << 53

# (derivation, coordinates that are not summed over, ranks) -> the whole sum if these are all ranks, else None
Complete = Callable[[int, tuple, int], "int | None"]


class ExpressionTable:
    """All expressions of one verification. `op_types`: the types of all operators of the programs; None if they are not known."""

    def __init__(self, op_types: Set[str] | None = None) -> None:
        self.op_types = op_types
        self.ids: dict[Any, int] = {}
        self.keys: list[tuple] = []
        self.types: list[TensorType] = []
        self.ranked: list[bool] = []  # does the value depend on the rank?
        self._weights: dict[float, float] = {}
        self._signatures: dict[tuple[TensorType, Placement], tuple[TensorType, Placement]] = {}
        self._attrs: dict[int, tuple[Any, int]] = {}  # id -> (the attributes, kept alive, their number)
        self._written: dict[tuple, int] = {}
        self._numbers: dict[tuple, int] = {}
        self._joined: dict[tuple[int, ...], int] = {}  # arrays -> their concatenation, which all ranks that gather them have
        self._rows_end: dict[int, list[int]] = {}
        self.rows_with: dict[int, list[int]] = {}  # array -> expressions of rows that have slices of it (see `arrays`)
        self.complete: Complete = lambda derivation, others, ranks: None
        self.adaptive, self.strided = AdasumMeaning(self), SlicesND(self)

    def intern(self, key: tuple, type_: TensorType, args: Iterable[int | None] = (), ranked: bool = False) -> int:
        e = self.ids.get(key)
        if e is None:
            e = self.ids[key] = len(self.keys)
            self.keys.append(key)
            self.types.append(type_)
            flags = self.ranked
            flags.append(ranked or any(a is not None and flags[a] for a in args))
        return e

    def symbol(self, kind: str, name: Any, type_: TensorType) -> int:
        return self.intern((kind, name, type_), type_)

    def signature(self, type_: TensorType, placement: Placement) -> tuple[TensorType, Placement]:
        """A pair of type and placement. Equal pairs are one object."""
        s = type_, placement
        return self._signatures.setdefault(s, s)

    def attrs_id(self, attrs: Mapping[str, Any]) -> int:
        """A number for equal attributes; 1, 1.0 and true differ. Block indices are ignored, because the contents of blocks are compared."""
        known = self._attrs.get(id(attrs))
        if known is None:
            values = attrs.values()
            types = tuple(map(type, values))
            written = (tuple(attrs), types, tuple([v if t in _PLAIN else _shown(v) for v, t in zip(values, types, strict=True)]))
            number = self._written.get(written)
            if number is None:
                key = tuple([(k, _shown(v)) for k, v in sorted(attrs.items(), key=_name)])
                number = self._written[written] = self._numbers.setdefault(key, len(self._numbers))
            known = self._attrs[id(attrs)] = attrs, number
        return known[1]

    # -- reshape, slice and concatenate ------------------------------------------------------------------------------

    def shaped(self, e: int, shape: Sequence[int]) -> int:
        """The same elements in another shape."""
        shape = tuple(shape)
        t = self.types[e]
        if t.shape == shape:
            return e
        if t.shape.count(ANY) > 1 or shape.count(ANY) > 1 or (ANY in t.shape) != (ANY in shape):
            raise Refusal(f"the shape {list(shape)} of {t} is unknown because sizes are open")
        if ANY not in shape and prod(shape) != t.numel:
            raise Refusal(f"{t} has another number of elements than shape {list(shape)}")
        key = self.keys[e]
        if key[0] == "lin":
            return self.lin([(self.shaped(a, shape), w) for a, w in key[1]], t.with_shape(shape))
        if key[0] == "one":
            return self.one(t.dtype, shape)
        if len(shape) > 1 and (sliced := self._strided_of_rows(e, shape)) is not None:
            return sliced
        base = key[1] if key[0] == "view" else e
        if self.types[base].shape == shape:
            return base
        return self.intern(("view", base, shape), t.with_shape(shape), (base,))

    def _strided_of_rows(self, e: int, shape: Sequence[int]) -> int | None:
        """A flat value in a shape, as a strided slice: whole rows of a larger one, or several concatenated; None if it is not one."""
        key, inner = self.keys[e], prod(shape[1:])
        if key[0] == "slice" and self.keys[key[1]][0] == "strided":
            old = self.types[key[1]].shape
            if old[1:] != shape[1:] or key[2] % inner:
                return None
            first = key[2] // inner
            return self.strided.cut(key[1], [(first, first + shape[0]), *((0, n) for n in shape[1:])])
        if key[0] != "rows" or inner < 1 or any(self.types[part].numel % inner for part in key[1]):
            return None
        rows = [self.shaped(part, (self.types[part].numel // inner, *shape[1:])) for part in key[1]]
        return self.strided.join(rows, 0, shape)

    def flat(self, e: int) -> int:
        return self.shaped(e, (self.types[e].numel,))

    def cut(self, e: int, start: int, stop: int) -> int:
        """Elements [start, stop) of the flattened array."""
        t = self.types[e]
        if t.numel == ANY or not 0 <= start <= stop <= t.numel:
            raise Refusal(f"elements [{start}, {stop}) of {t} are unknown")
        if stop - start == t.numel:
            return self.flat(e)
        shape, key = (stop - start,), self.keys[e]
        if stop == start:
            return self.lin((), t.with_shape(shape))
        if key[0] == "lin":
            return self.lin([(self.cut(a, start, stop), w) for a, w in key[1]], t.with_shape(shape))
        if key[0] == "one":
            return self.one(t.dtype, shape)
        if key[0] == "view":
            return self.cut(key[1], start, stop)
        if key[0] == "slice":
            return self.cut(key[1], key[2] + start, key[2] + stop)
        if key[0] == "rows":
            found, ends = [], self._ends(e)
            for k in range(bisect_right(ends, start) - 1, bisect_left(ends, stop)):
                at, n = ends[k], ends[k + 1] - ends[k]
                found.append(self.cut(key[1][k], max(start - at, 0), min(stop - at, n)))
            return self.join(found)
        return self.intern(("slice", e, start, stop - start), t.with_shape(shape), (e,))

    def join(self, parts: Sequence[int], shape: Sequence[int] | None = None) -> int:
        """The concatenation of flattened arrays."""
        known = self._joined.get(key := (*parts,))
        if known is None:
            known = self._joined[key] = self._join(parts)
        return known if shape is None else self.shaped(known, shape)

    def _join(self, parts: Sequence[int]) -> int:
        if None in parts or (len(parts) > 1 and any(self.types[p].numel == ANY for p in parts)):
            raise Refusal("values with open sizes, or missing values, cannot be concatenated")
        flat: list[int] = []
        for p in parts:
            p = self.flat(p)
            for x in self.keys[p][1] if self.keys[p][0] == "rows" else (p,):
                if self.types[x].shape == (0,):
                    continue
                if flat and (both := self._continued(flat[-1], x)) is not None:
                    flat[-1] = both
                else:
                    flat.append(x)
        if not parts or len({self.types[p].dtype for p in parts}) > 1:
            raise Refusal("values of different dtypes, or no values, cannot be concatenated")
        dtype = self.types[parts[0]].dtype
        if len(flat) == 1:
            out = flat[0]
        elif not flat:
            out = self.lin((), TensorType(dtype, (0,)))
        else:
            out = self._rows(tuple(flat), dtype)
        return out

    def _rows(self, flat: tuple[int, ...], dtype: str) -> int:
        new = len(self.keys)
        out = self.intern(("rows", flat), TensorType(dtype, (sum(self.types[x].numel for x in flat),)), flat)
        if out == new:
            for array in dict.fromkeys(a for x in flat for a in self.arrays(x)):
                self.rows_with.setdefault(array, []).append(out)
        return out

    def _ends(self, e: int) -> list[int]:
        """The bounds of the rows of a value."""
        found = self._rows_end.get(e)
        if found is None:
            found = self._rows_end[e] = list(accumulate([self.types[part].numel for part in self.keys[e][1]], initial=0))
        return found

    def arrays(self, e: int) -> list[int]:
        """The arrays whose slices a value sums; -1 for a constant."""
        return [array if start >= 0 else -1 for array, start in self.slices(e)]

    def _continued(self, a: int, b: int) -> int | None:
        """Two flat arrays as one, if every slice in b continues one in a; else None."""
        x, y = self.slices(a), self.slices(b)
        n, m = self.types[a].numel, self.types[b].numel
        if len(x) != len(y):
            return None
        xs = sorted((base, start + (n if start >= 0 else 0), w) for (base, start), w in x.items())
        if xs != sorted((base, start, w) for (base, start), w in y.items()):
            return None
        dtype = self.types[a].dtype
        items = []
        for (base, start), w in x.items():
            items.append((self.one(dtype, (n + m,)) if start < 0 else self.cut(base, start, start + n + m), w))
        return self.lin(items, TensorType(dtype, (n + m,)))

    def slices(self, e: int) -> dict[tuple[int, int], float]:
        """A value as a weighted sum of slices {(array, start): weight}, all of the value's size; start is -1 for a constant."""
        out: dict[tuple[int, int], float] = {}
        for a, w in self.items(e):
            key = self.keys[a]
            if key[0] == "view":
                a = key[1]
                key = self.keys[a]
            if key[0] == "slice":
                out[key[1], key[2]] = w
            elif key[0] == "one":
                out[self.one(key[1], ()), -1] = w
            else:
                out[a, 0] = w
        return out

    def _parts_of(self, e: int) -> tuple[int, ...] | None:
        """The rows of a value; None if it is not made of rows."""
        key = self.keys[e]
        if key[0] == "view":
            key = self.keys[key[1]]
        return key[1] if key[0] == "rows" else None

    # -- for `Rewrite.meaning`, with `cut`, `join` and `shaped` --------------------------------------------------------

    nothing = -1  # the result on a rank that gets none

    def type(self, e: int) -> TensorType:
        return self.types[e]

    def unknown(self) -> int:
        raise Refusal("the proof does not know what this computes")

    def sum(self, xs: Sequence[int], weight: float = 1.0) -> int:
        if None in xs:
            raise Refusal("a missing value cannot be added")
        if not xs or len({self.types[x] for x in xs}) > 1:
            raise Refusal("values of different types, or no values, cannot be added: " + ", ".join(str(self.types[x]) for x in xs[:4]))
        return self.lin([(x, weight) for x in xs], self.types[xs[0]])

    def mean(self, xs: Sequence[int]) -> int:
        return self.sum(xs, 1.0 / max(1, len(xs)))

    def rounded(self, e: int, dtype: str) -> int:
        """The value converted to another float dtype: equal in exact arithmetic."""
        key = self.keys[e]
        return key[2] if key[:2] == ("each", "rounded") and self.types[key[2]].dtype == dtype else self.each("rounded", e, dtype)

    def each(self, what: str, e: int, dtype: str) -> int:
        """A linear elementwise function `what` of a value, with f(1) = 1."""
        key, t = self.keys[e], self.types[e].with_dtype(dtype)
        again = self.rounded if what == "rounded" else partial(self.each, what)
        match key[0]:
            case "lin":
                return self.lin([(again(a, dtype), w) for a, w in key[1]], t)
            case "one":
                return self.one(dtype, t.shape)
            case "view":
                return self.shaped(again(key[1], dtype), t.shape)
            case "slice":
                return self.cut(again(key[1], dtype), key[2], key[2] + key[3])
            case "rows":
                return self.join([again(part, dtype) for part in key[1]])
            case "strided":
                return self.intern(("strided", again(key[1], dtype), *key[2:]), t, (key[1],))
        return self.intern(("each", what, e, dtype), t, (e,))

    def rows(self, x: int, shapes: Sequence[Sequence[int]]) -> list[int]:
        out, at = [], 0
        if sum(prod(s) for s in shapes) != self.types[x].numel:
            raise Refusal(f"{self.types[x]} cannot be split into shapes {[list(s) for s in shapes]}")
        for s in shapes:
            out.append(self.shaped(self.cut(x, at, at + prod(s)), s))
            at += prod(s)
        return out

    def gathered(self, xs: Sequence[int], marks: Sequence[int], shape: Sequence[int]) -> int:
        """The array whose parts between the bounds `marks` are `xs`."""
        for k, x in enumerate(xs):
            if x is None:
                raise Refusal(f"part {k} is missing")
            if self.types[x].numel != marks[k + 1] - marks[k]:
                raise Refusal(f"part {k} is {self.types[x]}, but should have {marks[k + 1] - marks[k]} elements")
        return self.join(xs, shape)

    # -- sums --------------------------------------------------------------------------------------------------------

    def one(self, dtype: str, shape: Sequence[int]) -> int:
        t = TensorType(dtype, tuple(shape))
        return self.intern(("one", dtype, t.shape), t)

    def constant(self, value: float, type_: TensorType) -> int:
        v = float(value)
        exact = v.is_integer() and abs(v) <= _EXACT and type_.dtype != "bool"
        if not exact and (type_.dtype not in FLOATS or not isfinite(v) or abs(v) < 1e-290):
            return self.intern(("constant", repr(value), type_), type_)
        return self.lin([(self.one(type_.dtype, type_.shape), v)], type_)

    def constant_of(self, e: int) -> float | None:
        """The number that all elements of a constant equal; None if it is not known to be a constant."""
        key = self.keys[e]
        if key[0] == "one":
            return 1.0
        if key[0] == "lin" and len(key[1]) <= 1:
            return 0.0 if not key[1] else key[1][0][1] if self.keys[key[1][0][0]][0] == "one" else None
        return None

    def items(self, e: int) -> tuple[tuple[int, float], ...]:
        key = self.keys[e]
        return key[1] if key[0] == "lin" else ((e, 1.0),)

    def lin(self, weighted: Sequence[tuple[int, float]], type_: TensorType) -> int:
        """The weighted sum of values of one type. Raises Refusal if it has no exact normal form."""
        if len(weighted) == 1 and weighted[0][1] == 1.0 and self.types[weighted[0][0]] == type_:
            return weighted[0][0]
        if type_.dtype == "bool":
            raise Refusal("bools cannot be added")
        cuts = [p for e, _ in weighted for a, _ in self.items(e) if (p := self._parts_of(a)) is not None]
        if cuts:
            return self._lin_of_rows(weighted, cuts, type_)
        sums, size = self._summed(weighted, type_)
        # a weight is 0 if it is rounding noise relative to the weights that were added; its own size does not matter
        items = tuple(sorted((a, self.weight(u)) for a, u in sums.items() if abs(u) > 1e-12 * size[a]))
        if type_.dtype not in FLOATS and any(not u.is_integer() or abs(u) > _EXACT for _, u in items):
            raise Refusal(f"integers ({type_}) are multiplied by a fraction")
        if not items:
            return self.intern(("lin", (), type_), type_)
        if len(items) == 1 and items[0][1] == 1.0:
            return items[0][0]
        return self.intern(("lin", items), type_, [a for a, _ in items])

    def _summed(self, weighted: Sequence[tuple[int, float]], type_: TensorType) -> tuple[dict[Any, float], dict[Any, float]]:
        """(weight, largest added weight) by expression, where nested sums are flattened and terms of ranks are joined."""
        sums: dict[Any, float] = {}
        size: dict[Any, float] = {}
        terms: dict[tuple, list[tuple[int, float]]] = {}
        products: dict[tuple, list[Span]] = {}
        for e, w in weighted:
            if not isfinite(w):
                raise Refusal(f"the weight {w} is not finite")
            found = self.items(e)
            if len(found) > _MOST and not self.ranked[e]:
                found = ((e, 1.0),)
            for a, v in found:
                u = v * w
                if not isfinite(u) or (u == 0.0 and w != 0.0) or (u != 0.0 and abs(u) < 1e-290):
                    raise Refusal(f"the product of the weights {v:g} and {w:g} overflows or underflows")
                if (t := self._terms(a)) is not None:
                    terms.setdefault(t[0], []).append((t[1], u))
                    continue
                if (key := self.keys[a])[0] == "products":
                    products.setdefault(key[1:4], []).append((*key[4:], u))
                    continue
                sums[a] = sums.get(a, 0.0) + u
                size[a] = max(size.get(a, 0.0), abs(u))
        added = [x for t, found_terms in terms.items() for x in self._gathered(t, found_terms, type_)]
        added += [x for of, spans in products.items() for x in self.adaptive.together(of, spans, type_)]
        for a, u in added:
            sums[a] = sums.get(a, 0.0) + u
            size[a] = max(size.get(a, 0.0), abs(u))
        return sums, size

    def weight(self, w: float) -> float:
        """A representative of all numbers that differ from `w` by rounding noise."""
        if w.is_integer() and abs(w) < _EXACT:
            return w
        # weights are products and sums of a few numbers; a wrong weight differs in far more than the twelfth digit
        short = float(f"{w:.12g}")
        return short if abs(short - w) <= 1e-15 * abs(w) else self._weights.setdefault(short, w)

    def _lin_of_rows(self, weighted: Sequence[tuple[int, float]], cuts: Sequence[tuple[int, ...]], type_: TensorType) -> int:
        if type_.numel == ANY:
            raise Refusal("the size of a sum is open")
        at = {0, type_.numel}
        for parts in cuts:
            stop = 0
            for p in parts:
                stop += self.types[p].numel
                at.add(stop)
        marks = sorted(at)
        out = []
        for a, b in zip(marks, marks[1:], strict=False):
            row = [(self.cut(x, a, b), v * w) for e, w in weighted for x, v in self.items(e)]
            out.append(self.lin(row, TensorType(type_.dtype, (b - a,))))
        return self.join(out, type_.shape)

    # -- terms of a sum over ranks -----------------------------------------------------------------------------------

    def terms(self, derivation: int, others: tuple, ranks: int, type_: TensorType) -> int:
        """The sum of the terms of some ranks (a bit mask). `others` are the coordinates that are not summed over."""
        return self.intern(("terms", derivation, others, ranks), type_, ranked=True)

    def _terms(self, a: int) -> tuple[tuple, int] | None:
        """((derivation, others, strided slice, start of a slice, shape), ranks) of terms, or of slices or views of them; else None."""
        if not self.ranked[a]:
            return None
        key, shape, start, sliced = self.keys[a], self.types[a].shape, -1, ()
        if key[0] == "view":
            key = self.keys[key[1]]
        if key[0] == "slice":
            start = key[2]
            key = self.keys[key[1]]
        if key[0] == "strided":
            sliced = key[2:]
            key = self.keys[key[1]]
        if key[0] != "terms":
            return None
        return (key[1], key[2], sliced, start, shape), key[3]

    def _gathered(self, t: tuple, found: Sequence[tuple[int, float]], type_: TensorType) -> list[tuple[int, float]]:
        """Join the terms of one sum that have equal weights. If all ranks are there, the result is the sum itself."""
        derivation, others, sliced, start, shape = t
        parts: list[tuple[int, float]] = []
        for ranks, w in found:
            rest = []
            for m, v in parts:
                both = m & ranks
                if not both:
                    rest.append((m, v))
                    continue
                if abs(v + w) > 1e-12 * max(abs(v), abs(w)):
                    rest.append((both, v + w))
                if m & ~both:
                    rest.append((m & ~both, v))
                ranks &= ~both
            if ranks:
                rest.append((ranks, w))
            parts = rest
        by_weight: dict[float, int] = {}
        for m, v in parts:
            v = self.weight(v)
            by_weight[v] = by_weight.get(v, 0) | m
        out = []
        for v, m in by_weight.items():
            whole = self.complete(derivation, others, m)
            e = whole if whole is not None else self.ids.get(("terms", derivation, others, m))
            if e is None:
                e = self.terms(derivation, others, m, self.types[self.ids["terms", derivation, others, found[0][0]]])
            e = self.strided.taken(e, *sliced) if sliced else e
            e = self.cut(e, start, start + prod(shape)) if start >= 0 else e
            out += [(a, u * v) for a, u in self.items(self.shaped(e, shape))]
        return out

    def show(self, e: int, depth: int = 4) -> str:
        """A short text of an expression, for messages."""
        return show(self, e, depth)


_PLAIN = (int, str, bool, type(None))  # equal values of one of these types have equal texts


def _shown(value: Any) -> str | tuple[int, ...] | Offsets:
    if value.__class__ is Offsets:
        return value
    if type(value) is tuple and value and {*map(type, value)} == {int}:  # bounds of many ranks, whose text would be long
        return value
    return "block" if isinstance(value, BlockRef) else repr(value)


def _name(item: tuple[str, Any]) -> str:
    return item[0]
