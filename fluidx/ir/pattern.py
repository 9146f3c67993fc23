"""Access patterns: one line says which elements an op reads and writes; where its operands may lie follows from it.

    "* i k, * k j -> * i j | k:+ L(0) L(1)"

One word per axis, one entry per operand (slots in order, the variables of a list slot one by one). A letter is a *factor*, a loop of the
op; `(a b)` is an axis that two factors make, `a` the outer one; `*` stands for any further axes, aligned from the right; `.` is an axis
without a factor (of size 1, or not to be cut); `~X` an operand of which only the shape is read; `n/4` an axis with one entry for each
of 4 runs of n: of N elements, run k has k*N//4 to (k+1)*N//4, perhaps none. After `|` stand the exceptions:

    k:+  k:max  k:min   outputs that lack k are reduced over it        k:=    outputs that lack k do not depend on it
    c!                  c must be whole                                v@     the kernel is told where its part of v begins
    #n                  the kernel is told the global size of n        K      the kernel is told its part of every axis (random numbers)
    n/4                 n is cut between 4 runs, as an axis n/4 says too: the ranks of a group cut it if their number divides 4. Their
                        parts then begin where runs do, whatever the size of n; a second group does not cut n again
    n/4@                the kernel is told which run its part begins with
    L(0,2)  L(0>1)      linear in operands 0 and 2 together; only into output 1
    U(0)  D(0)  U(0>max)  rising or falling in every element of operand 0; a maximum over elements of it

`*:+` speaks of all starred factors, `k?:+` of k0, k1, ... Operands and outputs are counted from 0.
Source: the notation of nnScaler's dimops and of Shardy's factors, with reductions, linear groups and offsets added.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

from .errors import ProgramError, nearest
from .types import ANY, At, Entry, Partial, Pieces, Shard, TensorType

Types = Sequence[TensorType | None]

# In a row: the same root, or the same flat ranges, for all operands that have the entry.
ROOT = At(-1, "")
FLAT = Pieces((), "")
MONOIDS = {"+": "sum", "max": "max", "min": "min"}

_WORD = re.compile(r"\([^)]*\)|\S+")
_NAME = re.compile(r"[^\s,()~]+")


class Row(NamedTuple):
    """One way in which the operands may lie over one mesh axis, and where the outputs then lie. Entries are of group ""."""

    kind: str  # "cut", "flat", "root", "whole", "linear" or "monotone"
    why: str
    ins: tuple[Entry | None, ...]
    outs: tuple[Entry | None, ...]
    factor: str = ""  # what is cut
    runs: int = 0  # it is cut between so many runs: only a number of ranks that divides this can cut it, and one group; 0: any

    def among(self, n: int) -> bool:
        """Can n ranks cut what the row cuts?"""
        return not self.runs or self.runs % n == 0

    @property
    def owes(self) -> bool:
        """Does an output become partial?"""
        return any(isinstance(e, Partial) for e in self.outs)


@dataclass
class Pattern:
    """A line read for operands of known types."""

    ins: list[list[tuple[str, ...]] | None]  # per operand, per axis, its factors, the outer one first
    outs: list[list[tuple[str, ...]] | None]
    sizes: dict[str, int]
    reduced: dict[str, str] = field(default_factory=dict)  # factor -> sum, max or min
    ignored: set[str] = field(default_factory=set)  # `:=`
    whole: set[str] = field(default_factory=set)
    located: set[str] = field(default_factory=set)  # `@`
    counted: set[str] = field(default_factory=set)  # `#`
    keyed: bool = False
    linear: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = field(default_factory=list)
    monotone: list[tuple[int, tuple[tuple[str, str], ...]]] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)  # factor -> the number of its runs, `/`
    shape_only: frozenset[int] = frozenset()
    no_axes: bool = False  # the line names no axis, so that flat ranges may be worked on

    @property
    def count(self) -> int:
        """The product of the global sizes of the factors marked `#`."""
        return prod(self.sizes[f] for f in self.counted)

    @property
    def told(self) -> bool:
        """Must the kernel know more than its part?"""
        return bool(self.counted or self.located or self.keyed)


def parse_pattern(text: str, ins: Types, outs: Types, sizes: Mapping[str, int] | None = None) -> Pattern:
    """The pattern that a line says for operands and outputs of these types (None: absent). `sizes` gives those of compound axes' factors.

    >>> p = parse_pattern("i k, k j -> i j | k:+ L(0) L(1)", [TensorType("float32", (-1, 4)), TensorType("float32", (4, 3))],
    ...                   [TensorType("float32", (-1, 3))])
    >>> p.sizes, p.reduced
    ({'i': -1, 'k': 4, 'j': 3}, {'k': 'sum'})
    """
    check_exceptions(text, tuple(sizes or ()))
    body, _, after = text.partition("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise ProgramError(f"pattern {text!r} has no '->'")
    sides = [[w.strip() for w in side.split(",")] if types else [] for side, types in ((left, ins), (right, outs))]
    entries = [*sides[0], *sides[1]]
    types = [*ins, *outs]
    if len(entries) != len(types) or len(sides[0]) != len(ins):
        said = f"{len(sides[0])} operands and {len(sides[1])} outputs"
        raise ProgramError(f"pattern {text!r} speaks of {said}, not of {len(ins)} and {len(outs)}")
    words = [_WORD.findall(e.lstrip("~")) for e in entries]
    stars = [len(t.shape) - len(w) + 1 if t is not None and "*" in w else 0 for w, t in zip(words, types, strict=True)]
    most = max(stars, default=0)
    found: dict[str, int] = dict(sizes or {})
    dots = 0
    tensors: list[list[tuple[str, ...]] | None] = []
    whole: set[str] = set()
    for w, t, m in zip(words, types, stars, strict=True):
        if t is None:
            tensors.append(None)
            continue
        if "*" in w:
            at = w.index("*")
            w = [*w[:at], *(f"*{k}" for k in range(most - m, most)), *w[at + 1 :]]
        if len(w) != t.ndim:
            raise ProgramError(f"pattern {text!r}: {len(w)} axes are named for a value of shape {list(t.shape)}")
        words_of: list[tuple[str, ...]] = []
        for f, d in zip(w, t.shape, strict=True):
            if d == 1:  # a size of 1 is never cut: it broadcasts, or there is nothing to cut
                words_of.append(())
                continue
            if f == ".":
                dots += 1
                f = f".{dots}"
                whole.add(f)
            factors = tuple(f.strip("()").split())
            if len(factors) == 1 and found.get(f, ANY) in (ANY, 1):
                found[f] = d
            words_of.append(factors)
        tensors.append(words_of)
    p = Pattern(
        tensors[: len(ins)], tensors[len(ins) :], found, whole=whole,
        shape_only=frozenset(k for k, e in enumerate(sides[0]) if e.startswith("~")),
        no_axes=all(w in (["*"], ["."], []) for w in words),
    )  # fmt: skip
    for axes in tensors:
        for factors in axes or ():
            for f in factors:
                found.setdefault(f, ANY)
    if "/" in text:
        _runs(p, text)
    for word in after.split():
        _exception(p, word, text)
    return p


_RUNS = re.compile(r"(\w+)/(\d+)")


def _runs(p: Pattern, text: str) -> None:
    """Enter the factors that are cut between runs."""
    for f, k in _RUNS.findall(text):
        count, axis = p.runs.setdefault(f, int(k)), f"{f}/{k}"
        if count != int(k) or not count:
            raise ProgramError(f"pattern {text!r}: {f} is in {k} runs" + (f" and in {count}" if count else ""))
        if p.sizes.get(axis, ANY) not in (ANY, count):
            raise ProgramError(f"pattern {text!r}: an axis {axis} has size {p.sizes[axis]}")
        if axis in p.sizes:
            p.sizes[axis] = count
        if f not in p.sizes:  # of size 1, which is never cut
            p.whole.add(f)
            p.sizes[f] = 1


_GROUP = re.compile(r"([LUD])\((\d+(?:,\d+)*)(?:>(\w+(?:,\w+)*))?\)")
_SWAPPED = {"max": "min", "min": "max"}


def _about(word: str) -> tuple[str, str]:
    """What an exception says of a factor, and of which one: ("#", "n"), ("!", "c"), ("@", "v") or ("+", "k")."""
    if word.startswith("#"):
        return "#", word[1:]
    if word.endswith("!"):
        return "!", word[:-1]
    if "@" in word:
        return "@", word.partition("@")[0]
    name, _, role = word.rpartition(":")
    return role, name


@lru_cache(maxsize=4096)
def check_exceptions(text: str, sized: tuple[str, ...] = ()) -> None:
    """Raise ProgramError for an exception of no kind, or one that speaks of a factor which neither the line nor `sized` names.

    >>> check_exceptions("i k, k j -> i j | n:+")
    Traceback (most recent call last):
    fluidx.ir.errors.ProgramError: pattern 'i k, k j -> i j | n:+': 'n:+' speaks of factor 'n'; the line names: i, j, k
    """
    body, _, after = text.partition("|")
    known = {*_NAME.findall(body.replace("->", " ")), *sized, *(f"{f}/{k}" for f, k in _RUNS.findall(text))}
    for word in after.split():
        if word == "K" or _GROUP.fullmatch(word) or _RUNS.fullmatch(word):
            continue
        said, name = _about(word)
        if not name or said not in ("#", "!", "@", "=", *MONOIDS):
            raise ProgramError(f"pattern {text!r}: {word!r} says nothing about a factor or an operand")
        if name not in known and not name.endswith("?"):  # of k0, k1, ... there may be none
            raise ProgramError(f"pattern {text!r}: {word!r} speaks of factor {name!r}; {nearest(name, sorted(known), 'the line names')}")


def _exception(p: Pattern, word: str, text: str) -> None:
    """Enter one word from behind the `|`."""
    if (m := _GROUP.fullmatch(word)) is not None:
        kind, operands, into = m.groups()
        members = tuple(map(int, operands.split(",")))
        if max(members) >= len(p.ins):
            raise ProgramError(f"pattern {text!r}: {word!r} speaks of operand {max(members)}; there are {len(p.ins)}, counted from 0")
        if kind == "L":
            p.linear.append((members, tuple(map(int, into.split(","))) if into else None))
            return
        kinds = (into,) if into else ("max", "min")
        p.monotone.append((members[0], tuple((k, k if kind == "U" else _SWAPPED[k]) for k in kinds)))
        return
    if _RUNS.fullmatch(word):
        return
    if word == "K":
        p.keyed = True
        return
    said, name = _about(word)
    factors = _named(p, name)
    if said in MONOIDS:
        p.reduced.update(dict.fromkeys(factors, MONOIDS[said]))
    else:
        {"#": p.counted, "!": p.whole, "@": p.located, "=": p.ignored}[said].update(factors)


def _named(p: Pattern, name: str) -> list[str]:
    if name == "*":
        return [f for f in p.sizes if f[0] == "*"]
    if name.endswith("?"):
        return [f for f in p.sizes if f.startswith(name[:-1]) and f[len(name) - 1 :].isdigit()]
    return [name] if name in p.sizes else []  # an axis of size 1, or of an operand that is absent, has no factor


# -- rows -----------------------------------------------------------------------------------------------------------------------


def _cut(
    operands: Sequence[list[tuple[str, ...]] | None], f: str, sizes: Mapping[str, int], runs: str
) -> tuple[Shard | None, ...] | None:
    """Where operands lie when factor f, or the axis of its runs, is cut; None for one without. None when that is no cut of one of them."""
    out: list[Shard | None] = []
    for axes in operands:
        found = [(k, factors) for k, factors in enumerate(axes or ()) if f in factors or runs in factors]
        if not found:
            out.append(None)
            continue
        axis, factors = found[0]
        unit = prod(max(sizes.get(inner, ANY), 0) for inner in factors[1:])
        if len(found) > 1 or factors[0] not in (f, runs) or not unit:
            return None
        out.append(Shard(axis, "", unit))
    return tuple(out)


def rows(p: Pattern) -> list[Row]:
    """Every row that follows from a pattern, in the order of preference among equally cheap ones:
    cut, flat ranges, at a root, whole, cuts that leave a sum to be finished, linear, monotone."""
    cuts: list[Row] = []
    for f in p.sizes:
        if f in p.whole or "/" in f:
            continue
        count = p.runs.get(f, 0)
        runs = f"{f}/{count}" if count else ""
        ins, outs = _cut(p.ins, f, p.sizes, runs), _cut(p.outs, f, p.sizes, runs)
        if ins is None or outs is None or not any((*ins, *outs)):
            continue
        monoid = p.reduced.get(f)
        lacking = any(o is None and axes is not None for o, axes in zip(outs, p.outs, strict=True))
        if lacking and monoid is None and f not in p.ignored:
            continue
        rest = None if f in p.ignored or monoid is None else Partial(monoid, "")
        filled = tuple(o or (None if axes is None else rest) for o, axes in zip(outs, p.outs, strict=True))
        cuts.append(Row("cut", f"cut {runs or f}", ins, filled, f, count))
    whole = Row("whole", "whole", (None,) * len(p.ins), (None,) * len(p.outs))
    root = Row("root", "at a root", _all(ROOT, p.ins), _all(ROOT, p.outs))
    settled = [r for r in cuts if not r.owes]
    owing = [r for r in cuts if r.owes]
    flat = _flat_row(p)
    last = [*_linear_rows(p), *_monotone_rows(p)]
    if flat is not None:
        (owing if flat.owes else settled).append(flat)
    return [*settled, root, whole, *owing, *last]


def _all(entry: Entry, operands: Sequence[object]) -> tuple[Entry | None, ...]:
    return tuple(None if o is None else entry for o in operands)


def _flat_row(p: Pattern) -> Row | None:
    """Flat ranges, for a line that names no axis: every operand has all of the elements, or one for all of them."""
    if not p.no_axes or p.keyed or p.whole - {f for f in p.whole if f[0] == "."} or not p.outs:
        return None
    flat = [None if axes is None else tuple(f for a in axes for f in a) for axes in (*p.ins, *p.outs)]
    full = max((t for t in flat if t is not None), key=len, default=())
    if not full or any(t not in (None, full, ()) for t in flat) or any(f[0] == "." for f in full):
        return None
    monoids = {p.reduced.get(f) for f in full}
    monoid = monoids.pop() if len(monoids) == 1 else ""
    place: list[Entry | None] = [FLAT if t else None for t in flat]
    outs = place[len(p.ins) :]
    if not all(e is not None or axes is None for e, axes in zip(outs, p.outs, strict=True)):
        if not monoid:
            return None
        outs = [e if e is not None or axes is None else Partial(monoid, "") for e, axes in zip(outs, p.outs, strict=True)]
    elif monoid:
        return None
    return Row("flat", "flat ranges", tuple(place[: len(p.ins)]), tuple(outs))


def _linear_rows(p: Pattern) -> Iterator[Row]:
    term = Partial("sum", "")
    for group, into in p.linear:
        ins = tuple(term if k in group else None for k in range(len(p.ins)))
        outs = tuple(None if axes is None else term if into is None or k in into else None for k, axes in enumerate(p.outs))
        yield Row("linear", f"linear in {', '.join(map(str, group))}", ins, outs)


def _monotone_rows(p: Pattern) -> Iterator[Row]:
    for k, kinds in p.monotone:
        for before, after in kinds:
            ins = tuple(Partial(before, "") if j == k else None for j in range(len(p.ins)))
            yield Row("monotone", f"monotone in {k}", ins, _all(Partial(after, ""), p.outs))


# -- axes of one shape against axes of another with the same elements -------------------------------------------------------------


def match_axes(x: Sequence[int], y: Sequence[int], letter: str = "r") -> tuple[str, str, dict[str, int], str]:
    """The axes of two shapes with the same elements, written in common factors: for reshapes and flattened axes.

    Returns the words for both shapes, the sizes of the factors, and an exception for what has no common factor.

    >>> match_axes((4, 6), (24,))
    ('r1 r0', '(r1 r0)', {'r0': 6, 'r1': 4}, '')
    >>> match_axes((6, 4), (8, 3))
    ('. r0', '. r1', {'r0': 4, 'r1': 3}, 'r0! r1!')
    >>> match_axes((-1, 5), (5, -1))  # an open axis is not cut where the other one is
    ('. r0', '. r1', {'r0': 5, 'r1': -1}, 'r0! r1!')
    """
    a: list[list[str]] = [[] for _ in x]
    b: list[list[str]] = [[] for _ in y]
    sizes: dict[str, int] = {}
    i, j = len(x) - 1, len(y) - 1
    p, q = (x[i] if x else 1), (y[j] if y else 1)
    exception = ""
    while True:
        while i >= 0 and p == 1:
            i -= 1
            p = x[i] if i >= 0 else 1
        while j >= 0 and q == 1:
            j -= 1
            q = y[j] if j >= 0 else 1
        if i < 0 or j < 0:
            break
        size = _common(p, q, x[:i], y[:j])
        if size is None:  # no common factor: what is left of both stays whole
            whole = []
            for axes, rest in ((a[i], p), (b[j], q)):
                whole.append(f"{letter}{len(sizes)}")
                axes.insert(0, whole[-1])
                sizes[whole[-1]] = rest
            exception = f"{whole[0]}! {whole[1]}!"
            break
        name = f"{letter}{len(sizes)}"
        a[i].insert(0, name)
        b[j].insert(0, name)
        sizes[name] = size
        p = 1 if p == size else p // size if p > 0 else p
        q = 1 if q == size else q // size if q > 0 else q
    return _say(a), _say(b), sizes, exception


def _common(p: int, q: int, before_p: Sequence[int], before_q: Sequence[int]) -> int | None:
    """The inner factor that two axes share, or None. What stands before them decides what an open axis can be."""
    if p == ANY == q:
        alike = tuple(before_p) == tuple(before_q) or ANY not in (*before_p, *before_q) and prod(before_p) == prod(before_q)
        return p if alike else None
    if p == q:
        return p
    if p <= 0 or q <= 0:
        if 0 in (p, q):
            return None
        # an open axis that meets q is a multiple of it when what stands before it divides what stands before q
        given, open_, known = (q, before_p, before_q) if p == ANY else (p, before_q, before_p)
        whole = ANY not in open_ and 0 not in open_ and prod(d for d in known if d != ANY) % prod(open_) == 0
        return given if whole else None
    small, large = sorted((p, q))
    return small if large % small == 0 else None


def _say(axes: Sequence[Sequence[str]]) -> str:
    return " ".join("." if not f else f[0] if len(f) == 1 else f"({' '.join(f)})" for f in axes)


def letters(count: int, letter: str) -> str:
    """`count` words: letter0 letter1 ...

    >>> letters(3, "a")
    'a0 a1 a2'
    """
    return " ".join(f"{letter}{k}" for k in range(count))


def fold(words: str, shape: Sequence[int]) -> str:
    """One axis made of the axes that `words` names, whose sizes are `shape`; those of size 1 take no part in it.

    >>> fold("a b c", (5, 1, -1))
    '(a c)'
    """
    inner = [w for w, d in zip(words.split(), shape, strict=True) if d != 1]
    return f"({' '.join(inner)})" if len(inner) > 1 else inner[0] if inner else "."


def but(axes: Sequence[int], ndim: int, word: str = ".", letter: str = "e") -> str:
    """Words for `ndim` axes of which all those in `axes` are `word`: by default, not to be cut.

    >>> but((0, -1), 4)
    '. e1 e2 .'
    """
    named = {a % ndim for a in axes}
    return " ".join(word if k in named else f"{letter}{k}" for k in range(ndim))


def along(axis: int, ndim: int, word: str, letter: str = "e") -> str:
    """Words for `ndim` axes of which `axis` is `word`.

    >>> along(-1, 3, "c")
    'e0 e1 c'
    """
    return " ".join(word if k == axis % ndim else f"{letter}{k}" for k in range(ndim))


@lru_cache(maxsize=4096)
def _rebound(size: int, n: int, unit: int) -> tuple[int, ...] | int:
    from .parts import bounds

    return tuple(bounds(size, n, unit)) if size >= 0 else unit


def same_cut(a: Entry | None, b: Entry | None, shape: Sequence[int], n: int) -> bool:
    """Are two entries of one group, of n ranks, the same? Cuts are when their bounds are; those of an open axis when their units are."""
    if a == b:
        return True
    if not (isinstance(a, Shard) and isinstance(b, Shard)) or a.axis != b.axis or a.group != b.group or a.axis >= len(shape):
        return False
    return _rebound(shape[a.axis], n, a.unit) == _rebound(shape[b.axis], n, b.unit)


# -- a row for operands that lie somewhere ----------------------------------------------------------------------------------------


def fits(
    row: Row, p: Pattern, ins: Sequence[Entry | None], outs: Sequence[Entry | None] | None, types: Types, group: str, n: int
) -> tuple[Entry | None, ...] | None:
    """Where the outputs lie by `row` when the operands lie at `ins` over `group`, of n ranks; None when the row says nothing of that.

    With `outs` given, they must be those. `types` are those of operands and outputs. Where only a shape is read, nothing is asked.
    """
    if not row.among(n):
        return None
    scale = 0
    for k, (want, have) in enumerate(zip(row.ins, ins, strict=True)):
        if k in p.shape_only or p.ins[k] is None:
            continue
        if isinstance(want, Shard):
            if not isinstance(have, Shard) or have.axis != want.axis:
                return None
            if have.unit % want.unit == 0:
                scale = scale or have.unit // want.unit
        elif want is ROOT:
            if not (have is None or isinstance(have, At)):
                return None
        elif want is FLAT:
            if not isinstance(have, Pieces):
                return None
        elif isinstance(want, Partial):
            # what is the same everywhere is its own maximum; a sum would count it once a rank
            if not (isinstance(have, Partial) and have.op == want.op) and not (have is None and want.op != "sum"):
                return None
        elif have is not None:
            return None
    free = next((e for e in ins if isinstance(e, (At, Pieces))), None)
    if row.kind == "flat" and free is None and not any(e is FLAT for e in row.ins):
        free = next((e for e in outs or () if isinstance(e, Pieces)), None)
    if row.kind == "root" and free is None:
        free = next((e for e in outs or () if isinstance(e, At)), None)
    if row.kind == "cut" and not scale:
        cut_in = any(isinstance(e, Shard) for k, e in enumerate(row.ins) if k not in p.shape_only)
        made = next((e for e, w in zip(outs or (), row.outs, strict=False) if isinstance(e, Shard) and isinstance(w, Shard)), None)
        if not cut_in and outs is not None and made is None:
            return None
        wanted = next((w for w in row.outs if isinstance(w, Shard)), None)
        scale = made.unit // wanted.unit if made is not None and wanted is not None and made.unit % wanted.unit == 0 else 1
    if row.kind in ("root", "flat") and free is None:
        return None
    place = [_concrete(e, free, 1 if row.runs else scale, group) for e in (*row.ins, *row.outs)]
    for k, have in enumerate(ins):
        if k in p.shape_only or have is None or p.ins[k] is None:
            continue
        t = types[k]
        if place[k] is not None and not same_cut(place[k], have, t.shape if t is not None else (), n):
            return None
    made_at = tuple(place[len(row.ins) :])
    if outs is not None:
        for k, (got, said) in enumerate(zip(made_at, outs, strict=True)):
            t = types[len(row.ins) + k]
            if t is not None and not same_cut(got, said, t.shape, n):
                return None
    return made_at


def _concrete(e: Entry | None, free: Entry | None, scale: int, group: str) -> Entry | None:
    if e is None:
        return None
    if e is ROOT or e is FLAT:
        return free
    if isinstance(e, Shard):
        return Shard(e.axis, group, e.unit * max(scale, 1))
    assert isinstance(e, Partial)
    return Partial(e.op, group)


def find_row(
    table: Sequence[Row], p: Pattern, ins: Sequence[Entry | None], outs: Sequence[Entry | None], types: Types, group: str, n: int
) -> Row | None:
    """The first row that allows these entries over `group`; None when no lemma does."""
    for row in table:
        if fits(row, p, ins, outs, types, group, n) is not None:
            return row
    return None


def cut_twice(found: Iterable[Row]) -> str:
    """The factor in runs that more than one of these rows cuts, each over a group of its own; "" for none.

    What the inner of two groups has begins where runs do only by luck, so no lemma speaks of it.
    """
    cuts = [row.factor for row in found if row.runs]
    return next((f for f in cuts if cuts.count(f) > 1), "")
