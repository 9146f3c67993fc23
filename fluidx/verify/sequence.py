"""Proof of sequences: do collectives over the groups of some hosts, one behind the other, leave the result of a collective over all ranks?

The proof follows every element of a value on every rank: the ranks whose terms it sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..ir.parts import bounds
from .refusal import Refusal


class _Held(NamedTuple):
    """What a rank holds: elements, in order, and for each the ranks whose terms are in it, as bits."""

    elements: tuple[int, ...]
    terms: tuple[int, ...]


State = list[_Held | None]
Groups = Mapping[str, Sequence[Sequence[int]]]


def prove_sequence(
    collective: str, groups: Groups, stages: Sequence[tuple[str, str, int]], size: int, world_size: int, root: int = 0
) -> Refusal | None:
    """None where the stages, each (collective, group, root), carry out a collective among all ranks on a value of `size` rows; else the
    Refusal that names the stage, or the rank whose result is wrong.

    >>> hosts = {"node": [(0, 1), (2, 3)], "rail": [(0, 2), (1, 3)]}
    >>> prove_sequence("all_reduce", hosts, [("all_reduce", "node", 0), ("all_reduce", "rail", 0)], 5, 4)
    >>> print(prove_sequence("all_reduce", hosts, [("all_reduce", "node", 0)], 5, 4))
    at the end, rank 0 has of element 0 the terms of ranks 0, 1; rank 2's is missing
    """
    if collective not in _STAGES:
        return Refusal(f"there is no collective {collective!r} that a sequence carries out; there are: {', '.join(_STAGES)}")
    state = _begin(collective, world_size, size, root)
    try:
        for k, (type_, group, at) in enumerate(stages):
            state = _after(state, type_, group, groups, at, f"stage {k + 1}, {type_} over {group}")
        _finish(collective, state, size, root)
    except Refusal as e:
        return e
    return None


def _begin(collective: str, n: int, size: int, root: int) -> State:
    whole, marks = tuple(range(size)), bounds(size, n)
    if collective == "broadcast":
        return [_Held(whole, (1 << root,) * size) if rank == root else None for rank in range(n)]
    if collective == "all_gather":
        return [_Held(part := whole[marks[k] : marks[k + 1]], (1 << k,) * len(part)) for k in range(n)]
    return [_Held(whole, (1 << rank,) * size) for rank in range(n)]


def _finish(collective: str, state: State, size: int, root: int) -> None:
    n, whole = len(state), tuple(range(size))
    marks = bounds(size, n)
    owner = [next(k for k in range(n) if marks[k] <= e < marks[k + 1]) for e in whole]
    for rank, held in enumerate(state):
        if collective == "reduce" and rank != root:
            continue
        due = whole[marks[rank] : marks[rank + 1]] if collective == "reduce_scatter" else whole
        if held is None or held.elements != due:
            found = "nothing" if held is None else _range(held.elements)
            raise Refusal(f"at the end, rank {rank} has {found}, and must have {_range(due)}")
        for e, terms in zip(held.elements, held.terms, strict=True):
            wanted = 1 << root if collective == "broadcast" else 1 << owner[e] if collective == "all_gather" else (1 << n) - 1
            if terms != wanted:
                missing = _ranks(wanted & ~terms)
                lacks = f"; rank {missing[0]}'s is missing" if missing else ""
                raise Refusal(f"at the end, rank {rank} has of element {e} {_said(terms)}{lacks}")


def _after(state: State, type_: str, group: str, groups: Groups, root: int, label: str) -> State:
    if type_ not in _STAGES:
        raise Refusal(f"{label}: there is no such collective; there are: {', '.join(_STAGES)}")
    if group not in groups:
        raise Refusal(f"{label}: there is no such group; there are: {', '.join(groups)}")
    out: State = list(state)
    for members in groups[group]:
        held = [state[r] for r in members]
        if all(h is None for h in held):  # as on the rails of ranks that are no roots
            continue
        if not 0 <= root < len(members):
            raise Refusal(f"{label}: root {root} is no index into a group of {len(members)} ranks")
        for r, h in zip(members, _STAGES[type_](held, members, root, label), strict=True):
            out[r] = h
    return out


def _sum(held: Sequence[_Held | None], members: Sequence[int], label: str) -> _Held:
    """What the terms of a group add up to."""
    first = held[0]
    for r, h in zip(members, held, strict=True):
        if first is None or h is None or h.elements != first.elements:
            had = [f"rank {m} has {'nothing' if x is None else _range(x.elements)}" for m, x in ((members[0], first), (r, h))]
            raise Refusal(f"{label}: {' and '.join(had)}")
    assert first is not None
    terms = [0] * len(first.elements)
    for r, h in zip(members, held, strict=True):
        assert h is not None
        for k, new in enumerate(h.terms):
            if terms[k] & new:
                twice = _ranks(terms[k] & new)[0]
                raise Refusal(f"{label}: element {first.elements[k]} gets the term of rank {twice} a second time, from rank {r}")
            terms[k] |= new
    return _Held(first.elements, tuple(terms))


def _all_reduce(held: Sequence[_Held | None], members: Sequence[int], root: int, label: str) -> State:
    return [_sum(held, members, label)] * len(members)


def _reduce(held: Sequence[_Held | None], members: Sequence[int], root: int, label: str) -> State:
    total = _sum(held, members, label)
    return [total if k == root else None for k in range(len(members))]


def _reduce_scatter(held: Sequence[_Held | None], members: Sequence[int], root: int, label: str) -> State:
    elements, terms = _sum(held, members, label)
    marks = bounds(len(elements), len(members))
    return [_Held(elements[a:b], terms[a:b]) for a, b in zip(marks, marks[1:], strict=False)]


def _broadcast(held: Sequence[_Held | None], members: Sequence[int], root: int, label: str) -> State:
    if held[root] is None:
        raise Refusal(f"{label}: its root, rank {members[root]}, has nothing")
    return [held[root]] * len(members)


def _all_gather(held: Sequence[_Held | None], members: Sequence[int], root: int, label: str) -> State:
    parts = [h for h in held if h is not None]
    if len(parts) < len(members):
        raise Refusal(f"{label}: rank {members[held.index(None)]} has nothing")
    sizes, marks = [len(p.elements) for p in parts], bounds(sum(len(p.elements) for p in parts), len(parts))
    if sizes != [b - a for a, b in zip(marks, marks[1:], strict=False)]:
        raise Refusal(f"{label}: ranks {_listed(members)} have {_listed(sizes)} elements, which are no parts of an even cut")
    whole = _Held(tuple(e for p in parts for e in p.elements), tuple(t for p in parts for t in p.terms))
    return [whole] * len(members)


_STAGES: dict[str, Callable[[Sequence[_Held | None], Sequence[int], int, str], State]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}


def _ranks(bits: int) -> list[int]:
    return [k for k in range(bits.bit_length()) if bits >> k & 1]


def _said(bits: int) -> str:
    ranks = _ranks(bits)
    return f"the term{'s' * (len(ranks) > 1)} of rank{'s' * (len(ranks) > 1)} {_listed(ranks)}"


def _listed(found: Sequence[int]) -> str:
    return ", ".join(map(str, found))


def _range(elements: Sequence[int]) -> str:
    if not elements:
        return "no elements"
    if [*elements] == [*range(elements[0], elements[-1] + 1)]:
        return f"elements {elements[0]} to {elements[-1]}"
    return f"elements {_listed(elements)}"
