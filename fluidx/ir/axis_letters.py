"""Words for access patterns that depend on shapes: matching axes of two shapes with the same elements, and axes by number."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .types import ANY


def match_axes(x: Sequence[int], y: Sequence[int], letter: str = "r") -> tuple[str, str, dict[str, int], str]:
    """The axes of two shapes with the same elements, written in common factors: for reshapes and flattened axes.

    Returns the words for both shapes, the sizes of the factors, and an exception for axes without a common factor.

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
        if size is None:  # no common factor: the rest of both stays whole
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
    """The inner factor that two axes share, or None. The axes before them decide what an open axis can be."""
    if p == ANY == q:
        alike = tuple(before_p) == tuple(before_q) or ANY not in (*before_p, *before_q) and prod(before_p) == prod(before_q)
        return p if alike else None
    if p == q:
        return p
    if p <= 0 or q <= 0:
        if 0 in (p, q):
            return None
        # an open axis that is matched with q is a multiple of it if the size before it divides the size before q
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
    """One axis made of the axes `words` with the sizes `shape`; axes of size 1 are left out.

    >>> fold("a b c", (5, 1, -1))
    '(a c)'
    """
    inner = [w for w, d in zip(words.split(), shape, strict=True) if d != 1]
    return f"({' '.join(inner)})" if len(inner) > 1 else inner[0] if inner else "."


def but(axes: Sequence[int], ndim: int, word: str = ".", letter: str = "e") -> str:
    """Words for `ndim` axes with `word` for all those in `axes`: by default, must not be sharded.

    >>> but((0, -1), 4)
    '. e1 e2 .'
    """
    named = {a % ndim for a in axes}
    return " ".join(word if k in named else f"{letter}{k}" for k in range(ndim))


def along(axis: int, ndim: int, word: str, letter: str = "e") -> str:
    """Words for `ndim` axes with `word` for `axis`.

    >>> along(-1, 3, "c")
    'e0 e1 c'
    """
    return " ".join(word if k == axis % ndim else f"{letter}{k}" for k in range(ndim))
