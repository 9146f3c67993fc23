"""Random damage to the programs of some ranks, by what a Program is made of and not by what a strategy means by it.

`draw(rng, mains, startups)` gives a Mutant: changed copies, and one line that says what was changed. The same generator state gives the
same mutant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from fluidx.ir import Program

from .across import exchanged, message, no_message
from .attributes import attribute, everywhere
from .edit import Edit, Programs, changed_copy, equal
from .inserts import insert, there_and_back
from .names import crossed, read, renamed, slots, written
from .operators import cut_short, delete, duplicate, move, other_role, other_type, swap
from .variables import variable
from .wholes import groups, program

# What is changed, and how often.
MAKERS: list[tuple[int, Callable[[Random, Programs, int], Edit | None]]] = [
    (10, delete), (6, duplicate), (6, swap), (12, move), (24, attribute), (10, read), (6, written), (4, slots), (4, other_role),
    (4, other_type), (12, insert), (12, variable), (3, groups), (2, program), (2, renamed), (2, cut_short), (4, everywhere), (5, crossed),
    (2, there_and_back),
]  # fmt: skip


class Mutant(NamedTuple):
    text: str
    kind: str  # the mutators' names
    mains: tuple[Program, ...]
    startups: tuple[Program, ...]


def draw(rng: Random, mains: Programs, startups: Programs) -> Mutant:
    """One mutant; every eighth carries two changes."""
    texts, kinds = [], []
    old = mains, startups
    for _ in range(2 if rng.random() < 0.12 else 1):
        for _ in range(50):
            got = _one(rng, mains, startups)
            if got is not None:
                text, kind, mains, startups = got
                texts.append(text)
                kinds.append(kind)
                break
    if _same(old, (mains, startups)):
        return draw(rng, *old)
    return Mutant("; ".join(texts), "+".join(kinds), tuple(mains), tuple(startups))


def _same(a: tuple[Programs, ...], b: tuple[Programs, ...]) -> bool:
    return all(equal(p, q) for ps, qs in zip(a, b, strict=True) for p, q in zip(ps, qs, strict=True))


def _one(rng: Random, mains: Programs, startups: Programs) -> tuple[str, str, Programs, Programs] | None:
    n = len(mains)
    startup = rng.random() < 0.2
    programs: Programs = startups if startup else mains
    if n > 1 and rng.random() < 0.06:
        way = rng.choices([exchanged, message, no_message], [1, 4, 2])[0]
        return way(rng, mains, startups)
    rank = rng.randrange(n)
    p = rng.random()
    ranks = [rank] if p < 0.45 or n == 1 else list(range(n)) if p < 0.85 else sorted({rank, (rank + rng.randrange(1, n)) % n})
    make = rng.choices([make for _, make in MAKERS], [often for often, _ in MAKERS])[0]
    edit = make(rng, programs, rank)
    if edit is None:
        return None
    both = edit.kind in ("variable", "groups", "everywhere", "program") and rng.random() < 0.4
    hit = {"main": _applied(edit, mains, ranks if both or not startup else []), "startup": []}
    hit["startup"] = _applied(edit, startups, ranks if both or startup else [])
    if not any(hit.values()):
        return None
    told = [f"{name} of {_ranks(n, [r for r, _ in got])}" for name, got in hit.items() if got]
    mains, startups = list(mains), list(startups)
    for programs, got in ((mains, hit["main"]), (startups, hit["startup"])):
        for r, new in got:
            programs[r] = new
    return f"{' and '.join(told)}: {edit.text}", edit.kind, mains, startups


def _applied(edit: Edit, programs: Programs, ranks: Sequence[int]) -> list[tuple[int, Program]]:
    found = []
    for r in ranks:
        copy = changed_copy(programs[r])
        if edit.apply(copy) and not equal(copy, programs[r]):
            found.append((r, copy))
    return found


def _ranks(n: int, hit: Sequence[int]) -> str:
    return "all ranks" if len(hit) == n else f"rank{'s' * (len(hit) > 1)} {', '.join(map(str, hit))}"
