"""Agreement of launched ranks: digests that they compare before a collective call, and texts that show in what they differ."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...ir.program import ProgramPair
from ...ir.text import declarations, quote, settings, show_op


@lru_cache(1024)
def digest_of(what: tuple) -> int:
    """A digest that is equal in every process."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def describe_call(what: tuple) -> str:
    """A description of the call that a rank makes, for an error."""
    if what[0] != "run":
        return str(what[0])
    merged, _, *rest = what[1:]
    feeds = [f"{part[0]}: {part[1]}{list(part[2])}" for part in rest if isinstance(part, tuple)]
    fetches = [repr(part) for part in rest if isinstance(part, str)]
    apart = "" if merged else " (not merged)"
    return f"run with feed {', '.join(feeds) or 'nothing'}, fetch{apart} {', '.join(fetches) or 'nothing'}"


def grouped(things: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Each distinct value, with the ranks that have it.

    >>> grouped(["a", "b", "a"])
    [('a', [0, 2]), ('b', [1])]
    """
    found: dict[Any, list[int]] = {}
    for rank, thing in enumerate(things):
        found.setdefault(thing, []).append(rank)
    return list(found.items())


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def sums_of(feed: Mapping[str, Any]) -> dict[str, int]:
    """A checksum of each feed, the same in every process.

    >>> sums_of({"x": np.zeros(2, "float32")}) == sums_of({"x": np.zeros(4, "float32")[::2]}) != sums_of({"x": np.ones(2, "float32")})
    True
    """
    return {name: zlib.crc32(_bytes_of(value), zlib.crc32(name.encode())) for name, value in feed.items()}


def _bytes_of(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return repr(value.tolist() if isinstance(value, np.ndarray) else value).encode()


def feeds_differ(said: Sequence[Mapping[str, int]]) -> str:
    """The error text for a feed with different values on the ranks, found by their `sums_of`."""
    name = next(n for n in said[0] if len({sums[n] for sums in said}) > 1)
    who = [f"rank{'s' * (len(of) > 1)} {listed(of)}" for _, of in grouped([sums[name] for sums in said])]
    return (
        f"the ranks feed different values of {name!r}: one on {', another on '.join(who)}\n"
        "  each launched rank feeds the whole batch and uses its own rows of it: draw the batch from the same seed or file on all ranks, "
        "as with rng = np.random.default_rng(0), in the same order; or let each rank feed its own rows, with incubate.fleet.collective"
    )


def parts(pair: ProgramPair) -> list[list[str]]:
    """The texts by which ranks compare a pair of programs: settings and declarations, operators, and all lines."""
    lines, at = str(pair).splitlines(), 1 + len(settings(pair.main)) + len(declarations(pair.main.blocks[0])[0])
    said = f"  origin {quote(pair.main.origin)}"  # a different origin alone is no difference
    return [[line for line in lines[:at] if line != said], operators(pair), lines]


def operators(pair: ProgramPair) -> list[str]:
    return [show_op(op) for program in (pair.startup, pair.main) for block in program.blocks for op in block.oplist]


def difference(of: int, said: Sequence[Sequence[Sequence[str]]]) -> str:
    """The first different line and the first different operator among the programs that the ranks have for rank `of`, from their
    `parts`."""
    heads, ops, lines = (first_difference(texts) for texts in zip(*said, strict=True))
    first, *op = [d for d in (heads, ops) if d] or [lines]
    text = f"the first difference in rank {of}'s is{first}" + "".join(f"\n  the first operator that differs is{one}" for one in op)
    return f"{text}\n  every rank of a launched script must build the same program"


def first_difference(texts: Sequence[Sequence[str]]) -> str:
    """The first lines in which the ranks' texts differ, with the ranks; "" if they are equal."""
    for some in itertools.zip_longest(*texts, fillvalue="(nothing)"):
        if len(found := grouped([line.strip() for line in some])) > 1:
            return "".join(f"\n  rank{'s' * (len(ranks) > 1)} {listed(ranks)}: {line}" for line, ranks in found)
    return ""
