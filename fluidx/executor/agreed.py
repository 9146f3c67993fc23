"""What launched ranks compare before they do something together, and how they say in what they differ."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..ir.program import ProgramPair
from ..ir.text import declarations, quote, settings, show_op


@lru_cache(1024)
def digest_of(what: tuple) -> int:
    """The same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def in_words(what: tuple) -> str:
    """What a rank is about to do, for an error."""
    if what[0] != "run":
        return str(what[0])
    merged, _, *rest = what[1:]
    feeds = [f"{part[0]}: {part[1]}{list(part[2])}" for part in rest if isinstance(part, tuple)]
    fetches = [repr(part) for part in rest if isinstance(part, str)]
    apart = "" if merged else ", not merged,"
    return f"runs on {', '.join(feeds) or 'no feed'} and fetches{apart} {', '.join(fetches) or 'nothing'}"


def grouped(things: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Each of the things that ranks say, and which say it.

    >>> grouped(["a", "b", "a"])
    [('a', [0, 2]), ('b', [1])]
    """
    found: dict[Any, list[int]] = {}
    for rank, thing in enumerate(things):
        found.setdefault(thing, []).append(rank)
    return list(found.items())


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def parts(pair: ProgramPair) -> list[list[str]]:
    """What a rank tells of a pair: what it sets and declares, its operators, and all its lines."""
    lines, at = str(pair).splitlines(), 1 + len(settings(pair.main)) + len(declarations(pair.main.blocks[0])[0])
    said = f"  origin {quote(pair.main.origin)}"  # that it is another one says nothing yet
    return [[line for line in lines[:at] if line != said], operators(pair), lines]


def operators(pair: ProgramPair) -> list[str]:
    return [show_op(op) for program in (pair.startup, pair.main) for block in program.blocks for op in block.oplist]


def difference(of: int, said: Sequence[Sequence[Sequence[str]]]) -> str:
    """Where the programs differ that ranks have for rank `of`, by their `parts`: the first line, and the first operator."""
    heads, ops, lines = (first_difference(texts) for texts in zip(*said, strict=True))
    first, *op = [d for d in (heads, ops) if d] or [lines]
    text = f"the first difference in rank {of}'s is{first}" + "".join(f"\n  the first operator that differs is{one}" for one in op)
    return f"{text}\n  a script that is launched writes the same program on every rank"


def first_difference(texts: Sequence[Sequence[str]]) -> str:
    """The first lines in which the ranks' texts differ, with the ranks; empty where none does."""
    for some in itertools.zip_longest(*texts, fillvalue="(nothing)"):
        if len(found := grouped([line.strip() for line in some])) > 1:
            return "".join(f"\n  rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {line}" for line, ranks in found)
    return ""
