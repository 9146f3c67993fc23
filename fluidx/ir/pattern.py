"""Access patterns: one line says which elements an op reads and writes; the possible placements of its operands follow from it.

    "* i k, * k j -> * i j | k:+ L(0) L(1)"

One word per axis, one entry per operand (slots in order, the variables of a list slot one by one). A letter is a *factor*, a loop of the
op; `(a b)` is an axis of two factors, `a` the outer one; `*` stands for any further axes, aligned from the right; `.` is an axis without a
factor (of size 1, or one that must not be sharded); `~X` is an operand of which only the shape is read; `n/4` is an axis with one entry
for each of 4 runs of n: of N elements, run k has k*N//4 to (k+1)*N//4, perhaps none. The exceptions follow after `|`:

    k:+  k:max  k:min   outputs without k are reduced over it          k:=    outputs without k do not depend on it
    c!                  c must be whole                                v@     the kernel gets the start of its part of v
    #n                  the kernel gets the global size of n           K      the kernel gets its part of every axis (random numbers)
    n/4                 n is cut between 4 runs, also without an axis n/4: the ranks of a group cut it if their number divides 4. Their
                        parts start where runs start, for any size of n; a second group does not cut n again
    n/4@                the kernel gets the number of the first run of its part
    R                   it computes one value from replica-local values: the ranks must communicate
    L(0,2)  L(0>1)      linear in operands 0 and 2 together; only into output 1
    L()                 zero for any operands: the zeros of every rank are a partial sum of it
    U(0)  D(0)  U(0>max)  rising or falling in every element of operand 0; a maximum over elements of it
    F                   the flat results, joined, are the flat operands, joined: flat ranges of all elements are allowed

`*:+` applies to all starred factors, `k?:+` to k0, k1, ... Operands and outputs are counted from 0.
Source: the notation of nnScaler's dimops and of Shardy's factors, with reductions, linear groups and offsets added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

from .errors import ProgramError, nearest
from .types import ANY, TensorType, size_names

Types = Sequence[TensorType | None]

MONOIDS = {"+": "sum", "max": "max", "min": "min"}

_WORD = re.compile(r"\([^)]*\)|\S+")
_NAME = re.compile(r"[^\s,()~]+")


@dataclass
class Pattern:
    """An access pattern, parsed for operands of known types. Operators share it: nothing may change it."""

    ins: list[list[tuple[str, ...]] | None]  # per operand, per axis, its factors, the outer one first
    outs: list[list[tuple[str, ...]] | None]
    sizes: dict[str, int]
    reduced: dict[str, str] = field(default_factory=dict)  # factor -> sum, max or min
    ignored: set[str] = field(default_factory=set)  # `:=`
    whole: set[str] = field(default_factory=set)
    located: set[str] = field(default_factory=set)  # `@`
    counted: set[str] = field(default_factory=set)  # `#`
    keyed: bool = False
    from_replicas: bool = False  # `R`
    linear: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = field(default_factory=list)
    monotone: list[tuple[int, tuple[tuple[str, str], ...]]] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)  # factor -> the number of its runs, `/`
    shape_only: frozenset[int] = frozenset()
    no_axes: bool = False  # the line names no axis, so flat ranges are allowed
    flat_ranges: bool = False  # `F`
    placement_rows: Any = field(default=None, compare=False, repr=False)  # what rows.rows made of the pattern

    @property
    def count(self) -> int:
        """The product of the global sizes of the factors marked `#`."""
        return prod(self.sizes[f] for f in self.counted)

    @property
    def needs_part(self) -> bool:
        """Does the kernel need more information than its part?"""
        return bool(self.counted or self.located or self.keyed)


def parse_pattern(text: str, ins: Types, outs: Types, sizes: Mapping[str, int] | None = None) -> Pattern:
    """The pattern of a line for operands and outputs of these types (None: absent). `sizes` holds the factor sizes of compound axes.

    >>> p = parse_pattern("i k, k j -> i j | k:+ L(0) L(1)", [TensorType("float32", (-1, 4)), TensorType("float32", (4, 3))],
    ...                   [TensorType("float32", (-1, 3))])
    >>> p.sizes, p.reduced
    ({'i': -1, 'k': 4, 'j': 3}, {'k': 'sum'})
    """
    types = (*ins, *outs)
    names = tuple([size_names(t.shape) if t is not None else () for t in types])  # types are equal whatever the names of their axes
    return _parsed(text, types, len(ins), tuple((sizes or {}).items()), names)


@lru_cache(maxsize=4096)
def _parsed(text: str, types: Types, n_ins: int, sized: tuple[tuple[str, int], ...], names: tuple) -> Pattern:
    """The pattern that all operators with equal lines and types share."""
    ins, outs, sizes = types[:n_ins], types[n_ins:], dict(sized)
    check_exceptions(text, tuple(sizes))
    body, _, after = text.partition("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise ProgramError(f"pattern {text!r} has no '->'")
    sides = [[w.strip() for w in side.split(",")] if types else [] for side, types in ((left, ins), (right, outs))]
    entries = [*sides[0], *sides[1]]
    if len(entries) != len(types) or len(sides[0]) != len(ins):
        said = f"{len(sides[0])} operands and {len(sides[1])} outputs"
        raise ProgramError(f"pattern {text!r} has {said}, not {len(ins)} and {len(outs)}")
    words = [_WORD.findall(e.lstrip("~")) for e in entries]
    stars = [len(t.shape) - len(w) + 1 if t is not None and "*" in w else 0 for w, t in zip(words, types, strict=True)]
    most = max(stars, default=0)
    found: dict[str, int] = sizes
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
            if d == 1:  # an axis of size 1 is never sharded: it broadcasts, or there is nothing to shard
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
    """Enter the factors that are divided into runs."""
    for f, k in _RUNS.findall(text):
        count, axis = p.runs.setdefault(f, int(k)), f"{f}/{k}"
        if count != int(k) or not count:
            raise ProgramError(f"pattern {text!r}: {f} is in {k} runs" + (f" and in {count}" if count else ""))
        if p.sizes.get(axis, ANY) not in (ANY, count):
            raise ProgramError(f"pattern {text!r}: an axis {axis} has size {p.sizes[axis]}")
        if axis in p.sizes:
            p.sizes[axis] = count
        if f not in p.sizes:  # an axis of size 1 is never sharded
            p.whole.add(f)
            p.sizes[f] = 1


_GROUP = re.compile(r"([LUD])\((\d+(?:,\d+)*)(?:>(\w+(?:,\w+)*))?\)|L\(\)")
_SWAPPED = {"max": "min", "min": "max"}


def _about(word: str) -> tuple[str, str]:
    """The kind and the factor of an exception: ("#", "n"), ("!", "c"), ("@", "v") or ("+", "k")."""
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
    """Raise ProgramError for an unknown exception, or for one with a factor that neither the line nor `sized` names.

    >>> check_exceptions("i k, k j -> i j | n:+")
    Traceback (most recent call last):
    fluidx.ir.errors.ProgramError: pattern 'i k, k j -> i j | n:+': 'n:+' refers to factor 'n'; the line names: i, j, k
    """
    body, _, after = text.partition("|")
    known = {*_NAME.findall(body.replace("->", " ")), *sized, *(f"{f}/{k}" for f, k in _RUNS.findall(text))}
    for word in after.split():
        if word in ("K", "R", "F") or _GROUP.fullmatch(word) or _RUNS.fullmatch(word):
            continue
        said, name = _about(word)
        if not name or said not in ("#", "!", "@", "=", *MONOIDS):
            raise ProgramError(f"pattern {text!r}: {word!r} refers to no factor or operand")
        if name not in known and not name.endswith("?"):  # there may be no k0, k1, ...
            raise ProgramError(f"pattern {text!r}: {word!r} refers to factor {name!r}; {nearest(name, sorted(known), 'the line names')}")


def _exception(p: Pattern, word: str, text: str) -> None:
    """Enter one word after the `|`."""
    if word == "L()":
        p.linear.append(((), None))
        return
    if (m := _GROUP.fullmatch(word)) is not None:
        kind, operands, into = m.groups()
        members = tuple(map(int, operands.split(",")))
        if max(members) >= len(p.ins):
            raise ProgramError(f"pattern {text!r}: {word!r} refers to operand {max(members)}; there are {len(p.ins)}, counted from 0")
        if kind == "L":
            p.linear.append((members, tuple(map(int, into.split(","))) if into else None))
            return
        kinds = (into,) if into else ("max", "min")
        p.monotone.append((members[0], tuple((k, k if kind == "U" else _SWAPPED[k]) for k in kinds)))
        return
    if _RUNS.fullmatch(word):
        return
    if word in ("K", "R"):
        p.keyed, p.from_replicas = p.keyed or word == "K", p.from_replicas or word == "R"
        return
    if word == "F":
        p.flat_ranges = True
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
    return [name] if name in p.sizes else []  # an axis of size 1, or of an absent operand, has no factor
